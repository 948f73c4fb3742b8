#include "update/update.h"

#include <cstring>
#include <vector>

#include "update/apply.h"

namespace tagi_ddp {

void pack(const Parameters& parameters, Shard range, float* bucket, size_t stride) {
    parameters.visit(range, [&](const Block& block, size_t first, size_t count, size_t at) {
        std::memcpy(bucket + at, block.delta_mu + first, count * sizeof(float));
        std::memcpy(bucket + stride + at, block.delta_var + first, count * sizeof(float));
    });
}

void apply(const Parameters& parameters, const float* bucket, float divisor, int64_t batch) {
    const size_t size = parameters.size();
    reset_counters(parameters);
    apply_range(parameters, {0, size}, &bucket, 1, size, divisor, batch);
}

void apply_shard(const Parameters& parameters, Shard range, float* gaussians, float divisor,
                 int64_t batch) {
    const float* const slot = gaussians;
    reset_counters(parameters);
    apply_range(parameters, range, &slot, 1, range.count, divisor, batch, gaussians);
}

std::string apply_own(const Parameters& parameters, int64_t batch, float times) {
    std::string culprit = parameters.first_not_finite({0, parameters.size()});
    if (!culprit.empty()) return culprit;
    for (const Block& block : parameters.blocks()) {
        const float factor = times * parameters.cap_factor(batch, block.rows);
        const int32_t negative =
            apply_capped(block.mu, block.var, block.delta_mu, block.delta_var, block.count, factor);
        if (block.neg_var_counter != nullptr) *block.neg_var_counter = negative;
    }
    return culprit;
}

Step step(ShmCommunicator& communicator, const Parameters& parameters, float* bucket, int64_t batch,
          bool finished, bool average, Pace& pace, double timeout) {
    const size_t size = parameters.size();
    const int ranks = communicator.size();
    const int me = communicator.rank();
    Step result;
    if (batch > 0) {
        result.culprit = parameters.first_not_finite({0, size});
        if (bucket != parameters.bucket()) pack(parameters, {0, size}, bucket, size);
    }
    Signature signature{Kind::step, DType::f32, average ? ReduceOp::mean : ReduceOp::sum};
    signature.count = size;
    signature.values[0] = batch;
    signature.values[1] = result.culprit.empty();
    signature.values[2] = finished;
    signature.values[3] = pace.own();

    Agreement& agreement = result.agreement;
    std::vector<Contribution> contributions;
    InPlaceExchange plan{signature, {bucket, 2 * size, DType::f32}};
    plan.agree = [&](const std::vector<Signature>& all) {
        for (const Signature& rank : all) {
            contributions.push_back({rank.values[0], rank.values[1] != 0, rank.values[2] != 0});
        }
        agreement = Agreement(contributions);
        pace.add(all.size(), [&](size_t r) { return all[r].values[3]; });
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
        // Only this rank reads its own shard of its own bucket, so the posterior can replace it.
        apply_range(parameters, own, slots.data(), ranks, size, agreement.divisor(average),
                    agreement.capped_as(average), bucket + own.begin);
    });
    plan.phases.emplace_back([&](const std::vector<std::byte*>& parts) {
        for (int r = 0; r < ranks; ++r) {
            if (r == me) continue;
            const Shard shard = shard_of(size, sizeof(float), r, ranks);
            const float* posterior = gaussians(parts[static_cast<size_t>(r)]) + shard.begin;
            take_range(parameters, shard, posterior, size);
        }
    });
    communicator.exchange(plan, timeout);
    pace.restart();
    return result;
}

}  // namespace tagi_ddp
