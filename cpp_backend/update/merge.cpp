#include "update/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/simd.h"

namespace tagi_ddp {
namespace {

constexpr int halvings = 257;  // enough for any float32 change of any variance
constexpr size_t block_floats = 1024;

// The change of a run of parameters.
struct Change {
    const float* precision;
    const float* weighted;
    const float* own_precision;
    const float* own_weighted;
    const float* reference;
};

// Converts the change to float64, and subtracts this rank's own.
TAGI_DDP_WIDE
void load(const Change& change, size_t first, size_t count, double* __restrict precision,
          double* __restrict weighted) {
    for (size_t i = 0; i < count; ++i) precision[i] = change.precision[first + i];
    for (size_t i = 0; i < count; ++i) weighted[i] = change.weighted[first + i];
    if (change.own_precision == nullptr) return;
    for (size_t i = 0; i < count; ++i) precision[i] -= change.own_precision[first + i];
    for (size_t i = 0; i < count; ++i) weighted[i] -= change.own_weighted[first + i];
}

// Returns true if all parameters keep enough of their precision, and have finite changes.
TAGI_DDP_WIDE
bool all_fit(const float* __restrict var, const double* __restrict precision,
             const double* __restrict weighted, size_t count) {
    int64_t bad = 0;
    for (size_t i = 0; i < count; ++i) {
        const double scale = 1.0 + precision[i] * var[i];
        // Sums of conditions, without branches, vectorize.
        bad += !(scale > least_precision_kept);
        bad += !(scale < std::numeric_limits<double>::infinity());
        bad += !(std::fabs(weighted[i]) < std::numeric_limits<double>::infinity());
    }
    return bad == 0;
}

// var' = var / (1 + dl var), mu' = mu + (d + dl (reference - mu)) var'. In this form, rounding does
// not lose a small change of a large mean.
TAGI_DDP_WIDE
void add_all(float* mu, float* __restrict var, const float* reference,
             const double* __restrict precision, const double* __restrict weighted, size_t count) {
    TAGI_DDP_SAME_OR_APART
    for (size_t i = 0; i < count; ++i) {
        const double after = var[i] / (1.0 + precision[i] * var[i]);
        const double mean = mu[i];
        const double step = weighted[i] + precision[i] * (reference[i] - mean);
        mu[i] = static_cast<float>(mean + step * after);
        var[i] = std::max(static_cast<float>(after), std::numeric_limits<float>::min());
    }
}

// Applies half of the change, a quarter, and so on, if the whole leaves too little precision.
void add_part(float& mu, float& var, float reference, double precision, double weighted) {
    if (!std::isfinite(precision) || !std::isfinite(weighted)) return;
    double weight = 1.0;
    for (int i = 0; i < halvings; ++i, weight *= 0.5) {
        const double part[2] = {weight * precision, weight * weighted};
        if (all_fit(&var, part, part + 1, 1)) {
            add_all(&mu, &var, &reference, part, part + 1, 1);
            return;
        }
    }
}

int64_t add(float* mu, float* var, const Change& change, size_t count) {
    double precision[block_floats];
    double weighted[block_floats];
    int64_t guarded = 0;
    for (size_t done = 0; done < count; done += block_floats) {
        const size_t n = std::min(block_floats, count - done);
        load(change, done, n, precision, weighted);
        float* const m = mu + done;
        float* const v = var + done;
        const float* const reference = change.reference + done;
        if (all_fit(v, precision, weighted, n)) {
            add_all(m, v, reference, precision, weighted, n);
            continue;
        }
        for (size_t i = 0; i < n; ++i) {
            if (all_fit(v + i, precision + i, weighted + i, 1)) {
                add_all(m + i, v + i, reference + i, precision + i, weighted + i, 1);
            } else {
                ++guarded;
                add_part(m[i], v[i], reference[i], precision[i], weighted[i]);
            }
        }
    }
    return guarded;
}

}  // namespace

TAGI_DDP_WIDE
void change_since(const float* now, const float* before, float* __restrict change, size_t size) {
    for (size_t i = 0; i < size; ++i) {
        const double var = now[size + i];
        const double var0 = before[size + i];
        change[i] = static_cast<float>((var0 - var) / (var * var0));
    }
    for (size_t i = 0; i < size; ++i) {
        const double moved = static_cast<double>(now[i]) - before[i];
        change[size + i] = static_cast<float>(moved / now[size + i]);
    }
}

std::vector<int64_t> add_change(const Parameters& parameters, float* gaussians,
                                const float* reference, const float* change, const float* own) {
    const size_t size = parameters.size();
    std::vector<int64_t> guarded(parameters.blocks().size() / 2, 0);
    for (size_t i = 0; i < parameters.blocks().size(); ++i) {
        const size_t at = parameters.offsets()[i];
        const Change part{change + at, change + size + at, own == nullptr ? nullptr : own + at,
                          own == nullptr ? nullptr : own + size + at, reference + at};
        guarded[i / 2] +=
            add(gaussians + at, gaussians + size + at, part, parameters.blocks()[i].count);
    }
    return guarded;
}

}  // namespace tagi_ddp
