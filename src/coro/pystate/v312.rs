//! The details of CPython 3.12, for 64-bit builds with the GIL.

#[path = "v312_offsets.rs"]
mod offsets;

use std::ffi::c_int;

use pyo3::ffi;

use super::CFrame;
pub(super) use offsets::*;

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = true;

const _: () = assert!(CFRAME_LEN <= size_of::<CFrame>());

/// The chain of frames starts in the coro's own `_PyCFrame`.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn root_frame(_thread: *mut u8, cframe: *mut CFrame) -> *mut u8 {
    cframe.cast()
}

/// # Safety
/// `frame` is a live `_PyCFrame`.
pub(super) unsafe fn innermost(frame: *mut u8) -> *mut u8 {
    // SAFETY: by the contract.
    unsafe { *frame.add(CURRENT_FRAME).cast() }
}

/// # Safety
/// There are no requirements.
#[inline(always)]
pub(super) unsafe fn before_swap(_thread: *mut u8, _next: *mut u8, _tracing: c_int) {}

/// There is nothing to look up: this version needs only the offsets.
pub(super) fn look_up() -> Option<&'static str> {
    None
}

/// The interpreter counts C recursion and does not check the stack pointer.
///
/// # Safety
/// There are no requirements.
#[inline(always)]
pub(super) unsafe fn protect(_thread: *mut ffi::PyThreadState, _base: usize, _len_bytes: usize) -> bool {
    true
}

/// # Safety
/// There are no requirements.
#[inline(always)]
pub(super) unsafe fn unprotect(_thread: *mut ffi::PyThreadState) {}

/// The value for the field `FRAME` that makes a thread state show `innermost` as its current frame.
///
/// # Safety
/// `holder` is writable, and lives as long as the thread state points to it.
pub(super) unsafe fn show(holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    let holder = holder.cast::<u8>();
    // SAFETY: by the contract.
    unsafe { *holder.add(CURRENT_FRAME).cast() = innermost };
    holder
}
