//! CPython 3.15: offsets in `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_interpframe_structs.h`), for 64-bit builds with the GIL.

use std::ffi::{c_int, c_void};

use pyo3::ffi;

use super::{CFrame, field};

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

pub(super) const INTERP: usize = 16; // void *PyThreadState.interp
pub(super) const EVAL_BREAKER: Option<usize> = Some(24); // uintptr_t PyThreadState.eval_breaker
pub(super) const RECURSION_REMAINING: usize = 52; // int PyThreadState.py_recursion_remaining
pub(super) const RECURSION_LIMIT: usize = 56; // int PyThreadState.py_recursion_limit
pub(super) const RECURSION_HEADROOM: usize = 60; // int PyThreadState.recursion_headroom
pub(super) const TRACING: usize = 64; // int PyThreadState.tracing
pub(super) const WHAT_EVENT: usize = 68; // int PyThreadState.what_event
pub(super) const FRAME: usize = 72; // void *PyThreadState.current_frame
const BASE_FRAME: usize = 80; // void *PyThreadState.base_frame
pub(super) const PROFILE_FUNCTION: usize = 104; // void *PyThreadState.c_profilefunc
pub(super) const PROFILE_OBJECT: usize = 120; // void *PyThreadState.c_profileobj
pub(super) const CURRENT_EXCEPTION: usize = 136; // void *PyThreadState.current_exception
pub(super) const EXC_INFO: usize = 144; // void *PyThreadState.exc_info
pub(super) const THREAD_ID: usize = 176; // unsigned long PyThreadState.thread_id
pub(super) const CONTEXT: usize = 232; // void *PyThreadState.context
pub(super) const CONTEXT_VER: usize = 240; // uint64_t PyThreadState.context_ver
pub(super) const DATASTACK_CHUNK: usize = 256; // void *PyThreadState.datastack_chunk
pub(super) const DATASTACK_TOP: usize = 264; // void *PyThreadState.datastack_top
pub(super) const DATASTACK_LIMIT: usize = 272; // void *PyThreadState.datastack_limit
pub(super) const EXC_STATE: usize = 288; // _PyErr_StackItem PyThreadState.exc_state
pub(super) const C_RECURSION_REMAINING: Option<usize> = None;
pub(super) const TRASH_NESTING: Option<usize> = None;
pub(super) const EXECUTOR: Option<usize> = Some(304); // void *PyThreadState.current_executor
/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = true;
pub(super) const FRAME_PREVIOUS: usize = 8; // void *_PyInterpreterFrame.previous
pub(super) const CODE_VERSION: Option<usize> = Some(168); // uintptr_t PyCodeObject._co_instrumentation_version

/// The chain of frames ends in the thread's base frame. Nothing runs in that frame or changes it, so all chains of the
/// thread may share it. The sampling profiler (`profiling.sampling`) drops samples whose chain does not lead to it.
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

/// `asyncio_running_loop` and `asyncio_running_task` in `_PyThreadStateImpl` (`Include/internal/pycore_tstate.h`).
pub(super) const RUNNING_LOOP: Option<usize> = Some(1024); // void *_PyThreadStateImpl.asyncio_running_loop
pub(super) const RUNNING_TASK: Option<usize> = Some(1032); // void *_PyThreadStateImpl.asyncio_running_task

/// Only the offsets are needed.
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
/// The thread is attached, and about to switch to that stack.
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

/// The value of the field `FRAME` with which a thread state shows `innermost` as its current frame.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn show(_holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    innermost
}
