// Reads rows of the KV cache: keys or values [heads, n_ctx, row], of nine types. Twin: `Rows::tile`
// (src/backend/cpu/attention/rows.rs).
#pragma once

#include "quant/tables.cuh"

// As `DeviceRows::type_code` (src/backend/gpu/cache.rs) numbers them.
enum CacheType : u32 {
    CACHE_F32 = 0,
    CACHE_F16 = 1,
    CACHE_BF16 = 2,
    CACHE_Q8_0 = 3,
    CACHE_Q4_0 = 4,
    CACHE_Q4_1 = 5,
    CACHE_Q5_0 = 6,
    CACHE_Q5_1 = 7,
    CACHE_IQ4_NL = 8,
};

// A block of Q8_0: an f16 scale and 32 signed bytes.
static constexpr u32 Q8_0_BYTES = 34;

// Each type reads
//
//   one(row, i)             an element
//   Quad, quad(row, i)      elements i … i + 3 as they are stored, i a multiple of four; the row
//                           begins on a multiple of what four elements take (blocks: anywhere)
//   widen(quad, w)          them as f32
//   lanes(row, lane, j, w)  elements lane + 8j, lane + 8(j + 1) … of a row, j a multiple of four:
//                           of a block, one scale; types without blocks have it from `one`

struct CacheF32 {
    using Quad = float4;
    static __device__ __forceinline__ float one(Global<const u8> row, u32 i) {
        return __ldg(as<const float>(row) + i);
    }
    static __device__ __forceinline__ Quad quad(Global<const u8> row, u32 i) {
        return __ldg(as<const float4>(row) + i / 4);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
};

struct CacheF16 {
    using Quad = uint2;
    static __device__ __forceinline__ float one(Global<const u8> row, u32 i) {
        return f16_to_f32(__ldg(as<const u16>(row) + i));
    }
    static __device__ __forceinline__ Quad quad(Global<const u8> row, u32 i) {
        return __ldg(as<const uint2>(row) + i / 4);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = f16_to_f32(static_cast<u16>(v.x)), w[1] = f16_to_f32(static_cast<u16>(v.x >> 16));
        w[2] = f16_to_f32(static_cast<u16>(v.y)), w[3] = f16_to_f32(static_cast<u16>(v.y >> 16));
    }
};

struct CacheBF16 {
    using Quad = uint2;
    static __device__ __forceinline__ float one(Global<const u8> row, u32 i) {
        return bf16_to_f32(__ldg(as<const u16>(row) + i));
    }
    static __device__ __forceinline__ Quad quad(Global<const u8> row, u32 i) {
        return __ldg(as<const uint2>(row) + i / 4);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = __uint_as_float(v.x << 16), w[1] = __uint_as_float(v.x & 0xffff0000u);
        w[2] = __uint_as_float(v.y << 16), w[3] = __uint_as_float(v.y & 0xffff0000u);
    }
};

struct CacheQ8_0 {
    // Codes, and the scale's bits.
    using Quad = uint2;
    static __device__ __forceinline__ float one(Global<const u8> row, u32 i) {
        Global<const u8> block = row + i / 32 * Q8_0_BYTES;
        float d = f16_to_f32(__ldg(as<const u16>(block)));
        return static_cast<float>(__ldg(as<const i8>(block + 2) + i % 32)) * d;
    }
    static __device__ __forceinline__ Quad quad(Global<const u8> row, u32 i) {
        Global<const u16> block = as<const u16>(row + i / 32 * Q8_0_BYTES);
        u32 at = 1 + i % 32 / 2;
        u32 low = __ldg(block + at), high = __ldg(block + (at + 1));
        return make_uint2(low | high << 16, __ldg(block));
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        float d = f16_to_f32(static_cast<u16>(v.y));
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            w[e] = static_cast<float>(static_cast<i8>(v.x >> (8 * e))) * d;
        }
    }
    static __device__ __forceinline__ void lanes(Global<const u8> row, u32 lane, u32 first,
                                                 float (&w)[4]) {
        Global<const u8> block = row + first / 4 * Q8_0_BYTES;
        float d = f16_to_f32(__ldg(as<const u16>(block)));
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            w[n] = static_cast<float>(__ldg(as<const i8>(block + 2) + (lane + 8 * n))) * d;
        }
    }
};

// Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL, chosen at run time. A block is an f16 scale, an f16 offset and
// four bytes of fifth bits if the format has them, and 16 bytes of low bits (src/quant/packing.rs).
// The product of scale and code is exact, so one fma equals the CPU's product and sum.
struct CacheNibbles {
    // Four codes as signed bytes; bits of the scale and of the offset, which is −0 without one.
    using Quad = uint2;
    // The offset of the low bits, which end a block; the number subtracted from each of four codes.
    u32 low, middle;
    bool has_offset, has_fifth, is_table;

