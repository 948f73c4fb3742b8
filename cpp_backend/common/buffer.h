// Contiguous memory, and its division among the ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "common/dtype.h"

namespace tagi_ddp {

// The memory that an operation reads or writes.
struct Buffer {
    void* data = nullptr;
    size_t count = 0;  // number of elements
    DType dtype = DType::u8;

    size_t bytes() const { return count * size_of(dtype); }
    std::byte* byte_data() const { return static_cast<std::byte*>(data); }
};

inline size_t total(const std::vector<size_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), size_t{0});
}

// The flat range [begin, begin + count).
struct Shard {
    size_t begin;
    size_t count;
};

// Returns the part of rank `rank` in `count` elements of `element` bytes. Parts begin on cache
// lines, so no two ranks write to the same one.
inline Shard shard_of(size_t count, size_t element, int rank, int ranks) {
    const size_t unit = 64 / element;
    const size_t units = (count + unit - 1) / unit;
    const auto bound = [&](int r) {
        return std::min(count, units * static_cast<size_t>(r) / static_cast<size_t>(ranks) * unit);
    };
    return {bound(rank), bound(rank + 1) - bound(rank)};
}

}  // namespace tagi_ddp
