// Reductions over the ranks' inputs in rank order, rounded to the element type after each step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace stand_in {

enum ReduceOp { sum = 0, prod = 1, max = 2, min = 3, avg = 4 };

struct Float16 {
    _Float16 value;
    explicit Float16(float wide) : value(static_cast<_Float16>(wide)) {}
    Float16() = default;
    operator float() const { return static_cast<float>(value); }
};

// The upper half of a float32.
struct BFloat16 {
    uint16_t bits;
    BFloat16() = default;
    explicit BFloat16(float wide) {
        uint32_t word;
        std::memcpy(&word, &wide, sizeof word);
        // To the nearest, ties to even; rounding could turn a NaN into an infinity.
        word = wide != wide ? word | 0x400000u : word + 0x7fffu + (word >> 16 & 1);
        bits = static_cast<uint16_t>(word >> 16);
    }
    operator float() const {
        const uint32_t word = uint32_t{bits} << 16;
        float wide;
        std::memcpy(&wide, &word, sizeof wide);
        return wide;
    }
};

// What a T is computed in. Integers wrap, so their sums are those of unsigned ones.
template <typename T>
using Wide = std::conditional_t<std::is_integral_v<T>,
                                std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                std::conditional_t<std::is_same_v<T, double>, double, float>>;

template <typename W>
W combine(int op, W a, W b) {
    using Sum = std::conditional_t<std::is_integral_v<W>, uint64_t, W>;
    // A NaN stays, wherever it comes from.
    if (op == max) return a != a ? a : b != b ? b : a < b ? b : a;
    if (op == min) return a != a ? a : b != b ? b : b < a ? b : a;
    if (op == prod) return static_cast<W>(static_cast<Sum>(a) * static_cast<Sum>(b));
    return static_cast<W>(static_cast<Sum>(a) + static_cast<Sum>(b));
}

template <typename T>
void reduce_as(int op, const std::vector<const std::byte*>& inputs, std::byte* out, size_t count) {
    using W = Wide<T>;
    const auto load = [](const std::byte* from, size_t i) {
        T value;
        std::memcpy(&value, from + i * sizeof(T), sizeof(T));
        return value;
    };
    for (size_t i = 0; i < count; ++i) {
        T total = load(inputs[0], i);
        for (size_t rank = 1; rank < inputs.size(); ++rank) {
            total = T(combine<W>(op, W(total), W(load(inputs[rank], i))));
        }
        if (op == avg) total = T(W(total) * (W(1) / W(inputs.size())));
        std::memcpy(out + i * sizeof(T), &total, sizeof(T));
    }
}

// `out` may be one of the inputs.
inline void reduce(int dtype, int op, const std::vector<const std::byte*>& inputs, std::byte* out,
                   size_t count) {
    switch (dtype) {
        case 0:
            return reduce_as<int8_t>(op, inputs, out, count);
        case 1:
            return reduce_as<uint8_t>(op, inputs, out, count);
        case 2:
            return reduce_as<int32_t>(op, inputs, out, count);
        case 3:
            return reduce_as<uint32_t>(op, inputs, out, count);
        case 4:
            return reduce_as<int64_t>(op, inputs, out, count);
        case 5:
            return reduce_as<uint64_t>(op, inputs, out, count);
        case 6:
            return reduce_as<Float16>(op, inputs, out, count);
        case 7:
            return reduce_as<float>(op, inputs, out, count);
        case 8:
            return reduce_as<double>(op, inputs, out, count);
        case 9:
            return reduce_as<BFloat16>(op, inputs, out, count);
    }
}

// Bytes of an element; 0 if there is no such type.
inline size_t size_of(int dtype) {
    static constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return dtype < 0 || dtype > 9 ? 0 : sizes[dtype];
}

inline bool is_float(int dtype) { return dtype >= 6; }

}  // namespace stand_in
