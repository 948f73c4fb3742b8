#include "update/agreement.h"

#include "common/dtype.h"

namespace tagi_ddp {

float cap_factor(int64_t batch) {
    float factor = cap_factors[0].factor;
    for (const CapFactor& entry : cap_factors) {
        if (batch >= entry.smallest_batch) factor = entry.factor;
    }
    return factor;
}

Agreement::Agreement(const std::vector<Contribution>& ranks) {
    for (size_t r = 0; r < ranks.size(); ++r) {
        batch += ranks[r].batch;
        active += ranks[r].batch > 0;
        all_finished = all_finished && ranks[r].finished;
        if (!ranks[r].finite) not_finite.push_back(static_cast<int>(r));
    }
}

float Agreement::cap(bool average) const {
    // The mean of deltas stands for one rank's batch; shares that differ count as their mean.
    return cap_factor(average ? (batch + active - 1) / active : batch);
}

Signature step_signature(size_t num_parameters, bool average, const Contribution& contribution) {
    Signature signature{Kind::step, static_cast<uint32_t>(DType::f32), average};
    signature.count = num_parameters;
    signature.words[0] = contribution.batch;
    signature.words[1] = contribution.finite;
    signature.words[2] = contribution.finished;
    return signature;
}

std::vector<Contribution> contributions_of(const std::vector<Signature>& ranks) {
    std::vector<Contribution> contributions;
    for (const Signature& rank : ranks) {
        contributions.push_back({rank.words[0], rank.words[1] != 0, rank.words[2] != 0});
    }
    return contributions;
}

}  // namespace tagi_ddp
