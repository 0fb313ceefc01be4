// Kernels that test the shim: correct ones compute, and faulty ones are reported. They are not
// among the PTX.
#include "../copy.cuh"
#include "../moeba.cuh"

struct ProbeParams {
    // Inputs.
    Address<const u8> a;
    Address<const u8> b;
    // Outputs.
    Address<u8> out;
    Address<u8> back;
    float factor;
    u32 n;
    // The fault of probe_faults.
    u32 what;
    u32 unused;
};
static_assert(sizeof(ProbeParams) == 48);

// out = factor a + b
KERNEL(probe_axpy, 256, ProbeParams) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    Global<const float> x = as<const float>(p.a), y = as<const float>(p.b);
    if (i < p.n) as<float>(p.out)[i] = fmaf(p.factor, x[i], y[i]);
}

// out[block] = the sum of n numbers of a, through every kind of exchange that a block has.
KERNEL(probe_sum, 1024, ProbeParams) {
    Global<const u32> x = as<const u32>(p.a);
    Global<u32> out = as<u32>(p.out);
    u32 n = p.n;
    SHARED(u32, partial, 32);
    SHARED_DYNAMIC(u32, total);
    u32 sum = 0;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
    sum = warp_sum(sum);
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) partial[warp] = sum;
    if (threadIdx.x == 0) total[0] = 0u;
    __syncthreads();
    if (lane == 0) atomicAdd(&total[0], partial[warp]);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = total[0];
}

// Shuffles and votes: out is [12, 32].
KERNEL(probe_warp, 32, ProbeParams) {
    Global<u32> out = as<u32>(p.out);
    u32 lane = threadIdx.x;
    out[lane] = __shfl_sync(FULL_WARP, lane * lane, 5);
    out[32 + lane] = __shfl_sync(FULL_WARP, lane, lane + 3, 8);
    out[64 + lane] = __shfl_xor_sync(FULL_WARP, lane, 9);
    out[96 + lane] = __shfl_xor_sync(FULL_WARP, lane, 8, 8);
    out[128 + lane] = __shfl_down_sync(FULL_WARP, lane, 3);
    out[160 + lane] = __shfl_up_sync(FULL_WARP, lane, 3, 16);
    out[192 + lane] = __ballot_sync(FULL_WARP, lane % 3 == 0);
    out[224 + lane] = static_cast<u32>(__any_sync(FULL_WARP, lane == 7));
    out[256 + lane] = static_cast<u32>(__all_sync(FULL_WARP, lane < 31));
    out[288 + lane] = __byte_perm(0x33221100u, 0x77665544u, 0x5140u + lane % 8);
    out[320 + lane] = static_cast<u32>(dp4a(static_cast<i32>(0x80ff7f01u), 0x01020304, -5));
    out[352 + lane] = static_cast<u32>(__float2int_rn(static_cast<float>(lane) * 0.5f - 4.0f));
}

// Halves to f32 in `out`, and back to halves.
KERNEL(probe_half, 256, ProbeParams) {
    Global<const u16> in = as<const u16>(p.a);
    Global<float> wide = as<float>(p.out);
    Global<u16> back = as<u16>(p.back);
    for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) {
        float value = f16_to_f32(in[i]);
        wide[i] = value;
        back[i] = f32_to_f16(value);
    }
}

KERNEL(probe_round_half, 256, ProbeParams) {
    Global<const float> in = as<const float>(p.a);
    Global<u16> out = as<u16>(p.out);
    for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) out[i] = f32_to_f16(in[i]);
}

