// Stores elements in rows of the KV cache, of nine types. Twin: `RowsMut::store`
// (src/backend/cpu/attention/rows.rs), to the bit.
#pragma once

#include "cache_rows.cuh"

__device__ __forceinline__ void store_f16(Global<u8> row, u32 i, float value) {
    u32 bits = __float_as_uint(value);
    // A NaN keeps its sign and upper bits and becomes a quiet one, as on the CPU.
    u32 nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    as<u16>(row)[i] = value == value ? f32_to_f16(value) : static_cast<u16>(nan);
}

__device__ __forceinline__ void store_bf16(Global<u8> row, u32 i, float value) {
    u32 bits = __float_as_uint(value);
    // To nearest, ties to even; a NaN becomes a quiet one.
    u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    as<u16>(row)[i] = static_cast<u16>(value == value ? rounded : bits >> 16 | 0x40u);
}

// 2⁻¹²⁰. A block whose largest magnitude is less becomes zeros, since 127/x must be finite.
static constexpr float SMALLEST = 7.52316385e-37f;

// A warp takes a block of 32 elements.
__device__ __forceinline__ void store_q8_0(Global<u8> row, u32 i, float value, bool live) {
    // As integers magnitudes are in order, with infinity and NaN above all numbers.
    u32 largest_bits = __float_as_uint(value) & 0x7fffffffu;
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        largest_bits = max(largest_bits, __shfl_xor_sync(FULL_WARP, largest_bits, step));
    }
    if (!live) return;
    float largest = __uint_as_float(largest_bits), inverse = 127.0f / largest;
    u16 scale = f32_to_f16(largest / 127.0f);
    // Numbers too small to scale become zeros; a block with a NaN or an infinity becomes NaN.
    bool odd = largest_bits >= 0x7f800000u, zero = largest < SMALLEST;
    i32 q = odd || zero ? 0 : __float2int_rn(value * inverse);
    Global<u8> block = row + i / 32 * Q8_0_BYTES;
    as<i8>(block + 2)[i % 32] = static_cast<i8>(q);
    if (i % 32 == 0) as<u16>(block)[0] = odd ? 0x7e00 : zero ? 0 : scale;
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
__device__ __forceinline__ void store_nibbles(u32 type, Global<u8> row, u32 i, float x) {
    CacheNibbles format(type);
    float value = x + 0.0f;
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
    u32 lane = i % WARP, other = __shfl_xor_sync(FULL_WARP, rounded.code, 16);
    u32 fifth = __ballot_sync(FULL_WARP, rounded.code >> 4);
    Global<u8> block = row + i / 32 * format.bytes();
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
