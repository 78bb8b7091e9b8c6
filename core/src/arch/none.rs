//! An architecture without a switch: the package builds and works, `coro` refuses to be imported.

use std::ffi::c_void;

use super::Entry;

/// Whether there is a switch for this target.
pub const IS_SUPPORTED: bool = false;

/// Not there.
///
/// # Safety
/// Never called: `IS_SUPPORTED` is false.
pub unsafe extern "C" fn switch(_from: *mut usize, _to: usize) {
    std::process::abort()
}

/// Not there.
///
/// # Safety
/// Never called: `IS_SUPPORTED` is false.
pub unsafe fn prepare(_top: usize, _entry: Entry, _argument: *mut c_void) -> usize {
    std::process::abort()
}

/// Does nothing.
#[inline(always)]
pub fn prefetch(_address: *const u8) {}
