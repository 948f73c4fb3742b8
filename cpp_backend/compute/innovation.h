// The innovation of outputs from observations, with which a backward pass begins.
//
// Sources: Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference for Bayesian neural
// networks, JMLR 22 (2021); for an unknown noise, Deka, Nguyen, Goulet, Analytically tractable
// heteroscedastic uncertainty quantification in Bayesian neural networks for regression tasks,
// Neurocomputing 572 (2024).
#pragma once

#include <cstdint>

#include "compute/layer.h"

namespace tagi_ddp {

// Computes it from observations of all outputs, [batch, width]. With jacobian J and s = var +
// var_obs: mean J (y - mu) / s, variance -J^2 / s; both are 0 if y is NaN or J / s is not finite.
void innovation(const States& outputs, const float* mu_obs, const float* var_obs, Deltas deltas);

// Computes it from observations of selected outputs; for the others it is 0. `selected` has `count`
// outputs for each sample, numbered from 1.
void selected_innovation(const States& outputs, const float* mu_obs, const float* var_obs,
                         const int32_t* selected, size_t count, Deltas deltas);

// Computes it for pairs of outputs: a value, and the expected variance v of its noise V ~ N(0, v).
// `mu_obs` has one observation for each pair. The second output is the expectation of V^2, and its
// posterior follows from that of V given y.
void heteroscedastic_innovation(const States& outputs, const float* mu_obs, Deltas deltas);

}  // namespace tagi_ddp
