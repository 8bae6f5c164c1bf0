// The backward of mok::moe on one Hopper GPU: one persistent cooperative launch, one block a multiprocessor.
//
//   schedule      all warps, the forward's own: the same rows in the same order (schedule.cuh)
//   tiles         warp 0 loads weights, saved and sorted rows by TMA; warp 1 hands out tiles; warps 2 and 3 gather rows of
//                 dY and x (backward_load.cuh); warpgroups 1 and 2 multiply, derive and store
//   sums          warpgroups 1 and 2: dx of each token, gradients of router weights and of biases (backward_sums.cuh)
//
// A tile is 128 x 256, in steps of 64 k. Each warpgroup multiplies one of its two units of 64 rows, 64 x 256; of a tail of
// one unit, half the columns.
#include "backward_load.cuh"
#include "backward_sums.cuh"
#include "derive.cuh"

namespace mokfx {

constexpr int PRODUCER_REGISTERS = 80, CONSUMER_REGISTERS = 208;  // 128 x 80 + 256 x 208 < 65536

// Ordinary stores take what a warpgroup computes to memory: those of TMA would stand in line behind the loads of stages to
// come. What others wait for is announced during the next tile, long after it has landed, and in any case before the
// warpgroup waits for what other blocks have to announce.
struct Outbox {
    Shared& s;
    const int group;
    int pending = NOTHING;  // whose counter to raise: an expert's; only in one thread
    enum { NOTHING = -1, SLOTS_STORED = -2 };

    __device__ __forceinline__ bool announcing() const { return threadIdx.x % 128 == 0; }
    __device__ __forceinline__ void barrier() const { named_barrier(1 + group, 128); }

    __device__ __forceinline__ void announce(const BackwardParams& p) {
        if (pending == NOTHING) return;
        raise(pending == SLOTS_STORED ? p.state + 2 : p.ready + pending);
        pending = NOTHING;
    }

    // The CHUNK-th 64 x 64 of a tile's outputs, or their transpose, to rows `stride` apart. Two buffers take turns.
    template <int CHUNK, int N>
    __device__ __forceinline__ void store(const float (&sum)[N], bool turned, __nv_bfloat16* to, long long stride) const {
        const uint32_t buffer = smem(s.staging[group][CHUNK % 2]);
        const int thread = thread_index(), lane = thread % 32, warp = thread % 128 / 32;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float* at = sum + CHUNK * 32 + j * 4;
            const uint32_t a = pack(at[0], at[1]), b = pack(at[2], at[3]), c = pack(at[4], at[5]), d = pack(at[6], at[7]);
            if (turned) {
                const int row = (j + lane / 16) * 8 + lane % 8, part = warp * 2 + lane / 8 % 2;
                store_matrices_transposed(buffer + row * 128 + ((part ^ row % 8) << 4), a, b, c, d);
            } else {
                const int row = warp * 16 + lane % 16, part = j + lane / 16;
                store_matrices(buffer + row * 128 + ((part ^ row % 8) << 4), a, b, c, d);
            }
        }
        barrier();
        copy_rows(buffer, to, stride);
    }

    // This warp's 16 rows of a 64 x 64 in shared memory.
    __device__ __forceinline__ static void copy_rows(uint32_t from, __nv_bfloat16* to, long long stride) {
        const int thread = thread_index(), part = thread % 8, first = thread % 128 / 32 * 16 + thread % 32 / 8;
        to += first * stride + part * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t row = first + i * 4;
            *reinterpret_cast<uint4*>(to + i * 4 * stride) = load_shared_16(from + row * 128 + ((part ^ row % 8) << 4));
        }
    }
};

// The router weights of our two rows, 0 of padding (whose pre-activations the forward has filled, too). Read ahead of use.
__device__ __forceinline__ float2 row_weights(const BackwardParams& p, int first) {
    const int thread = thread_index(), row = first + thread % 128 / 32 * 16 + thread % 32 / 4;
    return make_float2(p.row_weight[row], p.row_weight[row + 8]);
}

