// The schedule, on the device: count the slots of each expert, lay the experts' rows out one after another, give each
// slot its row (stable: in the order of slots), and hand out tiles. Integers only, so it is the same from run to run.
#pragma once
#include "exchange.cuh"
#include "inputs.cuh"

namespace mokfx {

struct Scratch {  // lies where the stages will be
    int total[MAX_EXPERTS], before[MAX_EXPERTS];  // slots of an expert: in all, and in the chunks before this block's
    int warp[WARPS][MAX_EXPERTS];
};

// All blocks arrive before any leaves. Block 0 adds what flips the top bit once all others have added 1, so the word
// needs no reset between launches.
__device__ inline void grid_barrier(const Params& p) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint32_t old = add_release(p.state, block_of(p) == 0 ? 0x80000000u - (blocks_of(p) - 1) : 1u);
        const uint32_t start = now_coarse();
        while (((load_acquire(p.state) ^ old) & 0x80000000u) == 0)
            if (now_coarse() - start > p.patience) fault(p, GRID_BARRIER, load_acquire(p.state));
    }
    __syncthreads();
}

// Slots that are scheduled here: ours, or those of all ranks, which leave out other ranks' experts.
__device__ __forceinline__ int scheduled_slots(const Params& p) { return p.ranks ? p.ranks * room(p) : p.tokens * p.choices; }

__device__ __forceinline__ int load_id(const Params& p, int slot) {
    if (!p.ranks) return load_own_id(p, slot);
    const int id = ids_at(p, p.rank)[slot];
    return id >= 0 && id / p.experts == p.rank ? id % p.experts : -1;
}

// The i-th slot in the order in which experts take them, which matters if they have a capacity.
__device__ __forceinline__ int slot_at(const Params& p, int i) {
    return p.by_choice ? i % p.tokens * p.choices + i / p.tokens : i;
}

__device__ __forceinline__ int shared_row_tiles(const Params& p) {
    return p.shared_inner > 0 ? (p.tokens + TILE_UNITS * UNIT - 1) / (TILE_UNITS * UNIT) : 0;
}

// This block's chunk of slots into its row of the histogram; also clears the counters that come after the barrier.
__device__ inline void count_slots(const Params& p, Scratch& s) {
    for (int e = threadIdx.x; e < p.experts; e += THREADS) s.total[e] = 0;
    __syncthreads();
    const int first = block_of(p) * p.chunk, last = min(first + p.chunk, scheduled_slots(p));
    int wrong = -1;
#pragma unroll 1
    for (int i = first + threadIdx.x; i < last; i += THREADS) {
        const int id = load_id(p, slot_at(p, i));
        if (id < -1 || id >= p.experts)
            wrong = id;
        else if (id >= 0)
            atomicAdd(&s.total[id], 1);
    }
    if (wrong != -1) fault(p, ID_OUT_OF_RANGE, wrong);
    __syncthreads();
    if (block_of(p) < p.chunks)
        for (int e = threadIdx.x; e < p.experts; e += THREADS) p.histogram[block_of(p) * p.experts + e] = s.total[e];
    const int flags = p.shared_flag + shared_row_tiles(p);
    for (int i = block_of(p) * THREADS + threadIdx.x; i < flags; i += blocks_of(p) * THREADS) p.ready[i] = 0;
    if (block_of(p) == 0 && threadIdx.x < 2) p.state[1 + threadIdx.x] = 0;
}

// Totals over all chunks, and what lies in the chunks before ours.
__device__ inline void sum_histogram(const Params& p, Scratch& s) {
    for (int e = threadIdx.x; e < p.experts; e += THREADS) s.total[e] = s.before[e] = 0;
    __syncthreads();
    const int groups = (p.experts + 31) / 32, parts = max(1, WARPS / groups);  // a warp reads 32 experts of every parts-th chunk
    for (int i = threadIdx.x / 32; i < groups * parts; i += WARPS) {
        const int e = i % groups * 32 + threadIdx.x % 32;
        if (e >= p.experts) continue;
        int total = 0, before = 0;
#pragma unroll 8
        for (int c = i / groups; c < p.chunks; c += parts) {
            const int count = __ldcg(p.histogram + c * p.experts + e);
            total += count;
            before += c < block_of(p) ? count : 0;
        }
        atomicAdd(&s.total[e], total);
        atomicAdd(&s.before[e], before);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.experts; e += THREADS) s.total[e] = min(s.total[e], p.capacity);
    __syncthreads();
}

