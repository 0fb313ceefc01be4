// copy.cuh on the CPU. A copy happens when its thread waits for it: the bytes of shared memory count
// as never written until then, and what the copy brings is what device memory holds by then.
#pragma once

#include "../moeba.cuh"

namespace shim {
void begin_copy(const Piece* to, u64 to_address, const Piece* from, u64 from_address, u32 bytes);
void commit_copies();
void wait_for_copies(u32 n_groups);
}  // namespace shim

template <class T>
inline u32 address_bits(const shim::Pointer<T>& pointer) {
    return static_cast<u32>(pointer.address());
}
inline void copy_async(const Shared<u8>& to, const Global<const u8>& from, u32 bytes) {
    shim::begin_copy(to.piece(), to.address(), from.piece(), from.address(), bytes);
}
inline void commit_copies() { shim::commit_copies(); }
template <u32 N>
inline void wait_for_copies() {
    shim::wait_for_copies(N);
}
