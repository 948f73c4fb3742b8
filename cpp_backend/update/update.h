// From the deltas of the ranks to the new posterior: pack, reduce, cap, apply.
#pragma once

#include <cstdint>
#include <vector>

#include "shm/shm_communicator.h"
#include "update/parameters.h"

namespace tagi_ddp {

// How far a parameter may move in one step, in standard deviations, is 1 / cap factor. The engine's
// own choice by batch size.
float cap_factor(int64_t batch);

// What one rank brings to a step.
struct Contribution {
    int64_t batch = 0;    // samples behind the deltas; 0: no deltas
    bool finite = true;   // false refuses the step on all ranks
    bool joined = false;  // out of data: only follows the others
};

// What all ranks agreed on before anything was applied.
struct Agreement {
    explicit Agreement(const std::vector<Contribution>& ranks);

    int64_t batch = 0;            // of all ranks together
    int active = 0;               // ranks with deltas
    std::vector<int> not_finite;  // ranks whose deltas are not finite
    bool all_joined = true;

    bool applies() const { return not_finite.empty() && active > 0; }
    // What sums of deltas are divided by, and the cap factor that belongs to it.
    float divisor(bool average) const { return average ? static_cast<float>(active) : 1.0f; }
    float cap(bool average) const;
};

// What the ranks tell each other of their contributions when they enter an operation.
void write_words(Signature& signature, const Contribution& contribution);
std::vector<Contribution> read_words(const std::vector<Signature>& ranks);

// Writes the deltas, or those of the flat range [begin, begin + count), to bucket: [means |
// variances], two floats a parameter.
void pack(const Parameters& parameters, float* bucket);
void pack(const Parameters& parameters, size_t begin, size_t count, float* bucket);
// Caps and applies the bucket's deltas, divided by `divisor`.
void apply(const Parameters& parameters, const float* bucket, float divisor, float cap);
// Caps and applies the deltas where they are: the step of one rank alone.
void apply_own(const Parameters& parameters, float cap);

// The whole step over shared memory, chunk by chunk: no barrier, no pass over all deltas but the
// one that looks for values that are not finite. Nothing is applied when the agreement forbids it.
Agreement update(ShmCommunicator& communicator, const Parameters& parameters,
                 const Contribution& contribution, bool average, double timeout);

}  // namespace tagi_ddp
