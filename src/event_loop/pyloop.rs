//! `grapeshot._core.Loop`: the native base of `grapeshot.Loop`, its state and life cycle.
//!
//! What runs per callback lives in the native methods here and in `call_methods`, `watching` and `tasks`; what runs
//! per loop or per connection is Python, in the package. The object belongs to the thread that runs it; other
//! threads may only call `call_soon_threadsafe` and read-only methods.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyFloat, PyTuple, PyType};

use super::loop_clock::{self, LoopClock};
use super::reactor::{Reactor, current_thread};
use super::{call_methods, tasks, watching};
use crate::binding::native_type::{
    Args, NativeType, This, bool_object, getter, leak_table, method, new_type, none, slot, threadsafe_getter,
    threadsafe_method,
};
use crate::binding::object_cell::ObjectCell;
use crate::binding::{HAS_GIL, errors};

/// The object: a Python header, the reactor, and what only Python asks for.
#[repr(C)]
pub(crate) struct LoopObject {
    base: ffi::PyObject,
    reactor: ManuallyDrop<Reactor>,
    pub(super) task_factory: ObjectCell,
    /// Keyword names that `create_task` saw last, and the same with "loop" before them.
    pub(super) task_kwnames: (ObjectCell, ObjectCell),
    /// `{"loop": self}`, the keywords that futures are made with. Only while the loop runs, since it is a cycle.
    pub(super) future_kwargs: ObjectCell,
    is_reactor_live: Cell<bool>,
    pub(super) clock: LoopClock,
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
        // SAFETY: only called with objects that native code got as its own loop (checked above in debug builds).
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
        // SAFETY: the caller's; LOOP_TYPE is set before any instance exists.
        unsafe { ffi::PyObject_TypeCheck(object, LOOP_TYPE.load(Ordering::Relaxed)) != 0 }
    }

    pub(crate) fn to_bound<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        // SAFETY: a LoopObject is always the body of a live Python object; from_borrowed adds a reference.
        unsafe { Bound::from_borrowed_ptr(py, self.as_ptr()) }
    }

    pub(crate) fn as_ptr(&self) -> *mut ffi::PyObject {
        ptr::from_ref(self).cast_mut().cast()
    }

    /// Runs `body`, which touches the loop's cells or those of its native objects: in the thread that runs the loop,
    /// or, while none does, in one thread at a time. With a GIL that is given, and asyncio checks it in debug mode
    /// only; free-threaded builds always check.
    ///
    /// RuntimeError if another thread runs the loop.
    #[inline(always)]
    pub(crate) fn with_loop_access<R>(
        &self,
        py: Python<'_>,
        body: impl FnOnce() -> PyResult<R>,
    ) -> PyResult<R> {
        if HAS_GIL || self.reactor.owner() == current_thread() {
            return body();
        }
        self.check_thread()?;
        with_critical_section(&self.to_bound(py), || {
            // A run may have begun while this thread waited.
            self.check_thread()?;
            let _visit = self.reactor.begin_visit();
            body()
        })
    }

    /// `with_loop_access` for an object that keeps its loop in `event_loop`. An empty cell means that the object was
    /// cleared by the collector, which had nobody else to share it with.
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

    /// RuntimeError if a method that is not thread-safe comes from a thread other than the one that runs the loop.
    #[cold]
    pub(crate) fn check_thread(&self) -> PyResult<()> {
        let owner = self.reactor.owner();
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

    unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        for cell in [
            &self.task_factory,
            &self.task_kwnames.0,
            &self.task_kwnames.1,
            &self.future_kwargs,
        ] {
            // SAFETY: visit and arg are the collector's.
            let result = unsafe { cell.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        if !self.is_reactor_live.get() {
            return 0;
        }
        // SAFETY: as above; the reactor was written by tp_new.
        unsafe { self.reactor.traverse(visit, arg) }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_loop_access(&this, this.py(), body)
    }

    fn clear(this: This<'_, Self>) {
        let py = this.py();
        drop(this.task_factory.take(py));
        drop(this.future_kwargs.take(py));
        if this.is_reactor_live.get() {
            this.reactor.drop_work(py);
        }
    }
}

unsafe extern "C" fn new_loop(
    kind: *mut ffi::PyTypeObject,
    _args: *mut ffi::PyObject,
    _kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_new attached with this type or a subclass, whose instances start with our layout; the
    // allocation is zeroed, and the reactor is written into it before anyone else sees the object.
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
            ptr::write(&raw mut (*body).clock, LoopClock::new());
            Ok(object)
        })
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached, once, with an unreferenced loop; the fields are dropped in place and the
    // memory goes back through the type's own tp_free.
    unsafe {
        let py = Python::assume_attached();
        ffi::PyObject_GC_UnTrack(slf.cast());
        let body = slf.cast::<LoopObject>();
        if (*body).is_reactor_live.get() {
            (*body).reactor.close(py);
            ManuallyDrop::drop(&mut (*body).reactor);
        }
        for cell in [
            &(*body).task_factory,
            &(*body).task_kwnames.0,
            &(*body).task_kwnames.1,
            &(*body).future_kwargs,
        ] {
            drop(cell.take(py));
        }
        let kind = ffi::Py_TYPE(slf);
        if let Some(free) = (*kind).tp_free {
            free(slf.cast());
        }
        ffi::Py_DECREF(kind.cast());
    }
}

