//! CPython 3.13: offsets in `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_frame.h`), for 64-bit builds with the GIL.

use std::ffi::c_int;

use pyo3::ffi;

use super::CFrame;

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

pub(super) const INTERP: usize = 16; // void *PyThreadState.interp
pub(super) const EVAL_BREAKER: Option<usize> = None;
pub(super) const RECURSION_REMAINING: usize = 44; // int PyThreadState.py_recursion_remaining
pub(super) const RECURSION_LIMIT: usize = 48; // int PyThreadState.py_recursion_limit
pub(super) const RECURSION_HEADROOM: usize = 56; // int PyThreadState.recursion_headroom
pub(super) const TRACING: usize = 60; // int PyThreadState.tracing
pub(super) const WHAT_EVENT: usize = 64; // int PyThreadState.what_event
pub(super) const FRAME: usize = 72; // void *PyThreadState.current_frame
pub(super) const PROFILE_FUNCTION: usize = 80; // void *PyThreadState.c_profilefunc
pub(super) const PROFILE_OBJECT: usize = 96; // void *PyThreadState.c_profileobj
pub(super) const CURRENT_EXCEPTION: usize = 112; // void *PyThreadState.current_exception
pub(super) const EXC_INFO: usize = 120; // void *PyThreadState.exc_info
pub(super) const THREAD_ID: usize = 152; // unsigned long PyThreadState.thread_id
pub(super) const CONTEXT: usize = 208; // void *PyThreadState.context
pub(super) const CONTEXT_VER: usize = 216; // uint64_t PyThreadState.context_ver
pub(super) const DATASTACK_CHUNK: usize = 232; // void *PyThreadState.datastack_chunk
pub(super) const DATASTACK_TOP: usize = 240; // void *PyThreadState.datastack_top
pub(super) const DATASTACK_LIMIT: usize = 248; // void *PyThreadState.datastack_limit
pub(super) const EXC_STATE: usize = 256; // _PyErr_StackItem PyThreadState.exc_state
pub(super) const C_RECURSION_REMAINING: Option<usize> = Some(52); // int PyThreadState.c_recursion_remaining
pub(super) const TRASH_NESTING: Option<usize> = None;
pub(super) const EXECUTOR: Option<usize> = Some(272); // void *PyThreadState.previous_executor
/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = true;
pub(super) const FRAME_PREVIOUS: usize = 8; // void *_PyInterpreterFrame.previous
pub(super) const CODE_VERSION: Option<usize> = Some(168); // uintptr_t PyCodeObject._co_instrumentation_version

/// The chain of frames is empty at first.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn root_frame(_thread: *mut u8, _cframe: *mut CFrame) -> *mut u8 {
    std::ptr::null_mut()
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

/// asyncio keeps the running task in a dict instead (`coro/tasks.rs`).
pub(super) const RUNNING_TASK: Option<usize> = None;
pub(super) const RUNNING_LOOP: Option<usize> = None;

/// Only the offsets are needed.
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

/// The value of the field `FRAME` with which a thread state shows `innermost` as its current frame.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn show(_holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    innermost
}
