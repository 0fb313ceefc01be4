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

// The operands of the four elements of d that a thread holds: two rows of a and two columns of b,
// each along k, as bytes or as halves.
struct Operands {
    u32 rows[2][8];
    u32 columns[2][8];
};

// Four threads hold a row or a column, each a word of the first half of k and one of the second.
static void gather(u32 (&line)[8], const Gift* threads, u32 first, u32 second) {
    for (u32 i = 0; i < 4; i++) {
        line[i] = threads[i].words[first];
        line[4 + i] = threads[i].words[second];
    }
}

static Operands exchange_operands(const u32 (&a)[4], const u32 (&b)[2]) {
    Fragments mine;
    memcpy(mine.a, a, sizeof(a));
    memcpy(mine.b, b, sizeof(b));
    const Gift* all = exchange(Collective::Matrix, FULL_WARP, gift_of(mine));
    u32 lane = shim::lane(), row = lane / 4, column = lane % 4 * 2;
    Operands operands;
    // The registers of a are of rows 0-7 and 8-15 in the first half of k, then in the second.
    gather(operands.rows[0], all + 4 * row, 0, 2);
    gather(operands.rows[1], all + 4 * row, 1, 3);
    gather(operands.columns[0], all + 4 * column, 4, 5);
    gather(operands.columns[1], all + 4 * (column + 1), 4, 5);
    return operands;
}

// d[i] += the sum over k of row i / 2 times column i % 2, in the order of k, of factors that
// `decode` makes of words.
template <class T, class Factor, u32 K, class Decode, class MultiplyAdd>
static void multiply(T (&d)[4], const Operands& operands, Decode decode, MultiplyAdd fma) {
    Factor rows[2][K], columns[2][K];
    for (u32 i = 0; i < 2; i++) {
        decode(rows[i], operands.rows[i]);
        decode(columns[i], operands.columns[i]);
    }
    for (u32 i = 0; i < 4; i++) {
        T sum = d[i];
        for (u32 k = 0; k < K; k++) sum = fma(rows[i / 2][k], columns[i % 2][k], sum);
        d[i] = sum;
    }
}

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
    auto decode = [](float (&out)[16], const u32 (&words)[8]) {
        for (u32 k = 0; k < 16; k++) {
            out[k] = f16_to_f32(static_cast<u16>(words[k / 2] >> (k % 2 * 16)));
        }
    };
    auto fma = [](float x, float y, float sum) { return fmaf(x, y, sum); };
    shim::multiply<float, float, 16>(d, shim::exchange_operands(a, b), decode, fma);
}

void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    auto decode = [](float (&out)[16], const u32 (&words)[8]) {
        for (u32 k = 0; k < 16; k++) {
            out[k] = __uint_as_float(words[k / 2] >> (k % 2 * 16) << 16);
        }
    };
    auto fma = [](float x, float y, float sum) { return fmaf(x, y, sum); };
    shim::multiply<float, float, 16>(d, shim::exchange_operands(a, b), decode, fma);
}

void mma_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    // As i16, which compilers multiply eight at a time.
    auto decode = [](i16 (&out)[32], const u32 (&words)[8]) {
        i8 bytes[32];
        memcpy(bytes, words, sizeof(bytes));
        for (u32 k = 0; k < 32; k++) out[k] = bytes[k];
    };
    auto fma = [](i16 x, i16 y, i32 sum) { return sum + x * y; };
    shim::multiply<i32, i16, 32>(d, shim::exchange_operands(a, b), decode, fma);
}

void load_matrices(u32 (&r)[4], const Shared<const u16>& row) { shim::load(r, row, false); }
void load_matrices_transposed(u32 (&r)[4], const Shared<const u16>& row) {
    shim::load(r, row, true);
}
