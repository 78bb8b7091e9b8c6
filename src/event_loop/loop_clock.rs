//! The loop's clock as programs see it: `loop.time()`, which may be theirs.
//!
//! Deadlines, due timers and the length of a poll follow `loop.time()`, replaced on one loop, in a subclass, or on the
//! class for a while, as in asyncio. While it is the native one nobody calls it: whether it is costs one comparison of
//! the type's version tag. An attribute that is set on the loop itself is told by `Loop.__setattr__`; what was put
//! into its `__dict__` in another way is seen when the next run begins.
//!
//! `call_at` is looked at as well, since asyncio's `call_later` goes through it.

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

/// No type has this version.
const UNKNOWN: u32 = u32::MAX;

/// The functions behind the native `time` and `call_at`.
static NATIVE: [AtomicPtr<()>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

/// The version of the loop's type with which the clock was last seen to be the native one.
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
        version == self.clock.0.load(Ordering::Relaxed) || self.look_at_clock(py)
    }

    /// Something may have been put onto the loop.
    pub(super) fn forget_clock(&self) {
        self.clock.0.store(UNKNOWN, Ordering::Relaxed);
    }

    #[cold]
    fn look_at_clock(&self, py: Python<'_>) -> bool {
        // SAFETY: a live object has a live type.
        let version = || unsafe { version_of(ffi::Py_TYPE(self.as_ptr())) };
        let before = version();
        let methods = [names().time, names().call_at];
        let is_native = methods
            .iter()
            .zip(&NATIVE)
            .all(|(name, native)| self.is_native(py, *name, native.load(Ordering::Acquire)));
        // A type without a version has got one by the look-ups, if it can have one: it is remembered the next time.
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
        // An error comes again when the attribute is used.
        let Ok(found) = found else { return false };
        // SAFETY: the object is alive, and a built-in method where its parts are looked at.
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
        let name = names().time.bind(py).cast_into::<PyString>()?;
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

/// Remembers the native functions, from the table of the loop's methods.
pub(super) fn remember(methods: &[ffi::PyMethodDef]) {
    for (name, native) in [c"time", c"call_at"].into_iter().zip(&NATIVE) {
        for method in methods {
            // SAFETY: method tables are made of C string literals, and their functions are pointers.
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
