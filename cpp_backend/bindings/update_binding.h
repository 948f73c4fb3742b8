// The step of the ranks of a host, for Python.
#pragma once

#include <cstdint>

#include "bindings/arguments.h"
#include "bindings/shm_binding.h"
#include "update/parameters.h"
#include "update/update.h"

namespace tagi_ddp {

// Returns the memory of [means | variances] of all parameters. Throws ValueError for another size.
float* checked(const Parameters& parameters, const Floats& bucket);

// The step of the ranks of a host; its members must outlive it.
struct SharedStep {
    // Called with the interpreter lock, which it releases for the step.
    Step operator()(int64_t batch, bool finished) const;

    PyShmCommunicator& communicator;
    const Parameters& parameters;
    float* bucket;
    bool average;
    Pace& pace;
};

}  // namespace tagi_ddp
