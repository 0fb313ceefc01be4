// Several residual streams a token. Twins: src/backend/cpu/streams.rs and src/forward/streams.rs,
// to the bit.
//
//   join_streams     weights[t] = of mixes[t];  out[t] = Σ_s weights[t, s] · streams[t, s]
//   feed_streams     streams[t, s] = weights[t, first + s] · y[t] + Σ_j among[t, j, s] · old[t, j]
//                    or, where streams are not mixed, + old[t, s]
//   mean_silu        x[i] = v · σ(v), v = x[i] / n
//   join_gated       out[t] = Σ_s normed[t, s] ⊙ σ(gates[t, s]) / n
//                    weights[t, s] = 2σ(mixes[t, s] / n)
//   score_streams    scores[t, i] = weight · source / rms(source)
//   recall_streams   out[t] = Σ_i p_i · sources[i, t], p the softmax of scores[t]
//   gate_ngrams      key[t, s] = value[t] · σ(root(key[t, s] · query[t, s] · scale)); twin:
//                    src/forward/ngrams.rs
//
// Sums are fused multiply-adds in the order of the streams. One thread computes an element of all
// streams. Weights of a token are a few dozen numbers, which each block makes again for itself: a
// launch for them would take longer. Memory traffic: each stream once, and once more where it is
// changed.
#include "softmax.cuh"

static constexpr u32 THREADS = 256;
// `DEVICE_STREAMS_MAX` and `DEVICE_SOURCES_MAX` of the twin's operations.
static constexpr u32 STREAMS = 8;
static constexpr u32 SOURCES = 64;
static constexpr u32 WIDTH = 2 * STREAMS + STREAMS * STREAMS;

struct JoinStreamsParams {
    // [tokens, n, n_embd]
    Address<const float> streams;
    // [tokens, width]
    Address<const float> mixes;
    // One a kind of weights.
    Address<const float> scales;
    // [width]
    Address<const float> bases;
    // [tokens, width]
    Address<float> weights;
    // [tokens, n_embd]
    Address<float> out;
    u32 n;
    // n weights of inputs, then n of outputs, then n · n of streams among themselves.
    u32 width;
    u32 n_embd;
    float eps;
    float magnitude;
    u32 rounds;
};
static_assert(sizeof(JoinStreamsParams) == 72);

// The sum of a row or a column of the weights of streams among themselves, plus eps.
__device__ __forceinline__ float line_sum(Shared<float> first, u32 n, u32 step, float eps) {
    float sum = 0.0f;
    for (u32 i = 0; i < n; i++) sum += first[i * step];
    return sum + eps;
}

// Softmax of the rows of a [n, n], then columns and rows divided by their sums in turn, by one
// warp.
__device__ __forceinline__ void balance(Shared<float> a, u32 n, float eps, u32 rounds) {
    u32 lane = threadIdx.x % WARP;
    // Phases: exponentials, softmax, then columns and rows.
    u32 phases = 2 + 2 * max(rounds, 1u) - 1;
    for (u32 phase = 0; phase < phases; phase++) {
        float own[STREAMS * STREAMS / WARP];
#pragma unroll
        for (u32 i = 0; i < STREAMS * STREAMS / WARP; i++) {
            u32 at = i * WARP + lane;
            own[i] = 0.0f;
            if (at >= n * n) continue;
            Shared<float> row = a + at / n * n, column = a + at % n;
            float value = a[at];
            if (phase == 0) {
                float largest = -INFINITY;
                for (u32 j = 0; j < n; j++) largest = row[j] > largest ? row[j] : largest;
                own[i] = moeba_exp(value - largest);
            } else if (phase == 1) {
                float lanes[8];
#pragma unroll
                for (u32 j = 0; j < 8; j++) lanes[j] = j < n ? static_cast<float>(row[j]) : 0.0f;
                own[i] = value * (1.0f / tree8(lanes)) + eps;
            } else if (phase % 2 == 0) {
                own[i] = value / line_sum(column, n, n, eps);
            } else {
                own[i] = value / line_sum(row, n, 1, eps);
            }
        }
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < STREAMS * STREAMS / WARP; i++) {
            u32 at = i * WARP + lane;
            if (at < n * n) a[at] = own[i];
        }
        __syncwarp();
    }
}

// A token's mixes → weights. By one warp.
__device__ __forceinline__ void stream_weights(const JoinStreamsParams& p, Shared<float> weights) {
    u32 n = p.n, width = p.width, lane = threadIdx.x % WARP;
    u64 at = static_cast<u64>(blockIdx.y) * width;
    float plus = width > 2 * n ? 0.0f : p.eps;
    for (u32 i = lane; i < width; i += WARP) {
        float mix = p.mixes[at + i] * p.scales[min(i / n, 2u)] + p.bases[i];
        if (i < n) {
            mix = sigmoid(mix) + p.eps;
        } else if (i < 2 * n) {
            mix = sigmoid(mix) * p.magnitude + plus;
        }
        weights[i] = mix;
    }
    __syncwarp();
    if (width > 2 * n) balance(weights + 2 * n, n, p.eps, p.rounds);
}

