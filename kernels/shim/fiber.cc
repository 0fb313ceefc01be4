// Changing stacks. By hand for the two processors that matter (System V and AAPCS64: the callee's
// registers go on the old stack, the new one's come back), by ucontext elsewhere.
#include "fiber.h"

#include <stdint.h>
#include <string.h>

#if defined(__APPLE__)
#define SYMBOL "_shim_fiber_swap"
#else
#define SYMBOL "shim_fiber_swap"
#endif

#if defined(__x86_64__) && !defined(_WIN32)
#define BY_HAND 1
// swap(void** from, void* to); rounding modes are never changed, so mxcsr stays as it is.
__asm__(
    ".text\n"
    ".globl " SYMBOL "\n" SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
#elif defined(__aarch64__) && !defined(_WIN32)
#define BY_HAND 1
__asm__(
    ".text\n"
    ".globl " SYMBOL "\n" SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");
#else
#define BY_HAND 0
#include <ucontext.h>
#endif

namespace shim {

#if BY_HAND

extern "C" void shim_fiber_swap(void** from, void* to);

void fiber_start(Fiber* fiber, unsigned char* stack, size_t size, void (*entry)()) {
    uintptr_t end = (reinterpret_cast<uintptr_t>(stack) + size) & ~static_cast<uintptr_t>(15);
    uint64_t* frame = reinterpret_cast<uint64_t*>(end);
#if defined(__x86_64__)
    // Six registers, where `ret` goes, and a zero where entry's caller would have been: entry sees
    // the stack as after a call.
    frame -= 8;
    memset(frame, 0, 8 * sizeof(uint64_t));
    frame[6] = reinterpret_cast<uint64_t>(entry);
#else
    frame -= 20;
    memset(frame, 0, 20 * sizeof(uint64_t));
    frame[11] = reinterpret_cast<uint64_t>(entry);
#endif
    fiber->top = frame;
}

void fiber_switch(Fiber* from, Fiber* to) { shim_fiber_swap(&from->top, to->top); }

#else

// The context lies at the stack's low end, where a fiber that uses its stack never comes.
void fiber_start(Fiber* fiber, unsigned char* stack, size_t size, void (*entry)()) {
    uintptr_t low = (reinterpret_cast<uintptr_t>(stack) + 63) & ~static_cast<uintptr_t>(63);
    ucontext_t* context = reinterpret_cast<ucontext_t*>(low);
    getcontext(context);
    context->uc_stack.ss_sp = context + 1;
    context->uc_stack.ss_size = stack + size - reinterpret_cast<unsigned char*>(context + 1);
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    fiber->top = context;
}

void fiber_switch(Fiber* from, Fiber* to) {
    static thread_local ucontext_t home;
    if (!from->top) from->top = &home;
    swapcontext(static_cast<ucontext_t*>(from->top), static_cast<ucontext_t*>(to->top));
}

#endif

}  // namespace shim
