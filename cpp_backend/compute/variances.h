// Variances that no Gaussian has.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

namespace tagi_ddp {

// Whether all are finite and none is negative; the variance of a mean that is NaN, of which `means`
// may have some, may be anything.
inline bool are_variances(const float* values, const float* means, size_t count) {
    constexpr float most = std::numeric_limits<float>::max();
    size_t right = 0;  // a sum, which compilers make of several elements at a time
    for (size_t i = 0; i < count; ++i) right += values[i] >= 0.0f && values[i] <= most;
    if (right == count) return true;
    if (means == nullptr) return false;
    for (size_t i = 0; i < count; ++i) {
        if (!(values[i] >= 0.0f && values[i] <= most) && !std::isnan(means[i])) return false;
    }
    return true;
}

}  // namespace tagi_ddp
