// Element types and reductions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tagi_ddp {

enum class DType : uint32_t { f16, bf16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64 };

enum class ReduceOp : uint32_t { sum, mean, min, max };

constexpr size_t size_of(DType dtype) {
    constexpr size_t sizes[] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
    return sizes[static_cast<uint32_t>(dtype)];
}

constexpr bool is_float(DType dtype) { return dtype <= DType::f64; }

constexpr const char* name_of(DType dtype) {
    constexpr const char* names[] = {"float16", "bfloat16", "float32", "float64",
                                     "int8",    "int16",    "int32",   "int64",
                                     "uint8",   "uint16",   "uint32",  "uint64"};
    return names[static_cast<uint32_t>(dtype)];
}

constexpr const char* name_of(ReduceOp op) {
    constexpr const char* names[] = {"sum", "mean", "min", "max"};
    return names[static_cast<uint32_t>(op)];
}

}  // namespace tagi_ddp
