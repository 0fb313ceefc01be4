// The one exponential, step by step as src/simd/exp.rs, and what is built on it.
#pragma once

#include "moeba.cuh"

// 2^n for −126 ≤ n ≤ 127; any other n is what a NaN left, and NaN absorbs it.
__device__ __forceinline__ float power_of_two(i32 n) {
    return __uint_as_float(static_cast<u32>(n + 127) << 23);
}

__device__ __forceinline__ float moeba_exp(float x) {
    // Comparisons that a NaN passes.
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float rounder = 12582912.0f;
    float shifted = fmaf(x, 1.44269504088896340736f, rounder);
    float n = shifted - rounder;
    float r = fmaf(n, -3.1946183e-5f, fmaf(n, -0.69311523f, x));
    float q = fmaf(0.0013814599f, r, 0.008368717f);
    q = fmaf(q, r, 0.04166839f);
    q = fmaf(q, r, 0.16666521f);
    q = fmaf(q, r, 0.49999994f);
    float p = fmaf(r * r, q, r) + 1.0f;
    i32 whole = static_cast<i32>(__float_as_uint(shifted) - __float_as_uint(rounder));
    i32 half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + moeba_exp(-x)); }

__device__ __forceinline__ float swiglu(float gate, float up) {
    return gate / (1.0f + moeba_exp(-gate)) * up;
}
