// The parts of the Python module tagi_ddp._backend.
#pragma once

#include <nanobind/nanobind.h>

namespace tagi_ddp {

void bind_shm(nanobind::module_& module);         // ShmCommunicator and Work
void bind_nccl(nanobind::module_& module);        // NCCL, and the parts of CUDA that it needs
void bind_engine(nanobind::module_& module);      // views of the engine's memory
void bind_parameters(nanobind::module_& module);  // a replica's parameters and running statistics
void bind_update(nanobind::module_& module);      // the step, compression and shards
void bind_compute(nanobind::module_& module);     // forward, output update and backward

}  // namespace tagi_ddp
