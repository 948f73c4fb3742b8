// LSTM and linear layers that store a series, and smooth it backwards in time: Rauch, Tung,
// Striebel, Maximum likelihood estimates of linear dynamic systems, AIAA Journal 3 (1965).
//
// They compute as the engine does. A series is a sequence of batches of one sample and one step.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "compute/linear.h"
#include "compute/lstm.h"

namespace tagi_ddp {

// Gaussians of each step of a series, [steps, width].
struct Series {
    std::vector<float> mean;
    std::vector<float> variance;
};

// The next step of a series.
class SeriesStep {
 public:
    size_t samples() const { return samples_; }
    size_t step() const { return step_; }
    // Returns true if the number of samples changes.
    bool set_samples(size_t samples);
    // Throws std::invalid_argument if the series is full.
    void require_room() const;
    void advance() { ++step_; }
    void restart() { step_ = 0; }

 private:
    size_t samples_ = 0;
    size_t step_ = 0;
};

class SLSTM : public LSTM {
 public:
    using LSTM::LSTM;

    // Sets the number of steps of a series; clears the last series if it changes.
    void set_samples(size_t samples);
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;
    void keep() override;
    void restore() override;

    // Resets the states to zero, and begins a new series.
    void reset_states() override;
    // Smooths the series so far, and begins a new one. Returns the hidden states.
    const Series& smooth();
    // The smoothed states of a step. Throws std::invalid_argument if the series has no such step.
    RecurrentStates smoothed_states(size_t step) const;

 private:
    // The arrays that forward and backward write; each has a row for each step.
    std::vector<std::vector<float>*> written();
    void log_row();

    SeriesStep step_, saved_step_;
    std::vector<std::pair<size_t, std::vector<float>>> log_;  // overwritten rows since `keep`
    bool logs_ = false;
    Series prior_h_, prior_c_, posterior_h_, posterior_c_, smoothed_h_, smoothed_c_;
    // The covariances of a step with the step before: of cells, [steps, outputs], and of hidden
    // states, [steps, outputs, outputs before].
    std::vector<float> covariance_c_, covariance_h_;
};

// A linear layer of one output, at the end of a network.
class SLinear : public Linear {
 public:
    SLinear(Gaussians gaussians, size_t inputs) : Linear(gaussians, 1, inputs) {}

    void set_samples(size_t samples);
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;
    void keep() override { saved_step_ = step_; }
    void restore() override { step_ = saved_step_; }

    void restart() { step_.restart(); }
    // Computes the outputs from smoothed hidden states, and begins a new series.
    void smooth(const Series& hidden);
    const Series& smoothed() const { return smoothed_; }

 private:
    SeriesStep step_, saved_step_;
    Series smoothed_;
};

}  // namespace tagi_ddp
