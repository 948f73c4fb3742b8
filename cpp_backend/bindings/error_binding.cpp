#include "bindings/error_binding.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "common/errors.h"

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

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

void bind_errors() { nb::register_exception_translator(translate_error); }

}  // namespace tagi_ddp
