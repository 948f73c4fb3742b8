#include "compute/smoothing.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace tagi_ddp {
namespace {

constexpr float least = 1e-5f;  // replaces a variance that is not positive

void clear(Series& series, size_t size) {
    series.mean.assign(size, 0.0f);
    series.variance.assign(size, 0.0f);
}

void write(Series& series, size_t step, const Memory& mean, const Memory& variance, size_t width) {
    std::copy_n(mean.data(), width, series.mean.begin() + static_cast<ptrdiff_t>(step * width));
    std::copy_n(variance.data(), width,
                series.variance.begin() + static_cast<ptrdiff_t>(step * width));
}

std::vector<float> part(const std::vector<float>& all, size_t begin, size_t count) {
    return {all.begin() + static_cast<ptrdiff_t>(begin),
            all.begin() + static_cast<ptrdiff_t>(begin + count)};
}

// The correction of a state by the smoothed states of the next step, with their covariances.
struct Correction {
    float mean = 0.0f;
    float variance = 0.0f;

    void add(float covariance, const Series& prior, const Series& smoothed, size_t next) {
        const float variance_before = prior.variance[next];
        const float factor = covariance / (variance_before <= 0.0f ? least : variance_before);
        mean += factor * (smoothed.mean[next] - prior.mean[next]);
        variance += factor * (smoothed.variance[next] - variance_before) * factor;
    }

    void apply(const Series& posterior, Series& smoothed, size_t at) const {
        smoothed.mean[at] = posterior.mean[at] + mean;
        const float updated = posterior.variance[at] + variance;
        smoothed.variance[at] = updated < 0.0f ? least : updated;
    }
};

}  // namespace

bool SeriesStep::set_samples(size_t samples) {
    if (samples == samples_) return false;
    samples_ = samples;
    step_ = 0;
    return true;
}

void SeriesStep::require_room() const {
    if (step_ < samples_) return;
    throw std::invalid_argument(
        "the series has more than num_samples = " + std::to_string(samples_) +
        " steps: set num_samples before, or call smoother() at its end");
}

void SLSTM::set_samples(size_t samples) {
    if (!step_.set_samples(samples)) return;
    log_.clear();
    for (Series* series :
         {&prior_h_, &prior_c_, &posterior_h_, &posterior_c_, &smoothed_h_, &smoothed_c_}) {
        clear(*series, samples * outputs());
    }
    covariance_c_.assign(samples * outputs(), 0.0f);
    covariance_h_.assign(samples * outputs() * outputs(), 0.0f);
}

std::vector<std::vector<float>*> SLSTM::written() {
    std::vector<std::vector<float>*> all{&covariance_c_, &covariance_h_};
    for (Series* series : {&prior_h_, &prior_c_, &posterior_h_, &posterior_c_}) {
        all.insert(all.end(), {&series->mean, &series->variance});
    }
    return all;
}

void SLSTM::keep() {
    LSTM::keep();
    saved_step_ = step_;
    log_.clear();
    logs_ = true;
}

void SLSTM::log_row() {
    if (!logs_) return;
    std::vector<float> rows;
    for (const std::vector<float>* all : written()) {
        const size_t width = all->size() / step_.samples();
        const float* row = all->data() + step_.step() * width;
        rows.insert(rows.end(), row, row + width);
    }
    log_.emplace_back(step_.step(), std::move(rows));
}

void SLSTM::restore() {
    LSTM::restore();
    set_samples(saved_step_.samples());
    step_ = saved_step_;
    for (auto entry = log_.rbegin(); entry != log_.rend(); ++entry) {
        const float* row = entry->second.data();
        for (std::vector<float>* all : written()) {
            const size_t width = all->size() / step_.samples();
            std::copy_n(row, width, all->data() + entry->first * width);
            row += width;
        }
    }
    log_.clear();
}

void SLSTM::reset_states() {
    LSTM::reset_states();
    step_.restart();
}

