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
// 3. Values. A thread has a few elements of the sum of a few queries and goes over the positions
//    in order.
//
// Keys and values come through shared memory, a tile of 64 positions at a time, by copies that run
// while the tiles before are computed: a step is one memory latency for 16 KB instead of one for
// each few bytes of a thread. A row is taken in parts of at most 256 bytes. The first values are on
// their way during the softmax.
//
// attention_combine adds up the splits in ascending order, and stores the result in the form that
// the next product reads, if that is asked for. A block leaves at once if its token sees
// nothing of its split.
// Expected bytes: the keys and values that are seen, once for R heads; records of 4 bytes a value
// for each split.
#include "attention.cuh"
#include "copy.cuh"
#include "lanes.cuh"
#include "quant/quantize.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 COMBINE_THREADS = 128;
static constexpr u32 TILES = SPLIT / TILE;

// Two blocks a multiprocessor: one computes while the other waits for memory.
#if defined(__CUDACC__)
#define TWO_BLOCKS THREADS, 2
#else
#define TWO_BLOCKS THREADS
#endif

// ---- tiles in shared memory

// A part of a row, and the place that it has in a tile: with what precedes it in its 16 bytes, and
// so far apart that the four keys of a warp lie in different banks.
static constexpr u32 PART_BYTES = 256;
static constexpr u32 PLACE_BYTES = PART_BYTES + 16;
static constexpr u32 STAGE_BYTES = TILE * PLACE_BYTES;
// Threads that copy a part of a row.
static constexpr u32 COPIERS = PART_BYTES / 16;

// Tiles that there is room for: one is computed, the others are on their way. As `stages` of
// src/backend/gpu/attention.rs.
template <u32 R>
static constexpr u32 STAGES = R <= 2 ? 3 : 2;

// The elements of a part, a whole number of blocks.
__device__ __forceinline__ u32 part_elements(u32 type) { return type == CACHE_F32 ? 64 : 128; }

// Rows of a KV head.
struct Rows {
    Global<const u8> data;
    u32 row, dim;
    // Elements and bytes of a part.
    u32 part, part_bytes;

    __device__ __forceinline__ Rows(Global<const u8> first, u32 type, u32 dim, u32 row)
        : data(first), row(row), dim(dim) {
        part = part_elements(type);
        part_bytes = type <= CACHE_BF16   ? PART_BYTES
                     : type == CACHE_Q8_0 ? 4 * Q8_0_BYTES
                                          : 4 * CacheNibbles(type).bytes();
    }
    __device__ __forceinline__ u32 parts() const { return (dim + part - 1) / part; }
    // The element of its place at which the part of a row begins.
    __device__ __forceinline__ u32 shift(u32 position, u32 at) const {
        return (address_bits(data) + position * row + at * part_bytes) % 16;
    }
};

// A part of the rows of a tile.
struct Step {
    // The first position.
    u32 tile, part;
};

// The work of a block.
struct Job {
    // The positions of the split that are seen.
    Range seen;
    float scale, cap;
    // The token's position, and the first of the heads.
    u32 position, head, n_heads;
    Global<const float> bias;
    u32 reach;

    __device__ __forceinline__ u32 first_tile() const { return seen.begin / TILE * TILE; }
    __device__ __forceinline__ u32 tiles() const {
        return (seen.end + TILE - 1) / TILE - seen.begin / TILE;
    }
    // Steps that take all parts of a tile before the next, or all tiles of a part.
    __device__ __forceinline__ Step by_tile(u32 step, u32 parts) const {
        return parts == 1 ? Step{first_tile() + step * TILE, 0}
                          : Step{first_tile() + step / parts * TILE, step % parts};
    }
    __device__ __forceinline__ Step by_part(u32 step, u32 n_tiles) const {
        return Step{first_tile() + step % n_tiles * TILE, step / n_tiles};
    }
};

