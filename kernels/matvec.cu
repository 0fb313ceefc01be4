// Matrix times the activations of one token, or of up to eight:
//
//   out[t, r] = weights[r] · x[t] (+ bias[r])
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
    u32 unused;
    // Records of quant/acts.cuh with `x_cols` columns each, of which n_cols are read from first_col
    // on.
    Address<const u8> x;
    u32 x_cols;
    u32 first_col;
    // [n_rows] or null
    Address<const float> bias;
    // [tokens, out_stride]
    Address<float> out;
    // For matvec8.
    u32 n_tokens;
    u32 out_stride;
};
static_assert(sizeof(MatvecParams) == 72);

template <class F, u32 TOKENS>
__device__ __forceinline__ void matvec(const MatvecParams& p, u32 n_tokens, u32 out_stride) {
    u32 lanes = p.lanes, row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    bool live = row < p.n_rows;
    float sum[1][TOKENS];
    Global<const u8> rows[1] = {p.weights + (live ? row : 0) * p.row_stride};
    Records x = {p.x, p.x_cols, 0, p.first_col};
    Dots<F>::of(rows, live, p.n_cols, lanes, x, n_tokens, sum);
    if (!live || threadIdx.x % lanes != 0) return;
    Global<const float> bias = p.bias;
    Global<float> out = p.out;
#pragma unroll
    for (u32 t = 0; t < TOKENS; t++) {
        if (TOKENS > 1 && t >= n_tokens) break;
        out[static_cast<u64>(t) * out_stride + row] = bias ? sum[0][t] + bias[row] : sum[0][t];
    }
}

#define MATVEC(NAME, F)                                                              \
    KERNEL(matvec_##NAME, THREADS, MatvecParams) { matvec<F, 1>(p, 1, 0); }          \
    KERNEL(matvec8_##NAME, THREADS, MatvecParams) {                                  \
        matvec<F, 8>(p, p.n_tokens, p.out_stride);                                   \
    }

FOR_EACH_FORMAT(MATVEC)
FOR_EACH_FLOAT(MATVEC)
