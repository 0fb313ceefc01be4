// Gated delta rule (arXiv 2412.06464, equation 10) behind a short convolution. Twin:
// src/backend/cpu/delta.rs, to the bit.
//
//   x, qkv     f32 [tokens, channels]: q [n_k_heads, k_dim], k as q, v [n_v_heads, v_dim]
//   past       f32 [kernel − 1, channels]: what came before x
//   weight     f32 [channels, kernel], whose last column meets the present
//   state      f32 [n_v_heads, k_dim, v_dim]
//
// One after the other:
//
//   delta_inputs   qkv = silu(convolution(past, x)), then q and k of each head as unit vectors
//   delta_past     past, for what comes next
//   delta_rule     per token S ← decay·S; S ← S + k ⊗ beta·(v − Sᵀk); out = Sᵀq
//   delta_norm     x ← rms_norm(x)·weight · silu(gate)
//
// Columns of a head's state do not meet, so a warp has 32 of them in shared memory for all tokens,
// a thread a column: 16 KB for keys of 128. A token takes 2·k_dim fused multiply-adds, each after
// the one before, about 0.7 µs; 32 heads of 128 columns are 128 warps at once.
//
// Expected bytes of a token: the state once each way, 4 MB (32 heads of 128 × 128); of a prompt,
// the same for all of it.
#include "exp.cuh"

static constexpr u32 THREADS = 128;
// Tokens whose queries and keys a warp loads at once; STAGED in src/backend/gpu/delta.rs.
static constexpr u32 STAGED = 8;
// Added to the sum of squares of a query or key before it is made a unit vector.
static constexpr float UNIT_EPS = 1e-6f;

// ln(1 + x) for 0 ≤ x ≤ 1, step by step as in the twin.
__device__ __forceinline__ float ln_1p(float x) {
    float s = x / (2.0f + x), square = s * s;
    float series = (1.0f / 15.0f) * square;
    series = (series + 1.0f / 13.0f) * square;
    series = (series + 1.0f / 11.0f) * square;
    series = (series + 1.0f / 9.0f) * square;
    series = (series + 1.0f / 7.0f) * square;
    series = (series + 1.0f / 5.0f) * square;
    series = (series + 1.0f / 3.0f) * square;
    float twice = s + s;
    return twice + twice * series;
}

// Channel c's inputs move up by `tokens`. Each place is read before it is written: from itself or
// from places behind it.
__device__ __forceinline__ void move_past(Global<float> past, Global<const float> x, u32 tokens,
                                          u32 channels, u32 before, u32 c) {
    for (u32 place = 0; place < before; place++) {
        u32 from = place + tokens;
        float value = from < before
                          ? static_cast<float>(past[static_cast<u64>(from) * channels + c])
                          : x[static_cast<u64>(from - before) * channels + c];
        past[static_cast<u64>(place) * channels + c] = value;
    }
}

// Block (s, t) is for k_dim channels of token t; of these the first 2·n_k_heads are heads of q and
// k. A single token also moves the past, whose channels are one thread's each.
KERNEL(delta_inputs, THREADS, Global<const float> x, Global<float> past, Global<const float> weight,
       Global<float> qkv, u32 tokens, u32 channels, u32 kernel, u32 k_dim, u32 n_k_heads,
       float query_scale) {
    SHARED_DYNAMIC(float, head);
    SHARED(float, norm, 1);
    u32 first = blockIdx.x * k_dim, n = min(k_dim, channels - first), t = blockIdx.y;
    u32 before = kernel - 1;
    Global<float> to = qkv + (static_cast<u64>(t) * channels + first);
    bool unit = blockIdx.x < 2 * n_k_heads;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        u32 c = first + i;
        // What sums of nothing are in the twin.
        float sum = -0.0f;
        for (u32 j = 0; j < kernel; j++) {
            u32 at = t + j;
            float value = at < before
                              ? static_cast<float>(past[static_cast<u64>(at) * channels + c])
                              : x[static_cast<u64>(at - before) * channels + c];
            sum += weight[static_cast<u64>(c) * kernel + j] * value;
        }
        if (tokens == 1) move_past(past, x, tokens, channels, before, c);
        float value = sum * sigmoid(sum);
        if (unit) {
            head[i] = value;
        } else {
            to[i] = value;
        }
    }
    if (!unit) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        float squares = -0.0f;
#pragma unroll 8
        for (u32 i = 0; i < n; i++) {
            float value = head[i];
            squares += value * value;
        }
        norm[0] = sqrtf(squares + UNIT_EPS);
    }
    __syncthreads();
    float scale = blockIdx.x < n_k_heads ? query_scale : 1.0f;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) to[i] = head[i] / norm[0] * scale;
}

