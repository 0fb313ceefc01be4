// New keys or values into the KV cache:
//
//   x        f32 [tokens, heads, dim]
//   past     u32 [1]: the position of the first token. It is read from memory and not passed, so
//            that a graph that was captured once serves every position.
//   rows     [heads, n_ctx] rows, `row` bytes from one to the next
//
// Twin: `RowsMut::store` (src/backend/cpu/attention/rows.rs), to the bit. Tokens from n_ctx on have
// no place and are left out. Memory traffic: x in, rows out.
#include "cache_rows.cuh"

static constexpr u32 THREADS = 128;

// Which element of x a thread takes, and where its row begins.
struct Place {
    u64 from;
    u32 i;
    u64 to;
    bool live;
};

__device__ __forceinline__ Place place(Global<const u32> past, u32 tokens, u32 heads, u32 dim,
                                       u32 row, u32 n_ctx) {
    u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 i = static_cast<u32>(index % dim);
    u64 at = index / dim;
    u32 head = static_cast<u32>(at % heads);
    u64 token = at / heads, position = past[0] + token;
    u64 to = (static_cast<u64>(head) * n_ctx + position) * row;
    return Place{index, i, to, token < tokens && position < n_ctx};
}

KERNEL(cache_store_f32, THREADS, Global<const float> x, Global<const u32> past, u32 tokens,
       u32 heads, u32 dim, Global<u8> rows, u32 row, u32 n_ctx) {
    Place p = place(past, tokens, heads, dim, row, n_ctx);
    if (p.live) as<float>(rows + p.to)[p.i] = x[p.from];
}

KERNEL(cache_store_f16, THREADS, Global<const float> x, Global<const u32> past, u32 tokens,
       u32 heads, u32 dim, Global<u8> rows, u32 row, u32 n_ctx) {
    Place p = place(past, tokens, heads, dim, row, n_ctx);
    if (!p.live) return;
    float value = x[p.from];
    u32 bits = __float_as_uint(value);
    // A NaN keeps its sign and upper bits and becomes a quiet one, as on the CPU.
    u32 nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    as<u16>(rows + p.to)[p.i] = value == value ? f32_to_f16(value) : static_cast<u16>(nan);
}

KERNEL(cache_store_bf16, THREADS, Global<const float> x, Global<const u32> past, u32 tokens,
       u32 heads, u32 dim, Global<u8> rows, u32 row, u32 n_ctx) {
    Place p = place(past, tokens, heads, dim, row, n_ctx);
    if (!p.live) return;
    float value = x[p.from];
    u32 bits = __float_as_uint(value);
    // To nearest, ties to even; a NaN becomes a quiet one.
    u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    as<u16>(rows + p.to)[p.i] = static_cast<u16>(value == value ? rounded : bits >> 16 | 0x40u);
}

// Below this, a block is all zeros: 127/x must be finite. 2⁻¹²⁰.
static constexpr float SMALLEST = 7.52316385e-37f;

// A warp takes a block of 32 elements.
KERNEL(cache_store_q8_0, THREADS, Global<const float> x, Global<const u32> past, u32 tokens,
       u32 heads, u32 dim, Global<u8> rows, u32 row, u32 n_ctx) {
    Place p = place(past, tokens, heads, dim, row, n_ctx);
    float value = p.live ? x[p.from] : 0.0f;
    // As integers magnitudes are in order, with infinity and NaN above all numbers.
    u32 largest_bits = __float_as_uint(value) & 0x7fffffffu;
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        largest_bits = max(largest_bits, __shfl_xor_sync(FULL_WARP, largest_bits, step));
    }
    if (!p.live) return;
    float largest = __uint_as_float(largest_bits), inverse = 127.0f / largest;
    u16 scale = f32_to_f16(largest / 127.0f);
    // What cannot be scaled: numbers too small become zeros, a block with a NaN or an infinity NaN.
    bool odd = largest_bits >= 0x7f800000u, zero = largest < SMALLEST;
    i32 q = odd || zero ? 0 : __float2int_rn(value * inverse);
    Global<u8> block = rows + p.to + p.i / 32 * Q8_0_BYTES;
    as<i8>(block + 2)[p.i % 32] = static_cast<i8>(q);
    if (p.i % 32 == 0) as<u16>(block)[0] = odd ? 0x7e00 : zero ? 0 : scale;
}
