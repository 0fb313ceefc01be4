// An indexer's keys of blocks of positions, made of those of the positions. Twins: `compress_rows`
// of src/backend/cpu/compress.rs and the sums of src/forward/mean_index.rs, to the bit.
//
//   pool_keys   in each element the mean of a block's keys, weighed by the softmax of their scores
//   mean_keys   in each element the mean of a block's keys; zeros for rows that end no block
//
// A text's rows may begin and end within a block: what is not whole yet is in the layer's state. A
// block takes a block of positions, and the first also what is behind the last whole one: it reads
// the state before it writes it. Memory traffic: the rows once, a key a block.
#include "exp.cuh"

static constexpr u32 THREADS = 128;

struct BlockKeysParams {
    // [tokens, dim]
    Address<const float> x;
    // [tokens, dim] and [block, dim], by a position's place in its block. For pool_keys.
    Address<const float> scores;
    Address<const float> places;
    // Keys and scores, [2, block, dim], or a sum, [dim].
    Address<float> state;
    // Token t is at position past[0] + first_token + t.
    Address<const u32> past;
    // [tokens, dim]: a block's key in the row of its last position
    Address<float> out;
    u32 first_token;
    u32 tokens;
    u32 dim;
    u32 block;
};
static_assert(sizeof(BlockKeysParams) == 64);

// The positions of the launch, begin … end, and the blocks of them.
struct Blocks {
    u32 begin, end, block, last;
    bool last_is_whole;

    __device__ __forceinline__ explicit Blocks(const BlockKeysParams& p) : block(p.block) {
        begin = p.past[0] + p.first_token, end = begin + p.tokens;
        last = (end - 1) / block;
        last_is_whole = end % block == 0;
    }
    // The block that this block makes a key of, if it ends here.
    __device__ __forceinline__ u32 own() const { return begin / block + blockIdx.x; }
    __device__ __forceinline__ bool ends(u32 b) const {
        return b < last || (b == last && last_is_whole);
    }
    __device__ __forceinline__ bool keeps() const { return blockIdx.x == 0 && !last_is_whole; }
};

KERNEL(pool_keys, THREADS, BlockKeysParams) {
    Global<const float> x = p.x, scores = p.scores, places = p.places;
    Global<float> state = p.state;
    u32 dim = p.dim, block = p.block;
    Blocks blocks(p);
    u32 b = blocks.own(), first = b * block;
    for (u32 i = threadIdx.x; i < dim; i += THREADS) {
        auto score_of = [&](u32 at) -> float {
            if (first + at < blocks.begin) return state[(block + at) * dim + i];
            u64 row = first + at - blocks.begin;
            return scores[row * dim + i] + places[at * dim + i];
        };
        auto value_of = [&](u32 at) -> float {
            if (first + at < blocks.begin) return state[at * dim + i];
            return x[static_cast<u64>(first + at - blocks.begin) * dim + i];
        };
        if (blocks.ends(b)) {
            float max = -INFINITY, sum = 0.0f, mean = 0.0f;
            for (u32 at = 0; at < block; at++) max = fmaxf(max, score_of(at));
            for (u32 at = 0; at < block; at++) {
                float part = moeba_exp(score_of(at) - max);
                sum += part;
                mean += value_of(at) * part;
            }
            u64 row = first + block - 1 - blocks.begin;
            p.out[row * dim + i] = mean / sum;
        }
        if (!blocks.keeps()) continue;
        for (u32 at = max(blocks.begin, blocks.last * block); at < blocks.end; at++) {
            u64 row = at - blocks.begin;
            u32 place = at % block;
            state[place * dim + i] = x[row * dim + i];
            state[(block + place) * dim + i] = scores[row * dim + i] + places[place * dim + i];
        }
    }
}

// The sum of an element over the positions of a block up to `end`; the rows before its last are
// zeros of `out`.
__device__ __forceinline__ float sum_of_block(const BlockKeysParams& p, const Blocks& blocks, u32 b,
                                              u32 end, u32 i) {
    u32 first = b * blocks.block, from = max(first, blocks.begin);
    float sum = 0.0f;
    if (from > first) sum = p.state[i];
    for (u32 at = from; at < end; at++) {
        u64 place = static_cast<u64>(at - blocks.begin) * p.dim + i;
        float own = p.x[place];
        sum = at == first ? own : sum + own;
        p.out[place] = 0.0f;
    }
    return sum;
}

KERNEL(mean_keys, THREADS, BlockKeysParams) {
    u32 dim = p.dim, block = p.block;
    Blocks blocks(p);
    u32 b = blocks.own(), end = b * block + block;
    for (u32 i = threadIdx.x; i < dim; i += THREADS) {
        if (blocks.ends(b)) {
            float sum = sum_of_block(p, blocks, b, end, i);
            u64 row = end - 1 - blocks.begin;
            p.out[row * dim + i] = sum / static_cast<float>(block);
        }
        if (blocks.keeps()) p.state[i] = sum_of_block(p, blocks, blocks.last, blocks.end, i);
    }
}
