// Matrices of F16 and BF16 times the activations of a prompt's tokens, by tensor cores:
//
//   out[t, r] = weights[r] · x[t] (+ bias[r]), or fma(scale, that, out[t, r])
//
// for one matrix, or for several *items*, as matmul.cu has them: an item is an expert's matrix and
// the tokens that chose it. Gate and up are cut between rows into granules, down between columns.
//
// Twin: the float product of `Kernels::matmul` (src/simd/scalar.rs), but for rounding: activations
// are rounded to the weights' type, to nearest, and multiplied exactly; sums are f32 in the
// hardware's order. For F16 each token is scaled by a power of two first, so that none overflows.
//
// store_halves rounds the tokens, a block each. A block of matmul_halves makes ROWS rows of TOKENS
// tokens, a warp 64 rows of 32 tokens. Weights and tokens come to shared memory DEPTH columns at a
// time, while the columns before are multiplied.
//
// A block of matmul_halves_grouped makes 64 rows of 64 pairs, a warp 32 rows of 16: of a prompt of
// 512 tokens each of 128 experts has 32 pairs, and warps without pairs multiply nothing. Rows may
// be of several granules. The sum of a granule of down begins at zero and is then added to those
// before, so results do not depend on which granules a launch computes.
//
// Expected bytes: the weights once for TOKENS tokens (64 pairs), each token's halves once for ROWS
// (64) rows, both from L2 after the first time; the results once.
#include "copy.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 ROWS = 128, TOKENS = 128, DEPTH = 32;
// Halves from one row of a tile to the next, which keeps load_matrices free of bank conflicts.
static constexpr u32 STRIDE = DEPTH + 8;

// As mma_f16 (cuda.cuh) with factors of BF16. Turing has no such instruction, so no kernel gets
// there.
#if defined(__CUDACC__)
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
#endif

struct StoreHalvesParams {
    // [tokens, stride]
    Address<const float> x;
    // [tokens, cols]
    Address<u16> out;
    // [tokens, blocks along y]: what undoes the scaling of F16
    Address<float> scales;
    u32 stride;
    u32 cols;
    // Columns that are scaled together, which a block rounds.
    u32 part;
    u32 is_bf16;
};
static_assert(sizeof(StoreHalvesParams) == 40);

// To nearest, ties to even; a NaN becomes a quiet one.
__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u32 bits = __float_as_uint(value), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<u16>(value == value ? rounded : bits >> 16 | 0x40u);
}

KERNEL(store_halves, THREADS, StoreHalvesParams) {
    SHARED(u32, most, THREADS / WARP);
    u32 first = blockIdx.y * p.part, n = min(p.part, p.cols - first);
    Global<const float> x = p.x + (static_cast<u64>(blockIdx.x) * p.stride + first);
    Global<u16> out = p.out + (static_cast<u64>(blockIdx.x) * p.cols + first);
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    }
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    }
    if (threadIdx.x % WARP == 0) most[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (u32 i = 0; i < THREADS / WARP; i++) largest = max(largest, most[i]);
    // NaN and infinity stay what they are under any scale.
    u32 exponent = max(1u, min(largest >> 23, 253u));
    float down = __uint_as_float((254 - exponent) << 23);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        out[i] = p.is_bf16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i] * down);
    }
    if (threadIdx.x == 0) {
        u64 at = static_cast<u64>(blockIdx.x) * gridDim.y + blockIdx.y;
        p.scales[at] = p.is_bf16 ? 1.0f : __uint_as_float(exponent << 23);
    }
}

struct MatmulHalvesParams {
    // [n_rows, n_cols]
    Address<const u16> weights;
    // [n_tokens, n_cols] and [n_tokens], as store_halves made them
    Address<const u16> x;
    Address<const float> scales;
    // [n_rows] or null
    Address<const float> bias;
    // [n_tokens, out_stride]
    Address<float> out;
    u32 n_rows;
    u32 n_cols;
    u32 n_tokens;
    u32 out_stride;
    // The factor of what is added to `out`; 0 stores.
    float scale;
    u32 is_bf16;
};
static_assert(sizeof(MatmulHalvesParams) == 64);

