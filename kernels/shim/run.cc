// Launches: blocks one after the other, a block's threads as fibers that run until they wait.
#include "run.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

namespace shim {

__thread const Here* here = nullptr;
__thread Run* run = nullptr;

static const ShimKernel* all_kernels = nullptr;

static constexpr size_t STACK_BYTES = 64 * 1024;
// From stack to stack. Not a power of two, or their tops would share a few sets of the cache.
static constexpr size_t STACK_STRIDE = STACK_BYTES + 5 * 64;
// Lowest words of a stack: a thread that used more than there is has most likely met them.
static constexpr u64 CANARY = 0x6d6f65626163616eull;
static constexpr u32 CANARIES = 16;

// ---- failing

static void say(const char* format, va_list args) {
    if (run->failed) return;
    run->failed = true;
    const ShimLaunch* launch = run->launch;
    int n = snprintf(launch->error, launch->error_size, "kernel %s: ", launch->kernel->name);
    if (here && n > 0 && static_cast<u64>(n) < launch->error_size) {
        const Here& h = *here;
        n += snprintf(launch->error + n, launch->error_size - n,
                      "block (%u, %u, %u), thread (%u, %u, %u): ", h.block.x, h.block.y, h.block.z,
                      h.thread.x, h.thread.y, h.thread.z);
    }
    if (n > 0 && static_cast<u64>(n) < launch->error_size) {
        vsnprintf(launch->error + n, launch->error_size - n, format, args);
    }
}

__attribute__((format(printf, 1, 2))) static void fail_here(const char* format, ...) {
    va_list args;
    va_start(args, format);
    say(format, args);
    va_end(args);
}

void stop() {
    // The fibers of a failed launch are never gone back to; they own nothing.
    fiber_switch(&this_thread()->fiber, &run->scheduler);
    abort();
}

void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    say(format, args);
    va_end(args);
    stop();
}

// ---- stacks

// There is space below the first stack, as below the others, so that an overflow is caught.
static u8* stack_of(const Run* owner, u32 t) { return owner->stacks + (t + 2) * STACK_STRIDE; }

#if defined(__x86_64__) || defined(__aarch64__)
static void set_canaries(const Run* owner) {
    for (u32 t = 0; t < MAX_THREADS; t++) {
        u64* words = reinterpret_cast<u64*>(stack_of(owner, t));
        for (u32 i = 0; i < CANARIES; i++) words[i] = CANARY;
    }
}

// The canaries lie far from all else that a thread uses, so they are read where it matters: at the
// thread's end, and while it is in the lower half of its stack.
static bool overflowed(const Thread& thread, const void* top) {
    bool done = run->states[thread.index] == State::Done;
    if (!done && top > thread.stack + STACK_BYTES / 2) return false;
    const u64* words = reinterpret_cast<const u64*>(thread.stack);
    for (u32 i = 0; i < CANARIES; i++) {
        if (words[i] != CANARY) return true;
    }
    return false;
}
#else
// The low end holds the context.
static void set_canaries(const Run*) {}
static bool overflowed(const Thread&, const void*) { return false; }
#endif

// ---- waiting

// The next thread of this pass over the block that can run; null at the end of the pass.
static Thread* next_ready() {
    while (++run->place < run->n_threads) {
        u32 t = run->sequence[run->place];
        if (run->states[t] == State::Ready) return &run->threads[t];
    }
    return nullptr;
}

// Goes on with the next thread: by way of the scheduler it would take twice as many changes of
// stacks. The scheduler begins a pass, and ends a launch in which a stack was too small.
static void wait(State state) {
    Thread* thread = this_thread();
    run->states[thread->index] = state;
    bool leaves = overflowed(*thread, __builtin_frame_address(0));
    Thread* next = leaves ? nullptr : next_ready();
    if (next) here = &next->here;
    fiber_switch(&thread->fiber, next ? &next->fiber : &run->scheduler);
}

void block_barrier() {
    run->n_at_barrier++;
    if (run->n_at_barrier < run->n_threads) return wait(State::AtBlock);
    run->n_at_barrier = 0;
    run->interval++;
    for (u32 t = 0; t < run->n_threads; t++) run->states[t] = State::Ready;
}

static const char* name_of(Collective kind) {
    switch (kind) {
        case Collective::Sync: return "__syncwarp";
        case Collective::Shuffle: return "a shuffle";
        case Collective::Vote: return "a vote";
        case Collective::Matrix: return "a matrix instruction";
    }
    return "";
}

u32 lane() { return this_thread()->index % WARP; }

