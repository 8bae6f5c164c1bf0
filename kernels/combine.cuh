// The combine: y of a token is the sum over its choices, in choice order, of router weight times slot output, in fp32.
#pragma once
#include <cuda_fp16.h>

#include "layout.cuh"

namespace mokfx {

__device__ __forceinline__ float load_weight(const Params& p, int slot) {
    switch (p.weight_kind) {
        case 0: return static_cast<const float*>(p.weights)[slot];
        case 1: return __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[slot]);
        case 2: return __half2float(static_cast<const __half*>(p.weights)[slot]);
        default: return static_cast<float>(static_cast<const double*>(p.weights)[slot]);
    }
}

__device__ __forceinline__ void add_scaled(float& low, float& high, float weight, uint32_t pair) {
    low = __fmaf_rn(weight, __uint_as_float(pair << 16), low);
    high = __fmaf_rn(weight, __uint_as_float(pair & 0xffff0000u), high);
}

// A warp takes 256 columns of a token at a time, 8 a lane, and has the rows of 8 choices in flight.
__device__ inline void combine(const Params& p, int worker, int workers) {
    constexpr int SPAN = 256, AT_ONCE = 8;
    const int spans = (p.width + SPAN - 1) / SPAN;
    for (int item = worker; item < p.tokens * spans; item += workers) {
        const int token = item / spans, column = item % spans * SPAN + threadIdx.x % 32 * 8;
        if (column >= p.width) continue;
        float sum[8] = {};
        for (int first = 0; first < p.choices; first += AT_ONCE) {
            uint4 output[AT_ONCE];
            float weight[AT_ONCE];
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++) {
                const int slot = token * p.choices + first + c;
                const int row = first + c < p.choices ? p.slot_row[slot] : -1;
                weight[c] = row >= 0 ? load_weight(p, slot) : 0.0f;
                output[c] = make_uint4(0, 0, 0, 0);
                if (row >= 0)
                    output[c] = __ldcs(reinterpret_cast<const uint4*>(p.slot_outputs + (long long)row * p.width + column));
            }
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++) {
                add_scaled(sum[0], sum[1], weight[c], output[c].x);
                add_scaled(sum[2], sum[3], weight[c], output[c].y);
                add_scaled(sum[4], sum[5], weight[c], output[c].z);
                add_scaled(sum[6], sum[7], weight[c], output[c].w);
            }
        }
        const uint4 y = make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
        *reinterpret_cast<uint4*>(p.y + (long long)token * p.width + column) = y;
    }
}

}  // namespace mokfx
