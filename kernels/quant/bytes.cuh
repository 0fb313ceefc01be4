// Loads of packed bytes, and arithmetic on four of them at a time.
//
// Blocks have sizes such as 18, 34 or 210 bytes, so only even addresses are certain; blocks of
// MXFP4 have 17. Therefore aligned words are loaded and shifted together. No load touches an
// aligned word without a wanted byte, since that word may lie outside the allocation.
#pragma once

#include "../moeba.cuh"

// The offset of a field in a block's struct. NVRTC has no offsetof without a toolkit's headers.
#if defined(__CUDACC__)
#define OFFSET(BLOCK, FIELD) \
    static_cast<u32>(reinterpret_cast<u64>(&static_cast<BLOCK*>(nullptr)->FIELD))
#else
#define OFFSET(BLOCK, FIELD) static_cast<u32>(__builtin_offsetof(BLOCK, FIELD))
#endif

// Bytes from the last multiple of four to `p`.
__device__ __forceinline__ u32 misalignment(Global<const u8> p) {
#if defined(__CUDACC__)
    return static_cast<u32>(reinterpret_cast<u64>(p)) & 3;
#else
    return static_cast<u32>(p.address()) & 3;
#endif
}

// Four bytes from byte `shift` (0 to 3) of the eight of (high, low) on.
__device__ __forceinline__ u32 shifted_word(u32 low, u32 high, u32 shift) {
    return __byte_perm(low, high, 0x3210 + 0x1111 * shift);
}

// 4·N bytes from `p`, which is a multiple of ALIGN: 16, 8, 4, 2 or 1.
template <u32 ALIGN, u32 N>
__device__ __forceinline__ void load_words(Global<const u8> p, u32 (&w)[N]) {
    if constexpr (ALIGN >= 16 && N % 4 == 0) {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) {
            uint4 v = __ldg(as<const uint4>(p) + i / 4);
            w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
        }
    } else if constexpr (ALIGN >= 8 && N % 2 == 0) {
#pragma unroll
        for (u32 i = 0; i < N; i += 2) {
            uint2 v = __ldg(as<const uint2>(p) + i / 2);
            w[i] = v.x, w[i + 1] = v.y;
        }
    } else if constexpr (ALIGN >= 4) {
#pragma unroll
        for (u32 i = 0; i < N; i++) w[i] = __ldg(as<const u32>(p) + i);
    } else {
        u32 shift = misalignment(p);
        Global<const u32> words = as<const u32>(p - shift);
#pragma unroll
        for (u32 i = 0; i < N; i++) w[i] = __ldg(words + i);
        u32 last = 0;
        if constexpr (ALIGN == 2) {
            if (shift != 0) last = __ldg(as<const u16>(p + (4 * N - 2)));
        } else {
#pragma unroll
            for (u32 i = 0; i < 3; i++) {
                if (i < shift) last |= static_cast<u32>(__ldg(p + (4 * N - shift + i))) << (8 * i);
            }
        }
#pragma unroll
        for (u32 i = 0; i < N; i++) w[i] = shifted_word(w[i], i + 1 < N ? w[i + 1] : last, shift);
    }
}

// A little-endian number at an even address.
__device__ __forceinline__ u32 load_u16(Global<const u8> p) {
    return __ldg(as<const u16>(p));
}

__device__ __forceinline__ float load_f16(Global<const u8> p) {
    return f16_to_f32(__ldg(as<const u16>(p)));
}

// ---- four bytes in a word

// a − b byte by byte, for bytes of `a` below 0x80 and of `b` up to 0x80.
__device__ __forceinline__ u32 bytes_minus(u32 a, u32 b) {
    return ((a | 0x80808080u) - b) ^ 0x80808080u;
}

// Bit i of the low four bits becomes byte i, 0 or 1. The copies of a bit that the product makes
// fall on bits of their own, so there is no carry.
__device__ __forceinline__ u32 spread_bits(u32 four) {
    return (four & 15) * 0x00204081u & 0x01010101u;
}

// The low halves of the four bytes.
__device__ __forceinline__ u32 low_nibbles(u32 w) { return w & 0x0f0f0f0fu; }
__device__ __forceinline__ u32 high_nibbles(u32 w) { return w >> 4 & 0x0f0f0f0fu; }

// Sixteen signed bytes, the first of them lowest in a.
struct Table16 {
    u32 a, b, c, d;
};

// The entries that the four nibbles of the low half of `w` name.
__device__ __forceinline__ u32 look_up_four(const Table16& t, u32 w) {
    u32 low = __byte_perm(t.a, t.b, w & 0x7777), high = __byte_perm(t.c, t.d, w & 0x7777);
    // The top bit of a nibble chooses the half of the table.
    return __byte_perm(low, high, 0x3210 | (w & 0x8888) >> 1);
}

// Entries for the low halves of four bytes, and for their high halves.
__device__ __forceinline__ void look_up_nibbles(const Table16& t, u32 w, u32& low, u32& high) {
    u32 first = look_up_four(t, w), second = look_up_four(t, w >> 16);
    low = __byte_perm(first, second, 0x6420);
    high = __byte_perm(first, second, 0x7531);
}
