// Tiles of codes and activations in shared memory, 256 columns at a time, and products of i8 on
// the tensor cores: the parts of matmul.cu.
#pragma once

#include "acts.cuh"

static constexpr u32 TILE_COLS = 256;
// Bytes from one row of a tile to the next: sixteen more than its columns, so that the eight rows
// of 16 bytes that load_matrices reads at a time lie in different banks.
static constexpr u32 TILE_STRIDE = TILE_COLS + 16;

// d += a (16x16, i8, rows) * b (16x8, i8, columns): the first half of mma_s8 (cuda.cuh).
__device__ __forceinline__ void mma_s8_half(i32 (&d)[4], u32 a0, u32 a1, u32 b0) {
#if !defined(__CUDACC__)
    mma_s8(d, {a0, a1, 0, 0}, {b0, 0});
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
#else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(d[0]), "+r"(d[1])
        : "r"(a0), "r"(b0));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(d[2]), "+r"(d[3])
        : "r"(a1), "r"(b0));
#endif
}

// Keeps the compiler from moving later loads up over what comes before: into registers that 128 a
// thread, two blocks a multiprocessor, do not leave.
__device__ __forceinline__ void hold_loads() { __syncwarp(); }

// Sixteen rows from `row` on and 32 columns from `col` on, as mma_s8 takes its first factor.
__device__ __forceinline__ void load_rows(u32 (&a)[4], Shared<const u8> tile, u32 row, u32 col) {
    u32 lane = threadIdx.x % WARP;
    u32 at = (row + lane % 16) * TILE_STRIDE + col + lane / 16 * 16;
    load_matrices(a, as<const u16>(tile + at));
}

// The second factors of two products: tokens from `token` on and from eight after it on.
__device__ __forceinline__ void load_tokens(u32 (&b)[4], Shared<const u8> tile, u32 token,
                                            u32 col) {
    u32 lane = threadIdx.x % WARP;
    u32 at = (token + lane / 16 * 8 + lane % 8) * TILE_STRIDE + col + lane / 8 % 2 * 16;
    load_matrices(b, as<const u16>(tile + at));
}

// The second factors of four half products (mma_s8_half), of eight tokens each.
__device__ __forceinline__ void load_tokens_half(u32 (&b)[4], Shared<const u8> tile, u32 token,
                                                 u32 col) {
    u32 at = (token + threadIdx.x % WARP) * TILE_STRIDE + col;
    load_matrices(b, as<const u16>(tile + at));
}

// Chunk `chunk` of a row of a tile.
__device__ __forceinline__ void store_chunk(Shared<u8> tile, u32 row, u32 chunk, const u32* q) {
    as<uint4>(tile + (row * TILE_STRIDE + 16 * chunk))[0] = make_uint4(q[0], q[1], q[2], q[3]);
}

// Some tokens of a product: a list of records, or those from the first on.
struct Tokens {
    Global<const u8> records;
    u32 cols, first_col;
    Global<const u32> list;
    u32 n;

    __device__ __forceinline__ u32 record(u32 t) const { return list ? list[t] : t; }
};

// Values of the first `n_tokens` tokens and of columns from `col` on; zeros where there is no token
// or column.
template <u32 UNIT, u32 THREADS>
__device__ __forceinline__ void fill_tokens(Shared<u8> tile, const Tokens& x, u32 n_tokens, u32 col,
                                            u32 n_cols) {
    constexpr u32 CHUNKS = TILE_COLS / 16;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n_tokens * CHUNKS; i += THREADS) {
        u32 t = i / CHUNKS, chunk = i % CHUNKS;
        u32 q[4] = {0, 0, 0, 0};
        if (t < x.n && col + 16 * chunk < n_cols) {
            Acts<UNIT> acts(x.records, x.cols, x.record(t), x.first_col + col);
            int4 v = __ldg(as<const int4>(acts.values) + chunk);
            q[0] = v.x, q[1] = v.y, q[2] = v.z, q[3] = v.w;
        }
        store_chunk(tile, t, chunk, q);
    }
}
