// Attention of a few queries over the KV cache, exact: the CPU's products in the CPU's order.
//
//   q        f32 [tokens, n_head, k_dim]
//   k, v     rows of a cache (cache_rows.cuh), `k_row` and `v_row` bytes from one to the next
//   past     u32 [1]: the position of the first token of the text's new part; token t of the launch
//            is at past + first_token + t. It is read from memory and not passed, so that a graph
//            that was captured once serves every position.
//   work     f32 records [tokens, n_head, slots] of acc [v_dim], max, sum
//   out      f32 [tokens, n_head, v_dim]
//
// Twin: src/backend/cpu/attention.rs, to the bit; "One arithmetic" there is the order that is kept
// here. A block takes one split of 512 positions for one token and up to R heads that share a KV
// head, so that keys and values are read once for them:
//
// 1. Scores. Eight threads share a key, thread l having the lane l of the order: elements l, l + 8,
//    …, so a query costs a register a key. Queries lie in shared memory, by lane. Eight sums of
//    eight threads are added up by seven shuffles instead of 24: at each step of the tree a thread
//    gives half of its sums away. Keys of the next step are on their way meanwhile.
// 2. Softmax. A warp takes a query: eight threads a tile, for the eight lanes of its sum.
// 3. Values. They come to shared memory as they are, a stage of up to 64 positions at a time and
//    the next one on its way meanwhile: 16 KB a block in flight. A thread has four elements of the
//    sum of one or a few queries and goes over the positions in order.
//
// A second kernel adds up the splits, in ascending order. Blocks whose split nobody sees leave at
// once.
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

// Rows of values that lie in shared memory at a time.
struct Stage {
    // Bytes of a load: 16, 8, 4 or 2, as alignment allows.
    u32 word;
    // A power of two, up to a tile.
    u32 positions;
    // In shared memory, from one row to the next.
    u32 row;
    // Of a row.
    u32 bytes;
};

// What a block computes.
struct Job {
    // The KV head's first row.
    Global<const u8> k, v;
    u32 k_dim, k_row, v_dim, v_row;
    // Of the split, those that are seen.
    Range seen;
    float scale;
    // The token's position, and the first of the heads.
    u32 position, head, n_heads;
    Global<const float> bias;
    u32 reach;
    // How values come to shared memory.
    Stage stage;
};

struct Room {
    // [R, SPLIT]: scores, then exponentials
    Shared<float> p;
    // [R, TILES]: by what sums are multiplied when a tile begins
    Shared<float> factors;
    // [R, 8 lanes, lane_floats]
    Shared<float> q;
    // The values of a stage; in place of the queries, when these are done with.
    Shared<u8> values;
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
__device__ __forceinline__ void load_queries(const Room& room, const Job& job,
                                             Global<const float> q) {
    u32 n = R * 8 * room.lane_floats;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        u32 row = i / (8 * room.lane_floats), rest = i % (8 * room.lane_floats);
        u32 at = rest / room.lane_floats + 8 * (rest % room.lane_floats);
        bool there = row < job.n_heads && at < job.k_dim;
        room.q[i] = there ? q[row * job.k_dim + at] : 0.0f;
    }
    // Queries that there are not have factors too.
    for (u32 i = threadIdx.x; i < R * TILES; i += THREADS) room.factors[i] = 1.0f;
}

// Groups of threads that share a key.
static constexpr u32 GROUPS = THREADS / 8;

// Keys that eight threads take at a time.
template <u32 R>
static constexpr u32 KEYS = R == 1 ? 8 : R == 16 ? 2 : 4;

// Elements j … j + 3 of this thread's lane, of its keys from `first` on.
template <class K, u32 N>
__device__ __forceinline__ void load_keys(float (&w)[N][4], const Job& job, u32 first, u32 j) {
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        // Where there is no key, the last one is read again.
        u32 key = min(first + n * GROUPS + threadIdx.x / 8, job.seen.end - 1);
        Global<const u8> row = job.k + static_cast<u64>(key) * job.k_row;
        load_lane<K>(row, threadIdx.x % 8, j, job.k_dim, w[n]);
    }
}

