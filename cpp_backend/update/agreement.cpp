#include "update/agreement.h"

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

int64_t Agreement::capped_as(bool average) const {
    // A mean of deltas corresponds to the batch of one rank: the mean of the ranks' batches.
    return average ? (batch + active - 1) / active : batch;
}

}  // namespace tagi_ddp
