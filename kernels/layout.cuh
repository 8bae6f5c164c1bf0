// What the host and all parts of the forward kernel agree on: tile sizes, arguments, shared memory, faults.
#pragma once
#include "ptx.cuh"

namespace mokfx {

constexpr int UNIT = 64;         // rows of one wgmma; an expert's rows are padded to whole units
constexpr int TILE_UNITS = 2;    // a tile has 1 or 2 units of rows, so a tail costs 64 rows, not 128
constexpr int TILE_N = 256;      // columns of a tile (gate/up: 64 of gate, the same 64 of up, the next 64 of gate, of up)
constexpr int TILE_K = 64;       // one row of 128 bytes, the widest swizzle
constexpr int STAGES = 4;        // each holds 1024 cycles of work for the tensor cores
constexpr int BUFFERS = 2;       // 64 x 64 outputs of a warpgroup on their way to global memory
constexpr int CONSUMERS = 2;     // warpgroups that multiply
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int MAX_EXPERTS = 512;
constexpr int MAX_RANKS = 8;
constexpr int RASTER = 20;       // row tiles of an expert that are multiplied side by side, so that its weights leave HBM once

struct Bias {
    const __nv_bfloat16* first;  // null: no bias
    int expert_stride, column_stride;
};

// How the columns of an expert's first layer lie in a tile of 256.
enum FirstLayer : int {
    BLOCKS = 0,   // 64 of gate, the same 64 of up, and again
    INTERLEAVED,  // gate, up, gate, up, as the weights lie in memory: `gate` maps both
    UNGATED       // 256 of `up`
};

// The curve between the layers, see activate.cuh.
enum Curve : int { SIGMOID = 0, GAUSS, RELU, RELU_SQUARED };

// Where router weights apply.
enum WeightOn : int { ON_OUTPUT = 0, ON_HIDDEN, ON_INPUT };

struct Params {
    TensorMap gate, up, down;    // [expert, out, in], boxes of 64 x 64; unused if `listed`
    TensorMap shared_gate, shared_up, shared_down;  // of the shared expert, likewise
    TensorMap hidden, slots;     // [row, column], boxes of 64 x 64; rows are sorted by expert and padded by UNIT
    TensorMap shared_hidden;     // [token, column]; the shared expert's outputs are rows of `slots` from `shared_row` on
    TensorMap saved;             // [row, column]: the gate's pre-activations, and after `saved_up` rows the up's
    const __nv_bfloat16* x;      // [tokens, width], rows `x_stride` elements apart
    const void* ids;             // [tokens, choices] int32 or int64
    const void* weights;         // [tokens, choices]
    __nv_bfloat16* y;            // [tokens, width]
    const __nv_bfloat16* slot_outputs;  // what is summed: rows of `slots`, or what other ranks have sent
    const __nv_bfloat16* shared_outputs;  // [tokens, width] of the shared expert: rows of `slots`
    const __nv_bfloat16* gathered;  // rows that `row_token` numbers: x, or what ranks have sent, `gathered_stride` elements apart
    const __nv_bfloat16* sigmoid;  // [width], `sigmoid_stride` elements apart, or null: no gate on the shared expert
    float* shared_scale;         // [tokens] sigmoid(x @ sigmoid)
    float* row_weight;           // [rows] the router weight of each sorted row, unless it applies to the output
    uint8_t* memory[MAX_RANKS];  // of every rank, for the others to write to: flags, and what exchange.cuh says
    long long ids_at, weights_at, rows_at, outputs_at;  // bytes from there
    int* row_token;              // [rows] the token of each sorted row, -1 for padding
    __nv_bfloat16** row_place;   // [rows] where its output goes, null for padding; only with ranks
    int* slot_row;               // [tokens * choices] the sorted row of each slot, -1 if it is dropped
    uint32_t* histogram;         // [chunks, experts] slots of each chunk and expert
    uint32_t* ready;             // [row tiles] (warpgroup, column tile) pairs of `hidden` that are in memory
    uint32_t* state;             // [4], zero before the first launch: grid barrier, next tile, (warpgroup, tile) pairs of `slots` in
                                 // memory (with ranks: warpgroups that have sent all), calls made with ranks
    uint32_t* fault;             // [4] in host memory: reason, block, thread, what it found
    uint64_t* trace;             // [blocks, TRACE_EVENTS, 2] or null: time and kind of events
    const TensorMap* listed;     // [3, experts] maps of gate, up, down of each expert, or null: weights are stacked
    Bias gate_bias, up_bias, down_bias;
    long long x_stride, sigmoid_stride, gathered_stride;
    int tokens, choices, experts, width, inner;  // experts: those of this rank
    int rank, ranks;             // 0 ranks: only this one
    int most_tokens;             // what `memory` has room for from each rank
    int virtual_shift;           // blocks of 2^shift ranks take turns in the grid
    int chunk, chunks;           // slots a block counts and places (a multiple of THREADS), blocks that have some
    int shared_inner;            // width of the shared expert, 0: there is none
    int shared_row, shared_flag; // where its rows begin in `slots`, and its flags in `ready`
    int n_major;                 // storage [in, out] of: 1 gate and up, 2 down, 4 and 8 those of the shared expert
    int first_layer, curve, weight_on;
    int capacity, by_choice;     // slots an expert keeps; earlier slots are those of earlier choices, not tokens
    int saved_up;
    int wide_ids;                // ids are int64
    int weight_kind;             // 0 float32, 1 bfloat16, 2 float16, 3 float64
    uint32_t patience;           // how long any wait may take, in units of 2^32 ns
    float linear, cubic, limit, offset;  // of the activation, see activate.cuh
    int only_first;              // the launch ends after gate/up
    int reserved[3];
};
static_assert(sizeof(Params) == 1728, "kernels/driver.py packs exactly this");

enum Phase : int { UP = 0, DOWN = 1, END = 2 };

struct Tile {
    int phase, expert;  // expert number `experts` is the shared one
    int row, units;   // first sorted row (of the shared expert: token), and how many units of rows
    int column;       // column tile
    int flag;         // index into `ready`
};

struct alignas(1024) Stage {
    __nv_bfloat16 a[TILE_UNITS * UNIT * TILE_K];
    __nv_bfloat16 b[TILE_N * TILE_K];
};

struct Shared {
    Stage stage[STAGES];
    alignas(1024) __nv_bfloat16 staging[CONSUMERS][BUFFERS][UNIT * 64];
    uint64_t full[STAGES], empty[STAGES], tile_full, tile_empty;
    Tile tile;
    uint32_t epoch;                        // number of this call, with ranks
    uint16_t unit_begin[MAX_EXPERTS + 1];  // where each expert's rows begin, in units (the host bounds their number)
    uint16_t tile_begin[MAX_EXPERTS + 1];  // where its row tiles begin
};
static_assert(sizeof(Shared) <= 232448, "more shared memory than a block can have");

// This block's number among those of its rank, and how many there are.
__device__ __forceinline__ int block_of(const Params& p) { return blockIdx.x >> p.virtual_shift; }
__device__ __forceinline__ int blocks_of(const Params& p) { return gridDim.x >> p.virtual_shift; }

constexpr int WARPS = THREADS / 32;

// ---- faults: a wait that outlasts its deadline or an impossible input ends the launch with a record, never a hang

enum Reason : int { ID_OUT_OF_RANGE = 1, GRID_BARRIER, FULL, EMPTY, TILE_FULL, TILE_EMPTY, HIDDEN, SLOTS, PEER_IDS, PEER_ROWS, PEER_OUTPUTS };

// A call, so that the warps that wait while they hold all their registers need none for it.
__device__ __noinline__ void give_up(uint32_t* to, int reason, uint32_t found) {
    volatile uint32_t* record = to;
    record[1] = blockIdx.x;
    record[2] = threadIdx.x;
    record[3] = found;
    __threadfence_system();
    record[0] = reason;
    __nanosleep(100000);  // let the record leave the chip before the trap
    __trap();
}

__device__ __forceinline__ void fault(const Params& p, int reason, uint32_t found) { give_up(p.fault, reason, found); }

__device__ __forceinline__ void wait(const Params& p, uint64_t* barrier, int parity, int reason) {
    if (try_wait(barrier, parity)) return;
    const uint32_t start = now_coarse();
    while (!try_wait(barrier, parity))
        if (now_coarse() - start > p.patience) fault(p, reason, parity);
}

__device__ __forceinline__ void wait_count(const Params& p, const uint32_t* counter, uint32_t target, int reason) {
    const uint32_t start = now_coarse();
    for (uint32_t count; (count = load_acquire(counter)) < target; __nanosleep(64))
        if (now_coarse() - start > p.patience) fault(p, reason, count);
}

// ---- events for the timeline, recorded only by builds with MOKFX_TRACE

constexpr int TRACE_EVENTS = 1024;
enum Event : int { STARTED = 1, COUNTED, PLACED, TILE_BEGIN, TILE_MULTIPLIED, TILE_STORED, ALL_STORED, COMBINED };

struct Tracer {
#ifdef MOKFX_TRACE
    const Params& p;
    int used = threadIdx.x == 128 ? 8 : 0;  // thread 0 writes the first 8 events, thread 128 the others
    __device__ explicit Tracer(const Params& params) : p(params) {}
    __device__ void operator()(int event, int detail = 0) {
        if (used == TRACE_EVENTS) return;
        uint64_t* to = p.trace + (uint64_t(blockIdx.x) * TRACE_EVENTS + used++) * 2;
        to[0] = now();
        to[1] = uint64_t(detail) << 8 | event;
    }
#else
    __device__ explicit Tracer(const Params&) {}
    __device__ void operator()(int, int = 0) {}
#endif
};

}  // namespace mokfx
