// The combine: y of a token is the sum over its choices, in choice order, of router weight times slot output, in fp32;
// the shared expert's output comes last.
#pragma once
#include "schedule.cuh"

namespace mokfx {

__device__ __forceinline__ void add_scaled(float& low, float& high, float weight, uint32_t pair) {
    low = __fmaf_rn(weight, __uint_as_float(pair << 16), low);
    high = __fmaf_rn(weight, __uint_as_float(pair & 0xffff0000u), high);
}

// A warp takes a token and CHUNKS * 256 of its columns at a time, 8 columns a lane and chunk, and has the rows of AT_ONCE
// choices in flight; each lane knows one slot of the token, and of the next token beforehand.
template <int AT_ONCE, int CHUNKS>
__device__ __forceinline__ void combine_tokens(const Params& p, int worker, int workers) {
    constexpr int SPAN = CHUNKS * 256;
    const int spans = (p.width + SPAN - 1) / SPAN, items = p.tokens * spans, lane = threadIdx.x % 32;
    auto slot_of = [&](int item) { return item < items && lane < p.choices ? item / spans * p.choices + lane : -1; };
    auto weight_of = [&](int slot) { return slot < 0 ? 0.0f : p.weight_on == ON_OUTPUT ? load_weight(p, slot) : 1.0f; };
    int slot = slot_of(worker);
    int next_row = slot >= 0 ? p.slot_row[slot] : -1;
    float next_weight = weight_of(slot);
    for (int item = worker; item < items; item += workers) {
        const int row = next_row;
        const float weight = row >= 0 ? next_weight : 0.0f;
        slot = slot_of(item + workers);
        next_row = slot >= 0 ? p.slot_row[slot] : -1;
        next_weight = weight_of(slot);
        const int begin = item % spans * SPAN + lane * 8;
        float sum[CHUNKS][8] = {};
        for (int first = 0; first < p.choices; first += AT_ONCE) {
            uint4 output[AT_ONCE][CHUNKS];
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++) {
                const int its = __shfl_sync(~0u, row, first + c);
                const __nv_bfloat16* from = p.slot_outputs + (long long)its * p.width + begin;
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    output[c][i] = make_uint4(0, 0, 0, 0);
                    if (its >= 0 && begin + i * 256 < p.width) output[c][i] = __ldcs(reinterpret_cast<const uint4*>(from + i * 256));
                }
            }
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++) {
                const float its = __shfl_sync(~0u, weight, first + c);
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    add_scaled(sum[i][0], sum[i][1], its, output[c][i].x);
                    add_scaled(sum[i][2], sum[i][3], its, output[c][i].y);
                    add_scaled(sum[i][4], sum[i][5], its, output[c][i].z);
                    add_scaled(sum[i][6], sum[i][7], its, output[c][i].w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            if (begin + i * 256 >= p.width) continue;
            float(&y)[8] = sum[i];
            if (p.shared_inner > 0) {
                const __nv_bfloat16* from = p.shared_outputs + (long long)(item / spans) * p.width + begin;
                const uint4 shared = __ldcs(reinterpret_cast<const uint4*>(from + i * 256));
                add_scaled(y[0], y[1], 1.0f, shared.x);
                add_scaled(y[2], y[3], 1.0f, shared.y);
                add_scaled(y[4], y[5], 1.0f, shared.z);
                add_scaled(y[6], y[7], 1.0f, shared.w);
            }
            *reinterpret_cast<uint4*>(p.y + (long long)(item / spans) * p.width + begin + i * 256) =
                make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
        }
    }
}

__device__ __forceinline__ void combine(const Params& p, int worker, int workers) {  // 16 or 32 loads of 16 bytes in flight a lane
    if (p.choices <= 2)
        combine_tokens<2, 8>(p, worker, workers);
    else if (p.choices <= 4)
        combine_tokens<4, 4>(p, worker, workers);
    else
        combine_tokens<8, 4>(p, worker, workers);
}

}  // namespace mokfx
