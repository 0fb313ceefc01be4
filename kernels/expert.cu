// Granules of experts for few tokens: a *pair* is a (token, rank), pair = token·k + rank.
//
//   inner[pair, row] = activation(gate[row] · x[token], up[row] · x[token])       expert_gate_up
//   partial[pair]   (+)= down · inner[pair], granule by granule in index order    expert_down
//   y[token]         += Σ_rank weights[token, rank] · partial[token, rank]        ordered_sum
//
// Twins: src/backend/cpu/expert.rs, to the bit. Between the first two, quantize.cu stores `inner`
// in the form that down's format reads.
//
//   granules   u64 [pairs, n_granules]: where a granule lies in device memory; 0 where it is not
//              (the CPU computes it, or nobody). One snapshot of the slot table serves both
//              launches, so what lands in between waits for the next token.
//
// A granule is rows [n, n_embd] of gate and of up from `gate_at` and `up_at` on and columns
// [n_embd, n] of down from `down_at` on, each without gaps; n is `granule_rows`, less in the last.
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

// `Activation` of the twin; 1 is SiluClamped.
static constexpr u32 SILU = 0, RELU = 2;
// Where gate and up are of one format, a launch computes both; where not, one of gate's format
// leaves the gate's products in `inner` for one of up's.
static constexpr u32 GATE_AND_UP = 0, GATE = 1, UP = 2;

__device__ __forceinline__ float activate(u32 activation, float gate, float up) {
    if (activation == SILU) return swiglu(gate, up);
    if (activation == RELU) return fmaxf(up, 0.0f);
    // NaN: the smaller of NaN and 7 is 7, and a clamped NaN is NaN, as in the twin.
    gate = fminf(gate, 7.0f);
    up = up < -7.0f ? -7.0f : up > 7.0f ? 7.0f : up;
    return gate * sigmoid(1.702f * gate) * (up + 1.0f);
}

template <class F>
__device__ __forceinline__ void gate_up(Global<const u64> granules, u32 n_granules,
                                        u32 granule_rows, u32 n_ff, u32 n_embd, u64 gate_at,
                                        u64 up_at, u32 lanes, Global<const u8> x, u32 k,
                                        Global<const u32> experts, Global<const float> gate_bias,
                                        Global<const float> up_bias, u32 activation, u32 products,
                                        Global<float> inner) {
    u32 pair = blockIdx.z, first = blockIdx.y * granule_rows;
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    u32 n_rows = min(granule_rows, n_ff - first);
    u64 address = granules[static_cast<u64>(pair) * n_granules + blockIdx.y];
    bool here = address != 0, live = here && row < n_rows;
    Records records = {x, n_embd, pair / k, 0};
    float gate = 0.0f, up = 0.0f;
    if (here) {
        Global<const u8> granule = global<const u8>(address);
        granule = granule + (live ? row : 0) * row_bytes<F>(n_embd);
        if (activation != RELU && products == GATE_AND_UP) {
            float sum[2][1];
            Global<const u8> rows[2] = {granule + gate_at, granule + up_at};
            Dots<F>::of(rows, live, n_embd, lanes, records, 1, sum);
            gate = sum[0][0], up = sum[1][0];
        } else {
            float sum[1][1];
            Global<const u8> rows[1] = {granule + (products == GATE ? gate_at : up_at)};
            Dots<F>::of(rows, live, n_embd, lanes, records, 1, sum);
            gate = up = sum[0][0];
        }
    }
    if (row >= n_rows || threadIdx.x % lanes != 0) return;
    Global<float> to = inner + (static_cast<u64>(pair) * n_ff + first + row);
    // What is not here has zeros: `inner` is stored as a whole.
    if (!here) {
        *to = 0.0f;
        return;
    }
    u64 bias = (gate_bias || up_bias ? experts[pair] : 0) * static_cast<u64>(n_ff) + first + row;
    if (products == UP && activation != RELU) {
        gate = *to;
    } else if (gate_bias) {
        gate += gate_bias[bias];
    }
    if (products == GATE) {
        *to = gate;
        return;
    }
    if (up_bias) up += up_bias[bias];
    *to = activate(activation, gate, up);
}

