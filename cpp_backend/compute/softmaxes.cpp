// Activations over all outputs of a sample: probabilities of classes. As in the engine, their
// jacobians are diagonal: an innovation of one output does not change the others.

#include <cmath>

#include "compute/activations.h"

namespace tagi_ddp {
namespace {

struct Gaussian {
    float mean;
    float variance;
};

// The logarithm of a log-normal variable, from its moments. The engine does not use log1p either.
Gaussian logarithm(float mean, float variance) {
    const float log_variance = std::log(variance / (mean * mean) + 1.0f);
    return {std::log(mean) - 0.5f * log_variance, log_variance};
}

}  // namespace

void softmax(const States& in, const Activated& out) {
    const auto at = [&](size_t k) { return k / in.width * in.stride + k % in.width; };
    const size_t run = in.batch;
    for (size_t begin = 0; begin < in.batch * in.width; begin += run) {
        size_t largest = begin;
        for (size_t k = begin; k < begin + run; ++k) {
            if (in.mean[at(k)] > in.mean[at(largest)]) largest = k;
        }
        const float most = in.mean[at(largest)], most_variance = in.variance[at(largest)];
        float total = 0.0f;
        for (size_t k = begin; k < begin + run; ++k) {
            out.mean[at(k)] = std::exp(in.mean[at(k)] - most);
            total += out.mean[at(k)];
        }
        for (size_t k = begin; k < begin + run; ++k) {
            const size_t i = at(k);
            out.mean[i] /= total;
            out.jacobian[i] = out.mean[i] * (1.0f - out.mean[i]);
            out.variance[i] = (in.variance[i] + most_variance) * out.jacobian[i] * out.jacobian[i];
        }
    }
}

void remax(const States& in, const Activated& out) {
    for (size_t b = 0; b < in.batch; ++b) {
        const size_t begin = b * in.stride, end = begin + in.width;
        float total = 0.0f, total_variance = 0.0f;
        for (size_t i = begin; i < end; ++i) {
            const Rectified rectified = rectified_moments(in.mean[i], in.variance[i]);
            total += rectified.mean;
            total_variance += rectified.variance;
        }
        const Gaussian log_total = logarithm(total, total_variance);
        float sum = 0.0f;
        for (size_t i = begin; i < end; ++i) {
            const Rectified rectified = rectified_moments(in.mean[i], in.variance[i]);
            const Gaussian log = logarithm(rectified.mean, rectified.variance);
            const float covariance =
                std::log(rectified.variance * (1.0f / total) * (1.0f / rectified.mean) + 1.0f);
            const float spread = log.variance + log_total.variance - 2.0f * covariance;
            const float value = std::exp(log.mean - log_total.mean + 0.5f * spread);
            out.mean[i] = std::fmax(value, least_moment);
            out.variance[i] = std::exp(spread) - 1.0f;
            out.jacobian[i] = (std::exp(log.variance - covariance) - 1.0f) * rectified.mean /
                              rectified.probability;
            sum += out.mean[i];
        }
        for (size_t i = begin; i < end; ++i) {
            out.mean[i] /= sum;
            out.variance[i] *= out.mean[i] * out.mean[i];
            const float slope = out.jacobian[i] * out.mean[i];
            const float bound = std::sqrt(out.variance[i]) * std::sqrt(in.variance[i]);
            out.jacobian[i] = std::fmin(bound, slope) / in.variance[i];
        }
    }
}

void closed_form_softmax(const States& in, const Activated& out) {
    for (size_t b = 0; b < in.batch; ++b) {
        const size_t begin = b * in.stride, end = begin + in.width;
        float total = 0.0f, total_variance = 0.0f;
        for (size_t i = begin; i < end; ++i) {
            const float mean = in.mean[i], variance = in.variance[i];
            out.mean[i] = std::exp(mean + 0.5f * variance);
            out.variance[i] = std::exp(2.0f * mean + variance) * (std::exp(variance) - 1.0f);
            total += out.mean[i];
            total_variance += out.variance[i];
        }
        const Gaussian log_total = logarithm(total, total_variance);
        for (size_t i = begin; i < end; ++i) {
            const float covariance =
                std::log(out.variance[i] * (1.0f / (out.mean[i] * total)) + 1.0f);
            const float variance = in.variance[i];
            const float spread = variance + log_total.variance - 2.0f * covariance;
            out.mean[i] = std::exp(in.mean[i] - log_total.mean + 0.5f * spread);
            out.variance[i] = (std::exp(spread) - 1.0f) * out.mean[i] * out.mean[i];
            out.jacobian[i] = (variance - covariance) * out.mean[i] / variance;
        }
    }
}

}  // namespace tagi_ddp
