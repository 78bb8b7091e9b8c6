// Tests the switch of coros on AArch64 with exactly the instructions that the extension is built with. test_arch.py
// compiles this file for aarch64-linux-gnu and runs it in an emulator. The compiler's command line defines SWITCH and
// START (the files with the instructions), and FRAME_WORDS, ENTRY, ARGUMENT and RETURN_ADDRESS (the layout of the
// frame, from constants in aarch64.rs).

#include <fenv.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unwind.h>

__asm__(".text\n.balign 16\n.globl coro_switch\n.type coro_switch, %function\ncoro_switch:\n.include \"" SWITCH "\"\n"
        ".balign 16\n.globl coro_start\n.type coro_start, %function\ncoro_start:\n.include \"" START "\"\n");

void coro_switch(uintptr_t *from, uintptr_t to);
void coro_start(void);

// Fills x19-x28 and d8-d15 with consecutive numbers that start with `seed`, and calls coro_switch. Then compares these
// registers, and also x29, with their earlier values. Returns the number of registers that differ.
uint64_t switch_with(uintptr_t *from, uintptr_t to, uint64_t seed);
__asm__(
    ".text\n.balign 16\n.globl switch_with\n.type switch_with, %function\nswitch_with:\n"
    "sub sp, sp, #192\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\nstr x2, [sp, #160]\n"
    ".irp n, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28\nadd x\\n, x2, #(\\n - 19)\n.endr\n"
    ".irp n, 8, 9, 10, 11, 12, 13, 14, 15\nadd x9, x2, #(\\n + 2)\nfmov d\\n, x9\n.endr\n"
    "mov x29, sp\n"
    "bl coro_switch\n"
    "mov x0, #0\nldr x2, [sp, #160]\n"
    ".irp n, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28\nadd x9, x2, #(\\n - 19)\ncmp x\\n, x9\ncinc x0, x0, ne\n.endr\n"
    ".irp n, 8, 9, 10, 11, 12, 13, 14, 15\nadd x9, x2, #(\\n + 2)\nfmov x10, d\\n\ncmp x10, x9\ncinc x0, x0, ne\n.endr\n"
    "mov x9, sp\ncmp x29, x9\ncinc x0, x0, ne\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\nadd sp, sp, #192\nret\n");

#define STACK_LEN (256 * 1024)
#define STACKS 3

static uintptr_t main_sp;

struct stack {
    uintptr_t sp;
    uint64_t seed, rounds, changed, fpcr_at_start, frames, caller_fp, main_return;
    char *memory;
};

static uint64_t fpcr(void) {
    uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}

static void check(int is_right, const char *what) {
    if (!is_right) {
        printf("wrong: %s\n", what);
        exit(1);
    }
}

static uintptr_t prepare(char *top, void (*entry)(void *), void *argument) {
    uint64_t frame[FRAME_WORDS] = {0};
    frame[ENTRY] = (uint64_t)entry;
    frame[ARGUMENT] = (uint64_t)argument;
    frame[RETURN_ADDRESS] = (uint64_t)coro_start;
    memcpy(top - sizeof frame, frame, sizeof frame);
    return (uintptr_t)(top - sizeof frame);
}

static _Unwind_Reason_Code count_frame(struct _Unwind_Context *context, void *frames) {
    // The unwinder also reports the end of the chain, as a frame without an address.
    if (_Unwind_GetIP(context) != 0)
        ++*(uint64_t *)frames;
    check(*(uint64_t *)frames < 100, "the unwind chain does not end");
    return _URC_NO_REASON;
}

static void on_stack(void *argument) {
    struct stack *stack = argument;
    uintptr_t *frame = __builtin_frame_address(0);
    stack->fpcr_at_start = fpcr();
    stack->caller_fp = frame[0];
    check((uintptr_t)frame % 16 == 0, "the stack is not aligned");
    check(_Unwind_Backtrace(count_frame, &stack->frames) == _URC_END_OF_STACK, "the unwind chain is broken");
    // From here on, each stack has its own rounding mode.
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    int mode = modes[stack->seed % 3];
    fesetround(mode);
    for (;;) {
        stack->rounds++;
        stack->changed += switch_with(&stack->sp, main_sp, stack->seed * 1000 + stack->rounds);
        check(fegetround() == mode, "a stack has lost its rounding mode");
    }
}

int main(void) {
    struct stack stacks[STACKS] = {0};
    for (int i = 0; i < STACKS; i++) {
        stacks[i].seed = i + 1;
        stacks[i].memory = aligned_alloc(16, STACK_LEN);
        check(stacks[i].memory != NULL, "no memory");
        stacks[i].sp = prepare(stacks[i].memory + STACK_LEN, on_stack, &stacks[i]);
    }
    uint64_t before = fpcr();
    for (uint64_t round = 1; round <= 1000; round++)
        for (int i = 0; i < STACKS; i++) {
            check(switch_with(&main_sp, stacks[i].sp, round * 7 + i) == 0, "registers of the thread's own stack");
            check(fpcr() == before, "FPCR of the thread's own stack");
            check(stacks[i].rounds == round, "a stack did not go on where it was");
            check(stacks[i].sp % 16 == 0, "a stack pointer is not aligned");
        }
    for (int i = 0; i < STACKS; i++) {
        check(stacks[i].changed == 0, "registers of a stack");
        check(stacks[i].fpcr_at_start == 0, "FPCR at the start");
        check(stacks[i].caller_fp == 0, "the chain of frame pointers does not end");
        // the frames of on_stack and coro_start
        check(stacks[i].frames == 2, "the unwind chain does not have two frames");
    }
    puts("right");
    return 0;
}
