// The loops of activations.cpp; see twice.h.

// max(0, z): means and variances of negative means become 0.
static void relu(const States& in, const Activated& out) {
    for (size_t i = 0; i < in.floats(); i += lanes) {
        const Vector mean = load(in.mean + i), zero = broadcast(0.0f);
        store(out.mean + i, mean > 0.0f ? mean : (mean == mean ? zero : mean));
        store(out.variance + i, mean > 0.0f ? load(in.variance + i) : zero);
        store(out.jacobian + i, mean > 0.0f ? broadcast(1.0f) : zero);
    }
}

TAGI_DDP_INLINE void linearize(const States& in, const Activated& out, size_t i, Vector value,
                               Vector slope) {
    store(out.mean + i, value);
    store(out.variance + i, slope * load(in.variance + i) * slope);
    store(out.jacobian + i, slope);
}

static void sigmoids(const States& in, const Activated& out) {
    for (size_t i = 0; i < in.floats(); i += lanes) {
        const Vector value = sigmoid(load(in.mean + i));
        linearize(in, out, i, value, value * (1.0f - value));
    }
}

static void tangents(const States& in, const Activated& out) {
    for (size_t i = 0; i < in.floats(); i += lanes) {
        const Vector value = hyperbolic_tangent(load(in.mean + i));
        linearize(in, out, i, value, 1.0f - value * value);
    }
}

static void leaky_relu(const States& in, const Activated& out) {
    for (size_t i = 0; i < in.floats(); i += lanes) {
        const Vector mean = load(in.mean + i);
        const Vector slope = mean > 0.0f ? broadcast(1.0f) : broadcast(leaky_slope);
        linearize(in, out, i, mean * slope, slope);
    }
}
