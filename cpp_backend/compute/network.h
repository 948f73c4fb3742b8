// A small network's forward, output update and backward, in the caller's thread.
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
#include "engine/layer_layout.h"
#include "update/parameters.h"

namespace tagi_ddp {

// Observations of a batch; see innovation.h for what each way of updating takes.
struct Observations {
    const float* mean = nullptr;
    const float* variance = nullptr;    // null: of unknown noise
    const int32_t* selected = nullptr;  // null: of all outputs
    size_t count = 0;                   // of means
};

// Layers over a replica's parameters, in order; their blocks must be those of `parameters`, which
// forward and backward refresh.
class Network {
 public:
    explicit Network(Parameters& parameters) : parameters_(parameters) {}
    Network(const Network&) = delete;
    Network& operator=(const Network&) = delete;

    // `index` is the layer's place among those with parameters. All throw std::invalid_argument
    // where a layer does not fit the one before.
    void add_linear(size_t index, size_t outputs, size_t inputs, bool smoothing);
    void add_lstm(size_t index, size_t outputs, size_t inputs, size_t steps, bool smoothing);
    void add_layer_norm(size_t index, size_t inputs, float epsilon);
    void add_embedding(size_t index, size_t size, size_t inputs, int64_t padding,
                       std::vector<float> sums);
    void add_activation(const std::string& kind);

    size_t input_size() const { return input_size_; }
    size_t output_size() const { return layers_.empty() ? 0 : layers_.back()->width(); }
    const Parameters& parameters() const { return parameters_; }
    const States& outputs() const { return outputs_; }
    // By their place among the layers.
    const std::map<size_t, LSTM*>& lstms() const { return lstms_; }
    const std::vector<Embedding*>& embeddings() const { return embeddings_; }

    // How many steps a series has, for the smoothing layers.
    void set_samples(size_t samples);
    // Inputs are [batch, input_size()]; no `variance`: they are exact; `jacobian`: of the
    // activation that made them, null: of none.
    void forward(const float* mean, const float* variance, const float* jacobian, size_t batch,
                 bool training);
    // Writes the outputs' innovation. Throws std::invalid_argument naming an argument of the wrong
    // size, std::runtime_error before the first forward.
    void update(const Observations& observations);
    // Sets the innovation, flat.
    void set_innovation(const float* mean, const float* variance);
    void backward(bool to_input);

    // Copies what forward and backward change beside outputs and deltas; `restore` puts it back.
    void keep();
    void restore();
    bool keeps() const { return !lstms_.empty() || !embeddings_.empty(); }
    // Lets LSTM layers forget the batches before.
    void reset_states();

    // Copies of the outputs, and of the innovation of the inputs, flat.
    void read_outputs(float* mean, float* variance) const;
    void read_input_innovation(float* mean, float* variance) const;
    bool has_input_innovation() const { return input_deltas_.mean != nullptr; }
    // The engine's objects, for output updaters that work on them.
    void show_outputs(EngineHiddenStates& states) const;
    void take_innovation(const EngineDeltaStates& deltas);
    void show_innovation(EngineDeltaStates& deltas) const;

    // Smooths the series so far; null where there is no SLinear layer.
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
    size_t input_size_ = 0;
    States inputs_, outputs_;
    Deltas input_deltas_;
    Memory input_mean_, input_variance_, input_jacobian_, delta_mean_, delta_variance_;
};

}  // namespace tagi_ddp
