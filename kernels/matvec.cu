// Matrix times the activations of one token, or of up to eight:
//
//   out[t, r] = weights[r] · x[t] (+ bias[r])
//   out[t, r] = fma(scale, weights[r] · x[t] (+ bias[r]), out[t, r])      if there is a scale
//
// Twin: `Kernels::matmul` (src/simd/scalar.rs), to the bit. quant/rows.cuh says how the threads of
// a warp share a row. Rows begin on multiples of F::ALIGN: formats of 16·n bytes a block are read
// 16 bytes at a time.
//
// Expected bytes: the weights once, from memory; the activations (1.1 bytes a column and token)
// come from L1 and L2. A warp has up to eight blocks of 256 in flight, 1152 bytes of Q4_K; with one
// row a warp and 2048 columns, the 4096 rows of a projection are 4.7 MB in flight at once, more
// than the 2 to 3 MB that latency times bandwidth asks for on the fastest GPUs. Of instructions,
// a thread needs about 120 for its 64 values of Q4_K and 250 of Q6_K, a third of what the memory
// leaves time for; so nothing is staged in shared memory.
#include "quant/floats.cuh"
#include "quant/formats.cuh"

// Eight warps: with one row a warp, the activations that they share are still in L1.
static constexpr u32 THREADS = 256;

struct MatvecParams {
    // [n_rows, n_cols] blocks of a format, rows `row_stride` bytes apart
    Address<const u8> weights;
    u64 row_stride;
    u32 n_rows;
    u32 n_cols;
    // Threads of a row (`lanes_a_row` in src/backend/gpu/matvec.rs).
    u32 lanes;
    // 0: the result is stored. Otherwise it is added to `out`, multiplied by this.
    float scale;
    // Records of quant/acts.cuh with `x_cols` columns each, of which n_cols are read from first_col
    // on.
    Address<const u8> x;
    u32 x_cols;
    u32 first_col;
    // [n_rows] or null
    Address<const float> bias;
    // [tokens, out_stride]
    Address<float> out;
    // For matvec8: all tokens, of which a block takes eight, those of blockIdx.y.
    u32 n_tokens;
    u32 out_stride;
};
static_assert(sizeof(MatvecParams) == 72);

__device__ __forceinline__ void put(const MatvecParams& p, u64 at, u32 row, float sum) {
    Global<const float> bias = p.bias;
    Global<float> out = p.out;
    float scale = p.scale;
    if (bias) sum += bias[row];
    if (scale != 0.0f) {
        out[at] = fmaf(scale, sum, out[at]);
    } else {
        out[at] = sum;
    }
}

template <class F, u32 TOKENS>
__device__ __forceinline__ void matvec(const MatvecParams& p) {
    u32 lanes = p.lanes, row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    u32 first = TOKENS > 1 ? blockIdx.y * TOKENS : 0;
    u32 n_tokens = TOKENS > 1 ? min(TOKENS, p.n_tokens - first) : 1;
    bool live = row < p.n_rows;
    float sum[1][TOKENS];
    Global<const u8> rows[1] = {p.weights + (live ? row : 0) * p.row_stride};
    Records x = {p.x, p.x_cols, first, p.first_col};
    Dots<F>::of(rows, live, p.n_cols, lanes, x, n_tokens, sum);
    if (!live || threadIdx.x % lanes != 0) return;
#pragma unroll
    for (u32 t = 0; t < TOKENS; t++) {
        if (TOKENS > 1 && t >= n_tokens) break;
        u64 at = static_cast<u64>(first + t) * (TOKENS > 1 ? p.out_stride : 0) + row;
        put(p, at, row, sum[0][t]);
    }
}

// A float row of one token has 64 threads (`FLOAT_LANES` in src/backend/gpu/matvec.rs), so a block
// has four. They load a tile of 1024 columns, neighbouring threads neighbouring values, while one
// warp adds the tile before, eight threads a row. A router's 128 rows are 32 blocks, and its 2048
// columns wait for memory twice; with eight threads a row, which load what they add, 32 times.
static constexpr u32 FLOAT_ROWS = 4, FLOAT_COLS = 1024;
// Four rows of eight lanes are 32 banks.
static constexpr u32 FLOAT_STRIDE = FLOAT_COLS + 8;

template <class F>
__device__ __forceinline__ void float_matvec(const MatvecParams& p) {
    SHARED(float, weights, FLOAT_ROWS * FLOAT_STRIDE);
    SHARED(float, acts, FLOAT_COLS);
    constexpr u32 A_ROW = THREADS / FLOAT_ROWS;
    constexpr u32 LOADS = FLOAT_COLS / A_ROW, ACTS = FLOAT_COLS / THREADS;
    u32 n_rows = p.n_rows, n_cols = p.n_cols, first_row = blockIdx.x * FLOAT_ROWS;
    u32 row = threadIdx.x / A_ROW, at = threadIdx.x % A_ROW;
    bool live = first_row + row < n_rows;
    Global<const u8> from = p.weights + (live ? first_row + row : 0) * p.row_stride;
    Global<const float> x = floats_of(Records{p.x, p.x_cols, 0, p.first_col}, 0);
    float w[LOADS], a[ACTS], sum = 0.0f;
    u32 before = 0;
    for (u32 first = 0; first < n_cols + FLOAT_COLS; first += FLOAT_COLS) {
        // The tile that begins at `first` is loaded while the one before is added. It is padded
        // with zeros to a multiple of eight columns, as in float_dots.
        u32 width = first < n_cols ? min((n_cols - first + 7) & ~7u, FLOAT_COLS) : 0;
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            u32 col = first + at + i * A_ROW;
            w[i] = live && col < n_cols ? F::at(from, col) : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < ACTS; i++) {
            u32 col = first + threadIdx.x + i * THREADS;
            a[i] = col < n_cols ? __ldg(x + col) : 0.0f;
        }
        if (threadIdx.x < WARP) {
            u32 lane = threadIdx.x % 8;
            Shared<float> own = weights + threadIdx.x / 8 * FLOAT_STRIDE;
#pragma unroll 8
            for (u32 col = 0; col < before; col += 8) {
                sum = fmaf(acts[col + lane], own[col + lane], sum);
            }
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            u32 col = at + i * A_ROW;
            if (col < width) weights[row * FLOAT_STRIDE + col] = w[i];
        }
#pragma unroll
        for (u32 i = 0; i < ACTS; i++) {
            u32 col = threadIdx.x + i * THREADS;
            if (col < width) acts[col] = a[i];
        }
        __syncthreads();
        before = width;
    }
    if (threadIdx.x >= WARP) return;
    sum = tree8_threads(sum);
    row = first_row + threadIdx.x / 8;
    if (row >= n_rows || threadIdx.x % 8 != 0) return;
    put(p, row, row, sum);
}

#define MATVEC(NAME, F)                                                              \
    KERNEL(matvec_##NAME, THREADS, MatvecParams) { matvec<F, 1>(p); }                \
    KERNEL(matvec8_##NAME, AT_LEAST(3, THREADS), MatvecParams) { matvec<F, 8>(p); }

#define FLOAT_MATVEC(NAME, F)                                                        \
    KERNEL(matvec_##NAME, THREADS, MatvecParams) { float_matvec<F>(p); }             \
    KERNEL(matvec8_##NAME, AT_LEAST(3, THREADS), MatvecParams) { matvec<F, 8>(p); }

FOR_EACH_FORMAT(MATVEC)
FOR_EACH_FLOAT(FLOAT_MATVEC)