template <class K, u32 R>
__device__ __forceinline__ void scores(const Room& room, const Job& job) {
    constexpr u32 N = KEYS<R>;
    u32 lane = threadIdx.x % 8;
    float w[N][4], next[N][4] = {};
    load_keys<K>(w, job, job.seen.begin, 0);
    for (u32 first = job.seen.begin; first < job.seen.end; first += N * GROUPS) {
        float dots[N * R];
#pragma unroll
        for (u32 n = 0; n < N * R; n++) dots[n] = 0.0f;
#pragma unroll 1
        for (u32 j = 0; 8 * j < job.k_dim; j += 4) {
            // What comes next is on its way meanwhile.
            bool last = 8 * (j + 4) >= job.k_dim;
            u32 next_first = last ? first + N * GROUPS : first;
            if (next_first < job.seen.end) load_keys<K>(next, job, next_first, last ? 0 : j + 4);
#pragma unroll
            for (u32 r = 0; r < R; r++) {
                Shared<float> at = room.q + ((r * 8 + lane) * room.lane_floats + j);
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
#pragma unroll
            for (u32 n = 0; n < N; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) w[n][i] = next[n][i];
            }
        }
#pragma unroll
        for (u32 n = 0; n < N * R; n += 8) {
            float dot = scatter_sums(dots + n);
            u32 r = (n + lane) % R, key = first + (n + lane) / R * GROUPS + threadIdx.x / 8;
            if (key >= job.seen.end) continue;
            float score = job.scale * dot;
            if (job.bias && r < job.n_heads) {
                score += bias_of(job.bias, job.reach, job.head + r, key, job.position);
            }
            room.p[r * SPLIT + key % SPLIT] = score;
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

// Registers for what is on its way. With R = 16 there are fewer, and less shared memory.
template <u32 R>
static constexpr u32 FLIGHT = R == 16 ? 8 : 16;

// The words that a thread moves of the stage that begins at `first`: `each(c, position, byte)`, c
// from 0 to N − 1. Short words get half of the registers, as each has an address of its own.
template <u32 N, class F>
__device__ __forceinline__ void each_word(const Job& job, u32 first, F each) {
    u32 words = job.stage.bytes / job.stage.word;
    u32 end = min(first + job.stage.positions, job.seen.end);
#pragma unroll
    for (u32 c = 0; c < N; c++) {
        u32 n = threadIdx.x + c * THREADS, position = first + n / words;
        if (position < job.seen.begin || position >= end) continue;
        each(c, position, n % words * job.stage.word);
    }
}

template <u32 N>
__device__ __forceinline__ void fetch(u32 (&flight)[N], const Job& job, u32 first) {
    auto row = [&](u32 position) { return job.v + static_cast<u64>(position) * job.v_row; };
    if (job.stage.word == 16) {
        each_word<N / 4>(job, first, [&](u32 c, u32 position, u32 byte) {
            uint4 v = *as<const uint4>(row(position) + byte);
            flight[4 * c] = v.x, flight[4 * c + 1] = v.y;
            flight[4 * c + 2] = v.z, flight[4 * c + 3] = v.w;
        });
    } else if (job.stage.word == 8) {
        each_word<N / 4>(job, first, [&](u32 c, u32 position, u32 byte) {
            uint2 v = *as<const uint2>(row(position) + byte);
            flight[2 * c] = v.x, flight[2 * c + 1] = v.y;
        });
    } else if (job.stage.word == 4) {
        each_word<N / 2>(job, first, [&](u32 c, u32 position, u32 byte) {
            flight[c] = *as<const u32>(row(position) + byte);
        });
    } else {
        each_word<N / 2>(job, first, [&](u32 c, u32 position, u32 byte) {
            flight[c] = *as<const u16>(row(position) + byte);
        });
    }
}

template <u32 N>
__device__ __forceinline__ void put(Shared<u8> values, const u32 (&flight)[N], const Job& job,
                                    u32 first) {
    auto row = [&](u32 position) { return values + (position - first) * job.stage.row; };
    if (job.stage.word == 16) {
        each_word<N / 4>(job, first, [&](u32 c, u32 position, u32 byte) {
            *as<uint4>(row(position) + byte) = make_uint4(flight[4 * c], flight[4 * c + 1],
                                                          flight[4 * c + 2], flight[4 * c + 3]);
        });
    } else if (job.stage.word == 8) {
        each_word<N / 4>(job, first, [&](u32 c, u32 position, u32 byte) {
            *as<uint2>(row(position) + byte) = make_uint2(flight[2 * c], flight[2 * c + 1]);
        });
    } else if (job.stage.word == 4) {
        each_word<N / 2>(job, first, [&](u32 c, u32 position, u32 byte) {
            *as<u32>(row(position) + byte) = flight[c];
        });
    } else {
        each_word<N / 2>(job, first, [&](u32 c, u32 position, u32 byte) {
            *as<u16>(row(position) + byte) = static_cast<u16>(flight[c]);
        });
    }
}

// What a thread adds up: elements `at` … of queries from `row` on.
struct Item {
    u32 at, row;
    bool live;
};

// acc += the stage's exponentials · values; what is not seen is neither read nor multiplied by
// zero: it may be NaN.
template <class V, bool LOOSE, u32 ROWS>
__device__ __forceinline__ void add_values(float (&acc)[ROWS][4], const Room& room, const Job& job,
                                           const Item& item, u32 first) {
    if (first % TILE == 0) {
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            float factor = room.factors[(item.row + r) * TILES + first % SPLIT / TILE];
#pragma unroll
            for (u32 c = 0; c < 4; c++) acc[r][c] *= factor;
        }
    }
    Range seen = job.seen.common(first, first + job.stage.positions);
    Shared<const float> p = room.p + item.row * SPLIT;
    Shared<const u8> row = room.values + (seen.begin - first) * job.stage.row;
#pragma unroll 4
    for (u32 i = seen.begin; i < seen.end; i++, row += job.stage.row) {
        float w[4];
        load_four<V, LOOSE>(row, item.at, job.v_dim, w);
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            float e = p[r * SPLIT + i % SPLIT];
#pragma unroll
            for (u32 c = 0; c < 4; c++) acc[r][c] = fmaf(e, w[c], acc[r][c]);
        }
    }
}

// acc of each query's record. Long rows take several passes; `flight` holds the first stage.
template <class V, bool LOOSE, u32 R>
__device__ __forceinline__ void values(const Room& room, const Job& job, u32 (&flight)[FLIGHT<R>],
                                       Global<float> record, u64 record_stride) {
    constexpr u32 ROWS = EACH<R>;
    u32 n_quads = (job.v_dim + 3) / 4, begin = job.seen.begin / job.stage.positions;
    begin *= job.stage.positions;
    for (u32 pass = 0; pass < n_quads * (R / ROWS); pass += THREADS) {
        u32 n = pass + threadIdx.x;
        Item item = {n % n_quads * 4, n / n_quads * ROWS, n / n_quads * ROWS < job.n_heads};
        float acc[ROWS][4] = {};
        if (pass > 0) fetch(flight, job, begin);
        for (u32 first = begin; first < job.seen.end; first += job.stage.positions) {
            put(room.values, flight, job, first);
            __syncthreads();
            if (first + job.stage.positions < job.seen.end) {
                fetch(flight, job, first + job.stage.positions);
            }
            if (item.live) add_values<V, LOOSE, ROWS>(acc, room, job, item, first);
            __syncthreads();
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (!item.live || item.row + r >= job.n_heads) break;
            Global<float> to = record + ((item.row + r) * record_stride + item.at);
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                if (item.at + c < job.v_dim) to[c] = acc[r][c];
            }
        }
    }
}

