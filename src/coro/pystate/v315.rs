//! The details of CPython 3.15, for 64-bit builds.

#[cfg_attr(not(Py_GIL_DISABLED), path = "v315_offsets.rs")]
#[cfg_attr(Py_GIL_DISABLED, path = "v315t_offsets.rs")]
mod offsets;

use std::ffi::{c_int, c_void};

use pyo3::ffi;

use super::{CFrame, field};
pub(super) use offsets::*;

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = true;

/// The chain of frames ends in the thread's base frame. Nothing runs in that frame or changes it, so all chains of the
/// thread may share it. The sampling profiler (`profiling.sampling`) drops samples whose chain does not lead to that
/// frame.
///
/// # Safety
/// `thread` is a live thread state.
pub(super) unsafe fn root_frame(thread: *mut u8, _cframe: *mut CFrame) -> *mut u8 {
    // SAFETY: by the contract.
    unsafe { *field(thread, BASE_FRAME) }
}

/// # Safety
/// There are no requirements.
pub(super) unsafe fn innermost(frame: *mut u8) -> *mut u8 {
    frame
}

/// # Safety
/// There are no requirements.
#[inline(always)]
pub(super) unsafe fn before_swap(_thread: *mut u8, _next: *mut u8, _tracing: c_int) {}

/// There is nothing to look up: 3.15 has the functions that are declared below.
pub(super) fn look_up() -> Option<&'static str> {
    None
}

unsafe extern "C" {
    fn PyUnstable_ThreadState_SetStackProtection(
        thread: *mut ffi::PyThreadState,
        start: *mut c_void,
        len_bytes: usize,
    ) -> c_int;
    fn PyUnstable_ThreadState_ResetStackProtection(thread: *mut ffi::PyThreadState);
}

/// # Safety
/// The thread is attached, and about to switch to the stack at `base`.
#[inline(always)]
pub(super) unsafe fn protect(thread: *mut ffi::PyThreadState, base: usize, len_bytes: usize) -> bool {
    // SAFETY: by the contract; the function only compares and stores the bounds.
    unsafe { PyUnstable_ThreadState_SetStackProtection(thread, base as *mut c_void, len_bytes) == 0 }
}

/// # Safety
/// The thread is attached and on its own stack.
#[inline(always)]
pub(super) unsafe fn unprotect(thread: *mut ffi::PyThreadState) {
    // SAFETY: by the contract.
    unsafe { PyUnstable_ThreadState_ResetStackProtection(thread) }
}

/// The value for the field `FRAME` that makes a thread state show `innermost` as its current frame.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn show(_holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    innermost
}
