// Registers of eight floats, and functions of them with errors of a few units in the last place.
//
// twice.h includes this file once for each kind of processor, so it has no guard and no namespace.

using Vector = float __attribute__((vector_size(lanes * sizeof(float))));
using Integers = int32_t __attribute__((vector_size(lanes * sizeof(int32_t))));

TAGI_DDP_INLINE Vector load(const float* data) {
    Vector result;
    std::memcpy(&result, data, sizeof result);
    return result;
}

TAGI_DDP_INLINE void store(float* data, Vector value) { std::memcpy(data, &value, sizeof value); }

TAGI_DDP_INLINE Vector broadcast(float value) {
    return Vector{value, value, value, value, value, value, value, value};
}

TAGI_DDP_INLINE float sum(Vector value) {
    return ((value[0] + value[4]) + (value[2] + value[6])) +
           ((value[1] + value[5]) + (value[3] + value[7]));
}

// e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by the polynomial of Cephes' expf (S. L. Moshier).
TAGI_DDP_INLINE Vector exponential(Vector x) {
    const Vector high = broadcast(88.37f), low = broadcast(-87.33f);
    const Vector bounded = x > high ? high : (x < low ? low : x);
    const Vector shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector n = (bounded * 1.44269504f + shift) - shift;
    const Vector r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
    Vector p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    const Vector result = p * scale;
    return x == x ? result : x;
}

TAGI_DDP_INLINE Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

// Near zero by the polynomial of Cephes' tanhf, else 1 - 2 / (e^2x + 1).
TAGI_DDP_INLINE Vector hyperbolic_tangent(Vector x) {
    const Vector square = x * x;
    Vector p = broadcast(-5.70498872745e-3f);
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const Vector near = p * square * x + x;
    const Vector far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return square < 0.390625f ? near : far;
}