States SLSTM::forward(const States& inputs, bool training) {
    if (training) {
        step_.require_room();
        log_row();
    }
    const States states = LSTM::forward(inputs, training);
    if (!training || !is_single()) return states;
    const size_t step = step_.step(), n = outputs();
    write(prior_h_, step, after_.mean_h, after_.var_h, n);
    write(prior_c_, step, after_.mean_c, after_.var_c, n);
    for (size_t o = 0; o < n; ++o) {
        covariance_c_[step * n + o] = before_.var_c.data()[o] * forget_gate(o);
        float* row = covariance_h_.data() + (step * n + o) * n;
        std::fill_n(row, n, 0.0f);
        for (size_t gate = 0; gate < 4; ++gate) {
            const float* weights = gate_weights(gate, o) + this->inputs();
            for (size_t j = 0; j < n; ++j) row[j] += slope(gate, o) * weights[j];
        }
        for (size_t j = 0; j < n; ++j) row[j] *= before_.var_h.data()[j];
    }
    return states;
}

Deltas SLSTM::backward(Deltas deltas, bool to_input) {
    const Deltas below = LSTM::backward(deltas, to_input);
    if (is_single()) {
        write(posterior_h_, step_.step(), after_.mean_h, after_.var_h, outputs());
        write(posterior_c_, step_.step(), after_.mean_c, after_.var_c, outputs());
    }
    step_.advance();
    return below;
}

const Series& SLSTM::smooth() {
    const size_t n = outputs(), last = (std::max<size_t>(step_.samples(), 1) - 1) * n;
    smoothed_h_ = posterior_h_;
    smoothed_c_ = posterior_c_;
    for (size_t begin = last; begin > 0; begin -= n) {  // the later of two steps
        for (size_t o = 0; o < n; ++o) {
            const size_t at = begin - n + o;
            Correction cells, hidden;
            cells.add(covariance_c_[begin + o], prior_c_, smoothed_c_, begin + o);
            cells.apply(posterior_c_, smoothed_c_, at);
            for (size_t k = 0; k < n; ++k) {
                hidden.add(covariance_h_[(begin + k) * n + o], prior_h_, smoothed_h_, begin + k);
            }
            hidden.apply(posterior_h_, smoothed_h_, at);
        }
    }
    reset_states();
    return smoothed_h_;
}

RecurrentStates SLSTM::smoothed_states(size_t step) const {
    if (step >= step_.samples()) {
        throw std::invalid_argument(
            "time_step is " + std::to_string(step) +
            ", but the series has num_samples = " + std::to_string(step_.samples()) + " steps");
    }
    const size_t n = outputs(), at = step * n;
    return {part(smoothed_h_.mean, at, n), part(smoothed_h_.variance, at, n),
            part(smoothed_c_.mean, at, n), part(smoothed_c_.variance, at, n)};
}

void SLinear::set_samples(size_t samples) {
    if (step_.set_samples(samples)) clear(smoothed_, samples);
}

States SLinear::forward(const States& inputs, bool training) {
    if (training) step_.require_room();
    return Linear::forward(inputs, training);
}

Deltas SLinear::backward(Deltas deltas, bool to_input) {
    const Deltas below = Linear::backward(deltas, to_input);
    step_.advance();
    return below;
}

void SLinear::smooth(const Series& hidden) {
    const GaussianMatrix weights = matrix();
    const size_t n = weights.inputs;
    if (hidden.mean.size() != step_.samples() * n) {
        throw std::invalid_argument("SLinear has other inputs than the hidden states");
    }
    for (size_t step = 0; step < step_.samples(); ++step) {
        float mean = 0.0f, variance = 0.0f;
        for (size_t j = 0; j < n; ++j) {
            const float mu_h = hidden.mean[step * n + j], var_h = hidden.variance[step * n + j];
            const float mu_w = weights.weights.mu[j], var_w = weights.weights.var[j];
            mean += mu_h * mu_w;
            variance += var_h * var_w + var_h * mu_w * mu_w + var_w * mu_h * mu_h;
        }
        if (weights.biases.count != 0) {
            mean += weights.biases.mu[0];
            variance += weights.biases.var[0];
        }
        smoothed_.mean[step] = mean;
        smoothed_.variance[step] = variance < 0.0f ? least : variance;
    }
    step_.restart();
}

}  // namespace tagi_ddp
