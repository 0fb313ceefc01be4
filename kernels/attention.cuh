// Common parts of the attention kernels. Twin: src/backend/cpu/attention.
#pragma once

#include "cache_rows.cuh"
#include "exp.cuh"

// Positions are divided at multiples of these, as on the CPU.
static constexpr u32 TILE = 64;
static constexpr u32 SPLIT = 512;
// No limit.
static constexpr u32 NONE = 0xffffffffu;

struct AttentionParams {
    // [tokens, n_head, k_dim]
    Address<const float> q;
    // Rows of a cache (cache_rows.cuh), [heads, k_ctx] of `k_row` bytes. Types are CacheType.
    Address<const u8> k;
    u32 k_type;
    u32 k_dim;
    u32 k_row;
    u32 k_ctx;
    // [heads, v_ctx] of `v_row` bytes
    Address<const u8> v;
    u32 v_type;
    u32 v_dim;
    u32 v_row;
    u32 v_ctx;
    // Not 0 if values cannot be read four at a time. For attention_split.
    u32 loose;
    u32 n_head;
    // Heads that share a KV head.
    u32 group;
    // Token t of the launch is at position past[0] + first_token + t, or, if tokens have rows of
    // their own, past[first_token + t]. `past` is in memory, so that one captured graph serves
    // every position.
    u32 first_token;
    Address<const u32> past;
    // The positions that a query sees, see `seen_by`.
    u32 limit;
    u32 all;
    u32 window;
    float scale;
    // Null, or as in `bias_of`.
    Address<const float> bias;
    u32 reach;
    // For attention_prompt.
    u32 n_tokens;
    // Records [tokens, n_head, n_slots] of acc [v_dim], max, sum: one for each split.
    Address<float> work;
    u32 n_slots;
    // See `seen_by`.
    u32 chunk;
    // Scores are capped softly; 0 leaves them.
    float cap;
    // Not 0 if each token has rows of its own, k and v [tokens, heads, ctx], and these are its
    // text: of as many lists a token, one for all heads or one for each KV head, `past` [tokens,
    // lists] has the place of the last.
    u32 lists;
    // For attention_prompt: positions of a split, and the first position of this launch, whose rows
    // are the first of k and v. The records have what was seen before it.
    u32 split_len;
    u32 begin;
};
static_assert(sizeof(AttentionParams) == 144);

// Positions begin … end.
struct Range {
    u32 begin, end;

    __device__ __forceinline__ bool is_empty() const { return begin >= end; }
    __device__ __forceinline__ Range common(u32 from, u32 to) const {
        return Range{max(begin, from), min(end, to)};
    }
};

// The position of a token's query, or the last place of its list if there are lists.
__device__ __forceinline__ u32 position_of(Global<const u32> past, u32 lists, u32 token, u32 head,
                                           u32 n_head) {
    return lists ? past[token * lists + head * lists / n_head] : past[0] + token;
}

// The positions that the query at `position` sees: `all` positions, or those up to its own; of
// these the last `window`, and those of the last `chunk` that begins at a multiple of it; none from
// `limit` on.
__device__ __forceinline__ Range seen_by(u32 position, u32 all, u32 window, u32 chunk, u32 limit) {
    u32 own = all == NONE ? position + 1 : all;
    return Range{max(own - min(window, own), (own - 1) / chunk * chunk), min(own, limit)};
}

// The number that is subtracted from scores whose maximum is `max`: −∞ − −∞ would be NaN.
__device__ __forceinline__ float shift(float max) { return max == -INFINITY ? 0.0f : max; }

// The reach of slopes.
static constexpr u32 ANY = 0xffffffffu;

// A score's bias by the distance of the key from the query. `values` is [n_head, 2·reach + 1], or,
// with a reach of ANY, a factor on the distance for each head.
__device__ __forceinline__ float bias_of(Global<const float> values, u32 reach, u32 head, u32 key,
                                         u32 query) {
    if (reach == ANY) {
        return __ldg(values + head) * static_cast<float>(max(key, query) - min(key, query));
    }
    i32 far = static_cast<i32>(reach), distance = static_cast<i32>(key) - static_cast<i32>(query);
    distance = max(-far, min(distance, far));
    return __ldg(values + (static_cast<u64>(head) * (2 * reach + 1) + (distance + far)));
}

// The floats of a query's partial result: acc, max and sum.
__device__ __forceinline__ u32 record_floats(u32 v_dim) { return (v_dim + 2 + 3) / 4 * 4; }
