// The merge, by Bayes' rule, of posteriors that several ranks have computed from one prior.
//
// With precisions l = 1 / var and the prior (mu0, l0), the posterior given the data of all ranks r
// has l = l0 + sum (l_r - l0) and mu = mu0 + sum l_r (mu_r - mu0) / l: information adds (Broderick
// et al. 2013, "Streaming variational Bayes"; Tresp 2000, "A Bayesian committee machine"). So each
// rank sends a change, [l_r - l0 | l_r (mu_r - mu0)], and the sum of changes is a change too. The
// weighted means of a change are relative to mu0, which all ranks must have.
#pragma once

#include <cstddef>
#include <vector>

#include "update/parameters.h"

namespace tagi_ddp {

// The smallest part of its precision that a merge leaves to a parameter.
constexpr double least_precision_kept = 0.1;

// Computes the change between Gaussians, [means | variances]; all arrays have 2 * size floats.
void change_since(const float* now, const float* before, float* change, size_t size);

// Multiplies the Gaussians by `change` minus `own`, in float64; `own` is the part of the change
// that they include already, or null. Both are relative to the means `reference`, which may be
// those of the Gaussians. If a precision would fall below that part of its value, applies half of
// the change, a quarter, and so on; does not apply a change that is not finite. Returns the number
// of such parameters by layer.
std::vector<int64_t> add_change(const Parameters& parameters, float* gaussians,
                                const float* reference, const float* change, const float* own);

}  // namespace tagi_ddp
