// The Python face of a replica's parameters and running statistics.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/arguments.h"
#include "update/parameters.h"

namespace tagi_ddp {

// The memory of [means | variances] of all parameters. Throws ValueError if it is of another size.
float* checked(const Parameters& parameters, const Floats& bucket);

// Adds Parameters and RunningStatistics to the module.
void bind_parameters(nanobind::module_& module);

}  // namespace tagi_ddp
