//! The placeholder for an interpreter whose thread state has an unknown layout: the package works, but importing
//! `grapeshot.coro` raises `ImportError`.

use std::ffi::c_int;
use std::ptr;

use pyo3::ffi;

use super::CFrame;

/// The reason why coros are not available.
#[cfg(Py_GIL_DISABLED)]
pub(in crate::coro) const UNSUPPORTED: Option<&str> =
    Some("coros support only CPython 3.14 and 3.15 among the free-threaded builds");
#[cfg(not(Py_GIL_DISABLED))]
pub(in crate::coro) const UNSUPPORTED: Option<&str> = Some("coros support only CPython 3.11 to 3.15");

pub(super) const INTERP: usize = 0;
pub(super) const EVAL_BREAKER: Option<usize> = None;
pub(super) const RECURSION_REMAINING: usize = 0;
pub(super) const RECURSION_LIMIT: usize = 0;
pub(super) const RECURSION_HEADROOM: usize = 0;
pub(super) const TRACING: usize = 0;
pub(super) const WHAT_EVENT: usize = 0;
pub(super) const FRAME: usize = 0;
pub(super) const PROFILE_FUNCTION: usize = 0;
pub(super) const PROFILE_OBJECT: usize = 0;
pub(super) const CURRENT_EXCEPTION: usize = 0;
pub(super) const EXC_INFO: usize = 0;
pub(super) const THREAD_ID: usize = 0;
pub(super) const CONTEXT: usize = 0;
pub(super) const CONTEXT_VER: usize = 0;
pub(super) const DATASTACK_CHUNK: usize = 0;
pub(super) const DATASTACK_TOP: usize = 0;
pub(super) const DATASTACK_LIMIT: usize = 0;
pub(super) const EXC_STATE: usize = 0;
pub(super) const C_RECURSION_REMAINING: Option<usize> = None;
pub(super) const TRASH_NESTING: Option<usize> = None;
pub(super) const EXECUTOR: Option<usize> = None;
/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = false;
pub(super) const FRAME_PREVIOUS: usize = 0;
pub(super) const CODE_VERSION: Option<usize> = None;
pub(super) const CODE_FLAGS: usize = 0;
pub(super) const F_FRAME: usize = 0;
pub(super) const RUNNING_TASK: Option<usize> = None;
pub(super) const RUNNING_LOOP: Option<usize> = None;

pub(super) fn look_up() -> Option<&'static str> {
    UNSUPPORTED
}

/// # Safety
/// There are no requirements.
pub(super) unsafe fn root_frame(_thread: *mut u8, _cframe: *mut CFrame) -> *mut u8 {
    ptr::null_mut()
}

/// # Safety
/// Never called: there are no coros.
pub(super) unsafe fn innermost(_frame: *mut u8) -> *mut u8 {
    ptr::null_mut()
}

/// # Safety
/// Never called: there are no coros.
pub(super) unsafe fn before_swap(_thread: *mut u8, _next: *mut u8, _tracing: c_int) {}

/// # Safety
/// Never called: there are no coros.
pub(super) unsafe fn protect(_thread: *mut ffi::PyThreadState, _base: usize, _len_bytes: usize) -> bool {
    true
}

/// # Safety
/// Never called: there are no coros.
pub(super) unsafe fn unprotect(_thread: *mut ffi::PyThreadState) {}

/// The value for the field `FRAME` that makes a thread state show `innermost` as its current frame.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn show(_holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    innermost
}