KERNEL(join_streams, THREADS, JoinStreamsParams) {
    SHARED(float, weights, WIDTH);
    u32 n = p.n, n_embd = p.n_embd;
    if (threadIdx.x < WARP) stream_weights(p, weights);
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x < p.width) {
        p.weights[static_cast<u64>(blockIdx.y) * p.width + threadIdx.x] = weights[threadIdx.x];
    }
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_embd) return;
    Global<const float> streams = p.streams;
    u64 at = static_cast<u64>(blockIdx.y) * n * n_embd + i;
    float sum = 0.0f;
    for (u32 s = 0; s < n; s++) {
        sum = fmaf(weights[s], streams[at + static_cast<u64>(s) * n_embd], sum);
    }
    p.out[static_cast<u64>(blockIdx.y) * n_embd + i] = sum;
}

struct FeedStreamsParams {
    // [tokens, n, n_embd]
    Address<float> streams;
    // [tokens, width]: from `first` on n of outputs, then, if there are more, n · n of streams
    // among themselves, [old, new].
    Address<const float> weights;
    // [tokens, n_embd]
    Address<const float> y;
    u32 n;
    u32 width;
    u32 first;
    u32 n_embd;
};
static_assert(sizeof(FeedStreamsParams) == 40);

KERNEL(feed_streams, THREADS, FeedStreamsParams) {
    SHARED(float, weights, WIDTH);
    u32 n = p.n, n_embd = p.n_embd, n_weights = p.width - p.first;
    if (threadIdx.x < n_weights) {
        u64 from = static_cast<u64>(blockIdx.y) * p.width + p.first;
        weights[threadIdx.x] = p.weights[from + threadIdx.x];
    }
    __syncthreads();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_embd) return;
    float y = p.y[static_cast<u64>(blockIdx.y) * n_embd + i];
    Global<float> own = p.streams;
    own = own + (static_cast<u64>(blockIdx.y) * n * n_embd + i);
    float old[STREAMS];
#pragma unroll
    for (u32 s = 0; s < STREAMS; s++) {
        old[s] = s < n ? static_cast<float>(own[static_cast<u64>(s) * n_embd]) : 0.0f;
    }
    bool mixes = n_weights > n;
#pragma unroll
    for (u32 s = 0; s < STREAMS; s++) {
        if (s >= n) break;
        float sum = fmaf(weights[s], y, mixes ? 0.0f : old[s]);
        if (mixes) {
#pragma unroll
            for (u32 j = 0; j < STREAMS; j++) {
                if (j < n) sum = fmaf(weights[n + j * n + s], old[j], sum);
            }
        }
        own[static_cast<u64>(s) * n_embd] = sum;
    }
}

struct MeanSiluParams {
    Address<float> x;
    float divisor;
    u32 n;
};
static_assert(sizeof(MeanSiluParams) == 16);

KERNEL(mean_silu, THREADS, MeanSiluParams) {
    u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    float mean = p.x[i] / p.divisor;
    p.x[i] = mean * sigmoid(mean);
}

struct JoinGatedParams {
    // [tokens, n, n_embd] both; without gates, the mean of the streams.
    Address<const float> normed;
    Address<const float> gates;
    // [tokens, n] both; null where nothing is added to the streams.
    Address<const float> mixes;
    Address<float> weights;
    // [tokens, n_embd]
    Address<float> out;
    u32 n;
    u32 n_embd;
};
static_assert(sizeof(JoinGatedParams) == 48);

KERNEL(join_gated, THREADS, JoinGatedParams) {
    u32 n = p.n, n_embd = p.n_embd;
    float count = static_cast<float>(n);
    Global<const float> mixes = p.mixes;
    if (mixes && blockIdx.x == 0 && threadIdx.x < n) {
        u64 at = static_cast<u64>(blockIdx.y) * n + threadIdx.x;
        p.weights[at] = sigmoid(mixes[at] / count) * 2.0f;
    }
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_embd) return;
    Global<const float> normed = p.normed, gates = p.gates;
    float mean = 1.0f / count, sum = 0.0f;
    for (u32 s = 0; s < n; s++) {
        u64 at = (static_cast<u64>(blockIdx.y) * n + s) * n_embd + i;
        float value = normed[at];
        if (gates) value *= sigmoid(gates[at]);
        sum = fmaf(mean, value, sum);
    }
    p.out[static_cast<u64>(blockIdx.y) * n_embd + i] = sum;
}

