// The loops of linear.cpp; see twice.h.

// The products of one sample: out = W a, and (W^2 + var W) var a + var W a^2.
static void forward_one(const GaussianMatrix& matrix, const float* mean, const float* squares,
                        const float* variance, float* out_mean, float* out_variance) {
    const float* mu = matrix.weights.mu;
    const float* var = matrix.weights.var;
    const size_t inputs = matrix.inputs;
    // The inputs after the last whole vector are the end of a vector whose other lanes are zero.
    const size_t left = inputs % lanes, last = inputs - lanes;
    const bool overlaps = left != 0 && inputs > lanes;
    Vector last_mean{}, last_square{}, last_variance{};
    if (overlaps) {
        for (size_t k = lanes - left; k < lanes; ++k) {
            last_mean[k] = mean[last + k];
            last_square[k] = squares[last + k];
            if (variance != nullptr) last_variance[k] = variance[last + k];
        }
    }
    for (size_t o = 0; o < matrix.outputs; ++o, mu += matrix.row, var += matrix.row) {
        Vector means = broadcast(0.0f), variances = broadcast(0.0f);
        size_t i = 0;
        for (; i + lanes <= inputs; i += lanes) {
            const Vector w = load(mu + i), v = load(var + i);
            means += w * load(mean + i);
            variances += v * load(squares + i);
            if (variance != nullptr) variances += (w * w + v) * load(variance + i);
        }
        if (overlaps) {
            const Vector w = load(mu + last), v = load(var + last);
            means += w * last_mean;
            variances += v * last_square + (w * w + v) * last_variance;
            i = inputs;
        }
        float total = sum(means), spread = sum(variances);
        for (; i < inputs; ++i) {
            total += mu[i] * mean[i];
            spread += var[i] * squares[i];
            if (variance != nullptr) spread += (mu[i] * mu[i] + var[i]) * variance[i];
        }
        out_mean[o] = total;
        out_variance[o] = spread;
    }
}

static void add_row(const float* row, size_t count, float* __restrict out) {
    for (size_t i = 0; i < count; ++i) out[i] += row[i];
}

// out = W^T dm and (W^2)^T dv of one sample.
static void below_one(const GaussianMatrix& matrix, const float* by_mean, const float* by_variance,
                      float* __restrict out_mean, float* __restrict out_variance) {
    const float* mu = matrix.weights.mu;
    const size_t inputs = matrix.inputs;
    std::fill_n(out_mean, inputs, 0.0f);
    std::fill_n(out_variance, inputs, 0.0f);
    for (size_t o = 0; o < matrix.outputs; ++o, mu += matrix.row) {
        const float dm = by_mean[o], dv = by_variance[o];
        for (size_t i = 0; i < inputs; ++i) {
            out_mean[i] += mu[i] * dm;
            out_variance[i] += mu[i] * mu[i] * dv;
        }
    }
}

// The factors of deltas: `by` has rows of the outputs, `from` rows of the inputs.
struct Outer {
    const float* by;
    size_t by_row;
    const float* from;
    size_t from_row;
};

template <int Rows, int Vectors>
TAGI_DDP_INLINE void add_outer(Vector (&sums)[Rows][Vectors], const Outer& outer, size_t samples,
                               const size_t* columns) {
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) sums[r][v] = broadcast(0.0f);
    }
    const float* by = outer.by;
    const float* from = outer.from;
    for (size_t k = 0; k < samples; ++k, by += outer.by_row, from += outer.from_row) {
        Vector part[Vectors];
        for (int v = 0; v < Vectors; ++v) part[v] = load(from + columns[v]);
        for (int r = 0; r < Rows; ++r) {
            const Vector times = broadcast(by[r]);
            for (int v = 0; v < Vectors; ++v) sums[r][v] += times * part[v];
        }
    }
}

// Computes `Rows` rows of the deltas, var or var^2 times the sums, in vectors at `columns`.
template <bool squared, int Rows, int Vectors>
TAGI_DDP_INLINE void delta_tile(const Outer& outer, const States& inputs, const float* var,
                                float* delta, size_t row, const size_t* columns) {
    Vector sums[Rows][Vectors];
    add_outer(sums, outer, inputs.batch, columns);
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) {
            const Vector w = load(var + r * row + columns[v]);
            store(delta + r * row + columns[v], sums[r][v] * (squared ? w * w : w));
        }
    }
}

