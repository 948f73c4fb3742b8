#include "compute/rms_norm.h"

#include <algorithm>
#include <cmath>

namespace tagi_ddp {

States RMSNorm::forward(const States& inputs, bool) {
    const Block& weights = *gaussians_.weights;
    inputs_ = inputs;
    float* scale = scale_.take(inputs.batch);
    float* out_mean = mean_.take(inputs.floats());
    float* out_variance = variance_.take(inputs.floats());
    for (size_t b = 0; b < inputs.batch; ++b) {
        const float* mean = inputs.mean + b * inputs.stride;
        const float* variance = inputs.variance + b * inputs.stride;
        float squares = 0.0f;
        for (size_t i = 0; i < width(); ++i) squares += mean[i] * mean[i];
        scale[b] = 1.0f / std::sqrt(squares / static_cast<float>(width()) + epsilon_);
        for (size_t i = 0; i < width(); ++i) {
            const size_t at = b * inputs.stride + i;
            const float w = weights.mu[i], var_w = weights.var[i];
            out_mean[at] = mean[i] * scale[b] * w;
            out_variance[at] = variance[i] * scale[b] * scale[b] *
                               (variance[i] * (var_w + w * w) + var_w * mean[i] * mean[i]);
        }
    }
    return {out_mean, out_variance, nullptr, inputs.batch, inputs.width, inputs.stride, false};
}

Deltas RMSNorm::backward(Deltas deltas, bool to_input) {
    const Block& weights = *gaussians_.weights;
    std::fill_n(weights.delta_mu, weights.count, 0.0f);
    std::fill_n(weights.delta_var, weights.count, 0.0f);
    Deltas below;
    if (to_input) {
        below = {below_mean_.take(inputs_.floats()), below_variance_.take(inputs_.floats())};
    }
    for (size_t b = 0; b < inputs_.batch; ++b) {
        const float scale = scale_.data()[b];
        for (size_t i = 0; i < width(); ++i) {
            const size_t at = b * inputs_.stride + i;
            const float normalized = inputs_.mean[at] * scale, slope = weights.mu[i] * scale;
            weights.delta_mu[i] += normalized * deltas.mean[at];
            weights.delta_var[i] += normalized * normalized * deltas.variance[at];
            if (!to_input) continue;
            below.mean[at] = slope * deltas.mean[at];
            below.variance[at] = slope * slope * deltas.variance[at];
        }
    }
    return below;
}

}  // namespace tagi_ddp
