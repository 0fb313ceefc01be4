// Attention of a few queries over the KV cache, exact: the CPU's products in the CPU's order.
//
// Twin: src/backend/cpu/attention, to the bit, in the order of "One arithmetic" there. A block
// takes one split of 512 positions for one token and up to R heads that share a KV head, so that
// keys and values are read once for these heads:
//
// 1. Scores. Eight threads share a key; thread l takes lane l of the order, elements l, l + 8, …,
//    so a query costs one register a key. Queries lie in shared memory, by lane. Eight sums of
//    eight threads are added up by seven shuffles instead of 24: at each step of the tree a thread
//    gives half of its sums away.
// 2. Softmax. A warp takes a query: eight threads a tile, for the eight lanes of its sum.
// 3. Values. A thread has four elements of the sum of one or a few queries and goes over the
//    positions in order; values of the next eight are on their way meanwhile.
//
// There is a block-wide barrier between these steps and none within them. attention_combine adds up
// the splits in ascending order. A block leaves at once if its token sees nothing of its split.
// Expected bytes: the keys and values that are seen, once for R heads; records of 4 bytes a value
// for each split.
#include "attention.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 COMBINE_THREADS = 128;
static constexpr u32 TILES = SPLIT / TILE;

// Two blocks a multiprocessor: one computes while the other waits for memory.
#if defined(__CUDACC__)
#define TWO_BLOCKS THREADS, 2
#else
#define TWO_BLOCKS THREADS
#endif

// The work of a block.
struct Job {
    // The KV head's first row.
    Global<const u8> k, v;
    u32 k_dim, k_row, v_dim, v_row;
    // The positions of the split that are seen.
    Range seen;
    float scale, cap;
    // The token's position, and the first of the heads.
    u32 position, head, n_heads;
    Global<const float> bias;
    u32 reach;
};

struct Scratch {
    // [R, 8 lanes, lane_floats]
    Shared<float> q;
    // [R, SPLIT]: scores, then exponentials
    Shared<float> p;
    // [R, TILES]: by what sums are multiplied when a tile begins
    Shared<float> factors;
    // Elements of a lane: whole quads and an odd number of them, so that the eight threads of a key
    // read from different banks.
    u32 lane_floats;
};

// ---- scores

// value[n] of eight threads → the sum of value[l] in thread l, by the tree of "One arithmetic":
// lanes four apart first, then two, then one.
__device__ __forceinline__ float scatter_sums(const float* value) {
    u32 lane = threadIdx.x % 8;
    float four[4], two[2];
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        float keep = lane & 4 ? value[n + 4] : value[n], give = lane & 4 ? value[n] : value[n + 4];
        four[n] = keep + __shfl_xor_sync(FULL_WARP, give, 4);
    }
#pragma unroll
    for (u32 n = 0; n < 2; n++) {
        float keep = lane & 2 ? four[n + 2] : four[n], give = lane & 2 ? four[n] : four[n + 2];
        two[n] = keep + __shfl_xor_sync(FULL_WARP, give, 2);
    }
    float keep = lane & 1 ? two[1] : two[0], give = lane & 1 ? two[0] : two[1];
    return keep + __shfl_xor_sync(FULL_WARP, give, 1);
}

template <u32 R>
__device__ __forceinline__ void load_queries(const Scratch& scratch, const Job& job,
                                             Global<const float> q) {
    u32 n = R * 8 * scratch.lane_floats;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        u32 row = i / (8 * scratch.lane_floats), rest = i % (8 * scratch.lane_floats);
        u32 at = rest / scratch.lane_floats + 8 * (rest % scratch.lane_floats);
        bool there = row < job.n_heads && at < job.k_dim;
        scratch.q[i] = there ? q[row * job.k_dim + at] : 0.0f;
    }
    // Queries that there are not have factors too.
    for (u32 i = threadIdx.x; i < R * TILES; i += THREADS) scratch.factors[i] = 1.0f;
}

// Keys that eight threads take at a time.
template <u32 R>
static constexpr u32 KEYS = R == 1 ? 8 : R == 16 ? 2 : 4;

