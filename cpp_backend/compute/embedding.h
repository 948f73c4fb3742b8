// Embedding layers: an input is the index of a row of weights, which is the output.
//
// As in the engine, deltas accumulate over steps and are never reset to zero, and deltas of
// variances are multiplied by the variance once, not twice as in other layers.
#pragma once

#include <cstdint>
#include <vector>

#include "compute/layer.h"

namespace tagi_ddp {

// Weights are [count, size]; inputs are indices as floats, [batch, inputs].
class Embedding : public Layer {
 public:
    // `sums` are the deltas so far, [means | variances]. The output of the padding index, which may
    // be outside of the table, is zero. Outputs are [batch * inputs, size] if `rows`, else
    // [batch, inputs * size].
    Embedding(Gaussians gaussians, size_t size, size_t inputs, int64_t padding,
              std::vector<float> sums, bool rows);

    size_t width() const override { return has_rows_ ? size_ : inputs_ * size_; }
    // Throws std::out_of_range for another index that is outside of the table.
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;

    void keep() override { saved_ = sums_; }
    void restore() override { sums_ = saved_; }

    std::vector<float>& sums() { return sums_; }

 private:
    // The position of the k-th vector in the outputs' memory.
    size_t offset(size_t k) const;

    Gaussians gaussians_;
    bool has_rows_;
    size_t size_;
    size_t inputs_;
    int64_t padding_;
    std::vector<float> sums_, saved_;
    std::vector<int64_t> rows_;  // the rows of the last batch; -1 for padding
    size_t batch_ = 0;
    size_t input_stride_ = 0;
    Memory mean_, variance_, below_mean_, below_variance_;
};

}  // namespace tagi_ddp
