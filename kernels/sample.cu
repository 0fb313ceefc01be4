// The best of a vocabulary, so that a few numbers are copied to the host and not all logits.
//
//   logits     f32 [rows, n], to be divided by `divisor`
//   keys       u64: a logit's order in the upper half, the complement of its id in the lower. The
//              largest key is the best logit, of equals the lowest id; all keys differ, and none
//              is 0. NaN and +∞ are equals above every number: one look at the best tells whether
//              there are any, and which is the first.
//
// A block takes CHUNK logits, or keys of the launch before, and keeps the k largest in order, by a
// bitonic sort (Batcher 1968) in shared memory; launches follow until one block was enough. For
// 152,000 logits that is two for k = 1, three for k = 40, four for k = 256. Memory: the logits
// once, 0.6 MB.
#include "moeba.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 CHUNK = 2048;
// No token.
static constexpr u32 NONE = 0xffffffffu;
// The order of what is no number below +∞.
static constexpr u32 BROKEN = 0xffffffffu;

__device__ __forceinline__ u64 key_of(float logit, u32 id) {
    // −0 and 0 are equals.
    u32 bits = __float_as_uint(logit + 0.0f);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    if (!(logit < INFINITY)) bits = BROKEN;
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
    u32 n;
    float divisor;
    u32 k, is_last;
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
        float value = -INFINITY;
        if (key) value = logits[row * best.n + id] / best.divisor;
        values[row * best.k + rank] = value;
    }
}

KERNEL(top_k_logits, THREADS, Global<const float> logits, u32 n, float divisor, u32 k,
       u32 is_last, Global<u64> kept, Global<float> values, Global<u32> ids) {
    SHARED(u64, keys, CHUNK);
    Best best = {n, divisor, k, is_last};
    u32 first = blockIdx.x * CHUNK, count = min(CHUNK, n - first);
    Global<const float> own = logits + (static_cast<u64>(blockIdx.y) * n + first);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        keys[i] = key_of(own[i] / divisor, first + i);
    }
    keep_best(keys, count, best, logits, kept, values, ids);
}

// From `n_keys` keys a row.
KERNEL(top_k_keys, THREADS, Global<const u64> from, u32 n_keys, Global<const float> logits, u32 n,
       float divisor, u32 k, u32 is_last, Global<u64> kept, Global<float> values,
       Global<u32> ids) {
    SHARED(u64, keys, CHUNK);
    Best best = {n, divisor, k, is_last};
    u32 first = blockIdx.x * CHUNK, count = min(CHUNK, n_keys - first);
    Global<const u64> own = from + (static_cast<u64>(blockIdx.y) * n_keys + first);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) keys[i] = own[i];
    keep_best(keys, count, best, logits, kept, values, ids);
}
