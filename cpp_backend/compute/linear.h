// Linear layers: z = W a + b.
//
// Source of the formulas: Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference for
// Bayesian neural networks, JMLR 22 (2021), equations 8 to 17.
#pragma once

#include "compute/layer.h"

namespace tagi_ddp {

// A matrix of Gaussians in a layer's memory, [outputs, inputs], with rows `row` floats apart, and
// the biases of its outputs.
struct GaussianMatrix {
    Block weights;
    Block biases;  // with a count of 0 if there are none
    size_t outputs;
    size_t inputs;
    size_t row;
};

// Products of such matrices with a batch, and the memory for them.
class Products {
 public:
    // mean W a + b; variance (W^2 + var W) var a + var W a^2 + var b. `squares` is a^2, in the
    // layout of the inputs. Output rows are `stride` floats apart.
    void forward(const GaussianMatrix& matrix, const States& inputs, const float* squares,
                 float* mean, float* variance, size_t stride);
    // Sums over the batch: delta W = var W (dm^T a), delta var W = var W^2 (dv^T a^2); biases too.
    void write_deltas(const GaussianMatrix& matrix, const States& inputs, const float* squares,
                      Deltas deltas, size_t stride);
    // The innovation of the inputs, W^T dm and (W^2)^T dv, in the layout of the inputs.
    void propagate(const GaussianMatrix& matrix, const States& inputs, Deltas deltas, size_t stride,
                   Deltas below);

 private:
    void multiply(const GaussianMatrix& matrix, const States& inputs, const float* squares,
                  float* mean, float* variance, size_t stride);

    Memory packed_, sums_, bias_;
};

// With fewer samples, packing the weights for a faster product costs more time than it saves.
constexpr size_t few_samples = 3;

// out[i] = data[i]^2
void square(const float* data, size_t count, float* out);

class Linear : public Layer {
 public:
    Linear(Gaussians gaussians, size_t outputs, size_t inputs)
        : gaussians_(gaussians), outputs_(outputs), inputs_count_(inputs) {}

    size_t width() const override { return outputs_; }
    States forward(const States& inputs, bool training) override;
    Deltas backward(Deltas deltas, bool to_input) override;

 protected:
    GaussianMatrix matrix() const;

 private:
    Gaussians gaussians_;
    size_t outputs_;
    size_t inputs_count_;
    Products products_;
    States inputs_;
    Memory squares_, mean_, variance_, below_mean_, below_variance_;
};

}  // namespace tagi_ddp
