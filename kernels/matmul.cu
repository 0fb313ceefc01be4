// Matrix times the activations of many tokens, by tensor cores:
//
//   out[t, r] (+)= weights[r] · x[t] (+ bias[r])
//
// for one matrix, or for several *items*: an item is an expert's matrix and the tokens that chose
// the expert. An expert's matrix may be cut between rows into granules, which lie apart.
//
// Twin: `Kernels::matmul` (src/simd/scalar.rs), to the bit. Integers are exact in any order: codes
// and activations are multiplied as i8, sums of a sub-block are scaled as int32. Float sums keep
// the order of "One arithmetic":
//
// - Units of 256. Eight sums an output would fill the registers, so the lanes of the order are
//   done one after the other (units l, l + 8, …), in the order 0, 4, 2, 6, 1, 5, 3, 7: then the
//   tree needs one sum a level, as a binary counter that carries. Blocks are still read whole.
//   Mins are a product too, mins · sums of 16 activations; a sum of 12 bits is 128·high + low.
// - Units of 32 and 16. A tile of 256 columns holds each lane once or twice, so eight sums an
//   output are kept, and the tile has half the tokens.
//
// A block of 256 threads makes 64 rows of 64 (32) tokens: each thread decodes a part of a row's
// block into shared memory, then each of 8 warps multiplies 16 rows with half of the tokens. The
// format is decoded once for 64 tokens; for each tensor-core instruction of 4096 products there
// are about four to scale its results and one to load factors. Shared memory is 48 KB or less, and
// rows of a tile lie 272 bytes apart, which keeps load_matrices free of bank conflicts. Two blocks
// leave 128 registers a thread, and the sums of a wide tile are 80: so what a multiplying loop does
// not use lies in shared memory, and no result is added up under a condition of its own.
// Expected bytes: the weights once for 64 (32) tokens, from L2 after the first time; each token's
// activations once for 64 rows.
#include "quant/formats.cuh"
#include "quant/tiles.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 ROWS = 64;

struct MatmulParams {
    // One matrix [n_rows, n_cols] of blocks without gaps. Null where `matrices` is not.
    Address<const u8> weights;
    // [items, n_granules]: the address of each granule, of which the matrix's rows begin at byte
    // `matrix_at`. A granule with address 0 is left out. Null where one matrix is multiplied.
    Address<const u64> matrices;
    u64 matrix_at;
    u32 n_rows;
    u32 n_cols;
    // Records of quant/acts.cuh with `x_cols` columns each, of which n_cols are read from first_col
    // on.
    Address<const u8> x;
    u32 x_cols;
    u32 first_col;
    // The record of each token of the items. Null if the records are in the order of the items.
    Address<const u32> tokens;
    // [blocks along y, 4]: the item of a tile, its first token among those of all items, how many
    // it has, and nothing. One without tokens is left out. Null for one item, which has n_tokens.
    Address<const u32> tiles;
    // [items]: the row of `bias` that an item adds. Null if it is that of its number.
    Address<const u32> experts;
    // [experts, bias_stride] or null
    Address<const float> bias;
    // [tokens of all items, out_stride]
    Address<float> out;
    u32 n_tokens;
    // Whether the products are added to `out`.
    u32 accumulate;
    u32 out_stride;
    u32 bias_stride;
    // Rows of a granule but the last: a multiple of ROWS if there are several granules.
    u32 granule_rows;
    u32 n_granules;
};
static_assert(sizeof(MatmulParams) == 112);

// A tile's place, which the multiplying loop does not use.
struct Place {
    // Row 0 of its item's matrix, if that began in the tile's granule.
    Global<const u8> weights;
    // The first token, and the row of `bias`.
    u32 first, bias_row;
};

// The tile that a block of threads computes.
struct Product {
    u32 n_rows, n_cols;
    Shared<const Tokens> x;
    Shared<const Place> place;
    u32 first_row;
};

// ---- units of 256

