// Rows of the KV cache: keys or values [heads, n_ctx, row], of four types. Twin of how they are
// read: `Rows::tile` (src/backend/cpu/attention/rows.rs).
#pragma once

#include "moeba.cuh"

enum CacheType : u32 { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2, CACHE_Q8_0 = 3 };

// A block of Q8_0: an f16 scale and 32 signed bytes.
static constexpr u32 Q8_0_BYTES = 34;

// Each type reads, from global or shared memory,
//
//   one(row, i)             an element
//   Quad, quad(row, i)      elements i … i + 3 as they are stored, i a multiple of four; the row
//                           begins on a multiple of what four elements take (Q8_0: of two bytes)
//   widen(quad, w)          them as f32

struct CacheF32 {
    using Quad = float4;
    template <class P>
    static __device__ __forceinline__ float one(P row, u32 i) {
        return as<const float>(row)[i];
    }
    template <class P>
    static __device__ __forceinline__ Quad quad(P row, u32 i) {
        return as<const float4>(row)[i / 4];
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
};

struct CacheF16 {
    using Quad = uint2;
    template <class P>
    static __device__ __forceinline__ float one(P row, u32 i) {
        return f16_to_f32(as<const u16>(row)[i]);
    }
    template <class P>
    static __device__ __forceinline__ Quad quad(P row, u32 i) {
        return as<const uint2>(row)[i / 4];
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = f16_to_f32(static_cast<u16>(v.x)), w[1] = f16_to_f32(static_cast<u16>(v.x >> 16));
        w[2] = f16_to_f32(static_cast<u16>(v.y)), w[3] = f16_to_f32(static_cast<u16>(v.y >> 16));
    }
};

struct CacheBF16 {
    using Quad = uint2;
    template <class P>
    static __device__ __forceinline__ float one(P row, u32 i) {
        return bf16_to_f32(as<const u16>(row)[i]);
    }
    template <class P>
    static __device__ __forceinline__ Quad quad(P row, u32 i) {
        return as<const uint2>(row)[i / 4];
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = __uint_as_float(v.x << 16), w[1] = __uint_as_float(v.x & 0xffff0000u);
        w[2] = __uint_as_float(v.y << 16), w[3] = __uint_as_float(v.y & 0xffff0000u);
    }
};

struct CacheQ8_0 {
    // Codes, and the scale's bits.
    using Quad = uint2;
    template <class P>
    static __device__ __forceinline__ float one(P row, u32 i) {
        P block = row + i / 32 * Q8_0_BYTES;
        float d = f16_to_f32(as<const u16>(block)[0]);
        return static_cast<float>(as<const i8>(block + 2)[i % 32]) * d;
    }
    template <class P>
    static __device__ __forceinline__ Quad quad(P row, u32 i) {
        auto block = as<const u16>(row + i / 32 * Q8_0_BYTES);
        u32 at = 1 + i % 32 / 2;
        u32 low = block[at], high = block[at + 1];
        return make_uint2(low | high << 16, block[0]);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        float d = f16_to_f32(static_cast<u16>(v.y));
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            w[e] = static_cast<float>(static_cast<i8>(v.x >> (8 * e))) * d;
        }
    }
};

// Elements i … i + 3 of a row of `dim`. LOOSE: `dim` is no multiple of four, and the row ends with
// its last element; zeros stand behind it.
template <class V, bool LOOSE, class P>
__device__ __forceinline__ void load_four(P row, u32 i, u32 dim, float (&w)[4]) {
    if constexpr (LOOSE) {
#pragma unroll
        for (u32 e = 0; e < 4; e++) w[e] = i + e < dim ? V::one(row, i + e) : 0.0f;
    } else {
        V::widen(V::quad(row, i), w);
    }
}

// Elements lane + 8(first + n) of a row of `dim`, zeros behind its end; `first` is a multiple of
// four, so that blocks of Q8_0 are read by one scale.
template <class T>
__device__ __forceinline__ void load_lane(Global<const u8> row, u32 lane, u32 first, u32 dim,
                                          float (&w)[4]) {
    bool whole = 8 * (first + 4) <= dim;
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        u32 i = lane + 8 * (first + n);
        w[n] = whole || i < dim ? T::one(row, i) : 0.0f;
    }
}

template <>
__device__ __forceinline__ void load_lane<CacheQ8_0>(Global<const u8> row, u32 lane, u32 first,
                                                     u32 dim, float (&w)[4]) {
    Global<const u8> block = row + first / 4 * Q8_0_BYTES;
    float d = f16_to_f32(as<const u16>(block)[0]);
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        float q = static_cast<float>(as<const i8>(block + 2)[lane + 8 * n]);
        w[n] = lane + 8 * (first + n) < dim ? q * d : 0.0f;
    }
}