template <u32 R, class K>
__device__ __forceinline__ void scores(const K& type, const Scratch& scratch, const Job& job) {
    constexpr u32 N = KEYS<R>, GROUPS = THREADS / 8;
    u32 lane = threadIdx.x % 8, group = threadIdx.x / 8;
    for (u32 first = job.seen.begin; first < job.seen.end; first += N * GROUPS) {
        Global<const u8> rows[N];
        float dots[N * R];
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            // Past the last key, the last one is read again.
            u32 key = min(first + n * GROUPS + group, job.seen.end - 1);
            rows[n] = job.k + static_cast<u64>(key) * job.k_row;
        }
#pragma unroll
        for (u32 n = 0; n < N * R; n++) dots[n] = 0.0f;
#pragma unroll 1
        for (u32 j = 0; 8 * j < job.k_dim; j += 4) {
            float w[N][4];
#pragma unroll
            for (u32 n = 0; n < N; n++) load_lane(type, rows[n], lane, j, job.k_dim, w[n]);
#pragma unroll
            for (u32 r = 0; r < R; r++) {
                Shared<float> at = scratch.q + ((r * 8 + lane) * scratch.lane_floats + j);
                float4 q = as<float4>(at)[0];
#pragma unroll
                for (u32 n = 0; n < N; n++) {
                    float& dot = dots[n * R + r];
                    dot = fmaf(q.x, w[n][0], dot);
                    dot = fmaf(q.y, w[n][1], dot);
                    dot = fmaf(q.z, w[n][2], dot);
                    dot = fmaf(q.w, w[n][3], dot);
                }
            }
        }
#pragma unroll
        for (u32 n = 0; n < N * R; n += 8) {
            float dot = scatter_sums(dots + n);
            u32 r = (n + lane) % R, key = first + (n + lane) / R * GROUPS + group;
            if (key >= job.seen.end) continue;
            float score = job.scale * dot;
            if (job.cap > 0.0f) score = soft_cap(score, job.cap);
            if (job.bias && r < job.n_heads) {
                score += bias_of(job.bias, job.reach, job.head + r, key, job.position);
            }
            scratch.p[r * SPLIT + key % SPLIT] = score;
        }
    }
}

// ---- softmax

// Scores of a query → exponentials; its max and sum to `tail`. The whole warp, with four tiles at a
// time.
__device__ __forceinline__ void softmax(Shared<float> p, Shared<float> factors, Range seen,
                                        Global<float> tail) {
    u32 thread = threadIdx.x % WARP, lane = thread % 8, split = seen.begin / SPLIT * SPLIT;
    float largest[2], sums[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 start = split + (4 * half + thread / 8) * TILE;
        Range tile = seen.common(start, start + TILE);
        float most = -INFINITY;
        for (u32 i = tile.begin + lane; i < tile.end; i += 8) most = fmaxf(most, p[i - split]);
        for (u32 step = 4; step > 0; step /= 2) {
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, step));
        }
        largest[half] = most;
    }
    // The largest score up to each tile. A tile that is not seen changes nothing: its factor is 1.
    float max = -INFINITY, upto[2] = {-INFINITY, -INFINITY}, factor[TILES];
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
        float next = fmaxf(max, __shfl_sync(FULL_WARP, largest[t / 4], t % 4 * 8));
        factor[t] = moeba_exp(max - shift(next));
        if (thread / 8 == t % 4) upto[t / 4] = next;
        max = next;
        if (thread == 0) factors[t] = factor[t];
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 start = split + (4 * half + thread / 8) * TILE;
        Range tile = seen.common(start, start + TILE);
        float sum = 0.0f;
        for (u32 i = tile.begin + lane; i < tile.end; i += 8) {
            float e = moeba_exp(p[i - split] - shift(upto[half]));
            p[i - split] = e;
            sum += e;
        }
        sums[half] = tree8_threads(sum);
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
        sum = sum * factor[t] + __shfl_sync(FULL_WARP, sums[t / 4], t % 4 * 8);
    }
    if (thread == 0) {
        tail[0] = max;
        tail[1] = sum;
    }
}

// ---- values

// Queries of whose sums a thread has a part.
template <u32 R>
static constexpr u32 EACH = R == 1 ? 1 : R == 16 ? 4 : 2;

// Positions whose values are loaded together, as registers allow; a tile is a whole number of them.
template <class V>
static constexpr u32 DEPTH = sizeof(typename V::Quad) > 8 ? 4 : 8;
template <>
constexpr u32 DEPTH<CacheNibbles> = 4;

