#include "compute/linear.h"

#include <algorithm>

#include "compute/product.h"

namespace tagi_ddp {
namespace {

// The functions of weights that products use.
enum class Of { means, squares, variances, moments };

}  // namespace
}  // namespace tagi_ddp

#define TAGI_DDP_LOOPS "compute/linear_loops.h"
#include "compute/twice.h"

namespace tagi_ddp {

void square(const float* data, size_t count, float* out) {
    TAGI_DDP_PICK(square_all)(data, count, out);
}

void apply_jacobian(const States& states, Deltas deltas) {
    TAGI_DDP_PICK(multiply_by_jacobian)(states, deltas);
}

void Products::forward(const GaussianMatrix& matrix, const States& inputs, const float* squares,
                       float* mean, float* variance, size_t stride) {
    const Block& biases = matrix.biases;
    if (inputs.batch >= few_samples && matrix.outputs >= lanes) {
        multiply(matrix, inputs, squares, mean, variance, stride);
        return;
    }
    for (size_t b = 0; b < inputs.batch; ++b) {
        const size_t at = b * inputs.stride;
        TAGI_DDP_PICK(forward_one)(matrix, inputs.mean + at, squares + at,
                                   inputs.exact ? nullptr : inputs.variance + at, mean + b * stride,
                                   variance + b * stride);
        if (biases.count == 0) continue;
        TAGI_DDP_PICK(add_row)(biases.mu, matrix.outputs, mean + b * stride);
        TAGI_DDP_PICK(add_row)(biases.var, matrix.outputs, variance + b * stride);
    }
}

void Products::multiply(const GaussianMatrix& matrix, const States& inputs, const float* squares,
                        float* mean, float* variance, size_t stride) {
    const Block& biases = matrix.biases;
    const size_t row = padded(matrix.outputs);
    float* packed = packed_.take(matrix.inputs * row);
    float* bias = bias_.take(row);
    const auto add_product = [&](Of what, const float* left, const float* begin, float* out) {
        TAGI_DDP_PICK(pack_for_forward)(matrix, what, packed);
        if (begin != nullptr) std::copy_n(begin, matrix.outputs, bias);
        const AddTo add_to = what == Of::moments ? AddTo::present
                             : begin == nullptr  ? AddTo::zero
                                                 : AddTo::row;
        product(inputs.batch, matrix.inputs, matrix.outputs, {left, inputs.stride, 1}, packed, row,
                out, stride, add_to, bias);
    };
    const bool biased = biases.count != 0;
    add_product(Of::means, inputs.mean, biased ? biases.mu : nullptr, mean);
    add_product(Of::variances, squares, biased ? biases.var : nullptr, variance);
    if (!inputs.exact) add_product(Of::moments, inputs.variance, nullptr, variance);
}

void Products::write_deltas(const GaussianMatrix& matrix, const States& inputs,
                            const float* squares, Deltas deltas, size_t stride) {
    TAGI_DDP_PICK(write_biases)(matrix.biases, inputs, deltas, stride);
    if (matrix.inputs >= lanes && inputs.batch > 1) {
        TAGI_DDP_PICK(write_wide)(matrix, inputs, squares, deltas, stride);
        return;
    }
    if (inputs.batch == 1) {
        TAGI_DDP_PICK(deltas_one)(matrix, inputs.mean, squares, deltas.mean, deltas.variance);
        return;
    }
    const size_t row = padded(matrix.outputs);
    float* sums = sums_.take(matrix.inputs * row);
    const auto write = [&](const float* by, const float* from, bool squared, float* delta) {
        product(matrix.inputs, inputs.batch, matrix.outputs, {from, 1, inputs.stride}, by, stride,
                sums, row, AddTo::zero);
        TAGI_DDP_PICK(scale)(matrix, sums, row, squared, delta);
    };
    write(deltas.mean, inputs.mean, false, matrix.weights.delta_mu);
    write(deltas.variance, squares, true, matrix.weights.delta_var);
}

void Products::propagate(const GaussianMatrix& matrix, const States& inputs, Deltas deltas,
                         size_t stride, Deltas below) {
    if (inputs.batch < few_samples) {
        for (size_t b = 0; b < inputs.batch; ++b) {
            TAGI_DDP_PICK(below_one)(matrix, deltas.mean + b * stride, deltas.variance + b * stride,
                                     below.mean + b * inputs.stride,
                                     below.variance + b * inputs.stride);
        }
        return;
    }
    const size_t row = padded(matrix.inputs);
    float* packed = packed_.take(matrix.outputs * row);
    const auto write = [&](Of what, const float* from, float* to) {
        TAGI_DDP_PICK(pack_for_backward)(matrix, what, packed);
        product(inputs.batch, matrix.outputs, matrix.inputs, {from, stride, 1}, packed, row, to,
                inputs.stride, AddTo::zero);
    };
    write(Of::means, deltas.mean, below.mean);
    write(Of::squares, deltas.variance, below.variance);
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
    products_.propagate(matrix(), inputs_, deltas, stride, below);
    apply_jacobian(inputs_, below);
    return below;
}

}  // namespace tagi_ddp
