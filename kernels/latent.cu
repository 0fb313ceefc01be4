// Keys and values of the heads of latent attention, made of cached rows: for prompts, whose many
// queries pay for it (src/forward/gpu/expanded.rs). With c the compressed part of a position's row,
//
//   keys[h, t] = [weights[h]ᵀ · c[t], the part of t's row that is rotated]
//   values[h, t] = weights[h] · c[t]
//
// as halves, by tensor cores: rows and weights are rounded to f16 and multiplied exactly; sums are
// f32 in the hardware's order. The CPU takes queries to the compressed space instead
// (src/forward/mla.rs), so there is no twin.
//
// A block makes a head's COLS columns of ROWS positions: a warp 32 positions and 64 columns. Rows
// and weights come to shared memory DEPTH columns of the compressed part at a time.
// Expected bytes: the rows once for each head and COLS columns, the weights once for ROWS
// positions, both from L2 after the first time; the results once.
#include "cache_chunks.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 ROWS = 128, COLS = 128, DEPTH = 64;
// Halves from one row of a tile to the next, which keeps load_matrices free of bank conflicts.
static constexpr u32 DEEP = DEPTH + 8, WIDE = COLS + 8;

struct ExpandParams {
    // Rows of one head from the first position on (cache_rows.cuh), `row_bytes` apart: a compressed
    // part of `rank` elements and a rotated one of `n_rot`.
    Address<const u8> rows;
    // f32, [n_cols] rows of `rank` columns a head, or for keys [rank] rows of n_cols; head h has
    // the rows from first + h·step on.
    Address<const float> weights;
    // [heads, n_ctx] rows of `stride` halves
    Address<u16> out;
    u32 row_type;
    u32 row_bytes;
    u32 rank;
    u32 n_rot;
    u32 first;
    u32 step;
    // Positions, and columns of a head.
    u32 n_rows;
    u32 n_cols;
    u32 n_ctx;
    u32 stride;
};
static_assert(sizeof(ExpandParams) == 64);

__device__ __forceinline__ uint4 eight(const CacheF16& type, Global<const u8> row, u32 i) {
    return load_chunk(type, row, i);
}
__device__ __forceinline__ uint4 eight(const CacheQ8_0& type, Global<const u8> row, u32 i) {
    return load_chunk(type, row, i);
}
__device__ __forceinline__ uint4 eight(const CacheNibbles& type, Global<const u8> row, u32 i) {
    uint2 low = load_chunk(type, row, i), high = load_chunk(type, row, i + 4);
    return make_uint4(low.x, low.y, high.x, high.y);
}

// The positions of a launch.
struct Rows {
    Global<const u8> bytes;
    u32 type, row_bytes, n, rank;

    __device__ __forceinline__ Global<const u8> row(u32 i) const {
        return bytes + static_cast<u64>(i) * row_bytes;
    }
};

// Positions from `first` on and columns from `col` on; zeros where there are none. With LOADS on
// their way.
template <u32 LOADS, class T>
__device__ __forceinline__ void fill_as(const T& type, Shared<u16> tile, const Rows& rows,
                                        u32 first, u32 col) {
    constexpr u32 CHUNKS = DEPTH / 8;
#pragma unroll LOADS
    for (u32 n = 0; n < ROWS * CHUNKS / THREADS; n++) {
        u32 i = n * THREADS + threadIdx.x, row = i / CHUNKS, at = i % CHUNKS * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (first + row < rows.n && col + at < rows.rank) {
            v = eight(type, rows.row(first + row), col + at);
        }
        as<uint4>(tile + (row * DEEP + at))[0] = v;
    }
}

// Copies the rotated parts of the block's positions.
template <class T>
__device__ __forceinline__ void copy_rotated_as(const T& type, const Rows& rows, u32 first,
                                                u32 n_rot, Global<u16> out, u32 stride) {
    u32 chunks = n_rot / 8;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * chunks; i += THREADS) {
        u32 row = first + i / chunks, at = i % chunks * 8;
        if (row >= rows.n) break;
        uint4 v = eight(type, rows.row(row), rows.rank + at);
        as<uint4>(out + (static_cast<u64>(row) * stride + at))[0] = v;
    }
}

// Not inlined: the loop over halves then has the registers.
static __device__ __noinline__ void fill_blocks(Shared<u16> tile, Rows rows, u32 first, u32 col) {
    if (rows.type == CACHE_Q8_0) return fill_as<1>(CacheQ8_0{}, tile, rows, first, col);
    fill_as<1>(CacheNibbles(rows.type), tile, rows, first, col);
}

static __device__ __noinline__ void copy_rotated(Rows rows, u32 first, u32 n_rot, Global<u16> out,
                                                 u32 stride) {
    switch (rows.type) {
        case CACHE_F16: return copy_rotated_as(CacheF16{}, rows, first, n_rot, out, stride);
        case CACHE_Q8_0: return copy_rotated_as(CacheQ8_0{}, rows, first, n_rot, out, stride);
        default: break;
    }
    copy_rotated_as(CacheNibbles(rows.type), rows, first, n_rot, out, stride);
}

