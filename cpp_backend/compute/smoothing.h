// LSTM and linear layers that remember a series, and smooth it backwards in time: Rauch, Tung,
// Striebel, Maximum likelihood estimates of linear dynamic systems, AIAA Journal 3 (1965).
//
// As the engine computes it. A series is one sample of one step after another.
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

// Which step of a series comes next.
class SeriesStep {
 public:
    size_t samples() const { return samples_; }
    size_t step() const { return step_; }
    bool is_full() const { return step_ >= samples_; }
    // Tells whether the number of samples is another one than before.
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

    // How many steps a series has; forgets the last one if that changes.
    void set_samples(size_t samples);
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;
    void keep() override;
    void restore() override;

    void reset_states() override;  // and begins another series
    // Smooths the series so far, and begins another. Returns the hidden states.
    const Series& smooth();
    // The smoothed states of a step. Throws std::invalid_argument for one that is not there.
    RecurrentStates smoothed_states(size_t step) const;

 private:
    std::vector<std::vector<float>*> written();  // by forward and backward: a row for each step

    void log_row();

    SeriesStep step_, kept_step_;
    std::vector<std::pair<size_t, std::vector<float>>> log_;  // rows overwritten since `keep`
    bool logs_ = false;
    Series prior_h_, prior_c_, posterior_h_, posterior_c_, smoothed_h_, smoothed_c_;
    std::vector<float> covariance_c_;  // of a step's cells with those before, [steps, outputs]
    std::vector<float> covariance_h_;  // [steps, outputs, outputs before]
};

// A linear layer of one output, at the end of a network.
class SLinear : public Linear {
 public:
    SLinear(Gaussians gaussians, size_t inputs) : Linear(gaussians, 1, inputs) {}

    void set_samples(size_t samples);
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;
    void keep() override { kept_step_ = step_; }
    void restore() override { step_ = kept_step_; }

    void restart() { step_.restart(); }
    // The outputs of smoothed hidden states; begins another series.
    void smooth(const Series& hidden);
    const Series& smoothed() const { return smoothed_; }

 private:
    SeriesStep step_, kept_step_;
    Series smoothed_;
};

}  // namespace tagi_ddp
