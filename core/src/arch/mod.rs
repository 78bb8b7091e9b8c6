//! The switch between two stacks of one thread: registers only, no memory is copied here.
//!
//! What the file of an architecture must provide:
//! - `unsafe extern "C" fn switch(from: *mut usize, to: usize)`: saves the callee-saved registers and the floating
//!   point control words on the running stack, stores the stack pointer in `*from`, makes `to` the stack pointer and
//!   restores the same from there. It returns when somebody switches back to the pointer in `*from`.
//! - `unsafe fn prepare(top: usize, entry: Entry, argument: *mut c_void) -> usize`: lays out a new stack below `top`
//!   (16 bytes aligned) such that the first switch to the result calls `entry(argument)`. The unwind chain ends there.
//! - `fn prefetch(address: *const u8)`: asks the processor to bring the cache line of an address near. It never faults,
//!   whatever the address; a hint only.
//!
//! It must not know what runs on the stacks. `IS_SUPPORTED` says whether there is such a file for this target.

use std::ffi::c_void;

/// What runs on a new stack. It must not return.
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
