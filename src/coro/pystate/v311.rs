//! CPython 3.11: offsets in `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_frame.h`), for 64-bit builds with the GIL.

use std::ffi::c_int;

use pyo3::ffi;

use super::{CFrame, field};

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

pub(super) const INTERP: usize = 16; // void *PyThreadState.interp
pub(super) const EVAL_BREAKER: Option<usize> = None;
pub(super) const RECURSION_REMAINING: usize = 32; // int PyThreadState.recursion_remaining
pub(super) const RECURSION_LIMIT: usize = 36; // int PyThreadState.recursion_limit
pub(super) const RECURSION_HEADROOM: usize = 40; // int PyThreadState.recursion_headroom
pub(super) const TRACING: usize = 44; // int PyThreadState.tracing
pub(super) const WHAT_EVENT: usize = 48; // int PyThreadState.tracing_what
pub(super) const FRAME: usize = 56; // void *PyThreadState.cframe
pub(super) const PROFILE_FUNCTION: usize = 64; // void *PyThreadState.c_profilefunc
const TRACE_FUNCTION: usize = 72; // void *PyThreadState.c_tracefunc
pub(super) const PROFILE_OBJECT: usize = 80; // void *PyThreadState.c_profileobj
pub(super) const CURRENT_EXCEPTION: usize = 96; // void *PyThreadState.curexc_type
pub(super) const EXC_INFO: usize = 120; // void *PyThreadState.exc_info
pub(super) const THREAD_ID: usize = 152; // unsigned long PyThreadState.thread_id
pub(super) const CONTEXT: usize = 224; // void *PyThreadState.context
pub(super) const CONTEXT_VER: usize = 232; // uint64_t PyThreadState.context_ver
pub(super) const DATASTACK_CHUNK: usize = 296; // void *PyThreadState.datastack_chunk
pub(super) const DATASTACK_TOP: usize = 304; // void *PyThreadState.datastack_top
pub(super) const DATASTACK_LIMIT: usize = 312; // void *PyThreadState.datastack_limit
pub(super) const EXC_STATE: usize = 320; // _PyErr_StackItem PyThreadState.exc_state
pub(super) const C_RECURSION_REMAINING: Option<usize> = None;
pub(super) const TRASH_NESTING: Option<usize> = Some(168); // int PyThreadState.trash_delete_nesting
pub(super) const EXECUTOR: Option<usize> = None;
/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = false;
pub(super) const FRAME_PREVIOUS: usize = 48; // void *_PyInterpreterFrame.previous
pub(super) const CODE_VERSION: Option<usize> = None;

/// Fields and size of `_PyCFrame`.
const USE_TRACING: usize = 0; // uint8_t _PyCFrame.use_tracing
const CFRAME_LEN: usize = 24; // sizeof(_PyCFrame)
const _: () = assert!(CFRAME_LEN == size_of::<CFrame>());
const CURRENT_FRAME: usize = 8; // void *_PyCFrame.current_frame

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

/// Sets whether calls are traced in the `_PyCFrame` that becomes current. They are if the thread has a trace or profile
/// function, and the stack is not already inside such a function (`tracing` counts the nesting).
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
/// `holder` is writable, and lives as long as the thread state points to it.
pub(super) unsafe fn show(holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    let holder = holder.cast::<u8>();
    // SAFETY: by the contract.
    unsafe { *holder.add(CURRENT_FRAME).cast() = innermost };
    holder
}
