// Copies of columns and element-wise operations between the products of a layer. Twins: the loops
// over vectors in src/forward, to the bit.
//
//   copy_columns     to[r, to_first + c] = from[r, from_first + c]        for c < cols
//   mul_sigmoid      x[i] = x[i] · sigmoid(y[i])
//   scale_values     x[i] = x[i] · value
//   divide_values    x[i] = x[i] / value
//   add_values       x[i] = x[i] + y[i]
//   set_values       x[i] = value
//   clamp_values     x[i] = clamp(x[i], ±value)
//   cap_values       x[i] = value·tanh(x[i] / value)
//   mul_rows         x[r, c] = x[r, c] · y[r]
//
// One thread for each value. Each value is read once and written once.
#include "exp.cuh"

static constexpr u32 THREADS = 256;

__device__ __forceinline__ u64 index() {
    return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Rows are `from_stride` and `to_stride` values apart; what is written is not read.
struct CopyColumnsParams {
    Address<const float> from;
    Address<float> to;
    u64 from_stride;
    u64 from_first;
    u64 to_stride;
    u64 to_first;
    u32 cols;
    u32 rows;
};
static_assert(sizeof(CopyColumnsParams) == 56);

KERNEL(copy_columns, THREADS, CopyColumnsParams) {
    u64 i = index();
    if (i >= static_cast<u64>(p.cols) * p.rows) return;
    u64 row = i / p.cols, col = i % p.cols;
    p.to[row * p.to_stride + p.to_first + col] = p.from[row * p.from_stride + p.from_first + col];
}

struct ValuesParams {
    Address<float> x;
    // The gate of mul_sigmoid, or what add_values adds.
    Address<const float> y;
    // A factor, a divisor or a value.
    float value;
    u32 n;
};
static_assert(sizeof(ValuesParams) == 24);

KERNEL(mul_sigmoid, THREADS, ValuesParams) {
    u64 i = index();
    if (i < p.n) p.x[i] *= sigmoid(p.y[i]);
}

KERNEL(scale_values, THREADS, ValuesParams) {
    u64 i = index();
    if (i < p.n) p.x[i] *= p.value;
}

KERNEL(divide_values, THREADS, ValuesParams) {
    u64 i = index();
    if (i < p.n) p.x[i] = p.x[i] / p.value;
}

KERNEL(add_values, THREADS, ValuesParams) {
    u64 i = index();
    if (i < p.n) p.x[i] += p.y[i];
}

KERNEL(set_values, THREADS, ValuesParams) {
    u64 i = index();
    if (i < p.n) p.x[i] = p.value;
}

KERNEL(clamp_values, THREADS, ValuesParams) {
    u64 i = index();
    if (i < p.n) p.x[i] = clamp(p.x[i], p.value);
}

KERNEL(cap_values, THREADS, ValuesParams) {
    u64 i = index();
    if (i < p.n) p.x[i] = soft_cap(p.x[i], p.value);
}

struct MulRowsParams {
    // [n / cols, cols]
    Address<float> x;
    // [n / cols]
    Address<const float> y;
    u32 cols;
    u32 n;
};
static_assert(sizeof(MulRowsParams) == 24);

KERNEL(mul_rows, THREADS, MulRowsParams) {
    u64 i = index();
    if (i < p.n) p.x[i] *= p.y[i / p.cols];
}
