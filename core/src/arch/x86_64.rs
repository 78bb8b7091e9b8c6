//! x86-64, System V ABI (Linux, the BSDs, macOS).
//!
//! A stack that is switched away from, growing down:
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
//!   +----------------------+  <- stack pointer kept in `*from`
//! ```
//!
//! The code pops the return address and jumps to it instead of returning. The processor would predict the wrong return
//! address each time (30 ns per switch instead of 10). The control words are nearly always the same on both stacks, and
//! loading them is slow, so they are compared first. The exception flags in MXCSR are not callee-saved.
//!
//! A new stack has the same frame with `start` as the return address, `entry` in r12 and its argument in r13.

use std::arch::naked_asm;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ffi::c_void;

use super::Entry;

/// Whether there is a switch for this target.
pub const IS_SUPPORTED: bool = true;

/// See the module above. On entry: rdi = `from`, rsi = `to`; the direction flag is clear, as the ABI wants it.
///
/// # Safety
/// `to` is a stack pointer that `switch` has stored or `prepare` has made, used once; its stack is mapped and belongs
/// to this thread. `from` is writable, and whoever reads it does so while this stack is not running.
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

/// The first code that runs on a new stack. On entry: r12 = `entry`, r13 = its argument, rsp 16 bytes aligned. The
/// undefined return address ends the chain for unwinders and debuggers.
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

/// See the module above.
///
/// # Safety
/// The 128 bytes below `top` are writable and unused.
pub unsafe fn prepare(top: usize, entry: Entry, argument: *mut c_void) -> usize {
    /// The control words of a thread at its start: all exceptions masked, round to nearest, x87 in full precision.
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
    // Popping the frame must leave rsp aligned to 16 bytes, as `start` needs it for its call.
    let sp = top - 16 - size_of_val(&frame);
    // SAFETY: within the 128 bytes that the caller gives.
    unsafe { (sp as *mut [u64; 8]).write(frame) };
    sp
}

/// Brings a cache line near.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    // SAFETY: part of SSE, which every x86-64 has; the instruction ignores addresses that are not mapped.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}
