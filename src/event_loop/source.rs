//! `Source`: the loop's view of a native object that waits for events of its descriptor. Transports, listeners and
//! watches on child processes are such objects.
//!
//! Sources belong to the loop's thread. The loop holds a reference to each registered source in the fd table. It calls
//! `on_ready` directly from the poller's event, without a handle or a queue.

use std::marker::PhantomData;

use grapeshot_core::sys::poller::{Interest, Readiness};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::This;
use crate::binding::object_ref::ObjectRef;

/// A native object whose descriptor is registered with the loop. Every source is a Python object of layout `Self`, so
/// the collector reaches it through the loop's fd table.
pub(crate) trait Source: Sized {
    /// Whether `on_ready` may call code that asks asyncio for the running loop. If not, the loop may stay hidden
    /// (`Reactor::hidden`).
    const NEEDS_RUNNING_LOOP: bool = true;

    /// Called when the descriptor is ready. The source handles errors of the connection itself. Err is only for
    /// exceptions that must leave `run_forever` (`KeyboardInterrupt`, `SystemExit`).
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()>;

    /// The events that the poller waits for on behalf of this source.
    fn interest(&self) -> Interest;

    /// False if other code has closed the source's descriptor.
    fn has_descriptor(this: This<'_, Self>) -> bool;

    /// Called after other code has closed the descriptor, and this registration was removed or replaced. The
    /// descriptor's number may belong to another file now, so the source must not use it again. This function only
    /// queues further work, and calls no code of the program.
    fn on_displaced(this: This<'_, Self>);
}

/// The constant and the functions of `Source` for objects of one layout. The caller of a function passes a live object
/// of that layout and holds a reference to it.
struct Calls {
    needs_running_loop: bool,
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
        needs_running_loop: T::NEEDS_RUNNING_LOOP,
        on_ready: on_ready::<T>,
        interest: interest::<T>,
        has_descriptor: has_descriptor::<T>,
        on_displaced: on_displaced::<T>,
    };
}

/// A reference to a registered source, and the functions to call on the source. The fd table holds one such reference.
/// Each use of the source takes another one, because the use may end the registration.
pub(crate) struct SourceRef {
    object: ObjectRef,
    calls: &'static Calls,
}

impl SourceRef {
    /// Takes a reference to `this`.
    pub(crate) fn new<T: Source>(this: This<'_, T>) -> Self {
        Self {
            object: ObjectRef::new(this.to_bound()),
            calls: CallsOf::<T>::CALLS,
        }
    }

    /// Another reference to the same source.
    #[inline]
    pub(crate) fn new_ref(&self) -> Self {
        Self {
            object: self.object.new_ref(),
            calls: self.calls,
        }
    }

    #[inline]
    pub(crate) fn needs_running_loop(&self) -> bool {
        self.calls.needs_running_loop
    }

    /// Calls `on_ready`.
    #[inline]
    pub(crate) fn ready(&self, py: Python<'_>, readiness: Readiness) -> PyResult<()> {
        // SAFETY: `new` has paired the functions with the object, which this reference keeps alive through the call.
        unsafe { (self.calls.on_ready)(py, self.as_ptr(), readiness) }
    }

    /// The events that the poller waits for on behalf of this source.
    pub(crate) fn interest(&self, py: Python<'_>) -> Interest {
        // SAFETY: as in `ready`.
        unsafe { (self.calls.interest)(py, self.as_ptr()) }
    }

    /// False if other code has closed the source's descriptor. The check may run any code.
    pub(crate) fn has_descriptor(&self, py: Python<'_>) -> bool {
        // SAFETY: as in `ready`.
        unsafe { (self.calls.has_descriptor)(py, self.as_ptr()) }
    }

    /// Calls `on_displaced` on a source that was taken out of the fd table.
    pub(crate) fn displace(self, py: Python<'_>) {
        // SAFETY: as in `ready`.
        unsafe { (self.calls.on_displaced)(py, self.as_ptr()) };
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut ffi::PyObject {
        self.object.as_ptr()
    }

    pub(crate) fn to_bound<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.object.to_bound(py)
    }
}

/// A reference to a native object, and the function to call on the object later.
pub(crate) struct DeferredCall {
    object: ObjectRef,
    function: Deferred,
}

impl DeferredCall {
    /// Takes over the reference. `function` must be written for the type of `object`.
    #[inline]
    pub(crate) fn new(object: Bound<'_, PyAny>, function: Deferred) -> Self {
        Self {
            object: ObjectRef::new(object),
            function,
        }
    }

    pub(crate) fn function(&self) -> Deferred {
        self.function
    }

    #[inline]
    pub(crate) fn call(&self, py: Python<'_>) -> PyResult<()> {
        // SAFETY: `new` has paired the function with the object, which this reference keeps alive through the call.
        unsafe { (self.function)(py, self.as_ptr()) }
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut ffi::PyObject {
        self.object.as_ptr()
    }

    pub(crate) fn to_bound<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.object.to_bound(py)
    }
}

/// The function of a `DeferredCall`, which is called with the object.
pub(crate) type Deferred = unsafe fn(Python<'_>, *mut ffi::PyObject) -> PyResult<()>;
