// Matrices of F16 and BF16 times the activations of a prompt's tokens, by tensor cores:
//
//   out[t, r] = weights[r] · x[t] (+ bias[r]), or fma(scale, that, out[t, r])
//
// Twin: the float product of `Kernels::matmul` (src/simd/scalar.rs), but for rounding: activations
// are rounded to the weights' type, to nearest, and multiplied exactly; sums are f32 in the
// hardware's order. For F16 each token is scaled by a power of two first, so that none overflows.
//
// store_halves rounds the tokens, a block each. A block of matmul_halves makes ROWS rows of TOKENS
// tokens, a warp 64 rows of 32 tokens. Weights and tokens come to shared memory DEPTH columns at a
// time, while the columns before are multiplied.
// Expected bytes: the weights once for TOKENS tokens, each token's halves once for ROWS rows, both
// from L2 after the first time; the results once.
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
    // [tokens]: what undoes the scaling of F16
    Address<float> scales;
    u32 stride;
    u32 cols;
    u32 is_bf16;
    u32 unused;
};
static_assert(sizeof(StoreHalvesParams) == 40);

// To nearest, ties to even; a NaN becomes a quiet one.
__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u32 bits = __float_as_uint(value), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<u16>(value == value ? rounded : bits >> 16 | 0x40u);
}

KERNEL(store_halves, THREADS, StoreHalvesParams) {
    SHARED(u32, most, THREADS / WARP);
    Global<const float> x = p.x + static_cast<u64>(blockIdx.x) * p.stride;
    Global<u16> out = p.out + static_cast<u64>(blockIdx.x) * p.cols;
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < p.cols; i += THREADS) {
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
    for (u32 i = threadIdx.x; i < p.cols; i += THREADS) {
        out[i] = p.is_bf16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i] * down);
    }
    if (threadIdx.x == 0) {
        p.scales[blockIdx.x] = p.is_bf16 ? 1.0f : __uint_as_float(exponent << 23);
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
template <bool BF16>
__device__ __forceinline__ void multiply(float (&acc)[2][8][4], Shared<const u16> tokens,
                                         Shared<const u16> rows) {
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += 16) {
        u32 a[2][4];
        load_matrices(a[0], tokens + k);
        load_matrices(a[1], tokens + (16 * STRIDE + k));
#pragma unroll
        for (u32 n = 0; n < 8; n += 2) {
            u32 b[4];
            load_matrices(b, rows + (8 * n * STRIDE + k));
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
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
