// Between the two layers: the activation, and the biases of both.
#pragma once
#include "layout.cuh"

namespace mokfx {

__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// z sigmoid(z (linear + cubic z^2)): silu (1, 0), silu of alpha (alpha, 0), and gelu in its tanh form, since
// 1 + tanh(z) = 2 sigmoid(2z). Or gelu itself, relu, and relu squared. A NaN stays one.
__device__ __forceinline__ float curve(const Params& p, float z) {
    switch (p.curve) {
        case GAUSS: return 0.5f * z * (1.0f + erff(z * 0.70710678118654752f));
        case RELU: return z < 0.0f ? 0.0f : z;
        case RELU_SQUARED: return z < 0.0f ? 0.0f : z * z;
        default: return __fdividef(z, 1.0f + __expf(-z * (p.linear + p.cubic * z * z)));
    }
}

// curve(g) (u + offset), with g at most `limit` and u within it: for gpt-oss limit and offset 1, for others none.
__device__ __forceinline__ float activate(const Params& p, float gate, float up) {
    gate = gate > p.limit ? p.limit : gate;
    up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
    return curve(p, gate) * (up + p.offset);
}

// An expert's bias from a column on, zeros if there is none. STEP: between columns, 0 if only the host knows.
template <int STEP = 0>
struct BiasRow {
    const __nv_bfloat16* at;
    int step;
    __device__ __forceinline__ BiasRow(const Bias& bias, int expert, int column) : step(STEP ? STEP : bias.column_stride) {
        at = bias.first ? bias.first + (long long)expert * bias.expert_stride + column * step : nullptr;
    }
    __device__ __forceinline__ float operator[](int column) const {
        return at == nullptr ? 0.0f : __bfloat162float(at[column * (STEP ? STEP : step)]);
    }
};

}  // namespace mokfx