    __device__ __forceinline__ explicit CacheNibbles(u32 type) {
        has_offset = type == CACHE_Q4_1 || type == CACHE_Q5_1;
        has_fifth = type == CACHE_Q5_0 || type == CACHE_Q5_1;
        is_table = type == CACHE_IQ4_NL;
        low = 2 + (has_offset ? 2 : 0) + (has_fifth ? 4 : 0);
        middle = has_offset ? 0 : has_fifth ? 0x10101010u : 0x08080808u;
    }
    __device__ __forceinline__ u32 bytes() const { return low + 16; }
    __device__ __forceinline__ u32 halves(Global<const u8> block) const {
        u32 offset = has_offset ? __ldg(as<const u16>(block + 2)) : 0x8000u;
        return __ldg(as<const u16>(block)) | offset << 16;
    }
    // Four codes by their low bits and, in each byte's lowest bit, the fifth.
    __device__ __forceinline__ u32 codes(u32 bits, u32 fifth) const {
        u32 pairs = bits | bits >> 4;
        if (is_table) return look_up_four(IQ4_VALUES, (pairs & 0xff) | (pairs >> 8 & 0xff00));
        return bytes_minus(bits | fifth << 4, middle);
    }
    static __device__ __forceinline__ float value(const Quad& v, u32 e) {
        float d = f16_to_f32(static_cast<u16>(v.y)), m = f16_to_f32(static_cast<u16>(v.y >> 16));
        return fmaf(static_cast<float>(static_cast<i8>(v.x >> (8 * e))), d, m);
    }

    __device__ __forceinline__ Quad quad(Global<const u8> row, u32 i) const {
        Global<const u8> block = row + i / 32 * bytes();
        Global<const u16> two = as<const u16>(block + (low + i % 16));
        u32 four = __ldg(two) | static_cast<u32>(__ldg(two + 1)) << 16;
        u32 fifth = has_fifth ? __ldg(block + (low - 4 + i % 32 / 8)) >> (i % 8) : 0;
        four = four >> (i % 32 / 16 * 4) & 0x0f0f0f0fu;
        return make_uint2(codes(four, spread_bits(fifth)), halves(block));
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
#pragma unroll
        for (u32 e = 0; e < 4; e++) w[e] = value(v, e);
    }
    __device__ __forceinline__ void lanes(Global<const u8> row, u32 lane, u32 first,
                                          float (&w)[4]) const {
        Global<const u8> block = row + first / 4 * bytes();
        u32 four = __ldg(block + (low + lane)) | __ldg(block + (low + lane + 8)) << 8;
        four = (four & 0x0f0fu) | (four & 0xf0f0u) << 12;
        u32 fifth = 0;
        if (has_fifth) {
            Global<const u16> two = as<const u16>(block + (low - 4));
            u32 bits = __ldg(two) | static_cast<u32>(__ldg(two + 1)) << 16;
            fifth = bits >> lane & 0x01010101u;
        }
        widen(make_uint2(codes(four, fifth), halves(block)), w);
    }
};

// Rows of any type and length, that begin anywhere.
struct CacheLoose {
    using Quad = float4;
    u32 type;

    __device__ __forceinline__ float one(Global<const u8> row, u32 i) const {
        switch (type) {
            case CACHE_F32: return CacheF32::one(row, i);
            case CACHE_F16: return CacheF16::one(row, i);
            case CACHE_BF16: return CacheBF16::one(row, i);
            case CACHE_Q8_0: return CacheQ8_0::one(row, i);
            default: return CacheNibbles::value(CacheNibbles(type).quad(row, i / 4 * 4), i % 4);
        }
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        CacheF32::widen(v, w);
    }
};

// The quad from element i of a row of `dim` elements on, zeros past its end.
template <class V>
__device__ __forceinline__ typename V::Quad load_quad(const V& type, Global<const u8> row, u32 i,
                                                      u32) {
    return type.quad(row, i);
}

// By four loads. Such rows are rare, so one function serves all kernels.
static __device__ __noinline__ float4 load_loose(u32 type, Global<const u8> row, u32 i, u32 dim) {
    CacheLoose rows = {type};
    float w[4] = {};
#pragma unroll 1
    for (u32 n = 0; n < 4 && i + n < dim; n++) {
        float element = rows.one(row, i + n);
#pragma unroll
        for (u32 k = 0; k < 4; k++) w[k] = k == n ? element : w[k];
    }
    return make_float4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ float4 load_quad(const CacheLoose& loose, Global<const u8> row, u32 i,
                                            u32 dim) {
    return load_loose(loose.type, row, i, dim);
}

// Elements lane + 8(first + n) of a row of `dim`, zeros past its end; `first` is a multiple of
// four, so that blocks are read by one scale.
template <class T>
__device__ __forceinline__ void load_lane(const T&, Global<const u8> row, u32 lane, u32 first,
                                          u32 dim, float (&w)[4]) {
    bool whole = 8 * (first + 4) <= dim;
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        u32 i = lane + 8 * (first + n);
        w[n] = whole || i < dim ? T::one(row, i) : 0.0f;
    }
}

template <class B>
__device__ __forceinline__ void load_lane_of_block(const B& type, Global<const u8> row, u32 lane,
                                                   u32 first, u32 dim, float (&w)[4]) {
    type.lanes(row, lane, first, w);
#pragma unroll
    for (u32 n = 0; n < 4; n++) w[n] = lane + 8 * (first + n) < dim ? w[n] : 0.0f;
}

__device__ __forceinline__ void load_lane(const CacheQ8_0& type, Global<const u8> row, u32 lane,
                                          u32 first, u32 dim, float (&w)[4]) {
    load_lane_of_block(type, row, lane, first, dim, w);
}

__device__ __forceinline__ void load_lane(const CacheNibbles& type, Global<const u8> row, u32 lane,
                                          u32 first, u32 dim, float (&w)[4]) {
    load_lane_of_block(type, row, lane, first, dim, w);
}
