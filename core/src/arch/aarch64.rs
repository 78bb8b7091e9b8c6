//! AArch64, AAPCS64 (Linux, the BSDs, macOS).
//!
//! The project is tested on x86-64 only. An emulator of AArch64 Linux (`tests/project/test_arch.py`) runs the
//! instructions of `switch` and `start`, which lie in separate files for that, on stacks laid out as by `prepare`.
//! **Never run**: this file as compiled by rustc (which assembles the instructions for Linux, Apple and FreeBSD),
//! Python on it, real hardware.
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
//! x18 belongs to the platform and is not touched. The code returns by a `br` through another register than x30, so
//! that the processor does not use its return address prediction.
//!
//! A new stack has the same frame with `start` in lr, `entry` in x19 and its argument in x20.

use std::arch::{asm, naked_asm};
use std::ffi::c_void;

use super::Entry;

/// Whether there is a switch for this target.
pub const IS_SUPPORTED: bool = true;

/// What `prepare` lays out, in words from the stack pointer up (the test reads these lines). All others are zero, which
/// for FPCR is the state at a thread's start.
const FRAME_WORDS: usize = 22;
const ENTRY: usize = 0; // x19
const ARGUMENT: usize = 1; // x20
const RETURN_ADDRESS: usize = 11; // x30

/// See the module above. On entry: x0 = `from`, x1 = `to`.
///
/// # Safety
/// `to` is a stack pointer that `switch` has stored or `prepare` has made, used once; its stack is mapped and belongs
/// to this thread. `from` is writable, and whoever reads it does so while this stack is not running.
#[unsafe(naked)]
pub unsafe extern "C" fn switch(from: *mut usize, to: usize) {
    naked_asm!(include_str!("aarch64_switch.s"))
}

/// The first code that runs on a new stack. On entry: x19 = `entry`, x20 = its argument. The undefined return address
/// ends the chain for unwinders and debuggers.
#[unsafe(naked)]
unsafe extern "C" fn start() -> ! {
    naked_asm!(include_str!("aarch64_start.s"))
}

/// See the module above.
///
/// # Safety
/// The 256 bytes below `top` are writable and unused.
pub unsafe fn prepare(top: usize, entry: Entry, argument: *mut c_void) -> usize {
    debug_assert!(top.is_multiple_of(16));
    let mut frame = [0_u64; FRAME_WORDS];
    frame[ENTRY] = entry as usize as u64;
    frame[ARGUMENT] = argument as u64;
    frame[RETURN_ADDRESS] = start as *const () as u64;
    let sp = top - size_of_val(&frame);
    // SAFETY: within the 256 bytes that the caller gives.
    unsafe { (sp as *mut [u64; FRAME_WORDS]).write(frame) };
    sp
}

/// Brings a cache line near.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    // SAFETY: the instruction ignores addresses that are not mapped.
    unsafe { asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly)) };
}
