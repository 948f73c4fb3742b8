#include "update/update.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "update/apply.h"

namespace tagi_ddp {
namespace {

constexpr size_t chunk_floats = slot_bytes / (2 * sizeof(float));  // means and variances

}  // namespace

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

Agreement update(ShmCommunicator& communicator, const Parameters& parameters,
                 const Contribution& contribution, bool average, double timeout) {
    const size_t size = parameters.size();
    const uint32_t rounds = static_cast<uint32_t>((size + chunk_floats - 1) / chunk_floats);
    const auto begin = [](uint32_t chunk) { return static_cast<size_t>(chunk) * chunk_floats; };
    const auto length = [&](uint32_t chunk) { return std::min(chunk_floats, size - begin(chunk)); };
    const bool contributes = contribution.batch > 0 && contribution.finite;

    Agreement agreement{{}};
    PipelinedExchange plan{"step", step_signature(Kind::update, size, average, contribution),
                           contributes ? rounds : 0};
    plan.fill = [&](uint32_t chunk, std::byte* slot) {
        pack(parameters, begin(chunk), length(chunk), reinterpret_cast<float*>(slot), chunk_floats);
    };
    plan.agree = [&](const std::vector<Signature>& all) {
        const std::vector<Contribution> ranks = contributions_of(all);
        std::vector<uint32_t> chunks;
        for (const Contribution& rank : ranks) chunks.push_back(rank.batch > 0 ? rounds : 0);
        agreement = Agreement(ranks);
        if (!agreement.applies()) chunks.clear();
        if (!chunks.empty()) reset_counters(parameters);
        return chunks;
    };
    std::vector<const float*> deltas(static_cast<size_t>(communicator.size()));
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        for (size_t r = 0; r < deltas.size(); ++r) {
            deltas[r] = reinterpret_cast<const float*>(slots[r]);
        }
        apply_range(parameters, begin(chunk), length(chunk), deltas.data(), communicator.size(),
                    chunk_floats, agreement.divisor(average), agreement.cap(average));
    };
    communicator.exchange(plan, timeout);
    return agreement;
}

}  // namespace tagi_ddp
