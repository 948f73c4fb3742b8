// A batch as two shares: each is computed by the kernels that are best for it alone, and its deltas
// are summed by themselves, so that one process has the bits of two ranks.
#pragma once

#include "compute/layer.h"

namespace tagi_ddp {

// With fewer samples, what the weights are copied for costs more than it saves.
constexpr size_t few_samples = 3;

// out[i] += data[i]
void add_floats(const float* data, size_t count, float* out);

// Calls compute(begin, count, are_few) for the samples that the same kernels compute: all, or those
// of each share.
template <typename Compute>
void by_kernels(const States& states, Compute compute) {
    const size_t first = states.first();
    const bool few = first < few_samples, few_in_rest = states.rest < few_samples;
    if (states.rest == 0 || few == few_in_rest) {
        compute(size_t{0}, states.batch, few);
        return;
    }
    compute(size_t{0}, first, few);
    compute(first, states.rest, few_in_rest);
}

// A matrix of parameters: rows of `columns` are `row` floats apart.
struct Shape {
    size_t rows = 0;
    size_t columns = 0;
    size_t row = 0;
};

// Calls write(begin, count, weights, biases) for the samples of each share, and adds up the deltas,
// by means of `memory`.
template <typename Write>
void write_by_shares(const States& states, const Block& weights, const Block& biases,
                     const Shape& shape, Memory& memory, Write write) {
    const size_t first = states.first();
    write(size_t{0}, first, weights, biases);
    if (states.rest == 0) return;
    float* data = memory.take(2 * (weights.count + biases.count));
    const auto divert = [&](Block block) {
        block.delta_mu = data;
        block.delta_var = data + block.count;
        data += 2 * block.count;
        return block;
    };
    const Block second_weights = divert(weights), second_biases = divert(biases);
    write(first, states.rest, second_weights, second_biases);
    const auto add = [](const Block& from, const Block& to, size_t begin, size_t count) {
        add_floats(from.delta_mu + begin, count, to.delta_mu + begin);
        add_floats(from.delta_var + begin, count, to.delta_var + begin);
    };
    if (shape.columns == shape.row) {
        add(second_weights, weights, 0, shape.rows * shape.row);
    } else {
        for (size_t r = 0; r < shape.rows; ++r) {
            add(second_weights, weights, r * shape.row, shape.columns);
        }
    }
    add(second_biases, biases, 0, biases.count);
}

}  // namespace tagi_ddp
