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

constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;  // 128 x 56 + 256 x 224 = 384 x 168
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

__device__ __forceinline__ bool is_shared(const Params& p, const Tile& tile) { return tile.expert == p.experts; }

__device__ __forceinline__ int inner_of(const Params& p, const Tile& tile) { return is_shared(p, tile) ? p.shared_inner : p.inner; }

__device__ __forceinline__ int steps_of(const Params& p, const Tile& tile) {
    return (tile.phase == UP ? p.width : inner_of(p, tile)) / TILE_K;
}

__device__ __forceinline__ bool is_n_major(const Params& p, const Tile& tile) {
    return p.n_major >> (2 * is_shared(p, tile) + (tile.phase == DOWN)) & 1;
}

__device__ __forceinline__ int layout_of(const Params& p, const Tile& tile) { return is_shared(p, tile) ? BLOCKS : p.first_layer; }

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
        if (expert == p.experts) gate = &p.shared_gate, up = &p.shared_up, down = &p.shared_down, slice = 0;
        if (expert == p.experts || p.listed == nullptr) return;
        gate = p.listed + expert;
        up = gate + p.experts;
        down = up + p.experts;
        slice = 0;
    }
};

__device__ void load_tiles(const Params& p, Shared& s) {
    Ring ring;
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        if (tile.phase == END) return;
        const int steps = steps_of(p, tile);
        const ExpertMaps maps(p, tile.expert);
        const bool n_major = is_n_major(p, tile), blocks = tile.phase == UP && layout_of(p, tile) == BLOCKS;
        const TensorMap* hidden = is_shared(p, tile) ? &p.shared_hidden : &p.hidden;
        const TensorMap* even = tile.phase == DOWN ? maps.down : layout_of(p, tile) == UNGATED ? maps.up : maps.gate;
        const TensorMap* odd = blocks ? maps.up : even;
        if (tile.phase == DOWN) {
            wait_count(p, p.ready + tile.flag, CONSUMERS * columns_of(p, UP, is_shared(p, tile)), HIDDEN);
            fence_proxy_global();
        }
        for (int step = 0; step < steps; step++, ring.next()) {
            Stage& stage = s.stage[ring.stage];
            uint64_t* full = &s.full[ring.stage];
            wait(p, &s.empty[ring.stage], ring.parity ^ 1, EMPTY);
            const int k = step * TILE_K;
            if (tile.phase == UP) {
                arrive_expect(full, sizeof(stage.b));
            } else {
                arrive_expect(full, sizeof(stage.b) + tile.units * UNIT * TILE_K * sizeof(__nv_bfloat16));
                arrive(full, GATHERERS);
                for (int u = 0; u < tile.units; u++)
                    tma_load(hidden, full, stage.a + u * UNIT * TILE_K, k, tile.row + u * UNIT);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {  // 64 columns x 64 k each
                const int column = blocks ? tile.column * 128 + i / 2 * 64 : tile.column * TILE_N + i * 64;
                tma_load(i % 2 ? odd : even, full, stage.b + i * 64 * TILE_K, n_major ? column : k, n_major ? k : column, maps.slice);
            }
        }
    }
}

// ---- warps 2 and 3: rows of x, from wherever they lie. Each warp takes every other 8 rows; 8 lanes copy one row's 128
// bytes. Padding rows are zeros, which cost the tensor cores the least power.
template <int UNITS>
__device__ __forceinline__ void gather_tile(const Params& p, Shared& s, Ring& ring, const Tile& tile, int warp) {
    constexpr int MINE = UNITS * UNIT / 8;  // rows of which this thread copies 16 bytes a step
    const bool shared = is_shared(p, tile);
    const int lane = threadIdx.x % 32, part = lane % 8, first = warp * 8 + lane / 8;
    uint32_t from[MINE], present = 0;  // in units of 16 bytes from x; a bit for each row that is no padding
    uint32_t to[2];  // rows first + {0, 4} + a multiple of 16: two ways to swizzle
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int row = first + i / 2 * 16 + i % 2 * 4;
        int token = tile.row + row;
        if (!shared)
            token = p.row_token[token];
        else if (token >= p.tokens)
            token = -1;
        from[i] = max(token, 0) * static_cast<uint32_t>((shared ? p.x_stride : p.gathered_stride) / 8) + part;
        present |= (token >= 0) << i;
    }
    for (int i = 0; i < 2; i++) to[i] = smem(s.stage[0].a) + (first + i * 4) * 128 + (part ^ (first + i * 4) % 8) * 16;
    const uint4* x = reinterpret_cast<const uint4*>(shared ? p.x : p.gathered);
    for (int steps = steps_of(p, tile); steps > 0; steps--, ring.next()) {
        wait(p, &s.empty[ring.stage], ring.parity ^ 1, EMPTY);
        const int stage = ring.stage * sizeof(Stage);
#pragma unroll
        for (int i = 0; i < MINE; i++) copy_16(to[i % 2] + stage + i / 2 * 2048, x + from[i], (present >> i & 1) * 16);
        x += TILE_K / 8;
        arrive_after_copies(&s.full[ring.stage]);
    }
}

