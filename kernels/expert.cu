// Granules of experts for few tokens. A *pair* is a (token, rank): pair = token·k + rank.
//
//   inner[pair, row] = activation(gate[row] · x[token], up[row] · x[token])       expert_gate_up
//   x[pair, row]     = scale[expert] · x[pair, row] + bias[expert, row]           scale_pairs
//   partial[pair]   (+)= down · inner[pair], granule by granule in index order    expert_down
//   y[token]         += Σ_rank weights[token, rank] · partial[token, rank]        ordered_sum
//
// The last one can also begin y, and add the result to the residual stream. scale_pairs is for
// products of matmul.cu that have a factor; expert_gate_up has it in itself.
//
// Twins: src/backend/cpu/expert, to the bit. Between the first two, quantize.cu stores `inner`
// in the form that down's format reads. Both use one snapshot of the slot table: granules that
// arrive in between are used for the next token. Granules that are not on the device are computed
// by the CPU or another device.
//
// A granule is rows [n, n_embd] of gate and of up and columns [n_embd, n] of down, each without
// gaps. n is `granule_rows`, less in the last granule.
//
// Expected bytes: each granule once. Eight experts of 768 rows of 2048 (Qwen3-30B) make gate and up
// 12288 rows, 14 MB of Q4_K: 1536 warps with two rows each (gate and up of a row share the
// activations that a thread has in registers), then 16384 rows of down. Tokens that share an expert
// read it again from L2; prompts go through matmul.cu.
#include "exp.cuh"
#include "quant/floats.cuh"
#include "quant/formats.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 NONE = 0xffffffffu;

// `Activation` of the twin.
enum : u32 {
    SILU,
    SILU_CLAMPED,
    RELU,
    RELU_GATED,
    GELU,
    SILU_LIMITED,
    SILU_CAPPED,
    RELU_SQUARED,
    SITU,
};

__device__ __forceinline__ bool has_gate(u32 activation) {
    return activation != RELU && activation != RELU_SQUARED;
}

// A launch computes gate and up if they have one format. If not, a launch of gate's format leaves
// the gate's products in `inner` for a launch of up's.
static constexpr u32 GATE_AND_UP = 0, GATE = 1, UP = 2;

struct GateUpParams {
    // [pairs, n_granules]: a granule's address, 0 if it is not on this device
    Address<const u64> granules;
    u32 n_granules;
    u32 granule_rows;
    u32 n_ff;
    u32 n_embd;
    // Bytes from a granule's beginning to its rows of gate and of up.
    u64 gate_at;
    u64 up_at;
    // Threads of a row (`lanes_a_row` in src/backend/gpu/matvec.rs).
    u32 lanes;
    // Pairs of a token that read one of the records.
    u32 k;
    // Records of quant/acts.cuh, [tokens] or [pairs].
    Address<const u8> x;
    // [pairs]: the expert, for its biases
    Address<const u32> experts;
    // [experts, n_ff] each, or null
    Address<const float> gate_bias;
    Address<const float> up_bias;
    // [experts] each, or null: factors on the products, before biases are added
    Address<const float> gate_scale;
    Address<const float> up_scale;
    u32 activation;
    // GATE_AND_UP, GATE or UP.
    u32 products;
    // [pairs, n_ff]
    Address<float> inner;
    // For the activations that have a limit, and one of up.
    float limit;
    float up_limit;
};
static_assert(sizeof(GateUpParams) == 120);

__device__ __forceinline__ float activate(const GateUpParams& p, float gate, float up) {
    float limit = p.limit;
    switch (p.activation) {
        case SILU: return swiglu(gate, up);
        case SILU_CLAMPED: return swiglu_clamped(gate, up);
        case RELU: return relu(up);
        case RELU_SQUARED: return relu(up) * relu(up);
        case RELU_GATED: return relu(gate) * up;
        case GELU: return geglu(gate, up);
        case SILU_LIMITED: return swiglu_limited(gate, up, limit);
        case SITU: return situ(gate, up, limit, p.up_limit);
        default: return swiglu_capped(gate, up, limit);
    }
}

