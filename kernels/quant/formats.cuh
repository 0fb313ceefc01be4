// Every block format that the engine computes with.
#pragma once

#include "bits.cuh"
#include "blocks_32.cuh"
#include "grids.cuh"
#include "k_quants.cuh"
#include "tables.cuh"
#include "ternary.cuh"

// X(the name in a kernel's, the format)
#define FOR_EACH_FORMAT(X)                                                                   \
    X(q4_0, Q4_0) X(q4_1, Q4_1) X(q5_0, Q5_0) X(q5_1, Q5_1) X(q8_0, Q8_0) X(q8_1, Q8_1)      \
    X(q2_k, Q2_K) X(q3_k, Q3_K) X(q4_k, Q4_K) X(q5_k, Q5_K) X(q6_k, Q6_K)                    \
    X(iq1_s, IQ1_S) X(iq1_m, IQ1_M) X(iq2_xxs, IQ2_XXS) X(iq2_xs, IQ2_XS) X(iq2_s, IQ2_S)    \
    X(iq3_xxs, IQ3_XXS) X(iq3_s, IQ3_S) X(iq4_nl, IQ4_NL) X(iq4_xs, IQ4_XS)                  \
    X(tq1_0, TQ1_0) X(tq2_0, TQ2_0) X(mxfp4, MXFP4) X(nvfp4, NVFP4) X(q1_0, Q1_0) X(q2_0, Q2_0)
