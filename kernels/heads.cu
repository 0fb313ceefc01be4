// One matrix for each head, times that head's activations, as latent attention needs them:
//
//   out[t, h, r] = weights[first + h·step + r] · x[t, h]
//
// Twin: `Cpu::head_products` (src/backend/cpu/linear.rs), to the bit. A block takes some rows of a
// head for up to TOKENS tokens, one after the other: after the first, the rows come from L1.
//
// Expected bytes: the weights once for every TOKENS tokens, 4.7 MB for 128 heads of 512 rows of 128
// in Q4_K (DeepSeek's query side). L2 keeps all of that.
#include "quant/floats.cuh"
#include "quant/formats.cuh"

static constexpr u32 THREADS = 256;
// Tokens of a block; HEAD_TOKENS in src/backend/gpu/heads.rs.
static constexpr u32 TOKENS = 8;

struct HeadProductsParams {
    // [all rows, n_cols] blocks of a format, rows `row_stride` bytes apart
    Address<const u8> weights;
    // Records of quant/acts.cuh, [tokens, heads].
    Address<const u8> x;
    // [tokens, heads, n_rows]
    Address<float> out;
    u64 row_stride;
    // Head h has the rows from first + h·step on.
    u64 first;
    u64 step;
    u32 n_rows;
    u32 n_cols;
    // Threads of a row (`lanes_a_row` in src/backend/gpu/matvec.rs).
    u32 lanes;
    u32 n_tokens;
};
static_assert(sizeof(HeadProductsParams) == 64);

template <class F>
__device__ __forceinline__ void head_products(const HeadProductsParams& p) {
    u32 head = blockIdx.y, n_heads = gridDim.y, lanes = p.lanes;
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    bool live = row < p.n_rows;
    u64 at = p.first + head * p.step + (live ? row : 0);
    Global<const u8> rows[1] = {p.weights + at * p.row_stride};
    u32 end = min(p.n_tokens, (blockIdx.z + 1) * TOKENS);
    for (u32 t = blockIdx.z * TOKENS; t < end; t++) {
        u32 record = t * n_heads + head;
        float sum[1][1];
        Dots<F>::of(rows, live, p.n_cols, lanes, Records{p.x, p.n_cols, record, 0}, 1, sum);
        if (live && threadIdx.x % lanes == 0) {
            p.out[static_cast<u64>(record) * p.n_rows + row] = sum[0][0];
        }
    }
}

#define HEADS(NAME, F) \
    KERNEL(head_products_##NAME, AT_LEAST(3, THREADS), HeadProductsParams) { head_products<F>(p); }

FOR_EACH_FORMAT(HEADS)
FOR_EACH_FLOAT(HEADS)