template <class F>
__device__ __forceinline__ void gate_up(const GateUpParams& p) {
    u32 n_ff = p.n_ff, n_embd = p.n_embd, lanes = p.lanes;
    u32 activation = p.activation, products = p.products;
    Global<const float> gate_bias = p.gate_bias, up_bias = p.up_bias;
    u32 pair = blockIdx.z, first = blockIdx.y * p.granule_rows;
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    u32 n_rows = min(p.granule_rows, n_ff - first);
    u64 address = p.granules[static_cast<u64>(pair) * p.n_granules + blockIdx.y];
    bool here = address != 0, live = here && row < n_rows;
    Records records = {p.x, n_embd, pair / p.k, 0};
    float gate = 0.0f, up = 0.0f;
    if (here) {
        Global<const u8> granule = global<const u8>(address);
        granule = granule + (live ? row : 0) * row_bytes<F>(n_embd);
        if (has_gate(activation) && products == GATE_AND_UP) {
            float sum[2][1];
            Global<const u8> rows[2] = {granule + p.gate_at, granule + p.up_at};
            Dots<F>::of(rows, live, n_embd, lanes, records, 1, sum);
            gate = sum[0][0], up = sum[1][0];
        } else {
            float sum[1][1];
            Global<const u8> rows[1] = {granule + (products == GATE ? p.gate_at : p.up_at)};
            Dots<F>::of(rows, live, n_embd, lanes, records, 1, sum);
            gate = up = sum[0][0];
        }
    }
    if (row >= n_rows || threadIdx.x % lanes != 0) return;
    Global<float> to = p.inner + (static_cast<u64>(pair) * n_ff + first + row);
    // Rows of granules that are not here become zeros, since all of `inner` is quantised.
    if (!here) {
        *to = 0.0f;
        return;
    }
    Global<const float> gate_scale = p.gate_scale, up_scale = p.up_scale;
    u32 expert = gate_bias || up_bias || up_scale ? p.experts[pair] : 0;
    u64 bias = expert * static_cast<u64>(n_ff) + first + row;
    if (products == UP && has_gate(activation)) {
        gate = *to;
    } else {
        if (gate_scale) gate *= gate_scale[expert];
        if (gate_bias) gate += gate_bias[bias];
    }
    if (products == GATE) {
        *to = gate;
        return;
    }
    if (up_scale) up *= up_scale[expert];
    if (up_bias) up += up_bias[bias];
    *to = activate(p, gate, up);
}

struct DownParams {
    // As in GateUpParams.
    Address<const u64> granules;
    u32 n_granules;
    u32 granule_rows;
    u32 n_ff;
    u32 n_embd;
    // Bytes from a granule's beginning to its columns of down.
    u64 down_at;
    // Records of quant/acts.cuh, [pairs].
    Address<const u8> inner;
    // [pairs]: the expert, for its bias
    Address<const u32> experts;
    // [experts, n_embd] or null
    Address<const float> bias;
    // [pairs, n_embd]
    Address<float> partial;
    // Threads of a row.
    u32 lanes;
    u32 unused;
};
static_assert(sizeof(DownParams) == 72);

template <class F>
__device__ __forceinline__ void down(const DownParams& p) {
    u32 n_granules = p.n_granules, n_ff = p.n_ff, n_embd = p.n_embd, lanes = p.lanes;
    Global<const u64> granules = p.granules;
    Global<const u8> inner = p.inner;
    Global<const float> bias = p.bias;
    Global<float> partial = p.partial;
    u32 pair = blockIdx.y, row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    bool live = row < n_embd;
    u64 to = static_cast<u64>(pair) * n_embd + (live ? row : 0);
    bool begun = false;
    float total = 0.0f;
    for (u32 g = 0; g < n_granules; g++) {
        u64 address = granules[static_cast<u64>(pair) * n_granules + g];
        if (address == 0) continue;
        u32 first = g * p.granule_rows, n = min(p.granule_rows, n_ff - first);
        float sum[1][1];
        Global<const u8> matrix = global<const u8>(address) + p.down_at;
        Global<const u8> rows[1] = {matrix + (live ? row : 0) * row_bytes<F>(n)};
        Dots<F>::of(rows, live, n, lanes, Records{inner, n_ff, pair, first}, 1, sum);
        if (g == 0) {
            total = sum[0][0];
            if (bias) total += bias[p.experts[pair] * static_cast<u64>(n_embd) + (live ? row : 0)];
        } else {
            // An earlier launch added the granules before this one.
            if (!begun && live) total = partial[to];
            total += sum[0][0];
        }
        begun = true;
    }
    if (begun && live && threadIdx.x % lanes == 0) partial[to] = total;
}

