// The interface of layers, and the Gaussians that they pass to each other.
#pragma once

#include <cstddef>

#include "compute/memory.h"
#include "update/parameters.h"

namespace tagi_ddp {

// Independent Gaussians, the inputs or outputs of a layer: [batch, width], rows `stride` floats
// apart. The padding between rows may have any values.
struct States {
    const float* mean = nullptr;
    const float* variance = nullptr;
    const float* jacobian = nullptr;  // of the activation that computed them; null: none did
    size_t batch = 0;
    size_t width = 0;
    size_t stride = 0;
    bool exact = false;  // true if all variances are zero

    size_t floats() const { return batch * stride; }
};

// The innovation of Gaussians, in their layout: N(m, v) becomes N(m + v mean, v + v^2 variance).
struct Deltas {
    float* mean = nullptr;
    float* variance = nullptr;
};

// The weights and biases of a layer.
struct Gaussians {
    const Block* weights = nullptr;
    const Block* biases = nullptr;

    bool has_biases() const { return biases->count != 0; }
};

// The forward and backward pass of a layer. Its outputs, and intermediate results for backward, are
// in memory of its own, which the next forward overwrites.
class Layer {
 public:
    virtual ~Layer() = default;

    // The number of outputs of a sample.
    virtual size_t width() const = 0;
    // The memory of the inputs must stay valid until after backward.
    virtual States forward(const States& inputs, bool training) = 0;
    // Writes the parameters' deltas. If `to_input`, returns the innovation of the inputs, times the
    // jacobian of the activation that computed them. May change `deltas`.
    virtual Deltas backward(Deltas deltas, bool to_input) = 0;

    // Copies the state that forward and backward change for later batches; `restore` restores it.
    virtual void keep() {}
    virtual void restore() {}
};

// Multiplies an innovation by the jacobian of the activation that computed `states`.
void apply_jacobian(const States& states, Deltas deltas);

}  // namespace tagi_ddp
