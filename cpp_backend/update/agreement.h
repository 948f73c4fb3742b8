// The agreement of the ranks before a step: the ranks whose deltas count, and the step limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tagi_ddp {

// A step moves a parameter by at most 1 / cap factor standard deviations. As in the engine, the
// factor is that of the last entry whose smallest batch the batch size reaches.
struct CapFactor {
    int64_t smallest_batch;
    float factor;
};
constexpr CapFactor cap_factors[] = {{0, 0.1f}, {2, 2.0f}, {256, 3.0f}};

float cap_factor(int64_t batch);

// The contribution of one rank to a step.
struct Contribution {
    int64_t batch = 0;      // samples behind the deltas; 0: no deltas
    bool finite = true;     // if false, all ranks refuse the step
    bool finished = false;  // true if the rank has no more data, and only follows the others
};

// The result of all ranks' contributions.
struct Agreement {
    explicit Agreement(const std::vector<Contribution>& ranks);

    int64_t batch = 0;            // samples of all ranks
    int active = 0;               // number of ranks with deltas
    std::vector<int> not_finite;  // ranks whose deltas are not finite
    bool all_finished = true;

    bool applies() const { return not_finite.empty() && active > 0; }
    // The divisor of sums of deltas, and the batch size whose cap factor holds for the quotient.
    float divisor(bool average) const { return average ? static_cast<float>(active) : 1.0f; }
    int64_t capped_as(bool average) const;
};

}  // namespace tagi_ddp
