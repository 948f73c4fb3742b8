#include "update/update.h"

#include <cstring>

#include "update/apply.h"
#include "update/sharded.h"

namespace tagi_ddp {

void pack(const Parameters& parameters, size_t begin, size_t length, float* bucket, size_t stride) {
    parameters.visit(begin, length, [&](const Block& block, size_t first, size_t count, size_t at) {
        std::memcpy(bucket + at, block.delta_mu + first, count * sizeof(float));
        std::memcpy(bucket + stride + at, block.delta_var + first, count * sizeof(float));
    });
}

void apply(const Parameters& parameters, const float* bucket, float divisor, float cap) {
    reset_counters(parameters);
    apply_range(parameters, 0, parameters.size(), &bucket, 1, parameters.size(), divisor, cap);
}

std::string apply_own(const Parameters& parameters, float cap) {
    std::string culprit = parameters.first_not_finite(0, parameters.size());
    if (!culprit.empty()) return culprit;
    for (const Block& block : parameters.blocks()) {
        const int32_t negative =
            apply_capped(block.mu, block.var, block.delta_mu, block.delta_var, block.count, cap);
        if (block.neg_var_counter != nullptr) *block.neg_var_counter = negative;
    }
    return culprit;
}

Step step(ShmCommunicator& communicator, const Parameters& parameters, float* bucket, int64_t batch,
          bool finished, bool average, double timeout) {
    Step result;
    if (batch > 0) result.culprit = parameters.first_not_finite(0, parameters.size());
    const Contribution own{batch, result.culprit.empty(), finished};
    if (batch > 0 && bucket != parameters.bucket()) {
        pack(parameters, 0, parameters.size(), bucket, parameters.size());
    }
    result.agreement = step_by_shards(communicator, parameters, bucket, own, average, timeout);
    return result;
}

}  // namespace tagi_ddp
