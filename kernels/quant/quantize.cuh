// Stores eight values of a thread in the records that products read (acts.cuh). Twins:
// `quantize_activations` of the formats Q8_0 and Q8_K in src/quant, to the bit. A warp takes a
// block of 256, four threads a block of 32.
#pragma once
#include "acts.cuh"

static constexpr u32 EACH = 8;

// 2⁻¹²⁰. A block whose largest magnitude is less becomes zeros, since 127/x must be finite.
static constexpr float SMALLEST = 7.52316385e-37f;

// The scale to store and the one to multiply with, by the largest magnitude of a block.
template <u32 LEN>
__device__ __forceinline__ float2 activation_scale(u32 largest_bits) {
    float largest = __uint_as_float(largest_bits);
    if (largest_bits >= 0x7f800000u) return make_float2(__uint_as_float(0x7fc00000u), 0.0f);
    if (largest < SMALLEST) return make_float2(0.0f, 0.0f);
    float inverse = 127.0f / largest;
    if (LEN == 256) return make_float2(1.0f / inverse, inverse);
    return make_float2(f16_to_f32(f32_to_f16(largest / 127.0f)), inverse);
}

// Values `first` and the next seven of a row of `cols`, in blocks of LEN values, 32 or 256. All
// threads of the warp take part, each with the next eight values; those that are not live store
// nothing.
template <u32 LEN>
__device__ __forceinline__ void quantize_eight(const float (&v)[EACH], u32 first, u32 cols,
                                               bool live, Global<u8> record) {
    ActLayout<LEN> at(cols);
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        // As integers magnitudes are in order, with infinity and NaN above all numbers.
        largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
    }
#pragma unroll
    for (u32 step = 1; step < LEN / EACH; step *= 2) {
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    }
    float2 scale = activation_scale<LEN>(largest);
    u32 words[2] = {0, 0};
    i32 sum = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        i32 q = scale.y == 0.0f ? 0 : __float2int_rn(v[i] * scale.y);
        words[i / 4] |= (static_cast<u32>(q) & 0xff) << (8 * (i % 4));
        sum += q;
    }
    i32 sum16 = sum + __shfl_xor_sync(FULL_WARP, sum, 1);
    i32 sum32 = sum16 + __shfl_xor_sync(FULL_WARP, sum16, 2);
    if (!live) return;
    as<uint2>(record)[first / EACH] = make_uint2(words[0], words[1]);
    if (first % LEN == 0) as<float>(record + at.scales)[first / LEN] = scale.x;
    if (first % 32 == 0) as<i16>(record + at.sums32)[first / 32] = static_cast<i16>(sum32);
    if (LEN == 256 && first % 16 == 0) {
        as<i16>(record + at.sums16)[first / 16] = static_cast<i16>(sum16);
    }
}
