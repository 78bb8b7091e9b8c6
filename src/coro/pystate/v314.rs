//! CPython 3.14: offsets in `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_interpframe_structs.h`), for 64-bit builds with the GIL.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;

use super::CFrame;

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

pub(super) const INTERP: usize = 16; // void *PyThreadState.interp
pub(super) const EVAL_BREAKER: Option<usize> = None;
pub(super) const RECURSION_REMAINING: usize = 48; // int PyThreadState.py_recursion_remaining
pub(super) const RECURSION_LIMIT: usize = 52; // int PyThreadState.py_recursion_limit
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
pub(super) const C_RECURSION_REMAINING: Option<usize> = None;
pub(super) const TRASH_NESTING: Option<usize> = None;
pub(super) const EXECUTOR: Option<usize> = Some(272); // void *PyThreadState.current_executor
/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = true;
pub(super) const FRAME_PREVIOUS: usize = 8; // void *_PyInterpreterFrame.previous
pub(super) const CODE_VERSION: Option<usize> = Some(168); // uintptr_t PyCodeObject._co_instrumentation_version

/// The chain of frames is empty at first.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn root_frame(_thread: *mut u8, _cframe: *mut CFrame) -> *mut u8 {
    ptr::null_mut()
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
pub(super) const RUNNING_LOOP: Option<usize> = Some(864); // void *_PyThreadStateImpl.asyncio_running_loop
pub(super) const RUNNING_TASK: Option<usize> = Some(872); // void *_PyThreadStateImpl.asyncio_running_task

type SetProtection = unsafe extern "C" fn(*mut ffi::PyThreadState, *mut c_void, usize) -> c_int;
type ResetProtection = unsafe extern "C" fn(*mut ffi::PyThreadState);

/// `PyUnstable_ThreadState_SetStackProtection` and its counterpart (`Include/cpython/pystate.h`), which exist from
/// 3.14.1 on. They are looked up at run time, since 3.14.0 could not load an extension that links to them.
static SET: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static RESET: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Finds the interpreter functions that this version needs. Returns an error text if one is missing.
pub(super) fn look_up() -> Option<&'static str> {
    // SAFETY: names that end in NUL; the default search order includes the interpreter.
    let (set, reset) = unsafe {
        (
            libc::dlsym(
                libc::RTLD_DEFAULT,
                c"PyUnstable_ThreadState_SetStackProtection".as_ptr(),
            ),
            libc::dlsym(
                libc::RTLD_DEFAULT,
                c"PyUnstable_ThreadState_ResetStackProtection".as_ptr(),
            ),
        )
    };
    if set.is_null() || reset.is_null() {
        return Some(
            "coros need CPython 3.14.1 or later: 3.14.0 has no function to set the bounds of a stack",
        );
    }
    SET.store(set, Ordering::Relaxed);
    RESET.store(reset, Ordering::Relaxed);
    None
}

/// # Safety
/// The thread is attached, and about to switch to that stack.
#[inline(always)]
pub(super) unsafe fn protect(thread: *mut ffi::PyThreadState, base: usize, len_bytes: usize) -> bool {
    // SAFETY: `look_up` has found a function of this type; there are no coros otherwise.
    unsafe {
        let set = std::mem::transmute::<*mut c_void, SetProtection>(SET.load(Ordering::Relaxed));
        set(thread, base as *mut c_void, len_bytes) == 0
    }
}

/// # Safety
/// The thread is attached and on its own stack.
#[inline(always)]
pub(super) unsafe fn unprotect(thread: *mut ffi::PyThreadState) {
    // SAFETY: as above.
    unsafe {
        let reset = std::mem::transmute::<*mut c_void, ResetProtection>(RESET.load(Ordering::Relaxed));
        reset(thread);
    }
}

/// The value of the field `FRAME` with which a thread state shows `innermost` as its current frame.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn show(_holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    innermost
}
