//! AArch64, AAPCS64 (Linux, the BSDs, macOS).
//!
//! Assembled for `aarch64-unknown-linux-gnu` and `aarch64-apple-darwin`; **not run** by the project's machines, which are
//! x86-64.
//!
//! A stack that is switched away from, growing down:
//!
//! ```text
//!        higher addresses
//!   +----------------------+
//!   | d14  d15             |
//!   | d12  d13             |
//!   | d10  d11             |
//!   | d8   d9              |  only the low halves of v8 to v15 are callee-saved
//!   | FPCR | unused        |
//!   | x29 (fp)  x30 (lr)   |  lr: where `switch` was called
//!   | x27  x28             |
//!   | x25  x26             |
//!   | x23  x24             |
//!   | x21  x22             |
//!   | x19  x20             |
//!   +----------------------+  <- stack pointer kept in `*from` (16 bytes aligned)
//! ```
//!
//! x18 is the platform's and is left alone. The return is a `br` through another register than x30, so that the
//! processor's own stack of return addresses is not consulted.
//!
//! A new stack has the same frame with `start` in lr, `entry` in x19 and its argument in x20.

use std::arch::naked_asm;
use std::ffi::c_void;

use super::Entry;

pub(in crate::coro) const IS_SUPPORTED: bool = true;

/// See the module above. On entry: x0 = `from`, x1 = `to`.
///
/// # Safety
/// `to` is a stack pointer that `switch` has stored or `prepare` has made, used once; its stack is mapped and belongs
/// to this thread. `from` is writable, and whoever reads it does so while this stack is not running.
#[unsafe(naked)]
pub(in crate::coro) unsafe extern "C" fn switch(from: *mut usize, to: usize) {
    naked_asm!(
        "sub sp, sp, #176",
        "stp x19, x20, [sp]",
        "stp x21, x22, [sp, #16]",
        "stp x23, x24, [sp, #32]",
        "stp x25, x26, [sp, #48]",
        "stp x27, x28, [sp, #64]",
        "stp x29, x30, [sp, #80]",
        "mrs x9, fpcr",
        "str x9, [sp, #96]",
        "stp d8, d9, [sp, #112]",
        "stp d10, d11, [sp, #128]",
        "stp d12, d13, [sp, #144]",
        "stp d14, d15, [sp, #160]",
        "mov x9, sp",
        "str x9, [x0]",
        "mov sp, x1",
        "ldp x19, x20, [sp]",
        "ldp x21, x22, [sp, #16]",
        "ldp x23, x24, [sp, #32]",
        "ldp x25, x26, [sp, #48]",
        "ldp x27, x28, [sp, #64]",
        "ldp x29, x30, [sp, #80]",
        "ldr x9, [sp, #96]",
        "msr fpcr, x9",
        "ldp d8, d9, [sp, #112]",
        "ldp d10, d11, [sp, #128]",
        "ldp d12, d13, [sp, #144]",
        "ldp d14, d15, [sp, #160]",
        "add sp, sp, #176",
        "mov x9, x30",
        "br x9",
    )
}

/// The first thing on a new stack. On entry: x19 = `entry`, x20 = its argument. The undefined return address ends
/// the chain for unwinders and debuggers.
#[unsafe(naked)]
unsafe extern "C" fn start() -> ! {
    naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined x30",
        "mov x29, xzr",
        "mov x30, xzr",
        "mov x0, x20",
        "blr x19",
        "brk #1",
        ".cfi_endproc",
    )
}

/// See the module above.
///
/// # Safety
/// The 256 bytes below `top` are writable and unused.
pub(in crate::coro) unsafe fn prepare(top: usize, entry: Entry, argument: *mut c_void) -> usize {
    debug_assert!(top.is_multiple_of(16));
    let mut frame = [0_u64; 22];
    frame[0] = entry as usize as u64; // x19
    frame[1] = argument as u64; // x20
    frame[11] = start as *const () as u64; // x30; FPCR 0 is the state at a thread's start
    let sp = top - size_of_val(&frame);
    // SAFETY: within the 256 bytes that the caller gives.
    unsafe { (sp as *mut [u64; 22]).write(frame) };
    sp
}
