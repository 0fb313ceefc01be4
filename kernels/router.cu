// Chooses each token's experts and their weights. Twin: src/backend/cpu/router.rs, to the bit.
//
// One warp for each token. n is at most 1024 and k a few tens, so a launch takes the latency of k
// searches, each of n/32 values and five exchanges; 4n bytes a token are read and written.
#include "softmax.cuh"

static constexpr u32 THREADS = 32;
// No index.
static constexpr u32 NONE = 0xffffffffu;

// `Score` of the twin.
enum : u32 { SOFTMAX, SIGMOID, SPARSE_MIXER, SQRT_SOFTPLUS };

// The larger of two places' values: a NaN loses against a number, ties go to the lower index.
__device__ __forceinline__ bool is_better(float a, u32 i, float b, u32 j) {
    if (j == NONE) return i != NONE;
    if (i == NONE) return false;
    bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return b_nan;
    if (a > b) return true;
    return (a == b || a_nan) && i < j;
}

// Calls take(rank, index) for the k best of n values, best first, in every thread of the warp.
template <class Take>
__device__ __forceinline__ void best_of(Shared<float> values, u32 n, u32 k, Take take) {
    // One bit for each value of this thread.
    u32 lane = threadIdx.x, taken = 0;
    for (u32 rank = 0; rank < k; rank++) {
        float best = 0.0f;
        u32 at = NONE;
        for (u32 i = lane; i < n; i += WARP) {
            if (taken >> (i / WARP) & 1) continue;
            float value = values[i];
            if (is_better(value, i, best, at)) {
                best = value;
                at = i;
            }
        }
        for (u32 step = WARP / 2; step > 0; step /= 2) {
            float other = __shfl_xor_sync(FULL_WARP, best, step);
            u32 other_at = __shfl_xor_sync(FULL_WARP, at, step);
            if (is_better(other, other_at, best, at)) {
                best = other;
                at = other_at;
            }
        }
        if (at % WARP == lane) taken |= 1u << (at / WARP);
        take(rank, at);
    }
}

// Leaves values of the best groups only. A group is as good as its best expert or, with a bias, as
// its best two.
__device__ __forceinline__ void keep_best_groups(Shared<float> values, Shared<float> merits, u32 n,
                                                 u32 n_groups, u32 n_used, bool by_two) {
    u32 size = n / n_groups, lane = threadIdx.x;
    for (u32 g = lane; g < n_groups; g += WARP) {
        float first = -INFINITY, second = -INFINITY;
        for (u32 i = 0; i < size; i++) {
            float value = values[g * size + i];
            if (value > first) {
                second = first;
                first = value;
            } else if (value > second) {
                second = value;
            }
        }
        merits[g] = by_two && size > 1 ? first + second : first;
    }
    __syncwarp();
    // Bit i of a thread is group lane + 32 i.
    u32 kept = 0;
    best_of(merits, n_groups, n_used, [&](u32, u32 g) {
        if (g % WARP == lane) kept |= 1u << (g / WARP);
    });
    for (u32 g = 0; g < n_groups; g++) {
        u32 keeps = __shfl_sync(FULL_WARP, kept, g % WARP) >> (g / WARP) & 1;
        for (u32 i = lane; i < size && !keeps; i += WARP) values[g * size + i] = -INFINITY;
    }
    __syncwarp();
}

// Weighs each chosen expert by its share in a softmax over those that are left and near it.
__device__ __forceinline__ void mix_sparsely(Shared<float> logits, Shared<float> list, u32 n, u32 k,
                                             float jitter, Shared<u32> picked,
                                             Global<const float> scales,
                                             Global<float> weights) {
    u32 lane = threadIdx.x;
    for (u32 rank = 0; rank < k; rank++) {
        u32 at = picked[rank];
        float best = logits[at];
        u32 length = 1;
        if (lane == 0) list[0] = best;
        for (u32 start = 0; start < n; start += WARP) {
            u32 i = start + lane;
            bool left = i < n;
            for (u32 r = 0; r <= rank && left; r++) left = picked[r] != i;
            float value = left ? static_cast<float>(logits[i]) : 0.0f;
            left = left && (best - value) / fmaxf(fabsf(value), best) <= 2.0f * jitter;
            u32 votes = __ballot_sync(FULL_WARP, left);
            // In the order of their ids.
            if (left) list[length + __popc(votes & ((1u << lane) - 1))] = value;
            length += __popc(votes);
        }
        __syncwarp();
        softmax_by_warp(list, length);
        if (lane == 0) weights[rank] = scales ? list[0] * scales[at] : static_cast<float>(list[0]);
        __syncwarp();
    }
}

struct RouteParams {
    // [tokens, n]: logits before, probabilities after
    Address<float> probs;
    // [n] or null: added for the choice, not for the weights
    Address<const float> bias;
    // [n] or null: factors on the weights of those that are chosen
    Address<const float> scales;
    // [tokens, k], best first, ties to the lower id
    Address<u32> chosen;
    // [tokens, k]
    Address<float> weights;
    u32 n;
    u32 k;
    u32 score;
    u32 normalize;
    float scale;
    u32 n_groups;
    u32 n_groups_used;
    float jitter;
    // Logits are capped softly; 0 leaves them.
    float cap;
    // Whether the bias is added to logits, not to probabilities.
    u32 bias_on_logits;
    // [vocabulary, k] or null: experts that are chosen for each token, whatever the logits
    Address<const u32> fixed;
    // [tokens]: rows of `fixed`
    Address<const u32> ids;
};
static_assert(sizeof(RouteParams) == 96);

