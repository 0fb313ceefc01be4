// Activation functions element by element, and softmax by row. Twins: the loops of
// src/simd/scalar.rs and src/backend/cpu/expert, to the bit. Each value is read and written
// once.
#include "softmax.cuh"

static constexpr u32 THREADS = 256;

__device__ __forceinline__ u32 index() { return blockIdx.x * blockDim.x + threadIdx.x; }

struct GatedParams {
    // Null for relu_rows and relu_squared_rows.
    Address<const float> gate;
    Address<const float> up;
    Address<float> out;
    u32 n;
    // For the kernels that have a limit, and one of up.
    float limit;
    float up_limit;
    u32 unused;
};
static_assert(sizeof(GatedParams) == 40);

KERNEL(swiglu_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = swiglu(p.gate[i], p.up[i]);
}

KERNEL(swiglu_clamped_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = swiglu_clamped(p.gate[i], p.up[i]);
}

KERNEL(relu_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = relu(p.up[i]);
}

KERNEL(relu_squared_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = relu(p.up[i]) * relu(p.up[i]);
}

KERNEL(reglu_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = relu(p.gate[i]) * p.up[i];
}

KERNEL(geglu_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = geglu(p.gate[i], p.up[i]);
}

KERNEL(swiglu_limited_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = swiglu_limited(p.gate[i], p.up[i], p.limit);
}

KERNEL(swiglu_capped_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = swiglu_capped(p.gate[i], p.up[i], p.limit);
}

KERNEL(situ_rows, THREADS, GatedParams) {
    u32 i = index();
    if (i < p.n) p.out[i] = situ(p.gate[i], p.up[i], p.limit, p.up_limit);
}

struct InPlaceParams {
    Address<float> x;
    // Values, or the length of a row.
    u32 n;
    u32 unused;
};
static_assert(sizeof(InPlaceParams) == 16);

KERNEL(sigmoid_rows, THREADS, InPlaceParams) {
    u32 i = index();
    if (i < p.n) p.x[i] = sigmoid(p.x[i]);
}

KERNEL(softplus_rows, THREADS, InPlaceParams) {
    u32 i = index();
    if (i < p.n) p.x[i] = softplus(p.x[i]);
}

// One warp for each row, which has to fit a block's shared memory.
KERNEL(softmax_rows, WARP, InPlaceParams) {
    SHARED_DYNAMIC(float, row);
    Global<float> own = p.x + static_cast<u64>(blockIdx.x) * p.n;
    for (u32 i = threadIdx.x; i < p.n; i += WARP) row[i] = own[i];
    __syncwarp();
    softmax_by_warp(row, p.n);
    for (u32 i = threadIdx.x; i < p.n; i += WARP) own[i] = row[i];
}
