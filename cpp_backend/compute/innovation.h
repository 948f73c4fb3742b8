// The innovation of outputs from observations: where a backward pass begins.
//
// Sources: Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference for Bayesian neural
// networks, JMLR 22 (2021); for an unknown noise, Deka, Nguyen, Goulet, Analytically tractable
// heteroscedastic uncertainty quantification in Bayesian neural networks for regression tasks,
// Neurocomputing 572 (2024).
#pragma once

#include <cstdint>

#include "compute/layer.h"

namespace tagi_ddp {

// From observations of all outputs, [batch, width]. With jacobian J and s = var + var_obs: mean
// J (y - mu) / s, variance -J^2 / s; zero where y is NaN, or J / s is not finite.
void innovation(const States& outputs, const float* mu_obs, const float* var_obs, Deltas deltas);

// From observations of selected outputs; of the others, zero. `selected` holds `count` numbers of
// outputs a sample, counted from 1.
void selected_innovation(const States& outputs, const float* mu_obs, const float* var_obs,
                         const int32_t* selected, size_t count, Deltas deltas);

// Where outputs come in pairs: a value, and the expected variance of its noise. `mu_obs` has one
// observation a pair. The noise V ~ N(0, v): its square's expectation is the second output, whose
// posterior follows from that of V given y.
void heteroscedastic_innovation(const States& outputs, const float* mu_obs, Deltas deltas);

}  // namespace tagi_ddp
