// A stand-in for the C++ bindings of Open MPI 4, libmpi_cxx.so.40, which Open MPI 5 dropped: just
// what the engine is linked to. The engine itself calls none of it.

namespace MPI {

class Comm {
 public:
    Comm();
};

class Datatype {
 public:
    void Free();
};

class Win {
 public:
    void Free();
};

Comm::Comm() {}
void Datatype::Free() {}
void Win::Free() {}

}  // namespace MPI

extern "C" {

void ompi_mpi_cxx_op_intercept() {}
void ompi_op_set_cxx_callback() {}

}  // extern "C"
