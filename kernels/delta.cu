// Gated delta rule (arXiv 2412.06464, equation 10; with a decay for each element of a key, arXiv
// 2510.26692) behind a short convolution (conv.cu), which makes queries and keys unit vectors.
// Twin: src/backend/cpu/delta.rs, to the bit.
//
//   delta_rule   per token S ← decay·S; S ← S + k ⊗ beta·(v − Sᵀk); out = Sᵀq
//   kda_rule     the same with a decay for each row of S
//   delta_norm   x ← rms_norm(x)·weight · silu(gate), or sigmoid(gate)
//
// The columns of a head's state are independent, so a warp keeps 32 of them in shared memory for
// all tokens, one thread for each: 16 KB for keys of 128. A token takes 2·k_dim dependent fused
// multiply-adds, about 0.7 µs; 32 heads of 128 columns are 128 warps at once. Each warp of a head
// makes the decays of kda_rule for itself, which are k_dim / 32 a thread and token.
//
// Expected bytes: the state once each way, 4 MB (32 heads of 128 × 128), for a token as for a
// prompt.
#include "exp.cuh"

static constexpr u32 THREADS = 128;
// A warp loads the queries and keys of so many tokens at once; STAGED in src/backend/gpu/delta.rs.
static constexpr u32 STAGED = 8;
struct DeltaRuleParams {
    // [tokens, channels], from short_conv: q and k [n_k_heads, k_dim], v [n_v_heads, v_dim]
    Address<const float> qkv;
    // Rows of `gate_stride` numbers, one row a token. The number of head h is element h % run of
    // run h / run, and runs begin `pitch` numbers apart.
    Address<const float> betas;
    // The same; for kda_rule [tokens, n_v_heads, k_dim].
    Address<const float> alphas;
    // decay = e^(a · softplus(alpha + dt)), or e^(bound · sigmoid(a · (alpha + dt))): [n_v_heads]
    Address<const float> a;
    // As a; for kda_rule [n_v_heads, k_dim].
    Address<const float> dt;
    // [n_v_heads, k_dim, v_dim]
    Address<float> state;
    // [tokens, n_v_heads, v_dim]
    Address<float> out;
    u32 gate_stride;
    u32 run;
    u32 pitch;
    u32 tokens;
    u32 n_k_heads;
    u32 n_v_heads;
    u32 k_dim;
    u32 v_dim;
    // Value head h belongs to key head h mod n_k_heads if this is not 0, otherwise to
    // h / (n_v_heads / n_k_heads).
    u32 tiled;
    // Below 0, or 0 if there is none; for kda_rule.
    float bound;
};
static_assert(sizeof(DeltaRuleParams) == 96);

__device__ __forceinline__ float decay_of(float x, float a, float bound) {
    return moeba_exp(bound != 0.0f ? bound * sigmoid(a * x) : a * softplus(x));
}