// After delta_inputs of several tokens.
KERNEL(delta_past, THREADS, Global<const float> x, Global<float> past, u32 tokens, u32 channels,
       u32 before) {
    u32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels) move_past(past, x, tokens, channels, before, c);
}

// Block (b, h) is a warp for columns 32·b … of value head h, whose key head is h / (values / keys),
// or h mod keys where the order is `tiled`.
//
//   betas, alphas   f32, rows of `gate_stride` for the tokens; head h's number is in run h / run of
//                   them, and runs are `pitch` apart
//   a, dt           f32 [n_v_heads]: decay = e^(a · softplus(alpha + dt))
KERNEL(delta_rule, WARP, Global<const float> qkv, Global<const float> betas,
       Global<const float> alphas, u32 gate_stride, u32 run, u32 pitch, Global<const float> a,
       Global<const float> dt, Global<float> state, Global<float> out, u32 tokens, u32 n_k_heads,
       u32 n_v_heads, u32 k_dim, u32 v_dim, u32 tiled) {
    SHARED_DYNAMIC(float, columns);
    Shared<float> queries = columns + WARP * k_dim, keys = queries + STAGED * k_dim;
    u32 lane = threadIdx.x, h = blockIdx.y, column = blockIdx.x * WARP + lane;
    u32 key_head = tiled ? h % n_k_heads : h / (n_v_heads / n_k_heads);
    u32 key_width = n_k_heads * k_dim, channels = 2 * key_width + n_v_heads * v_dim;
    bool live = column < v_dim;
    Shared<float> own = columns + lane;
    Global<float> kept = state + (static_cast<u64>(h) * k_dim * v_dim + column);
    for (u32 i = 0; i < k_dim; i++) {
        own[i * WARP] = live ? static_cast<float>(kept[static_cast<u64>(i) * v_dim]) : 0.0f;
    }
    u32 gate = h / run * pitch + h % run;
    float rate = a[h], shift = dt[h];
    float decays = 0.0f, shares = 0.0f;
    for (u32 t = 0; t < tokens; t++) {
        if (t % WARP == 0 && t + lane < tokens) {
            u64 at = static_cast<u64>(t + lane) * gate_stride + gate;
            float alpha = alphas[at] + shift;
            float softplus = fmaxf(alpha, 0.0f) + ln_1p(moeba_exp(-fabsf(alpha)));
            decays = moeba_exp(rate * softplus);
            shares = sigmoid(betas[at]);
        }
        if (t % STAGED == 0) {
            __syncwarp();
            for (u32 s = 0; s < min(STAGED, tokens - t); s++) {
                Global<const float> token = qkv + static_cast<u64>(t + s) * channels;
                Global<const float> query = token + key_head * k_dim, key = query + key_width;
                for (u32 i = lane; i < k_dim; i += WARP) {
                    queries[s * k_dim + i] = query[i];
                    keys[s * k_dim + i] = key[i];
                }
            }
            __syncwarp();
        }
        float decay = __shfl_sync(FULL_WARP, decays, t % WARP);
        float beta = __shfl_sync(FULL_WARP, shares, t % WARP);
        if (!live) continue;
        Shared<float> query = queries + t % STAGED * k_dim, key = keys + t % STAGED * k_dim;
        // Early, so that it is there when it is needed.
        float value = qkv[static_cast<u64>(t) * channels + 2 * key_width + h * v_dim + column];
        float memory = 0.0f;
#pragma unroll 8
        for (u32 i = 0; i < k_dim; i++) {
            float s = own[i * WARP] * decay;
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

// A warp a row of x f32 [rows, dim], blockDim.y rows a block; gate as x, weight [dim].
KERNEL(delta_norm, THREADS, Global<float> x, Global<const float> weight, float eps,
       Global<const float> gate, u32 rows, u32 dim) {
    u32 lane = threadIdx.x, row = blockIdx.x * blockDim.y + threadIdx.y;
    // Whole warps.
    if (row >= rows) return;
    u64 at = static_cast<u64>(row) * dim;
    float squares = 0.0f;
    for (u32 i = lane; i < dim && lane < 8; i += 8) {
        float value = x[at + i];
        squares = fmaf(value, value, squares);
    }
    squares = __shfl_sync(FULL_WARP, tree8_threads(squares), 0);
    float scale = 1.0f / sqrtf(squares / static_cast<float>(dim) + eps);
    for (u32 i = lane; i < dim; i += WARP) {
        float value = x[at + i];
        x[at + i] = swiglu(gate[at + i], value * scale * weight[i]);
    }
}