template <bool RANKS>
__device__ void gather_rows(const Params& p, Shared& s, int warp) {
    Ring ring;
    bool arrived = !RANKS;  // the rows that other ranks send
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        if (tile.phase == END) break;
        if (!arrived && tile.phase == UP && !is_shared(p, tile)) {
            if (threadIdx.x % 32 == 0) wait_for_ranks(p, ROWS, s.epoch);
            __syncwarp();
            arrived = true;
        }
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
template <bool RANKS>
struct Outbox {
    static constexpr int NOTHING = -1, SLOT_OUTPUTS = INT_MAX, NOBODY = INT_MAX - 1;
    const Params& p;
    Shared& s;
    const int group;
    int pending = NOTHING;  // whom to tell once our stores have landed: a flag of `ready`, SLOT_OUTPUTS, NOBODY; only in the storing thread
    int sent = 0;       // of the current tile

    __device__ __forceinline__ bool storing() const { return threadIdx.x % 128 == 0; }
    __device__ __forceinline__ void barrier() const { named_barrier(1 + group, 128); }

    __device__ __forceinline__ void announce() {
        if (pending == NOTHING) return;
        tma_store_wait();
        if (!RANKS || pending != NOBODY) raise(pending == SLOT_OUTPUTS ? p.state + 2 : p.ready + pending);
        pending = NOTHING;
    }

    // 64 x 64 outputs; values(j) gives our pairs of columns 8j to 8j+7, of our row and of the 8th after.
    template <typename Values>
    __device__ __forceinline__ void store(const TensorMap* map, int row, int column, Values values) {
        __nv_bfloat16* buffer = stage(values);
        fence_proxy_shared();
        barrier();
        if (storing()) tma_store(map, buffer, column, row);
    }

    // The same, each row to the place of its slot, at whatever rank.
    template <typename Values>
    __device__ __forceinline__ void scatter(int row, int column, Values values) {
        const __nv_bfloat16* buffer = stage(values);
        barrier();
        const int part = threadIdx.x % 8;
#pragma unroll
        for (int first = 0; first < UNIT; first += 16) {
            const int r = first + threadIdx.x % 128 / 8;
            const uint4 value = *reinterpret_cast<const uint4*>(buffer + r * 64 + (part ^ r % 8) * 8);
            __nv_bfloat16* place = p.row_place[row + r];
            if (place != nullptr) *reinterpret_cast<uint4*>(place + column + part * 8) = value;
        }
    }

   private:
    template <typename Values>
    __device__ __forceinline__ __nv_bfloat16* stage(Values values) {
        __nv_bfloat16* buffer = s.staging[group][sent % BUFFERS];
        if (sent++ >= BUFFERS) {  // its former content must have left
            if (storing()) tma_store_wait_read<BUFFERS - 1>();
            barrier();
        }
        const int lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const uint2 left = values(j), right = values(j + 1);
            store_matrices(smem(buffer) + r * 128 + (((j + lane / 16) ^ r % 8) << 4), left.x, left.y, right.x, right.y);
        }
        return buffer;
    }
};

// What one build of the kernel can do besides SwiGLU without biases.
enum Mode : int { PLAIN, SAVING, GENERAL };  // nothing; keep pre-activations; all of it

// Of 8 columns, 2q and 2q+1 of our row and of the 8th row after, q our lane in its four.
struct Quad {
    float a, b, c, d;
    __device__ __forceinline__ uint2 packed() const { return make_uint2(pack(a, b), pack(c, d)); }
};

template <int N>
__device__ __forceinline__ Quad quad(const float (&sum)[N], int at) { return {sum[at], sum[at + 1], sum[at + 2], sum[at + 3]}; }

// The pre-activations of a gate and up.
struct Pair {
    Quad gate, up;
    template <typename F> __device__ __forceinline__ Quad map(F f) const {
        return {f(gate.a, up.a), f(gate.b, up.b), f(gate.c, up.c), f(gate.d, up.d)};
    }
};

