// Matrix times the activations of one token, or of up to eight:
//
//   out[t, r] = weights[r] · x[t] (+ bias[r])
//
//   weights  [rows, cols] blocks of a format, rows `row_stride` bytes apart
//   x        records of quant/acts.cuh, of which columns first_col … first_col + cols are read
//   out      f32 [tokens, out_stride]
//
// Twin: `Kernels::matmul` (src/simd/scalar.rs), to the bit. How the threads of a warp share a row
// is in quant/rows.cuh. Row and stride are multiples of what F::ALIGN says (formats of 16·n bytes a
// block are read 16 bytes at a time).
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

template <class F, u32 TOKENS>
__device__ __forceinline__ void matvec(Global<const u8> weights, u64 row_stride, u32 n_rows,
                                       u32 n_cols, u32 lanes, const Records& x, u32 n_tokens,
                                       Global<const float> bias, Global<float> out,
                                       u32 out_stride) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    bool live = row < n_rows;
    float sum[1][TOKENS];
    Global<const u8> rows[1] = {weights + (live ? row : 0) * row_stride};
    Dots<F>::of(rows, live, n_cols, lanes, x, n_tokens, sum);
    if (!live || threadIdx.x % lanes != 0) return;
#pragma unroll
    for (u32 t = 0; t < TOKENS; t++) {
        if (TOKENS > 1 && t >= n_tokens) break;
        out[static_cast<u64>(t) * out_stride + row] = bias ? sum[0][t] + bias[row] : sum[0][t];
    }
}

// `lanes` threads take a row (`lanes_a_row` in src/backend/gpu/matvec.rs).
#define MATVEC(NAME, F)                                                                     \
    KERNEL(matvec_##NAME, THREADS, Global<const u8> weights, u64 row_stride, u32 n_rows,    \
           u32 n_cols, u32 lanes, Global<const u8> x, u32 x_cols, u32 first_col,            \
           Global<const float> bias, Global<float> out) {                                   \
        matvec<F, 1>(weights, row_stride, n_rows, n_cols, lanes,                            \
                     Records{x, x_cols, 0, first_col}, 1, bias, out, 0);                    \
    }                                                                                       \
    KERNEL(matvec8_##NAME, THREADS, Global<const u8> weights, u64 row_stride, u32 n_rows,   \
           u32 n_cols, u32 lanes, Global<const u8> x, u32 x_cols, u32 first_col,            \
           u32 n_tokens, Global<const float> bias, Global<float> out, u32 out_stride) {     \
        matvec<F, 8>(weights, row_stride, n_rows, n_cols, lanes,                            \
                     Records{x, x_cols, 0, first_col}, n_tokens, bias, out, out_stride);    \
    }

FOR_EACH_FORMAT(MATVEC)
FOR_EACH_FLOAT(MATVEC)
