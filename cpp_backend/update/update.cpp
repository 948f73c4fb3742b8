#include "update.h"

#include <cmath>
#include <cstring>

#include "../simd.h"

namespace tagi_ddp {
namespace {

constexpr size_t chunk_floats = slot_bytes / (2 * sizeof(float));  // means and variances

// mu += sign(dmu) min(|dmu|, bar), var += sign(dvar) min(|dvar|, bar), bar = sqrt(var) / cap; a
// variance that is not positive becomes 1e-5. Returns how many did. As the engine's own step, but
// without branches, so that it vectorizes.
TAGI_DDP_WIDE
int32_t apply_capped(float* __restrict mu, float* __restrict var, const float* __restrict delta_mu,
                     const float* __restrict delta_var, size_t count, float cap) {
    constexpr float floor = 1e-5f;
    int32_t negative = 0;
    for (size_t i = 0; i < count; ++i) {
        const float bar = std::sqrt(var[i]) / cap;
        const float size_mu = std::fabs(delta_mu[i]);
        const float size_var = std::fabs(delta_var[i]);
        const float step_mu = size_mu < bar ? size_mu : bar;
        const float step_var = size_var < bar ? size_var : bar;
        mu[i] += std::copysign(step_mu, delta_mu[i]);
        const float updated = var[i] + std::copysign(step_var, delta_var[i]);
        negative += updated <= 0.0f;
        var[i] = updated <= 0.0f ? floor : updated;
    }
    return negative;
}

// The sum over ranks, in rank order, of `count` floats at `offset` of each slot, divided.
TAGI_DDP_WIDE
void reduce_floats(const std::byte* const* slots, int size, size_t offset, size_t count,
                   float divisor, float* __restrict sum) {
    bool first = true;
    for (int r = 0; r < size; ++r) {
        if (slots[r] == nullptr) continue;
        const float* part = reinterpret_cast<const float*>(slots[r]) + offset;
        if (first) {
            std::memcpy(sum, part, count * sizeof(float));
        } else {
            for (size_t i = 0; i < count; ++i) sum[i] += part[i];
        }
        first = false;
    }
    if (divisor != 1.0f) {
        for (size_t i = 0; i < count; ++i) sum[i] /= divisor;
    }
}

void reset_counters(const Parameters& parameters) {
    for (const Block& block : parameters.blocks()) {
        if (block.neg_var_counter != nullptr) *block.neg_var_counter = 0;
    }
}

// Caps and applies the sums of slots, [means | variances] at `stride` floats, to the flat range
// [begin, begin + length).
void apply_range(const Parameters& parameters, size_t begin, size_t length,
                 const std::byte* const* slots, int size, size_t stride, float divisor, float cap) {
    constexpr size_t block_floats = 1024;  // stays in the first-level cache
    float delta_mu[block_floats];
    float delta_var[block_floats];
    parameters.visit(begin, length, [&](const Block& block, size_t first, size_t count, size_t at) {
        int32_t negative = 0;
        for (size_t done = 0; done < count; done += block_floats) {
            const size_t n = std::min(block_floats, count - done);
            reduce_floats(slots, size, at + done, n, divisor, delta_mu);
            reduce_floats(slots, size, stride + at + done, n, divisor, delta_var);
            negative += apply_capped(block.mu + first + done, block.var + first + done, delta_mu,
                                     delta_var, n, cap);
        }
        if (block.neg_var_counter != nullptr) *block.neg_var_counter += negative;
    });
}

}  // namespace

float cap_factor(int64_t batch) {
    if (batch <= 1) return 0.1f;
    return batch < 256 ? 2.0f : 3.0f;
}

Agreement::Agreement(const std::vector<Contribution>& ranks) {
    for (size_t r = 0; r < ranks.size(); ++r) {
        batch += ranks[r].batch;
        active += ranks[r].batch > 0;
        all_joined = all_joined && ranks[r].joined;
        if (!ranks[r].finite) not_finite.push_back(static_cast<int>(r));
    }
}

float Agreement::cap(bool average) const {
    // The mean of deltas stands for one rank's batch; shares that differ count as their mean.
    return cap_factor(average ? (batch + active - 1) / active : batch);
}

void pack(const Parameters& parameters, float* bucket) {
    const size_t size = parameters.size();
    parameters.visit(0, size, [&](const Block& block, size_t first, size_t count, size_t at) {
        std::memcpy(bucket + at, block.delta_mu + first, count * sizeof(float));
        std::memcpy(bucket + size + at, block.delta_var + first, count * sizeof(float));
    });
}

void apply(const Parameters& parameters, const float* bucket, float divisor, float cap) {
    reset_counters(parameters);
    const std::byte* const slot = reinterpret_cast<const std::byte*>(bucket);
    apply_range(parameters, 0, parameters.size(), &slot, 1, parameters.size(), divisor, cap);
}

void apply_own(const Parameters& parameters, float cap) {
    for (const Block& block : parameters.blocks()) {
        const int32_t negative =
            apply_capped(block.mu, block.var, block.delta_mu, block.delta_var, block.count, cap);
        if (block.neg_var_counter != nullptr) *block.neg_var_counter = negative;
    }
}

Agreement update(ShmCommunicator& communicator, const Parameters& parameters,
                 const Contribution& contribution, bool average, double timeout) {
    const size_t size = parameters.size();
    const uint32_t rounds = static_cast<uint32_t>((size + chunk_floats - 1) / chunk_floats);
    const auto length = [&](uint32_t chunk) {
        return std::min(chunk_floats, size - static_cast<size_t>(chunk) * chunk_floats);
    };
    Signature signature{Kind::update, static_cast<uint32_t>(DType::f32), average};
    signature.count = size;
    signature.words[0] = contribution.batch;
    signature.words[1] = contribution.finite;
    signature.words[2] = contribution.joined;
    const bool contributes = contribution.batch > 0 && contribution.finite;

    Agreement agreement{{}};
    ShmCommunicator::Exchange plan{"step",  signature, contributes ? rounds : 0,
                                   nullptr, nullptr,   nullptr};
    plan.fill = [&](uint32_t chunk, std::byte* slot) {
        float* floats = reinterpret_cast<float*>(slot);
        parameters.visit(static_cast<size_t>(chunk) * chunk_floats, length(chunk),
                         [&](const Block& block, size_t first, size_t count, size_t at) {
                             std::memcpy(floats + at, block.delta_mu + first,
                                         count * sizeof(float));
                             std::memcpy(floats + chunk_floats + at, block.delta_var + first,
                                         count * sizeof(float));
                         });
    };
    plan.agree = [&](const std::vector<Signature>& all) {
        std::vector<Contribution> ranks;
        std::vector<uint32_t> chunks;
        for (const Signature& rank : all) {
            ranks.push_back({rank.words[0], rank.words[1] != 0, rank.words[2] != 0});
            chunks.push_back(rank.words[0] > 0 ? rounds : 0);
        }
        agreement = Agreement(ranks);
        if (!agreement.applies()) chunks.clear();
        if (!chunks.empty()) reset_counters(parameters);
        return chunks;
    };
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        apply_range(parameters, static_cast<size_t>(chunk) * chunk_floats, length(chunk), slots,
                    communicator.size(), chunk_floats, agreement.divisor(average),
                    agreement.cap(average));
    };
    communicator.exchange(plan, timeout);
    return agreement;
}

}  // namespace tagi_ddp