struct Scratch {
    // [R, 8 lanes, lane_floats]
    Shared<float> q;
    // [R, SPLIT]: scores, then exponentials
    Shared<float> p;
    // [R, TILES]: by what sums are multiplied when a tile begins
    Shared<float> factors;
    // [STAGES, TILE, PLACE_BYTES]
    Shared<u8> stages;
    // See lane_stride.
    u32 lane_floats;
};

// Begins to copy what is seen of a step.
__device__ __forceinline__ void fetch(Shared<u8> stage, const Rows& rows, Range seen, Step step) {
    u32 first = step.part * rows.part_bytes, bytes = min(rows.part_bytes, rows.row - first);
    u32 copier = threadIdx.x % COPIERS * 16;
#pragma unroll
    for (u32 n = 0; n < TILE; n += THREADS / COPIERS) {
        u32 place = n + threadIdx.x / COPIERS, position = step.tile + place;
        if (position < seen.begin || position >= seen.end) continue;
        Global<const u8> part = rows.data + (static_cast<u64>(position) * rows.row + first);
        u32 shift = address_bits(part) % 16, end = shift + bytes;
#pragma unroll 1
        for (u32 at = copier; at < end; at += COPIERS * 16) {
            Global<const u8> from = part + (static_cast<i64>(at) - static_cast<i64>(shift));
            copy_async(stage + (place * PLACE_BYTES + at), from, min(16u, end - at));
        }
    }
}

// ---- scores

template <u32 R>
__device__ __forceinline__ void load_queries(const Scratch& scratch, const Job& job,
                                             Global<const float> q, u32 dim) {
    u32 n = R * 8 * scratch.lane_floats;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        u32 row = i / (8 * scratch.lane_floats), rest = i % (8 * scratch.lane_floats);
        u32 at = rest / scratch.lane_floats + 8 * (rest % scratch.lane_floats);
        bool there = row < job.n_heads && at < dim;
        scratch.q[i] = there ? q[row * dim + at] : 0.0f;
    }
    // Queries that there are not have factors too.
    for (u32 i = threadIdx.x; i < R * TILES; i += THREADS) scratch.factors[i] = 1.0f;
}

// Keys of a tile that eight threads take.
static constexpr u32 KEYS = TILE * 8 / THREADS;

// Adds a part of the products of KEYS keys with each query.
template <u32 R, class K>
__device__ __forceinline__ void add_products(float (&dots)[KEYS * R], const K& type,
                                             const Scratch& scratch, const Rows& rows,
                                             Shared<const u8> stage, Range seen, Step step) {
    u32 lane = threadIdx.x % 8, first = step.part * rows.part;
    u32 n_left = min(rows.dim - first, rows.part);
    Shared<const u8> parts[KEYS];
#pragma unroll
    for (u32 n = 0; n < KEYS; n++) {
        // In place of a key that is not seen, one that is.
        u32 key = step.tile + threadIdx.x / 8 + n * (THREADS / 8);
        key = max(seen.begin, min(key, seen.end - 1));
        parts[n] = stage + ((key - step.tile) * PLACE_BYTES + rows.shift(key, step.part));
    }
#pragma unroll 1
    for (u32 j = 0; 8 * j < n_left; j += 4) {
        float w[KEYS][4];
#pragma unroll
        for (u32 n = 0; n < KEYS; n++) load_lane(type, parts[n], lane, j, n_left, w[n]);
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            Shared<float> at = scratch.q + ((r * 8 + lane) * scratch.lane_floats + (first / 8 + j));
            float4 q = as<float4>(at)[0];
#pragma unroll
            for (u32 n = 0; n < KEYS; n++) {
                float& dot = dots[n * R + r];
                dot = fmaf(q.x, w[n][0], dot);
                dot = fmaf(q.y, w[n][1], dot);
                dot = fmaf(q.z, w[n][2], dot);
                dot = fmaf(q.w, w[n][3], dot);
            }
        }
    }
}

