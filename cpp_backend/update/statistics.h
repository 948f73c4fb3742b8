// The running statistics of batch normalization, which the ranks average by their batches.
#pragma once

#include <cstddef>
#include <vector>

namespace tagi_ddp {

class RunningStatistics {
 public:
    // `values` is in the engine's memory and must outlive this.
    void add(std::vector<float>* values) { vectors_.push_back(values); }

    size_t size() const {
        size_t count = 0;
        for (const auto* values : vectors_) count += values->size();
        return count;
    }
    // out[i] = weight * value[i]
    void pack(float* out, float weight) const {
        for (const auto* values : vectors_) {
            for (float value : *values) *out++ = weight * value;
        }
    }
    // value[i] = in[i] / total
    void unpack(const float* in, float total) const {
        for (auto* values : vectors_) {
            for (float& value : *values) value = *in++ / total;
        }
    }

 private:
    std::vector<std::vector<float>*> vectors_;
};

}  // namespace tagi_ddp
