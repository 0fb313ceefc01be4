// Activations in the form that quantised products read. Twins: src/simd/acts.rs,
// src/backend/gpu/acts.rs.
//
// A token is one record, its arrays one after the other, each on a boundary of 64 bytes:
//
//   F32    f32[cols]
//   Q8_0   i8[cols], f32 scales[cols/32], i16 sums[cols/32]
//   Q8_K   i8[cols], f32 scales[cols/256], i16 sums[cols/32], i16 sums[cols/16]
//
// `cols` are those of the record; a product may read a run of them.
#pragma once

#include "part.cuh"

__device__ __forceinline__ constexpr u32 to_line(u32 bytes) { return (bytes + 63) & ~63u; }

// The record of activations that units of UNIT values pair with.
template <u32 UNIT>
struct ActLayout {
    static constexpr u32 SCALED = UNIT == 256 ? 256 : 32;
    u32 scales, sums32, sums16, bytes;

    explicit __device__ __forceinline__ ActLayout(u32 cols) {
        scales = to_line(cols);
        sums32 = scales + to_line(4 * (cols / SCALED));
        sums16 = sums32 + to_line(2 * (cols / 32));
        bytes = UNIT == 256 ? sums16 + to_line(2 * (cols / 16)) : sums16;
    }
};

// One token's activations from some column on.
template <u32 UNIT>
struct Acts {
    Global<const i8> values;
    Global<const float> scales;
    Global<const i16> sums32;
    Global<const i16> sums16;

    __device__ __forceinline__ Acts(Global<const u8> records, u32 cols, u32 token, u32 first_col) {
        ActLayout<UNIT> at(cols);
        Global<const u8> record = records + static_cast<u64>(token) * at.bytes;
        values = as<const i8>(record) + first_col;
        scales = as<const float>(record + at.scales) + first_col / ActLayout<UNIT>::SCALED;
        sums32 = as<const i16>(record + at.sums32) + first_col / 32;
        sums16 = as<const i16>(record + at.sums16) + first_col / 16;
    }

    // The scale of unit b.
    __device__ __forceinline__ float scale(u32 b) const {
        return __ldg(scales + (UNIT == 16 ? b / 2 : b));
    }
};

// isum and imins of a unit, or a thread's share of them.
struct Ints {
    i32 isum, imins;
};

// The share of part p of unit b.
template <class F>
__device__ __forceinline__ Ints int_dot(const Part<F::CHUNKS>& w, const Acts<F::UNIT>& a, u32 b,
                                        u32 p) {
    Ints out = {0, 0};
    // A part of a unit, or a unit that is a part of a block.
    u32 in_unit = F::UNIT < F::LEN ? 0 : p;
#pragma unroll
    for (u32 c = 0; c < F::CHUNKS; c++) {
        u32 chunk = F::chunk(in_unit, c);
        int4 x = __ldg(as<const int4>(a.values + b * F::UNIT + 16 * chunk));
        i32 dot = dp4a(static_cast<i32>(w.q[4 * c]), x.x, 0);
        dot = dp4a(static_cast<i32>(w.q[4 * c + 1]), x.y, dot);
        dot = dp4a(static_cast<i32>(w.q[4 * c + 2]), x.z, dot);
        dot = dp4a(static_cast<i32>(w.q[4 * c + 3]), x.w, dot);
        out.isum += F::SUB < F::UNIT ? w.scale[c] * dot : dot;
        if constexpr (F::MINS && F::UNIT == 256) {
            // Two chunks of a sub-block of 32 lie next to each other.
            if constexpr (F::SUB == 32) {
                if (c % 2 == 0) out.imins += w.min[c] * __ldg(a.sums32 + (8 * b + chunk / 2));
            } else {
                out.imins += w.min[c] * __ldg(a.sums16 + (16 * b + chunk));
            }
        }
    }
    if constexpr (F::MINS && F::UNIT == 32) out.imins = __ldg(a.sums32 + b);
    return out;
}