// ---- both

// `k_type` and `v_type` are CacheType.
template <u32 R>
__device__ __forceinline__ void attention_split(
    Global<const float> q, Global<const u8> k, u32 k_type, u32 k_dim, u32 k_row,
    Global<const u8> v, u32 v_type, u32 v_dim, u32 v_row, Stage stage, u32 k_ctx, u32 v_ctx,
    u32 n_head, u32 group, Global<const u32> past, u32 first_token, u32 limit, u32 all, u32 window,
    float scale, Global<const float> bias, u32 reach, Global<float> work) {
    SHARED_DYNAMIC(float, dynamic);
    u32 parts = (group + R - 1) / R, head_kv = blockIdx.y / parts, part = blockIdx.y % parts;
    u32 token = blockIdx.z, slot = blockIdx.x, n_slots = gridDim.x;
    Job job;
    job.position = past[0] + first_token + token;
    Range seen = seen_by(job.position, all, window, limit);
    u32 split = seen.begin / SPLIT + slot;
    job.seen = seen.common(split * SPLIT, split * SPLIT + SPLIT);
    if (job.seen.is_empty()) return;
    job.k = k + static_cast<u64>(head_kv) * k_ctx * k_row;
    job.v = v + static_cast<u64>(head_kv) * v_ctx * v_row;
    job.k_dim = k_dim, job.k_row = k_row, job.v_dim = v_dim, job.v_row = v_row;
    job.scale = scale, job.bias = bias, job.reach = reach, job.stage = stage;
    job.head = head_kv * group + part * R;
    job.n_heads = min(R, group - part * R);

    Room room;
    room.lane_floats = 4 * ((k_dim + 31) / 32 | 1);
    room.p = dynamic;
    room.factors = room.p + R * SPLIT;
    room.q = room.factors + R * TILES;
    room.values = as<u8>(room.q);
    u64 query = static_cast<u64>(token) * n_head + job.head;
    load_queries<R>(room, job, q + query * k_dim);
    __syncthreads();
    switch (k_type) {
        case CACHE_F32: scores<CacheF32, R>(room, job); break;
        case CACHE_F16: scores<CacheF16, R>(room, job); break;
        case CACHE_BF16: scores<CacheBF16, R>(room, job); break;
        default: scores<CacheQ8_0, R>(room, job); break;
    }
    u32 flight[FLIGHT<R>] = {};
    fetch(flight, job, job.seen.begin / stage.positions * stage.positions);
    __syncthreads();
    u64 stride = static_cast<u64>(n_slots) * record_floats(v_dim);
    Global<float> record = work + (query * stride + static_cast<u64>(slot) * record_floats(v_dim));
    for (u32 r = threadIdx.x / WARP; r < job.n_heads; r += THREADS / WARP) {
        softmax(room.p + r * SPLIT, room.factors + r * TILES, job.seen,
                record + (r * stride + v_dim));
    }
    __syncthreads();
    switch (v_type + (v_dim % 4 ? 4 : 0)) {
        case CACHE_F32: values<CacheF32, false, R>(room, job, flight, record, stride); break;
        case CACHE_F16: values<CacheF16, false, R>(room, job, flight, record, stride); break;
        case CACHE_BF16: values<CacheBF16, false, R>(room, job, flight, record, stride); break;
        case CACHE_Q8_0: values<CacheQ8_0, false, R>(room, job, flight, record, stride); break;
        case CACHE_F32 + 4: values<CacheF32, true, R>(room, job, flight, record, stride); break;
        case CACHE_F16 + 4: values<CacheF16, true, R>(room, job, flight, record, stride); break;
        case CACHE_BF16 + 4: values<CacheBF16, true, R>(room, job, flight, record, stride); break;
        default: values<CacheQ8_0, true, R>(room, job, flight, record, stride); break;
    }
}

