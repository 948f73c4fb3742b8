// The loops of layer_norm.cpp; see twice.h.

static void normalize(const Block& weights, const Block& biases, float epsilon, size_t width,
                      const float* mean, const float* variance, float* __restrict out_mean,
                      float* __restrict out_variance, float* __restrict spread, float* factor) {
    float total = 0.0f;
    for (size_t i = 0; i < width; ++i) total += mean[i];
    const float center = total / static_cast<float>(width);
    float squares = 0.0f;
    for (size_t i = 0; i < width; ++i) {
        squares += (mean[i] - center) * (mean[i] - center) + variance[i];
    }
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width - 1) + epsilon);
    *factor = scale;
    for (size_t i = 0; i < width; ++i) {
        const float w = weights.mu[i], var_w = weights.var[i];
        const float x = (mean[i] - center) * scale;
        spread[i] = x * std::sqrt(var_w);
        out_mean[i] = x * w;
        out_variance[i] = variance[i] * scale * scale * (w * w + var_w) + spread[i] * spread[i];
    }
    if (biases.count == 0) return;
    for (size_t i = 0; i < width; ++i) {
        out_mean[i] += biases.mu[i];
        out_variance[i] += biases.var[i];
    }
}

static void add_sample(size_t width, const float* spread, Deltas deltas, float* __restrict sum_mean,
                       float* __restrict sum_variance) {
    for (size_t i = 0; i < width; ++i) {
        sum_mean[i] += deltas.mean[i] * spread[i];
        sum_variance[i] += deltas.variance[i] * spread[i] * spread[i];
    }
}
