#include "compute/network.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "compute/innovation.h"
#include "compute/layer_norm.h"
#include "compute/linear.h"
#include "compute/rms_norm.h"

namespace tagi_ddp {
namespace {

// Copies flat rows to rows with a stride; `flatten` copies back.
void spread(const float* flat, size_t rows, size_t width, size_t stride, float* out) {
    for (size_t r = 0; r < rows; ++r) std::copy_n(flat + r * width, width, out + r * stride);
}

void flatten(const float* rows, const States& like, float* out) {
    for (size_t b = 0; b < like.batch; ++b) {
        std::copy_n(rows + b * like.stride, like.width, out + b * like.width);
    }
}

}  // namespace

void require_size(const char* name, size_t size, size_t expected, const char* remedy) {
    if (size == expected) return;
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) +
                                " elements, not " + std::to_string(expected) + remedy);
}

Gaussians Network::gaussians(size_t index, size_t weights) const {
    const auto& blocks = parameters_.blocks();
    if (2 * index + 1 >= blocks.size() || blocks[2 * index].count != weights) {
        throw std::invalid_argument("the parameters are not those of the layer");
    }
    return {&blocks[2 * index], &blocks[2 * index + 1]};
}

void Network::add(std::unique_ptr<Layer> layer, size_t input_size) {
    if (layers_.empty()) {
        width_ = input_size;
    } else if (layers_.back()->width() != input_size) {
        throw std::invalid_argument("a layer takes " + std::to_string(input_size) +
                                    " inputs, but the one before has " +
                                    std::to_string(layers_.back()->width()) + " outputs");
    }
    layers_.push_back(std::move(layer));
}

void Network::add_linear(size_t index, size_t outputs, size_t inputs, bool smoothing) {
    const Gaussians parameters = gaussians(index, outputs * inputs);
    if (!smoothing) {
        add(std::make_unique<Linear>(parameters, outputs, inputs), inputs);
        return;
    }
    if (outputs != 1) throw std::invalid_argument("SLinear is computed with one output only");
    auto layer = std::make_unique<SLinear>(parameters, inputs);
    last_smoother_ = layer.get();
    add(std::move(layer), inputs);
}

void Network::add_lstm(size_t index, size_t outputs, size_t inputs, size_t steps, bool smoothing,
                       Recurrence recurrence) {
    const bool recurrent = recurrence != Recurrence::none;
    if (recurrent && steps != rows_) {
        throw std::invalid_argument("an LSTM takes series of " + std::to_string(steps) +
                                    " steps, but gets " + std::to_string(rows_));
    }
    const Gaussians parameters = gaussians(index, 4 * outputs * (inputs + outputs));
    std::unique_ptr<LSTM> layer;
    if (smoothing) {
        auto smoother = std::make_unique<SLSTM>(parameters, outputs, inputs, steps);
        smoothers_.push_back(smoother.get());
        layer = std::move(smoother);
    } else {
        layer = std::make_unique<LSTM>(parameters, outputs, inputs, steps, recurrence);
    }
    lstms_[layers_.size()] = layer.get();
    add(std::move(layer), recurrent ? inputs : steps * inputs);
    if (recurrence == Recurrence::last_step) rows_ = 1;
}

void Network::add_layer_norm(size_t index, size_t inputs, float epsilon) {
    add(std::make_unique<LayerNorm>(gaussians(index, inputs), epsilon), inputs);
}

void Network::add_rms_norm(size_t index, size_t inputs, float epsilon) {
    add(std::make_unique<RMSNorm>(gaussians(index, inputs), epsilon), inputs);
}

void Network::add_embedding(size_t index, size_t size, size_t inputs, int64_t padding,
                            std::vector<float> sums, bool rows) {
    const Gaussians parameters = gaussians(index, sums.size() / 2);
    auto layer =
        std::make_unique<Embedding>(parameters, size, inputs, padding, std::move(sums), rows);
    embeddings_.push_back(layer.get());
    add(std::move(layer), inputs);
    if (rows) rows_ = inputs;
}

void Network::add_activation(const std::string& kind) {
    const ActivationFunction function = activation_function(kind);
    if (function == nullptr) throw std::invalid_argument(kind + " is not computed here");
    if (layers_.empty()) throw std::invalid_argument("the first layer is an activation");
    const size_t width = layers_.back()->width();
    add(std::make_unique<Activation>(function, width), width);
}

void Network::set_samples(size_t samples) {
    for (SLSTM* layer : smoothers_) layer->set_samples(samples);
    if (last_smoother_ != nullptr) last_smoother_->set_samples(samples);
}