static constexpr u32 WIDE_TOKENS = 64;
// Eight tokens each, of a warp: half of the tile.
static constexpr u32 WIDE_NS = WIDE_TOKENS / 2 / 8;

// Values whose products are scaled together: all, where a code is stored times its scale.
template <class F>
static constexpr u32 SUB = F::FOLDS ? 256 : F::SUB;

struct WideTile {
    Shared<u8> codes, tokens;
    // [row][chunk]
    Shared<i8> scales, mins;
    Shared<float> d, dmin, token_scales;
    // Sums of 16 activations as 128·high + low, [token][chunk].
    Shared<u32> high, low;
};

template <class F>
__device__ __forceinline__ void fill_wide(const WideTile& tile, const Product& p, u32 b) {
    u32 row = threadIdx.x / 4, part = threadIdx.x % 4;
    Part<4> w = {};
    float d = 0.0f, dmin = 0.0f;
    if (p.first_row + row < p.n_rows) {
        Place place = p.place[0];
        Global<const u8> block = place.weights + (p.first_row + row) * row_bytes<F>(p.n_cols);
        block = block + static_cast<u64>(b) * F::BYTES;
        F::part(block, part, w);
        d = F::d(block, part);
        dmin = F::dmin(block);
    }
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
        u32 chunk = F::chunk(part, c);
        if constexpr (F::FOLDS) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) w.q[4 * c + i] *= static_cast<u32>(w.scale[c]);
        }
        store_chunk(tile.codes, row, chunk, w.q + 4 * c);
        if constexpr (SUB<F> < 256) tile.scales[16 * row + chunk] = static_cast<i8>(w.scale[c]);
        if constexpr (F::MINS) tile.mins[16 * row + chunk] = static_cast<i8>(w.min[c]);
    }
    if (part == 0) {
        tile.d[row] = d;
        if constexpr (F::MINS) tile.dmin[row] = dmin;
    }
    hold_loads();
    Tokens x = p.x[0];
    fill_tokens<256, THREADS>(tile.tokens, x, WIDE_TOKENS, 256 * b, p.n_cols);
    hold_loads();
    // Four threads a token, with four sums each.
    u32 t = threadIdx.x / 4, quarter = threadIdx.x % 4, high = 0, low = 0;
    float scale = 0.0f;
    if (t < x.n) {
        Acts<256> acts(x.records, x.cols, x.record(t), x.first_col + 256 * b);
        scale = acts.scale(0);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            i32 sum = F::MINS ? __ldg(acts.sums16 + (4 * quarter + i)) : 0;
            low |= static_cast<u32>(sum & 127) << (8 * i);
            high |= static_cast<u32>(sum >> 7 & 255) << (8 * i);
        }
    }
    if constexpr (F::MINS) {
        tile.high[threadIdx.x] = high;
        tile.low[threadIdx.x] = low;
    }
    if (quarter == 0) tile.token_scales[t] = scale;
}

// Results of mma_s8 that a scale a row makes a sub-block's share.
__device__ __forceinline__ void add_scaled(i32 (&isum)[4], const i32 (&dot)[4], i32 upper,
                                           i32 lower) {
    isum[0] += upper * dot[0];
    isum[1] += upper * dot[1];
    isum[2] += lower * dot[2];
    isum[3] += lower * dot[3];
}

