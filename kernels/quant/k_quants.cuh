// Q2_K to Q6_K: 256 values in sub-blocks of 16 or 32 with integer scales. Twins: src/quant/k, which
// says how the codes lie. A part is chosen so that its thread loads no byte of
// codes that another thread of the block loads too, but for the fifth bits of Q5_K.
#pragma once

#include "part.cuh"

struct BlockQ2K {
    u8 scales[16];
    u8 qs[64];
    u16 d, dmin;
};
struct BlockQ3K {
    u8 hmask[32];
    u8 qs[64];
    u8 scales[12];
    u16 d;
};
struct BlockQ4K {
    u16 d, dmin;
    u8 scales[12];
    u8 qs[128];
};
struct BlockQ5K {
    u16 d, dmin;
    u8 scales[12];
    u8 qh[32];
    u8 qs[128];
};
struct BlockQ6K {
    u8 ql[128];
    u8 qh[64];
    i8 scales[16];
    u16 d;
};

static_assert(sizeof(BlockQ2K) == 84, "as in the file");
static_assert(sizeof(BlockQ3K) == 110, "as in the file");
static_assert(sizeof(BlockQ4K) == 144, "as in the file");
static_assert(sizeof(BlockQ5K) == 176, "as in the file");
static_assert(sizeof(BlockQ6K) == 210, "as in the file");

// The place of 2-bit codes (`two_bits` in src/quant/packing.rs): part p has the 16 bytes from 16p
// on, and chunk c is bits 2c and 2c + 1 of each.
__device__ __forceinline__ u32 two_bit_chunk(u32 p, u32 c) {
    return 8 * (p / 2) + 2 * c + p % 2;
}

struct Q2_K : Wide<sizeof(BlockQ2K), 16, true> {
    static constexpr bool FOLDS = true;
    static __device__ __forceinline__ u32 chunk(u32 p, u32 c) { return two_bit_chunk(p, c); }
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ2K, d));
    }
    static __device__ __forceinline__ float dmin(Global<const u8> block) {
        return load_f16(block + OFFSET(BlockQ2K, dmin));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        u32 w[4];
        load_words<ALIGN>(block + (OFFSET(BlockQ2K, qs) + 16 * p), w);
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            u32 scale = __ldg(block + (OFFSET(BlockQ2K, scales) + chunk(p, c)));
            out.scale[c] = scale & 15;
            out.min[c] = scale >> 4;
#pragma unroll
            for (u32 i = 0; i < 4; i++) out.q[4 * c + i] = w[i] >> (2 * c) & 0x03030303u;
        }
    }
};

struct Q3_K : Wide<sizeof(BlockQ3K), 16, false> {
    static __device__ __forceinline__ u32 chunk(u32 p, u32 c) { return two_bit_chunk(p, c); }
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ3K, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        u32 w[4], top[4];
        load_words<ALIGN>(block + (OFFSET(BlockQ3K, qs) + 16 * p), w);
        load_words<ALIGN>(block + (OFFSET(BlockQ3K, hmask) + 16 * (p % 2)), top);
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            out.scale[c] = sub_scale(block, chunk(p, c));
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 low = w[i] >> (2 * c) & 0x03030303u;
                u32 high = top[i] >> (4 * (p / 2) + c) & 0x01010101u;
                out.q[4 * c + i] = bytes_minus(low | high << 2, 0x04040404u);
            }
        }
    }
    static __device__ __forceinline__ i32 sub_scale(Global<const u8> block, u32 j) {
        Global<const u8> scales = block + OFFSET(BlockQ3K, scales);
        u32 low = __ldg(scales + j % 8) >> (4 * (j / 8)) & 15;
        u32 top = __ldg(scales + (8 + j % 4)) >> (2 * (j / 4)) & 3;
        return static_cast<i32>(low | top << 4) - 32;
    }
};

// The scales and mins of sub-blocks 2p and 2p + 1 of Q4_K and Q5_K, from the twelve bytes that
// src/quant/k/scales.rs packs: four numbers a word.
__device__ __forceinline__ void k_scales(const u32 (&packed)[3], u32 p, Part<4>& out) {
    u32 scales, mins;
    if (p < 2) {
        scales = packed[0] & 0x3f3f3f3fu;
        mins = packed[1] & 0x3f3f3f3fu;
    } else {
        scales = low_nibbles(packed[2]) | (packed[0] >> 2 & 0x30303030u);
        mins = high_nibbles(packed[2]) | (packed[1] >> 2 & 0x30303030u);
    }
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
        u32 shift = 16 * (p % 2) + 8 * (c / 2);
        out.scale[c] = scales >> shift & 0xff;
        out.min[c] = mins >> shift & 0xff;
    }
}

struct Q4_K : Wide<sizeof(BlockQ4K), 32, true> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ4K, d));
    }
    static __device__ __forceinline__ float dmin(Global<const u8> block) {
        return load_f16(block + OFFSET(BlockQ4K, dmin));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        u32 w[8], header[4];
        load_words<ALIGN>(block, header);
        load_words<ALIGN>(block + (OFFSET(BlockQ4K, qs) + 32 * p), w);
        k_scales({header[1], header[2], header[3]}, p, out);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            out.q[i] = low_nibbles(w[i]);
            out.q[i + 8] = high_nibbles(w[i]);
        }
    }
};

struct Q5_K : Wide<sizeof(BlockQ5K), 32, true> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ5K, d));
    }
    static __device__ __forceinline__ float dmin(Global<const u8> block) {
        return load_f16(block + OFFSET(BlockQ5K, dmin));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        u32 w[8], top[8], header[4];
        load_words<ALIGN>(block, header);
        load_words<ALIGN>(block + OFFSET(BlockQ5K, qh), top);
        load_words<ALIGN>(block + (OFFSET(BlockQ5K, qs) + 32 * p), w);
        k_scales({header[1], header[2], header[3]}, p, out);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 fifth = top[i] >> (2 * p);
            out.q[i] = low_nibbles(w[i]) | (fifth & 0x01010101u) << 4;
            out.q[i + 8] = high_nibbles(w[i]) | (fifth >> 1 & 0x01010101u) << 4;
        }
    }
};

// Part p: of half p / 2, the 32 bytes of `ql` from 32·(p mod 2) on, and with them groups p mod 2
// (low halves) and p mod 2 + 2 (high halves).
struct Q6_K : Wide<sizeof(BlockQ6K), 16, false> {
    static __device__ __forceinline__ u32 chunk(u32 p, u32 c) {
        return 8 * (p / 2) + 2 * (p % 2 + c / 2 * 2) + c % 2;
    }
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockQ6K, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        u32 low[8], high[8];
        load_words<ALIGN>(block + (OFFSET(BlockQ6K, ql) + 32 * p), low);
        load_words<ALIGN>(block + (OFFSET(BlockQ6K, qh) + 32 * (p / 2)), high);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 top = high[i] >> (2 * (p % 2));
            u32 first = low_nibbles(low[i]) | (top & 0x03030303u) << 4;
            u32 second = high_nibbles(low[i]) | (top >> 4 & 0x03030303u) << 4;
            out.q[i] = bytes_minus(first, 0x20202020u);
            out.q[i + 8] = bytes_minus(second, 0x20202020u);
        }
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            u32 byte = __ldg(block + (OFFSET(BlockQ6K, scales) + chunk(p, c)));
            out.scale[c] = static_cast<i8>(byte);
        }
    }
};