#define EXPERT(NAME, F)                                                        \
    KERNEL(expert_gate_up_##NAME, THREADS, GateUpParams) { gate_up<F>(p); }    \
    KERNEL(expert_down_##NAME, AT_LEAST(3, THREADS), DownParams) { down<F>(p); }

FOR_EACH_FORMAT(EXPERT)
FOR_EACH_FLOAT(EXPERT)

struct ScalePairsParams {
    // Products of a granule's rows: [pairs, stride], of which the first `rows` columns.
    Address<float> x;
    // [items, n_granules]: the granule of each, 0 if it was not multiplied
    Address<const u64> granules;
    // [items + 1]: the pairs of each. Null for one item, which has n_pairs.
    Address<const u32> starts;
    // [items]. Null if they are the experts with their numbers.
    Address<const u32> experts;
    // [experts]
    Address<const float> scales;
    // [experts, bias_stride], from the granule's first row on, or null
    Address<const float> bias;
    u32 rows;
    u32 stride;
    u32 bias_stride;
    u32 n_granules;
    u32 n_pairs;
    u32 unused;
};
static_assert(sizeof(ScalePairsParams) == 72);

// blockIdx.y is an item, whose pairs lie side by side.
KERNEL(scale_pairs, THREADS, ScalePairsParams) {
    u32 row = blockIdx.x * blockDim.x + threadIdx.x, item = blockIdx.y;
    if (row >= p.rows || p.granules[static_cast<u64>(item) * p.n_granules] == 0) return;
    Global<float> x = p.x;
    Global<const u32> starts = p.starts;
    u32 expert = p.experts ? p.experts[item] : item;
    u32 first = starts ? starts[item] : 0, end = starts ? starts[item + 1] : p.n_pairs;
    float scale = p.scales[expert];
    bool is_biased = static_cast<bool>(p.bias);
    float bias = is_biased ? p.bias[static_cast<u64>(expert) * p.bias_stride + row] : 0.0f;
    for (u32 pair = first; pair < end; pair++) {
        u64 at = static_cast<u64>(pair) * p.stride + row;
        float product = x[at] * scale;
        x[at] = is_biased ? product + bias : product;
    }
}

struct OrderedSumParams {
    // [tokens, k]: the pair of a token and rank, or NONE
    Address<const u32> pairs;
    // If this is 0, the pair is token·k + rank, and `pairs` only says where there is NONE.
    u32 grouped;
    u32 k;
    // [tokens, k]
    Address<const float> weights;
    // [pairs, n_embd]
    Address<const float> partial;
    // [tokens, n_embd]
    Address<float> y;
    // [tokens, n_embd] or null: if there is one, the result is not stored in `y`, but added to `x`,
    // multiplied by `scale`.
    Address<float> x;
    float scale;
    u32 n_embd;
    // Whether the result begins with 0 instead of what `y` holds.
    u32 begins;
    u32 unused;
};
static_assert(sizeof(OrderedSumParams) == 64);

KERNEL(ordered_sum, THREADS, OrderedSumParams) {
    Global<const u32> pairs = p.pairs;
    Global<const float> weights = p.weights, partial = p.partial;
    Global<float> y = p.y, x = p.x;
    u32 k = p.k, n_embd = p.n_embd;
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (i >= n_embd) return;
    float sum = 0.0f;
    for (u32 at = token * k; at < (token + 1) * k; at++) {
        u32 pair = pairs[at];
        if (pair == NONE) continue;
        if (!p.grouped) pair = at;
        sum = fmaf(weights[at], partial[static_cast<u64>(pair) * n_embd + i], sum);
    }
    u64 to = static_cast<u64>(token) * n_embd + i;
    float before = 0.0f;
    if (!p.begins) before = y[to];
    sum = before + sum;
    if (x) {
        x[to] = fmaf(p.scale, sum, x[to]);
    } else {
        y[to] = sum;
    }
}