// isum of 16 rows and 8·WIDE_NS tokens: as mma_s8 has results, for each eight tokens.
template <class F>
__device__ __forceinline__ void wide_isums(i32 (&isum)[WIDE_NS][4], const WideTile& tile, u32 row,
                                           u32 token) {
    u32 group = threadIdx.x % WARP / 4;
#pragma unroll
    for (u32 n = 0; n < WIDE_NS; n++) isum[n][0] = isum[n][1] = isum[n][2] = isum[n][3] = 0;
#pragma unroll 1
    for (u32 j = 0; j < 8; j++) {
        u32 a[4], b[4];
        load_rows(a, tile.codes, row, 32 * j);
        if constexpr (SUB<F> == 16) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                load_tokens_half(b, tile.tokens, token, 32 * j + 16 * half);
                i32 upper = tile.scales[16 * (row + group) + 2 * j + half];
                i32 lower = tile.scales[16 * (row + group + 8) + 2 * j + half];
#pragma unroll
                for (u32 n = 0; n < WIDE_NS; n++) {
                    i32 dot[4] = {0, 0, 0, 0};
                    mma_s8_half(dot, a[2 * half], a[2 * half + 1], b[n]);
                    add_scaled(isum[n], dot, upper, lower);
                }
            }
            continue;
        }
        i32 upper = 1, lower = 1;
        if constexpr (SUB<F> == 32) {
            upper = tile.scales[16 * (row + group) + 2 * j];
            lower = tile.scales[16 * (row + group + 8) + 2 * j];
        }
#pragma unroll
        for (u32 n = 0; n < WIDE_NS; n++) {
            if (n % 2 == 0) load_tokens(b, tile.tokens, token + 8 * n, 32 * j);
            const u32 own[2] = {b[n % 2 * 2], b[n % 2 * 2 + 1]};
            if constexpr (SUB<F> == 32) {
                i32 dot[4] = {0, 0, 0, 0};
                mma_s8(dot, a, own);
                add_scaled(isum[n], dot, upper, lower);
            } else {
                mma_s8(isum[n], a, own);
            }
        }
    }
}

// imins of 16 rows and the eight tokens from `token` on, which were 0.
__device__ __forceinline__ void wide_imins(i32 (&imins)[4], const WideTile& tile, u32 row,
                                           u32 token) {
    u32 group = threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
    Shared<const u32> mins = as<const u32>(tile.mins);
    u32 upper = mins[4 * (row + group) + quad], lower = mins[4 * (row + group + 8) + quad];
    mma_s8_half(imins, upper, lower, tile.high[4 * (token + group) + quad]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) imins[i] *= 128;
    mma_s8_half(imins, upper, lower, tile.low[4 * (token + group) + quad]);
}

// sum += the unit's share, for the results of a thread.
template <class F>
__device__ __forceinline__ void add_wide_unit(float (&sum)[WIDE_NS][4], const WideTile& tile,
                                              u32 row, u32 token) {
    u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4 * 2;
    i32 isum[WIDE_NS][4];
    wide_isums<F>(isum, tile, row, token);
    float d[2] = {tile.d[row + group], tile.d[row + group + 8]};
    float dmin[2] = {0.0f, 0.0f};
    if constexpr (F::MINS) dmin[0] = tile.dmin[row + group], dmin[1] = tile.dmin[row + group + 8];
#pragma unroll
    for (u32 n = 0; n < WIDE_NS; n++) {
        hold_loads();
        i32 imins[4] = {0, 0, 0, 0};
        if constexpr (F::MINS) wide_imins(imins, tile, row, token + 8 * n);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float scale = tile.token_scales[token + 8 * n + pair + i % 2];
            sum[n][i] = fmaf(d[i / 2] * scale, static_cast<float>(isum[n][i]), sum[n][i]);
            if constexpr (F::MINS) {
                float mins = static_cast<float>(imins[i]);
                sum[n][i] = fmaf(-(dmin[i / 2] * scale), mins, sum[n][i]);
            }
        }
    }
}

// sums = values, or sums + values.
__device__ __forceinline__ void join(float (&sums)[WIDE_NS][4], const float (&values)[WIDE_NS][4],
                                     bool adds) {
#pragma unroll
    for (u32 i = 0; i < 4 * WIDE_NS; i++) {
        float& sum = sums[i / 4][i % 4];
        sum = adds ? sum + values[i / 4][i % 4] : values[i / 4][i % 4];
    }
}