#define ATTENTION_SPLIT(R)                                                                       \
    KERNEL(attention_split_##R, TWO_BLOCKS, Global<const float> q, Global<const u8> k,           \
           u32 k_type, u32 k_dim, u32 k_row, Global<const u8> v, u32 v_type, u32 v_dim,          \
           u32 v_row, u32 word, u32 positions, u32 stage_row, u32 v_bytes, u32 k_ctx, u32 v_ctx, \
           u32 n_head, u32 group,                                                                \
           Global<const u32> past, u32 first_token, u32 limit, u32 all, u32 window, float scale, \
           Global<const float> bias, u32 reach, Global<float> work) {                            \
        Stage stage = {word, positions, stage_row, v_bytes};                                     \
        attention_split<R>(q, k, k_type, k_dim, k_row, v, v_type, v_dim, v_row, stage, k_ctx,    \
                           v_ctx, n_head, group, past, first_token, limit, all, window, scale,   \
                           bias, reach, work);                                                   \
    }

ATTENTION_SPLIT(1)
ATTENTION_SPLIT(2)
ATTENTION_SPLIT(4)
ATTENTION_SPLIT(8)
ATTENTION_SPLIT(16)

// Adds up the records of each query, one a split of `split_len` positions. A block a query.
KERNEL(attention_combine, COMBINE_THREADS, Global<const float> work, u32 n_slots, u32 split_len,
       u32 v_dim, Global<const u32> past, u32 first_token, u32 limit, u32 all, u32 window,
       Global<const float> sinks, Global<float> out) {
    u32 head = blockIdx.x, token = blockIdx.y;
    u64 query = static_cast<u64>(token) * gridDim.x + head;
    Range seen = seen_by(past[0] + first_token + token, all, window, limit);
    u32 n = seen.is_empty() ? 0 : (seen.end - 1) / split_len + 1 - seen.begin / split_len;
    n = min(n, n_slots);
    Global<const float> records = work + query * n_slots * record_floats(v_dim);
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
        out[query * v_dim + i] = acc * (factor / sum);
    }
}