// What becomes of 16 columns of our two rows: of columns 8j to 8j+7 our row and the 8th after, and of the next 8 likewise.
struct Columns {
    uint32_t gate[4], up[4], hidden[4];  // pairs of neighbouring columns: pre-activations, then their gradients
};

// `left` and `right` hold dh of 8 columns each. Adds <dh, h> to `dot`.
template <bool PLAIN>
__device__ __forceinline__ void derive_columns(const BackwardParams& p, Columns& c, float4 left, float4 right, float2 weights, float (&dot)[2]) {
    const float dh[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int i = q % 2;
        const float w = i ? weights.y : weights.x, low = dh[q * 2], high = dh[q * 2 + 1];
        const Derived a = derive<PLAIN>(p, unpack_low(c.gate[q]), unpack_low(c.up[q]));
        const Derived b = derive<PLAIN>(p, unpack_high(c.gate[q]), unpack_high(c.up[q]));
        const uint32_t rounded = pack(a.hidden, b.hidden);
        dot[i] = __fmaf_rn(low, unpack_low(rounded), dot[i]);
        dot[i] = __fmaf_rn(high, unpack_high(rounded), dot[i]);
        c.hidden[q] = pack(w * a.hidden, w * b.hidden);
        c.gate[q] = pack(w * low * a.gate, w * high * b.gate);
        c.up[q] = pack(w * low * a.up, w * high * b.up);
    }
}

// The 64 x 64 of D_HIDDEN whose pre-activations lie in a stage, from 32 accumulators on: their gradients replace them, and
// hidden comes beside.
template <bool PLAIN, int FIRST, int N>
__device__ __forceinline__ void derive_box(const BackwardParams& p, const Outbox& out, uint32_t boxes, const float (&sum)[N], float2 weights, float (&dot)[2]) {
    const int thread = thread_index(), lane = thread % 32, row = thread % 128 / 32 * 16 + lane % 16;
    auto at = [&](int box, int j) { return boxes + box * BOX_BYTES + row * 128 + (((j + lane / 16) ^ row % 8) << 4); };
    auto store = [&](int box, int j, const uint32_t (&m)[4]) { store_matrices(at(box, j), m[0], m[1], m[2], m[3]); };
    auto dh = [&](int j) { return make_float4(sum[FIRST + j * 4], sum[FIRST + j * 4 + 1], sum[FIRST + j * 4 + 2], sum[FIRST + j * 4 + 3]); };
    Columns c;
    if constexpr (PLAIN && N - FIRST < 128) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            load_matrices(at(0, j), c.gate);
            load_matrices(at(1, j), c.up);
            derive_columns<true>(p, c, dh(j), dh(j + 1), weights, dot);
            store(0, j, c.gate);
            store(1, j, c.up);
            store(2, j, c.hidden);
        }
        return;
    }
    // For want of registers these accumulators wait in memory.
    float4* mine = reinterpret_cast<float4*>(out.s.staging[out.group]) + thread % 128;
    static_assert(sizeof(out.s.staging[0]) >= 8 * 128 * sizeof(float4));
    const bool interleaved = !PLAIN && p.first_layer == INTERLEAVED;
#pragma unroll
    for (int j = 0; j < 8; j++) mine[j * 128] = dh(j);
#pragma unroll 1
    for (int j = 0; j < 8; j += 2) {
        load_matrices(at(0, j), c.gate);
        load_matrices(at(1, j), c.up);
        derive_columns<PLAIN>(p, c, mine[j * 128], mine[j * 128 + 128], weights, dot);
        store(2, j, c.hidden);
        if (interleaved) {  // they must not replace what other lanes have still to read
            *reinterpret_cast<uint4*>(&mine[j * 128]) = make_uint4(c.gate[0], c.gate[1], c.gate[2], c.gate[3]);
            *reinterpret_cast<uint4*>(&mine[j * 128 + 128]) = make_uint4(c.up[0], c.up[1], c.up[2], c.up[3]);
        } else {
            store(0, j, c.gate);
            store(1, j, c.up);
        }
    }
    if (!interleaved) return;
    __syncwarp();
    const int first = thread % 128 / 32 * 16 + lane / 4;  // our row
