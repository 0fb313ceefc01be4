// IQ1, IQ2 and IQ3: values are points of a grid, eight or four at a time; signs or shifts stand
// beside them. Twins: src/quant/iq/grids.rs and iq1_s.rs to iq3_xxs.rs, which say how numbers of
// points, signs and scales lie.
//
// A chunk of sixteen is two points of eight or four points of four, so all these formats decode
// chunk by chunk. On the device a point is a selector for __byte_perm: a nibble a value, which
// picks the value's byte from a register. That keeps the tables at 4 bytes a point of eight and 2
// a point of four (8 KiB for IQ1, at most 4 KiB for the others), which the L1 cache holds.
#pragma once

#include "grid_points.cuh"
#include "part.cuh"

struct BlockIQ1S {
    u16 d;
    u8 qs[32];
    u16 qh[8];
};
struct BlockIQ1M {
    u8 qs[32];
    u16 qh[8];
    u16 scales[4];
};
struct BlockIQ2XXS {
    u16 d;
    u8 groups[64];
};
struct BlockIQ2XS {
    u16 d;
    u16 qs[32];
    u8 scales[8];
};
struct BlockIQ2S {
    u16 d;
    u8 qs[32];
    u8 signs[32];
    u8 qh[8];
    u8 scales[8];
};
struct BlockIQ3XXS {
    u16 d;
    u8 qs[64];
    u8 words[32];
};
struct BlockIQ3S {
    u16 d;
    u8 qs[64];
    u8 qh[8];
    u8 signs[32];
    u8 scales[4];
};

static_assert(sizeof(BlockIQ1S) == 50, "as in the file");
static_assert(sizeof(BlockIQ1M) == 56, "as in the file");
static_assert(sizeof(BlockIQ2XXS) == 66, "as in the file");
static_assert(sizeof(BlockIQ2XS) == 74, "as in the file");
static_assert(sizeof(BlockIQ2S) == 82, "as in the file");
static_assert(sizeof(BlockIQ3XXS) == 98, "as in the file");
static_assert(sizeof(BlockIQ3S) == 110, "as in the file");

// ---- points as selectors

template <class T, u32 N>
struct Selectors {
    T of[N];
};

// Fields of `bits` bits, lowest first, become nibbles.
template <class T, u32 N>
__device__ constexpr Selectors<T, N> selectors(const u16 (&packed)[N], u32 bits) {
    Selectors<T, N> out = {};
    for (u32 n = 0; n < N; n++) {
        u32 point = 0;
        for (u32 i = 0; i < 2 * sizeof(T); i++) {
            point |= (packed[n] >> (bits * i) & ((1u << bits) - 1)) << (4 * i);
        }
        out.of[n] = static_cast<T>(point);
    }
    return out;
}

__device__ constexpr Selectors<u32, 2048> IQ1_POINTS = selectors<u32>(PACKED_IQ1, 2);
__device__ constexpr Selectors<u32, 256> IQ2_XXS_POINTS = selectors<u32>(PACKED_IQ2_XXS, 2);
__device__ constexpr Selectors<u32, 512> IQ2_XS_POINTS = selectors<u32>(PACKED_IQ2_XS, 2);
__device__ constexpr Selectors<u32, 1024> IQ2_S_POINTS = selectors<u32>(PACKED_IQ2_S, 2);
__device__ constexpr Selectors<u16, 256> IQ3_XXS_POINTS = selectors<u16>(PACKED_IQ3_XXS, 3);
__device__ constexpr Selectors<u16, 512> IQ3_S_POINTS = selectors<u16>(PACKED_IQ3_S, 3);

// Magnitudes by selector: 8, 25, 43; then 4, 12, 20, 28, 36, 44, 52, 62; then 1, 3, ... 15.
static constexpr u32 IQ2_VALUES = 0x002b1908u;
static constexpr u32 IQ3_XXS_VALUES[2] = {0x1c140c04u, 0x3e342c24u};
static constexpr u32 IQ3_S_VALUES[2] = {0x07050301u, 0x0f0d0b09u};
// 8·point + 1 and 8·point − 1 for the points −1, 0, 1.
static constexpr u32 IQ1_UP = 0x000901f9u;
static constexpr u32 IQ1_DOWN = 0x0007fff7u;

