// Stores new keys or values in the KV cache. Twin: `RowsMut::store`
// (src/backend/cpu/attention/rows.rs), to the bit. Memory traffic: x in, rows out.
#include "cache_rows.cuh"

static constexpr u32 THREADS = 128;

struct CacheStoreParams {
    // [tokens, heads, dim]
    Address<const float> x;
    // The position of the first token. It is in memory, so that one captured graph serves every
    // position.
    Address<const u32> past;
    // [heads, n_ctx] rows of `row_bytes`. Tokens whose position is n_ctx or more are left out.
    Address<u8> rows;
    u32 tokens;
    u32 heads;
    u32 dim;
    u32 row_bytes;
    u32 n_ctx;
    // CacheType, for cache_store_nibbles.
    u32 type_code;
};
static_assert(sizeof(CacheStoreParams) == 48);

// The element of x that a thread takes, and where its row begins.
struct Target {
    u64 from;
    u32 i;
    u64 to;
    bool live;
};

__device__ __forceinline__ Target target(const CacheStoreParams& p) {
    u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 i = static_cast<u32>(index % p.dim);
    u64 at = index / p.dim;
    u32 head = static_cast<u32>(at % p.heads);
    u64 token = at / p.heads, position = p.past[0] + token;
    u64 to = (static_cast<u64>(head) * p.n_ctx + position) * p.row_bytes;
    return Target{index, i, to, token < p.tokens && position < p.n_ctx};
}

KERNEL(cache_store_f32, THREADS, CacheStoreParams) {
    Target at = target(p);
    if (at.live) as<float>(p.rows + at.to)[at.i] = p.x[at.from];
}

KERNEL(cache_store_f16, THREADS, CacheStoreParams) {
    Target at = target(p);
    if (!at.live) return;
    float value = p.x[at.from];
    u32 bits = __float_as_uint(value);
    // A NaN keeps its sign and upper bits and becomes a quiet one, as on the CPU.
    u32 nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    as<u16>(p.rows + at.to)[at.i] = value == value ? f32_to_f16(value) : static_cast<u16>(nan);
}

KERNEL(cache_store_bf16, THREADS, CacheStoreParams) {
    Target at = target(p);
    if (!at.live) return;
    float value = p.x[at.from];
    u32 bits = __float_as_uint(value);
    // To nearest, ties to even; a NaN becomes a quiet one.
    u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    as<u16>(p.rows + at.to)[at.i] = static_cast<u16>(value == value ? rounded : bits >> 16 | 0x40u);
}

// 2⁻¹²⁰. A block whose largest magnitude is less becomes zeros, since 127/x must be finite.
static constexpr float SMALLEST = 7.52316385e-37f;

// A warp takes a block of 32 elements.
KERNEL(cache_store_q8_0, THREADS, CacheStoreParams) {
    Target at = target(p);
    float value = at.live ? p.x[at.from] : 0.0f;
    // As integers magnitudes are in order, with infinity and NaN above all numbers.
    u32 largest_bits = __float_as_uint(value) & 0x7fffffffu;
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        largest_bits = max(largest_bits, __shfl_xor_sync(FULL_WARP, largest_bits, step));
    }
    if (!at.live) return;
    float largest = __uint_as_float(largest_bits), inverse = 127.0f / largest;
    u16 scale = f32_to_f16(largest / 127.0f);
    // Numbers too small to scale become zeros; a block with a NaN or an infinity becomes NaN.
    bool odd = largest_bits >= 0x7f800000u, zero = largest < SMALLEST;
    i32 q = odd || zero ? 0 : __float2int_rn(value * inverse);
    Global<u8> block = p.rows + at.to + at.i / 32 * Q8_0_BYTES;
    as<i8>(block + 2)[at.i % 32] = static_cast<i8>(q);
    if (at.i % 32 == 0) as<u16>(block)[0] = odd ? 0x7e00 : zero ? 0 : scale;
}

// ---- blocks of four or five bits

// Numbers from here on are out of every scale's reach: 2²³.
static constexpr u32 TOO_LARGE = 0x4b000000u;

// The block that a warp makes of 32 numbers: scale, offset, and the thread's code.
struct Rounded {
    float d, m;
    u32 code;
};

__device__ __forceinline__ float finite_inverse(float x) {
    float inverse = 1.0f / x;
    return inverse - inverse == 0.0f ? inverse : 0.0f;
}

// The first of the values of largest magnitude.
__device__ __forceinline__ float extreme(float x) {
    u32 size = __float_as_uint(x) & 0x7fffffffu, largest = size;
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    }
    u32 first = __ffs(static_cast<i32>(__ballot_sync(FULL_WARP, size == largest))) - 1;
    return __shfl_sync(FULL_WARP, x, first);
}

// `x = d·(code − levels)`. Twin: `centred` of src/quant/legacy/plain.rs.
__device__ __forceinline__ Rounded round_centred(float x, u32 levels) {
    float n = static_cast<float>(levels), d = extreme(x) / -n;
    u32 code = static_cast<u32>(x * finite_inverse(d) + (n + 0.5f));
    return Rounded{d, 0.0f, min(code, 2 * levels - 1)};
}

