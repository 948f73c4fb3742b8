#include "compute/linear.h"

#include <algorithm>

#include "compute/product.h"

namespace tagi_ddp {
namespace {

// With fewer samples, what the weights are copied for costs more than it saves.
constexpr size_t few_samples = 3;

enum class Of { means, squares, variances, moments };

}  // namespace
}  // namespace tagi_ddp

#define TAGI_DDP_LOOPS "compute/linear_loops.h"
#include "compute/twice.h"

namespace tagi_ddp {

void square(const float* data, size_t count, float* out) {
    TAGI_DDP_PICK(square_all)(data, count, out);
}

void carry_through(const States& states, Deltas deltas) { TAGI_DDP_PICK(carry)(states, deltas); }

void Products::forward(const GaussianMatrix& matrix, const States& inputs, const float* squares,
                       float* mean, float* variance, size_t stride) {
    const Block& biases = matrix.biases;
    if (matrix.outputs < lanes || inputs.batch < few_samples) {
        for (size_t b = 0; b < inputs.batch; ++b) {
            const size_t at = b * inputs.stride;
            TAGI_DDP_PICK(forward_one)(matrix, inputs.mean + at, squares + at,
                                       inputs.exact ? nullptr : inputs.variance + at,
                                       mean + b * stride, variance + b * stride);
            if (biases.count == 0) continue;
            TAGI_DDP_PICK(add_row)(biases.mu, matrix.outputs, mean + b * stride);
            TAGI_DDP_PICK(add_row)(biases.var, matrix.outputs, variance + b * stride);
        }
        return;
    }
    const size_t row = padded(matrix.outputs);
    float* packed = packed_.take(matrix.inputs * row);
    float* bias = bias_.take(row);
    const auto multiply = [&](Of what, const float* left, const float* begin, float* out) {
        TAGI_DDP_PICK(pack_for_forward)(matrix, what, packed);
        if (begin != nullptr) std::copy_n(begin, matrix.outputs, bias);
        const AddTo add_to = what == Of::moments ? AddTo::present
                             : begin == nullptr  ? AddTo::zero
                                                 : AddTo::row;
        product(inputs.batch, matrix.inputs, matrix.outputs, {left, inputs.stride, 1}, packed, row,
                out, stride, add_to, bias);
    };
    const bool biased = biases.count != 0;
    multiply(Of::means, inputs.mean, biased ? biases.mu : nullptr, mean);
    multiply(Of::variances, squares, biased ? biases.var : nullptr, variance);
    if (!inputs.exact) multiply(Of::moments, inputs.variance, nullptr, variance);
}

void Products::write_deltas(const GaussianMatrix& matrix, const States& inputs,
                            const float* squares, Deltas deltas, size_t stride) {
    const Block& biases = matrix.biases;
    if (biases.count != 0) {
        const size_t count = matrix.outputs;
        TAGI_DDP_PICK(sum_columns)(deltas.mean, inputs.batch, count, stride, biases.var, false,
                                   biases.delta_mu);
        TAGI_DDP_PICK(sum_columns)(deltas.variance, inputs.batch, count, stride, biases.var, true,
                                   biases.delta_var);
    }
    if (inputs.batch == 1) {
        TAGI_DDP_PICK(deltas_one)(matrix, inputs.mean, squares, deltas.mean, deltas.variance);
        return;
    }
    const bool by_rows = matrix.inputs >= lanes;  // else outputs fill vectors, inputs do not
    const size_t rows = by_rows ? matrix.outputs : matrix.inputs;
    const size_t columns = by_rows ? matrix.inputs : matrix.outputs;
    const size_t row = padded(columns);
    float* sums = sums_.take(rows * row);
    const auto write = [&](const float* by, const float* from, bool squared, float* delta) {
        if (by_rows) {
            product(rows, inputs.batch, columns, {by, 1, stride}, from, inputs.stride, sums, row,
                    AddTo::zero);
        } else {
            product(rows, inputs.batch, columns, {from, 1, inputs.stride}, by, stride, sums, row,
                    AddTo::zero);
        }
        TAGI_DDP_PICK(scale)(matrix, sums, row, by_rows, squared, delta);
    };
    write(deltas.mean, inputs.mean, false, matrix.weights.delta_mu);
    write(deltas.variance, squares, true, matrix.weights.delta_var);
}

void Products::carry_below(const GaussianMatrix& matrix, Deltas deltas, size_t batch, size_t stride,
                           Deltas below, size_t below_stride) {
    if (batch < few_samples) {
        for (size_t b = 0; b < batch; ++b) {
            TAGI_DDP_PICK(below_one)(matrix, deltas.mean + b * stride, deltas.variance + b * stride,
                                     below.mean + b * below_stride,
                                     below.variance + b * below_stride);
        }
        return;
    }
    const size_t row = padded(matrix.inputs);
    float* packed = packed_.take(matrix.outputs * row);
    TAGI_DDP_PICK(pack_for_backward)(matrix, Of::means, packed);
    product(batch, matrix.outputs, matrix.inputs, {deltas.mean, stride, 1}, packed, row, below.mean,
            below_stride, AddTo::zero);
    TAGI_DDP_PICK(pack_for_backward)(matrix, Of::squares, packed);
    product(batch, matrix.outputs, matrix.inputs, {deltas.variance, stride, 1}, packed, row,
            below.variance, below_stride, AddTo::zero);
}

GaussianMatrix Linear::matrix() const {
    return {*gaussians_.weights, *gaussians_.biases, outputs_, inputs_count_, inputs_count_};
}

States Linear::forward(const States& inputs, bool) {
    inputs_ = inputs;
    float* squares = squares_.take(inputs.floats());
    square(inputs.mean, inputs.floats(), squares);
    const size_t stride = padded(outputs_);
    float* mean = mean_.take(inputs.batch * stride);
    float* variance = variance_.take(inputs.batch * stride);
    products_.forward(matrix(), inputs, squares, mean, variance, stride);
    return {mean, variance, nullptr, inputs.batch, outputs_, stride, false};
}

Deltas Linear::backward(Deltas deltas, bool to_input) {
    const size_t stride = padded(outputs_);
    products_.write_deltas(matrix(), inputs_, squares_.data(), deltas, stride);
    if (!to_input) return {};
    const Deltas below{below_mean_.take(inputs_.floats()), below_variance_.take(inputs_.floats())};
    products_.carry_below(matrix(), deltas, inputs_.batch, stride, below, inputs_.stride);
    carry_through(inputs_, below);
    return below;
}

}  // namespace tagi_ddp
