// The activation and its derivatives, for the backward; activate.cuh has the activation alone.
#pragma once
#include "activate.cuh"

namespace mokfx {

struct Derived {
    float hidden, gate, up;  // act(gate, up), and its derivatives by gate and by up
};

struct Slope {
    float value, slope;
};

__device__ __forceinline__ Slope curve_slope(const Params& p, float z) {
    switch (p.curve) {
        case GAUSS: {
            const float below = 0.5f * (1.0f + erff(z * 0.70710678118654752f));
            return {z * below, below + z * 0.39894228040143268f * __expf(-0.5f * z * z)};
        }
        case RELU: return {z < 0.0f ? 0.0f : z, z > 0.0f ? 1.0f : 0.0f};
        case RELU_SQUARED: {
            const float positive = z < 0.0f ? 0.0f : z;
            return {positive * positive, 2.0f * positive};
        }
        default: {
            const float square = z * z, s = __fdividef(1.0f, 1.0f + __expf(-z * (p.linear + p.cubic * square)));
            return {z * s, s + z * s * (1.0f - s) * (p.linear + 3.0f * p.cubic * square)};
        }
    }
}

template <bool PLAIN>  // SwiGLU, or any other
__device__ __forceinline__ Derived derive(const Params& p, float gate, float up) {
    if constexpr (PLAIN) {
        const float s = __fdividef(1.0f, 1.0f + __expf(-gate)), a = gate * s;
        return {a * up, (s + a * (1.0f - s)) * up, a};
    } else if (p.first_layer == UNGATED) {
        const Slope of = curve_slope(p, up);
        return {of.value, 0.0f, of.slope};
    } else {
        const float limit = p.limit, u = (up > limit ? limit : up < -limit ? -limit : up) + p.offset;
        const Slope of = curve_slope(p, gate > limit ? limit : gate);
        return {of.value * u, gate > limit ? 0.0f : of.slope * u, fabsf(up) > limit ? 0.0f : of.value};
    }
}

}  // namespace mokfx