void Network::forward(const float* mean, const float* variance, const float* jacobian, size_t batch,
                      bool training) {
    parameters_.refresh();
    const size_t stride = padded(width_), count = batch * input_rows_;
    float* rows = input_mean_.take(count * stride);
    float* variances = input_variance_.take(count * stride);
    spread(mean, count, width_, stride, rows);
    if (variance != nullptr) {
        spread(variance, count, width_, stride, variances);
    } else {
        std::fill_n(variances, count * stride, 0.0f);
    }
    inputs_ = {rows, variances, nullptr, count, width_, stride, variance == nullptr};
    if (jacobian != nullptr) {
        float* slopes = input_jacobian_.take(count * stride);
        spread(jacobian, count, width_, stride, slopes);
        inputs_.jacobian = slopes;
    }
    outputs_ = {};  // empty, as the innovation of the inputs, if a layer refuses the inputs
    input_deltas_ = {};
    States states = inputs_;
    for (const auto& layer : layers_) states = layer->forward(states, training);
    outputs_ = states;
}

Deltas Network::deltas() {
    if (outputs_.batch == 0) throw std::runtime_error("there are no outputs before a forward()");
    return {delta_mean_.take(outputs_.floats()), delta_variance_.take(outputs_.floats())};
}

void Network::update(const Observations& observations) {
    const Deltas out = deltas();
    if (observations.selected != nullptr) {
        const size_t count = observations.count / outputs_.batch;
        require_size("mu_obs", observations.count, count * outputs_.batch,
                     ": give the same number for each sample");
        for (size_t k = 0; k < observations.count; ++k) {
            const int32_t number = observations.selected[k];
            if (number >= 1 && static_cast<size_t>(number) <= outputs_.width) continue;
            throw std::invalid_argument("selected_idx has number " + std::to_string(number) +
                                        ", but outputs are numbered from 1 to " +
                                        std::to_string(outputs_.width));
        }
        selected_innovation(outputs_, observations.mean, observations.variance,
                            observations.selected, count, out);
    } else if (observations.variance != nullptr) {
        require_size("mu_obs", observations.count, output_count(), ": give one for each output");
        innovation(outputs_, observations.mean, observations.variance, out);
    } else {
        if (outputs_.width % 2 != 0) {
            throw std::invalid_argument("outputs must come in pairs, of value and noise, got " +
                                        std::to_string(outputs_.width));
        }
        require_size("mu_obs", observations.count, output_count() / 2,
                     ": give one for each two outputs");
        heteroscedastic_innovation(outputs_, observations.mean, out);
    }
}

void Network::set_innovation(const float* mean, const float* variance) {
    const Deltas out = deltas();
    spread(mean, outputs_.batch, outputs_.width, outputs_.stride, out.mean);
    spread(variance, outputs_.batch, outputs_.width, outputs_.stride, out.variance);
}

void Network::backward(bool to_input) {
    parameters_.refresh();
    Deltas innovation = deltas();
    for (size_t i = layers_.size(); i-- > 0;) {
        innovation = layers_[i]->backward(innovation, i > 0 || to_input);
    }
    input_deltas_ = to_input ? innovation : Deltas{};
}

void Network::keep() {
    for (const auto& layer : layers_) layer->keep();
}

void Network::restore() {
    for (const auto& layer : layers_) layer->restore();
}

void Network::reset_states() {
    for (const auto& [index, layer] : lstms_) layer->reset_states();
    if (last_smoother_ != nullptr) last_smoother_->restart();
}

void Network::read_outputs(float* mean, float* variance) const {
    flatten(outputs_.mean, outputs_, mean);
    flatten(outputs_.variance, outputs_, variance);
}

void Network::read_input_innovation(float* mean, float* variance) const {
    flatten(input_deltas_.mean, inputs_, mean);
    flatten(input_deltas_.variance, inputs_, variance);
}

void Network::show_outputs(EngineHiddenStates& states) const {
    read_outputs(states.mu_a.data(), states.var_a.data());
    if (outputs_.jacobian == nullptr) {
        std::fill_n(states.jcb.data(), output_count(), 1.0f);
    } else {
        flatten(outputs_.jacobian, outputs_, states.jcb.data());
    }
}

void Network::take_innovation(const EngineDeltaStates& states) {
    require_room(states);
    set_innovation(states.delta_mu.data(), states.delta_var.data());
}

void Network::show_innovation(EngineDeltaStates& states) const {
    require_room(states);
    flatten(delta_mean_.data(), outputs_, states.delta_mu.data());
    flatten(delta_variance_.data(), outputs_, states.delta_var.data());
}

void Network::require_room(const EngineDeltaStates& states) const {
    const size_t count = output_count();
    if (states.delta_mu.size() >= count && states.delta_var.size() >= count) return;
    throw std::invalid_argument("input_delta_z_buffer holds " +
                                std::to_string(states.delta_mu.size()) +
                                " elements, the outputs have " + std::to_string(count));
}

const Series* Network::smooth() {
    const Series* hidden = nullptr;
    for (SLSTM* layer : smoothers_) hidden = &layer->smooth();
    if (last_smoother_ == nullptr || hidden == nullptr) return nullptr;
    last_smoother_->smooth(*hidden);
    return &last_smoother_->smoothed();
}

}  // namespace tagi_ddp
