// The loops of lstm.cpp; see twice.h.

struct Gaussian {
    Vector mean;
    Vector variance;
};

struct Activated {
    Gaussian value;
    Vector slope;
};

TAGI_DDP_INLINE Activated linearize(Vector value, Vector slope, Vector variance) {
    return {{value, slope * variance * slope}, slope};
}

TAGI_DDP_INLINE Activated sigmoid_of(const float* mean, const float* variance) {
    const Vector value = sigmoid(load(mean));
    return linearize(value, value * (1.0f - value), load(variance));
}

TAGI_DDP_INLINE Activated tanh_of(Vector mean, Vector variance) {
    const Vector value = hyperbolic_tangent(mean);
    return linearize(value, 1.0f - value * value, variance);
}

// The moments of a * b, by Gaussian multiplicative approximation.
TAGI_DDP_INLINE Gaussian multiply(const Gaussian& a, const Gaussian& b, Vector covariance) {
    const Vector mean = a.mean * b.mean;
    return {mean + covariance, a.variance * (b.variance + b.mean * b.mean) +
                                   b.variance * (a.mean * a.mean) +
                                   covariance * (covariance + 2.0f * mean)};
}

static void compute_cells(const Row& row) {
    const Vector zero = broadcast(0.0f);
    for (size_t i = 0; i < row.stride; i += lanes) {
        const auto at = [&](size_t gate) { return gate * row.stride + i; };
        const auto covariance = [&](size_t pair) {
            return row.covariances == nullptr ? zero : load(row.covariances + at(pair));
        };
        const auto gate = [&](size_t g) {
            return sigmoid_of(row.sum_mean + at(g), row.sum_variance + at(g));
        };
        const Activated in = gate(input), out = gate(output);
        const Activated candidate =
            tanh_of(load(row.sum_mean + at(cell)), load(row.sum_variance + at(cell)));
        Gaussian c = multiply(in.value, candidate.value,
                              covariance(input_cell) * in.slope * candidate.slope);
        const Vector by_input = in.slope * candidate.value.mean;
        const Vector by_cell = candidate.slope * in.value.mean;
        Vector by_forget = zero;
        if (row.before_mean_c != nullptr) {
            const Activated kept = gate(forget);
            const Gaussian before{load(row.before_mean_c + i), load(row.before_var_c + i)};
            const Gaussian old = multiply(kept.value, before, zero);
            c.mean += old.mean;
            c.variance += old.variance;
            by_forget = kept.slope * before.mean;
            store(row.forget + i, kept.value.mean);
        }
        const Activated active = tanh_of(c.mean, c.variance);
        const Vector between = covariance(forget_output) * by_forget +
                               covariance(input_output) * by_input +
                               covariance(cell_output) * by_cell;
        const Gaussian h = multiply(out.value, active.value, between * active.slope * out.slope);
        store(row.mean_c + i, c.mean);
        store(row.var_c + i, c.variance);
        store(row.mean_h + i, h.mean);
        store(row.var_h + i, h.variance);
        const Vector by_c = active.slope * out.value.mean;
        store(row.cell_slopes + i, by_c);
        store(row.slopes + at(forget), by_forget * by_c);
        store(row.slopes + at(input), by_input * by_c);
        store(row.slopes + at(cell), by_cell * by_c);
        store(row.slopes + at(output), out.slope * active.value.mean);
    }
}

// The covariances of the gates' sums in one row. Those with the output gate are of x alone.
static void covariances_one(const float* weights, size_t outputs, size_t inputs, size_t row,
                            const float* variance, size_t depth, size_t stride, float* out) {
    const size_t gate_size = outputs * row;
    for (size_t o = 0; o < outputs; ++o, weights += row) {
        const float* w[gates] = {weights, weights + gate_size, weights + 2 * gate_size,
                                 weights + 3 * gate_size};
        Vector sums[pairs] = {};
        size_t j = 0;
        for (; j + lanes <= inputs; j += lanes) {
            const Vector v = load(variance + j);
            const Vector with_output = v * load(w[output] + j);
            const Vector in = load(w[input] + j), candidate = load(w[cell] + j);
            sums[input_cell] += in * candidate * v;
            sums[forget_output] += load(w[forget] + j) * with_output;
            sums[input_output] += in * with_output;
            sums[cell_output] += candidate * with_output;
        }
        float total[pairs];
        for (size_t p = 0; p < pairs; ++p) total[p] = sum(sums[p]);
        for (; j < inputs; ++j) {
            const float with_output = variance[j] * w[output][j];
            total[input_cell] += w[input][j] * w[cell][j] * variance[j];
            total[forget_output] += w[forget][j] * with_output;
            total[input_output] += w[input][j] * with_output;
            total[cell_output] += w[cell][j] * with_output;
        }
        for (; j < depth; ++j) total[input_cell] += w[input][j] * w[cell][j] * variance[j];
        for (size_t p = 0; p < pairs; ++p) out[p * stride + o] = total[p];
    }
}

// The products of two gates' weights: [depth, pairs, outputs], with padded outputs.
static void pack_pairs(const float* weights, size_t outputs, size_t inputs, size_t row,
                       size_t depth, size_t stride, float* out) {
    for (size_t p = 0; p < pairs; ++p) {
        const float* one = weights + pair_gates[p][0] * outputs * row;
        const float* other = weights + pair_gates[p][1] * outputs * row;
        const size_t most = p == input_cell ? depth : inputs;
        for (size_t j = 0; j < depth; ++j) {
            float* to = out + (j * pairs + p) * stride;
            for (size_t o = 0; o < outputs; ++o) {
                to[o] = j < most ? one[o * row + j] * other[o * row + j] : 0.0f;
            }
        }
    }
}

// The innovations of the gates' sums of one row: by_mean = slope * dm, by_variance = slope^2 * dv.
static void spread_over_gates(const float* slopes, size_t outputs, size_t stride, const float* mean,
                              const float* variance, float* __restrict by_mean,
                              float* __restrict by_variance) {
    for (size_t g = 0; g < gates; ++g, slopes += stride, by_mean += stride, by_variance += stride) {
        for (size_t o = 0; o < outputs; ++o) {
            by_mean[o] = slopes[o] * mean[o];
            by_variance[o] = slopes[o] * slopes[o] * variance[o];
        }
    }
}

// The innovation of one row's x: t dm and t^2 dv, with t the sum over gates of slope * weight.
static void below_one(const float* weights, size_t outputs, size_t inputs, size_t row,
                      const float* slopes, size_t stride, const float* mean, const float* variance,
                      float* __restrict out_mean, float* __restrict out_variance) {
    const size_t gate_size = outputs * row;
    std::fill_n(out_mean, inputs, 0.0f);
    std::fill_n(out_variance, inputs, 0.0f);
    for (size_t o = 0; o < outputs; ++o, weights += row) {
        const float f = slopes[forget * stride + o], i = slopes[input * stride + o];
        const float g = slopes[cell * stride + o], h = slopes[output * stride + o];
        const float dm = mean[o], dv = variance[o];
        for (size_t j = 0; j < inputs; ++j) {
            const float t = f * weights[j] + i * weights[gate_size + j] +
                            g * weights[2 * gate_size + j] + h * weights[3 * gate_size + j];
            out_mean[j] += t * dm;
            out_variance[j] += t * t * dv;
        }
    }
}
