// Attention of many queries over the KV cache, by tensor cores. Keys and values are rows of F16 or
// of blocks, their dimensions are multiples of 8, and splits are `split_len` positions;
// attention_combine adds up the splits. Where rows are there a part at a time, a launch goes on
// with the records of the one before.
//
// Twin: src/backend/cpu/attention. The operations are the same except for rounding: queries,
// keys, exponentials and values are rounded to f16 and multiplied exactly; sums are f32 in the
// hardware's order, and exponentials are the hardware's. Each query is scaled by a power of two
// first, so that none overflows. The rounded exponentials are summed, so that weights add up to 1.
//
// A block of four warps takes 64 queries, tokens times the heads that share a KV head, and goes
// over the tiles of 64 positions that any of them sees. A warp takes 16 queries: scores and sums of
// values stay in its registers, and scores become the first factor of the second product where they
// are (as in FlashAttention-2, arXiv 2307.08691). Keys and values of a tile lie in the same place
// of shared memory, one after the other, as f16; rows lie 16 bytes more than their length apart,
// which keeps load_matrices free of bank conflicts. Two to four blocks share a multiprocessor, so
// that one loads while the others multiply.
//
// A query's result does not depend on the others: tiles and splits begin at multiples of their
// sizes, a row of a product depends on its own row alone, and a tile of which a query sees nothing
// multiplies its sums by one and adds zeros. (An infinity or a NaN among the values of a tile does
// reach the queries that see only positions before it: zero times it is no number.)
// Expected bytes: the queries once, the keys and values that are seen once for 64 queries, from L2
// after the first time; records.
#include "attention.cuh"
#include "cache_chunks.cuh"

static constexpr u32 THREADS = 128;
static constexpr u32 ROWS = 64;

// Multiprocessors are shared by as many blocks as registers allow.
#if defined(__CUDACC__)
#define BLOCKS(N) THREADS, N
#else
#define BLOCKS(N) THREADS
#endif

// Elements of a row in shared memory: zeros fill up what one instruction multiplies.
__device__ __forceinline__ u32 padded(u32 dim) { return (dim + 15) / 16 * 16; }

// A tile in shared memory: rows of halves.
struct Tile {
    Shared<u16> halves;
    u32 stride;
};

// Rows of a cache.
struct Rows {
    // The KV head's row of position `begin`.
    Global<const u8> bytes;
    u32 type, dim, row, begin;
};

// With DEPTH loads on their way.
template <u32 DEPTH, class T>
__device__ __forceinline__ void fill_as(const T& type, const Tile& tile, const Rows& rows,
                                        u32 start, Range seen) {
    using Chunk = decltype(load_chunk(type, rows.bytes, 0));
    constexpr u32 N = sizeof(Chunk) / sizeof(u16);
    u32 chunks = padded(rows.dim) / N, n_all = TILE * chunks;
#pragma unroll 1
    for (u32 first = threadIdx.x; first < n_all; first += DEPTH * THREADS) {
        Chunk v[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            u32 n = first + d * THREADS, position = start + n / chunks, i = n % chunks * N;
            v[d] = Chunk{};
            if (n >= n_all || position < seen.begin || position >= seen.end) continue;
            if (i >= rows.dim) continue;
            Global<const u8> row = rows.bytes + static_cast<u64>(position - rows.begin) * rows.row;
            v[d] = load_chunk(type, row, i);
        }
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            u32 n = first + d * THREADS;
            if (n >= n_all) break;
            as<Chunk>(tile.halves + (n / chunks * tile.stride + n % chunks * N))[0] = v[d];
        }
    }
}

// Not inlined: inlined it costs the loops of all types registers.
static __device__ __noinline__ void fill_nibbles(Tile tile, Rows rows, u32 start, Range seen) {
    fill_as<1>(CacheNibbles(rows.type), tile, rows, start, seen);
}

// Fills a tile with the positions from `start` on. Positions outside `seen`, which may not be
// initialised, become zeros.
__device__ __forceinline__ void fill(const Tile& tile, const Rows& rows, u32 start, Range seen) {
    if (rows.type == CACHE_F16) {
        fill_as<4>(CacheF16{}, tile, rows, start, seen);
    } else if (rows.type == CACHE_Q8_0) {
        fill_as<1>(CacheQ8_0{}, tile, rows, start, seen);
    } else {
        fill_nibbles(tile, rows, start, seen);
    }
}

