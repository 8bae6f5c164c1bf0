// What ranks send each other, at R > 1: plain stores into the peers' symmetric memory, and flags that say so.
//
//   ids     every rank's ids (and router weights, if they apply before the output) go to all ranks
//   rows    a token's row of x goes once to each rank that has one of its experts
//   outputs the output of a slot goes from its expert's rank to the slot's place at the token's rank (forward.cu)
//
// A flag holds the number of the call, the epoch. A rank sends nothing of a call before all ranks are done with the call
// before, since its own combine has waited for that; so one set of buffers is enough for all layers of a stream.
#pragma once
#include "inputs.cuh"

namespace mokfx {

enum Sent : int { IDS = 0, ROWS, OUTPUTS };

__device__ __forceinline__ uint32_t* flag_at(const Params& p, int rank, int sent, int from) {
    return reinterpret_cast<uint32_t*>(p.memory[rank]) + sent * MAX_RANKS + from;
}

// One thread tells all ranks, after a fence of every thread that sent something.
__device__ __forceinline__ void tell_ranks(const Params& p, int sent, uint32_t epoch) {
    for (int rank = 0; rank < p.ranks; rank++)
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag_at(p, rank, sent, p.rank)), "r"(epoch) : "memory");
}

// One thread waits for all ranks.
__device__ __forceinline__ void wait_for_ranks(const Params& p, int sent, uint32_t epoch) {
    for (int from = 0; from < p.ranks; from++) {
        const uint32_t* flag = flag_at(p, p.rank, sent, from);
        const uint32_t start = now_coarse();
        for (;; __nanosleep(64)) {
            uint32_t value;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
            if (static_cast<int>(value - epoch) >= 0) break;
            if (now_coarse() - start > p.patience) fault(p, PEER_IDS + sent, from);
        }
    }
}

__device__ __forceinline__ int* ids_at(const Params& p, int rank) { return reinterpret_cast<int*>(p.memory[rank] + p.ids_at); }
__device__ __forceinline__ float* weights_at(const Params& p, int rank) { return reinterpret_cast<float*>(p.memory[rank] + p.weights_at); }
__device__ __forceinline__ __nv_bfloat16* rows_at(const Params& p, int rank) { return reinterpret_cast<__nv_bfloat16*>(p.memory[rank] + p.rows_at); }
__device__ __forceinline__ __nv_bfloat16* outputs_at(const Params& p, int rank) {
    return reinterpret_cast<__nv_bfloat16*>(p.memory[rank] + p.outputs_at);
}

// Slots that a rank has room for.
__device__ __forceinline__ int room(const Params& p) { return p.most_tokens * p.choices; }

// Where the output of a slot goes; slots are numbered rank by rank.
__device__ __forceinline__ __nv_bfloat16* place_of(const Params& p, int slot) {
    const int rank = slot / room(p);
    return outputs_at(p, rank) + static_cast<long long>(slot - rank * room(p)) * p.width;
}

__device__ inline void send_ids(const Params& p) {
    for (int i = block_of(p) * THREADS + threadIdx.x; i < room(p); i += blocks_of(p) * THREADS) {
        const bool ours = i < p.tokens * p.choices;
        const int id = ours ? load_own_id(p, i) : -1;
        if (id < -1 || id >= p.experts * p.ranks) fault(p, ID_OUT_OF_RANGE, id);
        const float weight = ours && p.row_weight ? load_weight(p, i) : 0.0f;
        for (int rank = 0; rank < p.ranks; rank++) {
            ids_at(p, rank)[p.rank * room(p) + i] = id;
            if (p.row_weight) weights_at(p, rank)[p.rank * room(p) + i] = weight;
        }
        if (ours) p.slot_row[i] = id >= 0 ? i : -1;  // outputs come back in the order of our slots
    }
}

__device__ inline void send_rows(const Params& p) {  // a warp takes a token
    const int lane = threadIdx.x % 32;
    for (int token = block_of(p) * WARPS + threadIdx.x / 32; token < p.tokens; token += blocks_of(p) * WARPS) {
        const int id = lane < p.choices ? load_own_id(p, token * p.choices + lane) : -1;
        const uint32_t ranks = __reduce_or_sync(~0u, id >= 0 ? 1u << id / p.experts : 0u);
        const uint4* from = reinterpret_cast<const uint4*>(p.x + token * p.x_stride);
        const long long to = static_cast<long long>(p.rank * p.most_tokens + token) * p.width / 8;
        for (int first = lane; first < p.width / 8; first += 128) {
            uint4 values[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (first + i * 32 < p.width / 8) values[i] = __ldg(from + first + i * 32);
            for (uint32_t left = ranks; left; left &= left - 1) {
                uint4* row = reinterpret_cast<uint4*>(rows_at(p, __ffs(left) - 1)) + to;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (first + i * 32 < p.width / 8) row[first + i * 32] = values[i];
            }
        }
    }
}

}  // namespace mokfx
