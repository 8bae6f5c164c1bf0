// The forward of mok::moe on one Hopper GPU: one persistent cooperative launch, one block a multiprocessor.
//
//   schedule      all warps: slots are counted, experts laid out, slots placed (schedule.cuh)
//   tiles         warp 0 loads weights (and, for down, rows of hidden) by TMA; warp 1 hands out tiles; warps 2 and 3
//                 gather rows of x; warpgroups 1 and 2 multiply, activate and store by TMA
//   combine       warpgroups 1 and 2, once all slot outputs are in memory (combine.cuh)
//
// A tile is 128 x 256, in steps of 64 k. Each warpgroup multiplies one of its two units of 64 rows, 64 x 256; of a tail of
// one unit, half the columns, so a tail costs 64 rows. The warpgroups are not in step: one runs its epilogue while the
// other multiplies.
#include "activate.cuh"
#include "combine.cuh"
#include "schedule.cuh"

namespace mokfx {

constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 216;  // 128 x 72 + 256 x 216 < 65536
constexpr int GATHERERS = 64;     // threads that gather; a stage is full once they and the TMA lane have arrived
constexpr int TILE_READERS = 1 + GATHERERS + 128 * CONSUMERS;  // threads that read the announced tile

struct Ring {  // a position in the ring of stages
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The next tile, once announced.
__device__ __forceinline__ Tile take_tile(const Params& p, Shared& s, int& parity) {
    wait(p, &s.tile_full, parity, TILE_FULL);
    parity ^= 1;
    const volatile Tile& t = s.tile;
    const Tile tile{t.phase, t.expert, t.row, t.units, t.column, t.flag};
    arrive(&s.tile_empty);
    return tile;
}

__device__ __forceinline__ int steps_of(const Params& p, const Tile& tile) {
    return (tile.phase == UP ? p.width : p.inner) / TILE_K;
}

// ---- warp 1, one lane: which tile is next. Taken only when the last consumer has begun the tile before, so that no
// block hoards tiles at the end.
__device__ void announce_tiles(const Params& p, Shared& s) {
    for (int parity = 1;; parity ^= 1) {
        wait(p, &s.tile_empty, parity, TILE_EMPTY);
        const Tile tile = tile_at(p, s, add_relaxed(p.state + 1, 1));
        s.tile = tile;
        arrive(&s.tile_full);
        if (tile.phase == END) return;
    }
}

// ---- warp 0, one lane: weights for all tiles, rows of `hidden` for down

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

template <bool UP_N_MAJOR, bool DOWN_N_MAJOR>
__device__ void load_tiles(const Params& p, Shared& s) {
    Ring ring;
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        if (tile.phase == END) return;
        const int steps = steps_of(p, tile);
        const ExpertMaps maps(p, tile.expert);
        if (tile.phase == DOWN) {
            wait_count(p, p.ready + tile.flag, CONSUMERS * up_columns(p), HIDDEN);
            fence_proxy_global();
        }
        for (int step = 0; step < steps; step++, ring.next()) {
            Stage& stage = s.stage[ring.stage];
            uint64_t* full = &s.full[ring.stage];
            wait(p, &s.empty[ring.stage], ring.parity ^ 1, EMPTY);
            const int k = step * TILE_K;
            if (tile.phase == UP) {
                arrive_expect(full, sizeof(stage.b));
#pragma unroll
                for (int i = 0; i < 4; i++)  // gate, up, gate, up
                    load_weight<UP_N_MAJOR>(i % 2 ? maps.up : maps.gate, full, stage, i, tile.column * 128 + i / 2 * 64, k, maps.slice);
            } else {
                arrive_expect(full, sizeof(stage.b) + tile.units * UNIT * TILE_K * sizeof(__nv_bfloat16));
                arrive(full, GATHERERS);
                for (int u = 0; u < tile.units; u++)
                    tma_load(&p.hidden, full, stage.a + u * UNIT * TILE_K, k, tile.row + u * UNIT);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    load_weight<DOWN_N_MAJOR>(maps.down, full, stage, i, tile.column * TILE_N + i * 64, k, maps.slice);
            }
        }
    }
}

// ---- warps 2 and 3: rows of x, from wherever they lie. Each warp takes every other 8 rows; 8 lanes copy one row's 128
// bytes. Padding rows are zeros, which cost the tensor cores the least power.
template <int UNITS>
__device__ __forceinline__ void gather_tile(const Params& p, Shared& s, Ring& ring, const Tile& tile, int warp) {
    constexpr int MINE = UNITS * UNIT / 8;  // rows of which this thread copies 16 bytes a step
    const int lane = threadIdx.x % 32, part = lane % 8, first = warp * 8 + lane / 8;
    uint32_t from[MINE], present = 0;  // in units of 16 bytes from x; a bit for each row that is no padding
    uint32_t to[2];  // rows first + {0, 4} + a multiple of 16: two ways to swizzle
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int row = first + i / 2 * 16 + i % 2 * 4;
        const int token = p.row_token[tile.row + row];
        from[i] = max(token, 0) * static_cast<uint32_t>(p.x_stride / 8) + part;
        present |= (token >= 0) << i;
    }
    for (int i = 0; i < 2; i++) to[i] = smem(s.stage[0].a) + (first + i * 4) * 128 + (part ^ (first + i * 4) % 8) * 16;
    const uint4* x = reinterpret_cast<const uint4*>(p.x);
    for (int steps = steps_of(p, tile); steps > 0; steps--, ring.next()) {
        wait(p, &s.empty[ring.stage], ring.parity ^ 1, EMPTY);
        const int stage = ring.stage * sizeof(Stage);
#pragma unroll
        for (int i = 0; i < MINE; i++) copy_16(to[i % 2] + stage + i / 2 * 2048, x + from[i], (present >> i & 1) * 16);
        x += TILE_K / 8;
        arrive_after_copies(&s.full[ring.stage]);
    }
}

