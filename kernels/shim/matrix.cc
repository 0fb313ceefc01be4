// Half precision, and matrix instructions on fragments in the threads of a warp.
#include "run.h"

float f16_to_f32(u16 bits) {
    u32 sign = static_cast<u32>(bits & 0x8000) << 16;
    u32 exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 0) {
        // Zero or subnormal: so many times 2^-24, exact.
        float value = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -value : value;
    }
    u32 wide = exponent == 31 ? 255 : exponent + 112;
    return __uint_as_float(sign | wide << 23 | fraction << 13);
}

u16 f32_to_f16(float value) {
    u32 bits = __float_as_uint(value);
    u16 sign = static_cast<u16>(bits >> 16 & 0x8000);
    u32 magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;  // NaN, as the GPU writes it
    if (magnitude >= 0x47800000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {
        // Subnormal: adding 0.5 leaves the fraction, rounded, in the lowest bits.
        float rounded = __uint_as_float(magnitude) + 0.5f;
        return static_cast<u16>(sign | (__float_as_uint(rounded) - 0x3f000000));
    }
    u32 odd = magnitude >> 13 & 1;
    return static_cast<u16>(sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

namespace shim {

struct Fragments {
    u32 a[4];
    u32 b[2];
};

// The operands of one mma, with the fragments of all threads.
struct Operands {
    const Gift* all;

    // Element (row, k) of a, where a register holds `n` of `bits` bits: 2 halves or 4 bytes. The
    // registers cover rows 0-7 and 8-15 of the first half of k, then of the second.
    u32 a(u32 row, u32 k, u32 n) const {
        u32 half = 4 * n, word = row / 8 + 2 * (k / half);
        return part(row % 8 * 4 + k % half / n, word, k % n, n);
    }
    u32 b(u32 k, u32 column, u32 n) const {
        u32 half = 4 * n;
        return part(column * 4 + k % half / n, 4 + k / half, k % n, n);
    }
    u32 part(u32 lane, u32 word, u32 i, u32 n) const {
        return all[lane].words[word] >> (32 / n * i) & (n == 2 ? 0xffff : 0xff);
    }
};

static Operands give(const u32 (&a)[4], const u32 (&b)[2]) {
    Fragments mine;
    memcpy(mine.a, a, sizeof(a));
    memcpy(mine.b, b, sizeof(b));
    return Operands{exchange(Collective::Matrix, FULL_WARP, gift_of(mine))};
}

// Row and column of element i of the four elements of d that this thread holds.
static u32 row_of(u32 i) { return lane() / 4 + i / 2 * 8; }
static u32 column_of(u32 i) { return lane() % 4 * 2 + i % 2; }

static void load(u32 (&r)[4], const Shared<const u16>& row, bool transposed) {
    u32 lane = shim::lane();
    const u8* bytes = checked<16, 16>(row.piece(), row.address(), Access::Read);
    Gift mine = {};
    memcpy(&mine, bytes, 16);
    const Gift* all = exchange(Collective::Matrix, FULL_WARP, mine);
    auto element = [&](u32 matrix, u32 row, u32 column) {
        return all[matrix * 8 + row].words[column / 2] >> (column % 2 * 16) & 0xffff;
    };
    u32 line = lane / 4, pair = lane % 4 * 2;
    for (u32 j = 0; j < 4; j++) {
        u32 low = transposed ? element(j, pair, line) : element(j, line, pair);
        u32 high = transposed ? element(j, pair + 1, line) : element(j, line, pair + 1);
        r[j] = low | high << 16;
    }
}

}  // namespace shim

void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    shim::Operands operands = shim::give(a, b);
    for (u32 i = 0; i < 4; i++) {
        for (u32 k = 0; k < 16; k++) {
            u32 x = operands.a(shim::row_of(i), k, 2), y = operands.b(k, shim::column_of(i), 2);
            d[i] = fmaf(f16_to_f32(static_cast<u16>(x)), f16_to_f32(static_cast<u16>(y)), d[i]);
        }
    }
}

void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    shim::Operands operands = shim::give(a, b);
    for (u32 i = 0; i < 4; i++) {
        for (u32 k = 0; k < 16; k++) {
            u32 x = operands.a(shim::row_of(i), k, 2), y = operands.b(k, shim::column_of(i), 2);
            d[i] = fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16), d[i]);
        }
    }
}

void mma_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    shim::Operands operands = shim::give(a, b);
    for (u32 i = 0; i < 4; i++) {
        for (u32 k = 0; k < 32; k++) {
            i32 x = static_cast<i8>(operands.a(shim::row_of(i), k, 4));
            i32 y = static_cast<i8>(operands.b(k, shim::column_of(i), 4));
            d[i] += x * y;
        }
    }
}

void load_matrices(u32 (&r)[4], const Shared<const u16>& row) { shim::load(r, row, false); }
void load_matrices_transposed(u32 (&r)[4], const Shared<const u16>& row) {
    shim::load(r, row, true);
}
