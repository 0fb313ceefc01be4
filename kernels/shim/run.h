// The state of the launch that this OS thread runs: shared by run.cc and memory.cc.
#pragma once

#include "../moeba.cuh"
#include "fiber.h"

namespace shim {

static constexpr u32 MAX_THREADS = 1024;
static constexpr u32 MAX_SHARED_ARRAYS = 32;
static constexpr u32 MAX_ARGUMENTS = 16;

// Copies to shared memory that a thread may have under way.
static constexpr u32 MAX_COPIES = 64;

struct Copy {
    const Piece* to;
    const Piece* from;
    u64 to_offset, from_offset;
    u32 bytes;
    // Groups that the thread had committed before.
    u32 group;
};

enum class State : u8 { Ready, AtBlock, AtWarp, Done };

// A thread of the block.
struct Thread {
    // First, so that `here` leads to the thread.
    Here here;
    Fiber fiber;
    u32 index;
    // The low end of its stack.
    u8* stack;
    u32 n_copies;
    u32 group;
    Copy copies[MAX_COPIES];
};

struct Warp {
    Collective kind;
    // Threads that wait in the collective.
    u32 n_arrived;
    // Collectives that the warp has been through; the lowest bit chooses the gifts.
    u32 generation;
    // Those that order memory within the warp: __syncwarp.
    u32 n_syncs;
    Gift gifts[2][WARP];
};

// The latest accesses to each byte of shared memory, see memory.cc.
struct Races {
    u64* writers;
    u64* readers;
};

struct SharedArray {
    const void* key;
    Piece piece;
    Races races;
};

// A number below n for each i below n, each once.
struct Order {
    u32 n, step, start;

    u32 at(u32 i) const { return static_cast<u32>((static_cast<u64>(i) * step + start) % n); }
};

// A pointer among the parameters, once it was used.
struct Argument {
    u64 address;
    const Piece* piece;
};

struct Run {
    const ShimLaunch* launch;
    Argument arguments[MAX_ARGUMENTS];
    u32 n_arguments;
    const Piece* pieces;
    u64 n_pieces;

    Thread threads[MAX_THREADS];
    // Of the threads, side by side: the scheduler looks at all of them again and again.
    State states[MAX_THREADS];
    // The order in which threads run.
    u16 sequence[MAX_THREADS];
    // The place there of the thread that runs.
    u32 place;
    Warp warps[MAX_THREADS / WARP];
    Fiber scheduler;
    u32 n_threads;
    u32 n_done;
    u32 n_at_barrier;
    bool failed;

    SharedArray arrays[MAX_SHARED_ARRAYS];
    u32 n_arrays;
    // Bytes of shared memory that arrays of this block have, the dynamic one among them.
    u64 shared_used;
    // Grows with every block and block-wide barrier, and is never reset: what is noted in Races
    // under another number is past.
    u32 interval;

    // The next of those that no launch uses.
    Run* next;
    // Owned, and kept from launch to launch: memory for stacks, shared memory and its shadows.
    u8* stacks;
    u8* shared_bytes;
    u8* shared_shadow;
    u64* writers;
    u64* readers;
    u64 shared_room;
};

extern __thread Run* run;

inline Thread* this_thread() { return reinterpret_cast<Thread*>(const_cast<Here*>(here)); }

// Leaves the launch, whose fault has been said.
[[noreturn]] void stop();

// Forgets the arrays of the block before and makes the dynamic one.
void shared_begin();

}  // namespace shim