template <u32 R>
__device__ __forceinline__ void add_products_of(u32 type, float (&dots)[KEYS * R],
                                                const Scratch& scratch, const Rows& rows,
                                                Shared<const u8> stage, Range seen, Step step) {
    switch (type) {
        case CACHE_F32: {
            RowsOfF32<FromShared> f32;
            return add_products<R>(dots, f32, scratch, rows, stage, seen, step);
        }
        case CACHE_F16: {
            RowsOfF16<FromShared> f16;
            return add_products<R>(dots, f16, scratch, rows, stage, seen, step);
        }
        case CACHE_BF16: {
            RowsOfBF16<FromShared> bf16;
            return add_products<R>(dots, bf16, scratch, rows, stage, seen, step);
        }
        case CACHE_Q8_0: {
            RowsOfQ8_0<FromShared> q8_0;
            return add_products<R>(dots, q8_0, scratch, rows, stage, seen, step);
        }
        default: break;
    }
    RowsOfNibbles<FromShared> nibbles(type);
    add_products<R>(dots, nibbles, scratch, rows, stage, seen, step);
}

__device__ __forceinline__ void put_score(const Scratch& scratch, const Job& job, u32 r, u32 key,
                                          float dot) {
    if (key < job.seen.begin || key >= job.seen.end) return;
    float score = job.scale * dot;
    if (job.cap > 0.0f) score = soft_cap(score, job.cap);
    if (job.bias && r < job.n_heads) {
        score += bias_of(job.bias, job.reach, job.head + r, key, job.position);
    }
    scratch.p[r * SPLIT + key % SPLIT] = score;
}

// The scores of a tile, whose products are added up.
template <u32 R>
__device__ __forceinline__ void put_scores(const float (&dots)[KEYS * R], const Scratch& scratch,
                                           const Job& job, u32 tile) {
    u32 lane = threadIdx.x % 8, first = tile + threadIdx.x / 8;
    if constexpr (KEYS * R % 8 == 0) {
#pragma unroll
        for (u32 n = 0; n < KEYS * R; n += 8) {
            float dot = scatter_sums(dots + n);
            u32 key = first + (n + lane) / R * (THREADS / 8);
            put_score(scratch, job, (n + lane) % R, key, dot);
        }
    } else {
#pragma unroll
        for (u32 n = 0; n < KEYS * R; n++) {
            float dot = tree8_threads(dots[n]);
            if (lane == n) put_score(scratch, job, n % R, first + n / R * (THREADS / 8), dot);
        }
    }
}

