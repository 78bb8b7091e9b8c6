//! `Source`: what the loop knows of a native object that waits for its descriptor (a transport, a listener).
//!
//! Owned by the loop's thread. The loop holds a reference to each registered source in the fd table and calls
//! `on_ready` straight from the poller's event; no handle or queue lies between.

use pyo3::ffi;
use pyo3::prelude::*;

use super::native_type::This;
use crate::sys::poller::Readiness;

/// A native object whose descriptor is registered with the loop. All of them are Python objects of layout `Self`,
/// so the collector reaches them through the loop's fd table.
pub(crate) trait Source: Sized {
    /// The descriptor is ready. Faults of the connection are dealt with inside; Err is only for what must leave
    /// `run_forever` (`KeyboardInterrupt`, `SystemExit`).
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()>;
}

type OnReady = unsafe fn(Python<'_>, *mut ffi::PyObject, Readiness) -> PyResult<()>;

/// A registered source: a strong reference and the way to call it.
#[derive(Clone, Copy)]
pub(crate) struct SourceRef {
    object: *mut ffi::PyObject,
    on_ready: OnReady,
}

unsafe fn dispatch<T: Source>(
    py: Python<'_>,
    object: *mut ffi::PyObject,
    readiness: Readiness,
) -> PyResult<()> {
    // SAFETY: the caller vouches for the object's life; `SourceRef::new` paired it with its layout.
    T::on_ready(unsafe { This::new(py, object) }, readiness)
}

impl SourceRef {
    /// Takes a reference to `this` for the fd table.
    pub(crate) fn new<T: Source>(this: This<'_, T>) -> Self {
        Self {
            object: this.to_bound().into_ptr(),
            on_ready: dispatch::<T>,
        }
    }

    /// Calls `on_ready`, keeping the source alive meanwhile whatever it does to its registration.
    #[inline]
    pub(crate) fn ready(self, py: Python<'_>, readiness: Readiness) -> PyResult<()> {
        // SAFETY: the fd table held a reference when this copy was made and no code ran since; the reference taken
        // here keeps the object through the call.
        unsafe {
            ffi::Py_INCREF(self.object);
            let result = (self.on_ready)(py, self.object, readiness);
            ffi::Py_DECREF(self.object);
            result
        }
    }

    pub(crate) fn as_ptr(self) -> *mut ffi::PyObject {
        self.object
    }

    pub(crate) fn to_bound(self, py: Python<'_>) -> Bound<'_, PyAny> {
        // SAFETY: the fd table holds a reference; from_borrowed adds one.
        unsafe { Bound::from_borrowed_ptr(py, self.object) }
    }

    /// Gives back the fd table's reference.
    pub(crate) fn release(self, py: Python<'_>) {
        // SAFETY: the table's reference moves into the Bound, which drops it.
        drop(unsafe { Bound::from_owned_ptr(py, self.object) });
    }
}

/// A native object that waits for one event of a descriptor: a strong reference and the way to wake it.
#[derive(Clone, Copy)]
pub(crate) struct WaiterRef {
    object: *mut ffi::PyObject,
    wake: Deferred,
}

impl WaiterRef {
    /// Takes over the reference. `wake` queues what is to run and calls nothing itself.
    pub(crate) fn new(object: Bound<'_, PyAny>, wake: Deferred) -> Self {
        Self {
            object: object.into_ptr(),
            wake,
        }
    }

    pub(crate) fn as_ptr(self) -> *mut ffi::PyObject {
        self.object
    }

    pub(crate) fn wake(self, py: Python<'_>) -> PyResult<()> {
        // SAFETY: `new` paired the function with its object, whose reference the holder of this still has.
        unsafe { (self.wake)(py, self.object) }
    }

    pub(crate) fn release(self, py: Python<'_>) {
        // SAFETY: the holder's reference moves into the Bound, which drops it.
        drop(unsafe { Bound::from_owned_ptr(py, self.object) });
    }
}

/// What lies in the ready queue: a handle, or a native object with the function to run on it once.
#[derive(Clone, Copy)]
pub(crate) struct Ready {
    /// An owned reference.
    pub(crate) object: *mut ffi::PyObject,
    /// None: `object` is a handle.
    pub(crate) run: Option<Deferred>,
}

/// Runs once on a native object that was queued with `LoopObject::defer`.
pub(crate) type Deferred = unsafe fn(Python<'_>, *mut ffi::PyObject) -> PyResult<()>;

// SAFETY: a plain pair of pointers; the inbox carries it (with its reference) to the loop's thread.
unsafe impl Send for Ready {}
