// LSTM layers: c = f * c' + i * g and h = o * tanh(c) at each step, with gates of (x, h').
//
// Source of the formulas: Vuong, Nguyen, Goulet, Coupling LSTM neural networks and state-space
// models through analytically tractable inference, International Journal of Forecasting 41 (2025).
//
// Engines differ in h' and c', see `Recurrence`. Without recurrence they are those of the step
// before only across batches of one sample and one step. Otherwise they are zero, or the states
// that `set_states` has set. So all steps of all samples are computed at once, each as a row, and
// without h' and c' there is no forget gate. With recurrence the steps are computed one after the
// other, the first from zeros, or for one sample of one step from the states of the batch before.
#pragma once

#include <array>
#include <vector>

#include "compute/linear.h"

namespace tagi_ddp {

// Means and variances of hidden states, then of cells.
using RecurrentStates = std::array<std::vector<float>, 4>;

// The recurrence within a sample. Without one, inputs are [batch, steps * inputs]; with one, a row
// is a step, [batch * steps, inputs], and outputs are those of all steps or of each sample's last
// one.
enum class Recurrence { none, all_steps, last_step };

// Weights are [gates, outputs, inputs and outputs].
class LSTM : public Layer {
 public:
    LSTM(Gaussians gaussians, size_t outputs, size_t inputs, size_t steps,
         Recurrence recurrence = Recurrence::none);

    size_t width() const override { return is_recurrent() ? outputs_ : steps_ * outputs_; }
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;

    void keep() override;
    void restore() override;

    // Resets the states to zero.
    virtual void reset_states() { clear_states(); }
    // The number of samples of the last batch; 0 before the first.
    size_t batch() const { return batch_; }
    // The states before the next batch of one sample and one step: [batch * steps * outputs] each.
    RecurrentStates get_states() const;
    // Sets the states for the next batch, of `batch` samples; resets them if they are empty. Throws
    // std::invalid_argument for wrong sizes.
    void set_states(const RecurrentStates& states, size_t batch);

 protected:
    // Means and variances of hidden states and of cells, [rows, gate_stride()].
    struct RowStates {
        Memory mean_h, var_h, mean_c, var_c;

        std::array<Memory*, 4> parts() { return {&mean_h, &var_h, &mean_c, &var_c}; }
        std::array<const Memory*, 4> parts() const { return {&mean_h, &var_h, &mean_c, &var_c}; }
        void copy_from(const RowStates& other, size_t floats);
        std::array<float*, 4> data() {
            return {mean_h.data(), var_h.data(), mean_c.data(), var_c.data()};
        }
    };

    void clear_states();
    size_t state_floats() const { return batch_ * steps_ * gate_stride(); }
    size_t outputs() const { return outputs_; }
    size_t inputs() const { return inputs_; }
    size_t gate_stride() const { return padded(outputs_); }
    bool is_single() const { return batch_ == 1 && steps_ == 1; }
    // The derivative of output `o` of the first row by a gate's sum.
    float slope(size_t gate, size_t o) { return slopes_.data()[gate * gate_stride() + o]; }
    // The weights of output `o` in a gate.
    const float* gate_weights(size_t gate, size_t o) const;
    // The mean of the forget gate of output `o` of the first row.
    float forget_gate(size_t o) { return has_forget_gate_ ? forget_.data()[o] : 0.0f; }

    RowStates before_;  // the states with which the last batch began
    RowStates after_;   // the states with which the next one begins
    bool has_forget_gate_ = false;

 private:
    struct Saved {
        RowStates before, after;
        size_t batch = 0;
        bool has_states = false;
    };

    // Rows of a batch: `first`, `first + every`, ...
    struct Rows {
        size_t first, every, count;
    };

    bool is_recurrent() const { return recurrence_ != Recurrence::none; }
    GaussianMatrix gate(size_t index) const;
    void gather(const States& inputs);
    void find_covariances(const States& inputs, float* out, size_t stride);
    void compute(Rows rows);
    void carry(Rows rows);
    States collect();
    // The innovation of the outputs of a row, or null if it is not an output.
    Deltas delta_of(const Deltas& deltas, size_t row) const;
    void go_back(Deltas deltas, Deltas below);

    Gaussians gaussians_;
    size_t outputs_;
    size_t inputs_;
    size_t steps_;
    Recurrence recurrence_;
    size_t batch_ = 0;
    bool has_states_ = false;  // false if all are zero
    Saved saved_;
    size_t input_stride_ = 0;
    States rows_;  // x, and h' if there are states
    Products products_;
    Memory row_mean_, row_variance_, squares_, sum_mean_, sum_variance_, packed_, covariances_;
    Memory slopes_, cell_slopes_, forget_, mean_, variance_;
    RowStates outputs_of_rows_;
    Memory by_mean_, by_variance_, below_mean_, below_variance_;
    Memory combined_mean_, combined_variance_, back_mean_, back_variance_;
};

}  // namespace tagi_ddp
