#include "shm/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/simd.h"

namespace tagi_ddp {
namespace {

// The 16-bit floats, which are only stored and converted.
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float load(Half half) {
    const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
    const uint32_t exponent = (half.bits >> 10) & 0x1fu;
    const uint32_t mantissa = half.bits & 0x3ffu;
    if (exponent == 0x1f) return as_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return as_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

// Round to nearest even.
void store(float value, Half& half) {
    const uint32_t bits = as_bits(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
        result = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // overflows to infinity
        result = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {
        const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
        result = (rounded - 0x38000000u) >> 13;
    } else {
        // Adding 0.5 aligns the last bit of the subnormal with the last bit of the sum's mantissa.
        result = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    }
    half.bits = static_cast<uint16_t>(sign | result);
}

float load(BFloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }

void store(float value, BFloat16& result) {
    const uint32_t bits = as_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        result.bits = static_cast<uint16_t>((bits >> 16) | 0x40u);  // stays a NaN
    } else {
        result.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
}

template <typename T>
T load(T value) {
    return value;
}
template <typename T>
void store(T value, T& result) {
    result = value;
}

template <typename T>
using Accumulator = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

struct Sum {
    template <typename A>
    A operator()(A a, A b) const {
        if constexpr (std::is_integral_v<A>) {
            using U = std::make_unsigned_t<A>;  // signed overflow wraps, as in numpy
            return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
        } else {
            return a + b;
        }
    }
};
// A NaN on any rank is kept, as numpy.minimum and numpy.maximum do.
struct Min {
    template <typename A>
    A operator()(A a, A b) const {
        return (b < a || b != b) ? b : a;
    }
};
struct Max {
    template <typename A>
    A operator()(A a, A b) const {
        return (b > a || b != b) ? b : a;
    }
};

template <typename T, typename Op>
void reduce_typed(const std::byte* const* sources, int num_sources, std::byte* dst, size_t count,
                  bool mean) {
    using A = Accumulator<T>;
    constexpr size_t block = 1024;
    T* out = reinterpret_cast<T*>(dst);
    if constexpr (std::is_same_v<A, T>) {
        if (num_sources == 2 && !mean) {
            const T* a = reinterpret_cast<const T*>(sources[0]);
            const T* b = reinterpret_cast<const T*>(sources[1]);
            TAGI_DDP_SAME_OR_APART
            for (size_t i = 0; i < count; ++i) out[i] = Op()(a[i], b[i]);
            return;
        }
    }
    A sum[block];
    for (size_t begin = 0; begin < count; begin += block) {
        const size_t n = std::min(block, count - begin);
        const T* first = reinterpret_cast<const T*>(sources[0]) + begin;
        for (size_t i = 0; i < n; ++i) sum[i] = load(first[i]);
        for (int r = 1; r < num_sources; ++r) {
            const T* next = reinterpret_cast<const T*>(sources[r]) + begin;
            for (size_t i = 0; i < n; ++i) sum[i] = Op()(sum[i], static_cast<A>(load(next[i])));
        }
        if (mean) {
            for (size_t i = 0; i < n; ++i)
                sum[i] = static_cast<A>(sum[i] / static_cast<A>(num_sources));
        }
        for (size_t i = 0; i < n; ++i) store(sum[i], out[begin + i]);
    }
}

template <typename T>
void reduce_with(ReduceOp op, const std::byte* const* sources, int num_sources, std::byte* dst,
                 size_t count) {
    switch (op) {
        case ReduceOp::min:
            return reduce_typed<T, Min>(sources, num_sources, dst, count, false);
        case ReduceOp::max:
            return reduce_typed<T, Max>(sources, num_sources, dst, count, false);
        default:
            return reduce_typed<T, Sum>(sources, num_sources, dst, count, op == ReduceOp::mean);
    }
}

}  // namespace

TAGI_DDP_WIDE
void reduce(DType dtype, ReduceOp op, const std::byte* const* sources, int num_sources,
            std::byte* dst, size_t count) {
    switch (dtype) {
        case DType::f16:
            return reduce_with<Half>(op, sources, num_sources, dst, count);
        case DType::bf16:
            return reduce_with<BFloat16>(op, sources, num_sources, dst, count);
        case DType::f32:
            return reduce_with<float>(op, sources, num_sources, dst, count);
        case DType::f64:
            return reduce_with<double>(op, sources, num_sources, dst, count);
        case DType::i8:
            return reduce_with<int8_t>(op, sources, num_sources, dst, count);
        case DType::i16:
            return reduce_with<int16_t>(op, sources, num_sources, dst, count);
        case DType::i32:
            return reduce_with<int32_t>(op, sources, num_sources, dst, count);
        case DType::i64:
            return reduce_with<int64_t>(op, sources, num_sources, dst, count);
        case DType::u8:
            return reduce_with<uint8_t>(op, sources, num_sources, dst, count);
        case DType::u16:
            return reduce_with<uint16_t>(op, sources, num_sources, dst, count);
        case DType::u32:
            return reduce_with<uint32_t>(op, sources, num_sources, dst, count);
        case DType::u64:
            return reduce_with<uint64_t>(op, sources, num_sources, dst, count);
    }
}

}  // namespace tagi_ddp
