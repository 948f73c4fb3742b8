#include "update/apply.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/simd.h"

namespace tagi_ddp {
namespace {

// Sums `count` floats at `offset` of each slot, in rank order, and divides the sums.
TAGI_DDP_WIDE
void reduce_floats(const float* const* slots, int ranks, size_t offset, size_t count, float divisor,
                   float* __restrict sum) {
    bool first = true;
    for (int r = 0; r < ranks; ++r) {
        if (slots[r] == nullptr) continue;
        const float* part = slots[r] + offset;
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

// Copies the absolute values; returns the number of negative ones, which mark corrected variances.
TAGI_DDP_WIDE
int32_t take_variances(float* __restrict var, const float* __restrict marked, size_t count) {
    int32_t negative = 0;
    for (size_t i = 0; i < count; ++i) {
        negative += marked[i] < 0.0f;
        var[i] = std::fabs(marked[i]);
    }
    return negative;
}

// Returns true if all steps are certainly below their bars, sqrt(var) / cap; NaNs are not. Avoids
// square roots and divisions, which take most of the time, and products of deltas, which could be
// subnormal and take even longer.
inline bool far_below_bars(const float* __restrict var, const float* __restrict delta_mu,
                           const float* __restrict delta_var, size_t begin, size_t end, float cap) {
    constexpr float least_normal = std::numeric_limits<float>::min();
    const float part = 0.9f / cap;
    int32_t near = 0;
    for (size_t i = begin; i < end; ++i) {
        // Halve the exponent: the result exceeds the root of a normal number by up to 6.1 %.
        uint32_t bits;
        std::memcpy(&bits, var + i, sizeof bits);
        bits = (bits >> 1) + 0x1f800000u;
        float root;
        std::memcpy(&root, &bits, sizeof root);
        const float size_mu = std::fabs(delta_mu[i]);
        const float size_var = std::fabs(delta_var[i]);
        const float bar = part * root;
        near |= !(size_mu < bar) | !(size_var < bar) | !(var[i] > least_normal);
    }
    return near == 0;
}

// sign(delta) min(|delta|, bar)
inline float limited(float delta, float bar) {
    const float size = std::fabs(delta);
    return std::copysign(size < bar ? size : bar, delta);
}

}  // namespace

TAGI_DDP_WIDE
int32_t apply_capped(float* __restrict mu, float* __restrict var, const float* __restrict delta_mu,
                     const float* __restrict delta_var, size_t count, float cap, float floor) {
    constexpr size_t run = 256;
    int32_t negative = 0;
    for (size_t begin = 0; begin < count; begin += run) {
        const size_t end = std::min(begin + run, count);
        const bool capped = !far_below_bars(var, delta_mu, delta_var, begin, end, cap);
        for (size_t i = begin; i < end && capped; ++i) {
            const float bar = std::sqrt(var[i]) / cap;
            mu[i] += limited(delta_mu[i], bar);
            const float updated = var[i] + limited(delta_var[i], bar);
            negative += updated <= 0.0f;
            var[i] = updated <= 0.0f ? floor : updated;
        }
        for (size_t i = begin; i < end && !capped; ++i) {
            mu[i] += delta_mu[i];
            const float updated = var[i] + delta_var[i];
            negative += updated <= 0.0f;
            var[i] = updated <= 0.0f ? floor : updated;
        }
    }
    return negative;
}

void reset_counters(const Parameters& parameters) {
    for (const Block& block : parameters.blocks()) {
        if (block.neg_var_counter != nullptr) *block.neg_var_counter = 0;
    }
}

void apply_range(const Parameters& parameters, Shard range, const float* const* slots, int ranks,
                 size_t stride, float divisor, int64_t batch, float* posterior) {
    constexpr size_t block_floats = 1024;  // stays in the first-level cache
    float delta_mu[block_floats];
    float delta_var[block_floats];
    // `take_range` counts the corrected variances too, so they are sent as the negative of `floor`.
    const float floor = posterior == nullptr ? least_variance : -least_variance;
    parameters.visit(range, [&](const Block& block, size_t first, size_t count, size_t at) {
        const float factor = parameters.cap_factor(batch, block.rows);
        int32_t negative = 0;
        for (size_t done = 0; done < count; done += block_floats) {
            const size_t n = std::min(block_floats, count - done);
            float* const mu = block.mu + first + done;
            float* const var = block.var + first + done;
            reduce_floats(slots, ranks, at + done, n, divisor, delta_mu);
            reduce_floats(slots, ranks, stride + at + done, n, divisor, delta_var);
            const int32_t found = apply_capped(mu, var, delta_mu, delta_var, n, factor, floor);
            negative += found;
            if (posterior == nullptr) continue;
            std::memcpy(posterior + at + done, mu, n * sizeof(float));
            std::memcpy(posterior + stride + at + done, var, n * sizeof(float));
            if (found > 0) {
                for (size_t i = 0; i < n; ++i) var[i] = std::fabs(var[i]);
            }
        }
        if (block.neg_var_counter != nullptr) *block.neg_var_counter += negative;
    });
}

void take_range(const Parameters& parameters, Shard range, const float* posterior, size_t stride) {
    parameters.visit(range, [&](const Block& block, size_t first, size_t count, size_t at) {
        std::memcpy(block.mu + first, posterior + at, count * sizeof(float));
        const int32_t negative = take_variances(block.var + first, posterior + stride + at, count);
        if (block.neg_var_counter != nullptr) *block.neg_var_counter += negative;
    });
}

}  // namespace tagi_ddp