__device__ __forceinline__ Quad times(const Quad& x, float2 scale) { return {x.a * scale.x, x.b * scale.x, x.c * scale.y, x.d * scale.y}; }

// Four accumulators, of two columns and two rows, times the scale of their row plus the bias of their column.
template <int N>
__device__ __forceinline__ void scale_and_shift(float (&sum)[N], int at, float2 scale, float left, float right) {
    sum[at] = __fmaf_rn(sum[at], scale.x, left);
    sum[at + 1] = __fmaf_rn(sum[at + 1], scale.x, right);
    sum[at + 2] = __fmaf_rn(sum[at + 2], scale.y, left);
    sum[at + 3] = __fmaf_rn(sum[at + 3], scale.y, right);
}

// Pairs that hold columns q and 4 + q of 8, as interleaved weights leave them, become 2q and 2q + 1.
__device__ __forceinline__ uint32_t reorder(uint32_t packed) {
    const int q = threadIdx.x % 4, from = 2 * q % 4;
    const uint32_t left = __shfl_sync(~0u, packed, from, 4), right = __shfl_sync(~0u, packed, from + 1, 4);
    return __byte_perm(left, right, q < 2 ? 0x5410 : 0x7632);
}

__device__ __forceinline__ uint2 reordered(const Quad& x) { return make_uint2(reorder(pack(x.a, x.b)), reorder(pack(x.c, x.d))); }

// The router weights of our two rows of a unit that begins there, or a shared expert's scales of its tokens.
__device__ __forceinline__ float2 scales(const float* of, int row, int rows) {
    const int r = row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    return make_float2(r < rows ? of[r] : 0.0f, r + 8 < rows ? of[r + 8] : 0.0f);
}

// Hidden rows, and their pre-activations if they are kept: 64 columns from `first` on.
template <Mode MODE, bool RANKS, typename PairOf, typename Hidden, typename Pack>
__device__ __forceinline__ void store_hidden(const Params& p, Outbox<RANKS>& out, const Tile& tile, int row, int first, PairOf pair, Hidden hidden, Pack packed) {
    if (first >= inner_of(p, tile)) return;  // the last tile may be half empty
    const bool shared = is_shared(p, tile);
    out.store(shared ? &p.shared_hidden : &p.hidden, row, first, [&](int j) { return packed(hidden(pair(j))); });
    if (MODE == PLAIN || shared || (MODE == GENERAL && p.saved_up < 0)) return;
    if (p.saved_up > 0) out.store(&p.saved, row, first, [&](int j) { return packed(pair(j).gate); });
    out.store(&p.saved, p.saved_up + row, first, [&](int j) { return packed(pair(j).up); });
}

// The first layer's outputs of 64 rows and half (0 or 1) of the tile's columns: 64 accumulators from AT on. They become
// pre-activations in place, since there are no registers for both.
template <Mode MODE, bool RANKS, int AT, int N>
__device__ __forceinline__ void store_up(const Params& p, Outbox<RANKS>& out, const Tile& tile, float (&sum)[N], int unit, int half) {
    const int row = tile.row + unit * UNIT, first = tile.column * 128 + half * 64;
    auto as_it_is = [](const Quad& x) { return x.packed(); };
    auto blocks = [&](int j) { return Pair{quad(sum, AT + j * 4), quad(sum, AT + 32 + j * 4)}; };
    if (MODE != GENERAL || is_shared(p, tile)) {
        store_hidden<MODE, RANKS>(p, out, tile, row, first, blocks, [](const Pair& pair) { return pair.map(swiglu); }, as_it_is);
        return;
    }
    const float2 one = make_float2(1.0f, 1.0f), weight = p.weight_on == ON_OUTPUT ? one : scales(p.row_weight, row, INT_MAX);
    const float2 before = p.weight_on == ON_INPUT ? weight : one, after = p.weight_on == ON_HIDDEN ? weight : one;
    auto hidden = [&](const Pair& pair) { return times(pair.map([&](float gate, float up) { return activate(p, gate, up); }), after); };
    const int q = threadIdx.x % 4;
    if (p.first_layer == UNGATED) {
        const int begin = tile.column * TILE_N + half * 128;
        const BiasRow<1> bias(p.up_bias, tile.expert, begin + q * 2);
        auto ungated = [&](const Pair& pair) { return times(pair.map([&](float, float up) { return curve(p, up); }), after); };
#pragma unroll
        for (int part = 0; part < 2; part++) {
            if (begin + part * 64 >= p.inner) return;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int column = part * 64 + j * 8;
                scale_and_shift(sum, AT + part * 32 + j * 4, before, bias[column], bias[column + 1]);
            }
            auto pair = [&](int j) { return Pair{{}, quad(sum, AT + part * 32 + j * 4)}; };
            store_hidden<MODE, RANKS>(p, out, tile, row, begin + part * 64, pair, ungated, as_it_is);
        }
        return;
    }
    if (first >= p.inner) return;
    const BiasRow<> gate_bias(p.gate_bias, tile.expert, first), up_bias(p.up_bias, tile.expert, first);
    if (p.first_layer == BLOCKS) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int column = j * 8 + q * 2;
            scale_and_shift(sum, AT + j * 4, before, gate_bias[column], gate_bias[column + 1]);
            scale_and_shift(sum, AT + 32 + j * 4, before, up_bias[column], up_bias[column + 1]);
        }
        store_hidden<MODE, RANKS>(p, out, tile, row, first, blocks, hidden, as_it_is);
        return;
    }
