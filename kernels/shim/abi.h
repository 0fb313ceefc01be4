// The interface between the Rust side of the emulated device and the shim: plain C structures.
#pragma once

#include <stdint.h>

extern "C" {

// A piece of memory that kernels may use. Device addresses are numbers of the emulated device, not
// addresses of the host, so that the host cannot read device memory by mistake.
struct ShimAllocation {
    uint64_t address;
    uint64_t size;
    uint8_t* bytes;
    // One byte for each byte, made of WRITTEN, READ_NOW and WRITTEN_NOW.
    uint8_t* shadow;
    // Set by a launch: the bytes that it touched are among these (none if low >= high).
    uint64_t touched_low, touched_high;
};

// Bits of a shadow: the byte has a value; this launch has read it; this launch has written it (then
// it may have been read, too). The caller resets the latter two.
static constexpr uint8_t SHIM_WRITTEN = 1, SHIM_READ_NOW = 2, SHIM_WRITTEN_NOW = 4;

struct ShimDim3 {
    uint32_t x, y, z;
};

struct ShimKernel {
    const char* name;
    // The name of the struct of its parameters, and the struct's size.
    const char* params;
    uint32_t params_size;
    // Threads of a block at most.
    uint32_t max_threads;
    void (*thread)(const void* params);
    const ShimKernel* next;
};

struct ShimLaunch {
    const ShimKernel* kernel;
    ShimDim3 grid;
    ShimDim3 block;
    uint32_t dynamic_shared_bytes;
    // Bytes of shared memory that a block can have at most, static and dynamic.
    uint32_t shared_limit;
    // Chooses the order of blocks, and of the threads of a block.
    uint32_t seed;
    uint32_t params_size;
    // On a multiple of 8.
    const void* params;
    // In ascending order of addresses.
    ShimAllocation* allocations;
    uint64_t n_allocations;
    // A sentence, if the launch fails.
    char* error;
    uint64_t error_size;
};

// The kernel of this name, or null.
const ShimKernel* shim_find(const char* name);
// The n-th of all kernels' names, or null where there is none.
const char* shim_name(uint32_t n);
// 0, or 1 with a sentence in `error`.
int32_t shim_launch(const ShimLaunch* launch);
}
