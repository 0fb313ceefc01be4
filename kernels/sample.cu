// The best of a vocabulary, so that a few numbers are copied to the host and not all logits.
//
//   logits     f32 [rows, n]
//   keys       u64: a logit's order in the upper half, the complement of its id in the lower. The
//              largest key is the best logit, of equals the lowest id; all keys differ. NaN is 0,
//              below every number.
//
// A block takes CHUNK logits, or keys of the launch before, and keeps the k largest in order, by a
// bitonic sort (Batcher 1968) in shared memory; launches follow until one block was enough: three
// for 152,000 logits and k = 40, four for k = 256. Memory: the logits once, 0.6 MB.
// argmax keeps one key a block and needs no sort.
#include "moeba.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 CHUNK = 2048;
// No token.
static constexpr u32 NONE = 0xffffffffu;
// The order of −∞.
static constexpr u32 LOWEST = 0x007fffffu;

__device__ __forceinline__ u64 key_of(float logit, u32 id) {
    if (logit != logit) return 0;
    // −0 and 0 are equals.
    u32 bits = __float_as_uint(logit + 0.0f);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return static_cast<u64>(bits) << 32 | (NONE - id);
}

__device__ __forceinline__ u32 id_of(u64 key) { return NONE - static_cast<u32>(key); }

// `n` is a power of two; the keys are written before, and sorted after, a barrier.
__device__ __forceinline__ void sort_descending(Shared<u64> keys, u32 n) {
    __syncthreads();
    for (u32 run = 2; run <= n; run *= 2) {
        for (u32 step = run / 2; step > 0; step /= 2) {
            for (u32 i = threadIdx.x; i < n / 2; i += blockDim.x) {
                u32 low = i % step, first = 2 * (i - low) + low;
                u64 a = keys[first], b = keys[first + step];
                // Runs turn, so that two neighbours are one that rises and falls.
                bool descending = (first & run) == 0;
                if (descending == (a < b)) {
                    keys[first] = b;
                    keys[first + step] = a;
                }
            }
            __syncthreads();
        }
    }
}

// The k best of rows of n: their values and ids where this is the last launch, keys where not.
struct Best {
    u32 n, k, is_last;
};

// The k best of `count` keys in shared memory; zeros behind them where there are fewer.
__device__ __forceinline__ void keep_best(Shared<u64> keys, u32 count, const Best& best,
                                          Global<const float> logits, Global<u64> kept,
                                          Global<float> values, Global<u32> ids) {
    u32 size = 2;
    while (size < count) size *= 2;
    for (u32 i = count + threadIdx.x; i < size; i += blockDim.x) keys[i] = 0ull;
    sort_descending(keys, size);
    u64 row = blockIdx.y;
    for (u32 rank = threadIdx.x; rank < best.k; rank += blockDim.x) {
        u64 key = 0;
        if (rank < size) key = keys[rank];
        if (!best.is_last) {
            kept[(row * gridDim.x + blockIdx.x) * best.k + rank] = key;
            continue;
        }
        u32 id = key ? id_of(key) : NONE;
        ids[row * best.k + rank] = id;
        values[row * best.k + rank] = key ? logits[row * best.n + id] : -INFINITY;
    }
}

KERNEL(top_k_logits, THREADS, Global<const float> logits, u32 n, u32 k, u32 is_last,
       Global<u64> kept, Global<float> values, Global<u32> ids) {
    SHARED(u64, keys, CHUNK);
    Best best = {n, k, is_last};
    u32 first = blockIdx.x * CHUNK, count = min(CHUNK, n - first);
    Global<const float> own = logits + (static_cast<u64>(blockIdx.y) * n + first);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) keys[i] = key_of(own[i], first + i);
    keep_best(keys, count, best, logits, kept, values, ids);
}

// From `n_keys` keys a row.
KERNEL(top_k_keys, THREADS, Global<const u64> from, u32 n_keys, Global<const float> logits, u32 n,
       u32 k, u32 is_last, Global<u64> kept, Global<float> values, Global<u32> ids) {
    SHARED(u64, keys, CHUNK);
    Best best = {n, k, is_last};
    u32 first = blockIdx.x * CHUNK, count = min(CHUNK, n_keys - first);
    Global<const u64> own = from + (static_cast<u64>(blockIdx.y) * n_keys + first);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) keys[i] = own[i];
    keep_best(keys, count, best, logits, kept, values, ids);
}

// The largest key and the lowest id of a block's threads, in the first of them.
__device__ __forceinline__ void block_best(u64& key, u32& broken) {
    SHARED(u64, keys, THREADS / WARP);
    SHARED(u32, ids, THREADS / WARP);
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        key = max(key, __shfl_xor_sync(FULL_WARP, key, step));
        broken = min(broken, __shfl_xor_sync(FULL_WARP, broken, step));
    }
    if (lane == 0) {
        keys[warp] = key;
        ids[warp] = broken;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 w = 1; w < THREADS / WARP; w++) {
        key = max(key, static_cast<u64>(keys[w]));
        broken = min(broken, static_cast<u32>(ids[w]));
    }
}

// keys u64 and broken u32, both [rows, blocks]: the best of CHUNK logits, and the first of them
// that is NaN or +∞.
KERNEL(argmax_logits, THREADS, Global<const float> logits, u32 n, Global<u64> keys,
       Global<u32> broken) {
    u32 first = blockIdx.x * CHUNK, end = min(first + CHUNK, n);
    Global<const float> own = logits + static_cast<u64>(blockIdx.y) * n;
    u64 best = 0;
    u32 none = NONE;
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        float logit = own[i];
        best = max(best, key_of(logit, i));
        if (!(logit < INFINITY)) none = min(none, i);
    }
    block_best(best, none);
    if (threadIdx.x != 0) return;
    u64 to = static_cast<u64>(blockIdx.y) * gridDim.x + blockIdx.x;
    keys[to] = best;
    broken[to] = none;
}

// best u32 [rows]: NONE where no logit is above −∞. broken u32 [rows] or null.
KERNEL(argmax_rows, THREADS, Global<const u64> keys, Global<const u32> broken, u32 blocks,
       Global<u32> best, Global<u32> first_broken) {
    u64 row = blockIdx.x, key = 0;
    u32 none = NONE;
    for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) {
        key = max(key, static_cast<u64>(keys[row * blocks + i]));
        none = min(none, static_cast<u32>(broken[row * blocks + i]));
    }
    block_best(key, none);
    if (threadIdx.x != 0) return;
    best[row] = static_cast<u32>(key >> 32) > LOWEST ? id_of(key) : NONE;
    if (first_broken) first_broken[row] = none;
}
