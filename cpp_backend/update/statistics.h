// The running statistics of batch normalization, which the ranks average by their batches.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/engine_memory.h"

namespace tagi_ddp {

class RunningStatistics {
 public:
    // `norm` is verified memory of the engine, and must outlive this.
    void add(EngineBatchNorm* norm) { norms_.push_back(norm); }

    size_t size() const {
        size_t count = 0;
        for (const auto* norm : norms_) count += norm->mu_ra.size() + norm->var_ra.size();
        return count;
    }
    // out[i] = weight * value[i]
    void pack(float* out, float weight) const {
        for (const auto* norm : norms_) {
            for (float value : norm->mu_ra) *out++ = weight * value;
            for (float value : norm->var_ra) *out++ = weight * value;
        }
    }
    // value[i] = in[i] / total
    void unpack(const float* in, float total) const {
        for (auto* norm : norms_) {
            for (float& value : norm->mu_ra) value = *in++ / total;
            for (float& value : norm->var_ra) value = *in++ / total;
            norm->first_batch = false;  // also on a rank that has had no batch
        }
    }

 private:
    std::vector<EngineBatchNorm*> norms_;
};

}  // namespace tagi_ddp
