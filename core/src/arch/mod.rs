//! The code that differs between processors: the switch between two stacks of one thread, and a hint that memory will
//! be read. The switch saves and restores only registers. It does not copy stacks.
//!
//! There is one file per architecture, and each provides:
//! - `unsafe extern "C" fn switch(from: *mut usize, to: usize)`: pushes the callee-saved registers and the floating
//!   point control words onto the running stack, stores the stack pointer in `*from`, sets the stack pointer to `to`
//!   and restores the registers and control words that were saved there. It returns when some later call switches back
//!   to the pointer in `*from`.
//! - `unsafe fn prepare(top: usize, entry: Entry, argument: *mut c_void) -> usize`: lays out a new stack below `top`
//!   (aligned to 16 bytes), so that the first switch to the returned stack pointer calls `entry(argument)`. An
//!   unwinder's chain of frames ends at the code that calls `entry`.
//! - `fn prefetch(address: *const u8)`: asks the processor to load the cache line of an address. This is only a hint.
//!   It does not fault, whatever the address is.
//! - `IS_SUPPORTED`: whether this target has a switch. It is false only in `none.rs`.

use std::ffi::c_void;

/// The first function that runs on a new stack. It must not return.
pub type Entry = unsafe extern "C" fn(*mut c_void) -> !;

#[cfg(all(target_arch = "x86_64", unix))]
#[path = "x86_64.rs"]
mod imp;
#[cfg(all(target_arch = "aarch64", unix))]
#[path = "aarch64.rs"]
mod imp;
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), unix)))]
#[path = "none.rs"]
mod imp;

pub use imp::{IS_SUPPORTED, prefetch, prepare, switch};

#[cfg(all(test, unix, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests;
