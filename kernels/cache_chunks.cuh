// Elements of rows of the KV cache as halves, for tensor cores: of rows of F16 and of blocks.
#pragma once

#include "cache_rows.cuh"

__device__ __forceinline__ u32 pack(float low, float high) {
    return f32_to_f16(low) | static_cast<u32>(f32_to_f16(high)) << 16;
}

// Eight elements of a row from i on, as halves; four of CacheNibbles.
__device__ __forceinline__ uint4 load_chunk(const CacheF16&, Global<const u8> row, u32 i) {
    return __ldg(as<const uint4>(row) + i / 8);
}

__device__ __forceinline__ uint4 load_chunk(const CacheQ8_0&, Global<const u8> row, u32 i) {
    Global<const u16> block = as<const u16>(row + i / 32 * Q8_0_BYTES);
    float d = f16_to_f32(__ldg(block));
    u32 out[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        u32 two = __ldg(block + (1 + i % 32 / 2 + n));
        float low = static_cast<float>(static_cast<i8>(two)) * d;
        out[n] = pack(low, static_cast<float>(static_cast<i8>(two >> 8)) * d);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

__device__ __forceinline__ uint2 load_chunk(const CacheNibbles& type, Global<const u8> row, u32 i) {
    float w[4];
    CacheNibbles::widen(type.quad(row, i), w);
    return make_uint2(pack(w[0], w[1]), pack(w[2], w[3]));
}
