// A softmax by one warp over a row in shared memory. Twin: `softmax` of src/simd/scalar.rs, to the
// bit: the sum in eight lanes and the tree. Rows are a few hundred values, so eight threads add.
#pragma once

#include "exp.cuh"

// x[i] = e^(x[i] − max) / Σ for i < n. The caller synchronises the warp before; this does after.
__device__ __forceinline__ void softmax_by_warp(Shared<float> x, u32 n) {
    u32 lane = threadIdx.x % WARP;
    float largest = -INFINITY;
    for (u32 i = lane; i < n; i += WARP) {
        float value = x[i];
        largest = value > largest ? value : largest;
    }
    largest = warp_max(largest);
    for (u32 i = lane; i < n; i += WARP) x[i] = moeba_exp(x[i] - largest);
    __syncwarp();
    float sum = 0.0f;
    if (lane < 8) {
        for (u32 i = lane; i < n; i += 8) sum += x[i];
    }
    // The first eight threads have the sum.
    sum = __shfl_sync(FULL_WARP, tree8_threads(sum), 0);
    float inverse = 1.0f / sum;
    __syncwarp();
    for (u32 i = lane; i < n; i += WARP) x[i] *= inverse;
    __syncwarp();
}
