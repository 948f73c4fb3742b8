#include "update/sharded.h"

#include "update/apply.h"

namespace tagi_ddp {

void apply_shard(const Parameters& parameters, Shard shard, float* gaussians, float divisor,
                 float cap) {
    reset_counters(parameters);
    const float* const slot = gaussians;
    apply_range(parameters, shard.begin, shard.count, &slot, 1, shard.count, divisor, cap,
                gaussians);
}

void take_shard(const Parameters& parameters, Shard shard, const float* gaussians) {
    take_range(parameters, shard.begin, shard.count, gaussians, shard.count);
}

Agreement step_by_shards(ShmCommunicator& communicator, const Parameters& parameters, float* bucket,
                         const Contribution& contribution, bool average, double timeout) {
    const size_t size = parameters.size();
    const int ranks = communicator.size();
    const int me = communicator.rank();
    const Signature signature = step_signature(size, average, contribution);

    Agreement agreement{{}};
    std::vector<Contribution> contributions;
    InPlaceExchange plan{"step", signature, {bucket, 2 * size, DType::f32}};
    plan.agree = [&](const std::vector<Signature>& all) {
        contributions = contributions_of(all);
        agreement = Agreement(contributions);
        return agreement.applies();
    };
    const auto gaussians = [&](std::byte* part) { return reinterpret_cast<float*>(part); };
    plan.phases.emplace_back([&](const std::vector<std::byte*>& parts) {
        const Shard own = shard_of(size, sizeof(float), me, ranks);
        std::vector<const float*> slots;
        for (size_t r = 0; r < parts.size(); ++r) {
            const bool has_deltas = contributions[r].batch > 0;
            slots.push_back(has_deltas ? gaussians(parts[r]) + own.begin : nullptr);
        }
        reset_counters(parameters);
        // Nobody else reads this rank's shard of this rank's bucket: it takes the posterior.
        apply_range(parameters, own.begin, own.count, slots.data(), ranks, size,
                    agreement.divisor(average), agreement.cap(average), bucket + own.begin);
    });
    plan.phases.emplace_back([&](const std::vector<std::byte*>& parts) {
        for (int r = 0; r < ranks; ++r) {
            if (r == me) continue;
            const Shard shard = shard_of(size, sizeof(float), r, ranks);
            const float* posterior = gaussians(parts[static_cast<size_t>(r)]) + shard.begin;
            take_range(parameters, shard.begin, shard.count, posterior, size);
        }
    });
    communicator.exchange(plan, timeout);
    return agreement;
}

}  // namespace tagi_ddp