template <class F>
__device__ __forceinline__ void down(Global<const u64> granules, u32 n_granules, u32 granule_rows,
                                     u32 n_ff, u32 n_embd, u64 down_at, u32 lanes,
                                     Global<const u8> inner, Global<const u32> experts,
                                     Global<const float> bias, Global<float> partial) {
    u32 pair = blockIdx.y, row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    bool live = row < n_embd;
    u64 to = static_cast<u64>(pair) * n_embd + (live ? row : 0);
    bool begun = false;
    float total = 0.0f;
    for (u32 g = 0; g < n_granules; g++) {
        u64 address = granules[static_cast<u64>(pair) * n_granules + g];
        if (address == 0) continue;
        u32 first = g * granule_rows, n = min(granule_rows, n_ff - first);
        float sum[1][1];
        Global<const u8> matrix = global<const u8>(address) + down_at;
        Global<const u8> rows[1] = {matrix + (live ? row : 0) * row_bytes<F>(n)};
        Dots<F>::of(rows, live, n, lanes, Records{inner, n_ff, pair, first}, 1, sum);
        if (g == 0) {
            total = sum[0][0];
            if (bias) total += bias[experts[pair] * static_cast<u64>(n_embd) + (live ? row : 0)];
        } else {
            // Granules before this one came in an earlier launch.
            if (!begun && live) total = partial[to];
            total += sum[0][0];
        }
        begun = true;
    }
    if (begun && live && threadIdx.x % lanes == 0) partial[to] = total;
}

#define EXPERT(NAME, F)                                                                     \
    KERNEL(expert_gate_up_##NAME, THREADS, Global<const u64> granules, u32 n_granules,      \
           u32 granule_rows, u32 n_ff, u32 n_embd, u64 gate_at, u64 up_at, u32 lanes,       \
           Global<const u8> x, u32 k, Global<const u32> experts,                            \
           Global<const float> gate_bias, Global<const float> up_bias, u32 activation,      \
           u32 products, Global<float> inner) {                                             \
        gate_up<F>(granules, n_granules, granule_rows, n_ff, n_embd, gate_at, up_at, lanes, \
                   x, k, experts, gate_bias, up_bias, activation, products, inner);         \
    }                                                                                       \
    KERNEL(expert_down_##NAME, THREADS, Global<const u64> granules, u32 n_granules,         \
           u32 granule_rows, u32 n_ff, u32 n_embd, u64 down_at, u32 lanes,                  \
           Global<const u8> inner, Global<const u32> experts, Global<const float> bias,     \
           Global<float> partial) {                                                         \
        down<F>(granules, n_granules, granule_rows, n_ff, n_embd, down_at, lanes, inner,    \
                experts, bias, partial);                                                    \
    }

FOR_EACH_FORMAT(EXPERT)
FOR_EACH_FLOAT(EXPERT)

// `pairs` [tokens, k]: the pair of a token and rank, or NONE. Without `grouped` the pair is
// token·k + rank, and `pairs` (the chosen experts, say) only says where there is none.
KERNEL(ordered_sum, THREADS, Global<const u32> pairs, u32 grouped, Global<const float> weights,
       u32 k, Global<const float> partial, u32 n_embd, Global<float> y) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (i >= n_embd) return;
    float sum = 0.0f;
    for (u32 at = token * k; at < (token + 1) * k; at++) {
        u32 pair = pairs[at];
        if (pair == NONE) continue;
        if (!grouped) pair = at;
        sum = fmaf(weights[at], partial[static_cast<u64>(pair) * n_embd + i], sum);
    }
    u64 to = static_cast<u64>(token) * n_embd + i;
    y[to] = y[to] + sum;
}