const Gift* exchange(Collective kind, u32 mask, const Gift& gift) {
    Thread* thread = this_thread();
    Warp& warp = run->warps[thread->index / WARP];
    if (mask != FULL_WARP) fail("%s with mask 0x%08x: not the whole warp", name_of(kind), mask);
    if (warp.n_arrived > 0 && warp.kind != kind) {
        fail("is in %s while others of its warp are in %s", name_of(kind), name_of(warp.kind));
    }
    Gift* gifts = warp.gifts[warp.generation % 2];
    gifts[thread->index % WARP] = gift;
    warp.kind = kind;
    warp.n_arrived++;
    if (warp.n_arrived < WARP) {
        wait(State::AtWarp);
        return gifts;
    }
    warp.n_arrived = 0;
    warp.generation++;
    if (kind == Collective::Sync) warp.n_syncs++;
    State* first = &run->states[thread->index / WARP * WARP];
    for (u32 t = 0; t < WARP; t++) first[t] = State::Ready;
    return gifts;
}

// ---- running

static void thread_main() {
    run->launch->kernel->thread(run->launch->params);
    if (this_thread()->n_copies > 0) fail("ends before copies that it has begun");
    run->n_done++;
    wait(State::Done);
}

// Multiples of a number that has no factor in common with n.
static Order order_of(u32 n, u32 seed) {
    auto common_factor = [](u32 a, u32 b) {
        while (b) {
            u32 rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    };
    u32 step = seed % n;
    while (step == 0 || common_factor(step, n) != 1) step = step + 1 > n ? 1 : step + 1;
    return Order{n, step, seed / 7 % n};
}

static void begin_thread(u32 t) {
    Thread& thread = run->threads[t];
    thread.stack = stack_of(run, t);
    fiber_start(&thread.fiber, thread.stack, STACK_BYTES, thread_main);
    run->states[t] = State::Ready;
    thread.n_copies = thread.group = 0;
}

static void report_stuck() {
    u32 at_block = 0, at_warp = 0;
    const Thread* stuck = nullptr;
    for (u32 t = 0; t < run->n_threads; t++) {
        State state = run->states[t];
        at_block += state == State::AtBlock;
        at_warp += state == State::AtWarp;
        if (!stuck && state != State::Done) stuck = &run->threads[t];
    }
    here = &stuck->here;
    const Warp& warp = run->warps[stuck->index / WARP];
    const char* where = run->states[stuck->index] == State::AtBlock ? "__syncthreads" : name_of(warp.kind);
    fail_here("waits in %s for ever: of %u threads %u are in __syncthreads, %u in a warp's "
              "collective and %u have ended", where, run->n_threads, at_block, at_warp,
              run->n_done);
}

static void run_block(ShimDim3 block) {
    const ShimLaunch* launch = run->launch;
    run->n_done = run->n_at_barrier = 0;
    run->interval++;
    shared_begin();
    for (u32 w = 0; w < run->n_threads / WARP; w++) run->warps[w].n_arrived = 0;
    for (u32 t = 0; t < run->n_threads; t++) {
        begin_thread(t);
        ShimDim3 n = launch->block;
        ShimDim3 at = {t % n.x, t / n.x % n.y, t / (n.x * n.y)};
        run->threads[t].here = Here{at, block, n, launch->grid};
        run->threads[t].index = t;
    }
    while (run->n_done < run->n_threads && !run->failed) {
        run->place = ~0u;
        Thread* first = next_ready();
        if (!first) {
            report_stuck();
            break;
        }
        here = &first->here;
        fiber_switch(&run->scheduler, &first->fiber);
        // The thread that came back is the last that ran.
        const Thread* last = this_thread();
        if (!run->failed && overflowed(*last, last->fiber.top)) {
            fail_here("needs more stack than %zu bytes", STACK_BYTES);
            set_canaries(run);
        }
    }
    here = nullptr;
}

static bool check(const ShimLaunch* launch) {
    const ShimKernel* kernel = launch->kernel;
    ShimDim3 b = launch->block, g = launch->grid;
    u64 threads = static_cast<u64>(b.x) * b.y * b.z;
    u64 blocks = static_cast<u64>(g.x) * g.y * g.z;
    if (threads == 0 || threads % WARP || threads > MAX_THREADS || b.z > 64) {
        fail_here("a block of %u x %u x %u threads is no whole number of warps up to 32", b.x, b.y,
                  b.z);
    } else if (threads > kernel->max_threads) {
        fail_here("compiled for blocks of %u threads, launched with %llu", kernel->max_threads,
                  threads);
    } else if (blocks == 0 || blocks > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
        fail_here("a grid of %u x %u x %u blocks cannot be launched", g.x, g.y, g.z);
    } else if (launch->dynamic_shared_bytes > launch->shared_limit) {
        fail_here("%u bytes of dynamic shared memory; a block can have %u",
                  launch->dynamic_shared_bytes, launch->shared_limit);
    } else if (launch->params_size != kernel->params_size) {
        fail_here("takes %s of %u bytes, launched with %u bytes", kernel->params,
                  kernel->params_size, launch->params_size);
    }
    run->n_threads = static_cast<u32>(threads);
    return !run->failed;
}

static void free_run(Run* old) {
    free(old->stacks);
    free(old->shared_bytes);
    free(old->shared_shadow);
    free(old->writers);
    free(old->readers);
    free(old);
}

static Run* make_run() {
    Run* made = static_cast<Run*>(calloc(1, sizeof(Run)));
    if (!made) return nullptr;
    made->stacks = static_cast<u8*>(malloc((MAX_THREADS + 2) * STACK_STRIDE));
    made->shared_room = 256 * 1024;
    made->shared_bytes = static_cast<u8*>(aligned_alloc(1024, made->shared_room));
    made->shared_shadow = static_cast<u8*>(malloc(made->shared_room));
    made->writers = static_cast<u64*>(calloc(made->shared_room, sizeof(u64)));
    made->readers = static_cast<u64*>(calloc(made->shared_room, sizeof(u64)));
    if (made->stacks && made->shared_bytes && made->shared_shadow && made->writers &&
        made->readers) {
        set_canaries(made);
        return made;
    }
    free_run(made);
    return nullptr;
}

// Runs that no launch uses, as many as there ever were launches at a time.
static Run* idle = nullptr;
static char idle_lock = 0;

static void lock_idle() {
    while (__atomic_test_and_set(&idle_lock, __ATOMIC_ACQUIRE)) {
    }
}

static void unlock_idle() { __atomic_clear(&idle_lock, __ATOMIC_RELEASE); }

static Run* take_run() {
    lock_idle();
    Run* taken = idle;
    if (taken) idle = taken->next;
    unlock_idle();
    return taken ? taken : make_run();
}

static void give_back(Run* used) {
    lock_idle();
    used->next = idle;
    idle = used;
    unlock_idle();
}

static bool run_all(const ShimLaunch* launch, Piece* pieces) {
    for (u64 i = 0; i < launch->n_allocations; i++) {
        const ShimAllocation& a = launch->allocations[i];
        pieces[i] = Piece{a.address, a.size, a.bytes, a.shadow, ~0ull, 0, nullptr, nullptr};
    }
    run->launch = launch;
    run->pieces = pieces;
    run->n_pieces = launch->n_allocations;
    run->n_arguments = 0;
    run->failed = false;
    run->scheduler = Fiber();
    here = nullptr;
    if (!check(launch)) return false;
    ShimDim3 n = launch->grid;
    u32 blocks = n.x * n.y * n.z;
    Order order = order_of(blocks, launch->seed);
    Order threads = order_of(run->n_threads, launch->seed);
    for (u32 i = 0; i < run->n_threads; i++) run->sequence[i] = static_cast<u16>(threads.at(i));
    for (u32 i = 0; i < blocks && !run->failed; i++) {
        u32 b = order.at(i);
        run_block(ShimDim3{b % n.x, b / n.x % n.y, b / n.x / n.y});
    }
    return !run->failed;
}

Registration::Registration(ShimKernel* kernel) {
    kernel->next = all_kernels;
    all_kernels = kernel;
}

}  // namespace shim

