// Queries, keys and values between their products and attention. Of each head of a token:
//
//   1. its norm, or behind the rotation          of queries, keys and values
//   2. its rotation by the token's position      of queries and keys
//   3. its factor at the token's position        of queries
//
// Queries are stored without gaps, keys and values in the KV cache. Twins: the same steps of
// src/forward/attention.rs, to the bit (norm.cu, rope.cu and cache.cu have each alone).
//
// A warp takes a head, in shared memory. Memory traffic: the products in, queries and rows of the
// cache out. A decoded token of 32 heads of queries and 4 of keys is 10 blocks and a memory
// latency, in the place of six launches.
#include "cache_store.cuh"
#include "exp.cuh"

static constexpr u32 WARPS = 4;
static constexpr u32 THREADS = WARPS * WARP;

struct AttentionInputsParams {
    // Products of tokens that lie `q_stride` and so on apart, and heads of queries `q_step` apart.
    // Keys and values are null if there are none.
    Address<const float> q;
    Address<const float> k;
    Address<const float> v;
    u32 q_stride;
    u32 q_step;
    u32 k_stride;
    u32 v_stride;
    // [k_dim], [k_dim] and [v_dim], or null
    Address<const float> q_norm;
    Address<const float> k_norm;
    Address<const float> v_norm;
    // [tokens, pairs] of (cos, sin)
    Address<const float2> cos_sin;
    // [tokens, k_dim / 2] of (factor, 0), or null
    Address<const float2> factors;
    // [tokens, n_head, k_dim]
    Address<float> q_out;
    // [n_head_kv, n_ctx] rows each
    Address<u8> keys;
    Address<u8> values;
    // The position of the first token; later ones than n_ctx are left out.
    Address<const u32> past;
    u32 n_head;
    u32 n_head_kv;
    u32 k_dim;
    u32 v_dim;
    u32 k_row;
    u32 v_row;
    // CacheType
    u32 k_type;
    u32 v_type;
    u32 n_ctx;
    // 0 without a rotation. See rope.cu.
    u32 pairs;
    u32 offset;
    u32 adjacent;
    u32 norm_last;
    float eps;
    // Elements are limited to ±limit first; 0 leaves them.
    float limit;
    u32 unused;
};
static_assert(sizeof(AttentionInputsParams) == 176);

// Elements of a head in shared memory: whole groups of eight, the last ones zeros.
__device__ __forceinline__ u32 padded(u32 dim) { return (dim + 7) / 8 * 8; }

// RMSNorm in the eight lanes and the tree, as norm.cu adds.
__device__ __forceinline__ void norm(Shared<float> own, u32 dim, Global<const float> weight,
                                     float eps) {
    u32 lane = threadIdx.x;
    float sum = 0.0f;
    if (lane < 8) {
#pragma unroll 8
        for (u32 i = lane; i < padded(dim); i += 8) {
            float value = own[i];
            sum = fmaf(value, value, sum);
        }
    }
    float squares = __shfl_sync(FULL_WARP, tree8_threads(sum), 0);
    float scale = 1.0f / sqrtf(squares / static_cast<float>(dim) + eps);
    __syncwarp();
    for (u32 i = lane; i < dim; i += WARP) {
        float value = own[i];
        own[i] = value * scale * weight[i];
    }
    __syncwarp();
}

__device__ __forceinline__ void rotate(Shared<float> own, Global<const float2> turns, u32 pairs,
                                       u32 offset, u32 adjacent) {
    for (u32 pair = threadIdx.x; pair < pairs; pair += WARP) {
        float2 turn = turns[pair];
        u32 first = offset + (adjacent ? 2 * pair : pair), second = first + (adjacent ? 1 : pairs);
        float a = own[first], b = own[second];
        own[first] = a * turn.x - b * turn.y;
        own[second] = a * turn.y + b * turn.x;
    }
    __syncwarp();
}

__device__ __forceinline__ void store(u32 type, Global<u8> row, Shared<float> own, u32 dim) {
    for (u32 i = threadIdx.x; i < dim; i += WARP) {
        float value = own[i];
        switch (type) {
            case CACHE_F32: as<float>(row)[i] = value; break;
            case CACHE_F16: store_f16(row, i, value); break;
            case CACHE_BF16: store_bf16(row, i, value); break;
            // Blocks are whole warps.
            case CACHE_Q8_0: store_q8_0(row, i, value, true); break;
            default: store_nibbles(type, row, i, value); break;
        }
    }
}

// Dynamic shared memory: WARPS heads.
KERNEL(attention_inputs, THREADS, AttentionInputsParams) {
    SHARED_DYNAMIC(float, heads);
    u32 n_head = p.n_head, n_head_kv = p.n_head_kv, k_dim = p.k_dim, v_dim = p.v_dim;
    u32 lane = threadIdx.x, token = blockIdx.y, head = blockIdx.x * WARPS + threadIdx.y;
    Shared<float> own = heads + threadIdx.y * padded(max(k_dim, v_dim));
    bool is_q = head < n_head, is_v = head >= n_head + n_head_kv;
    if (head >= n_head + (p.k ? 2 * n_head_kv : 0)) return;
    Global<const float> from = p.q + static_cast<u64>(token) * p.q_stride;
    Global<const float> weight = p.q_norm;
    if (is_q) {
        from = from + head * p.q_step;
    } else if (is_v) {
        head -= n_head + n_head_kv;
        from = p.v + (static_cast<u64>(token) * p.v_stride + head * v_dim);
        weight = p.v_norm;
    } else {
        head -= n_head;
        from = p.k + (static_cast<u64>(token) * p.k_stride + head * k_dim);
        weight = p.k_norm;
    }
    u32 dim = is_v ? v_dim : k_dim;
    for (u32 i = lane; i < padded(dim); i += WARP) {
        float value = 0.0f;
        if (i < dim) value = from[i];
        own[i] = p.limit > 0.0f ? clamp(value, p.limit) : value;
    }
    __syncwarp();
    bool norm_last = p.norm_last && !is_v;
    if (weight && !norm_last) norm(own, dim, weight, p.eps);
    if (!is_v && p.pairs > 0) {
        Global<const float2> turns = p.cos_sin + static_cast<u64>(token) * p.pairs;
        rotate(own, turns, p.pairs, p.offset, p.adjacent);
    }
    if (weight && norm_last) norm(own, dim, weight, p.eps);
    if (is_q) {
        if (p.factors) {
            Global<const float2> factors = p.factors + static_cast<u64>(token) * (dim / 2);
            rotate(own, factors, dim / 2, 0, p.adjacent);
        }
        u64 to = (static_cast<u64>(token) * n_head + head) * dim;
        for (u32 i = lane; i < dim; i += WARP) p.q_out[to + i] = own[i];
        return;
    }
    u32 position = p.past[0] + token;
    if (position >= p.n_ctx) return;
    u64 row = static_cast<u64>(head) * p.n_ctx + position;
    if (is_v) {
        store(p.v_type, p.values + row * p.v_row, own, dim);
    } else {
        store(p.k_type, p.keys + row * p.k_row, own, dim);
    }
}