#pragma unroll 1
    for (int j = 0; j < 8; j++) {  // 16 columns: dg, du, dg, du, ...; 4 of them ours
        const uint2 gate = reinterpret_cast<const uint2*>(&mine[j / 2 * 256])[j % 2], up = reinterpret_cast<const uint2*>(&mine[j / 2 * 256 + 128])[j % 2];
        const uint32_t g[2] = {gate.x, gate.y}, u[2] = {up.x, up.y};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int its = first + i * 8, part = j % 4 * 2 + lane % 4 / 2;
            const uint32_t to = boxes + j / 4 * BOX_BYTES + its * 128 + ((part ^ its % 8) << 4) + lane % 2 * 8;
            store_pair(to, __byte_perm(g[i], u[i], 0x5410), __byte_perm(g[i], u[i], 0x7632));
        }
    }
}

// Sums over the four lanes of a row, and writes the part of 128 columns.
__device__ __forceinline__ void store_part(const BackwardParams& p, int first, int part, float (&dot)[2]) {
    const int thread = thread_index(), row = first + thread % 128 / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        dot[i] += __shfl_xor_sync(~0u, dot[i], 1);
        dot[i] += __shfl_xor_sync(~0u, dot[i], 2);
        if (thread % 4 == 0) p.weight_parts[(long long)(row + i * 8) * 2 * TileCounts(p).hidden + part] = dot[i];
        dot[i] = 0;
    }
}

template <int I> struct Constant {
    __device__ constexpr operator int() const { return I; }
};

// One of the 64 x 64 of D_HIDDEN.
template <bool PLAIN, int CHUNK, int N>
__device__ __forceinline__ void derive_chunk(const BackwardParams& p, Shared& s, Ring& ring, const Outbox& out, const Tile& tile, const float (&sum)[N], float2 weights, float (&dot)[2]) {
    const int unit = N == 128 ? out.group : 0, half = N == 128 ? CHUNK / 2 : out.group, row = tile.row + unit * UNIT;
    const int column = tile.column * TILE_N + half * 128 + CHUNK % 2 * 64;
    const uint32_t boxes = smem(saved_box(s.stage[ring.stage()], out.group, 0));
    wait(p, &s.full[ring.stage()], ring.parity(), FULL);
    __syncwarp();
    derive_box<PLAIN, CHUNK * 32>(p, out, boxes, sum, weights, dot);
    if constexpr (CHUNK % 2 == 1) store_part(p, row, tile.column * 2 + half, dot);
    __syncwarp();
    if (column < p.inner) {  // the last tile may be partly empty
        const bool interleaved = p.first_layer == INTERLEAVED;
        const int width = p.parts * p.inner;
        __nv_bfloat16* first = p.first_values + (long long)row * width;
        if (p.parts == 2) out.copy_rows(boxes, first + (interleaved ? 2 * column : column), width);
        out.copy_rows(boxes + BOX_BYTES, first + (interleaved ? 2 * column + 64 : p.split + column), width);
        out.copy_rows(boxes + 2 * BOX_BYTES, p.hidden_values + (long long)row * p.inner + column, p.inner);
    }
    fence_proxy_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&s.empty[ring.stage()]);
    ring.next();
}

template <bool PLAIN, int N>
__device__ __forceinline__ void derive_hidden(const BackwardParams& p, Shared& s, Ring& ring, const Outbox& out, const Tile& tile, const float (&sum)[N], float2 weights) {
    float dot[2] = {0, 0};
    derive_chunk<PLAIN, 0>(p, s, ring, out, tile, sum, weights, dot);
    derive_chunk<PLAIN, 1>(p, s, ring, out, tile, sum, weights, dot);
    if constexpr (N == 128) {
        derive_chunk<PLAIN, 2>(p, s, ring, out, tile, sum, weights, dot);
        derive_chunk<PLAIN, 3>(p, s, ring, out, tile, sum, weights, dot);
    }
    fence_proxy_global();  // other blocks' copy engines will read it
}

