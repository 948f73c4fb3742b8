// The innermost loops of a step: sums of deltas, capped and applied.
#pragma once

#include <cstddef>
#include <cstdint>

#include "update/parameters.h"

namespace tagi_ddp {

constexpr float least_variance = 1e-5f;  // takes the place of one that is not positive

// mu += sign(dmu) min(|dmu|, bar), var += sign(dvar) min(|dvar|, bar), bar = sqrt(var) / cap; a
// variance that is not positive becomes `floor`. Returns how many did. As the engine's own step,
// but without branches, so that it vectorizes.
int32_t apply_capped(float* __restrict mu, float* __restrict var, const float* __restrict delta_mu,
                     const float* __restrict delta_var, size_t count, float cap,
                     float floor = least_variance);

void reset_counters(const Parameters& parameters);

// Caps and applies the sums of slots, in rank order, null for a rank without deltas: [means |
// variances], `stride` floats apart, of the flat range [begin, begin + length), divided.
// `posterior`, laid out alike, gets the result, for `take_range`; null: nobody needs it.
void apply_range(const Parameters& parameters, size_t begin, size_t length,
                 const float* const* slots, int ranks, size_t stride, float divisor, float cap,
                 float* posterior = nullptr);

// Replaces the flat range by the posterior that another rank's `apply_range` has reached there.
void take_range(const Parameters& parameters, size_t begin, size_t length, const float* posterior,
                size_t stride);

}  // namespace tagi_ddp
