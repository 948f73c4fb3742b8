// Compiles the loops in the file TAGI_DDP_LOOPS twice: for any processor, and for AVX2 and FMA,
// which multiply matrices five times as fast. (With target_clones the compiler would split vectors
// before it selects the wider registers.) TAGI_DDP_PICK(function) is the one for this processor.
// Their results differ in the last bits, as those of any two matrix products do.
//
// Include this file once in a source file, after all that the loops need.

#include <cstdint>
#include <cstring>

#include "compute/memory.h"

#define TAGI_DDP_INLINE static inline __attribute__((always_inline))

namespace tagi_ddp::any_processor {
#include "compute/vectors.h"
#include TAGI_DDP_LOOPS
}  // namespace tagi_ddp::any_processor

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace tagi_ddp::with_avx2 {
#include "compute/vectors.h"
#include TAGI_DDP_LOOPS
}  // namespace tagi_ddp::with_avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
namespace tagi_ddp {
static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#define TAGI_DDP_PICK(function) \
    (::tagi_ddp::has_avx2 ? with_avx2::function : any_processor::function)
#else
#define TAGI_DDP_PICK(function) any_processor::function
#endif
