// Products of F32, F16, BF16 and F8_E4M3 rows with f32 activations: "Float" of "One arithmetic".
// Eight threads of a warp take a row, thread i mod 8 the elements i in ascending order; so 32, 16
// or 8 neighbouring bytes of a row are read at a time, and the cache holds a sector's other part
// for the next load. The chain of additions is cols/8 long, as on the CPU.
#pragma once

#include "rows.cuh"

struct F32 {
    static constexpr u32 LEN = 1, BYTES = 4;
    static __device__ __forceinline__ float at(Global<const u8> row, u32 i) {
        return __ldg(as<const float>(row) + i);
    }
};
struct F16 {
    static constexpr u32 LEN = 1, BYTES = 2;
    static __device__ __forceinline__ float at(Global<const u8> row, u32 i) {
        return f16_to_f32(__ldg(as<const u16>(row) + i));
    }
};
struct BF16 {
    static constexpr u32 LEN = 1, BYTES = 2;
    static __device__ __forceinline__ float at(Global<const u8> row, u32 i) {
        return bf16_to_f32(__ldg(as<const u16>(row) + i));
    }
};

// Twin: src/quant/e4m3.rs.
struct F8_E4M3 {
    static constexpr u32 LEN = 1, BYTES = 1;
    static __device__ __forceinline__ float at(Global<const u8> row, u32 i) {
        u32 x = __ldg(row + i), magnitude = x & 0x7f;
        if (magnitude == 0x7f) return __uint_as_float(0x7fffffffu);
        // Exponent and mantissa where an f32 has them, 120 short of its bias: 2^120 puts that
        // right, for subnormal numbers too.
        return __uint_as_float((x & 0x80) << 24 | magnitude << 20) * __uint_as_float(247u << 23);
    }
};

#define FOR_EACH_FLOAT(X) X(f32, F32) X(f16, F16) X(bf16, BF16) X(f8_e4m3, F8_E4M3)

// Token t's values from the records' first column on.
__device__ __forceinline__ Global<const float> floats_of(const Records& x, u32 t) {
    u64 record = static_cast<u64>(x.first_token + t) * to_line(4 * x.cols);
    return as<const float>(x.bytes + record) + x.first_col;
}

// As row_dots (rows.cuh) with eight lanes. A thread loads eight elements (four, with many tokens)
// before it adds them, since each addition waits for the one before. The row is padded with zeros
// to a multiple of eight and no further: one more addition of 0·0 would turn −0 into +0.
template <class F, u32 R, u32 TOKENS>
__device__ __forceinline__ void float_dots(const Global<const u8> (&rows)[R], bool live, u32 n_cols,
                                           const Records& x, u32 n_tokens,
                                           float (&sum)[R][TOKENS]) {
    constexpr u32 DEPTH = TOKENS > 1 ? 4 : 8;
#pragma unroll
    for (u32 r = 0; r < R; r++) {
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) sum[r][t] = 0.0f;
    }
    u32 end = live ? n_cols : 0;
    for (u32 first = 0; first < end; first += 8 * DEPTH) {
        u32 at = first + threadIdx.x % 8;
        float w[R][DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++) {
#pragma unroll
            for (u32 r = 0; r < R; r++) w[r][k] = at + 8 * k < end ? F::at(rows[r], at + 8 * k) : 0;
        }
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) {
            if (TOKENS > 1 && t >= n_tokens) break;
            Global<const float> token = floats_of(x, t);
            float a[DEPTH];
#pragma unroll
            for (u32 k = 0; k < DEPTH; k++) {
                a[k] = at + 8 * k < end ? __ldg(token + (at + 8 * k)) : 0.0f;
            }
#pragma unroll
            for (u32 k = 0; k < DEPTH; k++) {
                if (first + 8 * k >= end) break;
#pragma unroll
                for (u32 r = 0; r < R; r++) sum[r][t] = fmaf(a[k], w[r][k], sum[r][t]);
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < R; r++) {
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) sum[r][t] = tree8_threads(sum[r][t]);
    }
}

// The same call for every format.
template <class F>
struct Dots {
    template <u32 R, u32 TOKENS>
    static __device__ __forceinline__ void of(const Global<const u8> (&rows)[R], bool live,
                                              u32 n_cols, u32 lanes, const Records& x,
                                              u32 n_tokens, float (&sum)[R][TOKENS]) {
        row_dots<F>(rows, live, n_cols, lanes, x, n_tokens, sum);
    }
};

#define FLOAT_DOTS(NAME, F)                                                                 \
    template <>                                                                             \
    struct Dots<F> {                                                                        \
        template <u32 R, u32 TOKENS>                                                        \
        static __device__ __forceinline__ void of(const Global<const u8> (&rows)[R],        \
                                                  bool live, u32 n_cols, u32,               \
                                                  const Records& x, u32 n_tokens,           \
                                                  float (&sum)[R][TOKENS]) {                \
            float_dots<F>(rows, live, n_cols, x, n_tokens, sum);                            \
        }                                                                                   \
    };
FOR_EACH_FLOAT(FLOAT_DOTS)
#undef FLOAT_DOTS
