// Stores activations in the records that products read (quant/acts.cuh). Twins:
// `quantize_activations` of the formats Q8_0 and Q8_K in src/quant, to the bit.
//
// A thread takes eight values: a warp a block of 256, four threads a block of 32. Memory traffic is
// 4 bytes in and 1.1 out for each value, a few kilobytes, so a launch takes little but its latency.
#include "quant/quantize.cuh"

static constexpr u32 THREADS = 128;

// Blocks of LEN values, 32 or 256; the columns are a multiple of it.
template <u32 LEN>
__device__ __forceinline__ void quantize(Global<const float> x, u32 x_stride, u32 cols,
                                         Global<u8> out) {
    u32 token = blockIdx.y, first = (blockIdx.x * blockDim.x + threadIdx.x) * EACH;
    bool live = first < cols;
    float v[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        v[i] = live ? x[static_cast<u64>(token) * x_stride + first + i] : 0.0f;
    }
    u64 at = static_cast<u64>(token) * ActLayout<LEN>(cols).bytes;
    quantize_eight<LEN>(v, first, cols, live, out + at);
}

struct QuantizeParams {
    // [tokens, x_stride], of which the first `cols` of a token are stored
    Address<const float> x;
    // Records of `cols` columns.
    Address<u8> out;
    u32 x_stride;
    u32 cols;
};
static_assert(sizeof(QuantizeParams) == 24);

KERNEL(quantize_q8_0, THREADS, QuantizeParams) { quantize<32>(p.x, p.x_stride, p.cols, p.out); }

KERNEL(quantize_q8_k, THREADS, QuantizeParams) { quantize<256>(p.x, p.x_stride, p.cols, p.out); }

// Records of f32 are the values themselves.
KERNEL(quantize_f32, THREADS, QuantizeParams) {
    u32 token = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    Global<float> record = as<float>(p.out + static_cast<u64>(token) * to_line(4 * p.cols));
    if (i < p.cols) record[i] = p.x[static_cast<u64>(token) * p.x_stride + i];
}
