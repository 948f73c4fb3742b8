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

LSTM::LSTM(Gaussians gaussians, size_t outputs, size_t inputs, size_t steps)
    : gaussians_(gaussians), outputs_(outputs), inputs_(inputs), steps_(steps) {}

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
        throw std::invalid_argument(std::string(names[p]) + " has " +
                                    std::to_string(states[p].size()) + " elements; give " +
                                    std::to_string(batch) + " * " + std::to_string(width()) +
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

void LSTM::gather(const States& inputs) {
    const size_t rows = inputs.batch * steps_;
    const size_t depth = inputs_ + (has_states_ ? outputs_ : 0), stride = padded(depth);
    float* mean = row_mean_.take(rows * stride);
    float* variance = row_variance_.take(rows * stride);
    for (size_t r = 0; r < rows; ++r) {
        const size_t from = r / steps_ * inputs.stride + r % steps_ * inputs_;
        std::copy_n(inputs.mean + from, inputs_, mean + r * stride);
        std::copy_n(inputs.variance + from, inputs_, variance + r * stride);
        if (!has_states_) continue;
        const size_t h = r * gate_stride();
        std::copy_n(before_.mean_h.data() + h, outputs_, mean + r * stride + inputs_);
        std::copy_n(before_.var_h.data() + h, outputs_, variance + r * stride + inputs_);
    }
    rows_ = {mean, variance, nullptr, rows, depth, stride, inputs.exact && !has_states_};
    square(mean, rows * stride, squares_.take(rows * stride));
}

void LSTM::find_covariances() {
    const size_t row = inputs_ + outputs_, stride = gate_stride();
    const float* weights = gaussians_.weights->mu;
    float* out = covariances_.take(rows_.batch * pairs * stride);
    if (rows_.batch < few_samples) {
        for (size_t r = 0; r < rows_.batch; ++r) {
            TAGI_DDP_PICK(covariances_one)(weights, outputs_, inputs_, row,
                                           rows_.variance + r * rows_.stride, rows_.width, stride,
                                           out + r * pairs * stride);
        }
        return;
    }
    float* packed = packed_.take(rows_.width * pairs * stride);
    TAGI_DDP_PICK(pack_pairs)(weights, outputs_, inputs_, row, rows_.width, stride, packed);
    product(rows_.batch, rows_.width, pairs * stride, {rows_.variance, rows_.stride, 1}, packed,
            pairs * stride, out, pairs * stride, AddTo::zero);
}

States LSTM::forward(const States& inputs, bool) {
    if (inputs.batch != batch_) {
        batch_ = inputs.batch;
        clear_states();
    }
    input_stride_ = inputs.stride;
    if (is_single()) std::swap(before_, after_);
    gather(inputs);
    const size_t rows = rows_.batch, stride = gate_stride();
    float* sum_mean = sum_mean_.take(rows * gates * stride);
    float* sum_variance = sum_variance_.take(rows * gates * stride);
    has_forget_gate_ = has_states_;
    for (size_t g = has_forget_gate_ ? forget : input; g < gates; ++g) {
        products_.forward(gate(g), rows_, squares_.data(), sum_mean + g * stride,
                          sum_variance + g * stride, gates * stride);
    }
    if (!rows_.exact) find_covariances();
    for (Memory* memory : outputs_of_rows_.parts()) memory->take(rows * stride);
    const auto [mean_h, var_h, mean_c, var_c] = outputs_of_rows_.data();
    float* slopes = slopes_.take(rows * gates * stride);
    float* cell_slopes = cell_slopes_.take(rows * stride);
    float* forgets = forget_.take(rows * stride);
    for (size_t r = 0; r < rows; ++r) {
        const size_t at = r * stride;
        TAGI_DDP_PICK(compute_cells)({stride, sum_mean + gates * at, sum_variance + gates * at,
                                      rows_.exact ? nullptr : covariances_.data() + pairs * at,
                                      has_forget_gate_ ? before_.mean_c.data() + at : nullptr,
                                      before_.var_c.data() + at, mean_c + at, var_c + at,
                                      mean_h + at, var_h + at, slopes + gates * at,
                                      cell_slopes + at, forgets + at});
    }
    if (is_single()) {
        after_.copy_from(outputs_of_rows_, stride);
        has_states_ = true;
    }
    const size_t out_stride = padded(width());
    float* mean = mean_.take(batch_ * out_stride);
    float* variance = variance_.take(batch_ * out_stride);
    for (size_t r = 0; r < rows; ++r) {
        const size_t to = r / steps_ * out_stride + r % steps_ * outputs_;
        std::copy_n(mean_h + r * stride, outputs_, mean + to);
        std::copy_n(var_h + r * stride, outputs_, variance + to);
    }
    return {mean, variance, nullptr, batch_, width(), out_stride, false};
}

Deltas LSTM::backward(Deltas deltas, bool to_input) {
    const size_t rows = rows_.batch, stride = gate_stride(), row = inputs_ + outputs_;
    const size_t delta_stride = padded(width());
    const Block& weights = *gaussians_.weights;
    const Block& biases = *gaussians_.biases;
    const auto delta_at = [&](size_t r) {
        return r / steps_ * delta_stride + r % steps_ * outputs_;
    };
    float* by_mean = by_mean_.take(rows * gates * stride);
    float* by_variance = by_variance_.take(rows * gates * stride);
    for (size_t r = 0; r < rows; ++r) {
        const size_t at = r * gates * stride;
        TAGI_DDP_PICK(spread_over_gates)(slopes_.data() + at, outputs_, stride,
                                         deltas.mean + delta_at(r), deltas.variance + delta_at(r),
                                         by_mean + at, by_variance + at);
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
    if (!to_input) return {};
    const size_t floats = batch_ * input_stride_;
    const Deltas below{below_mean_.take(floats), below_variance_.take(floats)};
    for (size_t r = 0; r < rows; ++r) {
        const size_t to = r / steps_ * input_stride_ + r % steps_ * inputs_;
        TAGI_DDP_PICK(below_one)(weights.mu, outputs_, inputs_, row,
                                 slopes_.data() + r * gates * stride, stride,
                                 deltas.mean + delta_at(r), deltas.variance + delta_at(r),
                                 below.mean + to, below.variance + to);
    }
    return below;
}

}  // namespace tagi_ddp
