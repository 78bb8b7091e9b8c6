//! Native profile functions: functions that were set with `PyEval_SetProfile` and without a Python object.
//!
//! Such a function keeps its own stack of the frames that were called and have not returned, often as borrowed
//! pointers: memray reads them at each allocation. So it must be told when a coro that stops running leaves its frames,
//! and when the coro enters them again. CPython reports the frames of generators in the same way.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use super::{CFrame, field, imp};

/// The event that a profile function is called with.
#[derive(Clone, Copy)]
pub(in crate::coro) enum Event {
    Call,
    Return,
}

/// A Python function that does nothing.
static PROBE: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// Whether there is a profile function that must be told of switches. Python's own ones (`sys.setprofile`, cProfile)
/// have an object and must not be told: they keep no pointers to frames, and they would count each report as a call.
///
/// # Safety
/// `thread` is the attached thread's state.
#[inline(always)]
pub(in crate::coro) unsafe fn has_native_profile(thread: *mut ffi::PyThreadState) -> bool {
    // SAFETY: by the contract.
    unsafe {
        *field::<usize>(thread.cast(), imp::PROFILE_FUNCTION) != 0
            && *field::<usize>(thread.cast(), imp::PROFILE_OBJECT) == 0
    }
}

/// Whether the thread is inside a trace or profile function. The calls that such a function makes are not reported.
///
/// # Safety
/// `thread` is the attached thread's state.
pub(in crate::coro) unsafe fn is_tracing(thread: *mut ffi::PyThreadState) -> bool {
    // SAFETY: by the contract.
    unsafe { *field::<c_int>(thread.cast(), imp::TRACING) != 0 }
}

/// The frames that the thread is in, innermost first.
///
/// # Safety
/// `thread` is the attached thread's state.
pub(in crate::coro) unsafe fn frames(
    py: Python<'_>,
    thread: *mut ffi::PyThreadState,
) -> Vec<Bound<'_, PyAny>> {
    let mut frames: Vec<Bound<'_, PyAny>> = Vec::new();
    // SAFETY: attached; the getters give new references, or null at the end of the chain.
    unsafe {
        let mut next = ffi::PyThreadState_GetFrame(thread);
        while let Some(frame) = Bound::from_owned_ptr_or_opt(py, next.cast()) {
            next = ffi::PyFrame_GetBack(frame.as_ptr().cast());
            frames.push(frame);
        }
    }
    frames
}

/// Makes the probe. Called once, at import.
pub(in crate::coro) fn set_up(py: Python<'_>) -> PyResult<()> {
    let probe = py.eval(c"lambda: None", None, None)?;
    PROBE.store(probe.into_ptr(), Ordering::Release);
    Ok(())
}

/// The version of a code object's instrumentation. It stands for the set of events that the code reports (3.12 and
/// later).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::coro) enum Version {
    /// Before Python 3.12, code has no version, and all returns are reported.
    None,
    Number(usize),
    /// The version cannot be found out: inside a trace or profile function CPython does not update the instrumentation.
    Unknown,
}

/// Calls a Python function that does nothing, so that a profile function that was just set reads the thread's frames
/// now. Returns the version that code gets when it is entered now.
pub(in crate::coro) fn call_probe(py: Python<'_>) -> PyResult<Version> {
    // SAFETY: attached; null, or a function that is never freed.
    unsafe {
        let Some(probe) = Bound::from_borrowed_ptr_or_opt(py, PROBE.load(Ordering::Relaxed)) else {
            return Ok(Version::Unknown);
        };
        if is_tracing(ffi::PyThreadState_Get()) {
            return Ok(Version::Unknown);
        }
        probe.call0()?;
        Ok(version_of(ffi::PyFunction_GetCode(probe.as_ptr())))
    }
}

/// # Safety
/// `code` is a live code object.
unsafe fn version_of(code: *mut ffi::PyObject) -> Version {
    match imp::CODE_VERSION {
        // SAFETY: by the contract.
        Some(offset) => Version::Number(unsafe { *field(code.cast(), offset) }),
        None => Version::None,
    }
}

/// Whether the code of a frame has the given version, so that CPython will report the frame's return; None if that is
/// unknown.
pub(in crate::coro) fn has_version(frame: &Bound<'_, PyAny>, version: Version) -> Option<bool> {
    // SAFETY: a live frame; a new reference to its code, which is never null.
    unsafe {
        let code = ffi::PyFrame_GetCode(frame.as_ptr().cast()).cast::<ffi::PyObject>();
        let is_same = version_of(code) == version;
        ffi::Py_DECREF(code);
        (version != Version::Unknown).then_some(is_same)
    }
}

/// Calls the profile function for one frame. During the call that frame is the thread's innermost one, as in CPython's
/// own calls.
///
/// # Safety
/// `thread` is the attached thread's state, and `frame` a frame of its chain.
pub(in crate::coro) unsafe fn tell(
    thread: *mut ffi::PyThreadState,
    frame: &Bound<'_, PyAny>,
    event: Event,
) -> PyResult<()> {
    let mut holder = CFrame { words: [0; 3] };
    // SAFETY: by the contract; the thread state points to `holder` only while it is alive. An earlier call may have
    // removed the function.
    unsafe {
        if !has_native_profile(thread) {
            return Ok(());
        }
        let function = *field::<Option<ffi::Py_tracefunc>>(thread.cast(), imp::PROFILE_FUNCTION);
        let Some(function) = function else {
            return Ok(());
        };
        let what = match event {
            Event::Call => ffi::PyTrace_CALL,
            Event::Return => ffi::PyTrace_RETURN,
        };
        ffi::PyThreadState_EnterTracing(thread);
        let place = field::<*mut u8>(thread.cast(), imp::FRAME);
        let shown = *field(frame.as_ptr().cast(), imp::F_FRAME);
        let own = std::mem::replace(&mut *place, imp::show(&raw mut holder, shown));
        let status = function(ptr::null_mut(), frame.as_ptr().cast(), what, ffi::Py_None());
        *place = own;
        ffi::PyThreadState_LeaveTracing(thread);
        if status == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(frame.py()))
        }
    }
}
