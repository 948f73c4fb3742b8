// Sums of changes, damped where the ranks' changes agree.
//
// Bayes' rule (merge.h) is exact for a linear and Gaussian model. In a network, each rank moves
// about as far as all ranks together should, because its steps are capped and its precision grows
// much less than its mean moves. So the sum of R equal changes goes R times too far. Let w_r be the
// weighted half of rank r's change, [l_r - l0 | l_r (mu_r - mu0)], in a block of parameters, with
// squares in units of the prior's precision:
//
//     c = clip((|sum w_r|^2 / sum |w_r|^2 - 1) / (R - 1), 0, 1)
//
// c is 0 if the ranks' changes are orthogonal, and 1 if they are equal (the idea of Maleki et al.
// 2020, "Scaling distributed training with adaptive summation"). The damped sum is
//
//     sum (l_r - l0) / (1 + (R - 1) c_l),  sum w_r / (1 + (R - 1) c_w)
//
// It is Bayes' rule, the product of all ranks' evidence, if c_l = c_w = 0, and the geometric mean
// of the ranks' posteriors if both are 1. Two corrections lead from c to c_l and c_w. First, Bayes'
// rule is right if means move as precisions predict. Under the model, E (mu_r - mu0)^2 is v0 - v_r:
// the squares of the moves are as large as the growth of precision. If they are far smaller, no
// step was capped, and equal changes do add up.
//
//     s = sum |w_r|^2 / sum ((l_r - l0) / l0),  part = s^4 / (s^4 + (1/4)^4)
//
// Second, changes are also orthogonal if ranks that step alone for some time move from one side of
// an optimum to the other. Their sum overshoots, and consecutive sums turn back: a sum contains r
// times the previous sum, with r < 0. If each sum depends linearly on its starting point, the
// following sums repeat this. All that they would add in that direction is added at once (Aitken's
// process, or Anderson acceleration with one direction only, because the others are noisy):
//
//     r = <sum w_r, previous sum> / |previous sum|^2, which becomes r / (1 - r)
//
// Sums that still turn back are trusted less. For pure noise about a minimum, where each sum undoes
// the previous one, the cosine is -1/2. Sums are trusted down to that, and a little further, to
// allow for chance. Single steps also turn back on one process, so this does not apply to them.
//
//     t = cos(sum w_r, previous sum) + 0.55
//     trust = clip(trust + t, 0, 1) if t < 0, else clip(trust + 0.3 t, 0, 1); 1 at first
//     c_l = part (1 - trust (1 - c)),  c_w = 1 - trust (1 - part c)
#pragma once

#include <cstddef>
#include <vector>

#include "update/parameters.h"

namespace tagi_ddp {

class AdaptiveSum {
 public:
    static constexpr size_t block_floats = 256;
    static constexpr double leeway = 0.55;    // the cosine by which consecutive sums may turn back
    static constexpr double regained = 0.3;   // the part of a rise of trust that counts
    static constexpr double surprise = 0.25;  // the value of s at which part is 1/2

    explicit AdaptiveSum(const Parameters& parameters);

    // The number of floats that describe a change.
    size_t described() const { return blocks_.size() + 1; }

    // Throws std::invalid_argument unless these are the sizes of two changes and `described()`.
    void check(size_t change, size_t before, size_t description) const;

    // Describes a rank's change in `steps` steps since `before`: the square of its weighted half in
    // each block, then the steps.
    void describe(const float* change, const float* before, double steps, float* description) const;

    // Damps `change`, the sum of the changes of `ranks` ranks; `description` is the sum of their
    // descriptions. Returns c by layer. Values that are not finite stay so, and count as 0.
    std::vector<double> damp(float* change, const float* before, const float* description,
                             int ranks);

    // Forgets the previous sums.
    void restart();

    // The memory between sums: the weighted half of the previous sum, and the trust in each block.
    std::vector<float>& previous() { return previous_; }
    std::vector<double>& trust() { return trust_; }

 private:
    struct Block {
        size_t begin, count, layer;
    };

    size_t size_;
    std::vector<Block> blocks_;
    std::vector<double> weights_;  // number of parameters of each layer
    std::vector<float> previous_;
    std::vector<double> trust_;
};

}  // namespace tagi_ddp
