// Products of rows by the threads of a warp, for few tokens: common to matvec.cu, heads.cu and
// expert.cu.
//
// `lanes` threads of a warp (a power of two) take a row, or R rows that are multiplied with the
// same activations, which they then load once. Sums of integers are exact, so how they are split
// over threads is free; float sums follow "One arithmetic" (src/quant/mod.rs): eight lanes by unit
// b mod 8, each in ascending b, then the tree.
//
// - Units of 256: four threads a unit, a part each; a shuffle adds their integers. Eight such
//   groups are the eight lanes of the order: group g holds units g, g + 8, … A row of fewer than
//   five units takes fewer groups, and a warp so many more rows; lanes without a unit are 0 and
//   need no adding (a sum that starts at +0 is never −0).
// - Units of 16 and 32: a thread a unit, so that each loads 8 to 32 bytes that lie next to its
//   neighbours'. Each of eight neighbouring threads keeps one lane of the order and gets that
//   lane's units from the others in ascending b; all groups of eight compute the same sums.
#pragma once

#include "acts.cuh"

// Activations of some tokens from some column on.
struct Records {
    Global<const u8> bytes;
    u32 cols, first_token, first_col;

    template <u32 UNIT>
    __device__ __forceinline__ Acts<UNIT> token(u32 t) const {
        return Acts<UNIT>(bytes, cols, first_token + t, first_col);
    }
};

// The block of unit b in a row.
template <class F>
__device__ __forceinline__ Global<const u8> unit_block(Global<const u8> row, u32 b) {
    return row + static_cast<u64>(b / (F::LEN / F::UNIT)) * F::BYTES;
}

// sum[r][t] = row r · token t, in each of the row's threads. `live` says whether this thread's rows
// exist; the whole warp has to come here, with the same `n_tokens` (at most TOKENS).
template <class F, u32 R, u32 TOKENS>
__device__ __forceinline__ void wide_dots(const Global<const u8> (&rows)[R], bool live, u32 n_units,
                                          u32 lanes, const Records& x, u32 n_tokens,
                                          float (&sum)[R][TOKENS]) {
    u32 group = threadIdx.x % lanes / 4, p = threadIdx.x % 4;
    for (u32 first = 0; first < n_units; first += lanes / 4) {
        u32 b = first + group;
        bool on = live && b < n_units;
        Part<F::CHUNKS> part[R];
        float d[R], dmin[R];
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            if (!on) continue;
            Global<const u8> block = unit_block<F>(rows[r], b);
            F::part(block, p, part[r]);
            d[r] = F::d(block, p);
            dmin[r] = F::dmin(block);
        }
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) {
            if (TOKENS > 1 && t >= n_tokens) break;
            Acts<F::UNIT> acts = x.token<F::UNIT>(t);
#pragma unroll
            for (u32 r = 0; r < R; r++) {
                Ints ints = {0, 0};
                if (on) ints = int_dot<F>(part[r], acts, b, p);
                ints.isum += __shfl_xor_sync(FULL_WARP, ints.isum, 1);
                ints.isum += __shfl_xor_sync(FULL_WARP, ints.isum, 2);
                if constexpr (F::MINS) {
                    ints.imins += __shfl_xor_sync(FULL_WARP, ints.imins, 1);
                    ints.imins += __shfl_xor_sync(FULL_WARP, ints.imins, 2);
                }
                if (!on) continue;
                float scale = acts.scale(b);
                float isum = static_cast<float>(ints.isum);
                sum[r][t] = fmaf(d[r] * scale, isum, sum[r][t]);
                if constexpr (F::MINS) {
                    float imins = static_cast<float>(ints.imins);
                    sum[r][t] = fmaf(-(dmin[r] * scale), imins, sum[r][t]);
                }
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < R; r++) {
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) {
            float& s = sum[r][t];
            if (lanes > 16) s += __shfl_xor_sync(FULL_WARP, s, 16);
            if (lanes > 8) s += __shfl_xor_sync(FULL_WARP, s, 8);
            if (lanes > 4) s += __shfl_xor_sync(FULL_WARP, s, 4);
        }
    }
}

// The same for units of 16 and 32; at least eight lanes.
template <class F, u32 R, u32 TOKENS>
__device__ __forceinline__ void narrow_dots(const Global<const u8> (&rows)[R], bool live,
                                            u32 n_units, u32 lanes, const Records& x, u32 n_tokens,
                                            float (&sum)[R][TOKENS]) {
    u32 lane = threadIdx.x % WARP, row_start = lane & ~(lanes - 1);
    for (u32 first = 0; first < n_units; first += lanes) {
        u32 b = first + (lane - row_start), p = b % F::PARTS;
        bool on = live && b < n_units;
        Part<F::CHUNKS> part[R];
        float d[R], dmin[R];
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            if (!on) continue;
            Global<const u8> block = unit_block<F>(rows[r], b);
            F::part(block, p, part[r]);
            d[r] = F::d(block, p);
            dmin[r] = F::dmin(block);
        }
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) {
            if (TOKENS > 1 && t >= n_tokens) break;
            Acts<F::UNIT> acts = x.token<F::UNIT>(t);
#pragma unroll
            for (u32 r = 0; r < R; r++) {
                // A thread without a unit adds 0·0.
                float scale = 0.0f, min_scale = 0.0f;
                Ints ints = {0, 0};
                if (on) {
                    ints = int_dot<F>(part[r], acts, b, p);
                    scale = d[r] * acts.scale(b);
                    if constexpr (F::MINS) min_scale = -(dmin[r] * acts.scale(b));
                }
                float isum = static_cast<float>(ints.isum);
                float imins = static_cast<float>(ints.imins);
#pragma unroll
                for (u32 k = 0; k < WARP; k += 8) {
                    if (k >= lanes) break;
                    u32 from = row_start + k + lane % 8;
                    sum[r][t] = fmaf(__shfl_sync(FULL_WARP, scale, from),
                                     __shfl_sync(FULL_WARP, isum, from), sum[r][t]);
                    if constexpr (F::MINS) {
                        sum[r][t] = fmaf(__shfl_sync(FULL_WARP, min_scale, from),
                                         __shfl_sync(FULL_WARP, imins, from), sum[r][t]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < R; r++) {
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) sum[r][t] = tree8_threads(sum[r][t]);
    }
}

template <class F, u32 R, u32 TOKENS>
__device__ __forceinline__ void row_dots(const Global<const u8> (&rows)[R], bool live, u32 n_cols,
                                         u32 lanes, const Records& x, u32 n_tokens,
                                         float (&sum)[R][TOKENS]) {
#pragma unroll
    for (u32 r = 0; r < R; r++) {
#pragma unroll
        for (u32 t = 0; t < TOKENS; t++) sum[r][t] = 0.0f;
    }
    if constexpr (F::UNIT == 256) {
        wide_dots<F>(rows, live, n_cols / F::UNIT, lanes, x, n_tokens, sum);
    } else {
        narrow_dots<F>(rows, live, n_cols / F::UNIT, lanes, x, n_tokens, sum);
    }
}
