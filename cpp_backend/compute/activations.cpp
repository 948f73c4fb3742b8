#include "compute/activations.h"

#include <cmath>

namespace tagi_ddp {

static constexpr float leaky_slope = 0.1f;  // always, as in the engine

}  // namespace tagi_ddp

#define TAGI_DDP_LOOPS "compute/activation_loops.h"
#include "compute/twice.h"

namespace tagi_ddp {
namespace {

// Calls work(position) for each element that is not padding.
template <typename Work>
void each_element(const States& states, Work&& work) {
    for (size_t b = 0; b < states.batch; ++b) {
        for (size_t i = 0; i < states.width; ++i) work(b * states.stride + i);
    }
}

// log(1 + exp(z)), linearized; overflows and loses digits as the engine's does.
void softplus(const States& in, const Activated& out) {
    each_element(in, [&](size_t i) {
        const float slope = 1.0f / (1.0f + std::exp(-in.mean[i]));
        out.mean[i] = std::log(std::exp(in.mean[i]) + 1.0f);
        out.variance[i] = slope * in.variance[i] * slope;
        out.jacobian[i] = slope;
    });
}

float density(float x) {
    return 1.0f / std::sqrt(2.0f * static_cast<float>(M_PI)) * std::exp(-0.5f * x * x);
}

float distribution(float x) { return 0.5f * std::erfc(-x * static_cast<float>(M_SQRT1_2)); }

// NaNs, which result from a mean and variance of 0, also become the smallest moment.
float at_least(float value) { return std::fmax(value, least_moment); }

void mixture_relu(const States& in, const Activated& out) {
    each_element(in, [&](size_t i) {
        const Rectified moments = rectified_moments(in.mean[i], in.variance[i]);
        out.mean[i] = moments.mean;
        out.variance[i] = moments.variance;
        out.jacobian[i] = moments.probability;
    });
}

struct Clipped {
    float mean;
    float variance;
    float slope;
};

// The moments of z clipped to [-1, 1], and P(-1 < z < 1).
Clipped clipped_moments(float mean, float variance) {
    const float deviation = std::sqrt(variance);
    const float above = mean + 1.0f, below = mean - 1.0f;
    const float lower = above / deviation, upper = (1.0f - mean) / deviation;
    const float cdf_l = distribution(lower), pdf_l = density(lower);
    const float cdf_u = distribution(upper), pdf_u = density(upper);
    const float value = above * cdf_l + below * cdf_u + deviation * (pdf_l - pdf_u) - mean;
    const float excess = variance - mean * mean;
    float moment = cdf_l * (excess - 2.0f * mean - 1.0f) + cdf_u * (excess + 2.0f * mean - 1.0f) +
                   deviation * (pdf_u * below - pdf_l * above);
    moment = moment - value * value + 2.0f * value * mean + mean * mean - variance + 2.0f;
    return {value, moment, cdf_u + cdf_l - 1.0f};
}

// z between -1 and 1, by its moments.
void mixture_tanh(const States& in, const Activated& out) {
    each_element(in, [&](size_t i) {
        const Clipped clipped = clipped_moments(in.mean[i], in.variance[i]);
        out.mean[i] = clipped.mean;
        out.variance[i] = at_least(clipped.variance);
        out.jacobian[i] = clipped.slope;
    });
}

// (1 + z) / 2 between 0 and 1, by its moments.
void mixture_sigmoid(const States& in, const Activated& out) {
    each_element(in, [&](size_t i) {
        const Clipped clipped = clipped_moments(in.mean[i], in.variance[i]);
        out.mean[i] = clipped.mean / 2.0f + 0.5f;
        out.variance[i] = at_least(clipped.variance / 4.0f);
        out.jacobian[i] = clipped.slope / 2.0f;
    });
}

// Changes every second element of the batch to exp(z), which is log-normal; the others stay. Its
// jacobian is the mean of exp(z), or in some engines the covariance of z and exp(z).
template <bool covariance>
void even_exp(const States& in, const Activated& out) {
    bool exponentiate = false;
    each_element(in, [&](size_t i) {
        const float mean = in.mean[i], variance = in.variance[i];
        out.mean[i] = mean;
        out.variance[i] = variance;
        out.jacobian[i] = in.jacobian == nullptr ? 1.0f : in.jacobian[i];
        if (exponentiate) {
            out.mean[i] = std::exp(mean + 0.5f * variance);
            out.variance[i] = std::exp(2.0f * mean + variance) * (std::exp(variance) - 1.0f);
            out.jacobian[i] = covariance ? out.mean[i] * variance : out.mean[i];
        }
        exponentiate = !exponentiate;
    });
}

}  // namespace

Rectified rectified_moments(float mean, float variance) {
    const float deviation = std::sqrt(variance);
    const float quantile = mean / deviation;
    const float probability = distribution(quantile);
    const float spread = deviation * density(quantile);
    const float value = mean * probability + spread;
    const float product = value * value - 2.0f * (value * mean) + spread * mean;
    return {at_least(value), at_least((variance - mean * mean) * probability - product),
            probability};
}

ActivationFunction activation_function(const std::string& kind) {
    static const struct {
        const char* kind;
        ActivationFunction function;
    } functions[] = {
        {"ReLU", TAGI_DDP_PICK(relu)},
        {"Sigmoid", TAGI_DDP_PICK(sigmoids)},
        {"Tanh", TAGI_DDP_PICK(tangents)},
        {"LeakyReLU", TAGI_DDP_PICK(leaky_relu)},
        {"MixtureReLU", mixture_relu},
        {"MixtureSigmoid", mixture_sigmoid},
        {"MixtureTanh", mixture_tanh},
        {"MixtureSoftplus", softplus},  // not a mixture in the engine either
        {"EvenExp", even_exp<false>},
        {"EvenExpWithCovariance", even_exp<true>},
        {"Softmax", softmax},
        {"Remax", remax},
        {"ClosedFormSoftmax", closed_form_softmax},
    };
    for (const auto& entry : functions) {
        if (kind == entry.kind) return entry.function;
    }
    return nullptr;
}

States Activation::forward(const States& inputs, bool) {
    const Activated outputs{mean_.take(inputs.floats()), variance_.take(inputs.floats()),
                            jacobian_.take(inputs.floats())};
    function_(inputs, outputs);
    return {outputs.mean, outputs.variance, outputs.jacobian,
            inputs.batch, inputs.width,     inputs.stride,
            false};
}

}  // namespace tagi_ddp
