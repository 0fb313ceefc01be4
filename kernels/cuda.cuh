// The GPU's side of moeba.cuh: plain pointers, and the few instructions that have no name in CUDA
// C++ without a toolkit's headers. The oldest architecture is compute_75 (Turing); its products
// are halves and quarters of the shapes that the kernels are written for.
#pragma once

// On the GPU a kernel has one parameter for each field of its struct. build_ptx.py defines, for a
// struct XParams, PARAMETERS_XParams (Address<float> x, u32 n) and FIELDS_XParams (x, n). With the
// struct itself as parameter, NVRTC 12.0 knows nothing of __restrict__ and needs more registers: 58
// instead of 48 for matvec_q4_k on sm_86. Blocks larger than MAX_THREADS fail to launch; with
// AT_LEAST(n, MAX_THREADS) in its place, the registers are enough for n blocks a multiprocessor.
#define AT_LEAST(BLOCKS, MAX_THREADS) MAX_THREADS, BLOCKS
#define KERNEL(NAME, MAX_THREADS, PARAMS)                                              \
    static __device__ __forceinline__ void NAME##_body(const PARAMS& p);               \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS)                          \
        NAME(PARAMETERS_##PARAMS) {                                                    \
        NAME##_body(PARAMS{FIELDS_##PARAMS});                                          \
    }                                                                                  \
    static __device__ __forceinline__ void NAME##_body(const PARAMS& p)

template <class T>
using Global = T* __restrict__;
template <class T>
using Address = Global<T>;
template <class T>
using Shared = T*;

#define SHARED(T, NAME, N) __shared__ T NAME[N]
#define SHARED_DYNAMIC(T, NAME)                                  \
    extern __shared__ __align__(16) unsigned char dynamic_smem[]; \
    T* NAME = reinterpret_cast<T*>(dynamic_smem)

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

template <class U, class T>
__device__ __forceinline__ U* as(T* pointer) {
    return reinterpret_cast<U*>(pointer);
}

// A pointer that came through memory.
template <class T>
__device__ __forceinline__ T* global(u64 address) {
    return reinterpret_cast<T*>(address);
}

__device__ __forceinline__ float f16_to_f32(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// To nearest, ties to even.
__device__ __forceinline__ u16 f32_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// 2^x, within 2^-22 of it: no bit of it is promised, but 2^0 = 1 and 2^-INFINITY = 0. Subnormal
// results may be zeros.
__device__ __forceinline__ float two_to_the(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// c plus the products of the four signed bytes of a and b.
__device__ __forceinline__ i32 dp4a(i32 a, i32 b, i32 c) {
    i32 sum;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// d += a (16x16, f16, rows) * b (16x8, f16, columns); fragments as PTX's mma.m16n8k16 has them:
// with group = lane/4 and pair = 2*(lane%4), a[0] holds row `group`, columns pair and pair+1; a[1]
// row group+8; a[2] and a[3] the same rows, columns + 8; b[0] rows pair and pair+1 of column
// `group`, b[1] rows + 8; d[0], d[1] row `group`, columns pair and pair+1; d[2], d[3] row group+8.
// The order of the sixteen sums is the hardware's: no bit of it is promised.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
    }
#endif
}

// d += a (16x32, i8, rows) * b (32x8, i8, columns), exact; fragments as PTX's mma.m16n8k32 has
// them: with group = lane/4 and quad = 4*(lane%4), a[0] holds row `group`, columns quad ... quad+3
// (lowest byte first); a[1] row group+8; a[2] and a[3] the same rows, columns + 16; b[0] rows
// quad ... quad+3 of column `group`, b[1] rows + 16; d as in mma_f16. Devices from 10.0 on
// compute each of Turing's quarters as a half.
__device__ __forceinline__ void mma_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
        u32 half = part % 2;
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
            : "+r"(d[2 * half]), "+r"(d[2 * half + 1])
            : "r"(a[part]), "r"(b[part / 2]));
    }
#endif
}

// Four 8x8 matrices of 16-bit elements: thread i gives the address of row i%8 of matrix i/8 (16
// bytes, aligned); r[j] gets elements 2*(lane%4) and the next of row lane/4 of matrix j.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], Shared<const u16> row) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same of the transposed matrices: r[j] gets rows 2*(lane%4) and the next of column lane/4.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], Shared<const u16> row) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