__device__ void gather_rows(const Params& p, Shared& s, int warp) {
    Ring ring;
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        if (tile.phase == END) break;
        if (tile.phase == DOWN)
            for (int step = steps_of(p, tile); step > 0; step--) ring.next();
        else if (tile.units == 2)
            gather_tile<2>(p, s, ring, tile, warp);
        else
            gather_tile<1>(p, s, ring, tile, warp);
    }
    copy_wait_all();
}

// ---- warpgroups 1 and 2: multiply, activate, store

// A warpgroup's outputs leave through BUFFERS of 64 x 64. What has been stored is announced during the
// next tile, long after it has landed, and in any case before the warpgroup waits for what other blocks have to announce.
struct Outbox {
    Shared& s;
    const int group;
    uint32_t* pending;  // the counter to raise once our stores have landed; only in the storing thread

    __device__ __forceinline__ bool storing() const { return threadIdx.x % 128 == 0; }
    __device__ __forceinline__ void barrier() const { named_barrier(1 + group, 128); }

    __device__ __forceinline__ void announce() {
        if (pending == nullptr) return;
        tma_store_wait();
        raise(pending);
        pending = nullptr;
    }

    // The tile's CHUNK-th 64 x 64 outputs; values(j) gives our pairs of columns 8j to 8j+7, of our row and of the 8th after.
    template <int CHUNK, typename Values>
    __device__ __forceinline__ void store(const TensorMap* map, int row, int column, Values values) {
        __nv_bfloat16* buffer = s.staging[group][CHUNK % BUFFERS];
        if constexpr (CHUNK >= BUFFERS) {  // its former content must have left
            if (storing()) tma_store_wait_read<BUFFERS - 1>();
            barrier();
        }
        const int lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const uint2 left = values(j), right = values(j + 1);
            store_matrices(smem(buffer) + r * 128 + (((j + lane / 16) ^ r % 8) << 4), left.x, left.y, right.x, right.y);
        }
        fence_proxy_shared();
        barrier();
        if (storing()) tma_store(map, buffer, column, row);
    }
};

