// The backward's first four warps: which tile is next, weights and sorted rows by TMA, and rows of dY and x gathered from
// wherever they lie.
#pragma once
#include "backward_sums.cuh"

namespace mokfx {

constexpr int GATHERERS = 64;  // threads that gather; a stage is full once they and the TMA lane have arrived
constexpr int TILE_READERS = 1 + GATHERERS + 128 * CONSUMERS;  // threads that read the announced tile

struct Ring {  // a position in the ring of stages
    int at = 0;
    __device__ __forceinline__ int stage() const { return at % STAGES; }
    __device__ __forceinline__ int parity() const { return at / STAGES % 2; }
    __device__ __forceinline__ void next() { at = (at + 1) % (2 * STAGES); }
};
static_assert((STAGES & (STAGES - 1)) == 0, "a position is bits of one number");

// The next tile, once announced.
__device__ __forceinline__ Tile take_tile(const Params& p, Shared& s, int& parity) {
    wait(p, &s.tile_full, parity, TILE_FULL);
    parity ^= 1;
    const volatile Tile& t = s.tile;
    const Tile tile{t.phase, t.expert, t.row, t.units, t.column, t.flag};
    arrive(&s.tile_empty);
    return tile;
}

// ---- warp 1: which tile is next, taken only when the last consumer has begun the tile before, so that no block hoards
// tiles at the end; and between tiles, once the slots' gradients are in memory, our share of dx.
__device__ void announce_tiles(const BackwardParams& p, BackwardShared& s) {
    SlotSum sum{p, s};
    for (int parity = 1;; parity ^= 1) {
        while (!test_wait(&s.tile_empty, parity) && sum.ready()) sum.next();
        wait(p, &s.tile_empty, parity, TILE_EMPTY);
        int phase = 0;
        if (threadIdx.x % 32 == 0) {
            const Tile tile = backward_tile(p, s, add_relaxed(p.state + 1, 1));
            s.tile = tile;
            phase = tile.phase;
            arrive(&s.tile_full);
        }
        if (__shfl_sync(~0u, phase, 0) == DONE) break;
    }
    sum.finish();
}

// ---- warp 0, one lane: all that lies in rows of its own

struct ExpertMaps {  // of one expert's weights: its own if they are listed, its slice of the stacks' if not
    const TensorMap *gate, *up, *down;
    int slice;
    __device__ __forceinline__ ExpertMaps(const Params& p, int expert) : gate(&p.gate), up(&p.up), down(&p.down), slice(expert) {
        if (p.listed == nullptr) return;
        gate = p.listed + expert;
        up = gate + p.experts;
        down = up + p.experts;
        slice = 0;
    }
};

template <bool N_MAJOR>  // 64 columns x 64 k, the i-th of the stage
__device__ __forceinline__ void load_weight(const TensorMap* map, uint64_t* full, Stage& stage, int i, int column, int k, int slice) {
    tma_load(map, full, stage.b + i * 64 * TILE_K, N_MAJOR ? column : k, N_MAJOR ? k : column, slice);
}

// The pre-activations of a tile of D_HIDDEN, in stages of their own after those of the product.
__device__ __forceinline__ void load_saved(const BackwardParams& p, Shared& s, Ring& ring, const Tile& tile) {
    const bool gated = p.parts == 2;
    for (int i = 0; i < saved_stages(tile); i++, ring.next()) {
        Stage& stage = s.stage[ring.stage()];
        uint64_t* full = &s.full[ring.stage()];
        wait(p, &s.empty[ring.stage()], ring.parity() ^ 1, EMPTY);
        arrive_expect(full, 2 * p.parts * BOX_BYTES);
        for (int unit = 0; unit < 2; unit++) {
            const int row = tile.row + (tile.units == 2 ? unit * UNIT : 0);
            const int column = tile.column * TILE_N + i * 64 + (tile.units == 2 ? 0 : unit * 128);
            if (gated) tma_load(&p.saved, full, saved_box(stage, unit, 0), column, row);
            tma_load(&p.saved, full, saved_box(stage, unit, 1), column, row + p.saved_up);
        }
    }
}

template <bool FIRST_N_MAJOR, bool DOWN_N_MAJOR>  // storage [in, out], which is [k, column] transposed here
__device__ void load_tiles(const BackwardParams& p, Shared& s) {
    Ring ring;
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        if (tile.phase == DONE) return;
        const int steps = steps_of(p, s, tile);
        const ExpertMaps maps(p, tile.expert);
        if (tile.phase != D_HIDDEN && steps > 0) {
            const int row_tiles = s.tile_begin[tile.expert + 1] - s.tile_begin[tile.expert];
            wait_count(p, p.ready + tile.expert, CONSUMERS * TileCounts(p).hidden * row_tiles, HIDDEN);
            fence_proxy_global();
        }
        for (int step = 0; step < steps; step++, ring.next()) {
            Stage& stage = s.stage[ring.stage()];
            uint64_t* full = &s.full[ring.stage()];
            wait(p, &s.empty[ring.stage()], ring.parity() ^ 1, EMPTY);
            const int k = step * TILE_K;
            if (tile.phase == D_HIDDEN) {
                arrive_expect(full, sizeof(stage.b));
#pragma unroll
                for (int i = 0; i < 4; i++)
                    load_weight<!DOWN_N_MAJOR>(maps.down, full, stage, i, tile.column * TILE_N + i * 64, k, maps.slice);
            } else if (tile.phase == D_ROWS) {
                arrive_expect(full, sizeof(stage.b) + tile.units * BOX_BYTES);
                for (int u = 0; u < tile.units; u++) tma_load(&p.first, full, stage.a + u * UNIT * TILE_K, k, tile.row + u * UNIT);
                const TensorMap* map = k >= p.split ? maps.up : maps.gate;
                const int inner_k = k >= p.split ? k - p.split : k;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    load_weight<!FIRST_N_MAJOR>(map, full, stage, i, tile.column * TILE_N + i * 64, inner_k, maps.slice);
            } else {
                arrive_expect(full, sizeof(stage.b));
                const TensorMap* map = tile.phase == D_DOWN ? &p.hidden : &p.first;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    tma_load(map, full, stage.b + i * 64 * TILE_K, tile.column * TILE_N + i * 64, tile.row + k);
            }
        }
        load_saved(p, s, ring, tile);
    }
}

