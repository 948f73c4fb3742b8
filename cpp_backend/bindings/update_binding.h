// The Python face of the step: what happens to deltas between backward and the new posterior.
#pragma once

#include <nanobind/nanobind.h>

namespace tagi_ddp {

// Adds the rules of a step, Contribution, Agreement and the steps over shared memory to the module.
void bind_update(nanobind::module_& module);

}  // namespace tagi_ddp
