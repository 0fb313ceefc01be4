// The CPU's side of moeba.cuh: the parts of CUDA C++ that kernels use, as C++17. A block's threads
// are fibers that run until they wait for one another (run.cc). Pointers know the piece of memory
// that they came from, and each access is checked:
//
//   - within that piece, and aligned;
//   - reads only bytes that were written;
//   - in shared memory, no two threads meet in a byte between barriers if one of them writes.
//
// A fault ends the launch with a sentence that names kernel, block, thread, address and size.
// No exceptions and nothing of the C++ library that would have to be linked.
#pragma once

#include <math.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "abi.h"

#define __device__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(N) __attribute__((aligned(N)))

namespace shim {

struct Races;

// A piece of memory: of the device, or an array that the block shares.
struct Piece {
    u64 address;
    u64 size;
    u8* bytes;
    u8* shadow;
    // The launch touched bytes of this range.
    mutable u64 low, high;
    // The accesses since the last barrier; shared memory only.
    Races* races;
    // The name of a shared array; null for device memory.
    const char* name;
};

// The position of the running thread.
struct Here {
    ShimDim3 thread, block, n_threads, n_blocks;
};

extern __thread const Here* here;

enum class Access { Read, Write, Atomic };

// Ends the launch: these do not return.
[[noreturn]] void fail_access(const Piece* piece, u64 address, u32 size, Access access);
[[noreturn]] void fail_uninitialised(const Piece* piece, u64 address, u32 size);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Records an access to shared memory; ends the launch if it races with another.
void note_race(const Piece* piece, u64 offset, u32 size, Access access);

// Marks bytes as read; false if one of them was never written.
template <class WORD>
inline bool mark_word(u8* shadow, u8 mark) {
    const WORD ones = static_cast<WORD>(0x0101010101010101ull);
    WORD bits;
    memcpy(&bits, shadow, sizeof(WORD));
    if ((bits & ones) != ones) return false;
    bits |= static_cast<WORD>(ones * mark);
    memcpy(shadow, &bits, sizeof(WORD));
    return true;
}

template <u32 SIZE>
inline bool mark_read(u8* shadow, u8 mark) {
    u32 i = 0;
    for (; i + 8 <= SIZE; i += 8) {
        if (!mark_word<u64>(shadow + i, mark)) return false;
    }
    for (; i + 4 <= SIZE; i += 4) {
        if (!mark_word<u32>(shadow + i, mark)) return false;
    }
    for (; i < SIZE; i++) {
        if (!mark_word<u8>(shadow + i, mark)) return false;
    }
    return true;
}

// The bytes of an access that has passed every check.
template <u32 SIZE, u32 ALIGN>
inline u8* checked(const Piece* piece, u64 address, Access access) {
    u64 offset = piece ? address - piece->address : 0;
    if (!piece || offset > piece->size || piece->size - offset < SIZE || address % ALIGN) {
        fail_access(piece, address, SIZE, access);
    }
    u8* shadow = piece->shadow + offset;
    if (access == Access::Write) {
        memset(shadow, SHIM_WRITTEN | SHIM_WRITTEN_NOW, SIZE);
    } else {
        u8 mark = access == Access::Read ? SHIM_READ_NOW : SHIM_WRITTEN_NOW;
        if (!mark_read<SIZE>(shadow, mark)) fail_uninitialised(piece, address, SIZE);
    }
    if (offset < piece->low) piece->low = offset;
    if (offset + SIZE > piece->high) piece->high = offset + SIZE;
    if (piece->races) note_race(piece, offset, SIZE, access);
    return piece->bytes + offset;
}

template <class T>
class Pointer;

// The type of `p[i]` and `*p` if T is not const: it distinguishes reads from writes.
template <class T>
class Reference {
public:
    Reference(const Piece* piece, u64 address) : piece_(piece), address_(address) {}
    Reference(const Reference&) = default;

    operator T() const {
        T value;
        memcpy(&value, checked<sizeof(T), alignof(T)>(piece_, address_, Access::Read), sizeof(T));
        return value;
    }

    Reference& operator=(const T& value) {
        u8* to = checked<sizeof(T), alignof(T)>(piece_, address_, Access::Write);
        memcpy(to, &value, sizeof(T));
        return *this;
    }

    Reference& operator=(const Reference& other) { return *this = static_cast<T>(other); }

    template <class V>
    Reference& operator+=(V value) { return *this = static_cast<T>(static_cast<T>(*this) + value); }
    template <class V>
    Reference& operator-=(V value) { return *this = static_cast<T>(static_cast<T>(*this) - value); }
    template <class V>
    Reference& operator*=(V value) { return *this = static_cast<T>(static_cast<T>(*this) * value); }
    template <class V>
    Reference& operator|=(V value) { return *this = static_cast<T>(static_cast<T>(*this) | value); }

    Pointer<T> operator&() const { return Pointer<T>(piece_, address_); }

private:
    const Piece* piece_;
    u64 address_;
};

// `Global<T>` and `Shared<T>`.
template <class T>
class Pointer {
    using Value = std::remove_const_t<T>;
    static_assert(std::is_trivially_copyable<Value>::value, "memory holds plain values");

public:
    Pointer() = default;
    Pointer(decltype(nullptr)) {}
    Pointer(const Piece* piece, u64 address) : piece_(piece), address_(address) {}

