#include "compute/innovation.h"

#include <algorithm>
#include <cmath>

namespace tagi_ddp {
namespace {

float jacobian_at(const States& outputs, size_t i) {
    return outputs.jacobian == nullptr ? 1.0f : outputs.jacobian[i];
}

// Writes the innovation of output `i`, whose observation has this variance in all.
void observe(const States& outputs, size_t i, float mu_obs, float variance, Deltas deltas,
             bool observed) {
    const float jacobian = jacobian_at(outputs, i), gain = jacobian / variance;
    const bool seen = observed && std::isfinite(gain);
    deltas.mean[i] = seen ? gain * (mu_obs - outputs.mean[i]) : 0.0f;
    deltas.variance[i] = seen ? -gain * jacobian : 0.0f;
}

}  // namespace

void innovation(const States& outputs, const float* mu_obs, const float* var_obs, Deltas deltas) {
    for (size_t b = 0; b < outputs.batch; ++b) {
        for (size_t o = 0; o < outputs.width; ++o) {
            const size_t i = b * outputs.stride + o, k = b * outputs.width + o;
            observe(outputs, i, mu_obs[k], outputs.variance[i] + var_obs[k], deltas,
                    !std::isnan(mu_obs[k]));
        }
    }
}

void selected_innovation(const States& outputs, const float* mu_obs, const float* var_obs,
                         const int32_t* selected, size_t count, Deltas deltas) {
    std::fill_n(deltas.mean, outputs.floats(), 0.0f);
    std::fill_n(deltas.variance, outputs.floats(), 0.0f);
    for (size_t b = 0; b < outputs.batch; ++b) {
        for (size_t k = b * count; k < (b + 1) * count; ++k) {
            const size_t i = b * outputs.stride + static_cast<size_t>(selected[k] - 1);
            observe(outputs, i, mu_obs[k], outputs.variance[i] + var_obs[k], deltas,
                    !std::isnan(mu_obs[k]));
        }
    }
}

void heteroscedastic_innovation(const States& outputs, const float* mu_obs, Deltas deltas) {
    const size_t pairs = outputs.width / 2;
    for (size_t b = 0; b < outputs.batch; ++b) {
        for (size_t p = 0; p < pairs; ++p) {
            const size_t i = b * outputs.stride + 2 * p;
            const float y = mu_obs[b * pairs + p];
            const float noise = outputs.mean[i + 1], noise_variance = outputs.variance[i + 1];
            const float total = outputs.variance[i] + noise;
            const bool observed = std::isfinite(y);
            observe(outputs, i, y, total, deltas, observed);

            const float error = y - outputs.mean[i];
            const float mu_v = noise / total * error;  // of V given y
            const float var_v = noise - noise / total * noise;
            const float mu_square = mu_v * mu_v + var_v;  // of V^2 given y
            const float var_square = 2.0f * var_v * var_v + 4.0f * var_v * mu_v * mu_v;
            const float prior = 3.0f * noise_variance + 2.0f * noise * noise;  // variance of V^2
            const float smoothing = noise_variance / prior;
            float slope = jacobian_at(outputs, i + 1) / noise_variance;
            if (!std::isfinite(slope)) slope = 0.0f;
            deltas.mean[i + 1] = observed ? slope * (smoothing * (mu_square - noise)) : 0.0f;
            deltas.variance[i + 1] =
                observed ? slope * slope * (smoothing * smoothing * (var_square - prior)) : 0.0f;
        }
    }
}

}  // namespace tagi_ddp
