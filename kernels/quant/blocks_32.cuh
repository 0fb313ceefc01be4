// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1: 32 values with one f16 scale and, in Q4_1 and Q5_1, an f16
// offset, which is a min of its negative. Twins: src/quant/legacy. Codes of four bits lie as in
// src/quant/packing.rs: value i in the low half of byte i, value i + 16 in the high one; bit i of
// `qh` is the fifth bit of value i.
#pragma once

#include "part.cuh"

struct BlockQ4_0 {
    u16 d;
    u8 qs[16];
};
struct BlockQ4_1 {
    u16 d, m;
    u8 qs[16];
};
struct BlockQ5_0 {
    u16 d;
    u8 qh[4];
    u8 qs[16];
};
struct BlockQ5_1 {
    u16 d, m;
    u8 qh[4];
    u8 qs[16];
};
struct BlockQ8_0 {
    u16 d;
    i8 qs[32];
};
struct BlockQ8_1 {
    u16 d, s;
    i8 qs[32];
};

static_assert(sizeof(BlockQ4_0) == 18, "as in the file");
static_assert(sizeof(BlockQ4_1) == 20, "as in the file");
static_assert(sizeof(BlockQ5_0) == 22, "as in the file");
static_assert(sizeof(BlockQ5_1) == 24, "as in the file");
static_assert(sizeof(BlockQ8_0) == 34, "as in the file");
static_assert(sizeof(BlockQ8_1) == 36, "as in the file");

// 32 codes of four bits, 0 to 15.
template <u32 ALIGN>
__device__ __forceinline__ void four_bits(Global<const u8> qs, u32 (&q)[8]) {
    u32 w[4];
    load_words<ALIGN>(qs, w);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        q[i] = low_nibbles(w[i]);
        q[i + 4] = high_nibbles(w[i]);
    }
}

// 32 codes of five bits, 0 to 31.
template <u32 ALIGN>
__device__ __forceinline__ void five_bits(Global<const u8> qh, Global<const u8> qs, u32 (&q)[8]) {
    u32 top[1];
    load_words<ALIGN>(qh, top);
    four_bits<ALIGN>(qs, q);
#pragma unroll
    for (u32 i = 0; i < 8; i++) q[i] |= spread_bits(top[0] >> (4 * i)) << 4;
}

// Codes around zero.
__device__ __forceinline__ void centre(u32 (&q)[8], u32 middle) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) q[i] = bytes_minus(q[i], 0x01010101u * middle);
}

struct Q4_0 : Narrow<sizeof(BlockQ4_0), false> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ4_0, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        four_bits<ALIGN>(block + OFFSET(BlockQ4_0, qs), out.q);
        centre(out.q, 8);
    }
};

struct Q4_1 : Narrow<sizeof(BlockQ4_1), true> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ4_1, d));
    }
    static __device__ __forceinline__ float dmin(Global<const u8> block) {
        return -load_f16(block + OFFSET(BlockQ4_1, m));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        four_bits<ALIGN>(block + OFFSET(BlockQ4_1, qs), out.q);
    }
};

struct Q5_0 : Narrow<sizeof(BlockQ5_0), false> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ5_0, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        five_bits<ALIGN>(block + OFFSET(BlockQ5_0, qh), block + OFFSET(BlockQ5_0, qs), out.q);
        centre(out.q, 16);
    }
};

struct Q5_1 : Narrow<sizeof(BlockQ5_1), true> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ5_1, d));
    }
    static __device__ __forceinline__ float dmin(Global<const u8> block) {
        return -load_f16(block + OFFSET(BlockQ5_1, m));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        five_bits<ALIGN>(block + OFFSET(BlockQ5_1, qh), block + OFFSET(BlockQ5_1, qs), out.q);
    }
};

struct Q8_0 : Narrow<sizeof(BlockQ8_0), false> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ8_0, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        load_words<ALIGN>(block + OFFSET(BlockQ8_0, qs), out.q);
    }
};

struct Q8_1 : Narrow<sizeof(BlockQ8_1), false> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ8_1, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        load_words<ALIGN>(block + OFFSET(BlockQ8_1, qs), out.q);
    }
};
