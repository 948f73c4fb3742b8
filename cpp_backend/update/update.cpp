#include "update/update.h"

#include <cstring>

#include "update/apply.h"

namespace tagi_ddp {
namespace {

constexpr size_t chunk_floats = slot_bytes / (2 * sizeof(float));  // means and variances

}  // namespace

float cap_factor(int64_t batch) {
    if (batch <= 1) return 0.1f;
    return batch < 256 ? 2.0f : 3.0f;
}

Agreement::Agreement(const std::vector<Contribution>& ranks) {
    for (size_t r = 0; r < ranks.size(); ++r) {
        batch += ranks[r].batch;
        active += ranks[r].batch > 0;
        all_joined = all_joined && ranks[r].joined;
        if (!ranks[r].finite) not_finite.push_back(static_cast<int>(r));
    }
}

float Agreement::cap(bool average) const {
    // The mean of deltas stands for one rank's batch; shares that differ count as their mean.
    return cap_factor(average ? (batch + active - 1) / active : batch);
}

void write_words(Signature& signature, const Contribution& contribution) {
    signature.words[0] = contribution.batch;
    signature.words[1] = contribution.finite;
    signature.words[2] = contribution.joined;
}

std::vector<Contribution> read_words(const std::vector<Signature>& ranks) {
    std::vector<Contribution> contributions;
    for (const Signature& rank : ranks) {
        contributions.push_back({rank.words[0], rank.words[1] != 0, rank.words[2] != 0});
    }
    return contributions;
}

void pack(const Parameters& parameters, float* bucket) {
    pack(parameters, 0, parameters.size(), bucket);
}

void pack(const Parameters& parameters, size_t begin, size_t count, float* bucket) {
    parameters.visit(begin, count, [&](const Block& block, size_t first, size_t n, size_t at) {
        std::memcpy(bucket + at, block.delta_mu + first, n * sizeof(float));
        std::memcpy(bucket + count + at, block.delta_var + first, n * sizeof(float));
    });
}

void apply(const Parameters& parameters, const float* bucket, float divisor, float cap) {
    reset_counters(parameters);
    apply_range(parameters, 0, parameters.size(), &bucket, 1, parameters.size(), divisor, cap);
}

void apply_own(const Parameters& parameters, float cap) {
    for (const Block& block : parameters.blocks()) {
        const int32_t negative =
            apply_capped(block.mu, block.var, block.delta_mu, block.delta_var, block.count, cap);
        if (block.neg_var_counter != nullptr) *block.neg_var_counter = negative;
    }
}

Agreement update(ShmCommunicator& communicator, const Parameters& parameters,
                 const Contribution& contribution, bool average, double timeout) {
    const size_t size = parameters.size();
    const uint32_t rounds = static_cast<uint32_t>((size + chunk_floats - 1) / chunk_floats);
    const auto length = [&](uint32_t chunk) {
        return std::min(chunk_floats, size - static_cast<size_t>(chunk) * chunk_floats);
    };
    Signature signature{Kind::update, static_cast<uint32_t>(DType::f32), average};
    signature.count = size;
    write_words(signature, contribution);
    const bool contributes = contribution.batch > 0 && contribution.finite;

    Agreement agreement{{}};
    PipelinedExchange plan{"step", signature, contributes ? rounds : 0};
    plan.fill = [&](uint32_t chunk, std::byte* slot) {
        float* floats = reinterpret_cast<float*>(slot);
        parameters.visit(static_cast<size_t>(chunk) * chunk_floats, length(chunk),
                         [&](const Block& block, size_t first, size_t count, size_t at) {
                             std::memcpy(floats + at, block.delta_mu + first,
                                         count * sizeof(float));
                             std::memcpy(floats + chunk_floats + at, block.delta_var + first,
                                         count * sizeof(float));
                         });
    };
    plan.agree = [&](const std::vector<Signature>& all) {
        const std::vector<Contribution> ranks = read_words(all);
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
        apply_range(parameters, static_cast<size_t>(chunk) * chunk_floats, length(chunk),
                    deltas.data(), communicator.size(), chunk_floats, agreement.divisor(average),
                    agreement.cap(average));
    };
    communicator.exchange(plan, timeout);
    return agreement;
}

}  // namespace tagi_ddp