// N rows from first_row on and M columns from first_col on of the head's weights as halves,
// `stride` apart; zeros from `rows` and `cols` on.
template <u32 N, u32 M>
__device__ __forceinline__ void fill_weights(Shared<u16> tile, u32 stride,
                                             Global<const float> weights, u32 first_row, u32 rows,
                                             u32 first_col, u32 cols) {
    constexpr u32 CHUNKS = M / 8;
#pragma unroll 2
    for (u32 n = 0; n < N * CHUNKS / THREADS; n++) {
        u32 i = n * THREADS + threadIdx.x, row = i / CHUNKS, at = i % CHUNKS * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (first_row + row < rows && first_col + at < cols) {
            u64 from = static_cast<u64>(first_row + row) * cols + first_col + at;
            float4 low = __ldg(as<const float4>(weights + from));
            float4 high = __ldg(as<const float4>(weights + from) + 1);
            v = make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y),
                           pack(high.z, high.w));
        }
        as<uint4>(tile + (row * stride + at))[0] = v;
    }
}

template <bool KEYS>
__device__ __forceinline__ void expand(const ExpandParams& p) {
    SHARED(uint4, row_tile, ROWS * DEEP / 8);
    SHARED(uint4, weight_tile, COLS * DEEP / 8);
    Shared<u16> row_halves = as<u16>(row_tile), columns = as<u16>(weight_tile);
    Rows rows = {p.rows, p.row_type, p.row_bytes, p.n_rows, p.rank};
    u32 first_row = blockIdx.x * ROWS, head = blockIdx.y, first_col = blockIdx.z * COLS;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 own_row = warp % 4 * 32, own_col = warp / 4 * 64;
    u64 first = p.first + static_cast<u64>(head) * p.step;
    Global<const float> weights = p.weights + first * (KEYS ? p.n_cols : p.rank);
    Global<u16> out = p.out + static_cast<u64>(head) * p.n_ctx * p.stride;
    // The warp's rows of the first factor, and its columns of the second: as they lie in memory, or
    // transposed.
    Shared<const u16> a_row = row_halves + ((own_row + lane % 16) * DEEP + lane / 16 * 8);
    Shared<const u16> b_row =
        KEYS ? columns + (lane % 16 * WIDE + own_col + lane / 16 * 8)
             : columns + ((own_col + lane / 16 * 8 + lane % 8) * DEEP + lane / 8 % 2 * 8);
    float acc[2][8][4] = {};
#pragma unroll 1
    for (u32 col = 0; col < p.rank; col += DEPTH) {
        __syncthreads();
        if (p.row_type == CACHE_F16) {
            fill_as<4>(CacheF16{}, row_halves, rows, first_row, col);
        } else {
            fill_blocks(row_halves, rows, first_row, col);
        }
        if constexpr (KEYS) {
            fill_weights<DEPTH, COLS>(columns, WIDE, weights, col, p.rank, first_col, p.n_cols);
        } else {
            fill_weights<COLS, DEPTH>(columns, DEEP, weights, first_col, p.n_cols, col, p.rank);
        }
        __syncthreads();
        if (first_col + own_col >= p.n_cols) continue;
#pragma unroll 1
        for (u32 k = 0; k < DEPTH; k += 16) {
            u32 a[2][4];
            load_matrices(a[0], a_row + k);
            load_matrices(a[1], a_row + (16 * DEEP + k));
#pragma unroll
            for (u32 n = 0; n < 8; n += 2) {
                u32 b[4];
                if constexpr (KEYS) load_matrices_transposed(b, b_row + (k * WIDE + 8 * n));
                else load_matrices(b, b_row + (8 * n * DEEP + k));
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma_f16(acc[m][n], a[m], {b[0], b[1]});
                    mma_f16(acc[m][n + 1], a[m], {b[2], b[3]});
                }
            }
        }
    }
    u32 row = first_row + own_row + lane / 4, at = first_col + own_col + lane % 4 * 2;
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
        if (row + 8 * m >= p.n_rows) break;
        Global<u16> to = out + static_cast<u64>(row + 8 * m) * p.stride;
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            if (at + 8 * n >= p.n_cols) break;
            const float(&own)[4] = acc[m / 2][n];
            as<u32>(to + (at + 8 * n))[0] = pack(own[m % 2 * 2], own[m % 2 * 2 + 1]);
        }
    }
    if (KEYS && blockIdx.z == 0) copy_rotated(rows, first_row, p.n_rot, out + p.n_cols, p.stride);
}

KERNEL(expand_keys, AT_LEAST(2, THREADS), ExpandParams) { expand<true>(p); }
KERNEL(expand_values, AT_LEAST(2, THREADS), ExpandParams) { expand<false>(p); }