// Computes `Most` vectors of the rows at a time, then fewer. If a row does not consist of whole
// vectors, the last vector ends with the row, and overlaps the one before.
template <bool squared, int Rows, int Most>
TAGI_DDP_INLINE void delta_rows(const Outer& outer, const States& inputs, size_t at,
                                const float* var, float* delta, size_t row) {
    const size_t width = inputs.width;
    for (; at + (Most - 1) * lanes < width; at += Most * lanes) {
        size_t columns[Most];
        for (size_t v = 0; v < Most; ++v) columns[v] = std::min(at + v * lanes, width - lanes);
        delta_tile<squared, Rows, Most>(outer, inputs, var, delta, row, columns);
    }
    if constexpr (Most > 1) {
        delta_rows<squared, Rows, Most / 2>(outer, inputs, at, var, delta, row);
    }
}

template <bool squared>
TAGI_DDP_INLINE void delta_matrix(const GaussianMatrix& matrix, Outer outer, const States& inputs,
                                  float* delta) {
    const float* var = matrix.weights.var;
    const size_t row = matrix.row;
    size_t left = matrix.outputs;
    const auto pass = [&](size_t rows) {
        outer.by += rows;
        var += rows * row;
        delta += rows * row;
    };
    for (; left >= 4; left -= 4) {
        delta_rows<squared, 4, 2>(outer, inputs, 0, var, delta, row);
        pass(4);
    }
    for (; left >= 2; left -= 2) {
        delta_rows<squared, 2, 4>(outer, inputs, 0, var, delta, row);
        pass(2);
    }
    if (left == 1) delta_rows<squared, 1, 4>(outer, inputs, 0, var, delta, row);
}

// Computes the deltas of weights of eight inputs or more.
static void write_wide(const GaussianMatrix& matrix, const States& inputs, const float* squares,
                       Deltas deltas, size_t stride) {
    delta_matrix<false>(matrix, {deltas.mean, stride, inputs.mean, inputs.stride}, inputs,
                        matrix.weights.delta_mu);
    delta_matrix<true>(matrix, {deltas.variance, stride, squares, inputs.stride}, inputs,
                       matrix.weights.delta_var);
}

// delta = var * sums, or var^2 * sums; sums are [inputs, outputs], with rows `stride` floats apart.
template <bool squared>
TAGI_DDP_INLINE void scale_columns(const GaussianMatrix& matrix, const float* sums, size_t stride,
                                   float* __restrict delta) {
    const float* var = matrix.weights.var;
    for (size_t o = 0; o < matrix.outputs; ++o) {
        for (size_t i = 0; i < matrix.inputs; ++i) {
            delta[i] = sums[i * stride + o] * var[i] * (squared ? var[i] : 1.0f);
        }
        var += matrix.row;
        delta += matrix.row;
    }
}

static void scale(const GaussianMatrix& matrix, const float* sums, size_t stride, bool squared,
                  float* delta) {
    if (squared) scale_columns<true>(matrix, sums, stride, delta);
    if (!squared) scale_columns<false>(matrix, sums, stride, delta);
}

// Computes the deltas of one sample. If a row does not consist of whole vectors, the last vector
// ends with the row, and overlaps the one before.
static void deltas_one(const GaussianMatrix& matrix, const float* mean, const float* squares,
                       const float* by_mean, const float* by_variance) {
    const float* var = matrix.weights.var;
    float* __restrict delta_mu = matrix.weights.delta_mu;
    float* __restrict delta_var = matrix.weights.delta_var;
    const size_t inputs = matrix.inputs;
    for (size_t o = 0; o < matrix.outputs; ++o) {
        const float dm = by_mean[o], dv = by_variance[o];
        for (size_t at = 0; at < inputs && inputs >= lanes; at += lanes) {
            const size_t i = std::min(at, inputs - lanes);
            const Vector v = load(var + i);
            store(delta_mu + i, v * (dm * load(mean + i)));
            store(delta_var + i, v * v * (dv * load(squares + i)));
        }
        for (size_t i = 0; i < inputs && inputs < lanes; ++i) {
            delta_mu[i] = var[i] * (dm * mean[i]);
            delta_var[i] = var[i] * var[i] * (dv * squares[i]);
        }
        var += matrix.row;
        delta_mu += matrix.row;
        delta_var += matrix.row;
    }
}

