//! An architecture without a switch: the package builds and works, `coro` refuses to be imported.

use std::ffi::c_void;

use super::Entry;

pub(in crate::coro) const IS_SUPPORTED: bool = false;

/// # Safety
/// Never called: `IS_SUPPORTED` is false.
pub(in crate::coro) unsafe extern "C" fn switch(_from: *mut usize, _to: usize) {
    std::process::abort()
}

/// # Safety
/// Never called: `IS_SUPPORTED` is false.
pub(in crate::coro) unsafe fn prepare(_top: usize, _entry: Entry, _argument: *mut c_void) -> usize {
    std::process::abort()
}
