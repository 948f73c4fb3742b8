// Posteriors that several ranks have reached from one prior, merged by Bayes' rule.
//
// With precisions l = 1 / var and the prior (mu0, l0), the posterior of what all ranks r have seen
// has l = l0 + sum (l_r - l0) and mu = mu0 + sum l_r (mu_r - mu0) / l: information adds (Broderick
// et al. 2013, "Streaming variational Bayes"; Tresp 2000, "A Bayesian committee machine"). So what
// a rank tells of its work is a change, [l_r - l0 | l_r (mu_r - mu0)], and the sum of changes is a
// change, too. A change of weighted means is relative to a mean, mu0, that all must know.
#pragma once

#include <cstddef>
#include <vector>

#include "update/parameters.h"

namespace tagi_ddp {

// The least part of its precision that a merge leaves to a parameter.
constexpr double least_precision_kept = 0.1;

// Gaussians, [means | variances], are 2 * size floats; so are changes.

// How (mu, var) came from (mu0, var0).
void change_since(const float* now, const float* before, float* change, size_t size);

// Multiplies the Gaussians by `change` less `own` (null: nothing of it is in them yet), in float64.
// `reference` are the means that both are relative to; may be those of the Gaussians.
// Where the precision would not stay above that part of what it was, half of the change is taken,
// or a quarter, and so on; nothing of a change that is not finite. Returns how often, by layer.
std::vector<int64_t> add_change(const Parameters& parameters, float* gaussians,
                                const float* reference, const float* change, const float* own);

}  // namespace tagi_ddp