using namespace shim;

// Written by build.rs: a reference into each file of kernels, so that the linker takes them all.
extern "C" int* const shim_files[];

extern "C" const ShimKernel* shim_find(const char* name) {
    if (!shim_files[0]) return nullptr;
    const ShimKernel* kernel = all_kernels;
    while (kernel && strcmp(kernel->name, name) != 0) kernel = kernel->next;
    return kernel;
}

extern "C" const char* shim_name(uint32_t n) {
    const ShimKernel* kernel = all_kernels;
    while (kernel && n-- > 0) kernel = kernel->next;
    return kernel ? kernel->name : nullptr;
}

extern "C" int32_t shim_launch(const ShimLaunch* launch) {
    run = take_run();
    Piece* pieces = static_cast<Piece*>(calloc(launch->n_allocations + 1, sizeof(Piece)));
    bool done = false;
    if (!run || !pieces) {
        snprintf(launch->error, launch->error_size, "no memory to emulate the launch in");
    } else {
        done = run_all(launch, pieces);
    }
    for (u64 i = 0; pieces && i < launch->n_allocations; i++) {
        launch->allocations[i].touched_low = pieces[i].low;
        launch->allocations[i].touched_high = pieces[i].high;
    }
    free(pieces);
    if (run) give_back(run);
    run = nullptr;
    return done ? 0 : 1;
}
