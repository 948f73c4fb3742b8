// What layers hand to each other, and what every layer can do.
#pragma once

#include <cstddef>

#include "compute/memory.h"
#include "update/parameters.h"

namespace tagi_ddp {

// Independent Gaussians, the inputs or outputs of a layer: [batch, width], rows `stride` floats
// apart. What lies between rows may be anything.
struct States {
    const float* mean = nullptr;
    const float* variance = nullptr;
    const float* jacobian = nullptr;  // of the activation that made them; null: of none
    size_t batch = 0;
    size_t width = 0;
    size_t stride = 0;
    bool exact = false;  // whether all variances are zero

    size_t floats() const { return batch * stride; }
};

// The innovation of Gaussians: a prior N(m, v) becomes N(m + v * mean, v + v^2 * variance). Laid
// out as the Gaussians.
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

// Forward and backward of a layer; it keeps its outputs, and what backward needs of the last
// forward, in memory of its own, which the next forward overwrites.
class Layer {
 public:
    virtual ~Layer() = default;

    // The outputs of a sample.
    virtual size_t width() const = 0;
    // The inputs stay where they are until after backward. `batch` samples are `inputs.batch` of
    // the network's.
    virtual States forward(const States& inputs, bool training) = 0;
    // Writes the parameters' deltas, and returns the innovation of the inputs, carried through the
    // activation that made them; without `to_input` nobody reads that. May change `deltas`.
    virtual Deltas backward(Deltas deltas, bool to_input) = 0;

    // Copies what forward and backward change for later batches; `restore` puts the copy back.
    virtual void keep() {}
    virtual void restore() {}
};

// Carries an innovation through the activation that made `states`.
void carry_through(const States& states, Deltas deltas);

}  // namespace tagi_ddp
