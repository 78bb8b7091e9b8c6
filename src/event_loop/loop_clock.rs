//! The loop's clock as programs see it: `loop.time()`, which a program may replace.
//!
//! Deadlines, due timers and the length of a poll follow `loop.time()`, as in asyncio. A program may replace it on one
//! loop, in a subclass, or temporarily on the class. As long as it has not, native code reads the clock itself instead
//! of calling the method. Whether `time` is still the native method is checked with one comparison of the type's
//! version tag. `Loop.__setattr__` reports when a program sets the attribute on the loop itself. If a program puts it
//! into the loop's `__dict__` in another way, that takes effect when the next run begins.
//!
//! The same holds for `call_at`, because asyncio's `call_later` calls it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::pyloop::LoopObject;
use super::reactor::time_s;
use crate::binding::attributes::version_of;
use crate::binding::names::{Kept, names};
use crate::binding::native_type::{Args, This, none};

/// A version tag that no type has.
const UNKNOWN: u32 = u32::MAX;

/// The functions of the native `time` and `call_at`.
static NATIVE: [AtomicPtr<()>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

/// The version of the loop's type when the last check found the native clock.
pub(super) struct LoopClock(AtomicU32);

impl LoopClock {
    pub(super) const fn new() -> Self {
        Self(AtomicU32::new(UNKNOWN))
    }
}

impl LoopObject {
    /// True if neither `time` nor `call_at` is replaced.
    #[inline(always)]
    pub(crate) fn has_native_clock(&self, py: Python<'_>) -> bool {
        // SAFETY: a live object has a live type.
        let version = unsafe { version_of(ffi::Py_TYPE(self.as_ptr())) };
        version == self.clock.0.load(Ordering::Relaxed) || self.check_clock(py)
    }

    /// Called when an attribute of the loop may have been set.
    pub(super) fn forget_clock(&self) {
        self.clock.0.store(UNKNOWN, Ordering::Relaxed);
    }

    #[cold]
    fn check_clock(&self, py: Python<'_>) -> bool {
        // SAFETY: a live object has a live type.
        let version = || unsafe { version_of(ffi::Py_TYPE(self.as_ptr())) };
        let before = version();
        let methods = [names(py).time, names(py).call_at];
        let is_native = methods
            .iter()
            .zip(&NATIVE)
            .all(|(name, native)| self.is_native(py, *name, native.load(Ordering::Acquire)));
        // If the type had no version, the lookups have given it one, if it can have one. Then the next check stores it.
        if is_native && before != 0 && before == version() {
            self.clock.0.store(before, Ordering::Relaxed);
        } else {
            self.forget_clock();
        }
        is_native
    }

    /// Whether the loop's attribute is the native method of this loop.
    fn is_native(&self, py: Python<'_>, name: Kept, native: *mut ()) -> bool {
        let found = name
            .bind(py)
            .cast_into::<PyString>()
            .map_err(PyErr::from)
            .and_then(|name| self.to_bound(py).getattr(name));
        // The error is ignored here. It comes again when the attribute is used.
        let Ok(found) = found else { return false };
        // SAFETY: the object is alive, and it is a built-in method wherever its parts are read.
        unsafe {
            ffi::PyCFunction_CheckExact(found.as_ptr()) != 0
                && ffi::PyCFunction_GetSelf(found.as_ptr()) == self.as_ptr()
                && ffi::PyCFunction_GetFunction(found.as_ptr())
                    .is_some_and(|function| function as *mut () == native)
        }
    }

    /// `loop.time()`: seconds of the loop's clock.
    #[inline]
    pub(crate) fn now_s(&self, py: Python<'_>) -> PyResult<f64> {
        if self.has_native_clock(py) {
            return Ok(time_s());
        }
        let name = names(py).time.bind(py).cast_into::<PyString>()?;
        self.to_bound(py).call_method0(name)?.extract()
    }
}

/// `_attributes_changed()`: see `forget_clock`.
pub(super) fn attributes_changed<'py>(
    this: This<'py, LoopObject>,
    _: Args<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    this.forget_clock();
    Ok(none(this.py()))
}

/// Stores the native functions, from the table of the loop's methods.
pub(super) fn remember(methods: &[ffi::PyMethodDef]) {
    for (name, native) in [c"time", c"call_at"].into_iter().zip(&NATIVE) {
        for method in methods {
            // SAFETY: method tables consist of C string literals, and their functions are pointers.
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
