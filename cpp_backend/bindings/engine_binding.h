// The Python face of the engine's memory: views of its layers.
#pragma once

#include <nanobind/nanobind.h>

namespace tagi_ddp {

// Adds EngineLayer and the functions that look at verified addresses to the module.
void bind_engine(nanobind::module_& module);

}  // namespace tagi_ddp
