// CUDA's built-in names, types and functions, as far as kernels use them.
#pragma once

#define threadIdx (shim::here->thread)
#define blockIdx (shim::here->block)
#define blockDim (shim::here->n_threads)
#define gridDim (shim::here->n_blocks)

// ---- vectors: as wide as one load

#define SHIM_VECTORS(T, NAME)                                                            \
    struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                   \
    struct alignas(4 * sizeof(T)) NAME##4 { T x, y, z, w; };                             \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                           \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTORS(float, float)
SHIM_VECTORS(i32, int)
SHIM_VECTORS(u32, uint)
SHIM_VECTORS(u16, ushort)
SHIM_VECTORS(u8, uchar)
SHIM_VECTORS(i8, char)
#undef SHIM_VECTORS

// ---- numbers

inline u32 __float_as_uint(float x) { return shim::taken<u32>(shim::gift_of(x)); }
inline i32 __float_as_int(float x) { return shim::taken<i32>(shim::gift_of(x)); }
inline float __uint_as_float(u32 x) { return shim::taken<float>(shim::gift_of(x)); }
inline float __int_as_float(i32 x) { return shim::taken<float>(shim::gift_of(x)); }

// To nearest, ties to even; what does not fit becomes the nearest that does, NaN 0.
inline i32 __float2int_rn(float x) {
    if (!(x == x)) return 0;
    if (x >= 2147483648.0f) return 2147483647;
    if (x <= -2147483648.0f) return -2147483647 - 1;
    return static_cast<i32>(rintf(x));
}

template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline i32 __popc(u32 x) { return __builtin_popcount(x); }
inline i32 __ffs(i32 x) { return __builtin_ffs(x); }
inline i32 __clz(i32 x) { return x ? __builtin_clz(static_cast<u32>(x)) : 32; }

// Four bytes of the eight of (y, x), chosen by the lower nibbles of s (no sign replication).
inline u32 __byte_perm(u32 x, u32 y, u32 s) {
    u64 all = static_cast<u64>(y) << 32 | x;
    u32 out = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 from = s >> (4 * i) & 7;
        out |= static_cast<u32>(all >> (8 * from) & 0xff) << (8 * i);
    }
    return out;
}

inline float two_to_the(float x) { return exp2f(x); }

// c plus the products of the four signed bytes of a and b.
inline i32 dp4a(i32 a, i32 b, i32 c) {
    for (u32 i = 0; i < 4; i++) {
        i32 product = static_cast<i8>(a >> (8 * i)) * static_cast<i8>(b >> (8 * i));
        c = static_cast<i32>(static_cast<u32>(c) + static_cast<u32>(product));
    }
    return c;
}

// Byte by byte, without a carry from one to the next.
inline u32 __vsub4(u32 a, u32 b) {
    u32 out = 0;
    for (u32 i = 0; i < 32; i += 8) out |= (((a >> i) - (b >> i)) & 0xff) << i;
    return out;
}
inline u32 __vadd4(u32 a, u32 b) {
    u32 out = 0;
    for (u32 i = 0; i < 32; i += 8) out |= (((a >> i) + (b >> i)) & 0xff) << i;
    return out;
}
// 0xff where the bytes are equal, 0x00 elsewhere.
inline u32 __vcmpeq4(u32 a, u32 b) {
    u32 out = 0;
    for (u32 i = 0; i < 32; i += 8) out |= ((a ^ b) >> i & 0xff ? 0 : 0xffu) << i;
    return out;
}
inline u32 __vcmpne4(u32 a, u32 b) { return ~__vcmpeq4(a, b); }

float f16_to_f32(u16 bits);
u16 f32_to_f16(float value);

// ---- memory

