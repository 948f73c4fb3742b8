// The Python face of compute/: forward, output update and backward of small networks.
#pragma once

#include <nanobind/nanobind.h>

namespace tagi_ddp {

// Adds Network to the module.
void bind_compute(nanobind::module_& module);

}  // namespace tagi_ddp
