// Stores new keys or values in the KV cache. Twin: `RowsMut::store`
// (src/backend/cpu/attention/rows.rs), to the bit. Memory traffic: x in, rows out.
#include "cache_store.cuh"

static constexpr u32 THREADS = 128;

struct CacheStoreParams {
    // [tokens, heads, dim]
    Address<const float> x;
    // The position of the first token. It is in memory, so that one captured graph serves every
    // position.
    Address<const u32> past;
    // [heads, n_ctx] rows of `row_bytes`. Tokens whose row is n_ctx or more are left out.
    Address<u8> rows;
    u32 tokens;
    u32 heads;
    u32 dim;
    u32 row_bytes;
    u32 n_ctx;
    // CacheType, for cache_store_nibbles.
    u32 type_code;
    // Positions of a block, which has one row: that of its last token.
    u32 block;
    u32 unused;
};
static_assert(sizeof(CacheStoreParams) == 56);

// The element of x that a thread takes, and where its row begins.
struct Target {
    u64 from;
    u32 i;
    u64 to;
    bool live;
};

__device__ __forceinline__ Target target(const CacheStoreParams& p) {
    u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 i = static_cast<u32>(index % p.dim);
    u64 at = index / p.dim;
    u32 head = static_cast<u32>(at % p.heads);
    u64 token = at / p.heads;
    u32 position = p.past[0] + static_cast<u32>(token), row = position / p.block;
    u64 to = (static_cast<u64>(head) * p.n_ctx + row) * p.row_bytes;
    bool is_last = position % p.block == p.block - 1;
    return Target{index, i, to, token < p.tokens && row < p.n_ctx && is_last};
}

KERNEL(cache_store_f32, THREADS, CacheStoreParams) {
    Target at = target(p);
    if (at.live) as<float>(p.rows + at.to)[at.i] = p.x[at.from];
}

KERNEL(cache_store_f16, THREADS, CacheStoreParams) {
    Target at = target(p);
    if (at.live) store_f16(p.rows + at.to, at.i, p.x[at.from]);
}

KERNEL(cache_store_bf16, THREADS, CacheStoreParams) {
    Target at = target(p);
    if (at.live) store_bf16(p.rows + at.to, at.i, p.x[at.from]);
}

KERNEL(cache_store_q8_0, THREADS, CacheStoreParams) {
    Target at = target(p);
    float value = at.live ? p.x[at.from] : 0.0f;
    store_q8_0(p.rows + at.to, at.i, value, at.live);
}

KERNEL(cache_store_nibbles, THREADS, CacheStoreParams) {
    Target at = target(p);
    // The same in all threads of the warp.
    if (at.live) store_nibbles(p.type_code, p.rows + at.to, at.i, p.x[at.from]);
}
