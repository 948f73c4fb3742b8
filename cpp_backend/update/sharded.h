// The step with its work shared: each rank caps and applies the deltas of its own part of the
// parameters, and all take the results. The same bits as the step of `update.h`.
#pragma once

#include "common/shard.h"
#include "shm/shm_communicator.h"
#include "update/agreement.h"
#include "update/parameters.h"

namespace tagi_ddp {

// Caps and applies the sums of deltas in `gaussians`, [means | variances] of the shard, and
// replaces them by the posterior, as `take_shard` takes it on the other ranks.
void apply_shard(const Parameters& parameters, Shard shard, float* gaussians, float divisor,
                 float cap);
void take_shard(const Parameters& parameters, Shard shard, const float* gaussians);

// `step` with a bucket, [means | variances]; its deltas are lost.
Agreement step_by_shards(ShmCommunicator& communicator, const Parameters& parameters, float* bucket,
                         const Contribution& contribution, bool average, double timeout);

}  // namespace tagi_ddp
