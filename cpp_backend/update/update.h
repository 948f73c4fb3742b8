// The step from the ranks' deltas to the new posterior: pack, reduce, cap, apply.
#pragma once

#include <cstddef>
#include <string>

#include "shm/shm_communicator.h"
#include "update/agreement.h"
#include "update/pace.h"
#include "update/parameters.h"

namespace tagi_ddp {

// Writes the deltas of a range to `bucket`: [means | variances], `stride` floats apart.
void pack(const Parameters& parameters, Shard range, float* bucket, size_t stride);
// Caps and applies the bucket's deltas, divided by `divisor`, as those of `batch` samples.
void apply(const Parameters& parameters, const float* bucket, float divisor, int64_t batch);
// Caps and applies the sums of deltas in `gaussians`, [means | variances] of a range, divided by
// `divisor`, and replaces them by the posterior, which `take_range` copies on the other ranks.
void apply_shard(const Parameters& parameters, Shard range, float* gaussians, float divisor,
                 int64_t batch);
// Caps and applies the deltas in the layers, of `batch` samples: the step of one rank alone. The
// cap factors are multiplied by `times`. If a delta is NaN or infinite, applies nothing and returns
// the name of its layer; else returns "".
std::string apply_own(const Parameters& parameters, int64_t batch, float times = 1.0f);

// The result of a step of all ranks.
struct Step {
    Agreement agreement{{}};
    std::string culprit;  // this rank's first layer with a delta that is NaN or infinite, or ""
};

// One step of the ranks of a host, in one collective: agree, reduce, cap and apply. Each rank
// applies its shard of the parameters, and copies the others' shards. If a delta of any rank is NaN
// or infinite, nothing is applied. `batch` samples are behind this rank's deltas; 0: it has none.
//
// `bucket` is memory that the communicator has allocated, [means | variances], and is overwritten.
// Deltas that are elsewhere are packed into it first.
Step step(ShmCommunicator& communicator, const Parameters& parameters, float* bucket, int64_t batch,
          bool finished, bool average, Pace& pace, double timeout);

}  // namespace tagi_ddp
