// TQ1_0 and TQ2_0: 256 values −1, 0 and 1 with one f16 scale. Twins: src/quant/ternary, which
// says how digits lie in bytes.
#pragma once

#include "k_quants.cuh"

struct BlockTQ1_0 {
    u8 qs[48];
    u8 qh[4];
    u16 d;
};
struct BlockTQ2_0 {
    u8 qs[64];
    u16 d;
};

static_assert(sizeof(BlockTQ1_0) == 54, "as in the file");
static_assert(sizeof(BlockTQ2_0) == 66, "as in the file");

// Digit n of four bytes, less 1; `power` is 3ⁿ. Two bytes at a time are multiplied in the halves of
// a word, which hold products of eight bits.
__device__ __forceinline__ u32 trits(u32 w, u32 power) {
    u32 even = (w & 0x00ff00ffu) * power & 0x00ff00ffu;
    u32 odd = (w >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
    even = even * 3 >> 8 & 0x00ff00ffu;
    odd = odd * 3 & 0xff00ff00u;
    return bytes_minus(even | odd, 0x01010101u);
}

// Parts 0 to 2 are digits 0 to 3 of sixteen bytes each; part 3 is digit 4 of all 48 and then the
// four bytes `qh`.
struct TQ1_0 : Wide<sizeof(BlockTQ1_0), 256, false> {
    static __device__ __forceinline__ u32 chunk(u32 p, u32 c) {
        if (p < 2) return 2 * c + p;
        if (p == 2) return 10 + c;
        return c < 2 ? 8 + c : 12 + c;
    }
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockTQ1_0, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        constexpr u32 POWERS[5] = {1, 3, 9, 27, 81};
        if (p < 3) {
            u32 w[4];
            load_words<ALIGN>(block + (OFFSET(BlockTQ1_0, qs) + 16 * p), w);
#pragma unroll
            for (u32 i = 0; i < 16; i++) out.q[i] = trits(w[i % 4], POWERS[i / 4]);
        } else {
            u32 w[12], top[1];
            load_words<ALIGN>(block + OFFSET(BlockTQ1_0, qs), w);
            load_words<ALIGN>(block + OFFSET(BlockTQ1_0, qh), top);
#pragma unroll
            for (u32 i = 0; i < 12; i++) out.q[i] = trits(w[i], POWERS[4]);
#pragma unroll
            for (u32 i = 0; i < 4; i++) out.q[12 + i] = trits(top[0], POWERS[i]);
        }
    }
};

struct TQ2_0 : Wide<sizeof(BlockTQ2_0), 256, false> {
    static __device__ __forceinline__ u32 chunk(u32 p, u32 c) { return two_bit_chunk(p, c); }
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockTQ2_0, d));
    }
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
        u32 w[4];
        load_words<ALIGN>(block + (OFFSET(BlockTQ2_0, qs) + 16 * p), w);
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            out.q[i] = bytes_minus(w[i % 4] >> (2 * (i / 4)) & 0x03030303u, 0x01010101u);
        }
    }
};
