// A matrix a head times that head's activations, as latent attention has them:
//
//   out[t, h, r] = weights[first + h·step + r] · x[t, h]
//
//   weights  rows of [all rows, cols] blocks of a format, `row_stride` bytes apart
//   x        records of quant/acts.cuh, [tokens, heads]
//   out      f32 [tokens, heads, n_rows]
//
// Twin: `Cpu::head_products` (src/backend/cpu/linear.rs), to the bit. A block takes some rows of a
// head for up to TOKENS tokens, one after the other: after the first, the rows come from L1.
//
// Expected bytes: the weights once a TOKENS tokens, 4.7 MB for 128 heads of 512 rows of 128 in Q4_K
// (DeepSeek's query side) of which the L2 holds all from one turn to the next.
#include "quant/floats.cuh"
#include "quant/formats.cuh"

static constexpr u32 THREADS = 256;
// Tokens of a block; HEAD_TOKENS in src/backend/gpu/heads.rs.
static constexpr u32 TOKENS = 8;

template <class F>
__device__ __forceinline__ void head_products(Global<const u8> weights, u64 row_stride, u64 first,
                                              u64 step, u32 n_rows, u32 n_cols, u32 lanes,
                                              Global<const u8> x, u32 n_tokens,
                                              Global<float> out) {
    u32 head = blockIdx.y, n_heads = gridDim.y;
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    bool live = row < n_rows;
    u64 at = first + head * step + (live ? row : 0);
    Global<const u8> rows[1] = {weights + at * row_stride};
    u32 end = min(n_tokens, (blockIdx.z + 1) * TOKENS);
    for (u32 t = blockIdx.z * TOKENS; t < end; t++) {
        u32 record = t * n_heads + head;
        float sum[1][1];
        Dots<F>::of(rows, live, n_cols, lanes, Records{x, n_cols, record, 0}, 1, sum);
        if (live && threadIdx.x % lanes == 0) {
            out[static_cast<u64>(record) * n_rows + row] = sum[0][0];
        }
    }
}

#define HEADS(NAME, F)                                                                      \
    KERNEL(head_products_##NAME, THREADS, Global<const u8> weights, u64 row_stride,         \
           u64 first, u64 step, u32 n_rows, u32 n_cols, u32 lanes, Global<const u8> x,      \
           u32 n_tokens, Global<float> out) {                                               \
        head_products<F>(weights, row_stride, first, step, n_rows, n_cols, lanes, x,        \
                         n_tokens, out);                                                    \
    }

FOR_EACH_FORMAT(HEADS)
FOR_EACH_FLOAT(HEADS)