// The outputs of 64 rows and half (0 or 1) of the tile's columns: 64 accumulators, the BLOCK-th.
template <bool PLAIN, int BLOCK, int N>
__device__ __forceinline__ void store_block(const Params& p, Outbox& out, const Tile& tile, const float (&sum)[N], int unit, int half) {
    constexpr int AT = BLOCK * 64;
    const int row = tile.row + unit * UNIT, ours = threadIdx.x % 4 * 2;  // of each 8 columns
    if (tile.phase == UP) {
        const int first = tile.column * 128 + half * 64;
        if (first >= p.inner) return;  // the last tile may be half empty
        const BiasRow gate_bias(p.gate_bias, tile.expert, first + ours), up_bias(p.up_bias, tile.expert, first + ours);
        out.store<BLOCK>(&p.hidden, row, first, [&](int j) {
            const int at = AT + j * 4;  // gate; the same columns of up are 32 accumulators on
            if constexpr (PLAIN)
                return make_uint2(pack(swiglu(sum[at], sum[at + 32]), swiglu(sum[at + 1], sum[at + 33])),
                                  pack(swiglu(sum[at + 2], sum[at + 34]), swiglu(sum[at + 3], sum[at + 35])));
            const float2 g = gate_bias.pair(j * 8), u = up_bias.pair(j * 8);
            return make_uint2(
                pack(activate(p, sum[at] + g.x, sum[at + 32] + u.x), activate(p, sum[at + 1] + g.y, sum[at + 33] + u.y)),
                pack(activate(p, sum[at + 2] + g.x, sum[at + 34] + u.x), activate(p, sum[at + 3] + g.y, sum[at + 35] + u.y)));
        });
    } else {
        const int first = tile.column * TILE_N + half * 128;
        const BiasRow bias(p.down_bias, tile.expert, first + ours);
        auto pairs = [&](int j) {
            const int at = AT + j * 4;
            float2 b = make_float2(0.0f, 0.0f);
            if (!PLAIN && first + j * 8 < p.width) b = bias.pair(j * 8);
            return make_uint2(pack(sum[at] + b.x, sum[at + 1] + b.y), pack(sum[at + 2] + b.x, sum[at + 3] + b.y));
        };
        out.store<2 * BLOCK>(&p.slots, row, first, pairs);
        out.store<2 * BLOCK + 1>(&p.slots, row, first + 64, [&](int j) { return pairs(8 + j); });
    }
}

// The products of rows `unit` of the tile with its columns from 64 * `column` on: 2 N of them.
template <bool N_MAJOR, int N>
__device__ __forceinline__ void multiply(const Params& p, Shared& s, Ring& ring, Outbox& out, const Tile& tile, int unit, int column, float (&sum)[N]) {
    constexpr int NEXT_K = N_MAJOR ? 2048 >> 4 : 32 >> 4;  // 16 k on, in the descriptor's units
#pragma unroll
    for (float& x : sum) x = 0;
    const int steps = steps_of(p, tile);
    for (int step = 0; step < steps; step++, ring.next()) {
        Stage& stage = s.stage[ring.stage];
        wait(p, &s.full[ring.stage], ring.parity, FULL);
        if (tile.phase == UP) fence_proxy_shared();  // rows of x came by ordinary copies
        const uint64_t a = descriptor(smem(stage.a + unit * UNIT * TILE_K), 0);
        const uint64_t b = descriptor(smem(stage.b + column * 64 * TILE_K), N_MAJOR ? 64 * TILE_K * 2 : 0);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) wgmma<N_MAJOR>(sum, a + k * 2, b + k * NEXT_K);
        wgmma_commit();
        if (step == 1) out.announce();  // of the tile before, while the tensor cores are busy
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) arrive(&s.empty[ring.stage]);
    }
}

template <bool PLAIN, bool N_MAJOR, int N>
__device__ __forceinline__ void run_tile(const Params& p, Shared& s, Ring& ring, Outbox& out, const Tile& tile, Tracer& trace) {
    float sum[N];  // 128: our own unit of rows, all columns; 64: the only unit, our half of the columns
    const int unit = N == 128 ? out.group : 0, half = N == 128 ? 0 : out.group;
    multiply<N_MAJOR>(p, s, ring, out, tile, unit, half * 2, sum);
    if (threadIdx.x == 128) trace(TILE_MULTIPLIED, tile.phase);
    out.announce();  // nothing is left to announce unless the tile had one step; the buffers are free
    out.barrier();
    store_block<PLAIN, 0>(p, out, tile, sum, unit, half);
    if constexpr (N == 128) store_block<PLAIN, 1>(p, out, tile, sum, unit, 1);
}