// Bytes that are not 0, negated where the low four bits of `signs` say so.
__device__ __forceinline__ u32 with_signs(u32 magnitudes, u32 signs) {
    u32 ones = spread_bits(signs);
    return (magnitudes ^ ones * 0xff) + ones;
}

// A point of eight with its signs.
__device__ __forceinline__ void signed_eight(u32 selector, u32 signs, u32* q) {
    q[0] = with_signs(__byte_perm(IQ2_VALUES, 0, selector), signs);
    q[1] = with_signs(__byte_perm(IQ2_VALUES, 0, selector >> 16), signs >> 4);
}

// The eight signs of field k of seven bits: the eighth makes the number of minus signs even.
__device__ __forceinline__ u32 even_signs(u32 fields, u32 k) {
    u32 seven = fields >> (7 * k) & 127;
    return seven | (__popc(seven) & 1) << 7;
}

// ---- formats

// `Self::sixteen(block, t, q)` decodes chunk t of a block and returns its scale.
template <class Self, u32 N_BYTES, u32 N_SUB>
struct Grid : Wide<N_BYTES, N_SUB, false> {
    static __device__ __forceinline__ void part(Global<const u8> block, u32 p, Part<4>& out) {
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            out.scale[c] = Self::sixteen(block, 4 * p + c, out.q + 4 * c);
        }
    }
};

struct IQ1_S : Grid<IQ1_S, sizeof(BlockIQ1S), 32> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ1S, d)) * 0.125f;
    }
    static __device__ __forceinline__ i32 sixteen(Global<const u8> block, u32 t, u32* q) {
        u32 qh = load_u16(block + (OFFSET(BlockIQ1S, qh) + t / 2 * 2));
        u32 values = qh >> 15 ? IQ1_DOWN : IQ1_UP;
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            u32 low = __ldg(block + (OFFSET(BlockIQ1S, qs) + 2 * t + k));
            u32 high = qh >> (3 * (2 * (t % 2) + k)) & 7;
            u32 point = IQ1_POINTS.of[low | high << 8];
            q[2 * k] = __byte_perm(values, 0, point);
            q[2 * k + 1] = __byte_perm(values, 0, point >> 16);
        }
        return 2 * (qh >> 12 & 7) + 1;
    }
};

struct IQ1_M : Grid<IQ1_M, sizeof(BlockIQ1M), 16> {
    // The f16 is spread over the top halves of the scales' top bytes.
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        u32 bits = 0;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            bits |= load_u16(block + (OFFSET(BlockIQ1M, scales) + 2 * k)) >> 12 << (4 * k);
        }
        return f16_to_f32(static_cast<u16>(bits)) * 0.125f;
    }
    static __device__ __forceinline__ i32 sixteen(Global<const u8> block, u32 t, u32* q) {
        u32 qh = load_u16(block + (OFFSET(BlockIQ1M, qh) + t / 2 * 2)) >> (8 * (t % 2));
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            u32 low = __ldg(block + (OFFSET(BlockIQ1M, qs) + 2 * t + k));
            u32 high = qh >> (4 * k) & 7;
            u32 values = qh >> (4 * k + 3) & 1 ? IQ1_DOWN : IQ1_UP;
            u32 point = IQ1_POINTS.of[low | high << 8];
            q[2 * k] = __byte_perm(values, 0, point);
            q[2 * k + 1] = __byte_perm(values, 0, point >> 16);
        }
        u32 scales = load_u16(block + (OFFSET(BlockIQ1M, scales) + t / 4 * 2));
        return 2 * (scales >> (3 * (t % 4)) & 7) + 1;
    }
};

struct IQ2_XXS : Grid<IQ2_XXS, sizeof(BlockIQ2XXS), 32> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ2XXS, d)) * 0.125f;
    }
    static __device__ __forceinline__ i32 sixteen(Global<const u8> block, u32 t, u32* q) {
        // Four numbers of points, then a word of signs and scale.
        u32 group[2];
        load_words<ALIGN>(block + (OFFSET(BlockIQ2XXS, groups) + t / 2 * 8), group);
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            u32 n = 2 * (t % 2) + k;
            u32 point = IQ2_XXS_POINTS.of[group[0] >> (8 * n) & 0xff];
            signed_eight(point, even_signs(group[1], n), q + 2 * k);
        }
        return 2 * (group[1] >> 28) + 1;
    }
};