// The work of a block: its rows are the heads of its first token, then of its next.
struct Job {
    // Heads a token, the first of them, and tokens.
    u32 heads, head, first_token, tokens;
    // Positions of the text before the launch's first token.
    u32 past;
    u32 all, window, chunk, limit;
    float cap;

    __device__ __forceinline__ bool has(u32 row) const { return row < heads * tokens; }
    __device__ __forceinline__ u32 token(u32 row) const { return first_token + row / heads; }
    __device__ __forceinline__ u32 head_of(u32 row) const { return head + row % heads; }
    __device__ __forceinline__ Range seen(u32 token) const {
        return seen_by(past + token, all, window, chunk, limit);
    }
};

// Queries as halves, scaled to a largest magnitude of 1 to 2; `scales` gets what undoes it. A warp
// loads its own rows.
__device__ __forceinline__ void load_queries(const Tile& tile, Shared<float> scales, const Job& job,
                                             Global<const float> q, u32 n_head, u32 dim) {
    u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP * 16;
#pragma unroll 1
    for (u32 row = first; row < first + 16; row++) {
        bool there = job.has(row);
        u64 place = static_cast<u64>(job.token(row)) * n_head + job.head_of(row);
        Global<const float> from = q + (there ? place * dim : 0);
        u32 largest = 0;
        for (u32 i = lane; i < dim; i += WARP) {
            if (there) largest = max(largest, __float_as_uint(from[i]) & 0x7fffffffu);
        }
        for (u32 step = WARP / 2; step > 0; step /= 2) {
            largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, step));
        }
        // NaN and infinity stay what they are under any scale.
        u32 exponent = max(1u, min(largest >> 23, 253u));
        float down = __uint_as_float((254 - exponent) << 23);
        for (u32 i = lane; i < padded(dim); i += WARP) {
            bool is_real = there && i < dim;
            tile.halves[row * tile.stride + i] = is_real ? f32_to_f16(from[i] * down) : 0;
        }
        if (lane == 0) scales[row] = __uint_as_float(exponent << 23);
    }
}

// s[n] = the warp's 16 queries · eight keys of the tile each, as mma_f16 has results.
__device__ __forceinline__ void multiply_keys(float (&s)[TILE / 8][4], const Tile& queries,
                                              const Tile& keys, u32 dim) {
    u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP * 16;
    Shared<const u16> a_row = queries.halves + ((first + lane % 16) * queries.stride);
    Shared<const u16> b_row = keys.halves + ((lane / 16 * 8 + lane % 8) * keys.stride);
#pragma unroll
    for (u32 n = 0; n < TILE / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll 1
    for (u32 col = 0; col < padded(dim); col += 16) {
        u32 a[4];
        load_matrices(a, a_row + (col + lane / 16 * 8));
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n += 2) {
            u32 b[4];
            load_matrices(b, b_row + (n * 8 * keys.stride + col + lane / 8 % 2 * 8));
            mma_f16(s[n], a, {b[0], b[1]});
            mma_f16(s[n + 1], a, {b[2], b[3]});
        }
    }
}

// acc += the warp's exponentials, as halves in p, · the tile's values.
template <u32 DIM>
__device__ __forceinline__ void multiply_values(float (&acc)[DIM / 8][4], const u32 (&p)[TILE / 4],
                                                const Tile& values, u32 dim) {
    u32 lane = threadIdx.x % WARP;
    Shared<const u16> row = values.halves + (lane % 16 * values.stride + lane / 16 * 8);
#pragma unroll
    for (u32 k = 0; k < TILE / 16; k++) {
        const u32 a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
#pragma unroll
        for (u32 n = 0; n < DIM / 8; n += 2) {
            if (8 * n >= dim) break;
            u32 b[4];
            load_matrices_transposed(b, row + (16 * k * values.stride + 8 * n));
            mma_f16(acc[n], a, {b[0], b[1]});
            mma_f16(acc[n + 1], a, {b[2], b[3]});
        }
    }
}

