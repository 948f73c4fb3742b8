// Attributes and pragmas with which the compiler vectorizes loops.
#pragma once

// Compiles a function for several register widths; the loader picks the widest that the processor
// has. All give the same bits, because such functions only add, multiply, divide and take roots.
// Clang cannot combine target_clones with flatten, so it compiles one width.
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TAGI_DDP_WIDE __attribute__((target_clones("avx512f", "avx2", "default"), flatten))
#else
#define TAGI_DDP_WIDE
#endif

// Marks a loop whose arrays are either identical or disjoint.
#if defined(__clang__)
#define TAGI_DDP_SAME_OR_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define TAGI_DDP_SAME_OR_APART _Pragma("GCC ivdep")
#endif