// Begins to fill a tile with DEPTH columns from `col` on of 128 rows from `first` on. The last row
// stands for those behind it, whose results no one stores; behind the last column are zeros.
__device__ __forceinline__ void begin_fill(Shared<u16> tile, Global<const u16> rows, u32 n_rows,
                                           u32 n_cols, u32 first, u32 col) {
    constexpr u32 CHUNKS = DEPTH / 8;
#pragma unroll
    for (u32 n = 0; n < ROWS * CHUNKS / THREADS; n++) {
        u32 i = n * THREADS + threadIdx.x, row = i / CHUNKS, at = i % CHUNKS * 8;
        u64 from = static_cast<u64>(min(first + row, n_rows - 1)) * n_cols + col + at;
        Shared<u8> to = as<u8>(tile + (row * STRIDE + at));
        if (col + at < n_cols) copy_async(to, as<const u8>(rows + from), 16);
        else as<uint4>(to)[0] = make_uint4(0, 0, 0, 0);
    }
}

// The warp's sums of a tile: as mma_f16 has results, for sixteen tokens and eight rows each.
template <bool BF16, u32 MS, u32 NS>
__device__ __forceinline__ void multiply(float (&acc)[MS][NS][4], Shared<const u16> tokens,
                                         Shared<const u16> rows) {
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += 16) {
        u32 a[MS][4];
#pragma unroll
        for (u32 m = 0; m < MS; m++) load_matrices(a[m], tokens + (16 * m * STRIDE + k));
#pragma unroll
        for (u32 n = 0; n < NS; n += 2) {
            u32 b[4];
            load_matrices(b, rows + (8 * n * STRIDE + k));
#pragma unroll
            for (u32 m = 0; m < 2 * MS; m++) {
                const u32 own[2] = {b[m % 2 * 2], b[m % 2 * 2 + 1]};
                if constexpr (BF16) mma_bf16(acc[m / 2][n + m % 2], a[m / 2], own);
                else mma_f16(acc[m / 2][n + m % 2], a[m / 2], own);
            }
        }
    }
}

KERNEL(matmul_halves, AT_LEAST(2, THREADS), MatmulHalvesParams) {
    constexpr u32 TILE = ROWS * STRIDE;
    // Two of tokens, two of rows.
    SHARED(uint4, memory, 4 * TILE / 8);
    Shared<u16> tiles = as<u16>(memory);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 first_row = blockIdx.x * ROWS, first_token = blockIdx.y * TOKENS;
    u32 own_token = warp % 4 * 32, own_row = warp / 4 * 64;
    u32 of_tokens = (own_token + lane % 16) * STRIDE + lane / 16 * 8;
    u32 of_rows = (own_row + lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
    float acc[2][8][4] = {};
    begin_fill(tiles, p.x, p.n_tokens, p.n_cols, first_token, 0);
    begin_fill(tiles + 2 * TILE, p.weights, p.n_rows, p.n_cols, first_row, 0);
    commit_copies();
#pragma unroll 1
    for (u32 col = 0, turn = 0; col < p.n_cols; col += DEPTH, turn ^= 1) {
        wait_for_copies<0>();
        // The other tiles have been read, too.
        __syncthreads();
        if (col + DEPTH < p.n_cols) {
            u32 next = (turn ^ 1) * TILE, at = col + DEPTH;
            begin_fill(tiles + next, p.x, p.n_tokens, p.n_cols, first_token, at);
            begin_fill(tiles + (2 * TILE + next), p.weights, p.n_rows, p.n_cols, first_row, at);
            commit_copies();
        }
        Shared<const u16> tokens = tiles + (turn * TILE + of_tokens);
        Shared<const u16> rows = tiles + ((2 + turn) * TILE + of_rows);
        if (p.is_bf16) multiply<true>(acc, tokens, rows);
        else multiply<false>(acc, tokens, rows);
    }
    Global<const float> bias = p.bias;
    u32 token = first_token + own_token + lane / 4, row = first_row + own_row + lane % 4 * 2;
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
        u32 t = token + 8 * m;
        if (t >= p.n_tokens) break;
        Global<float> to = p.out + static_cast<u64>(t) * p.out_stride;
        float undo = p.scales[t];
#pragma unroll
        for (u32 n = 0; n < 16; n++) {
            u32 r = row + n / 2 * 8 + n % 2;
            if (r >= p.n_rows) continue;
            float sum = acc[m / 2][n / 2][m % 2 * 2 + n % 2] * undo;
            if (bias) sum += __ldg(bias + r);
            to[r] = p.scale == 0.0f ? sum : fmaf(p.scale, sum, to[r]);
        }
    }
}

