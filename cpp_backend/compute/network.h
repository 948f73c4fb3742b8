// The forward pass, output update and backward pass of a small network, in the caller's thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "compute/activations.h"
#include "compute/embedding.h"
#include "compute/layer.h"
#include "compute/smoothing.h"
#include "engine/engine_memory.h"
#include "update/parameters.h"

namespace tagi_ddp {

// The observations of a batch; see innovation.h.
struct Observations {
    const float* mean = nullptr;
    const float* variance = nullptr;    // null if the noise is unknown
    const int32_t* selected = nullptr;  // null if all outputs are observed
    size_t count = 0;                   // the number of means
};

// Throws std::invalid_argument that names an array with another size than `expected`.
void require_size(const char* name, size_t size, size_t expected, const char* remedy = "");

// A sequence of layers over a replica's parameters, which forward and backward refresh.
class Network {
 public:
    // A sample has `input_rows` rows, such as the steps of a series; layers see each row alone, but
    // for those that are recurrent.
    explicit Network(Parameters& parameters, size_t input_rows = 1)
        : parameters_(parameters), input_rows_(input_rows), rows_(input_rows) {}
    Network(const Network&) = delete;

    // `index` is the layer's position among the layers with parameters. All throw
    // std::invalid_argument if a layer does not fit the one before.
    void add_linear(size_t index, size_t outputs, size_t inputs, bool smoothing);
    void add_lstm(size_t index, size_t outputs, size_t inputs, size_t steps, bool smoothing,
                  Recurrence recurrence);
    void add_layer_norm(size_t index, size_t inputs, float epsilon);
    void add_rms_norm(size_t index, size_t inputs, float epsilon);
    void add_embedding(size_t index, size_t size, size_t inputs, int64_t padding,
                       std::vector<float> sums, bool rows);
    void add_activation(const std::string& kind);

    // The numbers of elements of a sample.
    size_t input_size() const { return input_rows_ * width_; }
    size_t output_size() const { return layers_.empty() ? 0 : rows_ * layers_.back()->width(); }
    size_t input_count() const { return inputs_.batch * inputs_.width; }
    const Parameters& parameters() const { return parameters_; }
    const States& outputs() const { return outputs_; }
    size_t output_count() const { return outputs_.batch * outputs_.width; }
    // The LSTM layers by their position among all layers.
    const std::map<size_t, LSTM*>& lstms() const { return lstms_; }
    const std::vector<Embedding*>& embeddings() const { return embeddings_; }

    // Sets the number of steps of a series, for smoothing layers.
    void set_samples(size_t samples);
    // Inputs are [batch, input_size()], and exact if `variance` is null. `jacobian` is that of the
    // activation that computed them, or null.
    void forward(const float* mean, const float* variance, const float* jacobian, size_t batch,
                 bool training);
    // Computes the outputs' innovation. Throws std::invalid_argument that names an argument of the
    // wrong size, std::runtime_error before the first forward.
    void update(const Observations& observations);
    // Sets the outputs' innovation, flat.
    void set_innovation(const float* mean, const float* variance);
    void backward(bool to_input);

    // Copies the state that forward and backward change for later batches; `restore` restores it.
    void keep();
    void restore();
    // Resets the states of LSTM layers to zero.
    void reset_states();

    // Copy the outputs, or the innovation of the inputs, flat.
    void read_outputs(float* mean, float* variance) const;
    void read_input_innovation(float* mean, float* variance) const;
    bool has_input_innovation() const { return input_deltas_.mean != nullptr; }
    // Copy between the network and the engine's objects, on which output updaters work.
    void show_outputs(EngineHiddenStates& states) const;
    void take_innovation(const EngineDeltaStates& deltas);
    void show_innovation(EngineDeltaStates& deltas) const;

    // Smooths the series so far, and returns the outputs; null without an SLinear layer.
    const Series* smooth();

 private:
    Gaussians gaussians(size_t index, size_t weights) const;
    void add(std::unique_ptr<Layer> layer, size_t input_size);
    Deltas deltas();
    void require_room(const EngineDeltaStates& deltas) const;

    Parameters& parameters_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::map<size_t, LSTM*> lstms_;
    std::vector<Embedding*> embeddings_;
    std::vector<SLSTM*> smoothers_;
    SLinear* last_smoother_ = nullptr;
    size_t input_rows_;
    size_t rows_;       // of a sample, in the outputs of the last layer
    size_t width_ = 0;  // of a row of the inputs
    States inputs_, outputs_;
    Deltas input_deltas_;
    Memory input_mean_, input_variance_, input_jacobian_, delta_mean_, delta_variance_;
};

}  // namespace tagi_ddp
