//! CPython 3.12: offsets in `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_frame.h`), for 64-bit builds with the GIL.

use pyo3::ffi;

use super::CFrame;

/// Why coros are not available, if they are not.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

pub(super) const INTERP: usize = 16;
pub(super) const RECURSION_REMAINING: usize = 28;
pub(super) const RECURSION_LIMIT: usize = 32;
pub(super) const TRACING: usize = 44;
pub(super) const WHAT_EVENT: usize = 48;
pub(super) const FRAME: usize = 56;
pub(super) const CURRENT_EXCEPTION: usize = 96;
pub(super) const EXC_INFO: usize = 104;
pub(super) const THREAD_ID: usize = 136;
pub(super) const CONTEXT: usize = 208;
pub(super) const CONTEXT_VER: usize = 216;
pub(super) const DATASTACK_CHUNK: usize = 232;
pub(super) const DATASTACK_TOP: usize = 240;
pub(super) const DATASTACK_LIMIT: usize = 248;
pub(super) const EXC_STATE: usize = 256;
pub(super) const C_RECURSION_REMAINING: Option<usize> = Some(36);
pub(super) const TRASH_NESTING: Option<usize> = Some(152);
pub(super) const EXECUTOR: Option<usize> = None;
pub(super) const FRAME_PREVIOUS: usize = 8;

/// Offset of `current_frame` in `_PyCFrame`.
const CURRENT_FRAME: usize = 0;

/// The chain of frames begins in a `_PyCFrame` of the coro's own.
pub(super) fn base_frame(base: *mut CFrame) -> *mut u8 {
    base.cast()
}

/// # Safety
/// `frame` is a live `_PyCFrame`.
pub(super) unsafe fn innermost(frame: *mut u8) -> *mut u8 {
    // SAFETY: by the contract.
    unsafe { *frame.add(CURRENT_FRAME).cast() }
}

/// # Safety
/// None is needed.
#[inline(always)]
pub(super) unsafe fn before_swap(_thread: *mut u8, _next: *mut u8) {}

/// The running task lies in a dict (`coro/tasks.rs`).
pub(super) const RUNNING_TASK: Option<usize> = None;

/// Nothing is needed beyond the offsets.
pub(super) fn look_up() -> Option<&'static str> {
    None
}

/// The interpreter counts C recursion and does not look at the stack.
///
/// # Safety
/// None is needed.
#[inline(always)]
pub(super) unsafe fn protect(_thread: *mut ffi::PyThreadState, _base: usize, _len_bytes: usize) {}

/// # Safety
/// None is needed.
#[inline(always)]
pub(super) unsafe fn unprotect(_thread: *mut ffi::PyThreadState) {}

/// What a thread state has to hold to show `innermost`.
///
/// # Safety
/// `holder` is writable, and lives as long as it is shown.
pub(super) unsafe fn show(holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    let holder = holder.cast::<u8>();
    // SAFETY: by the contract.
    unsafe { *holder.add(CURRENT_FRAME).cast() = innermost };
    holder
}