    template <class U, class = std::enable_if_t<std::is_same<const U, T>::value>>
    Pointer(const Pointer<U>& other) : piece_(other.piece()), address_(other.address()) {}

    auto operator[](i64 i) const {
        u64 address = address_ + static_cast<u64>(i) * sizeof(T);
        if constexpr (std::is_const<T>::value) {
            Value value;
            const u8* from = checked<sizeof(T), alignof(T)>(piece_, address, Access::Read);
            memcpy(&value, from, sizeof(T));
            return value;
        } else {
            return Reference<T>(piece_, address);
        }
    }

    auto operator*() const { return (*this)[0]; }

    Pointer operator+(i64 n) const {
        return Pointer(piece_, address_ + static_cast<u64>(n) * sizeof(T));
    }
    Pointer operator-(i64 n) const { return *this + -n; }
    Pointer& operator+=(i64 n) { return *this = *this + n; }
    Pointer& operator-=(i64 n) { return *this = *this - n; }
    Pointer& operator++() { return *this += 1; }

    explicit operator bool() const { return address_ != 0; }
    bool operator==(const Pointer& other) const { return address_ == other.address_; }
    bool operator!=(const Pointer& other) const { return address_ != other.address_; }
    bool operator<(const Pointer& other) const { return address_ < other.address_; }

    const Piece* piece() const { return piece_; }
    u64 address() const { return address_; }

private:
    const Piece* piece_ = nullptr;
    u64 address_ = 0;
};

// The array of this name of the running block; the first thread that comes here makes it.
const Piece* shared_array(const void* key, const char* name, u64 bytes, u64 align);
const Piece* dynamic_shared();
// The piece of device memory at this address, or null.
const Piece* piece_at(u64 address);

void block_barrier();

enum class Collective { Sync, Shuffle, Vote, Matrix };

// The value that a thread gives to the others of its warp.
struct Gift {
    u32 words[8];
};

// Gives, waits for the whole warp, and returns the 32 gifts; they stay until the next collective
// but one.
const Gift* exchange(Collective kind, u32 mask, const Gift& gift);
u32 lane();

template <class T>
inline Gift gift_of(const T& value) {
    static_assert(sizeof(T) <= sizeof(Gift), "too large for the threads of a warp to exchange");
    Gift gift = {};
    memcpy(&gift, &value, sizeof(T));
    return gift;
}

template <class T>
inline T taken(const Gift& gift) {
    T value;
    memcpy(&value, &gift, sizeof(T));
    return value;
}

// ---- entry points

// The piece of a pointer among the parameters, or null.
const Piece* argument_piece(u64 address);

// A pointer among the parameters: the launch gives its address alone.
template <class T>
class Address {
public:
    operator Pointer<T>() const { return Pointer<T>(argument_piece(address_), address_); }
    explicit operator bool() const { return address_ != 0; }
    auto operator[](i64 i) const { return static_cast<Pointer<T>>(*this)[i]; }
    auto operator*() const { return (*this)[0]; }
    Pointer<T> operator+(i64 n) const { return static_cast<Pointer<T>>(*this) + n; }

private:
    u64 address_;
};

template <class PARAMS, void (*BODY)(const PARAMS&)>
void run_thread(const void* params) {
    BODY(*static_cast<const PARAMS*>(params));
}

// Adds a kernel to the list before main.
struct Registration {
    explicit Registration(ShimKernel* kernel);
};

}  // namespace shim

#define AT_LEAST(BLOCKS, MAX_THREADS) MAX_THREADS
#define KERNEL(NAME, MAX_THREADS, PARAMS)                                               \
    static void NAME(const PARAMS& p);                                                  \
    static ShimKernel shim_kernel_##NAME = {                                            \
        #NAME, #PARAMS, sizeof(PARAMS), MAX_THREADS, shim::run_thread<PARAMS, &NAME>,   \
        nullptr};                                                                       \
    static const shim::Registration shim_registration_##NAME(&shim_kernel_##NAME);      \
    static void NAME(const PARAMS& p)

template <class T>
using Address = shim::Address<T>;
template <class T>
using Global = shim::Pointer<T>;
template <class T>
using Shared = shim::Pointer<T>;

#define SHARED(T, NAME, N)                                                              \
    static const char shim_key_##NAME = 0;                                              \
    Shared<T> NAME = shim::shared_pointer<T>(                                           \
        shim::shared_array(&shim_key_##NAME, #NAME, sizeof(T) * (N), alignof(T)))
#define SHARED_DYNAMIC(T, NAME) Shared<T> NAME = shim::shared_pointer<T>(shim::dynamic_shared())

namespace shim {
template <class T>
inline Pointer<T> shared_pointer(const Piece* piece) {
    return Pointer<T>(piece, piece->address);
}
}  // namespace shim

template <class U, class T>
inline Global<U> as(const Global<T>& pointer) {
    static_assert(std::is_const<U>::value || !std::is_const<T>::value, "this drops a const");
    return Global<U>(pointer.piece(), pointer.address());
}

template <class U, class T>
inline Global<U> as(const Address<T>& pointer) {
    return as<U>(static_cast<Global<T>>(pointer));
}

template <class T>
inline Global<T> global(u64 address) {
    return Global<T>(shim::piece_at(address), address);
}

#include "cuda.h"