template <class V>
__device__ __forceinline__ void load_values(const V& type, typename V::Quad (&quads)[DEPTH<V>],
                                            const Job& job, u32 first, u32 at) {
#pragma unroll
    for (u32 n = 0; n < DEPTH<V>; n++) {
        u32 i = first + n;
        if (i < job.seen.begin || i >= job.seen.end) continue;
        quads[n] = load_quad(type, job.v + static_cast<u64>(i) * job.v_row, at, job.v_dim);
    }
}

template <class V, u32 ROWS>
__device__ __forceinline__ void add_values(float (&acc)[ROWS][4],
                                           const typename V::Quad (&quads)[DEPTH<V>],
                                           Shared<const float> p, const Job& job, u32 first) {
#pragma unroll
    for (u32 n = 0; n < DEPTH<V>; n++) {
        u32 i = first + n;
        // Unseen values are not read, not even times zero: they may be NaN.
        if (i < job.seen.begin || i >= job.seen.end) continue;
        float w[4];
        V::widen(quads[n], w);
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            float e = p[r * SPLIT + i % SPLIT];
#pragma unroll
            for (u32 c = 0; c < 4; c++) acc[r][c] = fmaf(e, w[c], acc[r][c]);
        }
    }
}

// acc of each query's record.
template <u32 R, class V>
__device__ __forceinline__ void values(const V& type, const Scratch& scratch, const Job& job,
                                       Global<float> record, u64 record_stride) {
    constexpr u32 ROWS = EACH<R>;
    u32 n_quads = (job.v_dim + 3) / 4;
    for (u32 item = threadIdx.x; item < n_quads * (R / ROWS); item += THREADS) {
        u32 at = item % n_quads * 4, row = item / n_quads * ROWS;
        if (row >= job.n_heads) break;
        Shared<const float> p = scratch.p + row * SPLIT;
        float acc[ROWS][4] = {};
        typename V::Quad now[DEPTH<V>] = {}, next[DEPTH<V>] = {};
        u32 first = job.seen.begin / DEPTH<V> * DEPTH<V>;
        load_values(type, now, job, first, at);
        for (; first < job.seen.end; first += DEPTH<V>) {
            load_values(type, next, job, first + DEPTH<V>, at);
            if (first % TILE == 0) {
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
                    float factor = scratch.factors[(row + r) * TILES + first % SPLIT / TILE];
#pragma unroll
                    for (u32 c = 0; c < 4; c++) acc[r][c] *= factor;
                }
            }
            add_values<V, ROWS>(acc, now, p, job, first);
#pragma unroll
            for (u32 n = 0; n < DEPTH<V>; n++) now[n] = next[n];
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (row + r >= job.n_heads) break;
            Global<float> to = record + ((row + r) * record_stride + at);
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                if (at + c < job.v_dim) to[c] = acc[r][c];
            }
        }
    }
}

// ---- both

