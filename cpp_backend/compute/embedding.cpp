#include "compute/embedding.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace tagi_ddp {

Embedding::Embedding(Gaussians gaussians, size_t size, size_t inputs, int64_t padding,
                     std::vector<float> sums, bool rows)
    : gaussians_(gaussians),
      has_rows_(rows),
      size_(size),
      inputs_(inputs),
      padding_(padding),
      sums_(std::move(sums)) {
    if (sums_.size() != 2 * gaussians_.weights->count) {
        throw std::invalid_argument("sums has " + std::to_string(sums_.size()) +
                                    " elements, expected one for each mean and variance");
    }
}

States Embedding::forward(const States& inputs, bool) {
    const size_t count = gaussians_.weights->count / size_;
    rows_.resize(inputs.batch * inputs_);
    for (size_t k = 0; k < rows_.size(); ++k) {
        const float value = inputs.mean[k / inputs_ * inputs.stride + k % inputs_];
        if (!(std::fabs(value) < 1e9f))
            throw std::out_of_range("mu_x has a value that is no index");
        int64_t row = static_cast<int64_t>(value);
        if (row == padding_) {
            row = -1;
        } else if (row < 0 || row >= static_cast<int64_t>(count)) {
            throw std::out_of_range("mu_x has index " + std::to_string(row) +
                                    ", but the rows go from 0 to " + std::to_string(count - 1));
        }
        rows_[k] = row;
    }
    batch_ = inputs.batch;
    input_stride_ = inputs.stride;
    const size_t stride = padded(width()), count_out = has_rows_ ? rows_.size() : batch_;
    float* mean = mean_.take(count_out * stride);
    float* variance = variance_.take(count_out * stride);
    for (size_t k = 0; k < rows_.size(); ++k) {
        const size_t at = offset(k);
        if (rows_[k] < 0) {
            std::fill_n(mean + at, size_, 0.0f);
            std::fill_n(variance + at, size_, 0.0f);
            continue;
        }
        const size_t from = static_cast<size_t>(rows_[k]) * size_;
        std::copy_n(gaussians_.weights->mu + from, size_, mean + at);
        std::copy_n(gaussians_.weights->var + from, size_, variance + at);
    }
    return {mean, variance, nullptr, count_out, width(), stride, false};
}

size_t Embedding::offset(size_t k) const {
    const size_t stride = padded(width());
    return has_rows_ ? k * stride : k / inputs_ * stride + k % inputs_ * size_;
}

Deltas Embedding::backward(Deltas deltas, bool to_input) {
    const Block& weights = *gaussians_.weights;
    float* sum_mean = sums_.data();
    float* sum_variance = sums_.data() + weights.count;
    for (size_t k = 0; k < rows_.size(); ++k) {
        if (rows_[k] < 0) continue;
        const size_t at = offset(k);
        const size_t from = static_cast<size_t>(rows_[k]) * size_;
        for (size_t i = 0; i < size_; ++i) {
            sum_mean[from + i] += deltas.mean[at + i] * weights.var[from + i];
            sum_variance[from + i] += deltas.variance[at + i] * weights.var[from + i];
        }
    }
    std::copy_n(sum_mean, weights.count, weights.delta_mu);
    std::copy_n(sum_variance, weights.count, weights.delta_var);
    if (!to_input) return {};
    // The innovation of indices is zero.
    const size_t floats = batch_ * input_stride_;
    const Deltas below{below_mean_.take(floats), below_variance_.take(floats)};
    std::fill_n(below.mean, floats, 0.0f);
    std::fill_n(below.variance, floats, 0.0f);
    return below;
}

}  // namespace tagi_ddp
