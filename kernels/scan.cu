// Scans with one decay a head, of Mamba-2 (arXiv 2405.21060) and lightning attention (arXiv
// 2501.08313), which has no steps; and with one a channel and state, of Mamba (arXiv 2312.00752).
// Twins: `Cpu::scan` and `Cpu::selective_scan` of src/backend/cpu/scan.rs and what stands around
// them in src/forward/recurrent.rs, to the bit.
//
//   scan             per token S ← e^(log_decay·step)·S + k ⊗ (step·v); out = Sᵀq + skip·v, times
//                    silu(gate)
//   selective_scan   the same with a step a channel, and a decay for each element of S
//
// In `scan` steps, skip and gate are there or not; q, k and v become their silu on the way, or not.
//
// The columns of a head's state are independent, so a warp keeps 32 of them in shared memory for
// all tokens, one thread for each: 16 KB for keys of 128. A token takes k_dim dependent fused
// multiply-adds, about 0.3 µs; 64 heads of 128 columns are 256 warps at once.
//
// In `selective_scan` a thread has a channel, whose states and decays lie in shared memory. A token
// takes an exponential for each state, about 25 instructions: 0.3 µs for 16 states.
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

// Channels of a block of selective_scan; CHANNELS in src/backend/gpu/scan.rs.
static constexpr u32 CHANNELS = 64;

struct SelectiveScanParams {
    // [tokens, channels] each; a step is softplus(steps).
    Address<const float> x;
    Address<const float> steps;
    // Rows of `width` numbers, one row a token: what is put into the states begins at `input`, what
    // reads them at `output`.
    Address<const float> rows;
    // [n_states, channels]
    Address<const float> log_decay;
    // [channels]
    Address<const float> skip;
    // Rows of `gate_stride` numbers, the channels' gates first.
    Address<const float> gate;
    // [n_states, channels]
    Address<float> state;
    // [tokens, channels]
    Address<float> out;
    u32 width;
    u32 input;
    u32 output;
    u32 gate_stride;
    u32 tokens;
    u32 channels;
    u32 n_states;
    u32 unused;
};
static_assert(sizeof(SelectiveScanParams) == 96);

KERNEL(selective_scan, CHANNELS, SelectiveScanParams) {
    SHARED_DYNAMIC(float, memory);
    Global<const float> x = p.x, steps = p.steps, rows = p.rows, logs = p.log_decay;
    Global<const float> gate = p.gate;
    Global<float> kept = p.state, out = p.out;
    u32 tokens = p.tokens, channels = p.channels, n_states = p.n_states;
    u32 lane = threadIdx.x, c = blockIdx.x * CHANNELS + lane;
    bool live = c < channels;
    Shared<float> states = memory + lane, log_decays = states + n_states * CHANNELS;
    Shared<float> inputs = memory + 2 * n_states * CHANNELS, outputs = inputs + STAGED * n_states;
    for (u32 s = 0; s < n_states; s++) {
        u64 at = static_cast<u64>(s) * channels + c;
        states[s * CHANNELS] = live ? static_cast<float>(kept[at]) : 0.0f;
        log_decays[s * CHANNELS] = live ? logs[at] : 0.0f;
    }
    float skip = live ? p.skip[c] : 0.0f;
    for (u32 t = 0; t < tokens; t++) {
        if (t % STAGED == 0) {
            __syncthreads();
            for (u32 i = lane; i < min(STAGED, tokens - t) * n_states; i += CHANNELS) {
                u64 row = static_cast<u64>(t + i / n_states) * p.width + i % n_states;
                inputs[i] = rows[row + p.input];
                outputs[i] = rows[row + p.output];
            }
            __syncthreads();
        }
        if (!live) continue;
        u64 at = static_cast<u64>(t) * channels + c;
        float value = x[at], step = softplus(steps[at]), stepped = value * step, sum = 0.0f;
        Shared<float> input = inputs + t % STAGED * n_states;
        Shared<float> output = outputs + t % STAGED * n_states;
#pragma unroll 4
        for (u32 s = 0; s < n_states; s++) {
            float decay = moeba_exp(log_decays[s * CHANNELS] * step);
            float state = fmaf(input[s], stepped, states[s * CHANNELS] * decay);
            states[s * CHANNELS] = state;
            sum = fmaf(output[s], state, sum);
        }
        sum += skip * value;
        out[at] = swiglu(gate[static_cast<u64>(t) * p.gate_stride + c], sum);
    }
    if (!live) return;
    for (u32 s = 0; s < n_states; s++) {
        kept[static_cast<u64>(s) * channels + c] = states[s * CHANNELS];
    }
}
