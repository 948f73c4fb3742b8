// LSTM layers: c = f * c' + i * g and h = o * tanh(c) at each step, the gates linear in (x, h').
//
// Source of the formulas: Vuong, Nguyen, Goulet, Coupling LSTM neural networks and state-space
// models through analytically tractable inference, International Journal of Forecasting 41 (2025).
//
// As in the engine, h' and c' are not what the step before made, except across batches of one
// sample and one step: within a sequence, and else, they are zero or what `set_states` said. So all
// steps of all samples are computed at once, each a row, and without h' and c' there is no forget
// gate.
#pragma once

#include <array>
#include <vector>

#include "compute/linear.h"

namespace tagi_ddp {

// Means and variances of hidden states, then of cells.
using RecurrentStates = std::array<std::vector<float>, 4>;

// Weights are [gates, outputs, inputs and outputs]; inputs [batch, steps * inputs].
class LSTM : public Layer {
 public:
    LSTM(Gaussians gaussians, size_t outputs, size_t inputs, size_t steps);

    size_t width() const override { return steps_ * outputs_; }
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;

    void keep() override;
    void restore() override;

    // Forgets the batches before.
    virtual void reset_states() { clear_states(); }
    // The samples of the batch whose states the layer holds; 0 before the first.
    size_t batch() const { return batch_; }
    // What the next batch of one sample and one step begins with; each [batch * steps * outputs].
    RecurrentStates get_states() const;
    // Sets them for the next batch, of `batch` samples; empty ones reset. Throws
    // std::invalid_argument where sizes do not fit.
    void set_states(const RecurrentStates& states, size_t batch);

 protected:
    // Means and variances of hidden states and of cells, [rows, gate_stride()].
    struct Carried {
        Memory mean_h, var_h, mean_c, var_c;

        std::array<Memory*, 4> parts() { return {&mean_h, &var_h, &mean_c, &var_c}; }
        std::array<const Memory*, 4> parts() const { return {&mean_h, &var_h, &mean_c, &var_c}; }
        void copy_from(const Carried& other, size_t floats);
    };

    void clear_states();
    size_t carried_floats() const { return batch_ * steps_ * gate_stride(); }
    size_t outputs() const { return outputs_; }
    size_t inputs() const { return inputs_; }
    size_t gate_stride() const { return padded(outputs_); }
    bool is_single() const { return batch_ == 1 && steps_ == 1; }
    // Of output `o` of the first row: the derivative of h by the sum of a gate; the gate's weights.
    float slope(size_t gate, size_t o) { return slopes_.data()[gate * gate_stride() + o]; }
    const float* gate_weights(size_t gate, size_t o) const;
    float forget_gate(size_t o) { return has_forget_gate_ ? forget_.data()[o] : 0.0f; }

    Carried before_;  // what the last batch began with
    Carried after_;   // what the next one begins with
    bool has_forget_gate_ = false;

 private:
    struct Kept {
        Carried before, after;
        size_t batch = 0;
        bool carries = false;
    };

    GaussianMatrix gate(size_t index) const;
    void gather(const States& inputs);
    void find_covariances();

    Gaussians gaussians_;
    size_t outputs_;
    size_t inputs_;
    size_t steps_;
    size_t batch_ = 0;
    bool carries_ = false;
    Kept kept_;
    size_t input_stride_ = 0;
    States rows_;  // x and, if it is carried, h'
    Products products_;
    Memory row_mean_, row_variance_, squares_, sum_mean_, sum_variance_, packed_, covariances_;
    Memory slopes_, cell_slopes_, forget_, mean_h_, var_h_, mean_c_, var_c_, mean_, variance_;
    Memory by_mean_, by_variance_, below_mean_, below_variance_;
};

}  // namespace tagi_ddp
