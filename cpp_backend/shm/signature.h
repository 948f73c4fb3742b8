// What ranks tell each other when they begin an operation.
#pragma once

#include <cstdint>

namespace tagi_ddp {

enum class Kind : uint32_t {
    none,
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    barrier,
    split,
    allocate,
    step,
};

// What a rank is about to do; must be the same on all ranks but for `words`. `purpose` is what its
// caller does it for.
struct Signature {
    Kind kind = Kind::none;
    uint32_t dtype = 0;
    uint32_t op = 0;
    uint32_t root = 0;
    uint64_t count = 0;
    uint64_t detail = 0;
    uint64_t purpose = 0;
    int64_t words[4] = {0, 0, 0, 0};

    bool fits(const Signature& other) const {
        return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root &&
               count == other.count && detail == other.detail && purpose == other.purpose;
    }
};

}  // namespace tagi_ddp
