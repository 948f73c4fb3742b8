// RMSNorm layers: z = w a / r, with r^2 = mean of a^2 + epsilon regarded as known.
//
// As the engine computes them: the variance of z has a factor var a too many, the weights' deltas
// lack the factor var w, and the activation below is ignored. See tagi_ddp/compute/rms_norm.py.
#pragma once

#include "compute/layer.h"

namespace tagi_ddp {

class RMSNorm : public Layer {
 public:
    RMSNorm(Gaussians gaussians, float epsilon) : gaussians_(gaussians), epsilon_(epsilon) {}

    size_t width() const override { return gaussians_.weights->count; }
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;

 private:
    Gaussians gaussians_;
    float epsilon_;
    States inputs_;
    Memory scale_;  // 1 / r of each sample
    Memory mean_, variance_, below_mean_, below_variance_;
};

}  // namespace tagi_ddp
