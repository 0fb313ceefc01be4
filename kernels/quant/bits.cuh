// Q1_0 and Q2_0: 128 and 64 values as integers of one and two bits with one f16 scale. Twins:
// src/quant/bits, which says where they lie.
#pragma once

#include "part.cuh"

struct BlockQ1_0 {
    u16 d;
    u8 qs[16];
};
struct BlockQ2_0 {
    u16 d;
    u8 qs[16];
};

static_assert(sizeof(BlockQ1_0) == 18, "as in the file");
static_assert(sizeof(BlockQ2_0) == 18, "as in the file");

// Constants of a format with units of 32, each a part, of which a block has several.
template <class BLOCK, u32 N_VALUES>
struct Parted {
    static constexpr u32 LEN = N_VALUES, BYTES = sizeof(BLOCK), UNIT = 32, PARTS = N_VALUES / 32;
    static constexpr u32 SUB = 32, CHUNKS = 2, ALIGN = 2;
    static constexpr bool MINS = false, FOLDS = false;

    static __device__ __forceinline__ u32 chunk(u32 p, u32 c) { return 2 * p + c; }
    static __device__ __forceinline__ float dmin(Global<const u8>) { return 0.0f; }
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BLOCK, d));
    }
};

struct Q1_0 : Parted<BlockQ1_0, 128> {
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<2>& out) {
        u32 w[1];
        load_words<ALIGN>(block + (OFFSET(BlockQ1_0, qs) + 4 * p), w);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            out.q[i] = bytes_minus(spread_bits(w[0] >> (4 * i)) << 1, 0x01010101u);
        }
    }
};

struct Q2_0 : Parted<BlockQ2_0, 64> {
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<2>& out) {
        u32 w[2];
        load_words<ALIGN>(block + (OFFSET(BlockQ2_0, qs) + 8 * p), w);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 four = w[i / 4] >> (8 * (i % 4)) & 0xff;
            u32 two = (four | four << 12) & 0x000f000fu;
            out.q[i] = bytes_minus((two | two << 6) & 0x03030303u, 0x01010101u);
        }
    }
};