// `x = d·code + m`. Twin: `offset` of src/quant/legacy/plain.rs.
__device__ __forceinline__ Rounded round_offset(float x, u32 top) {
    float lowest = -warp_max(-x), d = (warp_max(x) - lowest) / static_cast<float>(top);
    u32 code = static_cast<u32>((x - lowest) * finite_inverse(d) + 0.5f);
    return Rounded{d, lowest, min(code, top)};
}

// The entry of IQ4_NL's table nearest to x, and its number.
struct Entry {
    float value;
    u32 code;
};

__device__ __forceinline__ Entry nearest_entry(float x) {
    constexpr float VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
    Entry entry = {VALUES[0], 0};
#pragma unroll
    for (u32 i = 0; i < 15; i++) {
        if (!(x > 0.5f * (VALUES[i] + VALUES[i + 1]))) continue;
        entry = Entry{VALUES[i + 1], i + 1};
    }
    return entry;
}

// The sum of a warp's values in eight lanes, each in f32, and of the lanes in f64.
__device__ __forceinline__ double lane_sum(float value) {
    float lane = 0.0f;
    double sum = 0.0;
    for (u32 i = threadIdx.x % 8; i < WARP; i += 8) lane += __shfl_sync(FULL_WARP, value, i);
    for (u32 i = 0; i < 8; i++) sum += static_cast<double>(__shfl_sync(FULL_WARP, lane, i));
    return sum;
}

// The best scale so far, in units of the extreme. Twin: `Fit` of src/quant/search.rs.
struct Fit {
    double scale, gain;
};

// Tries `extreme / inverse`. Twin: `improve` of src/quant/iq/table.rs.
__device__ __forceinline__ void improve(Fit& fit, float x, float weight, float inverse,
                                        float extreme) {
    float value = nearest_entry(x * (inverse / extreme)).value;
    double wqx = lane_sum(weight * value * (x / extreme)), wqq = lane_sum(weight * value * value);
    double gain = wqx * wqx / wqq;
    if (wqq > 0.0 && gain > fit.gain) fit = Fit{wqx / wqq, gain};
}

// `x = d·VALUES[code]`. Twin: src/quant/iq/iq4_nl.rs and `scale` of src/quant/iq/table.rs.
__device__ __forceinline__ Rounded round_to_table(float x) {
    float squares = 0.0f, largest = extreme(x), scale = 0.0f;
    for (u32 i = 0; i < WARP; i++) squares += __shfl_sync(FULL_WARP, x * x, i);
    float weight = sqrtf(squares / static_cast<float>(WARP)) + fabsf(x);
    if (fabsf(largest) >= 1e-15f) {
        Fit fit = {0.0, 0.0};
#pragma unroll 1
        for (u32 trial = 0; trial < 12; trial++) {
            float inverse = (trial < 5 ? -135.0f : 85.0f) + 4.0f * static_cast<float>(trial);
            if (trial >= 10) inverse = static_cast<float>(1.0 / fit.scale);
            improve(fit, x, weight, inverse, largest);
        }
        scale = static_cast<float>(fit.scale) * largest;
    }
    float inverse = finite_inverse(f16_to_f32(f32_to_f16(scale)));
    return Rounded{scale, 0.0f, nearest_entry(x * inverse).code};
}

// A warp takes a block of 32 elements. Twin: `store_block` of rows.rs.
KERNEL(cache_store_nibbles, THREADS, CacheStoreParams) {
    Target at = target(p);
    // The same in all threads of the warp.
    if (!at.live) return;
    CacheNibbles format(p.type_code);
    float value = p.x[at.from] + 0.0f;
    bool odd = (__float_as_uint(value) & 0x7fffffffu) >= TOO_LARGE;
    Rounded rounded = {NAN, 0.0f, 0};
    if (!__any_sync(FULL_WARP, odd)) {
        if (format.is_table) {
            rounded = round_to_table(value);
        } else if (format.has_offset) {
            rounded = round_offset(value, format.has_fifth ? 31 : 15);
        } else {
            rounded = round_centred(value, format.has_fifth ? 16 : 8);
        }
    }
    u32 lane = threadIdx.x % WARP, other = __shfl_xor_sync(FULL_WARP, rounded.code, 16);
    u32 fifth = __ballot_sync(FULL_WARP, rounded.code >> 4);
    Global<u8> block = p.rows + at.to + at.i / 32 * format.bytes();
    if (lane < 16) {
        block[format.low + lane] = static_cast<u8>((rounded.code & 15) | other << 4);
    }
    if (format.has_fifth && lane < 4) {
        block[format.low - 4 + lane] = static_cast<u8>(fifth >> (8 * lane));
    }
    if (lane == 0) {
        u16 d = f32_to_f16(rounded.d);
        as<u16>(block)[0] = rounded.d == rounded.d ? d : static_cast<u16>(0x7e00);
        if (format.has_offset) as<u16>(block + 2)[0] = f32_to_f16(rounded.m);
    }
}
