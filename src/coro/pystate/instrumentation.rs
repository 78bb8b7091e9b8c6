//! Instruments the code of the frames on suspended stacks, on 3.15.
//!
//! When a tool is switched on (`sys.monitoring`, `sys.settrace`, `sys.setprofile`), CPython instruments the code of all
//! frames that it finds through the thread states, and later any code when it is entered. It misses the frames of
//! stacks that are suspended at that moment. CPython 3.15 crashes if an exception is raised in such a frame, because it
//! assumes that the code has monitoring data. So the code of these frames is instrumented before they continue. 3.12
//! to 3.14 do not crash; they only report fewer events for such frames.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use super::{field, frame_object, imp};

/// The bits of `eval_breaker` that are flags (`_PY_EVAL_EVENTS_MASK`); the others are the version.
const FLAGS: usize = 0xff;

type Instrument = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyInterpreterState) -> c_int;

/// `_Py_Instrument` (`Include/internal/pycore_code.h`): does nothing if the code is up to date.
static INSTRUMENT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Finds the interpreter's function. Returns an error text if it is missing.
pub(super) fn look_up() -> Option<&'static str> {
    imp::EVAL_BREAKER?; // None: not needed
    // SAFETY: a name that ends in NUL; the default search order includes the interpreter.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_Py_Instrument".as_ptr()) };
    INSTRUMENT.store(function, Ordering::Relaxed);
    function
        .is_null()
        .then_some("coros need the function _Py_Instrument, which this interpreter does not export")
}

/// The version of the instrumentation that code must have now. It changes when a tool is switched on or off. It is
/// always 0 before 3.15.
///
/// # Safety
/// `thread` is a live thread state.
#[inline(always)]
pub(in crate::coro) unsafe fn version(thread: *mut ffi::PyThreadState) -> usize {
    match imp::EVAL_BREAKER {
        Some(offset) => {
            // SAFETY: by the contract. Other threads set flags in the field, atomically.
            let breaker = unsafe { AtomicUsize::from_ptr(field(thread.cast(), offset)) };
            breaker.load(Ordering::Relaxed) & !FLAGS
        }
        None => 0,
    }
}

/// Instruments the code of a chain of frames for the tools that are switched on.
///
/// # Safety
/// Attached; `innermost` is the innermost frame of a suspended stack, or of the stack on which this thread runs.
#[cold]
#[inline(never)]
pub(super) unsafe fn update(py: Python<'_>, innermost: *mut u8) -> PyResult<()> {
    let function = INSTRUMENT.load(Ordering::Relaxed);
    if function.is_null() {
        return Ok(());
    }
    // SAFETY: the pointer is a function of this type, found at import. The getters give new references, or null at the
    // end of the chain; a frame keeps its code. Nothing here runs Python code, so the chain stays as it is.
    unsafe {
        let instrument = std::mem::transmute::<*mut c_void, Instrument>(function);
        let mut next = frame_object(py, innermost);
        while let Some(frame) = next {
            let code = Bound::from_owned_ptr(py, ffi::PyFrame_GetCode(frame.as_ptr().cast()).cast());
            if instrument(code.as_ptr(), ffi::PyInterpreterState_Get()) != 0 {
                return Err(PyErr::fetch(py));
            }
            next = Bound::from_owned_ptr_or_opt(py, ffi::PyFrame_GetBack(frame.as_ptr().cast()).cast());
        }
    }
    Ok(())
}

/// Like `update`, for the frames in the thread state. An error goes to `sys.unraisablehook`.
///
/// # Safety
/// `thread` is the attached thread's state.
#[cold]
#[inline(never)]
pub(in crate::coro) unsafe fn update_shown(py: Python<'_>, thread: *mut ffi::PyThreadState) {
    // SAFETY: by the contract.
    let updated = unsafe { update(py, imp::innermost(*field(thread.cast(), imp::FRAME))) };
    if let Err(error) = updated {
        error.write_unraisable(py, None);
    }
}