type Object<'py> = PyResult<Bound<'py, PyAny>>;

fn is_running<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    Ok(bool_object(this.py(), this.reactor.owner() != 0))
}

fn is_closed<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    Ok(bool_object(this.py(), this.reactor.is_closed()))
}

fn stop<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    this.reactor.stop();
    Ok(none(this.py()))
}

fn get_debug<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    Ok(bool_object(this.py(), this.reactor.is_debug()))
}

fn set_debug<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    let [enabled] = args.bind()?;
    this.reactor
        .set_debug(enabled.is_some_and(|value| value.is_truthy().unwrap_or(false)));
    Ok(none(this.py()))
}

fn check_closed<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    this.reactor.check_closed()?;
    Ok(none(this.py()))
}

fn check_running<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    let py = this.py();
    if this.reactor.owner() != 0 {
        return Err(PyRuntimeError::new_err("This event loop is already running"));
    }
    let running = py.import("asyncio.events")?.call_method0("_get_running_loop")?;
    if !running.is_none() {
        return Err(PyRuntimeError::new_err(
            "Cannot run the event loop while another loop is running",
        ));
    }
    Ok(none(py))
}

fn run<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    this.reactor.check_closed()?;
    let claim = || {
        if !HAS_GIL && this.reactor.is_visited_by_others() {
            return Err(PyRuntimeError::new_err(
                "Cannot run the event loop while another thread is in one of its methods",
            ));
        }
        Ok(this.reactor.claim())
    };
    if !LoopObject::with_loop_access(&this, this.py(), claim)? {
        return Err(PyRuntimeError::new_err("This event loop is already running"));
    }
    // pyo3 drops an owned error at once only where it has counted the attachment itself; elsewhere it waits for the
    // next time, which for the errors of a whole run would be too late.
    Python::attach(|py| this.reactor.run(py, &this))?;
    Ok(none(this.py()))
}

fn close<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    if this.reactor.owner() != 0 {
        return Err(PyRuntimeError::new_err("Cannot close a running event loop"));
    }
    this.reactor.close(this.py());
    Ok(none(this.py()))
}

fn signal_fd<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    this.reactor.check_closed()?;
    let fd = this
        .reactor
        .signal_fd()
        .map_err(|error| errors::os_error(&error))?;
    Ok(fd.into_pyobject(this.py())?.into_any())
}

