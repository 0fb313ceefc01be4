// Element by element, and softmax by row. Twins: the loops of src/simd/scalar.rs and `Activation`
// of src/backend/cpu/expert.rs, to the bit. Each value is read and written once.
#include "softmax.cuh"

static constexpr u32 THREADS = 256;

__device__ __forceinline__ u32 index() { return blockIdx.x * blockDim.x + threadIdx.x; }

KERNEL(swiglu_rows, THREADS, Global<const float> gate, Global<const float> up, Global<float> out,
       u32 n) {
    u32 i = index();
    if (i < n) out[i] = swiglu(gate[i], up[i]);
}

// Both are limited, NaN to the limit in `gate` and to itself in `up`, as in the twin.
KERNEL(swiglu_clamped_rows, THREADS, Global<const float> gate, Global<const float> up,
       Global<float> out, u32 n) {
    u32 i = index();
    if (i >= n) return;
    float g = fminf(gate[i], 7.0f), u = up[i];
    u = u < -7.0f ? -7.0f : u > 7.0f ? 7.0f : u;
    out[i] = g * sigmoid(1.702f * g) * (u + 1.0f);
}

KERNEL(relu_rows, THREADS, Global<const float> x, Global<float> out, u32 n) {
    u32 i = index();
    float value = i < n ? x[i] : 0.0f;
    if (i < n) out[i] = value > 0.0f ? value : 0.0f;
}

KERNEL(sigmoid_rows, THREADS, Global<float> x, u32 n) {
    u32 i = index();
    if (i < n) x[i] = sigmoid(x[i]);
}

// Rows of at most the floats that fit a block's shared memory; a warp a row.
KERNEL(softmax_rows, WARP, Global<float> x, u32 n) {
    SHARED_DYNAMIC(float, row);
    Global<float> own = x + static_cast<u64>(blockIdx.x) * n;
    for (u32 i = threadIdx.x; i < n; i += WARP) row[i] = own[i];
    __syncwarp();
    softmax_by_warp(row, n);
    for (u32 i = threadIdx.x; i < n; i += WARP) own[i] = row[i];
}
