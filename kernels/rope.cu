// Rotary position embedding in its two pairings, in place. Twin: src/backend/cpu/rope.rs, to the
// bit: cosines and sines come from the host's table, so that the GPU needs no functions for them.
#include "moeba.cuh"

static constexpr u32 THREADS = 128;

struct RopeParams {
    // [tokens, heads, head_dim]
    Address<float> x;
    // [positions, pairs] of (cos, sin)
    Address<const float2> cos_sin;
    // [tokens]: each token's row of `cos_sin`. The rows are in memory, so that one captured graph
    // serves every position.
    Address<const u32> rows;
    u32 tokens;
    u32 heads;
    u32 head_dim;
    // The first rotated element of a head.
    u32 offset;
    u32 pairs;
    // Pair i is elements (2i, 2i + 1) if this is not 0, otherwise (i, i + pairs).
    u32 adjacent;
    // Factor on sines: −1 turns back.
    float sign;
    u32 unused;
};
static_assert(sizeof(RopeParams) == 56);

// One thread for each pair. Memory traffic: x once each way; heads share a row of the table.
KERNEL(rope, THREADS, RopeParams) {
    u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 pair = static_cast<u32>(index % p.pairs);
    u64 head = index / p.pairs;
    if (head >= static_cast<u64>(p.tokens) * p.heads) return;
    u32 row = p.rows[head / p.heads];
    float2 turn = p.cos_sin[static_cast<u64>(row) * p.pairs + pair];
    u64 first = head * p.head_dim + p.offset + (p.adjacent ? 2 * pair : pair);
    u64 second = first + (p.adjacent ? 1 : p.pairs);
    Global<float> x = p.x;
    float a = x[first], b = x[second], sine = turn.y * p.sign;
    x[first] = a * turn.x - b * sine;
    x[second] = a * sine + b * turn.x;
}
