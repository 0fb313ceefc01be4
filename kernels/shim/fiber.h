// A stack of its own and a way to change to it: what a thread of a block runs on.
#pragma once

#include <stddef.h>

namespace shim {

struct Fiber {
    // The stack pointer where the fiber stopped: its saved registers (a ucontext on other
    // processors).
    void* top = nullptr;
};

// Prepares `fiber` to begin in `entry`, which never returns, on the given stack.
void fiber_start(Fiber* fiber, unsigned char* stack, size_t size, void (*entry)());
// Stores where the caller is in `from` and goes on in `to`.
void fiber_switch(Fiber* from, Fiber* to);

}  // namespace shim
