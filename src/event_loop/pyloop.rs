//! `grapeshot._core.Loop`, the native base of `grapeshot.Loop`: its state, its creation and its deallocation.
//!
//! The table of its methods is in `loop_methods`. While a thread runs the loop, other threads may only call the
//! thread-safe methods, such as `call_soon_threadsafe` and `create_future`.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::PyType;

use super::loop_clock::{ClockVersion, LoopClock};
use super::reactor::Reactor;
use super::source::Deferred;
use crate::binding::deallocation::free_memory;
use crate::binding::native_type::{NativeType, This};
use crate::binding::object_cell::ObjectCell;
use crate::binding::{HAS_GIL, current_thread, errors};

/// The object: a Python header, the reactor, and the Python objects that the loop keeps.
#[repr(C)]
pub(crate) struct LoopObject {
    base: ffi::PyObject,
    pub(super) reactor: ManuallyDrop<Reactor>,
    pub(super) task_factory: ObjectCell,
    /// The keyword names of the last `create_task`, and the same names with "loop" before them.
    pub(super) task_kwnames: (ObjectCell, ObjectCell),
    /// `{"loop": self}`, the keyword arguments for creating futures. Set only while the loop runs, because the dict and
    /// the loop form a reference cycle.
    pub(super) future_kwargs: ObjectCell,
    /// A done future, which `soon_after_wait` passes to tasks. Set only while the loop runs.
    pub(super) done_future: ObjectCell,
    /// A list of the listeners that have paused accepting because of a limit: see `limit_methods`.
    pub(super) paused: ObjectCell,
    is_reactor_live: Cell<bool>,
    pub(super) clock_version: ClockVersion,
}

static LOOP_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

impl LoopObject {
    #[inline]
    pub(crate) fn reactor(&self) -> &Reactor {
        &self.reactor
    }

    /// The native part of a loop object.
    #[inline]
    pub(crate) fn of<'a>(event_loop: &'a Bound<'_, PyAny>) -> &'a Self {
        debug_assert!(Self::is_loop(event_loop));
        // SAFETY: callers pass only instances of the native loop type (checked above in debug builds).
        unsafe { &*event_loop.as_ptr().cast::<Self>() }
    }

    /// True for an instance of `grapeshot._core.Loop` or a subclass.
    pub(crate) fn is_loop(object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: attached, with a live object.
        unsafe { Self::is_loop_ptr(object.as_ptr()) }
    }

    /// # Safety
    /// Attached; `object` is a live object.
    #[inline]
    pub(super) unsafe fn is_loop_ptr(object: *mut ffi::PyObject) -> bool {
        // SAFETY: by the caller's contract; LOOP_TYPE is set before any instance exists.
        unsafe { ffi::PyObject_TypeCheck(object, LOOP_TYPE.load(Ordering::Relaxed)) != 0 }
    }

    pub(crate) fn to_bound<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        // SAFETY: a LoopObject is always the body of a live Python object; from_borrowed adds a reference.
        unsafe { Bound::from_borrowed_ptr(py, self.as_ptr()) }
    }

    pub(crate) fn as_ptr(&self) -> *mut ffi::PyObject {
        ptr::from_ref(self).cast_mut().cast()
    }

    /// `loop.time()`, which the program may have replaced.
    #[inline(always)]
    pub(crate) fn clock(&self) -> LoopClock<'_> {
        // SAFETY: `self` is a loop, and the clock version is its own.
        unsafe { LoopClock::new(self.as_ptr(), &self.clock_version) }
    }

    /// Runs `body`, which touches the cells of the loop or of its native objects. While a thread runs the loop, only
    /// that thread may touch them; otherwise one thread at a time. Free-threaded builds enforce this. Builds with a
    /// GIL need no check here: only one thread runs at a time, and asyncio, too, checks the thread only in debug mode.
    ///
    /// In free-threaded builds, raises RuntimeError if another thread runs the loop.
    #[inline(always)]
    pub(crate) fn with_loop_access<R>(
        &self,
        py: Python<'_>,
        body: impl FnOnce() -> PyResult<R>,
    ) -> PyResult<R> {
        if HAS_GIL || self.reactor.access.owner() == current_thread() {
            return body();
        }
        self.check_thread()?;
        with_critical_section(&self.to_bound(py), || {
            // Another thread may have started to run the loop while this thread waited.
            self.check_thread()?;
            let _visit = self.reactor.access.begin_visit();
            body()
        })
    }

    /// Whether this thread runs the loop.
    pub(crate) fn is_owned_here(&self) -> bool {
        self.reactor.access.owner() == current_thread()
    }

    /// True if this is a free-threaded build and another thread runs the loop. This thread must then not use the loop's
    /// objects.
    #[inline]
    pub(crate) fn is_owned_elsewhere(&self) -> bool {
        let owner = self.reactor.access.owner();
        !HAS_GIL && owner != 0 && owner != current_thread()
    }

    /// Queues a call of `run(object)`: see `ReadyWork::defer`. While the loop runs, only the thread that runs it may
    /// call this. While the loop does not run, any thread may call it.
    #[inline]
    pub(crate) fn defer(&self, object: Bound<'_, PyAny>, run: Deferred) {
        let access = &self.reactor.access;
        if HAS_GIL || access.owner() == current_thread() {
            self.reactor.ready.defer(object, run);
        } else {
            self.defer_while_idle(object, run);
        }
    }

    #[cold]
    fn defer_while_idle(&self, object: Bound<'_, PyAny>, run: Deferred) {
        let deferred = self.with_loop_access(object.py(), || {
            self.reactor.ready.defer(object.clone(), run);
            Ok(())
        });
        if deferred.is_err() {
            // The loop runs in another thread now.
            self.reactor.defer_from_anywhere(object, run);
        }
    }

    /// Makes this thread the owner of the loop. False if the loop already has an owner.
    ///
    /// In free-threaded builds, raises RuntimeError if another thread runs the loop or is in one of its methods.
    pub(crate) fn claim(&self, py: Python<'_>) -> PyResult<bool> {
        self.with_loop_access(py, || {
            if !HAS_GIL && self.reactor.access.is_visited_by_others() {
                return Err(PyRuntimeError::new_err(
                    "Cannot run the event loop while another thread is in one of its methods",
                ));
            }
            Ok(self.reactor.access.claim())
        })
    }

    /// `with_loop_access` for an object that keeps its loop in the cell `event_loop`. If the cell is empty, the
    /// collector has cleared the object, so no other code can reach it and no check is needed.
    #[inline(always)]
    pub(crate) fn with_access_of<R>(
        py: Python<'_>,
        event_loop: &ObjectCell,
        body: impl FnOnce() -> PyResult<R>,
    ) -> PyResult<R> {
        if HAS_GIL {
            return body();
        }
        match event_loop.get(py) {
            Some(event_loop) => Self::of(&event_loop).with_loop_access(py, body),
            None => body(),
        }
    }

    /// Raises RuntimeError if a method that is not thread-safe is called from a thread other than the one that runs the
    /// loop.
    #[cold]
    pub(crate) fn check_thread(&self) -> PyResult<()> {
        let owner = self.reactor.access.owner();
        if owner != 0 && owner != current_thread() {
            return Err(PyRuntimeError::new_err(
                "Non-thread-safe operation invoked on an event loop other than the current one",
            ));
        }
        Ok(())
    }
}

