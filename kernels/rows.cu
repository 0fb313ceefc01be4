// Rows moved and numbers changed one by one: what stands between the products of a layer. Twins:
// the loops over vectors in src/model/mixer.rs, ffn.rs and forward.rs, to the bit.
//
//   copy_columns     to[r, to_first + c] = from[r, from_first + c]        for c < cols
//   mul_sigmoid      x[i] = x[i] · sigmoid(gate[i])
//   scale_values     x[i] = x[i] · factor
//   divide_values    x[i] = x[i] / divisor
//   add_values       x[i] = x[i] + y[i]
//   set_values       x[i] = value
//
// A thread a value; neighbours touch neighbouring values. Each is read once and written once.
#include "exp.cuh"

static constexpr u32 THREADS = 256;

__device__ __forceinline__ u64 index() {
    return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Rows are `from_stride` and `to_stride` values apart; no place is both read and written.
KERNEL(copy_columns, THREADS, Global<const float> from, u64 from_stride, u64 from_first,
       Global<float> to, u64 to_stride, u64 to_first, u32 cols, u32 rows) {
    u64 i = index();
    if (i >= static_cast<u64>(cols) * rows) return;
    u64 row = i / cols, col = i % cols;
    to[row * to_stride + to_first + col] = from[row * from_stride + from_first + col];
}

KERNEL(mul_sigmoid, THREADS, Global<float> x, Global<const float> gate, u32 n) {
    u64 i = index();
    if (i < n) x[i] *= sigmoid(gate[i]);
}

KERNEL(scale_values, THREADS, Global<float> x, float factor, u32 n) {
    u64 i = index();
    if (i < n) x[i] *= factor;
}

KERNEL(divide_values, THREADS, Global<float> x, float divisor, u32 n) {
    u64 i = index();
    if (i < n) x[i] = x[i] / divisor;
}

KERNEL(add_values, THREADS, Global<float> x, Global<const float> y, u32 n) {
    u64 i = index();
    if (i < n) x[i] += y[i];
}

KERNEL(set_values, THREADS, Global<float> x, float value, u32 n) {
    u64 i = index();
    if (i < n) x[i] = value;
}
