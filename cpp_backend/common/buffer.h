// Flat memory that an operation reads or writes.
#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "common/dtype.h"

namespace tagi_ddp {

struct Buffer {
    void* data = nullptr;
    size_t count = 0;  // of elements
    DType dtype = DType::u8;

    size_t bytes() const { return count * size_of(dtype); }
    std::byte* byte_data() const { return static_cast<std::byte*>(data); }
};

inline size_t total(const std::vector<size_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), size_t{0});
}

}  // namespace tagi_ddp