// Dynamic shared memory: 2n + n_groups floats and k ids.
KERNEL(route, THREADS, RouteParams) {
    SHARED_DYNAMIC(float, row);
    u32 n = p.n, k = p.k, score = p.score, n_groups = p.n_groups;
    Global<const float> bias = p.bias, scales = p.scales;
    Shared<float> values = row + n, merits = values + n;
    Shared<u32> picked = as<u32>(merits + n_groups);
    u32 lane = threadIdx.x;
    Global<float> own = p.probs + static_cast<u64>(blockIdx.x) * n;
    Global<u32> ids = p.chosen + static_cast<u64>(blockIdx.x) * k;
    Global<float> shares = p.weights + static_cast<u64>(blockIdx.x) * k;
    for (u32 i = lane; i < n; i += WARP) row[i] = p.cap > 0.0f ? soft_cap(own[i], p.cap) : own[i];
    __syncwarp();
    auto pick = [&](u32 rank, u32 at) {
        if (lane == 0) {
            ids[rank] = at;
            picked[rank] = at;
        }
    };
    if (p.bias_on_logits) {
        for (u32 i = lane; i < n; i += WARP) values[i] = row[i] + bias[i];
    }
    if (score == SPARSE_MIXER) {
        best_of(row, n, k, pick);
        __syncwarp();
        mix_sparsely(row, values, n, k, p.jitter, picked, scales, shares);
    }
    if (score == SIGMOID) {
        for (u32 i = lane; i < n; i += WARP) row[i] = sigmoid(row[i]);
        __syncwarp();
    } else if (score == SQRT_SOFTPLUS) {
        for (u32 i = lane; i < n; i += WARP) row[i] = sqrtf(softplus(row[i]));
        __syncwarp();
    } else {
        softmax_by_warp(row, n);
    }
    for (u32 i = lane; i < n; i += WARP) own[i] = row[i];
    if (score == SPARSE_MIXER) return;
    if (p.fixed) {
        Global<const u32> experts = p.fixed + static_cast<u64>(p.ids[blockIdx.x]) * k;
        for (u32 r = 0; r < k; r++) pick(r, experts[r]);
    } else {
        for (u32 i = lane; i < n && !p.bias_on_logits; i += WARP) {
            values[i] = bias ? row[i] + bias[i] : static_cast<float>(row[i]);
        }
        __syncwarp();
        if (n_groups > 1) {
            keep_best_groups(values, merits, n, n_groups, p.n_groups_used, static_cast<bool>(bias));
        }
        best_of(values, n, k, pick);
    }
    __syncwarp();
    if (lane != 0) return;
    float sum = 0.0f;
    for (u32 r = 0; r < k; r++) sum += row[picked[r]];
    // The sum of sigmoids can be 0.
    float factor = p.normalize ? p.scale / (sum + 1e-20f) : p.scale;
    for (u32 r = 0; r < k; r++) {
        float share = row[picked[r]] * factor;
        shares[r] = scales ? share * scales[picked[r]] : share;
    }
}

// A smaller sum of weights counts as this: the smallest normal number of f16.
static constexpr float LEAST_SUM = 6.103515625e-5f;

struct GroupParams {
    // [tokens, n]: probabilities
    Address<const float> probs;
    // [tokens, n_chosen], best first
    Address<const u32> chosen;
    // [groups, n_granules]: where the granules of a group's expert lie
    Address<const u64> table;
    // [tokens, k] each: the groups of the first k that are chosen, and their weights
    Address<u32> groups;
    Address<float> weights;
    // [tokens, k, n_granules]
    Address<u64> granules;
    u32 tokens;
    u32 n;
    u32 n_chosen;
    u32 k;
    // Experts of a group.
    u32 size;
    u32 n_granules;
    // Factor on the weights, whose sum is 1 before.
    float scale;
    u32 unused;
};
static_assert(sizeof(GroupParams) == 80);

static constexpr u32 GROUP_THREADS = 128;

// The groups of each token's best experts. A group's weight is the probability of the expert with
// its number. Twin: `Route::groups` of src/backend/ops/routing.rs. One thread for each token.
KERNEL(group_route, GROUP_THREADS, GroupParams) {
    u32 token = blockIdx.x * blockDim.x + threadIdx.x, k = p.k, n_granules = p.n_granules;
    if (token >= p.tokens) return;
    Global<const float> probs = p.probs + static_cast<u64>(token) * p.n;
    Global<const u32> chosen = p.chosen + static_cast<u64>(token) * p.n_chosen;
    u64 first = static_cast<u64>(token) * k;
    float sum = 0.0f;
    for (u32 r = 0; r < k; r++) sum += probs[chosen[r] / p.size];
    float factor = p.scale / fmaxf(sum, LEAST_SUM);
    for (u32 r = 0; r < k; r++) {
        u32 group = chosen[r] / p.size;
        p.groups[first + r] = group;
        p.weights[first + r] = probs[group] * factor;
        for (u32 g = 0; g < n_granules; g++) {
            u64 address = p.table[static_cast<u64>(group) * n_granules + g];
            p.granules[(first + r) * n_granules + g] = address;
        }
    }
}