// The gradient of a token's slot, or of weights.
template <int N>
__device__ __forceinline__ void store_tile(const BackwardParams& p, const Outbox& out, const Tile& tile, const float (&sum)[N], int unit, int half) {
    const int first = tile.column * TILE_N + half * 128;
    auto store = [&](auto chunk) {
        int column = first + chunk * 64;
        if (tile.phase == D_ROWS) {
            if (column >= p.width) return;  // the last tile may be partly empty
            __nv_bfloat16* to = const_cast<__nv_bfloat16*>(p.slot_outputs) + (long long)(tile.row + unit * UNIT) * p.width + column;
            return out.store<chunk>(sum, false, to, p.width);
        }
        const bool down = tile.phase == D_DOWN, up = column >= p.split;
        if (column >= (down ? p.inner : p.parts * p.inner)) return;
        const Gradient& gradient = down ? p.d_down : up ? p.d_up : p.d_gate;
        if (!down && up) column -= p.split;
        const bool turned = gradient.row_stride == 1;
        __nv_bfloat16* to = gradient.first + tile.expert * gradient.expert_stride;
        to += (tile.flag * TILE_UNITS + unit) * UNIT * gradient.row_stride + column * gradient.column_stride;
        out.store<chunk>(sum, turned, to, turned ? gradient.column_stride : gradient.row_stride);
    };
    store(Constant<0>());
    store(Constant<1>());
    if constexpr (N == 128) {
        store(Constant<2>());
        store(Constant<3>());
    }
}

// The products of rows `unit` of the tile with its columns from 64 * `column` on: 2 N of them.
template <bool A_TRANSPOSED, bool B_TRANSPOSED, int N>
__device__ __forceinline__ void multiply(const BackwardParams& p, Shared& s, Ring& ring, Outbox& out, const Tile& tile, int unit, int column, float (&sum)[N]) {
    constexpr int NEXT_A = A_TRANSPOSED ? 2048 >> 4 : 32 >> 4;  // 16 k on, in the descriptor's units
    constexpr int NEXT_B = B_TRANSPOSED ? 2048 >> 4 : 32 >> 4;
    const int steps = steps_of(p, s, tile);
    for (int step = 0; step < steps; step++, ring.next()) {
        Stage& stage = s.stage[ring.stage()];
        wait(p, &s.full[ring.stage()], ring.parity(), FULL);
        if (tile.phase != D_ROWS) fence_proxy_shared();  // gathered rows came by ordinary copies
        const uint64_t a = descriptor(smem(stage.a + unit * UNIT * TILE_K), 0);
        const uint64_t b = descriptor(smem(stage.b + column * 64 * TILE_K), B_TRANSPOSED ? 64 * TILE_K * 2 : 0);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) wgmma<B_TRANSPOSED, A_TRANSPOSED>(sum, a + k * NEXT_A, b + k * NEXT_B);
        wgmma_commit();
        if (step == 1) out.announce(p);  // of the tile before, while the tensor cores are busy
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) arrive(&s.empty[ring.stage()]);
    }
}

template <bool FIRST_N_MAJOR, bool DOWN_N_MAJOR, int N>
__device__ __forceinline__ void run_tile(const BackwardParams& p, Shared& s, Ring& ring, Outbox& out, const Tile& tile, Tracer& trace) {
    float sum[N];  // 128: our own unit of rows, all columns; 64: the only unit, our half of the columns
#pragma unroll
    for (float& x : sum) x = 0;
    const int unit = N == 128 ? out.group : 0, half = N == 128 ? 0 : out.group;
    if (tile.phase == D_HIDDEN) {
        const float2 weights = row_weights(p, tile.row + unit * UNIT);
        multiply<false, !DOWN_N_MAJOR>(p, s, ring, out, tile, unit, half * 2, sum);
        if (threadIdx.x == 128) trace(TILE_MULTIPLIED, tile.phase);
        out.announce(p);
        out.barrier();  // the buffers are free
        if (p.plain)
            derive_hidden<true>(p, s, ring, out, tile, sum, weights);
        else
            derive_hidden<false>(p, s, ring, out, tile, sum, weights);
        return;
    }
    if (tile.phase == D_ROWS)
        multiply<false, !FIRST_N_MAJOR>(p, s, ring, out, tile, unit, half * 2, sum);
    else
        multiply<true, true>(p, s, ring, out, tile, unit, half * 2, sum);
    if (threadIdx.x == 128) trace(TILE_MULTIPLIED, tile.phase);
    out.announce(p);
    out.barrier();  // the buffers are free
    store_tile(p, out, tile, sum, unit, half);
}