__device__ inline void lay_out_experts(const Params& p, const Scratch& s, Shared& shared) {
    if (threadIdx.x < 32) {
        int units_before = 0, tiles_before = 0;
        for (int base = 0; base < p.experts; base += 32) {
            const int e = base + threadIdx.x;
            const int own = e < p.experts ? (s.total[e] + UNIT - 1) / UNIT : 0;
            int units = own, tiles = (own + TILE_UNITS - 1) / TILE_UNITS;
            for (int step = 1; step < 32; step *= 2) {
                const int u = __shfl_up_sync(~0u, units, step), t = __shfl_up_sync(~0u, tiles, step);
                if (threadIdx.x >= step) units += u, tiles += t;
            }
            if (e < p.experts) {
                shared.unit_begin[e + 1] = units_before + units;
                shared.tile_begin[e + 1] = tiles_before + tiles;
            }
            units_before += __shfl_sync(~0u, units, 31);
            tiles_before += __shfl_sync(~0u, tiles, 31);
        }
        if (threadIdx.x == 0) shared.unit_begin[0] = shared.tile_begin[0] = 0;
    }
    __syncthreads();
}

__device__ inline void place_slots(const Params& p, Scratch& s, const Shared& shared) {
    for (int e = block_of(p); e < p.experts; e += blocks_of(p))  // the padding after each expert's rows
        for (int row = shared.unit_begin[e] * UNIT + s.total[e] + threadIdx.x; row < shared.unit_begin[e + 1] * UNIT; row += THREADS) {
            p.row_token[row] = -1;
            if (p.ranks) p.row_place[row] = nullptr;
            if (p.row_weight) p.row_weight[row] = 0.0f;
        }
    for (int e = threadIdx.x; e < p.experts; e += THREADS) s.before[e] += shared.unit_begin[e] * UNIT;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = block_of(p) * p.chunk, last = min(first + p.chunk, scheduled_slots(p));
    for (int base = first; base < last; base += THREADS) {
        for (int i = threadIdx.x; i < WARPS * MAX_EXPERTS; i += THREADS) s.warp[0][i] = 0;
        __syncthreads();
        const int i = base + threadIdx.x, slot = i < last ? slot_at(p, i) : -1;
        const int id = i < last ? load_id(p, slot) : -1;
        const uint32_t same = __match_any_sync(~0u, id);
        const int rank = __popc(same & ((1u << lane) - 1));
        if (id >= 0 && rank == 0) s.warp[warp][id] = __popc(same);
        __syncthreads();
        for (int e = threadIdx.x; e < p.experts; e += THREADS) {  // counts become each warp's first row
            int row = s.before[e];
            for (int w = 0; w < WARPS; w++) {
                const int count = s.warp[w][e];
                s.warp[w][e] = row;
                row += count;
            }
            s.before[e] = row;
        }
        __syncthreads();
        if (i < last) {
            int row = id >= 0 ? s.warp[warp][id] + rank : -1;
            if (row >= 0 && row - shared.unit_begin[id] * UNIT >= p.capacity) row = -1;
            if (!p.ranks) p.slot_row[slot] = row;
            if (row >= 0) {
                p.row_token[row] = slot / p.choices;
                if (p.ranks) p.row_place[row] = place_of(p, slot);
                if (p.row_weight) p.row_weight[row] = p.ranks ? weights_at(p, p.rank)[slot] : load_weight(p, slot);
            }
        }
        __syncthreads();
    }
}

// What the shared expert's output of each token is multiplied by; a warp takes a token.
__device__ inline void scale_shared(const Params& p) {
    const int lane = threadIdx.x % 32;
    for (int token = block_of(p) * WARPS + threadIdx.x / 32; token < p.tokens; token += blocks_of(p) * WARPS) {
        float sum = 0;
        for (int k = lane; k < p.width; k += 32)
            sum = __fmaf_rn(__bfloat162float(p.x[token * p.x_stride + k]), __bfloat162float(p.sigmoid[k * p.sigmoid_stride]), sum);
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) p.shared_scale[token] = __fdividef(1.0f, 1.0f + __expf(-sum));
    }
}

