// An indexer's choice among the positions of a text, or among blocks of them, and the rows of those
// that are chosen. Twins: src/backend/cpu/attention/index.rs and `choose` of
// src/forward/indexer.rs, to the bit.
//
//   index_scores   [tokens, scores]          Σ over heads, in their order, of
//                                            weight · max(query · key, 0)
//   block_scores   [tokens, heads, scores]   the largest query · key of a block's positions
//   index_choose   the positions of the best, in ascending order
//   gather_rows    rows of a cache at these positions, one behind the other
//
// Scores: a block takes a tile of 64 keys, as f32 in shared memory, by lane. Eight threads share
// two keys of it; thread l takes lane l of the order, and eight heads at a time, so that eight sums
// of eight threads are added up by seven shuffles. Products have the order of "One arithmetic", so
// tensor cores have no part in them: 64 heads of 128 elements take 16 KFLOP a position.
// Expected bytes: the keys once for each block of tokens, 4 bytes a score.
//
// Choice: a block takes a list. It makes the key of the last that is chosen bit by bit, each by
// counting the scores above, and then goes over them in order: at most 34 times 4 bytes a score,
// from L2.
#include "cache_rows.cuh"
#include "lanes.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 TILE = 64;
// Keys of a tile that eight threads take, and heads at a time.
static constexpr u32 KEYS = TILE * 8 / THREADS;
static constexpr u32 HEADS = 8;
// Elements of a key that lie in shared memory at once.
static constexpr u32 SLICE = 192;

struct IndexScoresParams {
    // [tokens, n_heads, dim]
    Address<const float> q;
    // [tokens, n_heads], or null: 1 each
    Address<const float> weights;
    // Rows of a cache (cache_rows.cuh) of `row` bytes.
    Address<const u8> keys;
    // Token t of the launch is at position past[0] + first_token + t.
    Address<const u32> past;
    // [tokens, n_scores], or of block_scores [tokens, n_heads, n_scores]
    Address<float> scores;
    u32 first_token;
    u32 tokens;
    u32 n_heads;
    u32 dim;
    u32 type_code;
    u32 row;
    // Positions of a block, which have one key or, for block_scores, one each.
    u32 block;
    // More scores than any token has.
    u32 n_scores;
    // Tokens that a block takes one after the other.
    u32 each;
    u32 unused;
};
static_assert(sizeof(IndexScoresParams) == 80);

// A slice of keys and queries in shared memory, [TILE, 8, lane_floats] and [HEADS, 8, lane_floats].
struct Tiles {
    Shared<float> keys, q;
    // The slice's first element and the number of them.
    u32 begin, dim, lane_floats;

    __device__ __forceinline__ Tiles(Shared<float> memory, u32 dim)
        : keys(memory), begin(0), dim(min(dim, SLICE)) {
        lane_floats = lane_stride(this->dim);
        q = keys + TILE * 8 * lane_floats;
    }
    __device__ __forceinline__ u32 place(u32 row, u32 i) const {
        return (row * 8 + i % 8) * lane_floats + i / 8;
    }
    // The elements of a row from `dim` to the end of the lanes' quads.
    __device__ __forceinline__ u32 padded() const { return (dim + 31) / 32 * 32; }
};

template <class K>
__device__ __forceinline__ void load_keys(const K& type, const Tiles& tiles,
                                          Global<const u8> first, u32 row, u32 n) {
    u32 width = tiles.padded();
    for (u32 i = threadIdx.x; i < TILE * width; i += THREADS) {
        u32 key = i / width, at = i % width;
        bool there = key < n && at < tiles.dim;
        Global<const u8> from = first + static_cast<u64>(there ? key : 0) * row;
        tiles.keys[tiles.place(key, at)] = there ? type.one(from, tiles.begin + at) : 0.0f;
    }
}

// The first `n` keys from a row on, zeros behind them.
__device__ __forceinline__ void load_keys_of(u32 type, const Tiles& tiles, Global<const u8> first,
                                             u32 row, u32 n) {
    switch (type) {
        case CACHE_F32: return load_keys(RowsOfF32<FromDevice>{}, tiles, first, row, n);
        case CACHE_F16: return load_keys(RowsOfF16<FromDevice>{}, tiles, first, row, n);
        case CACHE_BF16: return load_keys(RowsOfBF16<FromDevice>{}, tiles, first, row, n);
        case CACHE_Q8_0: return load_keys(RowsOfQ8_0<FromDevice>{}, tiles, first, row, n);
        default: return load_keys(RowsOfLoose<FromDevice>{type}, tiles, first, row, n);
    }
}

