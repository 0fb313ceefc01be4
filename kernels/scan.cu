// Scans with one decay a head: Mamba-2 (arXiv 2405.21060), and lightning attention (arXiv
// 2501.08313), which has no steps. Twin: `Cpu::scan` of src/backend/cpu/scan.rs and what stands
// around it in src/forward/recurrent.rs, to the bit.
//
//   scan   per token S ← e^(log_decay·step)·S + k ⊗ (step·v); out = Sᵀq + skip·v, times silu(gate)
//
// Steps, skip and gate are there or not; q, k and v become their silu on the way, or not.
//
// The columns of a head's state are independent, so a warp keeps 32 of them in shared memory for
// all tokens, one thread for each: 16 KB for keys of 128. A token takes k_dim dependent fused
// multiply-adds, about 0.3 µs; 64 heads of 128 columns are 256 warps at once.
//
// Expected bytes: the state once each way, 4 MB (64 heads of 128 × 128), for a token as for a
// prompt.
#include "exp.cuh"

// A warp loads the queries and keys of so many tokens at once; STAGED in src/backend/gpu/scan.rs.
static constexpr u32 STAGED = 8;

struct ScanParams {
    // Rows of `width` numbers, one row a token: head h's query begins at q_first + group·q_step of
    // its row, and its key likewise; its value at v_first + h·v_step. Adjacent heads are a group.
    Address<const float> rows;
    // Null, or rows of `gate_stride` numbers: step = softplus(steps[h] + step_bias[h]).
    Address<const float> steps;
    // [n_heads] each; skip may be null.
    Address<const float> step_bias;
    Address<const float> log_decay;
    Address<const float> skip;
    // Null, or rows of `gate_stride` numbers, of which the first n_heads · v_dim are the gate.
    Address<const float> gate;
    // [n_heads, k_dim, v_dim]
    Address<float> state;
    // [tokens, n_heads, v_dim]
    Address<float> out;
    u32 width;
    u32 q_first;
    u32 q_step;
    u32 k_first;
    u32 k_step;
    u32 v_first;
    u32 v_step;
    u32 gate_stride;
    u32 tokens;
    u32 n_heads;
    u32 n_groups;
    u32 k_dim;
    u32 v_dim;
    u32 silu;
};
static_assert(sizeof(ScanParams) == 120);

__device__ __forceinline__ float input(float x, u32 silu) { return silu ? x * sigmoid(x) : x; }

// Block (b, h) is one warp for columns 32·b … of head h.
KERNEL(scan, WARP, ScanParams) {
    SHARED_DYNAMIC(float, columns);
    Global<const float> rows = p.rows, steps = p.steps, skip = p.skip, gate = p.gate;
    Global<float> out = p.out;
    u32 tokens = p.tokens, n_heads = p.n_heads, k_dim = p.k_dim, v_dim = p.v_dim;
    Shared<float> queries = columns + WARP * k_dim, keys = queries + STAGED * k_dim;
    u32 lane = threadIdx.x, h = blockIdx.y, column = blockIdx.x * WARP + lane;
    u32 group = h / (n_heads / p.n_groups);
    bool live = column < v_dim;
    Shared<float> own = columns + lane;
    Global<float> kept = p.state + (static_cast<u64>(h) * k_dim * v_dim + column);
    for (u32 i = 0; i < k_dim; i++) {
        own[i * WARP] = live ? static_cast<float>(kept[static_cast<u64>(i) * v_dim]) : 0.0f;
    }
    u32 of_head = h * v_dim + column;
    float log_decay = p.log_decay[h], bias = steps ? p.step_bias[h] : 0.0f;
    float factor = skip ? skip[h] : 0.0f, own_step = 1.0f, own_decay = 0.0f;
    for (u32 t = 0; t < tokens; t++) {
        // Each thread of the warp makes the step and the decay of another token.
        if (t % WARP == 0 && t + lane < tokens) {
            u64 at = static_cast<u64>(t + lane) * p.gate_stride + h;
            if (steps) own_step = softplus(steps[at] + bias);
            own_decay = moeba_exp(log_decay * own_step);
        }
        if (t % STAGED == 0) {
            __syncwarp();
            for (u32 s = 0; s < min(STAGED, tokens - t); s++) {
                Global<const float> row = rows + static_cast<u64>(t + s) * p.width;
                Global<const float> query = row + (p.q_first + group * p.q_step);
                Global<const float> key = row + (p.k_first + group * p.k_step);
                for (u32 i = lane; i < k_dim; i += WARP) {
                    queries[s * k_dim + i] = input(query[i], p.silu);
                    keys[s * k_dim + i] = input(key[i], p.silu);
                }
            }
            __syncwarp();
        }
        float decay = __shfl_sync(FULL_WARP, own_decay, t % WARP);
        float step = __shfl_sync(FULL_WARP, own_step, t % WARP);
        if (!live) continue;
        Shared<float> query = queries + t % STAGED * k_dim, key = keys + t % STAGED * k_dim;
        u64 at = static_cast<u64>(t) * p.width + p.v_first + h * p.v_step + column;
        float value = input(rows[at], p.silu), stepped = value * step, sum = 0.0f;
#pragma unroll 8
        for (u32 i = 0; i < k_dim; i++) {
            float s = fmaf(key[i], stepped, own[i * WARP] * decay);
            own[i * WARP] = s;
            sum = fmaf(query[i], s, sum);
        }
        if (skip) sum += factor * value;
        if (gate) sum = swiglu(gate[static_cast<u64>(t) * p.gate_stride + of_head], sum);
        out[static_cast<u64>(t) * n_heads * v_dim + of_head] = sum;
    }
    if (!live) return;
    for (u32 i = 0; i < k_dim; i++) kept[static_cast<u64>(i) * v_dim] = own[i * WARP];
}
