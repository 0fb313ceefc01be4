// Rows of the KV cache: keys or values [heads, n_ctx, row], of four types. Twin of how they are
// read: `Rows::tile` (src/backend/cpu/attention/rows.rs).
#pragma once

#include "moeba.cuh"

enum CacheType : u32 { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2, CACHE_Q8_0 = 3 };

// A block of Q8_0: an f16 scale and 32 signed bytes.
static constexpr u32 Q8_0_BYTES = 34;

// Each type reads
//
//   four(row, lane, j, w)   elements lane + 8j, lane + 8(j + 1) … of a row, j a multiple of four
//   one(row, i)             an element
//   Quad, quad(row, i)      elements i … i + 3 as they are stored, i a multiple of four; the row
//                           begins on a multiple of what four elements take (Q8_0: anywhere)
//   widen(quad, w)          them as f32

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
};

// Rows of T of any length, that begin anywhere: four elements by four loads.
template <class T>
struct Loose {
    using Quad = float4;
    static __device__ __forceinline__ Quad quad(Global<const u8> row, u32 i, u32 dim) {
        return make_float4(T::one(row, i), i + 1 < dim ? T::one(row, i + 1) : 0.0f,
                           i + 2 < dim ? T::one(row, i + 2) : 0.0f,
                           i + 3 < dim ? T::one(row, i + 3) : 0.0f);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        CacheF32::widen(v, w);
    }
};

// The quad from element i of a row of `dim` elements on, zeros behind its end.
template <class V>
struct Quads {
    static __device__ __forceinline__ typename V::Quad load(Global<const u8> row, u32 i, u32) {
        return V::quad(row, i);
    }
};
template <class T>
struct Quads<Loose<T>> {
    static __device__ __forceinline__ float4 load(Global<const u8> row, u32 i, u32 dim) {
        return Loose<T>::quad(row, i, dim);
    }
};

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
    float d = f16_to_f32(__ldg(as<const u16>(block)));
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        float q = static_cast<float>(__ldg(as<const i8>(block + 2) + (lane + 8 * n)));
        w[n] = lane + 8 * (first + n) < dim ? q * d : 0.0f;
    }
}