// Queries of up to HEADS heads, of `dim` elements each, zeros in place of more.
__device__ __forceinline__ void load_queries(const Tiles& tiles, Global<const float> q, u32 dim,
                                             u32 n) {
    u32 width = tiles.padded();
    for (u32 i = threadIdx.x; i < HEADS * width; i += THREADS) {
        u32 head = i / width, at = i % width;
        bool there = head < n && at < tiles.dim;
        tiles.q[tiles.place(head, at)] = there ? q[head * dim + tiles.begin + at] : 0.0f;
    }
}

// Adds a slice's products of this thread's keys and the heads' queries.
__device__ __forceinline__ void add_products(const Tiles& tiles, float (&sums)[KEYS][HEADS]) {
    u32 lane = threadIdx.x % 8, slot = threadIdx.x / 8, stride = tiles.lane_floats;
#pragma unroll 1
    for (u32 j = 0; 8 * j < tiles.dim; j += 4) {
        float4 w[KEYS];
#pragma unroll
        for (u32 n = 0; n < KEYS; n++) {
            u32 key = slot + n * (THREADS / 8);
            w[n] = as<float4>(tiles.keys + ((key * 8 + lane) * stride + j))[0];
        }
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            float4 q = as<float4>(tiles.q + ((h * 8 + lane) * stride + j))[0];
#pragma unroll
            for (u32 n = 0; n < KEYS; n++) {
                float& sum = sums[n][h];
                sum = fmaf(q.x, w[n].x, sum);
                sum = fmaf(q.y, w[n].y, sum);
                sum = fmaf(q.z, w[n].z, sum);
                sum = fmaf(q.w, w[n].w, sum);
            }
        }
    }
}

// Keys from a row on, and queries of up to HEADS heads.
struct Operands {
    Global<const u8> keys;
    u32 n_keys;
    Global<const float> q;
    u32 n_heads;
};

// dots[n]: the product of the n-th of this thread's keys and the query of head `lane`. `loaded`:
// the keys are in the tile, if they fit it.
__device__ __forceinline__ void products(const IndexScoresParams& p, Tiles& tiles,
                                         const Operands& x, bool loaded, float (&dots)[KEYS]) {
    float sums[KEYS][HEADS];
#pragma unroll
    for (u32 i = 0; i < KEYS * HEADS; i++) sums[i / HEADS][i % HEADS] = 0.0f;
#pragma unroll 1
    for (u32 begin = 0; begin < p.dim; begin += SLICE) {
        tiles.begin = begin, tiles.dim = min(SLICE, p.dim - begin);
        __syncthreads();
        if (!loaded || p.dim > SLICE) load_keys_of(p.type_code, tiles, x.keys, p.row, x.n_keys);
        load_queries(tiles, x.q, p.dim, x.n_heads);
        __syncthreads();
        add_products(tiles, sums);
    }
#pragma unroll
    for (u32 n = 0; n < KEYS; n++) dots[n] = scatter_sums(sums[n]);
}

