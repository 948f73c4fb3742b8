// The innermost loops of a step: sums of deltas, capped and applied.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/buffer.h"
#include "update/parameters.h"

namespace tagi_ddp {

constexpr float least_variance = 1e-5f;  // replaces a variance that is not positive

// mu += sign(dmu) min(|dmu|, bar), var += sign(dvar) min(|dvar|, bar), bar = sqrt(var) / cap. A
// variance that is not positive becomes `floor`; returns the number of those. The engine's own
// step, without branches, so it vectorizes.
int32_t apply_capped(float* __restrict mu, float* __restrict var, const float* __restrict delta_mu,
                     const float* __restrict delta_var, size_t count, float cap,
                     float floor = least_variance);

void reset_counters(const Parameters& parameters);

// Caps and applies the sums of the ranks' slots, divided by `divisor`. A slot has the deltas of the
// range, [means | variances], `stride` floats apart; it is null for a rank without deltas. The cap
// factors are those of `batch` samples. If `posterior` is not null, the result is written there in
// the same layout, for `take_range`.
void apply_range(const Parameters& parameters, Shard range, const float* const* slots, int ranks,
                 size_t stride, float divisor, int64_t batch, float* posterior = nullptr);

// Replaces the range by the posterior that another rank's `apply_range` has written.
void take_range(const Parameters& parameters, Shard range, const float* posterior, size_t stride);

}  // namespace tagi_ddp