__device__ inline void make_schedule(const Params& p, Shared& shared, Tracer& trace) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared.stage);
    static_assert(sizeof(Scratch) <= sizeof(shared.stage));
    if (p.ranks) {
        if (threadIdx.x == 0) shared.epoch = __ldcg(p.state + 3) + 1;
        send_ids(p);
        __threadfence_system();
        grid_barrier(p);
        if (block_of(p) == 0 && threadIdx.x == 0) tell_ranks(p, IDS, shared.epoch);
        send_rows(p);
        __threadfence_system();
        if (threadIdx.x == 0) wait_for_ranks(p, IDS, shared.epoch);
        __syncthreads();
    }
    count_slots(p, scratch);
    grid_barrier(p);
    if (p.ranks && block_of(p) == 0 && threadIdx.x == 0) {
        tell_ranks(p, ROWS, shared.epoch);
        p.state[3] = shared.epoch;
    }
    if (threadIdx.x == 0) trace(COUNTED);
    sum_histogram(p, scratch);
    lay_out_experts(p, scratch, shared);
    place_slots(p, scratch, shared);
    if (p.sigmoid) scale_shared(p);
    fence_proxy_shared();  // the copy engine writes the stages next
    grid_barrier(p);
    if (threadIdx.x == 0) trace(PLACED);
}

// ---- tiles

// Column tiles of one expert's gate/up or down.
__device__ __forceinline__ int columns_of(const Params& p, int phase, bool shared) {
    if (phase == DOWN) return (p.width + TILE_N - 1) / TILE_N;
    const int tile = !shared && p.first_layer == UNGATED ? TILE_N : TILE_N / 2;
    return ((shared ? p.shared_inner : p.inner) + tile - 1) / tile;
}

// The i-th tile of an expert with so many row tiles: up to RASTER row tiles at a time, down the rows first.
__device__ __forceinline__ void place_tile(Tile& tile, int i, int row_tiles, int columns, int& row_tile) {
    const int groups = (row_tiles + RASTER - 1) / RASTER, most = (row_tiles + groups - 1) / groups;
    const int group = i / (most * columns), size = min(most, row_tiles - group * most);
    i -= group * most * columns;
    row_tile = group * most + i % size;
    tile.column = i / size;
}

// Tile number i of the launch: gate/up of the shared expert and of all others, then all down; expert by expert. A tile only
// waits for tiles with smaller numbers, so handing them out in order cannot deadlock.
__device__ inline Tile tile_at(const Params& p, const Shared& s, int i) {
    const int row_tiles = s.tile_begin[p.experts], shared_tiles = shared_row_tiles(p);
    Tile tile{};
    int columns = 0, m;
    for (tile.phase = UP; tile.phase != END; tile.phase++) {
        if (tile.phase == DOWN && p.only_first) continue;
        const int shared_columns = columns_of(p, tile.phase, true);
        if (i < shared_tiles * shared_columns) {
            place_tile(tile, i, shared_tiles, shared_columns, m);
            tile.expert = p.experts;
            tile.row = m * TILE_UNITS * UNIT;
            tile.units = min(TILE_UNITS, (p.tokens - tile.row + UNIT - 1) / UNIT);
            tile.flag = p.shared_flag + m;
            return tile;
        }
        i -= shared_tiles * shared_columns;
        columns = columns_of(p, tile.phase, false);
        if (i < row_tiles * columns) break;
        i -= row_tiles * columns;
    }
    if (tile.phase == END) return tile;
    const int at = i / columns;
    int low = 0, high = p.experts;  // tile_begin[low] <= at < tile_begin[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (s.tile_begin[middle] <= at ? low : high) = middle;
    }
    place_tile(tile, i - s.tile_begin[low] * columns, s.tile_begin[low + 1] - s.tile_begin[low], columns, m);
    const int unit = s.unit_begin[low] + m * TILE_UNITS;
    tile.expert = low;
    tile.row = unit * UNIT;
    tile.units = min(TILE_UNITS, s.unit_begin[low + 1] - unit);
    tile.flag = s.tile_begin[low] + m;
    return tile;
}

}  // namespace mokfx
