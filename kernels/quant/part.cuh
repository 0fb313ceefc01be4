// The interface of a block format.
//
// "One arithmetic" (src/quant/mod.rs) is about *units*: the blocks b that lanes are dealt by b mod
// 8. A unit is a block of the file, but for NVFP4, where it is a sub-block of 16, and for Q1_0 and
// Q2_0, where it is 32 values. A thread decodes a *part*: 64 values of a block of 256, or a whole
// smaller unit. A part is *chunks* of sixteen
// codes, each with an integer scale and an integer min where the format has them:
//
//     x = d·scale·code − dmin·min
//
// So a format is decoded in one place for matrix–vector, matrix–matrix and embedding kernels, and
// each kernel is written once. A format is a struct of constants and functions:
//
//     LEN, BYTES     values and bytes of a block of the file
//     UNIT, PARTS    values of a unit; parts of a block
//     MINS           whether there are mins
//     SUB            values that share an integer scale; UNIT where there is none
//     FOLDS          whether scale·code of each byte is below 128 and neither is negative
//     d(block, p), dmin(block)      of the unit that part p lies in
//     part(block, p, out)           codes, scales and mins of part p
//     chunk(p, c)                   where in its block chunk c of part p lies, in chunks
//
// If SUB or MINS say that there are no scales or mins, they are not written.
#pragma once

#include "bytes.cuh"

// Chunk c has codes q[4c] to q[4c + 3], four signed bytes a word.
template <u32 CHUNKS>
struct Part {
    u32 q[4 * CHUNKS];
    i32 scale[CHUNKS];
    i32 min[CHUNKS];
};

// Constants of a format with blocks of 256, four parts each.
template <u32 N_BYTES, u32 N_SUB, bool HAS_MINS>
struct Wide {
    static constexpr u32 LEN = 256, BYTES = N_BYTES, UNIT = 256, PARTS = 4, SUB = N_SUB;
    static constexpr u32 CHUNKS = 4;
    static constexpr bool MINS = HAS_MINS, FOLDS = false;
    // A block's address is a multiple of this, if the row's is.
    static constexpr u32 ALIGN = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 2;

    static __device__ __forceinline__ u32 chunk(u32 p, u32 c) { return 4 * p + c; }
    static __device__ __forceinline__ float dmin(Global<const u8>) { return 0.0f; }
};

// Constants of a format with blocks of 32, which are parts.
template <u32 N_BYTES, bool HAS_MINS>
struct Narrow {
    static constexpr u32 LEN = 32, BYTES = N_BYTES, UNIT = 32, PARTS = 1, SUB = 32, CHUNKS = 2;
    static constexpr bool MINS = HAS_MINS, FOLDS = false;
    static constexpr u32 ALIGN = BYTES % 4 == 0 ? 4 : BYTES % 2 == 0 ? 2 : 1;

    static __device__ __forceinline__ u32 chunk(u32, u32 c) { return c; }
    static __device__ __forceinline__ float dmin(Global<const u8>) { return 0.0f; }
};

// Bytes of a row without gaps.
template <class F>
__device__ __forceinline__ u64 row_bytes(u32 cols) {
    return static_cast<u64>(cols / F::LEN) * F::BYTES;
}
