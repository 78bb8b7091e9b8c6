//! `Source`: what the loop knows of a native object that waits for its descriptor (a transport, a listener).
//!
//! Owned by the loop's thread. The loop holds a reference to each registered source in the fd table and calls
//! `on_ready` straight from the poller's event; no handle or queue lies between.

use std::marker::PhantomData;

use grapeshot_core::sys::poller::{Interest, Readiness};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::This;

/// A native object whose descriptor is registered with the loop. All of them are Python objects of layout `Self`,
/// so the collector reaches them through the loop's fd table.
pub(crate) trait Source: Sized {
    /// The descriptor is ready. Faults of the connection are dealt with inside; Err is only for what must leave
    /// `run_forever` (`KeyboardInterrupt`, `SystemExit`).
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()>;

    /// What the poller waits for on its behalf.
    fn interest(&self) -> Interest;

    /// Whether nobody has closed the descriptor behind the source's back.
    fn has_descriptor(this: This<'_, Self>) -> bool;

    /// Somebody has: the number is that of another registration by now, which has taken the place of this one. The
    /// descriptor is not to be touched any more. Queues what is to run and calls nothing itself.
    fn on_evicted(this: This<'_, Self>);
}

/// The functions of a source for objects of its layout, each called with a live one that the caller has a reference to.
struct Calls {
    on_ready: unsafe fn(Python<'_>, *mut ffi::PyObject, Readiness) -> PyResult<()>,
    interest: unsafe fn(Python<'_>, *mut ffi::PyObject) -> Interest,
    has_descriptor: unsafe fn(Python<'_>, *mut ffi::PyObject) -> bool,
    on_evicted: unsafe fn(Python<'_>, *mut ffi::PyObject),
}

unsafe fn on_ready<T: Source>(
    py: Python<'_>,
    object: *mut ffi::PyObject,
    readiness: Readiness,
) -> PyResult<()> {
    // SAFETY: the caller vouches for the object's life; `SourceRef::new` paired it with its layout.
    T::on_ready(unsafe { This::new(py, object) }, readiness)
}

unsafe fn interest<T: Source>(py: Python<'_>, object: *mut ffi::PyObject) -> Interest {
    // SAFETY: as in `on_ready`.
    unsafe { This::<T>::new(py, object) }.interest()
}

unsafe fn has_descriptor<T: Source>(py: Python<'_>, object: *mut ffi::PyObject) -> bool {
    // SAFETY: as in `on_ready`.
    T::has_descriptor(unsafe { This::new(py, object) })
}

unsafe fn on_evicted<T: Source>(py: Python<'_>, object: *mut ffi::PyObject) {
    // SAFETY: as in `on_ready`.
    T::on_evicted(unsafe { This::new(py, object) });
}

/// One table for each kind of source.
struct CallsOf<T>(PhantomData<T>);

impl<T: Source> CallsOf<T> {
    const CALLS: &'static Calls = &Calls {
        on_ready: on_ready::<T>,
        interest: interest::<T>,
        has_descriptor: has_descriptor::<T>,
        on_evicted: on_evicted::<T>,
    };
}

/// A registered source: a strong reference and the ways to call it.
#[derive(Clone, Copy)]
pub(crate) struct SourceRef {
    object: *mut ffi::PyObject,
    calls: &'static Calls,
}

impl SourceRef {
    /// Takes a reference to `this` for the fd table.
    pub(crate) fn new<T: Source>(this: This<'_, T>) -> Self {
        Self {
            object: this.to_bound().into_ptr(),
            calls: CallsOf::<T>::CALLS,
        }
    }

    /// Calls `on_ready`, keeping the source alive meanwhile whatever it does to its registration.
    #[inline]
    pub(crate) fn ready(self, py: Python<'_>, readiness: Readiness) -> PyResult<()> {
        // SAFETY: the fd table held a reference when this copy was made and no code ran since; the reference taken
        // here keeps the object through the call.
        unsafe {
            ffi::Py_INCREF(self.object);
            let result = (self.calls.on_ready)(py, self.object, readiness);
            ffi::Py_DECREF(self.object);
            result
        }
    }

    /// What the poller waits for on its behalf.
    pub(crate) fn interest(self, py: Python<'_>) -> Interest {
        // SAFETY: the fd table holds a reference, and nothing runs.
        unsafe { (self.calls.interest)(py, self.object) }
    }

    /// Whether nobody has closed the descriptor behind the source's back. It may run any code.
    pub(crate) fn has_descriptor(self, py: Python<'_>) -> bool {
        let kept = self.to_bound(py);
        // SAFETY: kept through the call.
        unsafe { (self.calls.has_descriptor)(py, kept.as_ptr()) }
    }

    /// Tells the source, which was taken out of the fd table, and gives back the table's reference.
    pub(crate) fn displace(self, py: Python<'_>) {
        // SAFETY: the table's reference keeps it until it is released.
        unsafe { (self.calls.on_evicted)(py, self.object) };
        self.release(py);
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
