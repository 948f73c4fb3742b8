// Activations: functions of each element's Gaussian, or of all outputs of a sample.
//
// An activation's backward does nothing, because the layer above it multiplies innovations by its
// jacobian. The linearized activations follow Goulet, Nguyen, Amiri, Tractable approximate Gaussian
// inference for Bayesian neural networks, JMLR 22 (2021). The mixtures are the moments of a
// piecewise linear function of a Gaussian. They are computed in the engine's order, because a small
// variance consists mostly of rounding errors.
#pragma once

#include <string>

#include "compute/layer.h"

namespace tagi_ddp {

// The outputs of an activation, in the layout of its inputs.
struct Activated {
    float* mean;
    float* variance;
    float* jacobian;
};

using ActivationFunction = void (*)(const States& inputs, const Activated& outputs);

// Returns the function that the engine's layer of this name computes; null for an unknown name.
ActivationFunction activation_function(const std::string& kind);

class Activation : public Layer {
 public:
    Activation(ActivationFunction function, size_t width) : function_(function), width_(width) {}

    size_t width() const override { return width_; }
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool) override { return deltas; }

 private:
    ActivationFunction function_;
    size_t width_;
    Memory mean_, variance_, jacobian_;
};

// The smallest mean and variance of mixtures.
constexpr float least_moment = 1e-6f;

// The moments of max(0, z), at least `least_moment`, and the probability that z is positive.
struct Rectified {
    float mean;
    float variance;
    float probability;
};
Rectified rectified_moments(float mean, float variance);

// The following are in softmaxes.cpp.

// exp(z) / sum exp(z), linearized. As in the engine, a sum is over successive elements, as many as
// the batch has samples, not over a sample's outputs.
void softmax(const States& inputs, const Activated& outputs);
// max(0, z) / sum max(0, z), by the moments of the logarithms of normal variables.
void remax(const States& inputs, const Activated& outputs);
// exp(z) / sum exp(z), by the moments of log-normal variables.
void closed_form_softmax(const States& inputs, const Activated& outputs);

}  // namespace tagi_ddp
