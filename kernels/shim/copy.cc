// Copies to shared memory that a thread waits for later.
#include "copy.h"

#include "run.h"

namespace shim {

static constexpr u32 COPY_BYTES = 16;

static bool holds(const Piece* piece, u64 address, u32 size) {
    u64 offset = piece ? address - piece->address : 0;
    return piece && offset <= piece->size && piece->size - offset >= size &&
           address % COPY_BYTES == 0;
}

void begin_copy(const Piece* to, u64 to_address, const Piece* from, u64 from_address, u32 bytes) {
    Thread* thread = this_thread();
    if (bytes == 0 || bytes > COPY_BYTES) fail("copies %u bytes at a time", bytes);
    if (!holds(to, to_address, COPY_BYTES)) {
        fail_access(to, to_address, COPY_BYTES, Access::Write);
    }
    if (!holds(from, from_address, bytes)) fail_access(from, from_address, bytes, Access::Read);
    if (!to->races || from->races) fail("copies that do not go from device to shared memory");
    if (thread->n_copies == MAX_COPIES) fail("more than %u copies at a time", MAX_COPIES);
    u64 offset = to_address - to->address, start = from_address - from->address;
    note_race(to, offset, COPY_BYTES, Access::Write);
    memset(to->shadow + offset, 0, COPY_BYTES);
    if (start < from->low) from->low = start;
    if (start + bytes > from->high) from->high = start + bytes;
    thread->copies[thread->n_copies++] = Copy{to, from, offset, start, bytes, thread->group};
}

// Bytes that were never written stay so, and so do those behind the copy.
static void finish(const Copy& copy) {
    note_race(copy.to, copy.to_offset, COPY_BYTES, Access::Write);
    for (u32 i = 0; i < copy.bytes; i++) {
        u8& shadow = copy.from->shadow[copy.from_offset + i];
        if (!(shadow & SHIM_WRITTEN)) continue;
        shadow |= SHIM_READ_NOW;
        copy.to->shadow[copy.to_offset + i] = SHIM_WRITTEN | SHIM_WRITTEN_NOW;
        copy.to->bytes[copy.to_offset + i] = copy.from->bytes[copy.from_offset + i];
    }
}

void commit_copies() { this_thread()->group++; }

void wait_for_copies(u32 n_groups) {
    Thread* thread = this_thread();
    u32 n = 0;
    for (u32 i = 0; i < thread->n_copies; i++) {
        const Copy copy = thread->copies[i];
        if (copy.group + n_groups < thread->group) {
            finish(copy);
        } else {
            thread->copies[n++] = copy;
        }
    }
    thread->n_copies = n;
}

}  // namespace shim