// out[n][i]: the results of this thread, as mma_s8 has them, for each eight tokens of its warp.
template <class F>
__device__ __forceinline__ void wide_product(float (&out)[WIDE_NS][4], const Product& p) {
    // A block has 48 KB of shared memory, and these fill it.
    constexpr u32 PARKED = F::MINS ? 9 : 12;
    SHARED(uint4, codes, ROWS * TILE_STRIDE / 16);
    SHARED(uint4, tokens, WIDE_TOKENS * TILE_STRIDE / 16);
    SHARED(uint4, scales, ROWS);
    SHARED(uint4, mins, F::MINS ? ROWS : 1);
    SHARED(float, d, ROWS);
    SHARED(float, dmin, ROWS);
    SHARED(float, token_scales, WIDE_TOKENS);
    SHARED(u32, high, F::MINS ? WIDE_TOKENS * 4 : 1);
    SHARED(u32, low, F::MINS ? WIDE_TOKENS * 4 : 1);
    SHARED(float, parked, PARKED * THREADS);
    WideTile tile = {as<u8>(codes), as<u8>(tokens), as<i8>(scales), as<i8>(mins), d, dmin,
                     token_scales, high, low};
    u32 warp = threadIdx.x / WARP, n_units = p.n_cols / 256;
    // The sums of one, two and four lanes that wait for as many others. PARKED of the last, which
    // are touched twice a tile, are in shared memory.
    float one[WIDE_NS][4] = {}, two[WIDE_NS][4] = {}, four[WIDE_NS][4] = {};
#pragma unroll 1
    for (u32 pass = 0; pass < 8; pass++) {
        u32 lane = (pass & 1) << 2 | (pass & 2) | pass >> 2;
        float sum[WIDE_NS][4] = {};
#pragma unroll 1
        for (u32 b = lane; b < n_units; b += 8) {
            __syncthreads();
            fill_wide<F>(tile, p, b);
            __syncthreads();
            add_wide_unit<F>(sum, tile, warp % 4 * 16, warp / 4 * (WIDE_TOKENS / 2));
        }
        join(one, sum, pass & 1);
        if ((pass & 1) == 0) continue;
        join(two, one, pass & 2);
        if ((pass & 2) == 0) continue;
        if ((pass & 4) == 0) {
#pragma unroll
            for (u32 i = 0; i < 4 * WIDE_NS; i++) {
                if (i < PARKED) parked[i * THREADS + threadIdx.x] = two[i / 4][i % 4];
                else four[i / 4][i % 4] = two[i / 4][i % 4];
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4 * WIDE_NS; i++) {
        float first = i < PARKED ? parked[i * THREADS + threadIdx.x] : four[i / 4][i % 4];
        out[i / 4][i % 4] = first + two[i / 4][i % 4];
    }
}

// ---- units of 32 and 16

static constexpr u32 NARROW_TOKENS = 32;
static constexpr u32 NARROW_NS = NARROW_TOKENS / 2 / 8;

struct NarrowTile {
    Shared<u8> codes, tokens;
    // [row][unit]
    Shared<float> d, dmin;
    // [token][32 columns]: scales, and sums of the activations
    Shared<float> token_scales, token_sums;
};

template <class F>
__device__ __forceinline__ void fill_narrow(const NarrowTile& tile, const Product& p, u32 col) {
    constexpr u32 UNITS = TILE_COLS / F::UNIT;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
        u32 row = i / UNITS, b = col / F::UNIT + i % UNITS;
        Part<F::CHUNKS> w = {};
        float d = 0.0f, dmin = 0.0f;
        if (p.first_row + row < p.n_rows && b < p.n_cols / F::UNIT) {
            Place place = p.place[0];
            Global<const u8> block = place.weights + (p.first_row + row) * row_bytes<F>(p.n_cols);
            block = block + static_cast<u64>(b / (F::LEN / F::UNIT)) * F::BYTES;
            F::part(block, b % F::PARTS, w);
            d = F::d(block, b % F::PARTS);
            dmin = F::dmin(block);
        }
#pragma unroll
        for (u32 c = 0; c < F::CHUNKS; c++) {
            store_chunk(tile.codes, row, i % UNITS * F::CHUNKS + c, w.q + 4 * c);
        }
        tile.d[i] = d;
        if constexpr (F::MINS) tile.dmin[i] = dmin;
    }
    Tokens x = p.x[0];
    fill_tokens<F::UNIT, THREADS>(tile.tokens, x, NARROW_TOKENS, col, p.n_cols);
    // Eight blocks of 32 a token: one each thread.
    u32 t = threadIdx.x / 8, at = threadIdx.x % 8;
    float scale = 0.0f, sum = 0.0f;
    if (t < x.n && col + 32 * at < p.n_cols) {
        Acts<F::UNIT> acts(x.records, x.cols, x.record(t), x.first_col + col);
        scale = __ldg(acts.scales + at);
        sum = static_cast<float>(__ldg(acts.sums32 + at));
    }
    tile.token_scales[threadIdx.x] = scale;
    if constexpr (F::MINS) tile.token_sums[threadIdx.x] = sum;
}

// Adds the tile's units to the eight lanes of each result.
template <class F>
__device__ __forceinline__ void add_narrow_units(float (&sum)[8][NARROW_NS][4],
                                                 const NarrowTile& tile, u32 row, u32 token) {
    constexpr u32 UNITS = TILE_COLS / F::UNIT;
    u32 group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4 * 2;
    // Eight units of sixteen at once would take more registers than there are.
    [[maybe_unused]] constexpr u32 AT_ONCE = F::UNIT / 4;
#pragma unroll AT_ONCE
    for (u32 j = 0; j < 8; j++) {
        hold_loads();
        u32 a[4], b[4];
        load_rows(a, tile.codes, row, 32 * j);
        load_tokens(b, tile.tokens, token, 32 * j);
#pragma unroll
        for (u32 half = 0; half < 32 / F::UNIT; half++) {
            u32 unit = j * (32 / F::UNIT) + half;
#pragma unroll
            for (u32 n = 0; n < NARROW_NS; n++) {
                hold_loads();
                i32 dot[4] = {0, 0, 0, 0};
                if constexpr (F::UNIT == 16) {
                    mma_s8_half(dot, a[2 * half], a[2 * half + 1], b[2 * n + half]);
                } else {
                    mma_s8(dot, a, {b[2 * n], b[2 * n + 1]});
                }
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float& s = sum[unit % 8][n][i];
                    u32 at = UNITS * (row + group + i / 2 * 8) + unit;
                    u32 of_token = 8 * (token + 8 * n + pair + i % 2) + j;
                    float scale = tile.token_scales[of_token];
                    s = fmaf(tile.d[at] * scale, static_cast<float>(dot[i]), s);
                    if constexpr (F::MINS) {
                        s = fmaf(-(tile.dmin[at] * scale), tile.token_sums[of_token], s);
                    }
                }
            }
        }
    }
}