// Block (b, h) is one warp for columns 32·b … of value head h. EACH: a decay for each row.
template <bool EACH>
__device__ __forceinline__ void rule(const DeltaRuleParams& p, Shared<float> columns) {
    Global<const float> qkv = p.qkv;
    Global<float> out = p.out;
    u32 n_k_heads = p.n_k_heads, n_v_heads = p.n_v_heads, k_dim = p.k_dim, v_dim = p.v_dim;
    u32 tokens = p.tokens;
    Shared<float> queries = columns + WARP * k_dim, keys = queries + STAGED * k_dim;
    Shared<float> row_decays = keys + (EACH ? STAGED * k_dim : 0);
    u32 lane = threadIdx.x, h = blockIdx.y, column = blockIdx.x * WARP + lane;
    u32 key_head = p.tiled ? h % n_k_heads : h / (n_v_heads / n_k_heads);
    u32 key_width = n_k_heads * k_dim, channels = 2 * key_width + n_v_heads * v_dim;
    bool live = column < v_dim;
    Shared<float> own = columns + lane;
    Global<float> kept = p.state + (static_cast<u64>(h) * k_dim * v_dim + column);
    for (u32 i = 0; i < k_dim; i++) {
        own[i * WARP] = live ? static_cast<float>(kept[static_cast<u64>(i) * v_dim]) : 0.0f;
    }
    u32 gate = h / p.run * p.pitch + h % p.run;
    float rate = p.a[h], shift = EACH ? 0.0f : static_cast<float>(p.dt[h]);
    float decays = 0.0f, shares = 0.0f;
    for (u32 t = 0; t < tokens; t++) {
        if (t % WARP == 0 && t + lane < tokens) {
            u64 at = static_cast<u64>(t + lane) * p.gate_stride + gate;
            if (!EACH) decays = moeba_exp(rate * softplus(p.alphas[at] + shift));
            shares = sigmoid(p.betas[at]);
        }
        if (t % STAGED == 0) {
            __syncwarp();
            for (u32 s = 0; s < min(STAGED, tokens - t); s++) {
                Global<const float> token = qkv + static_cast<u64>(t + s) * channels;
                Global<const float> query = token + key_head * k_dim, key = query + key_width;
                for (u32 i = lane; i < k_dim; i += WARP) {
                    queries[s * k_dim + i] = query[i];
                    keys[s * k_dim + i] = key[i];
                    if (!EACH) continue;
                    u64 at = (static_cast<u64>(t + s) * n_v_heads + h) * k_dim + i;
                    float alpha = p.alphas[at] + p.dt[h * k_dim + i];
                    row_decays[s * k_dim + i] = decay_of(alpha, rate, p.bound);
                }
            }
            __syncwarp();
        }
        float decay = EACH ? 1.0f : __shfl_sync(FULL_WARP, decays, t % WARP);
        float beta = __shfl_sync(FULL_WARP, shares, t % WARP);
        if (!live) continue;
        Shared<float> query = queries + t % STAGED * k_dim, key = keys + t % STAGED * k_dim;
        Shared<float> row_decay = row_decays + t % STAGED * k_dim;
        // Loaded early, since it is needed late.
        float value = qkv[static_cast<u64>(t) * channels + 2 * key_width + h * v_dim + column];
        float memory = 0.0f;
#pragma unroll 8
        for (u32 i = 0; i < k_dim; i++) {
            float s = own[i * WARP] * (EACH ? static_cast<float>(row_decay[i]) : decay);
            own[i * WARP] = s;
            memory = fmaf(key[i], s, memory);
        }
        float change = (value - memory) * beta, sum = 0.0f;
#pragma unroll 8
        for (u32 i = 0; i < k_dim; i++) {
            float s = fmaf(key[i], change, own[i * WARP]);
            own[i * WARP] = s;
            sum = fmaf(query[i], s, sum);
        }
        out[(static_cast<u64>(t) * n_v_heads + h) * v_dim + column] = sum;
    }
    if (!live) return;
    for (u32 i = 0; i < k_dim; i++) kept[static_cast<u64>(i) * v_dim] = own[i * WARP];
}

KERNEL(delta_rule, WARP, DeltaRuleParams) {
    SHARED_DYNAMIC(float, columns);
    rule<false>(p, columns);
}

KERNEL(kda_rule, WARP, DeltaRuleParams) {
    SHARED_DYNAMIC(float, columns);
    rule<true>(p, columns);
}

struct DeltaNormParams {
    // [rows, dim]
    Address<float> x;
    // [dim]
    Address<const float> weight;
    // [rows, dim]
    Address<const float> gate;
    float eps;
    u32 rows;
    u32 dim;
    // The gate's function is sigmoid, not silu.
    u32 sigmoid_gate;
};
static_assert(sizeof(DeltaNormParams) == 40);

// One warp for each row, blockDim.y rows a block.
KERNEL(delta_norm, THREADS, DeltaNormParams) {
    Global<float> x = p.x;
    Global<const float> weight = p.weight, gate = p.gate;
    u32 lane = threadIdx.x, row = blockIdx.x * blockDim.y + threadIdx.y, dim = p.dim;
    // Whole warps leave.
    if (row >= p.rows) return;
    u64 at = static_cast<u64>(row) * dim;
    float squares = 0.0f;
    for (u32 i = lane; i < dim && lane < 8; i += 8) {
        float value = x[at + i];
        squares = fmaf(value, value, squares);
    }
    squares = __shfl_sync(FULL_WARP, tree8_threads(squares), 0);
    float scale = 1.0f / sqrtf(squares / static_cast<float>(dim) + p.eps);
    for (u32 i = lane; i < dim; i += WARP) {
        float value = x[at + i];
        value = value * scale * weight[i];
        x[at + i] = p.sigmoid_gate ? value * sigmoid(gate[at + i]) : swiglu(gate[at + i], value);
    }
}
