#include "update/adaptive_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/simd.h"

namespace tagi_ddp {
namespace {

constexpr size_t lanes = 8;  // sums side by side: their order is that of registers of any width

double total(double (&sums)[lanes]) {
    for (size_t half = lanes / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
}

// The sum of a * b * scale; values that are not finite count as 0.
TAGI_DDP_WIDE
double product(const float* a, const float* b, const float* scale, size_t count) {
    double sums[lanes] = {};
    for (size_t first = 0; first < count; first += lanes) {
        const size_t n = std::min(lanes, count - first);
        for (size_t i = 0; i < n; ++i) {
            const double value =
                static_cast<double>(a[first + i]) * b[first + i] * scale[first + i];
            sums[i] += std::fabs(value) <= 1e300 ? value : 0.0;
        }
    }
    return total(sums);
}

// The growth of precisions relative to those before; values that are not finite count as 0.
TAGI_DDP_WIDE
double growth(const float* precision, const float* var, size_t count) {
    double sums[lanes] = {};
    for (size_t first = 0; first < count; first += lanes) {
        const size_t n = std::min(lanes, count - first);
        for (size_t i = 0; i < n; ++i) {
            const double value = static_cast<double>(precision[first + i]) * var[first + i];
            sums[i] += std::fabs(value) <= 1e300 ? value : 0.0;
        }
    }
    return total(sums);
}

// The part of the agreement that counts, by the squares of moves and the growth of precisions.
double part_of(double squares, double growth) {
    const double ratio = AdaptiveSum::surprise * std::max(growth, 0.0) / squares;
    return 1.0 / (1.0 + ratio * ratio * ratio * ratio);
}

// Adds a multiple of the previous sum to this sum, and replaces the previous sum by this one.
TAGI_DDP_WIDE
void extrapolate(float* values, float* previous, double multiple, size_t count) {
    const float factor = static_cast<float>(multiple);
    for (size_t i = 0; i < count; ++i) {
        const float value = values[i];
        values[i] += factor * previous[i];
        previous[i] = std::fabs(value) <= std::numeric_limits<float>::max() ? value : 0.0f;
    }
}

// Divides the values by 1 + excess.
TAGI_DDP_WIDE
void divide(float* values, double excess, size_t count) {
    const float part = static_cast<float>(1.0 / (1.0 + excess));
    for (size_t i = 0; i < count; ++i) values[i] *= part;
}

}  // namespace

AdaptiveSum::AdaptiveSum(const Parameters& parameters)
    : size_(parameters.size()),
      weights_(parameters.blocks().size() / 2, 0.0),
      previous_(parameters.size(), 0.0f) {
    for (size_t run = 0; run < parameters.blocks().size(); ++run) {
        const size_t count = parameters.blocks()[run].count;
        for (size_t done = 0; done < count; done += block_floats) {
            blocks_.push_back(
                {parameters.offsets()[run] + done, std::min(block_floats, count - done), run / 2});
        }
        weights_[run / 2] += static_cast<double>(count);
    }
    trust_.assign(blocks_.size(), 1.0);
}

void AdaptiveSum::check(size_t change, size_t before, size_t description) const {
    if (change != 2 * size_ || before != 2 * size_ || description != described()) {
        throw std::invalid_argument("expected changes of " + std::to_string(2 * size_) +
                                    " floats, and a description of " + std::to_string(described()));
    }
}

void AdaptiveSum::describe(const float* change, const float* before, double steps,
                           float* description) const {
    for (const Block& block : blocks_) {
        const float* const weighted = change + size_ + block.begin;
        *description++ = static_cast<float>(
            product(weighted, weighted, before + size_ + block.begin, block.count));
    }
    *description = static_cast<float>(steps);
}

std::vector<double> AdaptiveSum::damp(float* change, const float* before, const float* description,
                                      int ranks) {
    const bool single = description[blocks_.size()] <= static_cast<float>(ranks);
    std::vector<double> agreement(weights_.size(), 0.0);
    for (size_t number = 0; number < blocks_.size(); ++number) {
        const Block& block = blocks_[number];
        double& trust = trust_[number];
        float* const precision = change + block.begin;
        float* const weighted = precision + size_;
        float* const previous = previous_.data() + block.begin;
        const float* const var = before + size_ + block.begin;
        const double all = description[number];
        const double sum = product(weighted, weighted, var, block.count);
        const double previous_sum = product(previous, previous, var, block.count);
        double alike = 1.0, part = 1.0;  // if a rank's squares are not finite
        if (std::isfinite(all)) {
            const double ratio = all > 0 ? sum / all : 0.0;
            alike = std::clamp((ratio - 1.0) / std::max(1, ranks - 1), 0.0, 1.0);
            part = all > 0 ? part_of(all, growth(precision, var, block.count)) : 0.0;
        }
        double repeated = 0.0;  // r
        if (!single && sum > 0 && previous_sum > 0) {
            const double along = product(weighted, previous, var, block.count);
            repeated = std::min(along / previous_sum, 0.0);
            const double turn = along / (std::sqrt(sum) * std::sqrt(previous_sum)) + leeway;
            trust = std::clamp(trust + (turn > 0 ? regained * turn : turn), 0.0, 1.0);
        }
        const double trusted = single ? 1.0 : trust;
        // The sum contains r of r / (1 - r) already.
        extrapolate(weighted, previous, repeated * repeated / (1.0 - repeated), block.count);
        divide(precision, (ranks - 1) * part * (1.0 - trusted * (1.0 - alike)), block.count);
        divide(weighted, (ranks - 1) * (1.0 - trusted * (1.0 - part * alike)), block.count);
        agreement[block.layer] += alike * static_cast<double>(block.count);
    }
    for (size_t layer = 0; layer < agreement.size(); ++layer) {
        if (weights_[layer] > 0) agreement[layer] /= weights_[layer];
    }
    return agreement;
}

void AdaptiveSum::restart() {
    std::fill(previous_.begin(), previous_.end(), 0.0f);
    std::fill(trust_.begin(), trust_.end(), 1.0);
}

}  // namespace tagi_ddp