// A block for each tile of keys and `each` tokens.
KERNEL(index_scores, AT_LEAST(3, THREADS), IndexScoresParams) {
    SHARED_DYNAMIC(float, memory);
    Tiles tiles(memory, p.dim);
    Global<const float> weights = p.weights;
    u32 n_heads = p.n_heads, tile = blockIdx.x * TILE;
    u32 lane = threadIdx.x % 8, group = threadIdx.x % WARP / 8 * 8;
    u32 begin = blockIdx.y * p.each, end = min(begin + p.each, p.tokens);
    // The last token sees the most.
    u32 most = (p.past[0] + p.first_token + end) / p.block;
    if (tile >= most) return;
    Operands x;
    x.keys = p.keys + static_cast<u64>(tile) * p.row, x.n_keys = most - tile;
    bool loaded = false;
    for (u32 token = begin; token < end; token++) {
        u32 n = (p.past[0] + p.first_token + token + 1) / p.block;
        if (tile >= n) continue;
        float scores[KEYS];
#pragma unroll
        for (u32 i = 0; i < KEYS; i++) scores[i] = 0.0f;
        for (u32 head = 0; head < n_heads; head += HEADS) {
            u64 at = static_cast<u64>(token) * n_heads + head;
            u32 n_now = min(HEADS, n_heads - head);
            x.q = p.q + at * p.dim, x.n_heads = n_now;
            float dots[KEYS], weight = weights && lane < n_now ? weights[at + lane] : 1.0f;
            products(p, tiles, x, loaded, dots);
            loaded = true;
#pragma unroll
            for (u32 i = 0; i < KEYS; i++) {
                float part = weight * (dots[i] > 0.0f ? dots[i] : 0.0f);
                for (u32 h = 0; h < n_now; h++) {
                    scores[i] += __shfl_sync(FULL_WARP, part, group + h);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < KEYS; i++) {
            u32 key = tile + threadIdx.x / 8 + i * (THREADS / 8);
            if (lane == i && key < n) {
                p.scores[static_cast<u64>(token) * p.n_scores + key] = scores[i];
            }
        }
    }
}

// A block for each token's block of positions.
KERNEL(block_scores, AT_LEAST(3, THREADS), IndexScoresParams) {
    SHARED_DYNAMIC(float, memory);
    SHARED(float, best, THREADS / WARP * HEADS);
    Tiles tiles(memory, p.dim);
    u32 n_heads = p.n_heads, token = blockIdx.y, lane = threadIdx.x % 8;
    u32 first = blockIdx.x * p.block, seen = p.past[0] + p.first_token + token + 1;
    u32 end = min(first + p.block, seen);
    if (first >= end) return;
    for (u32 head = 0; head < n_heads; head += HEADS) {
        u64 at = static_cast<u64>(token) * n_heads + head;
        u32 n_now = min(HEADS, n_heads - head);
        float most = -INFINITY;
        for (u32 tile = first; tile < end; tile += TILE) {
            Operands x;
            x.keys = p.keys + static_cast<u64>(tile) * p.row, x.n_keys = end - tile;
            x.q = p.q + at * p.dim, x.n_heads = n_now;
            float dots[KEYS];
            products(p, tiles, x, false, dots);
#pragma unroll
            for (u32 i = 0; i < KEYS; i++) {
                u32 key = tile + threadIdx.x / 8 + i * (THREADS / 8);
                if (key < end) most = fmaxf(most, dots[i]);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 8));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 16));
        if (threadIdx.x % WARP < HEADS) best[threadIdx.x / WARP * HEADS + lane] = most;
        __syncthreads();
        if (threadIdx.x < n_now) {
            for (u32 w = 1; w < THREADS / WARP; w++) {
                most = fmaxf(most, best[w * HEADS + threadIdx.x]);
            }
            p.scores[(at + threadIdx.x) * p.n_scores + blockIdx.x] = most;
        }
    }
}

static constexpr u32 CHOOSERS = 1024;

struct ChooseParams {
    // [tokens, lists, n_scores]
    Address<const float> scores;
    // As in IndexScoresParams.
    Address<const u32> past;
    // Positions, [tokens, lists, width].
    Address<u32> chosen;
    // [tokens, lists]: the place of the last of a list
    Address<u32> last;
    u32 first_token;
    u32 n_scores;
    u32 width;
    // Positions that a score stands for, and the scores that are chosen.
    u32 block;
    u32 top_k;
    // Scores up to the last that are chosen whatever they are.
    u32 n_near;
    // Not 0 if blocks that are not whole have no score: their positions are chosen.
    u32 whole;
    u32 unused;
};
static_assert(sizeof(ChooseParams) == 64);

// A number that is larger for a score that comes before another: the order of `f32::total_cmp`.
__device__ __forceinline__ u32 rank_of(float score) {
    u32 bits = __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The scores of a list.
struct List {
    Global<const float> scores;
    u32 n, n_near;

    __device__ __forceinline__ u32 rank(u32 i) const {
        return rank_of(i + n_near >= n ? INFINITY : __ldg(scores + i));
    }
};

// The sum of the threads' counts, in each of them. `sums` has a number a warp.
__device__ __forceinline__ u32 block_count(u32 count, Shared<u32> sums) {
    count = warp_sum(count);
    __syncthreads();
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = count;
    __syncthreads();
    u32 sum = 0;
    for (u32 w = 0; w < blockDim.x / WARP; w++) sum += sums[w];
    return sum;
}

// The number of scores whose rank is `least` or more.
__device__ __forceinline__ u32 count_from(const List& list, u32 least, Shared<u32> sums) {
    u32 count = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < list.n; i += blockDim.x) count += list.rank(i) >= least;
    return block_count(count, sums);
}

// The positions of a block to their places of a list.
__device__ __forceinline__ void put_block(Global<u32> list, u32 place, u32 b, u32 block, u32 seen) {
    for (u32 i = 0; i < block && b * block + i < seen; i++) {
        list[place * block + i] = b * block + i;
    }
}