template <u32 R>
__device__ __forceinline__ void attention_split(const AttentionParams& p) {
    SHARED_DYNAMIC(float, dynamic);
    u32 group = p.group, v_dim = p.v_dim, v_type = p.v_type;
    u32 parts = (group + R - 1) / R, head_kv = blockIdx.y / parts, part = blockIdx.y % parts;
    u32 token = blockIdx.z, slot = blockIdx.x, n_slots = gridDim.x;
    Job job;
    job.position = p.past[0] + p.first_token + token;
    Range seen = seen_by(job.position, p.all, p.window, p.chunk, p.limit);
    u32 split = seen.begin / SPLIT + slot;
    job.seen = seen.common(split * SPLIT, split * SPLIT + SPLIT);
    if (job.seen.is_empty()) return;
    job.k = p.k + static_cast<u64>(head_kv) * p.k_ctx * p.k_row;
    job.v = p.v + static_cast<u64>(head_kv) * p.v_ctx * p.v_row;
    job.k_dim = p.k_dim, job.k_row = p.k_row, job.v_dim = v_dim, job.v_row = p.v_row;
    job.scale = p.scale, job.cap = p.cap, job.bias = p.bias, job.reach = p.reach;
    job.head = head_kv * group + part * R;
    job.n_heads = min(R, group - part * R);

    Scratch scratch;
    scratch.lane_floats = 4 * ((p.k_dim + 31) / 32 | 1);
    scratch.q = dynamic;
    scratch.p = scratch.q + R * 8 * scratch.lane_floats;
    scratch.factors = scratch.p + R * SPLIT;
    u64 query = static_cast<u64>(token) * p.n_head + job.head;
    load_queries<R>(scratch, job, p.q + query * p.k_dim);
    __syncthreads();
    switch (p.k_type) {
        case CACHE_F32: scores<R>(CacheF32{}, scratch, job); break;
        case CACHE_F16: scores<R>(CacheF16{}, scratch, job); break;
        case CACHE_BF16: scores<R>(CacheBF16{}, scratch, job); break;
        case CACHE_Q8_0: scores<R>(CacheQ8_0{}, scratch, job); break;
        default: scores<R>(CacheNibbles(p.k_type), scratch, job); break;
    }
    __syncthreads();
    u64 stride = static_cast<u64>(n_slots) * record_floats(v_dim);
    u64 first = query * stride + static_cast<u64>(slot) * record_floats(v_dim);
    Global<float> record = p.work + first;
    for (u32 r = threadIdx.x / WARP; r < job.n_heads; r += THREADS / WARP) {
        softmax(scratch.p + r * SPLIT, scratch.factors + r * TILES, job.seen,
                record + (r * stride + v_dim));
    }
    __syncthreads();
    if (p.loose) {
        values<R>(CacheLoose{v_type}, scratch, job, record, stride);
        return;
    }
    switch (v_type) {
        case CACHE_F32: values<R>(CacheF32{}, scratch, job, record, stride); break;
        case CACHE_F16: values<R>(CacheF16{}, scratch, job, record, stride); break;
        case CACHE_BF16: values<R>(CacheBF16{}, scratch, job, record, stride); break;
        case CACHE_Q8_0: values<R>(CacheQ8_0{}, scratch, job, record, stride); break;
        default: values<R>(CacheNibbles(v_type), scratch, job, record, stride); break;
    }
}

#define ATTENTION_SPLIT(R) \
    KERNEL(attention_split_##R, TWO_BLOCKS, AttentionParams) { attention_split<R>(p); }

ATTENTION_SPLIT(1)
ATTENTION_SPLIT(2)
ATTENTION_SPLIT(4)
ATTENTION_SPLIT(8)
ATTENTION_SPLIT(16)

struct CombineParams {
    // As in AttentionParams, with splits of `split_len` positions.
    Address<const float> work;
    u32 n_slots;
    u32 split_len;
    u32 v_dim;
    u32 first_token;
    Address<const u32> past;
    u32 limit;
    u32 all;
    u32 window;
    u32 chunk;
    // [n_head] or null
    Address<const float> sinks;
    // [tokens, n_head, v_dim]
    Address<float> out;
};
static_assert(sizeof(CombineParams) == 64);

// Adds up the records of each query. One block for each query.
KERNEL(attention_combine, COMBINE_THREADS, CombineParams) {
    u32 v_dim = p.v_dim, split_len = p.split_len, n_slots = p.n_slots;
    Global<const float> sinks = p.sinks;
    u32 head = blockIdx.x, token = blockIdx.y;
    u64 query = static_cast<u64>(token) * gridDim.x + head;
    u32 position = p.past[0] + p.first_token + token;
    Range seen = seen_by(position, p.all, p.window, p.chunk, p.limit);
    u32 n = seen.is_empty() ? 0 : (seen.end - 1) / split_len + 1 - seen.begin / split_len;
    n = min(n, n_slots);
    Global<const float> records = p.work + query * n_slots * record_floats(v_dim);
    for (u32 i = threadIdx.x; i < v_dim; i += COMBINE_THREADS) {
        float acc = 0.0f, max = -INFINITY, sum = 0.0f, factor = 1.0f;
#pragma unroll 4
        for (u32 slot = 0; slot < n; slot++) {
            Global<const float> record = records + static_cast<u64>(slot) * record_floats(v_dim);
            float next = fmaxf(max, record[v_dim]);
            float a = moeba_exp(max - shift(next)), b = moeba_exp(record[v_dim] - shift(next));
            max = next;
            sum = sum * a + record[v_dim + 1] * b;
            acc = acc * a + record[i] * b;
        }
        if (sinks) {
            float sink = sinks[head], larger = fmaxf(max, sink);
            factor = moeba_exp(max - shift(larger));
            sum = sum * factor + moeba_exp(sink - shift(larger));
        }
        p.out[query * v_dim + i] = acc * (factor / sum);
    }
}