// The exponential by the unit for it: 1 at 0. Where f16 does not round the result to zero, it is
// within 2^-19 of it, and that rounding within 2^-11.
__device__ __forceinline__ float e_to_the(float x) {
    return two_to_the(x * 1.44269504088896340736f);
}

// The state of one of the two queries of which a thread has results.
struct Query {
    // The positions of this launch and split that it sees.
    Range seen;
    float scale, max, sum;
    // Its record. There is none if it sees nothing.
    Global<float> record;
};

// Scores of a tile → exponentials as halves, of row `lane / 4` of the warp's or, with HALF, of the
// eighth after it, which is `row`; the factor on its sums so far.
template <u32 HALF>
__device__ __forceinline__ float softmax(Query& query, float (&s)[TILE / 8][4],
                                         u32 (&p)[TILE / 4], u32 start, const Job& job, u32 row,
                                         Global<const float> bias, u32 reach) {
    u32 pair = threadIdx.x % 4 * 2;
    float most = query.max;
#pragma unroll
    for (u32 n = 0; n < TILE / 4; n++) {
        float& score = s[n / 2][2 * HALF + n % 2];
        u32 key = start + n / 2 * 8 + pair + n % 2;
        bool sees = key >= query.seen.begin && key < query.seen.end;
        score *= query.scale;
        if (job.cap > 0.0f) score = soft_cap(score, job.cap);
        if (bias && sees) {
            u32 position = job.past + job.token(row);
            score += bias_of(bias, reach, job.head_of(row), key, position);
        }
        if (!sees) score = -INFINITY;
        most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
    float factor = e_to_the(query.max - shift(most)), sum = 0.0f;
#pragma unroll
    for (u32 n = 0; n < TILE / 8; n++) {
        float low = e_to_the(s[n][2 * HALF] - shift(most));
        float high = e_to_the(s[n][2 * HALF + 1] - shift(most));
        u32 both = pack(low, high);
        // The tile's 16 positions of a product are four registers: both queries' first eight, then
        // both queries' last eight.
        p[n / 2 * 4 + n % 2 * 2 + HALF] = both;
        sum += f16_to_f32(static_cast<u16>(both)) + f16_to_f32(static_cast<u16>(both >> 16));
    }
    query.max = most;
    query.sum = query.sum * factor + sum;
    return factor;
}

// The query of row `own` in a split, and the sums of its record if it has seen positions of the
// split in launches before.
template <u32 DIM, u32 HALF>
__device__ __forceinline__ Query begin_query(float (&acc)[DIM / 8][4], const Job& job, u32 own,
                                             u32 split, const AttentionParams& p) {
    Query query = {{0, 0}, p.scale, -INFINITY, 0.0f, p.work};
    if (!job.has(own)) return query;
    Range all = job.seen(job.token(own));
    u32 start = split * p.split_len;
    query.seen = all.common(max(start, p.begin), start + p.split_len);
    if (query.seen.is_empty()) return query;
    u32 slot = split - all.begin / p.split_len, pair = threadIdx.x % 4 * 2;
    u64 place = static_cast<u64>(job.token(own)) * p.n_head + job.head_of(own);
    query.record = query.record + (place * p.n_slots + slot) * record_floats(p.v_dim);
    if (max(start, all.begin) >= p.begin) return query;
#pragma unroll
    for (u32 n = 0; n < DIM / 8; n++) {
        if (8 * n >= p.v_dim) break;
        float2 two = as<float2>(query.record + (8 * n + pair))[0];
        acc[n][2 * HALF] = two.x, acc[n][2 * HALF + 1] = two.y;
    }
    query.max = query.record[p.v_dim];
    if (pair == 0) query.sum = query.record[p.v_dim + 1];
    return query;
}

template <u32 DIM, u32 HALF>
__device__ __forceinline__ void store(const Query& query, const float (&acc)[DIM / 8][4], u32 dim) {
    float sum = query.sum;
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    u32 pair = threadIdx.x % 4 * 2;
    if (query.seen.is_empty()) return;
#pragma unroll
    for (u32 n = 0; n < DIM / 8; n++) {
        if (8 * n >= dim) break;
        as<float2>(query.record + (8 * n + pair))[0] =
            make_float2(acc[n][2 * HALF], acc[n][2 * HALF + 1]);
    }
    if (pair == 0) as<float2>(query.record + dim)[0] = make_float2(query.max, sum);
}

template <u32 DIM>
__device__ __forceinline__ void attention_prompt(const AttentionParams& p) {
    SHARED_DYNAMIC(u16, dynamic);
    SHARED(float, scales, ROWS);
    u32 group = p.group, n_head = p.n_head, reach = p.reach;
    Global<const float> bias = p.bias;
    Rows k = {p.k, p.k_type, p.k_dim, p.k_row, p.begin};
    Rows v = {p.v, p.v_type, p.v_dim, p.v_row, p.begin};
    Job job;
    u32 parts = (group + ROWS - 1) / ROWS, head_kv = blockIdx.y / parts, part = blockIdx.y % parts;
    u32 tokens_a_block = max(1u, ROWS / group);
    // Late tokens see more positions, so they come first.
    job.first_token = (gridDim.x - 1 - blockIdx.x) * tokens_a_block;
    job.tokens = min(tokens_a_block, p.n_tokens - job.first_token);
    job.head = head_kv * group + part * ROWS;
    job.heads = min(ROWS, group - part * ROWS);
    job.past = p.past[0] + p.first_token;
    job.all = p.all, job.window = p.window, job.chunk = p.chunk, job.limit = p.limit;
    job.cap = p.cap;
    Range seen = {job.seen(job.first_token).begin,
                  job.seen(job.first_token + job.tokens - 1).end};
    u32 split = max(seen.begin, p.begin) / p.split_len + blockIdx.z, first = split * p.split_len;
    seen = seen.common(max(first, p.begin), first + p.split_len);
    if (seen.is_empty()) return;
    k.bytes = k.bytes + static_cast<u64>(head_kv) * p.k_ctx * k.row;
    v.bytes = v.bytes + static_cast<u64>(head_kv) * p.v_ctx * v.row;

    Tile queries = {dynamic, padded(k.dim) + 8};
    Shared<u16> tile = dynamic + ROWS * queries.stride;
    Tile keys = {tile, queries.stride}, values = {tile, padded(v.dim) + 8};
    load_queries(queries, scales, job, p.q, n_head, k.dim);
    __syncwarp();
    u32 row = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
    float acc[DIM / 8][4] = {};
    Query query[2] = {begin_query<DIM, 0>(acc, job, row, split, p),
                      begin_query<DIM, 1>(acc, job, row + 8, split, p)};
    query[0].scale *= scales[row], query[1].scale *= scales[row + 8];
    for (u32 start = seen.begin / TILE * TILE; start < seen.end; start += TILE) {
        __syncthreads();
        fill(keys, k, start, seen);
        __syncthreads();
        float s[TILE / 8][4];
        u32 e[TILE / 4];
        multiply_keys(s, queries, keys, k.dim);
        float upper = softmax<0>(query[0], s, e, start, job, row, bias, reach);
        float lower = softmax<1>(query[1], s, e, start, job, row + 8, bias, reach);
#pragma unroll
        for (u32 n = 0; n < DIM / 8; n++) {
            acc[n][0] *= upper, acc[n][1] *= upper;
            acc[n][2] *= lower, acc[n][3] *= lower;
        }
        __syncthreads();
        fill(values, v, start, seen);
        __syncthreads();
        multiply_values<DIM>(acc, e, values, v.dim);
    }
    store<DIM, 0>(query[0], acc, v.dim);
    store<DIM, 1>(query[1], acc, v.dim);
}

// Values of up to DIM elements.
#define ATTENTION_PROMPT(DIM, N) \
    KERNEL(attention_prompt_##DIM, BLOCKS(N), AttentionParams) { attention_prompt<DIM>(p); }

ATTENTION_PROMPT(64, 4)
ATTENTION_PROMPT(128, 3)
ATTENTION_PROMPT(256, 2)
