// The checks of memory accesses: bounds of pieces, uninitialised bytes, and races in shared memory.
#include "run.h"

#include <stdio.h>

namespace shim {

// Addresses of shared memory: no device address is so low.
static constexpr u64 SHARED_ADDRESS = 0x10000;

static const char* verb(Access access) {
    switch (access) {
        case Access::Read: return "reads";
        case Access::Write: return "writes";
        case Access::Atomic: return "atomically changes";
    }
    return "";
}

// "shared array tile", "device memory at 0x7000000000"
static void describe(const Piece* piece, char* out, size_t size) {
    if (piece->name) {
        snprintf(out, size, "shared array %s", piece->name);
    } else {
        snprintf(out, size, "the device memory at 0x%llx", piece->address);
    }
}

void fail_access(const Piece* piece, u64 address, u32 size, Access access) {
    if (!piece) {
        fail("%s %u bytes at 0x%llx, where there is no memory", verb(access), size, address);
    }
    char what[96];
    describe(piece, what, sizeof(what));
    i64 offset = static_cast<i64>(address - piece->address);
    u64 end = piece->size;
    bool within = offset >= 0 && static_cast<u64>(offset) <= end && end - offset >= size;
    if (within) {
        fail("%s %u bytes at byte %lld of %s, which is not aligned to them", verb(access), size,
             offset, what);
    }
    fail("%s %u bytes at byte %lld of %s, which has %llu (address 0x%llx)", verb(access), size,
         offset, what, end, address);
}

void fail_uninitialised(const Piece* piece, u64 address, u32 size) {
    char what[96];
    describe(piece, what, sizeof(what));
    fail("reads %u bytes at byte %llu of %s (address 0x%llx) that were never written", size,
         address - piece->address, what, address);
}

const Piece* piece_at(u64 address) {
    u64 low = 0, high = run->n_pieces;
    while (low < high) {
        u64 middle = (low + high) / 2;
        if (run->pieces[middle].address <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == 0) return nullptr;
    // One past the end still belongs to it: an empty tail may be passed, but not touched.
    const Piece* piece = &run->pieces[low - 1];
    return address - piece->address <= piece->size ? piece : nullptr;
}

const Piece* argument_piece(u64 address) {
    for (u32 i = 0; i < run->n_arguments; i++) {
        if (run->arguments[i].address == address) return run->arguments[i].piece;
    }
    const Piece* piece = piece_at(address);
    if (run->n_arguments < MAX_ARGUMENTS) {
        run->arguments[run->n_arguments++] = Argument{address, piece};
    }
    return piece;
}

// ---- shared arrays

static const Piece* add_array(const void* key, const char* name, u64 bytes, u64 align) {
    u64 start = (run->shared_used + align - 1) / align * align;
    u64 limit = run->launch->shared_limit;
    if (run->n_arrays == MAX_SHARED_ARRAYS) fail("more than %u shared arrays", MAX_SHARED_ARRAYS);
    if (start + bytes > limit || start + bytes > run->shared_room) {
        fail("shared array %s ends at byte %llu; a block can have %llu", name, start + bytes,
             limit);
    }
    run->shared_used = start + bytes;
    memset(run->shared_shadow + start, 0, bytes);
    SharedArray& array = run->arrays[run->n_arrays++];
    array.key = key;
    array.races = Races{run->writers + start, run->readers + start};
    u8* shared = run->shared_bytes + start;
    u8* shadow = run->shared_shadow + start;
    array.piece = Piece{SHARED_ADDRESS + start, bytes, shared, shadow, 0, 0, &array.races, name};
    return &array.piece;
}

static const char DYNAMIC = 0;

void shared_begin() {
    run->n_arrays = 0;
    run->shared_used = 0;
    add_array(&DYNAMIC, "(dynamic)", run->launch->dynamic_shared_bytes, 1024);
}

const Piece* dynamic_shared() { return &run->arrays[0].piece; }

const Piece* shared_array(const void* key, const char* name, u64 bytes, u64 align) {
    for (u32 i = 1; i < run->n_arrays; i++) {
        if (run->arrays[i].key == key) return &run->arrays[i].piece;
    }
    return add_array(key, name, bytes, align < 16 ? 16 : align);
}

// ---- races

// A byte's last writer, or its readers: the interval between two __syncthreads (32 bits), the
// warp's __syncwarps so far (20 bits), and the accessor: a thread, several threads of one warp,
// several warps, or atomics, which do not race with each other.
static constexpr u32 WHO_BITS = 12;
static constexpr u32 STEP_BITS = 20;
static constexpr u32 SEVERAL_OF_WARP = MAX_THREADS;
static constexpr u32 SEVERAL = (1 << WHO_BITS) - 1;
static constexpr u32 ATOMICS = SEVERAL - 1;

struct Trace {
    u32 interval, step, who;

    u64 packed() const {
        return static_cast<u64>(interval) << 32 | step << WHO_BITS | who;
    }
    static Trace from(u64 bits) {
        u32 low = static_cast<u32>(bits);
        return Trace{static_cast<u32>(bits >> 32), low >> WHO_BITS, low & SEVERAL};
    }
    // The warp, or none where there were several.
    u32 warp() const {
        if (who < MAX_THREADS) return who / WARP;
        return who < ATOMICS ? who - SEVERAL_OF_WARP : MAX_THREADS;
    }
    // Whether this access may happen at the same time as one by `me`.
    bool meets(const Trace& me) const {
        if (interval != me.interval || who == me.who) return false;
        return warp() != me.who / WARP || step == me.step;
    }
};

static Trace with_reader(Trace before, const Trace& me) {
    if (before.interval != me.interval || before.who == me.who) return me;
    if (before.warp() == me.who / WARP) {
        // Readers before a __syncwarp cannot race with their own warp, and for others one stands
        // for all.
        if (before.step != me.step) return me;
        return Trace{me.interval, me.step, SEVERAL_OF_WARP + me.who / WARP};
    }
    return Trace{me.interval, me.step, SEVERAL};
}

[[noreturn]] static void fail_race(const Piece* piece, u64 offset, Access access, bool wrote,
                                   const Trace& other) {
    char what[96];
    describe(piece, what, sizeof(what));
    const char* did = wrote ? "wrote" : "read";
    if (other.who < MAX_THREADS) {
        fail("%s byte %llu of %s, which thread %u of the block %s with no barrier between",
             verb(access), offset, what, other.who, did);
    }
    fail("%s byte %llu of %s, which other threads of the block %s with no barrier between",
         verb(access), offset, what, did);
}

// Notes the access of one byte, whose latest accesses are given.
static void note_byte(const Piece* piece, u64 offset, Access access, u64& writer_bits,
                      u64& reader_bits) {
    u32 index = this_thread()->index;
    u32 step = run->warps[index / WARP].n_syncs & ((1u << STEP_BITS) - 1);
    const Trace me = {run->interval, step, index};
    const Trace atomics = {run->interval, step, ATOMICS};
    Trace writer = Trace::from(writer_bits), reader = Trace::from(reader_bits);
    bool both_atomic = access == Access::Atomic && writer.who == ATOMICS;
    if (!both_atomic && writer.meets(me)) fail_race(piece, offset, access, true, writer);
    if (access == Access::Read) {
        reader_bits = with_reader(reader, me).packed();
        return;
    }
    if (reader.meets(me)) fail_race(piece, offset, access, false, reader);
    writer_bits = (access == Access::Atomic ? atomics : me).packed();
}

void note_race(const Piece* piece, u64 offset, u32 size, Access access) {
    u64* writers = piece->races->writers + offset;
    u64* readers = piece->races->readers + offset;
    for (u32 i = 0; i < size;) {
        u64 writer = writers[i], reader = readers[i];
        // Bytes that were accessed together are judged once.
        u32 end = i + 1;
        while (end < size && writers[end] == writer && readers[end] == reader) end++;
        u64 new_writer = writer, new_reader = reader;
        note_byte(piece, offset + i, access, new_writer, new_reader);
        for (; i < end; i++) {
            writers[i] = new_writer;
            readers[i] = new_reader;
        }
    }
}

}  // namespace shim
