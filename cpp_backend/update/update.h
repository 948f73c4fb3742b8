// From the deltas of the ranks to the new posterior: pack, reduce, cap, apply.
#pragma once

#include <cstddef>
#include <string>

#include "shm/shm_communicator.h"
#include "update/agreement.h"
#include "update/parameters.h"

namespace tagi_ddp {

// Writes the deltas of the flat range [begin, begin + length) to bucket: [means | variances],
// `stride` floats apart.
void pack(const Parameters& parameters, size_t begin, size_t length, float* bucket, size_t stride);
// Caps and applies the bucket's deltas, divided by `divisor`.
void apply(const Parameters& parameters, const float* bucket, float divisor, float cap);
// Caps and applies the deltas where they are: the step of one rank alone. If one is NaN or infinite
// nothing is applied; returns the name of its layer, else nothing.
std::string apply_own(const Parameters& parameters, float cap);

// The result of a step of all ranks.
struct Step {
    Agreement agreement{{}};
    std::string culprit;  // the first layer of this rank with a delta that is NaN or infinite
};

// One step of the ranks of a host, in one collective: vote, check, reduce, cap and apply. Nothing
// is applied if a delta of any rank is NaN or infinite. `batch` samples are behind the deltas, 0:
// this rank has none. Each rank applies its shard of the parameters, and copies the other shards.
//
// `bucket` is memory that the communicator has allocated, [means | variances]; its contents are
// lost. Deltas that lie elsewhere are packed into it before.
Step step(ShmCommunicator& communicator, const Parameters& parameters, float* bucket, int64_t batch,
          bool finished, bool average, double timeout);

}  // namespace tagi_ddp
