// Normalisation and sums of rows. Twins: src/backend/cpu/norm.rs and `rms_norm` of
// src/simd/scalar.rs.
//
//   rms_norm    out[r, i] = x[r, i] · 1/√(mean(x[r]²) + eps) · weight[i]      to the bit; rows may
//               be groups of a vector, each with weights of its own
//   rms_norm_acts    the same, and the records of `out` that products read (quant/acts.cuh)
//   layer_norm  out[r, i] = (x[r, i] − mean) / √(variance + eps) · weight[i] + bias[i]   to the bit
//   add_scaled  acc[i] = fma(scale, x[i], acc[i])                             to the bit
//   add_normed  x[i] = fma(scale, h[i], 0) + y[i]                             to the bit
//
// A row's squares are summed in the eight lanes of "One arithmetic", so eight threads of a row do
// all the adding, one fused multiply-add after the other: dim/8 of them at four cycles, 0.7 µs at
// 2048 elements, while the others load. Layer norm's sums are f64 in 256 lanes, one a thread.
//
// A block has blockDim.y rows of blockDim.x threads, whole warps. Memory traffic: x once (its
// second reading comes from L1 or L2), out once.
#include "quant/quantize.cuh"

static constexpr u32 THREADS = 256;
// Floats that a block holds at a time, of all its rows.
static constexpr u32 CHUNK = 1024;

// Row r's sum of squares in the eight lanes and the tree, in every thread of its first warp.
template <class In>
__device__ __forceinline__ float sum_of_squares(In x, u32 dim, bool live) {
    SHARED(float, chunk, CHUNK);
    u32 each = CHUNK / blockDim.y;
    Shared<float> own = chunk + threadIdx.y * each;
    float lane = 0.0f;
    for (u32 start = 0; start < dim; start += each) {
        u32 n = min(each, dim - start);
        // Up to a multiple of eight: a square of zero adds nothing.
        u32 padded = (n + 7) / 8 * 8;
        for (u32 i = threadIdx.x; i < padded; i += blockDim.x) {
            own[i] = live && i < n ? static_cast<float>(x[start + i]) : 0.0f;
        }
        __syncthreads();
        if (threadIdx.x < 8) {
#pragma unroll 8
            for (u32 i = threadIdx.x; i < padded; i += 8) {
                float value = own[i];
                lane = fmaf(value, value, lane);
            }
        }
        __syncthreads();
    }
    return tree8_threads(lane);
}

// The factor of a row, in every thread, by the sum of squares in the row's first.
__device__ __forceinline__ float rms_scale(float squares, u32 dim, float eps) {
    SHARED(float, scales, THREADS / WARP);
    if (threadIdx.x == 0) {
        scales[threadIdx.y] = 1.0f / sqrtf(squares / static_cast<float>(dim) + eps);
    }
    __syncthreads();
    return scales[threadIdx.y];
}

struct RmsNormParams {
    // Null for rms_norm_in_place, which reads `out`.
    Address<const float> x;
    Address<const float> weight;
    Address<float> out;
    float eps;
    u32 rows;
    u32 dim;
    // Rows of `weight`, of which x's rows have one after the other.
    u32 groups;
    // Rows of x, and those of `out` where they are the same, begin so many numbers apart.
    u32 stride;
    u32 unused;
};
static_assert(sizeof(RmsNormParams) == 48);

template <class In, class Out>
__device__ __forceinline__ void rms(In x, const RmsNormParams& p, Out out, u32 out_stride) {
    Global<const float> weight = p.weight;
    u32 rows = p.rows, dim = p.dim;
    u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    bool live = row < rows;
    u64 at = static_cast<u64>(live ? row : 0) * p.stride;
    float scale = rms_scale(sum_of_squares(x + at, dim, live), dim, p.eps);
    if (!live) return;
    weight = weight + row % p.groups * dim;
    u64 to = static_cast<u64>(row) * out_stride;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) {
        float value = x[at + i];
        out[to + i] = value * scale * weight[i];
    }
}

KERNEL(rms_norm, THREADS, RmsNormParams) {
    Global<const float> x = p.x;
    Global<float> out = p.out;
    rms(x, p, out, p.dim);
}

