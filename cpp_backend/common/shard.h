// The parts of a flat sequence that the ranks work on, each on its own.
#pragma once

#include <algorithm>
#include <cstddef>

namespace tagi_ddp {

// The flat range [begin, begin + count).
struct Shard {
    size_t begin;
    size_t count;
};

// The part of `count` elements of `element` bytes that is rank `rank`'s. Parts begin on cache
// lines, so that no two ranks write to one.
inline Shard shard_of(size_t count, size_t element, int rank, int ranks) {
    const size_t unit = 64 / element;
    const size_t units = (count + unit - 1) / unit;
    const auto bound = [&](int r) {
        return std::min(count, units * static_cast<size_t>(r) / static_cast<size_t>(ranks) * unit);
    };
    return {bound(rank), bound(rank + 1) - bound(rank)};
}

}  // namespace tagi_ddp
