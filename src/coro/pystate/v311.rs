//! The details of CPython 3.11, for 64-bit builds with the GIL.

#[path = "v311_offsets.rs"]
mod offsets;

use std::ffi::c_int;

use pyo3::ffi;

use super::{CFrame, field};
pub(super) use offsets::*;

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = false;

const _: () = assert!(CFRAME_LEN == size_of::<CFrame>());

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

/// Sets, in the `_PyCFrame` that becomes current, whether calls are traced. Calls are traced if the thread has a trace
/// or profile function and the stack is not already inside such a function (`tracing` counts the nesting).
///
/// # Safety
/// `thread` is a thread state, `next` a live `_PyCFrame`.
#[inline(always)]
pub(super) unsafe fn before_swap(thread: *mut u8, next: *mut u8, tracing: c_int) {
    // SAFETY: by the contract.
    unsafe {
        let has_function =
            *field::<usize>(thread, PROFILE_FUNCTION) != 0 || *field::<usize>(thread, TRACE_FUNCTION) != 0;
        *next.add(USE_TRACING) = if has_function && tracing == 0 { 255 } else { 0 };
    }
}

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
