// Short convolutions: of recurrent layers before their state, and layers that are nothing else
// (LFM2). Twins: `Cpu::short_conv` of src/backend/cpu/scan.rs and what stands around it in
// src/forward, to the bit.
//
//   short_conv        out = gate · silu(bias + convolution(past, factor · x)); some parts of a
//                     token's channels become unit vectors
//   short_conv_past   past = the last inputs
//
// Factor, bias, silu, gate and unit vectors are there or not. Expected bytes: inputs and outputs
// once (an input's other readings come from L1 or L2), and the weights.
#include "exp.cuh"

static constexpr u32 THREADS = 128;
// Added to the sum of squares of a part before it is made a unit vector.
static constexpr float UNIT_EPS = 1e-6f;

struct ShortConvParams {
    // Rows of `stride` numbers, one row a token; its channels are the first.
    Address<const float> x;
    // Null, or rows as x: what x is multiplied by.
    Address<const float> factor;
    // [kernel − 1, channels]: the inputs before x, as products with their factors
    Address<float> past;
    // [channels, kernel], whose last column belongs to the present
    Address<const float> weight;
    // Null, or [channels]
    Address<const float> bias;
    // Null, or rows as x: what the result is multiplied by.
    Address<const float> gate;
    // [tokens, channels]; null for short_conv_past
    Address<float> out;
    u32 stride;
    u32 tokens;
    u32 channels;
    u32 kernel;
    u32 silu;
    // Channels of a block.
    u32 part;
    // So many parts become unit vectors, the first n_queries of them times query_scale.
    u32 n_units;
    u32 n_queries;
    float query_scale;
    u32 unused;
};
static_assert(sizeof(ShortConvParams) == 96);

// Channel c's input of token t.
__device__ __forceinline__ float input_of(Global<const float> x, Global<const float> factor,
                                          u32 stride, u32 t, u32 c) {
    u64 at = static_cast<u64>(t) * stride + c;
    float value = x[at];
    return factor ? value * factor[at] : value;
}

// Moves channel c's past inputs up by `tokens`. Each place is read before it is written, since it
// gets what lies behind it.
__device__ __forceinline__ void move_past(Global<float> past, Global<const float> x,
                                          Global<const float> factor, u32 stride, u32 tokens,
                                          u32 channels, u32 before, u32 c) {
    for (u32 place = 0; place < before; place++) {
        u32 from = place + tokens;
        float value = from < before
                          ? static_cast<float>(past[static_cast<u64>(from) * channels + c])
                          : input_of(x, factor, stride, from - before, c);
        past[static_cast<u64>(place) * channels + c] = value;
    }
}

// Block (s, t) computes the s-th `part` channels of token t. With one token, the thread of a
// channel also moves that channel's past.
KERNEL(short_conv, THREADS, ShortConvParams) {
    SHARED_DYNAMIC(float, head);
    SHARED(float, norm, 1);
    Global<const float> x = p.x, factor = p.factor, weight = p.weight, bias = p.bias;
    Global<const float> gate = p.gate;
    Global<float> past = p.past;
    u32 tokens = p.tokens, channels = p.channels, kernel = p.kernel, stride = p.stride;
    u32 first = blockIdx.x * p.part, n = min(p.part, channels - first), t = blockIdx.y;
    u32 before = kernel - 1;
    Global<float> to = p.out + (static_cast<u64>(t) * channels + first);
    bool unit = blockIdx.x < p.n_units;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        u32 c = first + i;
        // The twin's empty sum.
        float sum = -0.0f;
        for (u32 j = 0; j < kernel; j++) {
            u32 at = t + j;
            float value = at < before
                              ? static_cast<float>(past[static_cast<u64>(at) * channels + c])
                              : input_of(x, factor, stride, at - before, c);
            sum += weight[static_cast<u64>(c) * kernel + j] * value;
        }
        if (tokens == 1) move_past(past, x, factor, stride, tokens, channels, before, c);
        if (bias) sum += bias[c];
        if (p.silu) sum *= sigmoid(sum);
        if (gate) sum *= gate[static_cast<u64>(t) * stride + c];
        if (unit) {
            head[i] = sum;
        } else {
            to[i] = sum;
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
    float scale = blockIdx.x < p.n_queries ? p.query_scale : 1.0f;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) to[i] = head[i] / norm[0] * scale;
}

// Follows short_conv of several tokens.
KERNEL(short_conv_past, THREADS, ShortConvParams) {
    u32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= p.channels) return;
    move_past(p.past, p.x, p.factor, p.stride, p.tokens, p.channels, p.kernel - 1, c);
}
