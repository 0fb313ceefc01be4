// Rotary position embedding in its two pairings, in place. Twin: src/backend/cpu/rope.rs, to the
// bit: cosines and sines come from the host's table, so that no two libraries can differ.
//
//   x          f32 [tokens, heads, head_dim]
//   turns      f32 [positions, pairs, (cos, sin)]
//   rows       u32 [tokens]: each token's row of `turns`. It is read from memory and not passed, so
//              that a graph that was captured once serves every position.
//
// A thread turns one pair. Memory traffic: x once each way; the table's row is shared by the heads.
#include "moeba.cuh"

static constexpr u32 THREADS = 128;

// Turned elements begin at `offset` of each head; pair i is elements (2i, 2i + 1) of them where
// `adjacent` is not 0, and (i, i + pairs) where it is.
KERNEL(rope, THREADS, Global<float> x, Global<const float2> turns, Global<const u32> rows,
       u32 tokens, u32 heads, u32 head_dim, u32 offset, u32 pairs, u32 adjacent) {
    u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 pair = static_cast<u32>(index % pairs);
    u64 head = index / pairs;
    if (head >= static_cast<u64>(tokens) * heads) return;
    u32 row = rows[head / heads];
    float2 turn = turns[static_cast<u64>(row) * pairs + pair];
    u64 first = head * head_dim + offset + (adjacent ? 2 * pair : pair);
    u64 second = first + (adjacent ? 1 : pairs);
    float a = x[first], b = x[second];
    x[first] = a * turn.x - b * turn.y;
    x[second] = a * turn.y + b * turn.x;
}
