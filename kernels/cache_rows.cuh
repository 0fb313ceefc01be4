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
//   two(row, i, w)          elements i and i + 1, i even, on a multiple of what two take; not of
//                           nibbles
//   Quad, quad(row, i)      elements i … i + 3 as they are stored, i a multiple of four; the row
//                           begins on a multiple of what four elements take (blocks: anywhere)
//   widen(quad, w)          them as f32
//   lanes(row, lane, j, w)  elements lane + 8j, lane + 8(j + 1) … of a row, j a multiple of four:
//                           of a block, one scale; types without blocks have it from `one`

// Memory that rows are read from: device memory that no one writes meanwhile, or shared memory.
struct FromDevice {
    using Bytes = Global<const u8>;
    template <class T>
    static __device__ __forceinline__ T at(Global<const T> p) {
        return __ldg(p);
    }
};
struct FromShared {
    using Bytes = Shared<const u8>;
    template <class T>
    static __device__ __forceinline__ T at(Shared<const T> p) {
        return *p;
    }
};

template <class M>
struct RowsOfF32 {
    using Bytes = typename M::Bytes;
    using Quad = float4;
    static __device__ __forceinline__ float one(Bytes row, u32 i) {
        return M::at(as<const float>(row) + i);
    }
    static __device__ __forceinline__ void two(Bytes row, u32 i, float (&w)[2]) {
        float2 v = M::at(as<const float2>(row) + i / 2);
        w[0] = v.x, w[1] = v.y;
    }
    static __device__ __forceinline__ Quad quad(Bytes row, u32 i) {
        return M::at(as<const float4>(row) + i / 4);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
};

template <class M>
struct RowsOfF16 {
    using Bytes = typename M::Bytes;
    using Quad = uint2;
    static __device__ __forceinline__ float one(Bytes row, u32 i) {
        return f16_to_f32(M::at(as<const u16>(row) + i));
    }
    static __device__ __forceinline__ void two(Bytes row, u32 i, float (&w)[2]) {
        u32 v = M::at(as<const u32>(row) + i / 2);
        w[0] = f16_to_f32(static_cast<u16>(v)), w[1] = f16_to_f32(static_cast<u16>(v >> 16));
    }
    static __device__ __forceinline__ Quad quad(Bytes row, u32 i) {
        return M::at(as<const uint2>(row) + i / 4);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = f16_to_f32(static_cast<u16>(v.x)), w[1] = f16_to_f32(static_cast<u16>(v.x >> 16));
        w[2] = f16_to_f32(static_cast<u16>(v.y)), w[3] = f16_to_f32(static_cast<u16>(v.y >> 16));
    }
};

template <class M>
struct RowsOfBF16 {
    using Bytes = typename M::Bytes;
    using Quad = uint2;
    static __device__ __forceinline__ float one(Bytes row, u32 i) {
        return bf16_to_f32(M::at(as<const u16>(row) + i));
    }
    static __device__ __forceinline__ void two(Bytes row, u32 i, float (&w)[2]) {
        u32 v = M::at(as<const u32>(row) + i / 2);
        w[0] = __uint_as_float(v << 16), w[1] = __uint_as_float(v & 0xffff0000u);
    }
    static __device__ __forceinline__ Quad quad(Bytes row, u32 i) {
        return M::at(as<const uint2>(row) + i / 4);
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        w[0] = __uint_as_float(v.x << 16), w[1] = __uint_as_float(v.x & 0xffff0000u);
        w[2] = __uint_as_float(v.y << 16), w[3] = __uint_as_float(v.y & 0xffff0000u);
    }
};

template <class M>
struct RowsOfQ8_0 {
    using Bytes = typename M::Bytes;
    // Codes, and the scale's bits.
    using Quad = uint2;
    static __device__ __forceinline__ float one(Bytes row, u32 i) {
        Bytes block = row + i / 32 * Q8_0_BYTES;
        float d = f16_to_f32(M::at(as<const u16>(block)));
        return static_cast<float>(M::at(as<const i8>(block + 2) + i % 32)) * d;
    }
    static __device__ __forceinline__ void two(Bytes row, u32 i, float (&w)[2]) {
        auto block = as<const u16>(row + i / 32 * Q8_0_BYTES);
        float d = f16_to_f32(M::at(block));
        u32 codes = M::at(block + (1 + i % 32 / 2));
        w[0] = static_cast<float>(static_cast<i8>(codes)) * d;
        w[1] = static_cast<float>(static_cast<i8>(codes >> 8)) * d;
    }
    static __device__ __forceinline__ Quad quad(Bytes row, u32 i) {
        auto block = as<const u16>(row + i / 32 * Q8_0_BYTES);
        u32 at = 1 + i % 32 / 2;
        u32 low = M::at(block + at), high = M::at(block + (at + 1));
        return make_uint2(low | high << 16, M::at(block));
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
        float d = f16_to_f32(static_cast<u16>(v.y));
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            w[e] = static_cast<float>(static_cast<i8>(v.x >> (8 * e))) * d;
        }
    }
    static __device__ __forceinline__ void lanes(Bytes row, u32 lane, u32 first,
                                                 float (&w)[4]) {
        Bytes block = row + first / 4 * Q8_0_BYTES;
        float d = f16_to_f32(M::at(as<const u16>(block)));
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            w[n] = static_cast<float>(M::at(as<const i8>(block + 2) + (lane + 8 * n))) * d;
        }
    }
};

// Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL, chosen at run time. A block is an f16 scale, an f16 offset and
// four bytes of fifth bits if the format has them, and 16 bytes of low bits (src/quant/packing.rs).
// The product of scale and code is exact, so one fma equals the CPU's product and sum.
template <class M>
struct RowsOfNibbles {
    using Bytes = typename M::Bytes;
    // Four codes as signed bytes; bits of the scale and of the offset, which is −0 without one.
    using Quad = uint2;
    // The offset of the low bits, which end a block; the number subtracted from each of four codes.
    u32 low, middle;
    bool has_offset, has_fifth, is_table;

    __device__ __forceinline__ explicit RowsOfNibbles(u32 type) {
        has_offset = type == CACHE_Q4_1 || type == CACHE_Q5_1;
        has_fifth = type == CACHE_Q5_0 || type == CACHE_Q5_1;
        is_table = type == CACHE_IQ4_NL;
        low = 2 + (has_offset ? 2 : 0) + (has_fifth ? 4 : 0);
        middle = has_offset ? 0 : has_fifth ? 0x10101010u : 0x08080808u;
    }
    __device__ __forceinline__ u32 bytes() const { return low + 16; }
    __device__ __forceinline__ u32 halves(Bytes block) const {
        u32 offset = has_offset ? M::at(as<const u16>(block + 2)) : 0x8000u;
        return M::at(as<const u16>(block)) | offset << 16;
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

    __device__ __forceinline__ Quad quad(Bytes row, u32 i) const {
        Bytes block = row + i / 32 * bytes();
        auto two = as<const u16>(block + (low + i % 16));
        u32 four = M::at(two) | static_cast<u32>(M::at(two + 1)) << 16;
        u32 fifth = has_fifth ? M::at(block + (low - 4 + i % 32 / 8)) >> (i % 8) : 0;
        four = four >> (i % 32 / 16 * 4) & 0x0f0f0f0fu;
        return make_uint2(codes(four, spread_bits(fifth)), halves(block));
    }
    static __device__ __forceinline__ void widen(const Quad& v, float (&w)[4]) {
#pragma unroll
        for (u32 e = 0; e < 4; e++) w[e] = value(v, e);
    }
    __device__ __forceinline__ void lanes(Bytes row, u32 lane, u32 first,
                                          float (&w)[4]) const {
        Bytes block = row + first / 4 * bytes();
        u32 four = M::at(block + (low + lane)) | M::at(block + (low + lane + 8)) << 8;
        four = (four & 0x0f0fu) | (four & 0xf0f0u) << 12;
        u32 fifth = 0;
        if (has_fifth) {
            auto two = as<const u16>(block + (low - 4));
            u32 bits = M::at(two) | static_cast<u32>(M::at(two + 1)) << 16;
            fifth = bits >> lane & 0x01010101u;
        }
        widen(make_uint2(codes(four, fifth), halves(block)), w);
    }
};

// Rows of any type and length, that begin anywhere.
template <class M>
struct RowsOfLoose {
    using Bytes = typename M::Bytes;
    u32 type;

    __device__ __forceinline__ float one(Bytes row, u32 i) const {
        switch (type) {
            case CACHE_F32: return RowsOfF32<M>::one(row, i);
            case CACHE_F16: return RowsOfF16<M>::one(row, i);
            case CACHE_BF16: return RowsOfBF16<M>::one(row, i);
            case CACHE_Q8_0: return RowsOfQ8_0<M>::one(row, i);
            default: break;
        }
        return RowsOfNibbles<M>::value(RowsOfNibbles<M>(type).quad(row, i / 4 * 4), i % 4);
    }
};

using CacheF16 = RowsOfF16<FromDevice>;
using CacheQ8_0 = RowsOfQ8_0<FromDevice>;
using CacheNibbles = RowsOfNibbles<FromDevice>;

// Elements lane + 8(first + n) of a row of `dim`, zeros past its end; `first` is a multiple of
// four, so that blocks are read by one scale.
template <class T>
__device__ __forceinline__ void load_lane(const T&, typename T::Bytes row, u32 lane, u32 first,
                                          u32 dim, float (&w)[4]) {
    bool whole = 8 * (first + 4) <= dim;
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        u32 i = lane + 8 * (first + n);
        w[n] = whole || i < dim ? T::one(row, i) : 0.0f;
    }
}

template <class B>
__device__ __forceinline__ void load_lane_of_block(const B& type, typename B::Bytes row, u32 lane,
                                                   u32 first, u32 dim, float (&w)[4]) {
    type.lanes(row, lane, first, w);
#pragma unroll
    for (u32 n = 0; n < 4; n++) w[n] = lane + 8 * (first + n) < dim ? w[n] : 0.0f;
}

template <class M>
__device__ __forceinline__ void load_lane(const RowsOfQ8_0<M>& type, typename M::Bytes row,
                                          u32 lane, u32 first, u32 dim, float (&w)[4]) {
    load_lane_of_block(type, row, lane, first, dim, w);
}

template <class M>
__device__ __forceinline__ void load_lane(const RowsOfNibbles<M>& type, typename M::Bytes row,
                                          u32 lane, u32 first, u32 dim, float (&w)[4]) {
    load_lane_of_block(type, row, lane, first, dim, w);
}
