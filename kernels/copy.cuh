// Copies from device memory to shared memory that run while the thread goes on: cp.async, from
// compute capability 8.0 on.
#pragma once

#include "moeba.cuh"

#if defined(__CUDACC__)
// The lowest bits of a pointer's address.
template <class T>
__device__ __forceinline__ u32 address_bits(T* pointer) {
    return static_cast<u32>(reinterpret_cast<u64>(pointer));
}

// Begins to copy `bytes` bytes, at most 16, to shared memory, where the rest of the 16 becomes
// anything; both addresses are multiples of 16. The copies of a thread since its last commit_copies
// are a group, and wait_for_copies<N> waits until all of its groups but the last N are done; other
// threads see them behind a barrier. Turing copies at once.
__device__ __forceinline__ void copy_async(Shared<u8> to, Global<const u8> from, u32 bytes) {
#if __CUDA_ARCH__ >= 800
    u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
#else
    // Memory is allocated in multiples of 16 bytes, and the rest is never read.
    *as<uint4>(to) = *as<const uint4>(from);
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <u32 N>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
#else
#include "shim/copy.h"
#endif