template <class T>
inline std::remove_const_t<T> __ldg(const Global<T>& p) { return *p; }

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace shim {
template <class T, class F>
inline T atomic(const Pointer<T>& p, F change) {
    u8* bytes = checked<sizeof(T), alignof(T)>(p.piece(), p.address(), Access::Atomic);
    T old, next;
    memcpy(&old, bytes, sizeof(T));
    next = change(old);
    memcpy(bytes, &next, sizeof(T));
    return old;
}
template <class T>
struct Same {
    using Type = T;
};
template <class T>
using Value = typename Same<T>::Type;
}  // namespace shim

template <class T>
inline T atomicAdd(const shim::Pointer<T>& p, shim::Value<T> v) {
    return shim::atomic(p, [=](T old) { return static_cast<T>(old + v); });
}
template <class T>
inline T atomicMax(const shim::Pointer<T>& p, shim::Value<T> v) {
    return shim::atomic(p, [=](T old) { return old < v ? v : old; });
}
template <class T>
inline T atomicMin(const shim::Pointer<T>& p, shim::Value<T> v) {
    return shim::atomic(p, [=](T old) { return v < old ? v : old; });
}
template <class T>
inline T atomicExch(const shim::Pointer<T>& p, shim::Value<T> v) {
    return shim::atomic(p, [=](T) { return v; });
}
template <class T>
inline T atomicCAS(const shim::Pointer<T>& p, shim::Value<T> expected, shim::Value<T> v) {
    return shim::atomic(p, [=](T old) { return old == expected ? v : old; });
}
template <class T>
inline T atomicOr(const shim::Pointer<T>& p, shim::Value<T> v) {
    return shim::atomic(p, [=](T old) { return old | v; });
}

// ---- threads together

inline void __syncthreads() { shim::block_barrier(); }
inline void __syncwarp(u32 mask = FULL_WARP) {
    shim::exchange(shim::Collective::Sync, mask, shim::Gift{});
}

template <class T>
inline T __shfl_sync(u32 mask, T value, u32 from, u32 width = WARP) {
    u32 lane = shim::lane();
    const shim::Gift* all = shim::exchange(shim::Collective::Shuffle, mask, shim::gift_of(value));
    return shim::taken<T>(all[(lane & ~(width - 1)) + (from & (width - 1))]);
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T value, u32 flip, u32 width = WARP) {
    u32 lane = shim::lane(), from = lane ^ flip;
    const shim::Gift* all = shim::exchange(shim::Collective::Shuffle, mask, shim::gift_of(value));
    return shim::taken<T>(all[from / width <= lane / width ? from : lane]);
}
template <class T>
inline T __shfl_down_sync(u32 mask, T value, u32 by, u32 width = WARP) {
    u32 lane = shim::lane();
    const shim::Gift* all = shim::exchange(shim::Collective::Shuffle, mask, shim::gift_of(value));
    return shim::taken<T>(all[(lane & (width - 1)) + by < width ? lane + by : lane]);
}
template <class T>
inline T __shfl_up_sync(u32 mask, T value, u32 by, u32 width = WARP) {
    u32 lane = shim::lane();
    const shim::Gift* all = shim::exchange(shim::Collective::Shuffle, mask, shim::gift_of(value));
    return shim::taken<T>(all[(lane & (width - 1)) >= by ? lane - by : lane]);
}

inline u32 __ballot_sync(u32 mask, int predicate) {
    u32 mine = predicate != 0, votes = 0;
    const shim::Gift* all = shim::exchange(shim::Collective::Vote, mask, shim::gift_of(mine));
    for (u32 i = 0; i < WARP; i++) votes |= all[i].words[0] << i;
    return votes;
}
inline int __any_sync(u32 mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(u32 mask, int predicate) {
    return __ballot_sync(mask, predicate) == FULL_WARP;
}

// Matrices over the warp; cuda.cuh says how fragments lie.
void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
void mma_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
void load_matrices(u32 (&r)[4], const Shared<const u16>& row);
void load_matrices_transposed(u32 (&r)[4], const Shared<const u16>& row);