template <class F>
__device__ __forceinline__ void narrow_product(float (&out)[NARROW_NS][4], const Product& p) {
    SHARED(uint4, codes, ROWS * TILE_STRIDE / 16);
    SHARED(uint4, tokens, NARROW_TOKENS * TILE_STRIDE / 16);
    SHARED(float, d, ROWS * (TILE_COLS / F::UNIT));
    SHARED(float, dmin, ROWS * (TILE_COLS / F::UNIT));
    SHARED(float, token_scales, NARROW_TOKENS * 8);
    SHARED(float, token_sums, NARROW_TOKENS * 8);
    NarrowTile tile = {as<u8>(codes), as<u8>(tokens), d, dmin, token_scales, token_sums};
    u32 warp = threadIdx.x / WARP;
    float sum[8][NARROW_NS][4] = {};
    for (u32 col = 0; col < p.n_cols; col += TILE_COLS) {
        __syncthreads();
        fill_narrow<F>(tile, p, col);
        __syncthreads();
        add_narrow_units<F>(sum, tile, warp % 4 * 16, warp / 4 * (NARROW_TOKENS / 2));
    }
#pragma unroll
    for (u32 n = 0; n < NARROW_NS; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float lanes[8];
#pragma unroll
            for (u32 l = 0; l < 8; l++) lanes[l] = sum[l][n][i];
            out[n][i] = tree8(lanes);
        }
    }
}

