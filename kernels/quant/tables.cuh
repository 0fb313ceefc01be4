// IQ4_NL, IQ4_XS, MXFP4, NVFP4: codes of four bits that name one of sixteen integers. Twins:
// src/quant/iq/iq4_nl.rs and iq4_xs.rs, src/quant/fp4.
#pragma once

#include "part.cuh"

struct BlockIQ4NL {
    u16 d;
    u8 qs[16];
};
struct BlockIQ4XS {
    u16 d;
    u16 scales_h;
    u8 scales_l[4];
    u8 qs[128];
};
struct BlockMXFP4 {
    u8 e;
    u8 qs[16];
};
struct BlockNVFP4 {
    u8 d[4];
    u8 qs[32];
};

static_assert(sizeof(BlockIQ4NL) == 18, "as in the file");
static_assert(sizeof(BlockIQ4XS) == 136, "as in the file");
static_assert(sizeof(BlockMXFP4) == 17, "as in the file");
static_assert(sizeof(BlockNVFP4) == 36, "as in the file");

// −127, −104, −83, −65, −49, −35, −22, −10, 1, 13, 25, 38, 53, 69, 89, 113
static constexpr Table16 IQ4_VALUES = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};

// Twice the values of e2m1: 0, 1, 2, 3, 4, 6, 8, 12, and the same negative.
static constexpr Table16 E2M1_DOUBLED = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};

// 32 codes: value i in the low half of byte i, value i + 16 in the high half.
template <u32 ALIGN>
__device__ __forceinline__ void table_codes(const Table16& table, Global<const u8> qs, u32* q) {
    u32 w[4];
    load_words<ALIGN>(qs, w);
#pragma unroll
    for (u32 i = 0; i < 4; i++) look_up_nibbles(table, w[i], q[i], q[i + 4]);
}

struct IQ4_NL : Narrow<sizeof(BlockIQ4NL), false> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ4NL, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        table_codes<ALIGN>(IQ4_VALUES, block + OFFSET(BlockIQ4NL, qs), out.q);
    }
};

// Part p is sub-blocks 2p and 2p + 1.
struct IQ4_XS : Wide<sizeof(BlockIQ4XS), 32, false> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ4XS, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        u32 high = load_u16(block + OFFSET(BlockIQ4XS, scales_h)) >> (4 * p);
        u32 low = __ldg(block + (OFFSET(BlockIQ4XS, scales_l) + p));
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 at = OFFSET(BlockIQ4XS, qs) + 32 * p + 16 * half;
            table_codes<ALIGN>(IQ4_VALUES, block + at, out.q + 8 * half);
            u32 code = (low >> (4 * half) & 15) | (high >> (2 * half) & 3) << 4;
            out.scale[2 * half] = out.scale[2 * half + 1] = static_cast<i32>(code) - 32;
        }
    }
};

struct MXFP4 : Narrow<sizeof(BlockMXFP4), false> {
    // 2^(e − 128); the first two are subnormal.
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        u32 e = __ldg(block + OFFSET(BlockMXFP4, e));
        return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32, Part<2>& out) {
        table_codes<ALIGN>(E2M1_DOUBLED, block + OFFSET(BlockMXFP4, qs), out.q);
    }
};

// A unit is a sub-block of 16 with its own scale.
struct NVFP4 {
    static constexpr u32 LEN = 64, BYTES = 36, UNIT = 16, PARTS = 4, SUB = 16, CHUNKS = 1;
    static constexpr u32 ALIGN = 4;
    static constexpr bool MINS = false, FOLDS = false;

    static __device__ __forceinline__ u32 chunk(u32 p, u32) { return p; }
    static __device__ __forceinline__ float dmin(Global<const u8>) { return 0.0f; }

    // Half the e4m3 number of byte p; its sign is ignored, its NaN 0x7f is 0.
    static __device__ __forceinline__ float d(Global<const u8> block, u32 p) {
        u32 x = __ldg(block + (OFFSET(BlockNVFP4, d) + p));
        u32 exponent = x >> 3 & 15, mantissa = x & 7;
        if (x == 0x7f) return 0.0f;
        if (exponent == 0) return static_cast<float>(mantissa) * (1.0f / 1024.0f);
        return __uint_as_float((exponent + 119) << 23 | mantissa << 20);
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<1>& out) {
        u32 w[2];
        load_words<ALIGN>(block + (OFFSET(BlockNVFP4, qs) + 8 * p), w);
        look_up_nibbles(E2M1_DOUBLED, w[0], out.q[0], out.q[2]);
        look_up_nibbles(E2M1_DOUBLED, w[1], out.q[1], out.q[3]);
    }
};
