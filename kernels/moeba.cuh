// Included by every kernel. The same source is compiled twice: by NVRTC for the GPU, and as C++17
// against shim/ by any compiler, where a block's threads are fibers and every access is checked
// (see shim/device.h). So a kernel uses only what is listed here:
//
//   struct XParams { Address<const float> x; u32 n; };      the parameters of a family of kernels
//   KERNEL(name, max_threads, XParams) { ... p.x ... }      an entry point; `p` are its parameters
//   AT_LEAST(n, max_threads)                               the same, n blocks a multiprocessor
//   Global<T>, Global<const T>                             a pointer to device memory
//   Address<T>                                             the same in parameters
//   SHARED(T, name, n); SHARED_DYNAMIC(T, name);           arrays of a block; Shared<T> to pass on
//   as<U>(p)                                               a pointer of either kind to another type
//   f16_to_f32, f32_to_f16, bf16_to_f32                    on bits (u16)
//   dp4a, mma_f16, mma_s8, load_matrices, two_to_the       see cuda.cuh
//   u8 ... u64, i8 ... i64                                 as in the Rust twins
//
// On the GPU both pointers are plain ones. Where a bit matters, sums are written with fmaf() (the
// compilers are told not to fuse by themselves) and in the order that the Rust twin has.
//
// Collectives take part with the whole warp (mask FULL_WARP), and a block is whole warps.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define WARP 32u
#define FULL_WARP 0xffffffffu

#if defined(__CUDACC__)
#include "cuda.cuh"
#else
#include "shim/device.h"
#endif

// The threads of a warp that hold a value each hold the sum of all afterwards, in a fixed order:
// lane + lane^16, then ^8, ^4, ^2, ^1.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(FULL_WARP, value, step);
    }
    return value;
}

// The largest value of a warp, in each of its threads. NaN loses against numbers.
__device__ __forceinline__ float warp_max(float value) {
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
    }
    return value;
}

// "One arithmetic": lane i + lane i+4, then i + i+2, then i + i+1.
__device__ __forceinline__ float tree8(const float (&lanes)[8]) {
    float a = lanes[0] + lanes[4], b = lanes[1] + lanes[5];
    float c = lanes[2] + lanes[6], d = lanes[3] + lanes[7];
    return (a + c) + (b + d);
}

// The same tree over eight neighbouring threads of a warp, each with a lane; the result is in all
// eight (float addition commutes, so each of them adds the same pairs).
__device__ __forceinline__ float tree8_threads(float lane) {
    lane += __shfl_xor_sync(FULL_WARP, lane, 4);
    lane += __shfl_xor_sync(FULL_WARP, lane, 2);
    lane += __shfl_xor_sync(FULL_WARP, lane, 1);
    return lane;
}

__device__ __forceinline__ float bf16_to_f32(u16 bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
}