template <bool FIRST_N_MAJOR, bool DOWN_N_MAJOR>
__device__ __forceinline__ void run_tiles(const BackwardParams& p, BackwardShared& s, int group, Tracer& trace) {
    const bool tracing = threadIdx.x == 128;
    Ring ring;
    Outbox out{s, group};
    for (int parity = 0;;) {
        const Tile tile = take_tile(p, s, parity);
        // From here on we may wait for other blocks, so what they wait for must be announced.
        if (tile.phase != D_HIDDEN && out.pending != Outbox::SLOTS_STORED) out.announce(p);
        if (tile.phase == DONE) break;
        if (tracing) trace(TILE_BEGIN, tile.phase);
        if (tile.units == 2)
            run_tile<FIRST_N_MAJOR, DOWN_N_MAJOR, 128>(p, s, ring, out, tile, trace);
        else
            run_tile<FIRST_N_MAJOR, DOWN_N_MAJOR, 64>(p, s, ring, out, tile, trace);
        if (tile.phase <= D_ROWS) out.barrier();  // all have stored
        if (tile.phase <= D_ROWS && out.announcing()) out.pending = tile.phase == D_HIDDEN ? tile.expert : Outbox::SLOTS_STORED;
        if (tracing) trace(TILE_STORED, tile.phase);
    }
    if (out.announcing()) {
        out.announce(p);
        wait_count(p, p.state + 2, CONSUMERS * s.tile_begin[p.experts] * TileCounts(p).rows, SLOTS);
    }
    out.barrier();
    if (tracing) trace(ALL_STORED);
    SlotSum{p, s}.finish();
    const int worker = blockIdx.x * 4 * CONSUMERS + threadIdx.x / 32 - 4, workers = gridDim.x * 4 * CONSUMERS;
    sum_weight_gradients(p, worker, workers);
    sum_bias_gradients(p, s, worker, workers);
    if (tracing) trace(COMBINED);
}

template <bool FIRST_N_MAJOR, bool DOWN_N_MAJOR>
__device__ __forceinline__ void backward(const BackwardParams& p) {
    extern __shared__ __align__(1024) uint8_t memory[];  // swizzles count from multiples of 1024
    BackwardShared& s = *reinterpret_cast<BackwardShared*>(memory);
    Tracer trace(p);
    if (threadIdx.x == 0) {
        trace(STARTED);
        s.summed = 0;
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
            gather_tiles(p, s, warp - 2);
        else if (warp == 1)
            announce_tiles(p, s);
        else if (threadIdx.x % 32 == 0)
            load_tiles<FIRST_N_MAJOR, DOWN_N_MAJOR>(p, s);
    } else {
        registers_up<CONSUMER_REGISTERS>();
        run_tiles<FIRST_N_MAJOR, DOWN_N_MAJOR>(p, s, warp / 4 - 1, trace);
    }
}

}  // namespace mokfx

// Entries for each pair of storage orders of (gate and up, down): k is [out, in] as in nn.Linear, n is [in, out].
#define MOKFX_ENTRY(name, first, down)                                                                                 \
    extern "C" __global__ void __launch_bounds__(mokfx::THREADS, 1) name(const __grid_constant__ mokfx::BackwardParams p) { \
        mokfx::backward<first, down>(p);                                                                               \
    }
MOKFX_ENTRY(mok_backward_kk, false, false)
MOKFX_ENTRY(mok_backward_kn, false, true)
MOKFX_ENTRY(mok_backward_nk, true, false)
MOKFX_ENTRY(mok_backward_nn, true, true)