/// asyncio's names of what monitoring and test tools look at. Tuples: the queues themselves are native, and whoever
/// changes asyncio's is told.
fn ready_handles(this: This<'_, LoopObject>) -> Object<'_> {
    let py = this.py();
    Ok(PyTuple::new(py, this.reactor.ready_handles(py))?.into_any())
}

fn timer_handles(this: This<'_, LoopObject>) -> Object<'_> {
    let py = this.py();
    Ok(PyTuple::new(py, this.reactor.timer_handles(py))?.into_any())
}

fn is_stopping(this: This<'_, LoopObject>) -> Object<'_> {
    Ok(bool_object(this.py(), this.reactor.is_stopping()))
}

fn thread_id(this: This<'_, LoopObject>) -> Object<'_> {
    match this.reactor.owner() {
        0 => Ok(none(this.py())),
        owner => Ok(owner.into_pyobject(this.py())?.into_any()),
    }
}

fn slow_callback_duration(this: This<'_, LoopObject>) -> Object<'_> {
    Ok(PyFloat::new(this.py(), this.reactor.slow_callback_s()).into_any())
}

unsafe extern "C" fn set_slow_callback_duration(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    _: *mut c_void,
) -> c_int {
    // SAFETY: CPython calls setters attached with an object of the type; value is null on deletion.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            let Some(value) = Bound::from_borrowed_ptr_or_opt(py, value) else {
                return Err(pyo3::exceptions::PyAttributeError::new_err(
                    "cannot delete slow_callback_duration",
                ));
            };
            This::<LoopObject>::new(py, slf)
                .reactor
                .set_slow_callback_s(value.extract()?);
            Ok(0)
        })
    }
}

/// The native methods of the loop that this room has.
pub(crate) fn methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = vec![
        threadsafe_method!(
            LoopObject,
            is_running,
            "is_running()",
            "True while a thread runs the loop."
        ),
        threadsafe_method!(
            LoopObject,
            is_closed,
            "is_closed()",
            "True once the loop was closed."
        ),
        threadsafe_method!(
            LoopObject,
            stop,
            "stop()",
            "Let the current iteration end and leave run_forever()."
        ),
        threadsafe_method!(LoopObject, get_debug, "get_debug()", "True in debug mode."),
        threadsafe_method!(
            LoopObject,
            set_debug,
            "set_debug(enabled)",
            "Turn debug mode on or off."
        ),
        threadsafe_method!(
            LoopObject,
            check_closed,
            "_check_closed()",
            "RuntimeError if the loop is closed."
        ),
        threadsafe_method!(
            LoopObject,
            check_running,
            "_check_running()",
            "RuntimeError if this or another loop runs here."
        ),
        threadsafe_method!(LoopObject, run, "_run()", "Run iterations until stop()."),
        threadsafe_method!(
            LoopObject,
            loop_clock::attributes_changed,
            "_attributes_changed()",
            "Called when time or call_at was set on the loop, or deleted."
        ),
        method!(
            LoopObject,
            signal_fd,
            "_signal_fd()",
            "Where the interpreter writes the numbers of signals."
        ),
        method!(
            LoopObject,
            close,
            "_close()",
            "Drop all work and close the poller."
        ),
    ];
    methods.extend(call_methods::methods());
    methods.extend(watching::methods());
    methods.extend(tasks::methods());
    methods
}

/// True for the native loop type and its subclasses.
pub(crate) fn is_loop_type(kind: &Bound<'_, PyType>) -> bool {
    // SAFETY: attached; both are live types, LOOP_TYPE is set when the module is made.
    unsafe { ffi::PyType_IsSubtype(kind.as_ptr().cast(), LOOP_TYPE.load(Ordering::Relaxed)) != 0 }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = methods();
    loop_clock::remember(&methods);
    let getters = vec![
        getter!(
            LoopObject,
            c"_ready",
            ready_handles,
            c"The handles that are to run, as a tuple; what the loop does without a handle is not among them."
        ),
        getter!(
            LoopObject,
            c"_scheduled",
            timer_handles,
            c"The timers that wait, the earliest first, as a tuple; cancelled ones may be among them."
        ),
        getter!(
            LoopObject,
            c"_stopping",
            is_stopping,
            c"True after stop() until the run has ended."
        ),
        threadsafe_getter!(
            LoopObject,
            c"_thread_id",
            thread_id,
            c"The running thread's identifier, or None."
        ),
        ffi::PyGetSetDef {
            set: Some(set_slow_callback_duration),
            ..threadsafe_getter!(
                LoopObject,
                c"slow_callback_duration",
                slow_callback_duration,
                c"Seconds after which debug mode logs a callback as slow."
            )
        },
    ];
    // SAFETY: the functions are those of this layout, the tables are leaked.
    let kind: Bound<'_, PyType> = unsafe {
        new_type::<LoopObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_new, new_loop as *mut c_void),
                slot(
                    ffi::Py_tp_methods,
                    leak_table(methods, ffi::PyMethodDef::zeroed()),
                ),
                slot(
                    ffi::Py_tp_getset,
                    leak_table(getters, ffi::PyGetSetDef::default()),
                ),
            ],
        )?
    };
    module.add("Loop", &kind)?;
    LOOP_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