template <u32 R>
__device__ __forceinline__ void scores(u32 type, const Scratch& scratch, const Job& job,
                                       const Rows& rows) {
    constexpr u32 N = STAGES<R>;
    u32 parts = rows.parts(), steps = job.tiles() * parts;
    float dots[KEYS * R];
    for (u32 next = 0; next < steps + (N - 1); next++) {
        if (next >= N - 1) {
            // The step's rows are there, and every thread is done with the step before.
            wait_for_copies<N - 2>();
            __syncthreads();
        }
        if (next < steps) {
            Shared<u8> stage = scratch.stages + next % N * STAGE_BYTES;
            fetch(stage, rows, job.seen, job.by_tile(next, parts));
        }
        commit_copies();
        if (next < N - 1) continue;
        u32 step = next - (N - 1);
        Step now = job.by_tile(step, parts);
        if (now.part == 0) {
#pragma unroll
            for (u32 n = 0; n < KEYS * R; n++) dots[n] = 0.0f;
        }
        Shared<const u8> stage = scratch.stages + step % N * STAGE_BYTES;
        add_products_of<R>(type, dots, scratch, rows, stage, job.seen, now);
        if (now.part + 1 == parts) put_scores<R>(dots, scratch, job, now.tile);
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

// Elements W that a thread has of the sums of EACH queries: with four, a quad is read; a block of
// nibbles needs it, and rows without alignment are read one by one.
template <class V, u32 R>
struct Share {
    static constexpr u32 W = R == 1 ? 1 : R <= 4 ? 2 : 4, EACH = R <= 2 ? 1 : 2;
    static __device__ __forceinline__ void get(const V& type, Shared<const u8> row, u32 at,
                                               float (&w)[W]) {
        if constexpr (W == 1) w[0] = V::one(row, at);
        if constexpr (W == 2) V::two(row, at, w);
        if constexpr (W == 4) V::widen(type.quad(row, at), w);
    }
};
template <u32 R>
struct Share<RowsOfNibbles<FromShared>, R> {
    static constexpr u32 W = 4, EACH = R <= 2 ? 1 : 2;
    static __device__ __forceinline__ void get(const RowsOfNibbles<FromShared>& type,
                                               Shared<const u8> row, u32 at, float (&w)[4]) {
        type.widen(type.quad(row, at), w);
    }
};
template <u32 R>
struct Share<RowsOfLoose<FromShared>, R> {
    static constexpr u32 W = 1, EACH = R <= 2 ? 1 : R / 2;
    static __device__ __forceinline__ void get(const RowsOfLoose<FromShared>& type,
                                               Shared<const u8> row, u32 at, float (&w)[1]) {
        w[0] = type.one(row, at);
    }
};

// A thread's part of the sums: its first element within a part of a row, and its first query.
template <u32 W, u32 EACH>
struct Sums {
    u32 at, row;
    float acc[EACH][W];

    __device__ __forceinline__ void add(const float (&w)[W], u32 r, float e) {
#pragma unroll
        for (u32 c = 0; c < W; c++) acc[r][c] = fmaf(e, w[c], acc[r][c]);
    }
};

// Adds the values of a tile.
template <class S, class V, u32 W, u32 EACH>
__device__ __forceinline__ void add_values(Sums<W, EACH>& sums, const V& type,
                                           const Scratch& scratch, const Rows& rows,
                                           Shared<const u8> stage, Range seen, Step step) {
    Shared<float> p = scratch.p + (sums.row * SPLIT + step.tile % SPLIT);
    Shared<float> factors = scratch.factors + (sums.row * TILES + step.tile % SPLIT / TILE);
    // Unseen values are not read, not even times zero: they may be NaN.
    Range tile = seen.common(step.tile, step.tile + TILE);
    u32 begin = tile.begin - step.tile, end = tile.end - step.tile;
#pragma unroll
    for (u32 r = 0; r < EACH; r++) {
        float factor = factors[r * TILES];
#pragma unroll
        for (u32 c = 0; c < W; c++) sums.acc[r][c] *= factor;
    }
    // Rows are an even number of bytes: four rows on, a row begins as the first or 8 bytes from it,
    // and eight rows on as the first.
    u32 places[4], flip = 4 * rows.row % 16;
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        places[n] = n * PLACE_BYTES + rows.shift(step.tile + n, step.part);
    }
    auto one = [&](u32 i) {
        float w[W];
        u32 place = i * PLACE_BYTES + rows.shift(step.tile + i, step.part);
        S::get(type, stage + place, sums.at, w);
#pragma unroll
        for (u32 r = 0; r < EACH; r++) sums.add(w, r, p[r * SPLIT + i]);
    };
    u32 i = begin;
    for (; i < end && i % 8 != 0; i++) one(i);
#pragma unroll 1
    for (; i + 8 <= end; i += 8) {
        Shared<const u8> from = stage + i * PLACE_BYTES;
#pragma unroll
        for (u32 half = 0; half < 8; half += 4) {
            float w[4][W];
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                u32 place = half * PLACE_BYTES + (half ? places[n] ^ flip : places[n]);
                S::get(type, from + place, sums.at, w[n]);
            }
#pragma unroll
            for (u32 r = 0; r < EACH; r++) {
                float4 e = as<float4>(p + (r * SPLIT + i + half))[0];
                sums.add(w[0], r, e.x);
                sums.add(w[1], r, e.y);
                sums.add(w[2], r, e.z);
                sums.add(w[3], r, e.w);
            }
        }
    }
    for (; i < end; i++) one(i);
}

