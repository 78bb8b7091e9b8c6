//! The details of CPython 3.14, for 64-bit builds.

#[cfg_attr(not(Py_GIL_DISABLED), path = "v314_offsets.rs")]
#[cfg_attr(Py_GIL_DISABLED, path = "v314t_offsets.rs")]
mod offsets;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;

use super::CFrame;
pub(super) use offsets::*;

/// The reason why coros are not available; None if they are.
pub(in crate::coro) const UNSUPPORTED: Option<&str> = None;

/// Whether each entry into the evaluation loop puts an entry frame on the C stack.
pub(super) const HAS_ENTRY_FRAMES: bool = true;

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
/// The thread is attached, and about to switch to the stack at `base`.
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

/// The value for the field `FRAME` that makes a thread state show `innermost` as its current frame.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn show(_holder: *mut CFrame, innermost: *mut u8) -> *mut u8 {
    innermost
}