#pragma unroll
    for (int j = 0; j < 16; j++) scale_and_shift(sum, AT + j * 4, before, gate_bias[j * 4 + q], up_bias[j * 4 + q]);
    auto pair = [&](int j) {  // our columns of 8: q and 4 + q
        const Quad left = quad(sum, AT + j * 8), right = quad(sum, AT + j * 8 + 4);
        return Pair{{left.a, right.a, left.c, right.c}, {left.b, right.b, left.d, right.d}};
    };
    store_hidden<MODE, RANKS>(p, out, tile, row, first, pair, hidden, reordered);
}

// The same of the second layer: 128 columns.
template <Mode MODE, bool RANKS, int AT, int N>
__device__ __forceinline__ void store_down(const Params& p, Outbox<RANKS>& out, const Tile& tile, float (&sum)[N], int unit, int half) {
    const bool shared = is_shared(p, tile);
    const int row = tile.row + unit * UNIT, to = row + (shared ? p.shared_row : 0), begin = tile.column * TILE_N + half * 128;
    const float2 one = make_float2(1.0f, 1.0f), scale = MODE == GENERAL && shared && p.sigmoid ? scales(p.shared_scale, row, p.tokens) : one;
    BiasRow<1> bias(p.down_bias, tile.expert, begin + threadIdx.x % 4 * 2);
    if (shared) bias.at = nullptr;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        if (begin + part * 64 >= p.width) return;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int column = part * 64 + j * 8;
            if (MODE == GENERAL) scale_and_shift(sum, AT + part * 32 + j * 4, scale, bias[column], bias[column + 1]);
        }
        auto values = [&](int j) { return quad(sum, AT + part * 32 + j * 4).packed(); };
        if (RANKS && !shared)
            out.scatter(row, begin + part * 64, values);
        else
            out.store(&p.slots, to, begin + part * 64, values);
    }
}

template <Mode MODE, bool RANKS, int AT, int N>
__device__ __forceinline__ void store_block(const Params& p, Outbox<RANKS>& out, const Tile& tile, float (&sum)[N], int unit, int half) {
    if (tile.phase == UP)
        store_up<MODE, RANKS, AT>(p, out, tile, sum, unit, half);
    else
        store_down<MODE, RANKS, AT>(p, out, tile, sum, unit, half);
}

