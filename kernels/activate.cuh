// Between the two layers: the activation, and the biases of both. A kernel is built twice, PLAIN for SwiGLU without biases.
#pragma once
#include "layout.cuh"

namespace mokfx {

__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// g sigmoid(g (linear + cubic g^2)) (u + offset), with g and u clamped: SwiGLU (1, 0, no limit, 0), the clamped one of
// gpt-oss (alpha, 0, limit, 1), and GeGLU in its tanh form, since 1 + tanh(z) = 2 sigmoid(2z).
__device__ __forceinline__ float activate(const Params& p, float gate, float up) {
    gate = gate > p.limit ? p.limit : gate;  // a NaN stays one
    up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
    return __fdividef(gate, 1.0f + __expf(-gate * (p.linear + p.cubic * gate * gate))) * (up + p.offset);
}

// An expert's bias from a column on, zeros if there is none.
struct BiasRow {
    const __nv_bfloat16* at;
    int step;
    __device__ __forceinline__ BiasRow(const Bias& bias, int expert, int column)
        : at(bias.first ? bias.first + (long long)expert * bias.expert_stride + column * bias.column_stride : nullptr), step(bias.column_stride) {}
    __device__ __forceinline__ float2 pair(int column) const {  // two neighbouring columns
        if (at == nullptr) return make_float2(0.0f, 0.0f);
        return make_float2(__bfloat162float(at[column * step]), __bfloat162float(at[(column + 1) * step]));
    }
};

}  // namespace mokfx
