// The backward's sums, each in a fixed order: dx of each token over its slots, gradients of router weights over column tiles,
// gradients of biases over rows.
#pragma once
#include "activate.cuh"
#include "backward.cuh"
#include "combine.cuh"

namespace mokfx {

// This block's share of dx, of which each warp that has time takes 256 columns of a token at a time, and knows the rows of
// its next token's slots beforehand.
struct SlotSum {
    const BackwardParams& p;
    BackwardShared& s;
    int item = 0, row = -1;
    bool begun = false;

    __device__ __forceinline__ int spans() const { return (p.width + 255) / 256; }
    __device__ __forceinline__ bool left() const { return item < p.tokens * spans(); }

    __device__ __forceinline__ void take() {
        const int lane = threadIdx.x % 32;
        if (lane == 0) item = blockIdx.x + atomicAdd(&s.summed, 1) * gridDim.x;
        item = __shfl_sync(~0u, item, 0);
        row = left() && lane < p.choices ? p.slot_row[item / spans() * p.choices + lane] : -1;
    }

    // Whether there is something to sum; not before all slots' gradients are in memory.
    __device__ __forceinline__ bool ready() {
        if (!begun) {
            begun = load_acquire(p.state + 2) >= CONSUMERS * s.tile_begin[p.experts] * TileCounts(p).rows;
            begun = __all_sync(~0u, begun);
            if (begun) take();
        }
        return begun && left();
    }

    __device__ __forceinline__ void finish() {
        while (ready()) next();
    }

    __device__ __forceinline__ void next() {
        const int token = item / spans(), column = item % spans() * 256 + threadIdx.x % 32 * 8, rows = row;
        take();
        float sum[8] = {};
        for (int first = 0; first < p.choices; first += 8) {
            uint4 values[8];
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const int its = __shfl_sync(~0u, rows, (first + c) % 32);
                values[c] = make_uint4(0, 0, 0, 0);
                if (first + c < p.choices && its >= 0 && column < p.width)
                    values[c] = __ldcs(reinterpret_cast<const uint4*>(p.slot_outputs + (long long)its * p.width + column));
            }
#pragma unroll
            for (int c = 0; c < 8; c++) {
                add_scaled(sum[0], sum[1], 1.0f, values[c].x);
                add_scaled(sum[2], sum[3], 1.0f, values[c].y);
                add_scaled(sum[4], sum[5], 1.0f, values[c].z);
                add_scaled(sum[6], sum[7], 1.0f, values[c].w);
            }
        }
        if (column < p.width)
            *reinterpret_cast<uint4*>(p.y + (long long)token * p.width + column) =
                make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
    }
};

__device__ __forceinline__ void store_weight_gradient(const BackwardParams& p, int slot, float value) {
    switch (p.weight_kind) {
        case 0: static_cast<float*>(p.d_weights)[slot] = value; break;
        case 1: static_cast<__nv_bfloat16*>(p.d_weights)[slot] = __float2bfloat16_rn(value); break;
        case 2: static_cast<__half*>(p.d_weights)[slot] = __float2half_rn(value); break;
        default: static_cast<double*>(p.d_weights)[slot] = value;
    }
}

// The sum of a row's <dh, h> over its column tiles.
__device__ __forceinline__ float weight_gradient(const BackwardParams& p, int row) {
    const int columns = 2 * TileCounts(p).hidden;
    float sum = 0;
    for (int i = 0; i < columns; i++) sum += __ldcg(p.weight_parts + (long long)row * columns + i);
    return sum;
}

// <dY, down bias> of a slot, by a whole warp.
__device__ __forceinline__ float bias_times_row(const BackwardParams& p, int slot, int expert) {
    const int lane = threadIdx.x % 32;
    const __nv_bfloat16* row = p.grad_y + slot / p.choices * p.grad_y_stride;
    const BiasRow bias(p.down_bias, expert, 0);
    float sum = 0;
    for (int k = lane; k < p.width; k += 32) sum = __fmaf_rn(__bfloat162float(row[k]), bias[k], sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

__device__ void sum_weight_gradients(const BackwardParams& p, int worker, int workers) {
    const int slots = p.tokens * p.choices, lane = threadIdx.x % 32;
    const bool biased = p.down_bias.first != nullptr && !p.weight_on_hidden;
    for (int base = worker * 32; base < slots; base += workers * 32) {
        const int slot = base + lane, row = slot < slots ? p.slot_row[slot] : -1;
        float sum = row >= 0 ? weight_gradient(p, row) : 0.0f;
        for (int i = 0; biased && i < 32 && base + i < slots; i++)
            if (__shfl_sync(~0u, row, i) >= 0) {
                const float more = bias_times_row(p, base + i, load_id(p, base + i));
                if (lane == i) sum += more;
            }
        if (slot < slots) store_weight_gradient(p, slot, sum);
    }
}

// Gradients of biases: sums over an expert's rows, of 64 columns a warp.
__device__ void sum_bias_gradients(const BackwardParams& p, const Shared& s, int worker, int workers) {
    const int first = p.d_first_bias ? p.parts * p.inner / 64 : 0, spans = first + (p.d_down_bias ? p.width / 64 : 0);
    for (int item = worker; item < spans * p.experts; item += workers) {
        const int expert = item / spans, span = item % spans, end = s.unit_begin[expert + 1] * UNIT;
        const bool down = span >= first;
        const int column = (down ? span - first : span) * 64 + threadIdx.x % 32 * 2;
        float low = 0, high = 0;
#pragma unroll 8
        for (int row = s.unit_begin[expert] * UNIT; row < end; row++) {
            const __nv_bfloat16* from = p.first_values + (long long)row * p.parts * p.inner;
            float weight = 1;
            if (down) {
                const int token = p.row_token[row];
                if (token < 0) continue;
                from = p.grad_y + token * p.grad_y_stride;
                if (!p.weight_on_hidden) weight = p.row_weight[row];
            }
            add_scaled(low, high, weight, __ldcg(reinterpret_cast<const uint32_t*>(from + column)));
        }
        __nv_bfloat16* to = down ? p.d_down_bias + (long long)expert * p.width : p.d_first_bias + (long long)expert * p.parts * p.inner;
        *reinterpret_cast<uint32_t*>(to + column) = pack(low, high);
    }
}

}  // namespace mokfx
