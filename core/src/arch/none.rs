//! The stand-in for architectures that have no switch yet. The package builds and works there, except that importing
//! `grapeshot.coro` fails.

use std::ffi::c_void;

use super::Entry;

/// Whether there is a switch for this target.
pub const IS_SUPPORTED: bool = false;

/// Aborts the process.
///
/// # Safety
/// Never called, because `IS_SUPPORTED` is false.
pub unsafe extern "C" fn switch(_from: *mut usize, _to: usize) {
    std::process::abort()
}

/// Aborts the process.
///
/// # Safety
/// Never called, because `IS_SUPPORTED` is false.
pub unsafe fn prepare(_top: usize, _entry: Entry, _argument: *mut c_void) -> usize {
    std::process::abort()
}

/// Does nothing.
#[inline(always)]
pub fn prefetch(_address: *const u8) {}