// The first tiles of the values: they come during the softmax.
template <u32 R>
__device__ __forceinline__ void begin_values(const Scratch& scratch, const Job& job,
                                             const Rows& rows) {
    u32 n_tiles = job.tiles(), steps = n_tiles * rows.parts();
#pragma unroll
    for (u32 step = 0; step + 1 < STAGES<R>; step++) {
        Shared<u8> stage = scratch.stages + step * STAGE_BYTES;
        if (step < steps) fetch(stage, rows, job.seen, job.by_part(step, n_tiles));
        commit_copies();
    }
}

// acc of each query's record, after begin_values.
template <u32 R, class V>
__device__ __forceinline__ void values(const V& type, const Scratch& scratch, const Job& job,
                                       const Rows& rows, Global<float> record, u64 record_stride) {
    using S = Share<V, R>;
    constexpr u32 N = STAGES<R>, W = S::W, EACH = S::EACH;
    u32 n_tiles = job.tiles(), steps = n_tiles * rows.parts(), across = rows.part / W;
    Sums<W, EACH> sums;
    sums.at = threadIdx.x % across * W, sums.row = threadIdx.x / across * EACH;
    for (u32 step = 0; step < steps; step++) {
        wait_for_copies<N - 2>();
        __syncthreads();
        u32 next = step + (N - 1);
        if (next < steps) {
            Shared<u8> stage = scratch.stages + next % N * STAGE_BYTES;
            fetch(stage, rows, job.seen, job.by_part(next, n_tiles));
        }
        commit_copies();
        Step now = job.by_part(step, n_tiles);
        u32 at = now.part * rows.part + sums.at;
        if (sums.row >= job.n_heads || at >= rows.dim) continue;
        if (now.tile == job.first_tile()) {
#pragma unroll
            for (u32 i = 0; i < EACH * W; i++) sums.acc[i / W][i % W] = 0.0f;
        }
        Shared<const u8> stage = scratch.stages + step % N * STAGE_BYTES;
        add_values<S>(sums, type, scratch, rows, stage, job.seen, now);
        if (now.tile + TILE < job.seen.end) continue;
#pragma unroll
        for (u32 r = 0; r < EACH; r++) {
            if (sums.row + r >= job.n_heads) break;
            Global<float> to = record + ((sums.row + r) * record_stride + at);
#pragma unroll
            for (u32 c = 0; c < W; c++) {
                if (at + c < rows.dim) to[c] = sums.acc[r][c];
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
    u32 of_call = p.first_token + token;
    Job job;
    job.position = position_of(p.past, p.lists, of_call, head_kv * group, p.n_head);
    Range seen = seen_by(job.position, p.all, p.window, p.chunk, p.limit);
    u32 split = seen.begin / SPLIT + slot;
    job.seen = seen.common(split * SPLIT, split * SPLIT + SPLIT);
    if (job.seen.is_empty()) return;
    // A token with rows of its own has a set of heads.
    u64 head_rows = head_kv + (p.lists ? static_cast<u64>(of_call) * (p.n_head / group) : 0);
    Rows k(p.k + head_rows * p.k_ctx * p.k_row, p.k_type, p.k_dim, p.k_row);
    Rows v(p.v + head_rows * p.v_ctx * p.v_row, v_type, v_dim, p.v_row);
    job.scale = p.scale, job.cap = p.cap, job.bias = p.bias, job.reach = p.reach;
    job.head = head_kv * group + part * R;
    job.n_heads = min(R, group - part * R);

    Scratch scratch;
    scratch.lane_floats = lane_stride(p.k_dim);
    scratch.q = dynamic;
    scratch.p = scratch.q + R * 8 * scratch.lane_floats;
    scratch.factors = scratch.p + R * SPLIT;
    scratch.stages = as<u8>(scratch.factors + R * TILES);
    u64 query = static_cast<u64>(token) * p.n_head + job.head;
    load_queries<R>(scratch, job, p.q + query * p.k_dim, p.k_dim);
    scores<R>(p.k_type, scratch, job, k);
    __syncthreads();
    begin_values<R>(scratch, job, v);
    u64 stride = static_cast<u64>(n_slots) * record_floats(v_dim);
    u64 first = query * stride + static_cast<u64>(slot) * record_floats(v_dim);
    Global<float> record = p.work + first;
    for (u32 r = threadIdx.x / WARP; r < job.n_heads; r += THREADS / WARP) {
        softmax(scratch.p + r * SPLIT, scratch.factors + r * TILES, job.seen,
                record + (r * stride + v_dim));
    }
    if (p.loose) {
        values<R>(RowsOfLoose<FromShared>{v_type}, scratch, job, v, record, stride);
        return;
    }
    switch (v_type) {
        case CACHE_F32: values<R>(RowsOfF32<FromShared>{}, scratch, job, v, record, stride); break;
        case CACHE_F16: values<R>(RowsOfF16<FromShared>{}, scratch, job, v, record, stride); break;
        case CACHE_BF16:
            values<R>(RowsOfBF16<FromShared>{}, scratch, job, v, record, stride);
            break;
        case CACHE_Q8_0:
            values<R>(RowsOfQ8_0<FromShared>{}, scratch, job, v, record, stride);
            break;
        default:
            values<R>(RowsOfNibbles<FromShared>(v_type), scratch, job, v, record, stride);
            break;
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
    // Records of n_head · v_dim columns that products read (quant/acts.cuh), or null.
    Address<u8> q8_0;
    Address<u8> q8_k;
    u32 n_head;
    // Heads of a block: with records, as many as make whole blocks of theirs.
    u32 heads;
    u32 lists;
    u32 unused;
};
static_assert(sizeof(CombineParams) == 96);

// Adds up the records of a query.
__device__ __forceinline__ void combine(const CombineParams& p, u32 token, u32 head) {
    u32 v_dim = p.v_dim, split_len = p.split_len, n_slots = p.n_slots;
    Global<const float> sinks = p.sinks;
    u64 query = static_cast<u64>(token) * p.n_head + head;
    u32 position = position_of(p.past, p.lists, p.first_token + token, head, p.n_head);
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

// Stores what a block has written in a record of its token.
template <u32 LEN>
__device__ __forceinline__ void quantize_heads(const CombineParams& p, Global<u8> records) {
    u32 cols = p.n_head * p.v_dim, n = p.heads * p.v_dim, start = blockIdx.x * n;
    u64 token = blockIdx.y;
    Global<float> row = p.out + token * cols;
    for (u32 base = 0; base < n; base += COMBINE_THREADS * EACH) {
        u32 at = base + threadIdx.x * EACH;
        bool live = at < n;
        float v[EACH] = {};
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            if (live) v[i] = row[start + at + i];
        }
        u64 record = token * ActLayout<LEN>(cols).bytes;
        quantize_eight<LEN>(v, start + at, cols, live, records + record);
    }
}

// One block for each query, or for the queries of a token's few heads.
KERNEL(attention_combine, COMBINE_THREADS, CombineParams) {
    for (u32 head = 0; head < p.heads; head++) {
        combine(p, blockIdx.y, blockIdx.x * p.heads + head);
    }
    if (!p.q8_0 && !p.q8_k) return;
    __syncthreads();
    if (p.q8_0) quantize_heads<32>(p, p.q8_0);
    if (p.q8_k) quantize_heads<256>(p, p.q8_k);
}