// The products of rows `unit` of the tile with its columns from 64 * `column` on: 2 N of them.
template <bool N_MAJOR, bool RANKS, int N>
__device__ __forceinline__ void multiply(const Params& p, Shared& s, Ring& ring, Outbox<RANKS>& out, const Tile& tile, int unit, int column, float (&sum)[N]) {
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

template <Mode MODE, bool RANKS, int N>
__device__ __forceinline__ void run_tile(const Params& p, Shared& s, Ring& ring, Outbox<RANKS>& out, const Tile& tile, Tracer& trace) {
    float sum[N];  // 128: our own unit of rows, all columns; 64: the only unit, our half of the columns
    const int unit = N == 128 ? out.group : 0, half = N == 128 ? 0 : out.group;
    if (is_n_major(p, tile))
        multiply<true, RANKS>(p, s, ring, out, tile, unit, half * 2, sum);
    else
        multiply<false, RANKS>(p, s, ring, out, tile, unit, half * 2, sum);
    if (threadIdx.x == 128) trace(TILE_MULTIPLIED, tile.phase);
    out.announce();  // nothing is left to announce unless the tile had one step; the buffers are free
    out.sent = 0;
    out.barrier();
    store_block<MODE, RANKS, 0>(p, out, tile, sum, unit, half);
    if constexpr (N == 128) store_block<MODE, RANKS, 64>(p, out, tile, sum, unit, 1);
}

template <Mode MODE, bool RANKS>
__device__ __forceinline__ void run_tiles(const Params& p, Shared& s, int group, Tracer& trace) {
    const bool tracing = threadIdx.x == 128;
    Ring ring;
    Outbox<RANKS> out{p, s, group};
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        // From here on we may wait for other blocks, so what they wait for must be announced.
        if (tile.phase != UP && out.pending != Outbox<RANKS>::SLOT_OUTPUTS) out.announce();
        if (tile.phase == END) break;
        if (tracing) trace(TILE_BEGIN, tile.phase);
        if (tile.units == 2)
            run_tile<MODE, RANKS, 128>(p, s, ring, out, tile, trace);
        else
            run_tile<MODE, RANKS, 64>(p, s, ring, out, tile, trace);
        if (out.storing()) out.pending = tile.phase == UP ? tile.flag : RANKS ? Outbox<RANKS>::NOBODY : Outbox<RANKS>::SLOT_OUTPUTS;
        if (tracing) trace(TILE_STORED, tile.phase);
    }
    out.announce();
    if (p.only_first) return;
    if (RANKS) {
        __threadfence_system();
        out.barrier();
        if (out.storing()) raise(p.state + 2);
    }
    if (out.storing()) {
        const int tiles = (s.tile_begin[p.experts] + shared_row_tiles(p)) * columns_of(p, DOWN, false);
        wait_count(p, p.state + 2, CONSUMERS * (RANKS ? blocks_of(p) : tiles), SLOTS);
        if (RANKS && block_of(p) == 0 && group == 0) tell_ranks(p, OUTPUTS, s.epoch);
        if (RANKS) wait_for_ranks(p, OUTPUTS, s.epoch);
    }
    out.barrier();
    if (tracing) trace(ALL_STORED);
    combine(p, block_of(p) * 4 * CONSUMERS + threadIdx.x / 32 - 4, blocks_of(p) * 4 * CONSUMERS);
    if (tracing) trace(COMBINED);
}

template <Mode MODE, bool RANKS>
__device__ __forceinline__ void forward(const Params& p) {
    extern __shared__ __align__(1024) uint8_t memory[];  // swizzles count from multiples of 1024
    Shared& s = *reinterpret_cast<Shared*>(memory);
    Tracer trace(p);
    if (threadIdx.x == 0) {
        trace(STARTED);
        for (const TensorMap* map = &p.gate; map <= &p.saved; map++) prefetch_map(map);
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
            gather_rows<RANKS>(p, s, warp - 2);
        else if (threadIdx.x % 32 == 0) {
            if (warp == 0)
                load_tiles(p, s);
            else
                announce_tiles(p, s);
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        run_tiles<MODE, RANKS>(p, s, warp / 4 - 1, trace);
    }
}

}  // namespace mokfx

#define MOKFX_ENTRY(name, mode, ranks)                                                                              \
    extern "C" __global__ void __launch_bounds__(mokfx::THREADS, 1) name(const __grid_constant__ mokfx::Params p) { \
        mokfx::forward<mokfx::mode, ranks>(p);                                                                      \
    }
MOKFX_ENTRY(mok_forward, PLAIN, false)
MOKFX_ENTRY(mok_forward_saving, SAVING, false)
MOKFX_ENTRY(mok_forward_general, GENERAL, false)
MOKFX_ENTRY(mok_forward_ranks, PLAIN, true)
MOKFX_ENTRY(mok_forward_ranks_saving, SAVING, true)
MOKFX_ENTRY(mok_forward_ranks_general, GENERAL, true)

// Several ranks on one GPU, for tests of R up to 8: blocks take turns.
struct VirtualRanks {
    mokfx::Params rank[mokfx::MAX_RANKS];
};
extern "C" __global__ void __launch_bounds__(mokfx::THREADS, 1) mok_forward_virtual_general(const __grid_constant__ VirtualRanks all) {
    const int rank = blockIdx.x & ((1 << all.rank[0].virtual_shift) - 1);
    mokfx::forward<mokfx::GENERAL, true>(all.rank[rank]);
}