// d = a (16x16, rows) * b (16x8), f16; a and b by load_matrices from shared memory: a as it lies,
// b [k][column] transposed.
KERNEL(probe_mma_f16, 32, ProbeParams) {
    Global<const u16> a = as<const u16>(p.a), b = as<const u16>(p.b);
    Global<float> d = as<float>(p.out);
    SHARED(u16, a_smem, 256);
    SHARED(u16, b_smem, 128);
    u32 lane = threadIdx.x;
    for (u32 i = lane; i < 256; i += WARP) a_smem[i] = a[i];
    for (u32 i = lane; i < 128; i += WARP) b_smem[i] = b[i];
    __syncwarp();
    u32 a_parts[4], b_parts[4];
    u32 row = lane % 8, matrix = lane / 8;
    load_matrices(a_parts, a_smem + ((row + matrix % 2 * 8) * 16 + matrix / 2 * 8));
    load_matrices_transposed(b_parts, b_smem + (row + matrix % 2 * 8) * 8);
    float sums[4] = {0, 0, 0, 0};
    mma_f16(sums, a_parts, {b_parts[0], b_parts[1]});
    for (u32 i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

// d = a (16x32, rows) * b (8 columns of 32), i8.
KERNEL(probe_mma_s8, 32, ProbeParams) {
    Global<const u32> a = as<const u32>(p.a), b = as<const u32>(p.b);
    Global<i32> d = as<i32>(p.out);
    u32 lane = threadIdx.x, group = lane / 4, quad = lane % 4;
    u32 parts[4], columns[2];
    for (u32 i = 0; i < 4; i++) parts[i] = a[(group + i % 2 * 8) * 8 + i / 2 * 4 + quad];
    for (u32 i = 0; i < 2; i++) columns[i] = b[group * 8 + i * 4 + quad];
    i32 sums[4] = {1, 1, 1, 1};
    mma_s8(sums, parts, columns);
    for (u32 i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + quad * 2 + i % 2] = sums[i] - 1;
}

// out[block] = the sum of n floats of a, which come through shared memory in tiles of 128 bytes,
// the last one short, while the tile before is added.
KERNEL(probe_copy, 32, ProbeParams) {
    Global<const float> x = as<const float>(p.a);
    Global<float> out = as<float>(p.out);
    SHARED(float, tiles, 64);
    Shared<u8> bytes = as<u8>(tiles);
    u32 n = p.n, steps = (n + 31) / 32, i = threadIdx.x;
    float sum = 0.0f;
    for (u32 next = 0; next <= steps; next++) {
        u32 first = 32 * next, end = next < steps ? min(n - first, 32u) * 4 : 0;
        __syncwarp();
        if (16 * i < end) {
            Global<const u8> from = as<const u8>(x + first) + 16 * i;
            copy_async(bytes + (next % 2 * 128 + 16 * i), from, min(16u, end - 16 * i));
        }
        commit_copies();
        if (next == 0) continue;
        wait_for_copies<1>();
        __syncwarp();
        if (first - 32 + i < n) sum += tiles[(next - 1) % 2 * 32 + i];
    }
    sum = warp_sum(sum);
    if (i == 0) out[0] = sum;
}

// ---- faulty ones: `what` chooses the fault

KERNEL(probe_faults, 64, ProbeParams) {
    Global<float> out = as<float>(p.out);
    u32 n = p.n, what = p.what;
    SHARED(float, tile, 64);
    u32 i = threadIdx.x;
    if (what == 0) out[n + i] = 1.0f;                       // past the end
    if (what == 1) *as<u32>(as<u8>(out) + 2) = 1u;          // not aligned
    if (what == 2) out[i] = out[i] + 1.0f;                  // of fresh memory
    if (what == 3) tile[i + 1] = 1.0f;                      // past a shared array
    if (what == 4) out[i] = tile[i];                        // of a fresh shared array
    if (what == 5 || what == 6) {
        tile[i] = 1.0f;
        if (what == 6) __syncwarp();                        // orders within a warp only
        __syncthreads();
        float other = tile[i ^ 32];
        if (what == 6) __syncthreads();                     // 5: others may still read
        tile[i] = other + 1.0f;
    }
    if (what == 7 && i < 32) __syncthreads();               // not reached by all
    if (what == 8 && i != 3) __syncwarp();
    if (what == 9) __syncwarp(1u << (i % WARP));            // not the whole warp
    if (what == 10) {
        Global<float> nowhere = nullptr;
        nowhere[i] = 1.0f;
    }
    if (what == 11) {
        if (i % 2 == 0) {
            __syncwarp();
        } else {
            __any_sync(FULL_WARP, 1);
        }
    }
    if (what == 12) {
        volatile char deep[80 * 1024];                      // more than a thread's stack
        for (u32 j = 0; j < sizeof(deep); j += 64) deep[j] = 1;
    }
    if (what == 19) {
        tile[i] = 1.0f;
        __syncthreads();
    }
    if (what >= 14 && what <= 20 && i < 4) {
        Shared<u8> to = as<u8>(tile) + 16 * i;
        Global<const u8> from = p.a + 16 * i;
        if (what == 14) copy_async(to + 4, from, 16);       // not aligned
        if (what == 15) copy_async(to, from + 8, 8);
        if (what == 16) copy_async(to, from + 64 * n, 16);  // past the end
        if (what >= 17) copy_async(to, from, what == 20 ? 12 : 16);
        commit_copies();
        if (what == 18) wait_for_copies<1>();               // not for this one
        if (what >= 19) wait_for_copies<0>();
        if (what != 17) out[i] = tile[4 * i + 3];           // 17: ends before it; 20: never copied
    }
    if (what == 19 && i >= 32) out[i] = tile[i - 32];       // another's, no barrier
    if (what == 13) {
        if (i < 32) tile[i] = 1.0f;
        float own = i < 32 ? static_cast<float>(tile[i ^ 1]) : 0.0f;  // within a warp, no barrier
        out[i] = own;
    }
}
