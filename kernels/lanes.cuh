// Products of rows in shared memory by the order of "One arithmetic": eight threads have a row, and
// thread l of them the elements l, l + 8, …, which lie behind each other.
#pragma once

#include "moeba.cuh"

// Elements of a lane: whole quads and an odd number of them, so that the eight threads of a row
// read from different banks.
__device__ __forceinline__ u32 lane_stride(u32 dim) { return 4 * ((dim + 31) / 32 | 1); }

// value[n] of eight threads → the sum of value[l] in thread l, by the tree of "One arithmetic":
// lanes four apart first, then two, then one.
__device__ __forceinline__ float scatter_sums(const float* value) {
    u32 lane = threadIdx.x % 8;
    float four[4], two[2];
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        float keep = lane & 4 ? value[n + 4] : value[n], give = lane & 4 ? value[n] : value[n + 4];
        four[n] = keep + __shfl_xor_sync(FULL_WARP, give, 4);
    }
#pragma unroll
    for (u32 n = 0; n < 2; n++) {
        float keep = lane & 2 ? four[n + 2] : four[n], give = lane & 2 ? four[n] : four[n + 2];
        two[n] = keep + __shfl_xor_sync(FULL_WARP, give, 2);
    }
    float keep = lane & 1 ? two[1] : two[0], give = lane & 1 ? two[0] : two[1];
    return keep + __shfl_xor_sync(FULL_WARP, give, 1);
}
