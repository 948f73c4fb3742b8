// Embedding layers: an input is the index of a row of weights, which is the output.
//
// As the engine computes it: deltas add up over steps, nothing ever sets them back to zero, and the
// variance's are multiplied by the variance once, not twice as elsewhere.
#pragma once

#include <cstdint>
#include <vector>

#include "compute/layer.h"

namespace tagi_ddp {

// Weights are [count, size]; inputs are indices as floats, [batch, inputs].
class Embedding : public Layer {
 public:
    // `sums` are the deltas so far, [means | variances]. The padding index stands for zeros, and
    // may be outside of the table.
    Embedding(Gaussians gaussians, size_t size, size_t inputs, int64_t padding,
              std::vector<float> sums);

    size_t width() const override { return inputs_ * size_; }
    // Throws std::out_of_range for any other index outside.
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;

    void keep() override { kept_ = sums_; }
    void restore() override { sums_ = kept_; }

    std::vector<float>& sums() { return sums_; }

 private:
    Gaussians gaussians_;
    size_t size_;
    size_t inputs_;
    int64_t padding_;
    std::vector<float> sums_, kept_;
    std::vector<int64_t> rows_;  // of the last batch; -1 where there is none
    size_t batch_ = 0;
    size_t input_stride_ = 0;
    Memory mean_, variance_, below_mean_, below_variance_;
};

}  // namespace tagi_ddp
