//! `Source`: the loop's view of a native object that waits for its descriptor (a transport, a listener).
//!
//! Sources belong to the loop's thread. The loop holds a reference to each registered source in the fd table. It calls
//! `on_ready` directly from the poller's event, without a handle or a queue.

use std::marker::PhantomData;

use grapeshot_core::sys::poller::{Interest, Readiness};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::This;

/// A native object whose descriptor is registered with the loop. Every source is a Python object of layout `Self`, so
/// the collector reaches it through the loop's fd table.
pub(crate) trait Source: Sized {
    /// Called when the descriptor is ready. The source handles errors of the connection itself. Err is only for
    /// exceptions that must leave `run_forever` (`KeyboardInterrupt`, `SystemExit`).
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()>;

    /// The events that the poller waits for on behalf of this source.
    fn interest(&self) -> Interest;

    /// False if other code has closed the source's descriptor.
    fn has_descriptor(this: This<'_, Self>) -> bool;

    /// Called after other code has closed the descriptor. The number now belongs to another registration, which has
    /// replaced this one, so the source must not touch the descriptor again. It queues its further work and calls
    /// nothing itself.
    fn on_displaced(this: This<'_, Self>);
}

/// The four functions of `Source` for one layout, as function pointers. The caller passes a live object of that layout
/// and holds a reference to it.
struct Calls {
    on_ready: unsafe fn(Python<'_>, *mut ffi::PyObject, Readiness) -> PyResult<()>,
    interest: unsafe fn(Python<'_>, *mut ffi::PyObject) -> Interest,
    has_descriptor: unsafe fn(Python<'_>, *mut ffi::PyObject) -> bool,
    on_displaced: unsafe fn(Python<'_>, *mut ffi::PyObject),
}

unsafe fn on_ready<T: Source>(
    py: Python<'_>,
    object: *mut ffi::PyObject,
    readiness: Readiness,
) -> PyResult<()> {
    // SAFETY: the caller guarantees that the object is alive; `SourceRef::new` paired it with its layout.
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

unsafe fn on_displaced<T: Source>(py: Python<'_>, object: *mut ffi::PyObject) {
    // SAFETY: as in `on_ready`.
    T::on_displaced(unsafe { This::new(py, object) });
}

/// Gives each kind of source its table of functions.
struct CallsOf<T>(PhantomData<T>);

impl<T: Source> CallsOf<T> {
    const CALLS: &'static Calls = &Calls {
        on_ready: on_ready::<T>,
        interest: interest::<T>,
        has_descriptor: has_descriptor::<T>,
        on_displaced: on_displaced::<T>,
    };
}

/// A registered source: a strong reference and the functions to call on it.
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

    /// Calls `on_ready`. Keeps the source alive during the call, even if the call removes the source's registration.
    #[inline]
    pub(crate) fn ready(self, py: Python<'_>, readiness: Readiness) -> PyResult<()> {
        // SAFETY: the fd table held a reference when this copy was made, and no code ran since. The reference taken
        // here keeps the object through the call.
        unsafe {
            ffi::Py_INCREF(self.object);
            let result = (self.calls.on_ready)(py, self.object, readiness);
            ffi::Py_DECREF(self.object);
            result
        }
    }

    /// The events that the poller waits for on behalf of this source.
    pub(crate) fn interest(self, py: Python<'_>) -> Interest {
        // SAFETY: the fd table holds a reference, and no other code runs.
        unsafe { (self.calls.interest)(py, self.object) }
    }

    /// False if other code has closed the source's descriptor. The check may run any code.
    pub(crate) fn has_descriptor(self, py: Python<'_>) -> bool {
        let kept = self.to_bound(py);
        // SAFETY: kept through the call.
        unsafe { (self.calls.has_descriptor)(py, kept.as_ptr()) }
    }

    /// Calls `on_displaced` on a source that was taken out of the fd table, and releases the table's reference.
    pub(crate) fn displace(self, py: Python<'_>) {
        // SAFETY: the table's reference keeps the object alive until it is released.
        unsafe { (self.calls.on_displaced)(py, self.object) };
        self.release(py);
    }

    pub(crate) fn as_ptr(self) -> *mut ffi::PyObject {
        self.object
    }

    pub(crate) fn to_bound(self, py: Python<'_>) -> Bound<'_, PyAny> {
        // SAFETY: the fd table holds a reference; from_borrowed adds one.
        unsafe { Bound::from_borrowed_ptr(py, self.object) }
    }

    /// Releases the fd table's reference.
    pub(crate) fn release(self, py: Python<'_>) {
        // SAFETY: the table's reference moves into the Bound, which drops it.
        drop(unsafe { Bound::from_owned_ptr(py, self.object) });
    }
}

/// A native object that waits for one event of a descriptor: a strong reference and the function that wakes it.
#[derive(Clone, Copy)]
pub(crate) struct WaiterRef {
    object: *mut ffi::PyObject,
    wake: Deferred,
}

impl WaiterRef {
    /// Takes over the reference. `wake` queues further work and calls nothing itself.
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
        // SAFETY: `new` paired the function with its object, and the holder of `self` still has the reference to it.
        unsafe { (self.wake)(py, self.object) }
    }

    pub(crate) fn release(self, py: Python<'_>) {
        // SAFETY: the holder's reference moves into the Bound, which drops it.
        drop(unsafe { Bound::from_owned_ptr(py, self.object) });
    }
}

/// An entry of the ready queue: a handle, or a native object with the function to run on it once.
#[derive(Clone, Copy)]
pub(crate) struct Ready {
    /// An owned reference.
    pub(crate) object: *mut ffi::PyObject,
    /// None: `object` is a handle.
    pub(crate) run: Option<Deferred>,
}

/// A function that runs once on a native object that was queued together with it (`ReadyWork::defer`).
pub(crate) type Deferred = unsafe fn(Python<'_>, *mut ffi::PyObject) -> PyResult<()>;

// SAFETY: a plain pair of pointers; the inbox carries it (with its reference) to the loop's thread.
unsafe impl Send for Ready {}
