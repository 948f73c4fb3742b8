// Rows of floats whose memory is reused from step to step.
#pragma once

#include <cstddef>
#include <vector>

namespace tagi_ddp {

constexpr size_t lanes = 8;  // floats in a vector register of 32 bytes

// The stride of rows that begin at a multiple of a vector.
constexpr size_t padded(size_t width) { return (width + lanes - 1) / lanes * lanes; }

// Floats that are zero at first, and later have the values of an earlier step. Never shrinks.
class Memory {
 public:
    float* take(size_t floats) {
        const size_t needed = (floats + line_floats - 1) / line_floats;
        if (needed > lines_.size()) lines_.assign(needed, Line{});
        return data();
    }

    float* data() { return lines_.empty() ? nullptr : lines_[0].values; }
    const float* data() const { return lines_.empty() ? nullptr : lines_[0].values; }

 private:
    static constexpr size_t line_floats = 16;
    struct alignas(64) Line {
        float values[line_floats];
    };
    std::vector<Line> lines_;
};

}  // namespace tagi_ddp
