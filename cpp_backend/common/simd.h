// What the compiler has to be told for loops to fill the processor's vector registers.
#pragma once

// A function compiled for several widths of registers; the loader takes the widest that the
// processor has. All give the same bits: they only add, multiply, divide and take roots. Clang
// cannot do it together with inlining all calls, and has one width.
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TAGI_DDP_WIDE __attribute__((target_clones("avx512f", "avx2", "default"), flatten))
#else
#define TAGI_DDP_WIDE
#endif

// A loop whose arrays are either the same one or do not overlap.
#if defined(__clang__)
#define TAGI_DDP_SAME_OR_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define TAGI_DDP_SAME_OR_APART _Pragma("GCC ivdep")
#endif