// Computes the sums of columns, times var, or var^2.
template <bool squared>
TAGI_DDP_INLINE void scaled_sums(const float* rows, const States& inputs, size_t columns,
                                 size_t stride, const float* var, float* out) {
    for (size_t c = 0; c < columns; c += lanes) {
        const bool whole = c + lanes <= columns;
        Vector v{};
        if (whole) v = load(var + c);
        for (size_t k = 0; !whole && k < columns - c; ++k) v[k] = var[c + k];
        Vector total = broadcast(0.0f);
        for (size_t r = 0; r < inputs.batch; ++r) total += load(rows + r * stride + c);
        total *= squared ? v * v : v;
        if (whole) store(out + c, total);
        for (size_t k = 0; !whole && k < columns - c; ++k) out[c + k] = total[k];
    }
}

static void write_biases(const Block& biases, const States& inputs, Deltas deltas, size_t stride) {
    scaled_sums<false>(deltas.mean, inputs, biases.count, stride, biases.var, biases.delta_mu);
    scaled_sums<true>(deltas.variance, inputs, biases.count, stride, biases.var, biases.delta_var);
}

// The function `what` of a weight.
TAGI_DDP_INLINE float element(Of what, float mu, float var) {
    switch (what) {
        case Of::means:
            return mu;
        case Of::squares:
            return mu * mu;
        case Of::variances:
            return var;
        default:
            return mu * mu + var;
    }
}

// Writes this function of the weights to padded rows of the inputs.
template <Of what>
TAGI_DDP_INLINE void pack_rows(const GaussianMatrix& matrix, float* __restrict out) {
    const float* mu = matrix.weights.mu;
    const float* var = matrix.weights.var;
    for (size_t o = 0; o < matrix.outputs; ++o) {
        for (size_t i = 0; i < matrix.inputs; ++i) out[i] = element(what, mu[i], var[i]);
        mu += matrix.row;
        var += matrix.row;
        out += padded(matrix.inputs);
    }
}

// Writes this function of the weights to padded rows of the outputs.
template <Of what>
TAGI_DDP_INLINE void pack_columns(const GaussianMatrix& matrix, float* __restrict out) {
    const size_t row = matrix.row, stride = padded(matrix.outputs);
    const float* mu = matrix.weights.mu;
    const float* var = matrix.weights.var;
    size_t o = 0;
    for (; o + lanes <= matrix.outputs; o += lanes) {
        for (size_t i = 0; i < matrix.inputs; ++i) {
            for (size_t k = 0; k < lanes; ++k) {
                const size_t at = (o + k) * row + i;
                out[i * stride + o + k] = element(what, mu[at], var[at]);
            }
        }
    }
    for (; o < matrix.outputs; ++o) {
        for (size_t i = 0; i < matrix.inputs; ++i) {
            out[i * stride + o] = element(what, mu[o * row + i], var[o * row + i]);
        }
    }
}

static void pack_for_forward(const GaussianMatrix& matrix, Of what, float* out) {
    if (what == Of::means) pack_columns<Of::means>(matrix, out);
    if (what == Of::variances) pack_columns<Of::variances>(matrix, out);
    if (what == Of::moments) pack_columns<Of::moments>(matrix, out);
}

static void pack_for_backward(const GaussianMatrix& matrix, Of what, float* out) {
    if (what == Of::means) pack_rows<Of::means>(matrix, out);
    if (what == Of::squares) pack_rows<Of::squares>(matrix, out);
}

static void square_all(const float* data, size_t count, float* out) {
    for (size_t i = 0; i < count; ++i) out[i] = data[i] * data[i];
}

static void multiply_by_jacobian(const States& states, Deltas deltas) {
    const float* jacobian = states.jacobian;
    if (jacobian == nullptr) return;
    float* __restrict mean = deltas.mean;
    float* __restrict variance = deltas.variance;
    for (size_t i = 0; i < states.floats(); ++i) {
        mean[i] *= jacobian[i];
        variance[i] *= jacobian[i] * jacobian[i];
    }
}