struct IQ2_XS : Grid<IQ2_XS, sizeof(BlockIQ2XS), 16> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ2XS, d)) * 0.125f;
    }
    static __device__ __forceinline__ i32 sixteen(Global<const u8> block, u32 t, u32* q) {
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            u32 word = load_u16(block + (OFFSET(BlockIQ2XS, qs) + 4 * t + 2 * k));
            signed_eight(IQ2_XS_POINTS.of[word & 511], even_signs(word >> 9, 0), q + 2 * k);
        }
        u32 scales = __ldg(block + (OFFSET(BlockIQ2XS, scales) + t / 2));
        return 2 * (scales >> (4 * (t % 2)) & 15) + 1;
    }
};

struct IQ2_S : Grid<IQ2_S, sizeof(BlockIQ2S), 16> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ2S, d)) * 0.125f;
    }
    static __device__ __forceinline__ i32 sixteen(Global<const u8> block, u32 t, u32* q) {
        u32 qh = __ldg(block + (OFFSET(BlockIQ2S, qh) + t / 2)) >> (4 * (t % 2));
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            u32 low = __ldg(block + (OFFSET(BlockIQ2S, qs) + 2 * t + k));
            u32 signs = __ldg(block + (OFFSET(BlockIQ2S, signs) + 2 * t + k));
            u32 point = IQ2_S_POINTS.of[low | (qh >> (2 * k) & 3) << 8];
            signed_eight(point, signs, q + 2 * k);
        }
        u32 scales = __ldg(block + (OFFSET(BlockIQ2S, scales) + t / 2));
        return 2 * (scales >> (4 * (t % 2)) & 15) + 1;
    }
};

struct IQ3_XXS : Grid<IQ3_XXS, sizeof(BlockIQ3XXS), 32> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ3XXS, d)) * 0.25f;
    }
    static __device__ __forceinline__ i32 sixteen(Global<const u8> block, u32 t, u32* q) {
        u32 numbers[1], word[1];
        load_words<ALIGN>(block + (OFFSET(BlockIQ3XXS, qs) + 4 * t), numbers);
        load_words<ALIGN>(block + (OFFSET(BlockIQ3XXS, words) + t / 2 * 4), word);
        u32 first = 2 * (t % 2);
        u32 signs = even_signs(word[0], first) | even_signs(word[0], first + 1) << 8;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 point = IQ3_XXS_POINTS.of[numbers[0] >> (8 * k) & 0xff];
            u32 magnitudes = __byte_perm(IQ3_XXS_VALUES[0], IQ3_XXS_VALUES[1], point);
            q[k] = with_signs(magnitudes, signs >> (4 * k));
        }
        return 2 * (word[0] >> 28) + 1;
    }
};

struct IQ3_S : Grid<IQ3_S, sizeof(BlockIQ3S), 32> {
    static __device__ __forceinline__ float d(Global<const u8> block, u32) {
        return load_f16(block + OFFSET(BlockIQ3S, d));
    }
    static __device__ __forceinline__ i32 sixteen(Global<const u8> block, u32 t, u32* q) {
        u32 numbers[1];
        load_words<ALIGN>(block + (OFFSET(BlockIQ3S, qs) + 4 * t), numbers);
        u32 qh = __ldg(block + (OFFSET(BlockIQ3S, qh) + t / 2)) >> (4 * (t % 2));
        u32 signs = load_u16(block + (OFFSET(BlockIQ3S, signs) + 2 * t));
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 point = IQ3_S_POINTS.of[(numbers[0] >> (8 * k) & 0xff) | (qh >> k & 1) << 8];
            u32 magnitudes = __byte_perm(IQ3_S_VALUES[0], IQ3_S_VALUES[1], point);
            q[k] = with_signs(magnitudes, signs >> (4 * k));
        }
        u32 scales = __ldg(block + (OFFSET(BlockIQ3S, scales) + t / 4));
        return 2 * (scales >> (4 * (t / 2 % 2)) & 15) + 1;
    }
};