// A block for each token's list.
KERNEL(index_choose, CHOOSERS, ChooseParams) {
    SHARED(u32, sums, CHOOSERS / WARP);
    SHARED(u32, above, CHOOSERS / WARP);
    SHARED(u32, equal, CHOOSERS / WARP);
    u32 block = p.block, k = p.top_k, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 seen = p.past[0] + p.first_token + blockIdx.x + 1;
    u64 at = static_cast<u64>(blockIdx.x) * gridDim.y + blockIdx.y;
    List list;
    list.scores = p.scores + at * p.n_scores;
    list.n = p.whole ? seen / block : (seen + block - 1) / block;
    list.n_near = min(p.n_near, list.n);
    Global<u32> chosen = p.chosen + at * p.width;
    if (list.n <= k) {
        for (u32 i = threadIdx.x; i < seen; i += blockDim.x) chosen[i] = i;
        if (threadIdx.x == 0) p.last[at] = seen - 1;
        return;
    }
    // The largest rank that k scores or more reach.
    u32 least = 0, n_from = list.n;
    for (u32 bit = 0x80000000u; bit > 0 && n_from > k; bit /= 2) {
        u32 n = count_from(list, least | bit, sums);
        if (n >= k) least |= bit, n_from = n;
    }
    // Ties go to the first.
    u32 n_equal = k;
    if (n_from > k && least < 0xffffffffu) n_equal = k - count_from(list, least + 1, sums);
    // Positions behind the last whole block.
    u32 tail = p.whole ? seen - list.n * block : 0;
    for (u32 i = threadIdx.x; i < tail; i += blockDim.x) {
        chosen[k * block + i] = list.n * block + i;
    }
    u32 n_above = 0, n_ties = 0;
    for (u32 start = 0; start < list.n; start += blockDim.x) {
        u32 i = start + threadIdx.x, rank = i < list.n ? list.rank(i) : 0;
        bool is_above = i < list.n && rank > least, is_equal = i < list.n && rank == least;
        u32 votes = __ballot_sync(FULL_WARP, is_above), ties = __ballot_sync(FULL_WARP, is_equal);
        __syncthreads();
        if (lane == 0) above[warp] = __popc(votes), equal[warp] = __popc(ties);
        __syncthreads();
        u32 before = (1u << lane) - 1;
        u32 own = n_above + __popc(votes & before), own_ties = n_ties + __popc(ties & before);
        for (u32 w = 0; w < blockDim.x / WARP; w++) {
            u32 of_warp = above[w], ties_of_warp = equal[w];
            if (w < warp) own += of_warp, own_ties += ties_of_warp;
            n_above += of_warp, n_ties += ties_of_warp;
        }
        bool is_chosen = is_above || (is_equal && own_ties < n_equal);
        if (is_chosen) put_block(chosen, own + min(own_ties, n_equal), i, block, seen);
        if (i == list.n - 1) {
            // The last block may be cut.
            u32 cut = is_chosen && !p.whole ? list.n * block - seen : 0;
            p.last[at] = k * block + tail - cut - 1;
        }
    }
}

struct GatherRowsParams {
    // Rows of a cache [heads, n_ctx] of `row` bytes.
    Address<const u8> rows;
    // See ChooseParams.
    Address<const u32> chosen;
    Address<const u32> last;
    // [tokens, heads, width] rows
    Address<u8> to;
    u32 row;
    u32 n_ctx;
    u32 width;
    // Lists of a token: one for all heads, or one for each.
    u32 lists;
    // Bytes that are copied at once: rows begin on multiples of them.
    u32 unit;
    u32 unused;
};
static_assert(sizeof(GatherRowsParams) == 56);

template <class T>
__device__ __forceinline__ void copy_row(Global<const u8> from, Global<u8> to, u32 bytes) {
    auto source = as<const T>(from);
    auto target = as<T>(to);
    for (u32 i = threadIdx.x % WARP; i < bytes / sizeof(T); i += WARP) target[i] = source[i];
}

// A warp for each row of a token's head.
KERNEL(gather_rows, THREADS, GatherRowsParams) {
    u32 place = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    u32 head = blockIdx.y, token = blockIdx.z;
    u64 list = static_cast<u64>(token) * p.lists + (p.lists == 1 ? 0 : head);
    if (place >= p.width || place > p.last[list]) return;
    u64 position = p.chosen[list * p.width + place];
    Global<const u8> from = p.rows + (static_cast<u64>(head) * p.n_ctx + position) * p.row;
    u64 row = (static_cast<u64>(token) * gridDim.y + head) * p.width + place;
    Global<u8> to = p.to + row * p.row;
    switch (p.unit) {
        case 16: return copy_row<uint4>(from, to, p.row);
        case 4: return copy_row<u32>(from, to, p.row);
        default: return copy_row<u16>(from, to, p.row);
    }
}