impl NativeType for LoopObject {
    const NAME: &'static CStr = c"grapeshot._core.Loop";
    const DOC: &'static CStr = c"The native part of grapeshot.Loop: poller, timers, ready queue, scheduling.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;
    const DEALLOC: ffi::destructor = dealloc;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.task_factory,
            &self.task_kwnames.0,
            &self.task_kwnames.1,
            &self.future_kwargs,
            &self.done_future,
            &self.paused,
        ]
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        if !self.is_reactor_live.get() {
            return 0;
        }
        // SAFETY: visit and arg are the collector's; the reactor was written by tp_new.
        unsafe { self.reactor.traverse(visit, arg) }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_loop_access(&this, this.py(), body)
    }

    fn clear(this: This<'_, Self>) {
        Self::empty_cells(this);
        if this.is_reactor_live.get() {
            this.reactor.probe.forget_observers(this.py());
            this.reactor.drop_work(this.py());
        }
    }
}

/// `tp_new`.
pub(super) unsafe extern "C" fn new_loop(
    kind: *mut ffi::PyTypeObject,
    _args: *mut ffi::PyObject,
    _kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_new, attached, with this type or a subclass, whose instances start with our layout. The
    // allocation is zeroed, and the reactor is written into it before any other code sees the object.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let reactor = Reactor::new().map_err(|error| errors::os_error(&error))?;
            let object = ffi::PyType_GenericAlloc(kind, 0);
            if object.is_null() {
                return Err(PyErr::fetch(py));
            }
            let body = object.cast::<LoopObject>();
            ptr::write(&raw mut (*body).reactor, ManuallyDrop::new(reactor));
            (*body).is_reactor_live.set(true);
            ptr::write(&raw mut (*body).clock_version, ClockVersion::new());
            Ok(object)
        })
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached, once, with an unreferenced loop. The fields are dropped in place, and the
    // memory goes back through the type's own tp_free.
    unsafe {
        let py = Python::assume_attached();
        ffi::PyObject_GC_UnTrack(slf.cast());
        let body = slf.cast::<LoopObject>();
        if (*body).is_reactor_live.get() {
            let reactor = &(*body).reactor;
            reactor.close(py);
            reactor.probe.forget_observers(py);
            ManuallyDrop::drop(&mut (*body).reactor);
        }
        LoopObject::empty_cells(This::new(py, slf));
        free_memory(slf);
    }
}

/// Stores the type object. Called once.
pub(super) fn set_type(kind: Bound<'_, PyType>) {
    LOOP_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
}

/// True for the native loop type and its subclasses.
pub(crate) fn is_loop_type(kind: &Bound<'_, PyType>) -> bool {
    // SAFETY: attached; both are live types, and LOOP_TYPE is set when the module is created.
    unsafe { ffi::PyType_IsSubtype(kind.as_ptr().cast(), LOOP_TYPE.load(Ordering::Relaxed)) != 0 }
}
