//! Calls into Python from which the thread may not come back.
//!
//! To 3.13 the interpreter ends a daemon thread that asks for the GIL after the exit has begun: by `pthread_exit`, which
//! unwinds the thread's stack. Rust's frames must not be unwound like that: their destructors would use Python without
//! the GIL, and what catches panics would abort the process. So the innermost of them hangs the thread, as the
//! interpreter itself does from 3.14 on. The process exits meanwhile.

use std::hint::black_box;

use pyo3::ffi;

/// Dropped only by unwinding.
struct Hang;

impl Drop for Hang {
    fn drop(&mut self) {
        loop {
            // SAFETY: waits for a signal, again and again.
            unsafe { libc::pause() };
        }
    }
}

type Call = unsafe extern "C-unwind" fn(
    callable: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject;

type Vectorcall = unsafe extern "C-unwind" fn(
    callable: *mut ffi::PyObject,
    args: *const *mut ffi::PyObject,
    nargsf: usize,
    kwnames: *mut ffi::PyObject,
) -> *mut ffi::PyObject;

// As in pyo3's ffi, but for an ABI that lets something unwind through it. Called only through `black_box`: link-time
// optimization would take this declaration for pyo3's, which promises not to unwind, and leave `Hang` out.
unsafe extern "C-unwind" {
    fn PyObject_Call(
        callable: *mut ffi::PyObject,
        args: *mut ffi::PyObject,
        kwargs: *mut ffi::PyObject,
    ) -> *mut ffi::PyObject;
    fn PyObject_Vectorcall(
        callable: *mut ffi::PyObject,
        args: *const *mut ffi::PyObject,
        nargsf: usize,
        kwnames: *mut ffi::PyObject,
    ) -> *mut ffi::PyObject;
}

/// `PyObject_Call`.
///
/// # Safety
/// As for `PyObject_Call`.
#[inline(always)]
pub(crate) unsafe fn call(
    callable: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    let hang = Hang;
    // SAFETY: by the contract.
    let result = unsafe { black_box(PyObject_Call as Call)(callable, args, kwargs) };
    std::mem::forget(hang);
    result
}

/// `PyObject_Vectorcall`.
///
/// # Safety
/// As for `PyObject_Vectorcall`.
#[inline(always)]
pub(crate) unsafe fn vectorcall(
    callable: *mut ffi::PyObject,
    args: *const *mut ffi::PyObject,
    nargsf: usize,
    kwnames: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    let hang = Hang;
    // SAFETY: by the contract.
    let result = unsafe { black_box(PyObject_Vectorcall as Vectorcall)(callable, args, nargsf, kwnames) };
    std::mem::forget(hang);
    result
}