struct ScoreStreamsParams {
    // [n, tokens, n_embd]
    Address<const float> sources;
    // [n_embd]
    Address<const float> weight;
    // [tokens, n]
    Address<float> scores;
    float eps;
    u32 n_embd;
};
static_assert(sizeof(ScoreStreamsParams) == 32);

static constexpr u32 CHUNK = 1024;

// The sums of x's squares, in the block's first thread, and of its products with y, in the eighth
// behind it. Eight threads add each, in the eight lanes of "One arithmetic".
template <class In>
__device__ __forceinline__ float squares_and_products(In x, Global<const float> y, u32 n_embd) {
    SHARED(float, own, CHUNK);
    SHARED(float, factors, CHUNK);
    float lane = 0.0f;
    for (u32 start = 0; start < n_embd; start += CHUNK) {
        u32 n = min(CHUNK, n_embd - start);
        // Up to a multiple of eight: a product of zeros adds nothing.
        u32 padded = (n + 7) / 8 * 8;
        for (u32 i = threadIdx.x; i < padded; i += blockDim.x) {
            own[i] = i < n ? static_cast<float>(x[start + i]) : 0.0f;
            factors[i] = i < n ? y[start + i] : 0.0f;
        }
        __syncthreads();
        if (threadIdx.x < 16) {
            Shared<float> with = threadIdx.x < 8 ? own : factors;
#pragma unroll 8
            for (u32 i = threadIdx.x % 8; i < padded; i += 8) lane = fmaf(own[i], with[i], lane);
        }
        __syncthreads();
    }
    return tree8_threads(lane);
}

// A block for each source of a token.
KERNEL(score_streams, THREADS, ScoreStreamsParams) {
    u32 n_embd = p.n_embd, token = blockIdx.x, source = blockIdx.y;
    Global<const float> x = p.sources, weight = p.weight;
    x = x + (static_cast<u64>(source) * gridDim.x + token) * n_embd;
    float sum = squares_and_products(x, weight, n_embd);
    float product = __shfl_sync(FULL_WARP, sum, 8);
    if (threadIdx.x == 0) {
        float mean = sum / static_cast<float>(n_embd);
        p.scores[token * gridDim.y + source] = product * (1.0f / sqrtf(mean + p.eps));
    }
}

struct RecallStreamsParams {
    // [n, tokens, n_embd]
    Address<const float> sources;
    // [tokens, n]
    Address<const float> scores;
    // [tokens, n_embd]
    Address<float> out;
    u32 n;
    u32 n_embd;
};
static_assert(sizeof(RecallStreamsParams) == 32);

KERNEL(recall_streams, THREADS, RecallStreamsParams) {
    SHARED(float, weights, SOURCES);
    u32 n = p.n, n_embd = p.n_embd, token = blockIdx.y;
    if (threadIdx.x < WARP) {
        for (u32 i = threadIdx.x; i < n; i += WARP) weights[i] = p.scores[token * n + i];
        __syncwarp();
        softmax_by_warp(weights, n);
    }
    __syncthreads();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_embd) return;
    Global<const float> sources = p.sources;
    float sum = 0.0f;
    for (u32 s = 0; s < n; s++) {
        u64 at = (static_cast<u64>(s) * gridDim.y + token) * n_embd + i;
        sum = fmaf(weights[s], sources[at], sum);
    }
    p.out[static_cast<u64>(token) * n_embd + i] = sum;
}

struct GateNgramsParams {
    // [tokens, n, n_embd] both
    Address<float> key;
    Address<const float> query;
    // [tokens, n_embd]
    Address<const float> value;
    float scale;
    u32 n_embd;
};
static_assert(sizeof(GateNgramsParams) == 32);

// A block for each stream of a token.
KERNEL(gate_ngrams, THREADS, GateNgramsParams) {
    SHARED(float, gate, 1);
    u32 n_embd = p.n_embd, stream = blockIdx.x, token = blockIdx.y;
    u64 at = (static_cast<u64>(token) * gridDim.x + stream) * n_embd;
    Global<float> key = p.key;
    Global<const float> query = p.query, value = p.value;
    key = key + at;
    float sum = squares_and_products(key, query + at, n_embd);
    if (threadIdx.x == 8) {
        float scaled = sum * p.scale;
        float root = sqrtf(fmaxf(fabsf(scaled), 1e-6f));
        root = scaled < 0.0f ? -root : root;
        gate[0] = sigmoid(scaled == 0.0f ? 0.0f : root);
    }
    __syncthreads();
    value = value + static_cast<u64>(token) * n_embd;
    for (u32 i = threadIdx.x; i < n_embd; i += blockDim.x) key[i] = value[i] * gate[0];
}
