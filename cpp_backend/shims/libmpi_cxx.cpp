// A stand-in for libmpi_cxx.so.40, the C++ bindings of Open MPI 4, which Open MPI 5 dropped: the
// symbols that the engine is linked to, but does not call.

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
