// Elementwise reductions over the ranks' blocks, in rank order: all ranks get the same bits.
#pragma once

#include <cstddef>

#include "common/dtype.h"

namespace tagi_ddp {

// dst[i] = op over r of sources[r][i]. 16-bit floats accumulate in float32, other types in their
// own. `dst` may be one of the sources.
void reduce(DType dtype, ReduceOp op, const std::byte* const* sources, int num_sources,
            std::byte* dst, size_t count);

}  // namespace tagi_ddp