template <bool PLAIN, bool UP_N_MAJOR, bool DOWN_N_MAJOR>
__device__ __forceinline__ void run_tiles(const Params& p, Shared& s, int group, Tracer& trace) {
    const bool tracing = threadIdx.x == 128;
    Ring ring;
    Outbox out{s, group, nullptr};
    uint32_t* const stored = p.state + 2;
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        // From here on we may wait for other blocks, so what they wait for must be announced.
        if (tile.phase != UP && out.pending != stored) out.announce();
        if (tile.phase == END) break;
        if (tracing) trace(TILE_BEGIN, tile.phase);
        if (UP_N_MAJOR == DOWN_N_MAJOR || tile.phase == UP) {
            if (tile.units == 2)
                run_tile<PLAIN, UP_N_MAJOR, 128>(p, s, ring, out, tile, trace);
            else
                run_tile<PLAIN, UP_N_MAJOR, 64>(p, s, ring, out, tile, trace);
        } else {
            if (tile.units == 2)
                run_tile<PLAIN, DOWN_N_MAJOR, 128>(p, s, ring, out, tile, trace);
            else
                run_tile<PLAIN, DOWN_N_MAJOR, 64>(p, s, ring, out, tile, trace);
        }
        if (out.storing()) out.pending = tile.phase == UP ? p.ready + tile.flag : stored;
        if (tracing) trace(TILE_STORED, tile.phase);
    }
    out.announce();
    if (out.storing()) wait_count(p, stored, CONSUMERS * s.tile_begin[p.experts] * down_columns(p), SLOTS);
    out.barrier();
    if (tracing) trace(ALL_STORED);
    combine(p, blockIdx.x * 4 * CONSUMERS + threadIdx.x / 32 - 4, gridDim.x * 4 * CONSUMERS);
    if (tracing) trace(COMBINED);
}

template <bool PLAIN, bool UP_N_MAJOR, bool DOWN_N_MAJOR>
__device__ __forceinline__ void forward(const Params& p) {
    extern __shared__ __align__(1024) uint8_t memory[];  // swizzles count from multiples of 1024
    Shared& s = *reinterpret_cast<Shared*>(memory);
    Tracer trace(p);
    if (threadIdx.x == 0) {
        trace(STARTED);
        for (const TensorMap* map = &p.gate; map <= &p.slots; map++) prefetch_map(map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1 + GATHERERS);
            barrier_init(&s.empty[i], 4 * CONSUMERS);
        }
        barrier_init(&s.tile_full, 1);
        barrier_init(&s.tile_empty, TILE_READERS);
        fence_barrier_init();
    }
    make_schedule(p, s, trace);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_down<PRODUCER_REGISTERS>();
        if (warp >= 2)
            gather_rows(p, s, warp - 2);
        else if (threadIdx.x % 32 == 0) {
            if (warp == 0)
                load_tiles<UP_N_MAJOR, DOWN_N_MAJOR>(p, s);
            else
                announce_tiles(p, s);
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        run_tiles<PLAIN, UP_N_MAJOR, DOWN_N_MAJOR>(p, s, warp / 4 - 1, trace);
    }
}

}  // namespace mokfx

// Entries for each pair of storage orders of (gate/up, down): k is [out, in] as in nn.Linear, n is [in, out].
#define MOKFX_ENTRY(name, plain, up, down)                                                                      \
    extern "C" __global__ void __launch_bounds__(mokfx::THREADS, 1) name(const __grid_constant__ mokfx::Params p) { \
        mokfx::forward<plain, up, down>(p);                                                                     \
    }
#define MOKFX_ENTRIES(name, plain)               \
    MOKFX_ENTRY(name##_kk, plain, false, false)  \
    MOKFX_ENTRY(name##_kn, plain, false, true)   \
    MOKFX_ENTRY(name##_nk, plain, true, false)   \
    MOKFX_ENTRY(name##_nn, plain, true, true)
MOKFX_ENTRIES(mok_forward, true)
MOKFX_ENTRIES(mok_forward_general, false)
