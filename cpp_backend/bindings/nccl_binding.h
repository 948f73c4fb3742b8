// The Python face of NCCL and of what it needs of CUDA; tagi_ddp.communicators.nccl puts them to
// use.
#pragma once

#include <nanobind/nanobind.h>

namespace tagi_ddp {

// Adds Cuda, Device, Nccl, NcclRank and NcclOperation to the module.
void bind_nccl(nanobind::module_& module);

}  // namespace tagi_ddp
