// The Python module tagi_ddp._backend.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "common/errors.h"

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

// Raises a CommunicatorError as the class of tagi_ddp.communicators.errors that its kind names.
void translate_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const CommunicatorError& error) {
        const char* const names[] = {"CommunicatorError", "Timeout", "PeerLost", "Mismatch",
                                     "BackendUnavailable"};
        const nb::object type = nb::module_::import_("tagi_ddp.communicators.errors")
                                    .attr(names[static_cast<int>(error.kind())]);
        const nb::object instance = type(error.what(), nb::cast(error.ranks()));
        PyErr_SetObject(type.ptr(), instance.ptr());
    }
}

}  // namespace
}  // namespace tagi_ddp

NB_MODULE(_backend, module) {
    // The traceback of a last error outlives the interpreter.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(tagi_ddp::translate_error);
    tagi_ddp::bind_shm(module);
    tagi_ddp::bind_nccl(module);
    tagi_ddp::bind_engine(module);
    tagi_ddp::bind_parameters(module);
    tagi_ddp::bind_update(module);
    tagi_ddp::bind_compute(module);
}
