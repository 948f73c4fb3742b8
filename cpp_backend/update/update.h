// From the deltas of the ranks to the new posterior: pack, reduce, cap, apply.
#pragma once

#include <cstddef>
#include <string>

#include "shm/shm_communicator.h"
#include "update/agreement.h"
#include "update/parameters.h"

namespace tagi_ddp {

// Writes the deltas of the flat range [begin, begin + length) to bucket: [means | variances],
// `stride` floats apart.
void pack(const Parameters& parameters, size_t begin, size_t length, float* bucket, size_t stride);
// Caps and applies the bucket's deltas, divided by `divisor`.
void apply(const Parameters& parameters, const float* bucket, float divisor, float cap);
// Caps and applies the deltas where they are: the step of one rank alone. If one is NaN or infinite
// nothing is applied; returns the name of its layer, else nothing.
std::string apply_own(const Parameters& parameters, float cap);

// The whole step over shared memory, chunk by chunk: no barrier, no pass over all deltas but the
// one that looks for values that are not finite. Nothing is applied when the agreement forbids it.
Agreement update(ShmCommunicator& communicator, const Parameters& parameters,
                 const Contribution& contribution, bool average, double timeout);

}  // namespace tagi_ddp
