// How far replicas that learn alike may go together: sums of changes, damped where they agree.
//
// Bayes' rule (merge.h) is exact where a model is linear and Gaussian. In a network each rank moves
// about as far as all of them together should, for its steps are capped and its precision grows far
// less than its mean moves: so the sum of what R ranks have learned alike goes R times too far. Let
// w_r be the weighted half of rank r's change, [l_r - l0 | l_r (mu_r - mu0)], in a block of
// parameters, with squares in units of the prior's precision:
//
//     c = clip((|sum w_r|^2 / sum |w_r|^2 - 1) / (R - 1), 0, 1)
//
// is 0 where the ranks' changes are orthogonal and 1 where they are the same (the idea of Maleki et
// al. 2020, "Scaling distributed training with adaptive summation"). A part of the sum of changes
// is taken in,
//
//     sum (l_r - l0) / (1 + (R - 1) c_l),  sum w_r / (1 + (R - 1) c_w)
//
// which is Bayes' rule, the product of what the ranks have learned, where c_l = c_w = 0, and the
// geometric mean of their posteriors where both are 1. Two things lie between these and c. Bayes'
// rule is right where means move as precisions say. Under the model E (mu_r - mu0)^2 is v0 - v_r:
// squares of the moves as large as the growth of precision. Where they are far smaller, no step was
// capped, and what ranks learn alike adds up.
//
//     s = sum |w_r|^2 / sum ((l_r - l0) / l0),  part = s^4 / (s^4 + (1/4)^4)
//
// And changes are orthogonal, too, where ranks that step alone for a while go from one side of what
// they seek to the other: their sum overshoots, and consecutive sums turn back. Of the sum before a
// sum has r times as much in itself; if r < 0 and all depends linearly on where it begins, sums go
// on so, and what they add up to in that direction is taken in at once (Aitken's process, or
// Anderson acceleration with one direction only, for there is noise in the others):
//
//     r = <sum w_r, the sum before> / |the sum before|^2, from the sum before r / (1 - r) times
//
// What still turns back is trusted less. Of mere noise about a minimum, where each sum undoes the
// one before, the cosine is -1/2: so far they are trusted, and a little further, for chance. Single
// steps turn back on one process, too, and nothing of this is done to them.
//
//     t = cos(sum w_r, the sum before) + 0.55
//     trust = clip(trust + t, 0, 1) where t < 0, clip(trust + 0.3 t, 0, 1) else, at first 1
//     c_l = part (1 - trust (1 - c)),  c_w = 1 - trust (1 - part c)
#pragma once

#include <cstddef>
#include <vector>

#include "update/parameters.h"

namespace tagi_ddp {

class AdaptiveSum {
 public:
    static constexpr size_t block_floats = 256;
    static constexpr double leeway = 0.55;    // by which consecutive sums may turn back
    static constexpr double regained = 0.3;   // of a rise of trust; of a fall all counts
    static constexpr double surprise = 0.25;  // at which agreement counts by half

    // For changes of `parameters`.
    explicit AdaptiveSum(const Parameters& parameters);

    // How many numbers describe a change.
    size_t described() const { return blocks_.size() + 1; }

    // Throws std::invalid_argument where these are not the sizes of two changes and `described()`.
    void check(size_t change, size_t before, size_t description) const;

    // Describes a rank's change in so many `steps` since `before`: by block, the square of its
    // weighted half; and the steps.
    void describe(const float* change, const float* before, double steps, float* description) const;

    // Damps `change`, the sum of those of so many `ranks`, in place; so is `description` that of
    // theirs. Returns c, by layer. What is not finite stays so, and counts as nothing.
    std::vector<double> damp(float* change, const float* before, const float* description,
                             int ranks);

    // Forgets the sums before.
    void restart();

    // What it remembers of them: the weighted half of the last one, the trust in each block.
    std::vector<float>& previous() { return previous_; }
    std::vector<double>& trust() { return trust_; }

 private:
    struct Block {
        size_t begin, count, layer;
    };

    size_t size_;
    std::vector<Block> blocks_;
    std::vector<double> weights_;  // parameters of each layer
    std::vector<float> previous_;  // the weighted half of the sum before
    std::vector<double> trust_;    // by block
};

}  // namespace tagi_ddp
