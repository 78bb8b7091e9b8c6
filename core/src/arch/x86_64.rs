//! x86-64, System V ABI (Linux, the BSDs, macOS).
//!
//! A suspended stack, growing down:
//!
//! ```text
//!        higher addresses
//!   +----------------------+
//!   | return address       |  where `switch` was called
//!   | rbp                  |
//!   | rbx                  |
//!   | r12                  |
//!   | r13                  |
//!   | r14                  |
//!   | r15                  |
//!   | MXCSR | x87 control  |  4 + 2 bytes, 2 unused
//!   +----------------------+  <- stack pointer stored in `*from`
//! ```
//!
//! `switch` pops the return address and jumps to it instead of executing `ret`. With a `ret` the processor would
//! predict the wrong return address each time, and a switch would take 30 ns instead of 10. The control words are
//! nearly always the same on both stacks and are slow to load, so they are compared first and loaded only if they
//! differ. The comparison leaves out the exception flags in MXCSR, because these are not callee-saved.
//!
//! A new stack has the same frame, with `start` as the return address, `entry` in r12 and its argument in r13.

use std::arch::naked_asm;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ffi::c_void;

use super::Entry;

/// Whether this target has a switch.
pub const IS_SUPPORTED: bool = true;

/// See [`super`]. On entry: rdi = `from`, rsi = `to`, and the direction flag is clear, as the ABI requires.
///
/// # Safety
/// `to` is a stack pointer that `switch` has stored or `prepare` has returned, and it has not been switched to since.
/// Its stack is mapped and belongs to this thread. `from` is writable, and no code switches to the pointer in
/// `*from` while the stack that called `switch` is running.
#[unsafe(naked)]
pub unsafe extern "C" fn switch(from: *mut usize, to: usize) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "stmxcsr [rsp]",
        "fnstcw [rsp + 4]",
        "mov eax, [rsp]",
        "movzx ecx, word ptr [rsp + 4]",
        "mov [rdi], rsp",
        "mov rsp, rsi",
        "xor eax, [rsp]",
        "test eax, 0xffc0",
        "jnz 2f",
        "3:",
        "cmp cx, word ptr [rsp + 4]",
        "jne 4f",
        "5:",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "pop rcx",
        "jmp rcx",
        "2:",
        "ldmxcsr [rsp]",
        "jmp 3b",
        "4:",
        "fldcw [rsp + 4]",
        "jmp 5b",
    )
}

/// The first code that runs on a new stack. On entry: r12 = `entry`, r13 = its argument, rsp is aligned to 16 bytes.
/// The return address is declared as undefined, which tells unwinders and debuggers that the chain of frames ends here.
#[unsafe(naked)]
unsafe extern "C" fn start() -> ! {
    naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined rip",
        "xor ebp, ebp",
        "mov rdi, r13",
        "call r12",
        "ud2",
        ".cfi_endproc",
    )
}

/// See [`super`].
///
/// # Safety
/// The 128 bytes below `top` are writable and unused.
pub unsafe fn prepare(top: usize, entry: Entry, argument: *mut c_void) -> usize {
    /// The control words with which a thread starts: all exceptions masked, round to nearest, x87 in full precision.
    const MXCSR: u64 = 0x1f80;
    const X87_CONTROL: u64 = 0x037f;
    debug_assert!(top.is_multiple_of(16));
    let frame: [u64; 8] = [
        MXCSR | X87_CONTROL << 32,
        0,                         // r15
        0,                         // r14
        argument as u64,           // r13
        entry as usize as u64,     // r12
        0,                         // rbx
        0,                         // rbp
        start as *const () as u64, // return address
    ];
    // After the frame is popped, rsp must be aligned to 16 bytes, because `start` makes a call.
    let sp = top - 16 - size_of_val(&frame);
    // SAFETY: the frame lies within the 128 bytes that the caller guarantees.
    unsafe { (sp as *mut [u64; 8]).write(frame) };
    sp
}

/// Asks the processor to load the cache line at `address`.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    // SAFETY: the instruction is part of SSE, which every x86-64 processor has, and has no effect for addresses that
    // are not mapped.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}
