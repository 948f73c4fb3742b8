// The Python module tagi_ddp._backend.

#include <nanobind/nanobind.h>

#include "bindings/compute_binding.h"
#include "bindings/engine_binding.h"
#include "bindings/error_binding.h"
#include "bindings/nccl_binding.h"
#include "bindings/parameters_binding.h"
#include "bindings/shm_binding.h"
#include "bindings/update_binding.h"

NB_MODULE(_backend, module) {
    // The traceback of a last error outlives the interpreter's end.
    nanobind::set_leak_warnings(false);
    tagi_ddp::bind_errors();
    tagi_ddp::bind_shm(module);
    tagi_ddp::bind_nccl(module);
    tagi_ddp::bind_engine(module);
    tagi_ddp::bind_parameters(module);
    tagi_ddp::bind_update(module);
    tagi_ddp::bind_compute(module);
}