// ---- both

// Whether the block has nothing to do, which its threads all say alike. After a vote ptxas knows
// that warps stay whole, and takes fewer registers with scales of sixteens, but more with mins.
template <class F>
__device__ __forceinline__ bool stops(bool has_nothing) {
    if constexpr (F::UNIT == 256 && SUB<F> == 16) return __all_sync(FULL_WARP, has_nothing);
    return has_nothing;
}

template <class F>
__device__ __forceinline__ void matmul(const MatmulParams& params) {
    Global<const u64> matrices = params.matrices;
    Global<const u8> x = params.x;
    Global<const u32> list = params.tokens, tiles = params.tiles, experts = params.experts;
    Global<const float> bias = params.bias;
    Global<float> out = params.out;
    u32 n_rows = params.n_rows, x_cols = params.x_cols, out_stride = params.out_stride;
    constexpr bool WIDE = F::UNIT == 256;
    constexpr u32 NS = WIDE ? WIDE_NS : NARROW_NS, TOKENS = WIDE ? WIDE_TOKENS : NARROW_TOKENS;
    u32 item = 0, first = blockIdx.y * TOKENS, n = min(TOKENS, params.n_tokens - first);
    if (tiles) {
        uint4 tile = as<const uint4>(tiles)[blockIdx.y];
        item = tile.x, first = tile.y, n = tile.z;
    }
    if (stops<F>(n == 0)) return;
    Global<const u8> weights = params.weights;
    u32 first_row = blockIdx.x * ROWS;
    if (matrices) {
        u32 granule = first_row / params.granule_rows;
        u64 address = matrices[static_cast<u64>(item) * params.n_granules + granule];
        if (stops<F>(address == 0)) return;
        // Row 0 would lie at this distance before it.
        i64 skipped = granule * params.granule_rows * row_bytes<F>(params.n_cols);
        weights = global<const u8>(address + params.matrix_at) - skipped;
    }
    SHARED(Tokens, tokens, 1);
    SHARED(Place, place, 1);
    if (threadIdx.x == 0) {
        // Without a list an item's activations lie where its results do.
        u64 skipped = list ? 0 : first * static_cast<u64>(ActLayout<F::UNIT>(x_cols).bytes);
        tokens[0] = Tokens{x + skipped, x_cols, params.first_col, list ? list + first : list, n};
        place[0] = Place{weights, first, experts ? experts[item] : item};
    }
    __syncthreads();
    Product p = {n_rows, params.n_cols, tokens, place, first_row};
    float result[NS][4];
    if constexpr (WIDE) {
        wide_product<F>(result, p);
    } else {
        narrow_product<F>(result, p);
    }
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 row = first_row + warp % 4 * 16 + lane / 4;
    u32 token = warp / 4 * (TOKENS / 2) + lane % 4 * 2;
    Tokens of_tile = tokens[0];
    Place at = place[0];
#pragma unroll
    for (u32 i = 0; i < 4 * NS; i++) {
        u32 r = row + i % 4 / 2 * 8, t = token + i / 4 * 8 + i % 2;
        if (r >= n_rows || t >= of_tile.n) continue;
        float value = result[i / 4][i % 4];
        if (bias) value += bias[static_cast<u64>(at.bias_row) * params.bias_stride + r];
        Global<float> to = out + (static_cast<u64>(at.first + t) * out_stride + r);
        *to = params.accumulate ? *to + value : value;
    }
}

// Two blocks a multiprocessor: one decodes while the other multiplies.
#define MATMUL(NAME, F) \
    KERNEL(matmul_##NAME, AT_LEAST(2, THREADS), MatmulParams) { matmul<F>(p); }

FOR_EACH_FORMAT(MATMUL)
