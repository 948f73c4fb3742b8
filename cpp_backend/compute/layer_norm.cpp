#include "compute/layer_norm.h"

#include <algorithm>
#include <cmath>

#define TAGI_DDP_LOOPS "compute/layer_norm_loops.h"
#include "compute/twice.h"

namespace tagi_ddp {

States LayerNorm::forward(const States& inputs, bool) {
    inputs_ = inputs;
    float* mean = mean_.take(inputs.floats());
    float* variance = variance_.take(inputs.floats());
    float* spread = spread_.take(inputs.floats());
    float* factor = factor_.take(inputs.batch);
    for (size_t b = 0; b < inputs.batch; ++b) {
        const size_t at = b * inputs.stride;
        TAGI_DDP_PICK(normalize)(*gaussians_.weights, *gaussians_.biases, epsilon_, width(),
                                 inputs.mean + at, inputs.variance + at, mean + at, variance + at,
                                 spread + at, factor + b);
    }
    return {mean, variance, nullptr, inputs.batch, inputs.width, inputs.stride, false};
}

void LayerNorm::write_deltas(Deltas deltas) {
    const Block& weights = *gaussians_.weights;
    const Block& biases = *gaussians_.biases;
    float* sum_mean = sum_mean_.take(width());
    float* sum_variance = sum_variance_.take(width());
    std::fill_n(sum_mean, width(), 0.0f);
    std::fill_n(sum_variance, width(), 0.0f);
    std::fill_n(biases.delta_mu, biases.count, 0.0f);
    std::fill_n(biases.delta_var, biases.count, 0.0f);
    for (size_t b = 0; b < inputs_.batch; ++b) {
        const size_t at = b * inputs_.stride;
        TAGI_DDP_PICK(add_sample)(width(), spread_.data() + at,
                                  {deltas.mean + at, deltas.variance + at}, sum_mean, sum_variance);
        for (size_t i = 0; i < biases.count; ++i) {
            biases.delta_mu[i] += deltas.mean[at + i];
            biases.delta_var[i] += deltas.variance[at + i];
        }
    }
    // The spread has a factor sqrt(var w), so its square has a factor var w.
    for (size_t i = 0; i < width(); ++i) {
        weights.delta_mu[i] = sum_mean[i] * std::sqrt(weights.var[i]);
        weights.delta_var[i] = sum_variance[i] * weights.var[i];
    }
    for (size_t i = 0; i < biases.count; ++i) {
        biases.delta_mu[i] *= biases.var[i];
        biases.delta_var[i] *= biases.var[i] * biases.var[i];
    }
}

Deltas LayerNorm::backward(Deltas deltas, bool to_input) {
    const Block& weights = *gaussians_.weights;
    write_deltas(deltas);
    if (!to_input) return {};
    const Deltas below{below_mean_.take(inputs_.floats()), below_variance_.take(inputs_.floats())};
    for (size_t b = 0; b < inputs_.batch; ++b) {
        for (size_t i = 0; i < width(); ++i) {
            const size_t at = b * inputs_.stride + i;
            const float slope = factor_.data()[b] * weights.mu[i];
            below.mean[at] = deltas.mean[at] * slope;
            below.variance[at] = deltas.variance[at] * slope * slope;
        }
    }
    apply_jacobian(inputs_, below);
    return below;
}

}  // namespace tagi_ddp