// ---- warps 2 and 3: rows by token. 8 lanes copy 128 bytes of one row. Padding rows are zeros, which cost the tensor
// cores the least power.

template <int UNITS>  // the rows of dY of D_HIDDEN: the same rows at each step, every other 8 of them ours
__device__ __forceinline__ void gather_rows(const BackwardParams& p, Shared& s, Ring& ring, const Tile& tile, int warp) {
    constexpr int MINE = UNITS * UNIT / 8;  // rows of which this thread copies 16 bytes a step
    const int lane = threadIdx.x % 32, part = lane % 8, first = warp * 8 + lane / 8;
    uint32_t from[MINE], present = 0;  // in units of 16 bytes from dY; a bit for each row that is no padding
    uint32_t to[2];  // rows first + {0, 4} + a multiple of 16: two ways to swizzle
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int token = p.row_token[tile.row + first + i / 2 * 16 + i % 2 * 4];
        from[i] = max(token, 0) * static_cast<uint32_t>(p.grad_y_stride / 8) + part;
        present |= (token >= 0) << i;
    }
    for (int i = 0; i < 2; i++) to[i] = smem(s.stage[0].a) + (first + i * 4) * 128 + (part ^ (first + i * 4) % 8) * 16;
    const uint4* rows = reinterpret_cast<const uint4*>(p.grad_y);
    for (int steps = p.width / TILE_K; steps > 0; steps--, ring.next()) {
        wait(p, &s.empty[ring.stage()], ring.parity() ^ 1, EMPTY);
        const int stage = ring.stage() * sizeof(Stage);
#pragma unroll
        for (int i = 0; i < MINE; i++) copy_16(to[i % 2] + stage + i / 2 * 2048, rows + from[i], (present >> i & 1) * 16);
        rows += TILE_K / 8;
        arrive_after_copies(&s.full[ring.stage()]);
    }
}

// The rows of dY or x of a gradient of weights: at each step the next 64 rows, of which 32 are ours, of the same 64 or 128
// columns.
template <int UNITS>
__device__ __forceinline__ void gather_columns(const BackwardParams& p, Shared& s, Ring& ring, const Tile& tile, int warp) {
    const int lane = threadIdx.x % 32, part = lane % 8;
    const bool down = tile.phase == D_DOWN;
    const uint32_t stride = static_cast<uint32_t>((down ? p.grad_y_stride : p.x_stride) / 8);
    const uint4* columns = reinterpret_cast<const uint4*>(down ? p.grad_y : p.x) + tile.flag * (TILE_UNITS * UNIT / 8) + part;
    uint32_t to[2];
    for (int i = 0; i < 2; i++) {
        const int row = warp * 32 + i * 4 + lane / 8;
        to[i] = smem(s.stage[0].a) + row * 128 + (part ^ row % 8) * 16;
    }
    const int* tokens = p.row_token + tile.row + warp * 32 + lane;
    const int steps = steps_of(p, s, tile);
    int next = steps > 0 ? *tokens : 0;
    for (int step = 1; step <= steps; step++, ring.next()) {
        const int token = next;
        if (step < steps) next = tokens[step * TILE_K];
        wait(p, &s.empty[ring.stage()], ring.parity() ^ 1, EMPTY);
        const int stage = ring.stage() * sizeof(Stage);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int its = __shfl_sync(~0u, token, i * 4 + lane / 8), bytes = its >= 0 ? 16 : 0;
            const uint4* from = columns + max(its, 0) * stride;
#pragma unroll
            for (int u = 0; u < UNITS; u++) copy_16(to[i % 2] + stage + i / 2 * 1024 + u * BOX_BYTES, from + u * 8, bytes);
        }
        arrive_after_copies(&s.full[ring.stage()]);
    }
}

// Stages to which we bring nothing. We arrive at each in its turn, since a wait for a stage of ours that follows can only
// tell odd turns from even ones.
__device__ __forceinline__ void pass_stages(const BackwardParams& p, Shared& s, Ring& ring, int count) {
    for (; count > 0; count--, ring.next()) {
        if (threadIdx.x % 32 == 0) {
            wait(p, &s.empty[ring.stage()], ring.parity() ^ 1, EMPTY);
            arrive(&s.full[ring.stage()], 32);
        }
        __syncwarp();
    }
}

__device__ void gather_tiles(const BackwardParams& p, Shared& s, int warp) {
    Ring ring;
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        if (tile.phase == DONE) break;
        if (tile.phase == D_ROWS)
            pass_stages(p, s, ring, steps_of(p, s, tile));
        else if (tile.phase == D_HIDDEN) {
            if (tile.units == 2)
                gather_rows<2>(p, s, ring, tile, warp);
            else
                gather_rows<1>(p, s, ring, tile, warp);
            pass_stages(p, s, ring, saved_stages(tile));
        } else if (tile.units == 2)
            gather_columns<2>(p, s, ring, tile, warp);
        else
            gather_columns<1>(p, s, ring, tile, warp);
    }
    copy_wait_all();
}

}  // namespace mokfx
