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

// cap·tanh(x / cap). Twin: `Kernels::soft_cap`.
__device__ __forceinline__ float soft_cap(float x, float cap) {
    return cap * (2.0f * sigmoid(2.0f * x / cap) - 1.0f);
}

// The other activations of src/backend/ops/expert.rs. Twins: src/backend/cpu/expert.

// The smaller of NaN and 7 is 7, and a clamped NaN is NaN, as in the twin.
__device__ __forceinline__ float clamp(float x, float limit) {
    return x < -limit ? -limit : x > limit ? limit : x;
}

__device__ __forceinline__ float swiglu_clamped(float gate, float up) {
    gate = fminf(gate, 7.0f);
    return gate * sigmoid(1.702f * gate) * (clamp(up, 7.0f) + 1.0f);
}

// A comparison, since fmaxf(−0, 0) may be −0; the twin gives 0.
__device__ __forceinline__ float relu(float x) { return x > 0.0f ? x : 0.0f; }

__device__ __forceinline__ float geglu(float gate, float up) {
    float cube = gate * gate * gate;
    return gate * sigmoid(1.5957691f * (gate + 0.044715f * cube)) * up;
}

__device__ __forceinline__ float swiglu_limited(float gate, float up, float limit) {
    return swiglu(fminf(gate, limit), clamp(up, limit));
}

__device__ __forceinline__ float swiglu_capped(float gate, float up, float limit) {
    return fminf(gate * sigmoid(gate), limit) * clamp(up, limit);
}

// The caps are tanhs; an `up_limit` of 0 is none.
__device__ __forceinline__ float situ(float gate, float up, float limit, float up_limit) {
    if (up_limit > 0.0f) up = soft_cap(up, up_limit);
    return soft_cap(gate, limit) * sigmoid(gate) * up;
}

// ln(1 + x) for 0 ≤ x ≤ 1, step by step as in the twin.
__device__ __forceinline__ float ln_1p(float x) {
    float s = x / (2.0f + x), square = s * s;
    float series = (1.0f / 15.0f) * square;
    series = (series + 1.0f / 13.0f) * square;
    series = (series + 1.0f / 11.0f) * square;
    series = (series + 1.0f / 9.0f) * square;
    series = (series + 1.0f / 7.0f) * square;
    series = (series + 1.0f / 5.0f) * square;
    series = (series + 1.0f / 3.0f) * square;
    float twice = s + s;
    return twice + twice * series;
}

__device__ __forceinline__ float softplus(float x) {
    return fmaxf(x, 0.0f) + ln_1p(moeba_exp(-fabsf(x)));
}
