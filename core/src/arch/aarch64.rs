//! AArch64, AAPCS64 (Linux, the BSDs, macOS).
//!
//! The project's machines are x86-64, so this file is tested in an emulator of AArch64 Linux:
//! - `tests/project/test_arch.py` runs the instructions of `switch` and `start` on stacks with the layout that
//!   `prepare` gives them. The instructions are in separate files to make that possible.
//! - `.ci/aarch64` runs some of the Python tests, including tests of coros, on a whole CPython.
//!
//! A test also assembles the instructions with clang for Apple systems. They were **never run** on Apple systems or on
//! FreeBSD.
//!
//! A suspended stack, growing down:
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
//!   +----------------------+  <- stack pointer stored in `*from` (aligned to 16 bytes)
//! ```
//!
//! x18 is reserved for the platform and is not touched. `switch` returns with a `br` through x9 instead of a `ret`, so
//! that the processor does not use its return address prediction, which would be wrong.
//!
//! A new stack has the same frame, with `start` in lr, `entry` in x19 and its argument in x20.

use std::arch::{asm, naked_asm};
use std::ffi::c_void;

use super::Entry;

/// Whether this target has a switch.
pub const IS_SUPPORTED: bool = true;

/// The frame that `prepare` lays out: its length, and the indices of the words that it sets, counted upwards from the
/// stack pointer. All other words are zero, which for FPCR is the state at a thread's start. `test_arch.py` parses
/// these four lines.
const FRAME_WORDS: usize = 22;
const ENTRY: usize = 0; // x19
const ARGUMENT: usize = 1; // x20
const RETURN_ADDRESS: usize = 11; // x30

/// See [`super`]. On entry: x0 = `from`, x1 = `to`.
///
/// # Safety
/// `to` is a stack pointer that `switch` has stored or `prepare` has returned, and it has not been switched to since.
/// Its stack is mapped and belongs to this thread. `from` is writable, and no code switches to the pointer in
/// `*from` while the stack that called `switch` is running.
#[unsafe(naked)]
pub unsafe extern "C" fn switch(from: *mut usize, to: usize) {
    naked_asm!(include_str!("aarch64_switch.s"))
}

/// The first code that runs on a new stack. On entry: x19 = `entry`, x20 = its argument. The return address is declared
/// as undefined, which tells unwinders and debuggers that the chain of frames ends here.
#[unsafe(naked)]
unsafe extern "C" fn start() -> ! {
    naked_asm!(include_str!("aarch64_start.s"))
}

/// See [`super`].
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
    // SAFETY: the frame lies within the 256 bytes that the caller guarantees.
    unsafe { (sp as *mut [u64; FRAME_WORDS]).write(frame) };
    sp
}

/// Asks the processor to load the cache line at `address`.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    // SAFETY: the instruction has no effect for addresses that are not mapped.
    unsafe { asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly)) };
}
