#include "compute/lstm.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "compute/product.h"

namespace tagi_ddp {
namespace {

enum Gate : size_t { forget, input, cell, output, gates };
// Pairs of gates whose sums have a covariance, in the order of their memory.
enum Pair : size_t { input_cell, forget_output, input_output, cell_output, pairs };
constexpr Gate pair_gates[pairs][2] = {
    {input, cell}, {forget, output}, {input, output}, {cell, output}};

// The inputs and outputs of one row; its gates are `stride` floats apart.
struct Row {
    size_t stride;
    const float* sum_mean;
    const float* sum_variance;
    const float* covariances;    // of the gates' sums; null if they are zero
    const float* before_mean_c;  // null without states, and without a forget gate
    const float* before_var_c;
    float* mean_c;
    float* var_c;
    float* mean_h;
    float* var_h;
    float* slopes;       // derivatives of h by the sums of the gates
    float* cell_slopes;  // derivatives of h by the cells
    float* forget;       // means of the forget gate
};

}  // namespace
}  // namespace tagi_ddp

#define TAGI_DDP_LOOPS "compute/lstm_loops.h"
#include "compute/twice.h"

namespace tagi_ddp {

LSTM::LSTM(Gaussians gaussians, size_t outputs, size_t inputs, size_t steps, Recurrence recurrence)
    : gaussians_(gaussians),
      outputs_(outputs),
      inputs_(inputs),
      steps_(steps),
      recurrence_(recurrence) {}

const float* LSTM::gate_weights(size_t gate, size_t o) const {
    return gaussians_.weights->mu + (gate * outputs_ + o) * (inputs_ + outputs_);
}

// The matrix of a gate, without the columns of h' if there are no states.
GaussianMatrix LSTM::gate(size_t index) const {
    const size_t row = inputs_ + outputs_;
    const auto part = [](const Block& block, size_t begin, size_t count) {
        return Block{block.mu + begin,
                     block.var + begin,
                     block.delta_mu + begin,
                     block.delta_var + begin,
                     count,
                     nullptr};
    };
    const Block none;
    return {part(*gaussians_.weights, index * outputs_ * row, outputs_ * row),
            gaussians_.has_biases() ? part(*gaussians_.biases, index * outputs_, outputs_) : none,
            outputs_, rows_.width, row};
}

void LSTM::RowStates::copy_from(const RowStates& other, size_t floats) {
    for (size_t p = 0; p < parts().size(); ++p) {
        std::copy_n(other.parts()[p]->data(), floats, parts()[p]->take(floats));
    }
}

void LSTM::clear_states() {
    for (RowStates* states : {&before_, &after_}) {
        for (Memory* memory : states->parts()) {
            std::fill_n(memory->take(state_floats()), state_floats(), 0.0f);
        }
    }
    has_states_ = false;
}

void LSTM::keep() {
    saved_.batch = batch_;
    saved_.has_states = has_states_;
    if (!has_states_) return;
    saved_.before.copy_from(before_, state_floats());
    saved_.after.copy_from(after_, state_floats());
}

void LSTM::restore() {
    batch_ = saved_.batch;
    clear_states();
    if (!saved_.has_states) return;
    before_.copy_from(saved_.before, state_floats());
    after_.copy_from(saved_.after, state_floats());
    has_states_ = true;
}

RecurrentStates LSTM::get_states() const {
    RecurrentStates states;
    const auto parts = after_.parts();
    for (size_t p = 0; p < states.size(); ++p) {
        for (size_t r = 0; r < batch_ * steps_; ++r) {
            const float* row = parts[p]->data() + r * gate_stride();
            states[p].insert(states[p].end(), row, row + outputs_);
        }
    }
    return states;
}

void LSTM::set_states(const RecurrentStates& states, size_t batch) {
    const bool empty =
        std::all_of(states.begin(), states.end(), [](const auto& part) { return part.empty(); });
    static const char* const names[] = {"mu_h", "var_h", "mu_c", "var_c"};
    const size_t rows = batch * steps_;
    for (size_t p = 0; p < states.size() && !empty; ++p) {
        if (states[p].size() == rows * outputs_) continue;
        throw std::invalid_argument(
            std::string(names[p]) + " has " + std::to_string(states[p].size()) +
            " elements; give " + std::to_string(batch) + " * " + std::to_string(steps_ * outputs_) +
            ": the last batch's samples by steps * outputs");
    }
    batch_ = batch;
    const auto is_zero = [](float value) { return value == 0.0f; };
    if (empty || std::all_of(states.begin(), states.end(), [&](const auto& part) {
            return std::all_of(part.begin(), part.end(), is_zero);
        })) {
        clear_states();  // get_states() returns zeros if there are no states
        return;
    }
    for (RowStates* own : {&before_, &after_}) {
        const auto parts = own->parts();
        for (size_t p = 0; p < states.size(); ++p) {
            float* to = parts[p]->take(rows * gate_stride());
            for (size_t r = 0; r < rows; ++r) {
                std::copy_n(states[p].data() + r * outputs_, outputs_, to + r * gate_stride());
            }
        }
    }
    has_states_ = true;
}

// Copies the inputs, and the states h' of the first step, to rows.
void LSTM::gather(const States& inputs) {
    const size_t rows = batch_ * steps_;
    const size_t depth = inputs_ + (has_forget_gate_ ? outputs_ : 0), stride = padded(depth);
    float* mean = row_mean_.take(rows * stride);
    float* variance = row_variance_.take(rows * stride);
    for (size_t r = 0; r < rows; ++r) {
        const size_t from =
            is_recurrent() ? r * inputs.stride : r / steps_ * inputs.stride + r % steps_ * inputs_;
        std::copy_n(inputs.mean + from, inputs_, mean + r * stride);
        std::copy_n(inputs.variance + from, inputs_, variance + r * stride);
    }
    rows_ = {mean, variance, nullptr, rows, depth, stride, inputs.exact && !has_forget_gate_};
    squares_.take(rows * stride);
}

void LSTM::find_covariances(const States& inputs, float* out, size_t every) {
    const size_t row = inputs_ + outputs_, stride = gate_stride();
    const float* weights = gaussians_.weights->mu;
    if (inputs.batch < few_samples) {
        for (size_t r = 0; r < inputs.batch; ++r) {
            TAGI_DDP_PICK(covariances_one)(weights, outputs_, inputs_, row,
                                           inputs.variance + r * inputs.stride, inputs.width,
                                           stride, out + r * every);
        }
        return;
    }
    float* packed = packed_.take(inputs.width * pairs * stride);
    TAGI_DDP_PICK(pack_pairs)(weights, outputs_, inputs_, row, inputs.width, stride, packed);
    product(inputs.batch, inputs.width, pairs * stride, {inputs.variance, inputs.stride, 1}, packed,
            pairs * stride, out, every, AddTo::zero);
}

// Computes the outputs of rows from their inputs and the states before them.
void LSTM::compute(Rows rows) {
    const size_t stride = gate_stride();
    for (size_t r = rows.first, k = 0; k < rows.count && has_forget_gate_; ++k, r += rows.every) {
        const size_t to = r * rows_.stride + inputs_;
        std::copy_n(before_.mean_h.data() + r * stride, outputs_, row_mean_.data() + to);
        std::copy_n(before_.var_h.data() + r * stride, outputs_, row_variance_.data() + to);
    }
    const size_t parts = rows.every == 1 ? 1 : rows.count, part = rows.count / parts;
    for (size_t k = 0; k < parts; ++k) {
        const size_t from = (rows.first + k * rows.every) * rows_.stride;
        square(row_mean_.data() + from, part * rows_.stride, squares_.data() + from);
    }
    States inputs = rows_;
    inputs.mean += rows.first * rows_.stride;
    inputs.variance += rows.first * rows_.stride;
    inputs.batch = rows.count;
    inputs.stride = rows.every * rows_.stride;
    const float* squares = squares_.data() + rows.first * rows_.stride;
    const size_t begin = rows.first * gates * stride, every = rows.every * gates * stride;
    for (size_t g = has_forget_gate_ ? forget : input; g < gates; ++g) {
        products_.forward(gate(g), inputs, squares, sum_mean_.data() + begin + g * stride,
                          sum_variance_.data() + begin + g * stride, every);
    }
    if (!inputs.exact) {
        find_covariances(inputs, covariances_.data() + rows.first * pairs * stride,
                         rows.every * pairs * stride);
    }
    const auto [mean_h, var_h, mean_c, var_c] = outputs_of_rows_.data();
    for (size_t r = rows.first, k = 0; k < rows.count; ++k, r += rows.every) {
        const size_t at = r * stride;
        TAGI_DDP_PICK(compute_cells)(
            {stride, sum_mean_.data() + gates * at, sum_variance_.data() + gates * at,
             inputs.exact ? nullptr : covariances_.data() + pairs * at,
             has_forget_gate_ ? before_.mean_c.data() + at : nullptr, before_.var_c.data() + at,
             mean_c + at, var_c + at, mean_h + at, var_h + at, slopes_.data() + gates * at,
             cell_slopes_.data() + at, forget_.data() + at});
    }
}

// Makes the outputs of rows the states before the rows that follow.
void LSTM::carry(Rows rows) {
    const auto from = outputs_of_rows_.data(), to = before_.data();
    for (size_t r = rows.first, k = 0; k < rows.count; ++k, r += rows.every) {
        for (size_t p = 0; p < to.size(); ++p) {
            std::copy_n(from[p] + r * gate_stride(), gate_stride(),
                        to[p] + (r + 1) * gate_stride());
        }
    }
}

States LSTM::forward(const States& inputs, bool) {
    const size_t samples = is_recurrent() ? inputs.batch / steps_ : inputs.batch;
    if (samples != batch_) {
        batch_ = samples;
        clear_states();
    }
    input_stride_ = inputs.stride;
    if (is_single()) std::swap(before_, after_);
    has_forget_gate_ = is_recurrent() && !is_single() ? steps_ > 1 : has_states_;
    gather(inputs);
    const size_t rows = rows_.batch, stride = gate_stride();
    for (Memory* memory : outputs_of_rows_.parts()) memory->take(rows * stride);
    for (Memory* memory : {&sum_mean_, &sum_variance_, &slopes_}) {
        memory->take(rows * gates * stride);
    }
    for (Memory* memory : {&cell_slopes_, &forget_}) memory->take(rows * stride);
    if (!rows_.exact) covariances_.take(rows * pairs * stride);
    if (is_recurrent() && !is_single()) {
        for (Memory* memory : before_.parts()) {
            std::fill_n(memory->take(rows * stride), rows * stride, 0.0f);
        }
        for (size_t t = 0; t < steps_; ++t) {
            compute({t, steps_, batch_});
            if (t + 1 < steps_) carry({t, steps_, batch_});
        }
    } else {
        compute({0, 1, rows});
    }
    if (is_single()) {
        after_.copy_from(outputs_of_rows_, stride);
        has_states_ = true;
    }
    return collect();
}

// Returns the outputs of the rows.
States LSTM::collect() {
    const bool last = recurrence_ == Recurrence::last_step;
    const size_t rows = rows_.batch, out_stride = padded(width());
    const size_t count = last || !is_recurrent() ? batch_ : rows;
    float* mean = mean_.take(count * out_stride);
    float* variance = variance_.take(count * out_stride);
    const float* const mean_h = outputs_of_rows_.mean_h.data();
    const float* const var_h = outputs_of_rows_.var_h.data();
    for (size_t r = 0; r < rows; ++r) {
        if (last && (r + 1) % steps_ != 0) continue;
        const size_t to = last             ? r / steps_ * out_stride
                          : is_recurrent() ? r * out_stride
                                           : r / steps_ * out_stride + r % steps_ * outputs_;
        std::copy_n(mean_h + r * gate_stride(), outputs_, mean + to);
        std::copy_n(var_h + r * gate_stride(), outputs_, variance + to);
    }
    return {mean, variance, nullptr, count, width(), out_stride, false};
}

Deltas LSTM::delta_of(const Deltas& deltas, size_t r) const {
    const size_t stride = padded(width());
    size_t at = r * stride;
    if (recurrence_ == Recurrence::none) at = r / steps_ * stride + r % steps_ * outputs_;
    if (recurrence_ == Recurrence::last_step) {
        if ((r + 1) % steps_ != 0) return {};
        at = r / steps_ * stride;
    }
    return {deltas.mean + at, deltas.variance + at};
}

// Spreads the innovation of the outputs over the gates' sums, step by step from the last one to the
// first: that of h' is added to the outputs' of the step before. Writes the inputs' to `below`.
void LSTM::go_back(Deltas deltas, Deltas below) {
    const size_t rows = rows_.batch, stride = gate_stride(), row = inputs_ + outputs_;
    float* mean = combined_mean_.take(rows * stride);
    float* variance = combined_variance_.take(rows * stride);
    float* back_mean = back_mean_.take(row);
    float* back_variance = back_variance_.take(row);
    std::fill_n(mean, rows * stride, 0.0f);
    std::fill_n(variance, rows * stride, 0.0f);
    for (size_t r = rows; r-- > 0;) {
        const size_t at = r * stride;
        if (const Deltas own = delta_of(deltas, r); own.mean != nullptr) {
            for (size_t o = 0; o < outputs_; ++o) {
                mean[at + o] += own.mean[o];
                variance[at + o] += own.variance[o];
            }
        }
        TAGI_DDP_PICK(spread_over_gates)(slopes_.data() + gates * at, outputs_, stride, mean + at,
                                         variance + at, by_mean_.data() + gates * at,
                                         by_variance_.data() + gates * at);
        TAGI_DDP_PICK(below_one)(gaussians_.weights->mu, outputs_, row, row,
                                 slopes_.data() + gates * at, stride, mean + at, variance + at,
                                 back_mean, back_variance);
        if (below.mean != nullptr) {
            std::copy_n(back_mean, inputs_, below.mean + r * input_stride_);
            std::copy_n(back_variance, inputs_, below.variance + r * input_stride_);
        }
        if (r % steps_ == 0) continue;
        std::copy_n(back_mean + inputs_, outputs_, mean + at - stride);
        std::copy_n(back_variance + inputs_, outputs_, variance + at - stride);
    }
}

Deltas LSTM::backward(Deltas deltas, bool to_input) {
    const size_t rows = rows_.batch, stride = gate_stride(), row = inputs_ + outputs_;
    const Block& weights = *gaussians_.weights;
    const Block& biases = *gaussians_.biases;
    float* by_mean = by_mean_.take(rows * gates * stride);
    float* by_variance = by_variance_.take(rows * gates * stride);
    Deltas below;
    if (to_input) {
        const size_t floats = (is_recurrent() ? rows : batch_) * input_stride_;
        below = {below_mean_.take(floats), below_variance_.take(floats)};
    }
    if (is_recurrent()) {
        go_back(deltas, below);
    } else {
        for (size_t r = 0; r < rows; ++r) {
            const size_t at = r * gates * stride;
            const Deltas own = delta_of(deltas, r);
            TAGI_DDP_PICK(spread_over_gates)(slopes_.data() + at, outputs_, stride, own.mean,
                                             own.variance, by_mean + at, by_variance + at);
        }
    }
    if (!has_forget_gate_) {  // the deltas of its weights, and of h', are zero
        std::fill_n(weights.delta_mu, weights.count, 0.0f);
        std::fill_n(weights.delta_var, weights.count, 0.0f);
        std::fill_n(biases.delta_mu, biases.count, 0.0f);
        std::fill_n(biases.delta_var, biases.count, 0.0f);
    }
    for (size_t g = has_forget_gate_ ? forget : input; g < gates; ++g) {
        products_.write_deltas(gate(g), rows_, squares_.data(),
                               {by_mean + g * stride, by_variance + g * stride}, gates * stride);
    }
    if (is_recurrent()) return below;  // Engines with recurrence do not correct the states.
    if (is_single()) {
        for (size_t o = 0; o < outputs_; ++o) {
            const float dm = deltas.mean[o], dv = deltas.variance[o];
            float& var_h = after_.var_h.data()[o];
            float& var_c = after_.var_c.data()[o];
            const float gain = var_c * cell_slopes_.data()[o];
            after_.mean_h.data()[o] += dm * var_h;
            after_.mean_c.data()[o] += dm * gain;
            var_h += dv * var_h * var_h;
            var_c += dv * gain * gain;
        }
    }
    for (size_t r = 0; r < rows && to_input; ++r) {
        const size_t to = r / steps_ * input_stride_ + r % steps_ * inputs_;
        const Deltas own = delta_of(deltas, r);
        TAGI_DDP_PICK(below_one)(weights.mu, outputs_, inputs_, row,
                                 slopes_.data() + r * gates * stride, stride, own.mean,
                                 own.variance, below.mean + to, below.variance + to);
    }
    return below;
}

}  // namespace tagi_ddp
