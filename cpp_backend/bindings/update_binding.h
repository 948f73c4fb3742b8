// Steps, merges and compression for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "bindings/shm_binding.h"
#include "update/parameters.h"
#include "update/update.h"

namespace tagi_ddp {

// The step of a replica whose ranks share memory; all it refers to must outlive it.
class SharedStep {
 public:
    SharedStep(PyShmCommunicator& communicator, const Parameters& parameters, float* bucket,
               bool average)
        : communicator_(communicator),
          parameters_(parameters),
          bucket_(bucket),
          average_(average) {}

    // Needs the interpreter lock, and gives it up meanwhile.
    Step operator()(int64_t batch, bool finished) const;

 private:
    PyShmCommunicator& communicator_;
    const Parameters& parameters_;
    float* bucket_;
    bool average_;
};

// Adds the agreement of ranks, the step, compression and shards to the module.
void bind_update(nanobind::module_& module);

}  // namespace tagi_ddp
