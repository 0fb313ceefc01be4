// Rows of an embedding table: out[t] = table[ids[t]], as f32.
//
// Twin: `quant::dequantize`, to the bit: a value is (d·scale)·code − dmin·min. The products are
// exact in f32 in every format; only the subtraction rounds. A thread decodes a part. Memory: for
// each token one row in and 4 bytes a value out.
#include "quant/floats.cuh"
#include "quant/formats.cuh"

static constexpr u32 THREADS = 128;

template <class F>
__device__ __forceinline__ void embed(Global<const u8> table, Global<const u32> ids, u32 cols,
                                      Global<float> out) {
    constexpr u32 VALUES = F::LEN / F::PARTS;
    u32 n = blockIdx.x * blockDim.x + threadIdx.x, p = n % F::PARTS;
    if (n >= cols / VALUES) return;
    Global<const u8> row = table + ids[blockIdx.y] * row_bytes<F>(cols);
    Global<const u8> block = row + static_cast<u64>(n / F::PARTS) * F::BYTES;
    Part<F::CHUNKS> part;
    F::part(block, p, part);
    float d = F::d(block, p), dmin = F::dmin(block);
    Global<float> to = out + (static_cast<u64>(blockIdx.y) * cols + n / F::PARTS * F::LEN);
#pragma unroll
    for (u32 c = 0; c < F::CHUNKS; c++) {
        float scale = F::SUB < F::UNIT ? d * static_cast<float>(part.scale[c]) : d;
        float min = F::UNIT == 256 && F::MINS ? dmin * static_cast<float>(part.min[c]) : dmin;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float v[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                i8 code = static_cast<i8>(part.q[4 * c + i] >> (8 * k));
                v[k] = scale * static_cast<float>(code);
                if constexpr (F::MINS) v[k] = v[k] - min;
            }
            as<float4>(to)[4 * F::chunk(p, c) + i] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
}

template <class F>
__device__ __forceinline__ void embed_floats(Global<const u8> table, Global<const u32> ids,
                                             u32 cols, Global<float> out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= cols) return;
    Global<const u8> row = table + ids[blockIdx.y] * row_bytes<F>(cols);
    out[static_cast<u64>(blockIdx.y) * cols + i] = F::at(row, i);
}

struct EmbedParams {
    // [vocabulary, cols] blocks of a format, without gaps
    Address<const u8> table;
    // [tokens]
    Address<const u32> ids;
    // [tokens, cols]
    Address<float> out;
    u32 cols;
    u32 unused;
};
static_assert(sizeof(EmbedParams) == 32);

#define EMBED(NAME, F) \
    KERNEL(embed_##NAME, THREADS, EmbedParams) { embed<F>(p.table, p.ids, p.cols, p.out); }
#define EMBED_FLOATS(NAME, F) \
    KERNEL(embed_##NAME, THREADS, EmbedParams) { embed_floats<F>(p.table, p.ids, p.cols, p.out); }

FOR_EACH_FORMAT(EMBED)
FOR_EACH_FLOAT(EMBED_FLOATS)