// Rows and pairs of a block.
static constexpr u32 SIDE = 64;

struct GroupedHalvesParams {
    // [items, n_granules]: the address of each granule, of which the matrix's rows begin at byte
    // `matrix_at`. A granule with address 0 is left out.
    Address<const u64> matrices;
    u64 matrix_at;
    // [records, x_cols], of which n_cols are read, and [records, scales_stride], one for each
    // granule of columns, as store_halves made them
    Address<const u16> x;
    Address<const float> scales;
    // The record of each pair. Null if the records are in the order of the pairs.
    Address<const u32> tokens;
    // [blocks along y, 4]: as in matmul.cu. Null for one item, which has n_pairs.
    Address<const u32> tiles;
    // [items]: the row of `bias` that an item adds. Null if it is that of its number.
    Address<const u32> experts;
    // [experts, bias_stride] or null
    Address<const float> bias;
    // [pairs, out_stride]
    Address<float> out;
    u32 n_rows;
    u32 n_cols;
    u32 x_cols;
    u32 scales_stride;
    u32 n_pairs;
    u32 out_stride;
    u32 bias_stride;
    // Rows of a granule but the last, and columns: those of the matrix where it is not cut so.
    u32 granule_rows;
    u32 granule_cols;
    u32 n_granules;
    // Whether the first granule of columns is added to `out` too, as the others are.
    u32 accumulate;
    u32 is_bf16;
};
static_assert(sizeof(GroupedHalvesParams) == 120);

// The tile that a block computes, and its way through the granules of its columns.
struct GroupedTile {
    u32 item, first, n, first_row;
    // Granules of the first and of the last row.
    u32 from, to;
    u32 granule, col, n_cols;

    // The address of granule `granule` of columns, of granule `of` of rows; or 0.
    __device__ __forceinline__ u64 address(const GroupedHalvesParams& p, u32 of) const {
        return p.matrices[static_cast<u64>(item) * p.n_granules + of + granule];
    }

    // Goes to the first granule of columns from `granule` on that some of the rows have. Returns
    // whether there is one.
    __device__ __forceinline__ bool find(const GroupedHalvesParams& p) {
        col = 0;
        for (; granule * p.granule_cols < p.n_cols; granule++) {
            n_cols = min(p.granule_cols, p.n_cols - granule * p.granule_cols);
            for (u32 of = from; of <= to; of++) {
                if (address(p, of)) return true;
            }
        }
        return false;
    }

    __device__ __forceinline__ u32 record(const GroupedHalvesParams& p, u32 pair) const {
        Global<const u32> tokens = p.tokens;
        pair = first + min(pair, n - 1);
        return tokens ? tokens[pair] : pair;
    }
};

// Begins to copy eight columns from `col` on, or makes them zeros.
__device__ __forceinline__ void begin_fill(Shared<u16> to, Global<const u16> row, u32 col,
                                           bool is_there) {
    if (is_there) copy_async(as<u8>(to), as<const u8>(row + col), 16);
    else as<uint4>(to)[0] = make_uint4(0, 0, 0, 0);
}

// sums: what the products are added to, `out` behind other granules, or the bias, or zeros.
__device__ __forceinline__ void begin_sums(float (&sums)[1][4][4], const GroupedHalvesParams& p,
                                           const GroupedTile& tile, u32 own_pair, u32 own_row) {
    bool adds = tile.granule > 0 || p.accumulate;
    Global<const u32> experts = p.experts;
    Global<const float> bias = p.bias;
    if (!adds && !bias) return;
    u64 bias_row = static_cast<u64>(experts ? experts[tile.item] : tile.item) * p.bias_stride;
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        // With the loads of both pairs at once it would spill.
        __syncwarp();
        u32 pair = min(own_pair + 8 * m, tile.n - 1);
        Global<const float> from = bias + bias_row;
        if (adds) from = p.out + static_cast<u64>(tile.first + pair) * p.out_stride;
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            u32 row = min(own_row + n / 2 * 8 + n % 2, p.n_rows - 1);
            sums[0][n / 2][2 * m + n % 2] = from[row];
        }
    }
}

// sums += the products of a granule of columns, which become 0.
__device__ __forceinline__ void add_granule(float (&sums)[1][4][4], float (&acc)[1][4][4],
                                            const GroupedHalvesParams& p, const GroupedTile& tile,
                                            u32 granule, u32 own_pair) {
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        u32 record = tile.record(p, own_pair + 8 * m);
        float undo = p.scales[static_cast<u64>(record) * p.scales_stride + granule];
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            float& product = acc[0][n / 2][2 * m + n % 2];
            sums[0][n / 2][2 * m + n % 2] += product * undo;
            product = 0.0f;
        }
    }
}

