// What the ranks agree on before a step: whose deltas count, and how far they may move a parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shm/signature.h"

namespace tagi_ddp {

// How far a parameter may move in one step, in standard deviations, is 1 / cap factor. The engine's
// own choice by batch size: that of the last entry whose smallest batch is reached.
struct CapFactor {
    int64_t smallest_batch;
    float factor;
};
constexpr CapFactor cap_factors[] = {{0, 0.1f}, {2, 2.0f}, {256, 3.0f}};

float cap_factor(int64_t batch);

// What one rank brings to a step.
struct Contribution {
    int64_t batch = 0;      // samples behind the deltas; 0: no deltas
    bool finite = true;     // false refuses the step on all ranks
    bool finished = false;  // out of data: only follows the others
};

// What all ranks agreed on before anything was applied.
struct Agreement {
    explicit Agreement(const std::vector<Contribution>& ranks);

    int64_t batch = 0;            // of all ranks together
    int active = 0;               // ranks with deltas
    std::vector<int> not_finite;  // ranks whose deltas are not finite
    bool all_finished = true;

    bool applies() const { return not_finite.empty() && active > 0; }
    // What sums of deltas are divided by, and the cap factor that belongs to it.
    float divisor(bool average) const { return average ? static_cast<float>(active) : 1.0f; }
    float cap(bool average) const;
};

// How the ranks tell each other of their contributions when they enter a step over shared memory.
Signature step_signature(size_t num_parameters, bool average, const Contribution& contribution);
std::vector<Contribution> contributions_of(const std::vector<Signature>& ranks);

}  // namespace tagi_ddp
