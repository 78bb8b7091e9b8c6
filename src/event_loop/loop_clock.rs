//! The loop's clock as programs see it: `loop.time()`, which a program may replace.
//!
//! Deadlines, due timers and the length of a poll follow `loop.time()`, as in asyncio. A program may replace `time` on
//! one loop, in a subclass, or temporarily on the class. Unless a program has done that, native code reads the clock
//! itself instead of calling the method. To check that `time` is still the native method, it compares the type's
//! version tag with the tag in `ClockVersion`. The type's tag changes when an attribute of the type or of a base class
//! changes. If a program sets or deletes `time` on the loop itself, `Loop.__setattr__` or `Loop.__delattr__` makes the
//! loop forget the tag in `ClockVersion`. If a program changes `time` in the loop's `__dict__` without these methods,
//! that takes effect when the next run begins.
//!
//! The same holds for `call_at`, because asyncio's `call_later` calls it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use grapeshot_core::sys::clock;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::binding::attributes::version_of;
use crate::binding::names::{Kept, names};

/// A version tag that no type has.
const UNKNOWN: u32 = u32::MAX;

/// The functions of the native `time` and `call_at`.
static NATIVE: [AtomicPtr<()>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

/// The native clock in seconds: `CLOCK_MONOTONIC`, the clock of `time.monotonic()`.
#[inline]
pub(crate) fn time_s() -> f64 {
    clock::now_ns() as f64 / 1e9
}

/// The version that the loop's type had when a check last found the native clock. Each loop object has one.
pub(super) struct ClockVersion(AtomicU32);

impl ClockVersion {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(UNKNOWN))
    }

    /// Called when an attribute of the loop may have been set.
    pub(super) fn forget(&self) {
        self.0.store(UNKNOWN, Ordering::Relaxed);
    }
}

/// The clock of a loop.
#[derive(Clone, Copy)]
pub(crate) struct LoopClock<'a> {
    event_loop: *mut ffi::PyObject,
    version: &'a ClockVersion,
}

impl<'a> LoopClock<'a> {
    /// # Safety
    /// `event_loop` is a loop that is alive during `'a`, and `version` belongs to it.
    #[inline(always)]
    pub(super) unsafe fn new(event_loop: *mut ffi::PyObject, version: &'a ClockVersion) -> Self {
        Self { event_loop, version }
    }

    /// True if neither `time` nor `call_at` is replaced.
    #[inline(always)]
    pub(crate) fn is_native(self, py: Python<'_>) -> bool {
        self.type_version() == self.version.0.load(Ordering::Relaxed) || self.check(py)
    }

    #[inline(always)]
    fn type_version(self) -> u32 {
        // SAFETY: the loop is alive by the contract of `new`, so its type is alive, too.
        unsafe { version_of(ffi::Py_TYPE(self.event_loop)) }
    }

    fn to_bound(self, py: Python<'_>) -> Bound<'_, PyAny> {
        // SAFETY: the loop is alive by the contract of `new`; from_borrowed adds a reference.
        unsafe { Bound::from_borrowed_ptr(py, self.event_loop) }
    }

    #[cold]
    fn check(self, py: Python<'_>) -> bool {
        let before = self.type_version();
        let methods = [names(py).time, names(py).call_at];
        let is_native = methods
            .iter()
            .zip(&NATIVE)
            .all(|(name, native)| self.is_native_method(py, *name, native.load(Ordering::Acquire)));
        // If the type had no version, the lookups have given it one, unless CPython has run out of versions. The next
        // check stores that version.
        if is_native && before != 0 && before == self.type_version() {
            self.version.0.store(before, Ordering::Relaxed);
        } else {
            self.version.forget();
        }
        is_native
    }

    /// Whether the loop's attribute is the native method of this loop.
    fn is_native_method(self, py: Python<'_>, name: Kept, native: *mut ()) -> bool {
        let found = name
            .bind(py)
            .cast_into::<PyString>()
            .map_err(PyErr::from)
            .and_then(|name| self.to_bound(py).getattr(name));
        // The error is ignored here. It is raised again when the attribute is used.
        let Ok(found) = found else { return false };
        // SAFETY: the object is alive, and its parts are read only after the check that it is a built-in method.
        unsafe {
            ffi::PyCFunction_CheckExact(found.as_ptr()) != 0
                && ffi::PyCFunction_GetSelf(found.as_ptr()) == self.event_loop
                && ffi::PyCFunction_GetFunction(found.as_ptr())
                    .is_some_and(|function| function as *mut () == native)
        }
    }

    /// `loop.time()`: seconds of the loop's clock.
    #[inline]
    pub(crate) fn now_s(self, py: Python<'_>) -> PyResult<f64> {
        if self.is_native(py) {
            return Ok(time_s());
        }
        let name = names(py).time.bind(py).cast_into::<PyString>()?;
        self.to_bound(py).call_method0(name)?.extract()
    }
}

/// Stores the native functions, from the table of the loop's methods.
pub(super) fn remember(methods: &[ffi::PyMethodDef]) {
    for (name, native) in [c"time", c"call_at"].into_iter().zip(&NATIVE) {
        for method in methods {
            // SAFETY: the names in method tables are C strings that live forever. All functions in this table have the
            // type that is read here.
            unsafe {
                if std::ffi::CStr::from_ptr(method.ml_name) == name {
                    native.store(
                        method.ml_meth.PyCFunctionFastWithKeywords as *mut (),
                        Ordering::Release,
                    );
                }
            }
        }
    }
}
