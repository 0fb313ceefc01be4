// What the kernels of attention have in common. Twin: src/backend/cpu/attention.rs.
#pragma once

#include "cache_rows.cuh"
#include "exp.cuh"

// Positions are cut at multiples of these, as on the CPU.
static constexpr u32 TILE = 64;
static constexpr u32 SPLIT = 512;
// Of prompts: with many queries there are blocks enough.
static constexpr u32 PROMPT_SPLIT = 4096;

// No limit.
static constexpr u32 NONE = 0xffffffffu;

// Positions begin … end.
struct Range {
    u32 begin, end;

    __device__ __forceinline__ bool is_empty() const { return begin >= end; }
    __device__ __forceinline__ Range common(u32 from, u32 to) const {
        return Range{max(begin, from), min(end, to)};
    }
};

// What the query at `position` sees: `all` positions, or those up to its own, of which the last
// `window`; none from `limit` on.
__device__ __forceinline__ Range seen_by(u32 position, u32 all, u32 window, u32 limit) {
    u32 end = min(all == NONE ? position + 1 : all, limit);
    return Range{end - min(window, end), end};
}

// What is taken off scores whose maximum is `max`: −∞ − −∞ would be NaN.
__device__ __forceinline__ float shift(float max) { return max == -INFINITY ? 0.0f : max; }

// A score's bias by how far the key is from the query, `values` being [n_head, 2·reach + 1].
__device__ __forceinline__ float bias_of(Global<const float> values, u32 reach, u32 head, u32 key,
                                         u32 query) {
    i32 far = static_cast<i32>(reach), distance = static_cast<i32>(key) - static_cast<i32>(query);
    distance = max(-far, min(distance, far));
    return __ldg(values + (static_cast<u64>(head) * (2 * reach + 1) + (distance + far)));
}

// Floats of a query's partial result: acc, then max and sum.
__device__ __forceinline__ u32 record_floats(u32 v_dim) { return (v_dim + 2 + 3) / 4 * 4; }
