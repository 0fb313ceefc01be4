// The k best logits of a vocabulary, so that not all logits are copied to the host.
//
// A key is a u64: the rank of logit / divisor in the upper half, the complement of the id in the
// lower. The largest key belongs to the best logit, among equals to the lowest id. All keys differ,
// and none is 0. NaN and +∞ are equal and above every number, so the best logit shows whether there
// are any, and which is the first.
//
// A block takes CHUNK logits, or keys of the launch before, and keeps the k largest in order, by a
// bitonic sort (Batcher 1968) in shared memory. Launches follow until one block was enough. 152,000
// logits take two launches for k = 1, three for k = 40, four for k = 256. Memory: the logits once,
// 0.6 MB.
#include "moeba.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 CHUNK = 2048;
// No token.
static constexpr u32 NONE = 0xffffffffu;
// The rank of NaN and +∞.
static constexpr u32 BROKEN = 0xffffffffu;

__device__ __forceinline__ u64 key_of(float logit, u32 id) {
    // −0 equals 0.
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
                // Every second run ascends: two neighbours form a bitonic sequence.
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

// Asks for the k best of rows of n: values and ids from the last launch, keys from the others.
struct Best {
    u32 n;
    float divisor;
    u32 k, is_last;
};

// Stores the k best of `count` keys in shared memory, and zeros if there are fewer.
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

struct TopKParams {
    // [rows, n_keys], of top_k_keys
    Address<const u64> from;
    // [rows, n]
    Address<const float> logits;
    // [rows, blocks, k], if this is not the last launch
    Address<u64> kept;
    // [rows, k] each, if it is
    Address<float> values;
    Address<u32> ids;
    u32 n_keys;
    u32 n;
    float divisor;
    u32 k;
    u32 is_last;
    u32 unused;
};
static_assert(sizeof(TopKParams) == 64);

KERNEL(top_k_logits, THREADS, TopKParams) {
    SHARED(u64, keys, CHUNK);
    Best best = {p.n, p.divisor, p.k, p.is_last};
    u32 first = blockIdx.x * CHUNK, count = min(CHUNK, p.n - first);
    Global<const float> own = p.logits + (static_cast<u64>(blockIdx.y) * p.n + first);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        keys[i] = key_of(own[i] / p.divisor, first + i);
    }
    keep_best(keys, count, best, p.logits, p.kept, p.values, p.ids);
}

KERNEL(top_k_keys, THREADS, TopKParams) {
    SHARED(u64, keys, CHUNK);
    Best best = {p.n, p.divisor, p.k, p.is_last};
    u32 first = blockIdx.x * CHUNK, count = min(CHUNK, p.n_keys - first);
    Global<const u64> own = p.from + (static_cast<u64>(blockIdx.y) * p.n_keys + first);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) keys[i] = own[i];
    keep_best(keys, count, best, p.logits, p.kept, p.values, p.ids);
}