KERNEL(matmul_halves_grouped, AT_LEAST(3, THREADS), GroupedHalvesParams) {
    constexpr u32 TILE = SIDE * STRIDE;
    // Two of pairs, two of rows.
    SHARED(uint4, memory, 4 * TILE / 8);
    // Whether a row's granule is there.
    SHARED(u32, is_here, SIDE);
    Shared<u16> tiles = as<u16>(memory);
    GroupedTile tile = {};
    tile.first = blockIdx.y * SIDE, tile.n = min(SIDE, p.n_pairs - tile.first);
    Global<const u32> list = p.tiles;
    if (list) {
        uint4 words = as<const uint4>(list)[blockIdx.y];
        tile.item = words.x, tile.first = words.y, tile.n = words.z;
    }
    tile.first_row = blockIdx.x * SIDE;
    tile.from = tile.first_row / p.granule_rows;
    tile.to = (min(tile.first_row + SIDE, p.n_rows) - 1) / p.granule_rows;
    if (tile.n == 0 || !tile.find(p)) return;
    // A thread fills eight columns of this row and pair.
    u32 filled = threadIdx.x / 4, at = threadIdx.x % 4 * 8;
    u32 filled_row = min(tile.first_row + filled, p.n_rows - 1);
    u32 of = filled_row / p.granule_rows, skipped = filled_row - of * p.granule_rows;
    Global<const u16> x = p.x + static_cast<u64>(tile.record(p, filled)) * p.x_cols;
    u64 weights = 0;
    if (at == 0) is_here[filled] = tile.address(p, of) != 0;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 own_pair = warp % 4 * 16, own_row = warp / 4 * 32;
    u32 of_tokens = (own_pair + lane % 16) * STRIDE + lane / 16 * 8;
    u32 of_rows = (own_row + lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
    u32 pair = own_pair + lane / 4, row = own_row + lane % 4 * 2;
    float acc[1][4][4] = {}, sums[1][4][4] = {};
    begin_sums(sums, p, tile, pair, tile.first_row + row);
    // In each turn a tile is filled, and the one that was filled in the turn before multiplied.
    bool is_first = true, enters = true, goes_on = true;
    u32 granule = 0;
#pragma unroll 1
    for (u32 turn = 0; is_first || goes_on; turn ^= 1) {
        bool multiplies = !is_first && own_pair < tile.n;
        if (!is_first) {
            granule = tile.granule;
            tile.col += DEPTH;
            enters = tile.col >= tile.n_cols;
            if (enters) {
                tile.granule++;
                goes_on = tile.find(p);
            }
        }
        if (enters && goes_on) {
            weights = tile.address(p, of);
            if (weights) weights += p.matrix_at + 2 * static_cast<u64>(skipped) * tile.n_cols;
        }
        wait_for_copies<0>();
        // The other tiles have been read, too.
        __syncthreads();
        if (goes_on) {
            Shared<u16> to = tiles + ((turn ^ 1) * TILE + filled * STRIDE + at);
            u32 col = tile.col + at, x_col = tile.granule * p.granule_cols + col;
            bool is_in = col < tile.n_cols;
            begin_fill(to, x, x_col, is_in);
            begin_fill(to + 2 * TILE, global<const u16>(weights), col, is_in && weights);
            commit_copies();
        }
        is_first = false;
        if (!multiplies) continue;
        Shared<const u16> tokens = tiles + (turn * TILE + of_tokens);
        Shared<const u16> rows = tiles + ((2 + turn) * TILE + of_rows);
        if (p.is_bf16) multiply<true>(acc, tokens, rows);
        else multiply<false>(acc, tokens, rows);
        if (enters) add_granule(sums, acc, p, tile, granule, pair);
    }
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        if (pair + 8 * m >= tile.n) break;
        Global<float> to = p.out + static_cast<u64>(tile.first + pair + 8 * m) * p.out_stride;
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            u32 r = row + n / 2 * 8 + n % 2;
            if (tile.first_row + r >= p.n_rows || !is_here[r]) continue;
            to[tile.first_row + r] = sums[0][n / 2][2 * m + n % 2];
        }
    }
}
