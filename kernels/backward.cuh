// The backward's arguments, its products, and which tile of which product is next.
//
// With g = dY of a slot's token, w its router weight, and D the down, G and U the first layer's weights:
//   D_HIDDEN   dh = g D^T, then from the saved pre-activations: <dh, h> (the gradient of w), w h, and the gradients of the
//              pre-activations dg, du of w dh
//   D_ROWS     the slot's gradient of x: dg G^T + du U^T, one product over both
//   D_DOWN     of each expert: (w h)^T g, over its rows
//   D_FIRST    x^T dg and x^T du
#pragma once
#include "schedule.cuh"

namespace mokfx {

// The gradient of an expert weight, or of gate and up together if their columns are interleaved, as `gate` then maps both.
struct Gradient {
    __nv_bfloat16* first;
    long long expert_stride, row_stride, column_stride;  // rows are those of `width`, columns of `inner`
};

struct BackwardParams : Params {  // `hidden` maps w h, `slot_outputs` are the slots' gradients of x, `y` is dx, `weight_on` not ON_OUTPUT
    TensorMap first;             // [row, column] dg, and beside it du; or interleaved as the weights' columns are
    Gradient d_gate, d_up, d_down;
    const __nv_bfloat16* grad_y; // [tokens, width], rows `grad_y_stride` elements apart
    __nv_bfloat16 *hidden_values, *first_values;  // what `hidden` and `first` map
    float* weight_parts;         // [rows, 2 column tiles of D_HIDDEN]: <dh, h> of each 128 columns
    void* d_weights;             // [tokens, choices] of the weights' type
    __nv_bfloat16 *d_first_bias, *d_down_bias;  // [experts, parts * inner] as the columns of `first`, [experts, width], or null
    long long grad_y_stride;
    int parts;                   // of the first layer: 2 gate and up, 1 only up
    int split;                   // columns of `first` before those of up: inner, 2 inner if they are interleaved, 0 without a gate
    int weight_on_hidden;        // router weights apply to hidden, not to outputs
    int plain;                   // the activation is SwiGLU, and gate and up are not interleaved
    int reserved_too[20];
};
static_assert(sizeof(BackwardParams) == sizeof(Params) + 384, "kernels/backward.py packs exactly this");

struct BackwardShared : Shared {
    int summed;  // parts of dx that warps of this block have taken
};
static_assert(sizeof(BackwardShared) <= 232448, "more shared memory than a block can have");

constexpr int WEIGHT_RASTER = 16;  // row tiles of a gradient of weights that are multiplied side by side

enum Product : int { D_HIDDEN = 0, D_ROWS, D_DOWN, D_FIRST, DONE };

// Tiles of one product and expert. A gradient of weights has 128 rows of `width`, 256 columns of `inner` a tile.
struct TileCounts {
    int hidden, rows;      // column tiles of D_HIDDEN and D_ROWS
    int height;            // row tiles of gradients of weights
    int down, first;       // their column tiles
    __device__ __forceinline__ explicit TileCounts(const BackwardParams& p)
        : hidden((p.inner + TILE_N - 1) / TILE_N), rows((p.width + TILE_N - 1) / TILE_N), height((p.width + 127) / 128),
          down(hidden), first((p.parts * p.inner + TILE_N - 1) / TILE_N) {}
    __device__ __forceinline__ int weights() const { return height * (down + first); }
};

// Tile i of a rectangle: up to `most` row tiles side by side, down the rows first.
__device__ __forceinline__ void walk(int i, int row_tiles, int columns, int most, int& row_tile, int& column) {
    const int bands = (row_tiles + most - 1) / most, height = (row_tiles + bands - 1) / bands;
    const int band = i / (height * columns), size = min(height, row_tiles - band * height);
    i -= band * height * columns;
    row_tile = band * height + i % size;
    column = i / size;
}

// Tile number i of the launch: all tiles of D_HIDDEN, all of D_ROWS, then the gradients of weights; in each, expert by
// expert. A tile only waits for D_HIDDEN of its expert, which has smaller numbers.
__device__ inline Tile backward_tile(const BackwardParams& p, const Shared& s, int i) {
    const TileCounts count(p);
    const int row_tiles = s.tile_begin[p.experts];
    Tile tile{};
    for (tile.phase = D_HIDDEN; tile.phase <= D_ROWS; tile.phase++) {
        const int columns = tile.phase == D_HIDDEN ? count.hidden : count.rows;
        if (i >= row_tiles * columns) {
            i -= row_tiles * columns;
            continue;
        }
        int low = 0, high = p.experts;  // tile_begin[low] <= i / columns < tile_begin[high]
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (s.tile_begin[middle] <= i / columns ? low : high) = middle;
        }
        int m;
        walk(i - s.tile_begin[low] * columns, s.tile_begin[low + 1] - s.tile_begin[low], columns, RASTER, m, tile.column);
        const int unit = s.unit_begin[low] + m * TILE_UNITS;
        tile.expert = low;
        tile.row = unit * UNIT;
        tile.units = min(TILE_UNITS, s.unit_begin[low + 1] - unit);
        return tile;
    }
    tile.expert = i / count.weights();
    i %= count.weights();
    tile.phase = tile.expert >= p.experts ? DONE : i < count.height * count.down ? D_DOWN : D_FIRST;
    if (tile.phase == DONE) return tile;
    const bool down = tile.phase == D_DOWN;
    walk(down ? i : i - count.height * count.down, count.height, down ? count.down : count.first, WEIGHT_RASTER, tile.flag, tile.column);
    tile.row = s.unit_begin[tile.expert] * UNIT;
    tile.units = min(TILE_UNITS, p.width / UNIT - tile.flag * TILE_UNITS);  // of the gradient's rows; `flag` is its row tile
    return tile;
}

__device__ __forceinline__ int steps_of(const BackwardParams& p, const Shared& s, const Tile& tile) {
    switch (tile.phase) {
        case D_HIDDEN: return p.width / TILE_K;
        case D_ROWS: return p.parts * p.inner / TILE_K;
        default: return s.unit_begin[tile.expert + 1] - s.unit_begin[tile.expert];
    }
}

// Stages that follow those of D_HIDDEN, with the saved pre-activations of 64 columns of two units: our two units of rows,
// or, of a tail of one, the two halves of its columns. Three boxes of 64 x 64 a unit: gate, up, and room for hidden.
__device__ __forceinline__ int saved_stages(const Tile& tile) { return tile.phase != D_HIDDEN ? 0 : tile.units == 2 ? 4 : 2; }

constexpr int BOX_BYTES = UNIT * TILE_K * sizeof(__nv_bfloat16);
static_assert(sizeof(Stage) == 6 * BOX_BYTES, "a stage holds three boxes for each of two warpgroups");

__device__ __forceinline__ uint8_t* saved_box(Stage& stage, int unit, int i) {
    return reinterpret_cast<uint8_t*>(&stage) + (unit * 3 + i) * BOX_BYTES;
}

}  // namespace mokfx