KERNEL(rms_norm_in_place, THREADS, RmsNormParams) {
    Global<float> x = p.out;
    rms(x, p, x, p.stride);
}

struct RmsNormActsParams {
    // [rows, dim]
    Address<const float> x;
    // [dim]
    Address<const float> weight;
    // [rows, dim]
    Address<float> out;
    // Records of `dim` columns each, or null.
    Address<u8> q8_0;
    Address<u8> q8_k;
    float eps;
    u32 rows;
    u32 dim;
    u32 unused;
};
static_assert(sizeof(RmsNormActsParams) == 56);

// The dimension is a multiple of the blocks of the records that there are.
KERNEL(rms_norm_acts, THREADS, RmsNormActsParams) {
    Global<const float> x = p.x, weight = p.weight;
    Global<float> out = p.out;
    Global<u8> q8_0 = p.q8_0, q8_k = p.q8_k;
    u32 dim = p.dim, row = blockIdx.x * blockDim.y + threadIdx.y;
    bool live = row < p.rows;
    u64 at = static_cast<u64>(live ? row : 0) * dim;
    float scale = rms_scale(sum_of_squares(x + at, dim, live), dim, p.eps);
    for (u32 start = 0; start < dim; start += blockDim.x * EACH) {
        u32 first = start + threadIdx.x * EACH;
        bool has = live && first < dim;
        float v[EACH] = {};
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            if (!has) continue;
            v[i] = x[at + first + i] * scale * weight[first + i];
            out[at + first + i] = v[i];
        }
        // A row of a block is whole warps.
        if (q8_0) {
            u64 record = row * static_cast<u64>(ActLayout<32>(dim).bytes);
            quantize_eight<32>(v, first, dim, has, q8_0 + record);
        }
        if (q8_k) {
            u64 record = row * static_cast<u64>(ActLayout<256>(dim).bytes);
            quantize_eight<256>(v, first, dim, has, q8_k + record);
        }
    }
}

// The sum over a block of one row, in every thread: a tree over each warp, then warps in order.
__device__ __forceinline__ double block_sum(double value, Shared<double> partial) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = value;
    __syncthreads();
    double sum = 0.0;
    for (u32 w = 0; w < blockDim.x / WARP; w++) sum += partial[w];
    return sum;
}

struct LayerNormParams {
    Address<const float> x;
    Address<const float> weight;
    Address<const float> bias;
    Address<float> out;
    float eps;
    u32 dim;
};
static_assert(sizeof(LayerNormParams) == 40);

KERNEL(layer_norm, THREADS, LayerNormParams) {
    SHARED(double, partial, THREADS / WARP);
    Global<const float> x = p.x, weight = p.weight, bias = p.bias;
    Global<float> out = p.out;
    u32 dim = p.dim;
    u64 at = static_cast<u64>(blockIdx.x) * dim;
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) sum += static_cast<double>(x[at + i]);
    double mean = block_sum(sum, partial) / dim;
    double squares = 0.0;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) {
        double off = static_cast<double>(x[at + i]) - mean;
        squares += off * off;
    }
    double variance = block_sum(squares, partial) / dim;
    double scale = 1.0 / sqrt(variance + static_cast<double>(p.eps));
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) {
        double off = static_cast<double>(x[at + i]) - mean;
        out[at + i] = static_cast<float>(off * scale) * weight[i] + bias[i];
    }
}

struct AddScaledParams {
    Address<float> acc;
    Address<const float> x;
    float scale;
    u32 n;
};
static_assert(sizeof(AddScaledParams) == 24);

KERNEL(add_scaled, THREADS, AddScaledParams) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.acc[i] = fmaf(p.scale, p.x[i], p.acc[i]);
}

struct AddNormedParams {
    Address<const float> h;
    Address<const float> y;
    Address<float> x;
    float scale;
    u32 n;
};
static_assert(sizeof(AddNormedParams) == 32);

// The twin adds to zero, which makes a product of −0 a 0.
KERNEL(add_normed, THREADS, AddNormedParams) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.x[i] = fmaf(p.scale, p.h[i], 0.0f) + p.y[i];
}
