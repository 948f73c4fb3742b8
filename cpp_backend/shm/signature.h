// The description of a call, which the ranks compare when they begin an operation.
#pragma once

#include <cstdint>

#include "common/dtype.h"

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
    step
};

// A call of one rank, equal on all ranks except `values`, which each rank sends to the others.
// `purpose` is a hash of the caller's reason for the call.
struct Signature {
    Kind kind = Kind::none;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    uint32_t root = 0;
    uint64_t count = 0;
    uint64_t detail = 0;
    uint64_t purpose = 0;
    int64_t values[4] = {0, 0, 0, 0};

    bool fits(const Signature& other) const {
        return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root &&
               count == other.count && detail == other.detail && purpose == other.purpose;
    }
};

}  // namespace tagi_ddp
