// Layer normalization: z = w (a - m) / sqrt(v + epsilon) + b, with m and v regarded as known.
//
// As in the engine, m is the mean of all n values of a sample, and v includes the variances of the
// inputs: (sum (a - m)^2 + sum var a) / (n - 1).
#pragma once

#include "compute/layer.h"

namespace tagi_ddp {

class LayerNorm : public Layer {
 public:
    LayerNorm(Gaussians gaussians, float epsilon) : gaussians_(gaussians), epsilon_(epsilon) {}

    size_t width() const override { return gaussians_.weights->count; }
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;

 private:
    void write_deltas(Deltas deltas);

    Gaussians gaussians_;
    float epsilon_;
    States inputs_;
    Memory mean_, variance_, below_mean_, below_variance_;
    Memory spread_;                   // (a - m) sqrt(var w / (v + epsilon))
    Memory factor_;                   // 1 / sqrt(v + epsilon) of each sample
    Memory sum_mean_, sum_variance_;  // sums over the batch, for the weights' deltas
};

}  // namespace tagi_ddp
