//! `Handle` and `TimerHandle`: a callback with its arguments and context, run once by the loop.
//!
//! One layout serves both types. Up to four arguments lie inline (a tuple holds more), and freed handles go to a
//! freelist: `call_soon` is the loop's hottest path. A handle belongs to the thread of its loop; `cancel` may come
//! from any attached thread.
//!
//! Handles that run once are hidden from the collector (with 10,000 of them pending it took half of the time). That
//! loses no cycle: once run or cancelled a handle refers to nothing; while the loop runs, what is pending is
//! reachable from the running loop; and in a loop that does not run, those that someone else keeps are tracked
//! (`Reactor::track_kept`), while the loop visits the referents of the others as its own.
//!
//! `isinstance(handle, asyncio.Handle)` holds through `__class__` (as `unittest.mock` does it): inheriting
//! from asyncio's class would cost 64 bytes of dead slots in every handle.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyNone, PyTuple};

use super::errors;
use super::freelist::Freelist;
use super::names::names;
use super::native_type::{Args, NativeType, This, getter, leak_table, method, new_type, slot};
use super::object_cell::ObjectCell;
use super::pyloop::LoopObject;

/// Arguments kept inside the handle; more go to a tuple.
const INLINE_ARGS: usize = 4;

mod flag {
    /// `cancel()` was called.
    pub(super) const CANCELLED: u8 = 1;
    /// The handle lies in the timer heap.
    pub(super) const SCHEDULED: u8 = 1 << 1;
    /// A `TimerHandle`.
    pub(super) const TIMER: u8 = 1 << 2;
    /// Run again and again (`add_reader`): the callback is kept after a run.
    pub(super) const REPEATS: u8 = 1 << 3;
    /// The context is our own copy, and hidden from the collector (which its type's dealloc does not expect: it is
    /// shown again before anything else gets hold of it).
    pub(super) const HIDES_CONTEXT: u8 = 1 << 5;
    /// Tracked by the collector.
    pub(super) const TRACKED: u8 = 1 << 4;
}

#[repr(C)]
pub(crate) struct HandleObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    callback: ObjectCell,
    context: ObjectCell,
    args: [ObjectCell; INLINE_ARGS],
    /// A tuple with all arguments, where there are more than `INLINE_ARGS`.
    more_args: ObjectCell,
    source_traceback: ObjectCell,
    weakrefs: Cell<*mut ffi::PyObject>,
    /// The deadline as the caller gave it, in seconds of the loop's clock.
    when_s: Cell<f64>,
    args_len: Cell<u8>,
    flags: Cell<u8>,
}

static HANDLE_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static TIMER_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static FREE: Freelist = Freelist::new();

/// An owned reference to a handle, as the queues of the loop keep it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandleRef(*mut HandleObject);

// SAFETY: a plain pointer; the inbox carries it (with its reference) to the loop's thread, which uses it attached.
unsafe impl Send for HandleRef {}

impl HandleRef {
    /// Makes a handle. `context` null means a copy of the current one. `when_s` makes it a `TimerHandle`.
    #[inline]
    pub(crate) fn create(
        py: Python<'_>,
        event_loop: *mut LoopObject,
        callback: *mut ffi::PyObject,
        args: &[*mut ffi::PyObject],
        context: *mut ffi::PyObject,
        when_s: Option<f64>,
    ) -> PyResult<Self> {
        // SAFETY: attached; all pointers are borrowed from the caller's arguments and get references of their own;
        // the object comes zeroed, or from the freelist with every cell empty.
        unsafe {
            let (context, is_hidden) = if context.is_null() {
                let copy = ffi::PyContext_CopyCurrent();
                if copy.is_null() {
                    return Err(errors::fetch(py));
                }
                if !Freelist::IS_TRACKED {
                    ffi::PyObject_GC_UnTrack(copy.cast());
                }
                (copy, !Freelist::IS_TRACKED)
            } else {
                (ffi::Py_NewRef(context), false)
            };
            let types = if when_s.is_some() {
                &TIMER_TYPE
            } else {
                &HANDLE_TYPE
            };
            let object = FREE
                .take_or_alloc(types.load(Ordering::Relaxed))
                .cast::<HandleObject>();
            if object.is_null() {
                let error = errors::fetch(py);
                if is_hidden {
                    ffi::PyObject_GC_Track(context.cast());
                }
                ffi::Py_DECREF(context);
                return Err(error);
            }
            let handle = &*object;
            handle.event_loop.put_new(ffi::Py_NewRef(event_loop.cast()));
            handle.callback.put_new(ffi::Py_NewRef(callback));
            handle.context.put_new(context);
            handle.when_s.set(when_s.unwrap_or(0.0));
            let tracked = if Freelist::IS_TRACKED { flag::TRACKED } else { 0 };
            let hidden = if is_hidden { flag::HIDES_CONTEXT } else { 0 };
            handle
                .flags
                .set(tracked | hidden | if when_s.is_some() { flag::TIMER } else { 0 });
            if args.len() <= INLINE_ARGS {
                for (cell, arg) in handle.args.iter().zip(args) {
                    cell.put_new(ffi::Py_NewRef(*arg));
                }
                handle.args_len.set(args.len() as u8);
            } else {
                handle.args_len.set(0);
                let tuple = PyTuple::new(py, args.iter().map(|arg| Bound::from_borrowed_ptr(py, *arg)));
                match tuple {
                    Ok(tuple) => handle.more_args.put_new(tuple.into_ptr()),
                    Err(error) => {
                        ffi::Py_DECREF(object.cast());
                        return Err(error);
                    }
                }
            }
            Ok(Self(object))
        }
    }

    /// A handle that may run many times, for `add_reader` and `add_writer`.
    pub(crate) fn create_repeating(
        py: Python<'_>,
        event_loop: *mut LoopObject,
        callback: *mut ffi::PyObject,
        args: &[*mut ffi::PyObject],
    ) -> PyResult<Self> {
        let handle = Self::create(py, event_loop, callback, args, ptr::null_mut(), None)?;
        let this = handle.this(py);
        this.flags.set(this.flags.get() | flag::REPEATS);
        handle.track(py);
        Ok(handle)
    }

    #[inline]
    pub(crate) fn this(self, py: Python<'_>) -> This<'_, HandleObject> {
        // SAFETY: whoever holds a HandleRef holds a reference, so the object is alive and of this layout.
        unsafe { This::new(py, self.0.cast()) }
    }

    #[inline]
    pub(crate) fn as_ptr(self) -> *mut ffi::PyObject {
        self.0.cast()
    }

    /// The same handle with one more reference.
    #[inline]
    pub(crate) fn new_ref(self) -> Self {
        // SAFETY: the object is alive while a HandleRef to it is held; called attached.
        unsafe { ffi::Py_INCREF(self.0.cast()) };
        self
    }

    /// Gives the reference to Python code.
    #[inline]
    pub(crate) fn into_bound(self, py: Python<'_>) -> Bound<'_, PyAny> {
        // SAFETY: a HandleRef owns one reference, which moves to the result.
        unsafe { Bound::from_owned_ptr(py, self.0.cast()) }
    }

    /// The handle whose reference a queue held as a plain pointer.
    #[inline]
    pub(crate) fn from_owned(object: *mut ffi::PyObject) -> Self {
        Self(object.cast())
    }

    /// Makes the collector see the handle.
    pub(crate) fn track(self, py: Python<'_>) {
        let this = self.this(py);
        if !this.has(flag::TRACKED) {
            this.flags.set(this.flags.get() | flag::TRACKED);
            // SAFETY: the object is a live one of a type with collector support, and not tracked so far.
            unsafe { ffi::PyObject_GC_Track(self.0.cast()) };
        }
    }

    /// Hides the handle from the collector again.
    fn untrack(self, py: Python<'_>) {
        let this = self.this(py);
        if this.has(flag::TRACKED) && !Freelist::IS_TRACKED {
            this.flags.set(this.flags.get() & !flag::TRACKED);
            // SAFETY: the object is alive and tracked.
            unsafe { ffi::PyObject_GC_UnTrack(self.0.cast()) };
        }
    }

    /// True if others than one queue hold the handle.
    pub(crate) fn is_kept(self, _: Python<'_>) -> bool {
        // SAFETY: the object is alive.
        unsafe { ffi::Py_REFCNT(self.0.cast()) > 1 }
    }

    /// Tracks the handle if others than its `own` holders keep it, else hides it.
    pub(crate) fn track_if_kept(self, py: Python<'_>, own: ffi::Py_ssize_t) {
        // SAFETY: the object is alive.
        if unsafe { ffi::Py_REFCNT(self.0.cast()) } > own {
            self.track(py)
        } else {
            self.untrack(py)
        }
    }

    /// What the handle of a queue refers to, for the collector: the handle itself if it is tracked, else, where the
    /// queue is its only holder, its referents. An untracked handle that others hold too is left out: what it
    /// refers to then counts as reachable.
    ///
    /// # Safety
    /// Called by the collector with its own `visit` and `arg`.
    pub(crate) unsafe fn traverse(self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: a queue's handle is alive; visit and arg are the collector's.
        unsafe {
            let handle = &*self.0;
            if handle.has(flag::TRACKED) {
                return visit(self.0.cast(), arg);
            }
            if ffi::Py_REFCNT(self.0.cast()) != 1 {
                return 0;
            }
            NativeType::traverse(handle, visit, arg)
        }
    }

    /// Drops the reference.
    #[inline]
    pub(crate) fn release(self, py: Python<'_>) {
        drop(self.into_bound(py));
    }

    #[inline]
    pub(crate) fn is_cancelled(self, py: Python<'_>) -> bool {
        self.this(py).has(flag::CANCELLED)
    }

    pub(crate) fn set_scheduled(self, py: Python<'_>, is_scheduled: bool) {
        let this = self.this(py);
        let flags = this.flags.get();
        this.flags.set(if is_scheduled {
            flags | flag::SCHEDULED
        } else {
            flags & !flag::SCHEDULED
        });
    }

    pub(crate) fn set_source_traceback(self, py: Python<'_>, traceback: Bound<'_, PyAny>) {
        self.this(py).source_traceback.set(traceback);
    }

    /// Marks the handle as cancelled and drops what it would have called. True if it was not cancelled before.
    pub(crate) fn cancel(self, py: Python<'_>) -> bool {
        let this = self.this(py);
        if this.has(flag::CANCELLED) {
            return false;
        }
        this.flags.set(this.flags.get() | flag::CANCELLED);
        this.drop_call();
        true
    }

    /// Runs the callback in its context and reports what it raises. Err only for the two exceptions that leave
    /// `run_forever`.
    #[inline]
    pub(crate) fn run(self, py: Python<'_>) -> PyResult<()> {
        let this = self.this(py);
        if this.has(flag::CANCELLED) {
            return Ok(());
        }
        if this.has(flag::REPEATS) || this.more_args.is_set() {
            return self.run_kept(py);
        }
        // The call is moved out of the handle first: the callback may cancel its own handle.
        let args_len = this.args_len.get() as usize;
        let mut call = [ptr::null_mut(); INLINE_ARGS + 2];
        for (place, cell) in call[2..].iter_mut().zip(&this.args[..args_len]) {
            *place = cell.take_ptr();
        }
        this.args_len.set(0);
        this.show_context();
        let callback = this.callback.take_ptr();
        let context = this.context.take_ptr();
        let event_loop = this.event_loop.take_ptr();
        // SAFETY: the references were moved out of the cells, so they live until dropped below; call[1] is the free
        // place that the offset flag allows.
        unsafe {
            if ffi::PyContext_Enter(context) == 0 {
                let result = ffi::PyObject_Vectorcall(
                    callback,
                    call[2..].as_ptr(),
                    args_len | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
                    ptr::null_mut(),
                );
                if !result.is_null() {
                    ffi::Py_DECREF(result);
                    if ffi::PyContext_Exit(context) == 0 {
                        for arg in &call[2..2 + args_len] {
                            ffi::Py_DECREF(*arg);
                        }
                        ffi::Py_DECREF(callback);
                        ffi::Py_DECREF(context);
                        ffi::Py_DECREF(event_loop);
                        return Ok(());
                    }
                } else {
                    let error = errors::fetch(py);
                    ffi::PyContext_Exit(context);
                    error.restore(py);
                }
            }
            // Failed: put the call back, so that the report can show it.
            let error = errors::fetch(py);
            let args: Vec<_> = call[2..2 + args_len]
                .iter()
                .map(|arg| Bound::from_owned_ptr(py, *arg))
                .collect();
            let callback = Bound::from_owned_ptr(py, callback);
            let context = Bound::from_owned_ptr(py, context);
            let event_loop = Bound::from_owned_ptr(py, event_loop);
            if !this.has(flag::CANCELLED) {
                // Back again for as long as the report lasts: handlers look at the handle and run in its context.
                this.callback.set(callback.clone());
                this.context.set(context);
                this.event_loop.set(event_loop.clone());
                this.args_len.set(args_len as u8);
                for (cell, arg) in this.args.iter().zip(&args) {
                    cell.set(arg.clone());
                }
            }
            let result = self.report(py, &event_loop, &callback, &PyTuple::new(py, &args)?, error);
            this.drop_call();
            result
        }
    }

    /// Drops what a handle that runs once still holds of its call.
    pub(crate) fn forget_call(self, py: Python<'_>) {
        let this = self.this(py);
        if !this.has(flag::REPEATS) {
            this.drop_call();
        }
    }

    /// `run` for a handle that keeps its callback, or has many arguments.
    fn run_kept(self, py: Python<'_>) -> PyResult<()> {
        let result = self.run_and_keep(py);
        self.forget_call(py);
        result
    }

    /// Runs the callback like `run`, but leaves it in the handle, readable afterwards.
    pub(crate) fn run_and_keep(self, py: Python<'_>) -> PyResult<()> {
        let this = self.this(py);
        if this.has(flag::CANCELLED) {
            return Ok(());
        }
        let (Some(callback), Some(context), Some(event_loop)) = (
            this.callback.get(py),
            this.context.get(py),
            this.event_loop.get(py),
        ) else {
            return Ok(());
        };
        this.show_context();
        let args = this.args_tuple(py)?;
        // SAFETY: the context is a live one that we hold; it is left below.
        let entered = unsafe { ffi::PyContext_Enter(context.as_ptr()) };
        if entered != 0 {
            return self.report(py, &event_loop, &callback, &args, errors::fetch(py));
        }
        let result = callback.call1(&args);
        // SAFETY: entered above on this thread.
        let left = unsafe { ffi::PyContext_Exit(context.as_ptr()) };
        match result {
            Err(error) => self.report(py, &event_loop, &callback, &args, error),
            Ok(_) if left != 0 => self.report(py, &event_loop, &callback, &args, errors::fetch(py)),
            Ok(_) => Ok(()),
        }
    }

    #[cold]
    fn report(
        self,
        py: Python<'_>,
        event_loop: &Bound<'_, PyAny>,
        callback: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        error: PyErr,
    ) -> PyResult<()> {
        let this = self.this(py);
        if errors::leaves_loop(py, &error) {
            return Err(error);
        }
        let source = py
            .import("asyncio.format_helpers")
            .and_then(|helpers| helpers.call_method1("_format_callback_source", (callback, args)))
            .and_then(|text| text.extract::<String>())
            .unwrap_or_else(|_| "<unknown>".to_owned());
        let message = format!("Exception in callback {source}");
        let own = this.to_bound();
        match this.source_traceback.get(py) {
            Some(traceback) => errors::report(
                event_loop,
                &message,
                error,
                &[("handle", &own), ("source_traceback", &traceback)],
            ),
            None => errors::report(event_loop, &message, error, &[("handle", &own)]),
        }
    }

    /// The deadline in seconds of the loop's clock.
    pub(crate) fn when_s(self, py: Python<'_>) -> f64 {
        self.this(py).when_s.get()
    }
}

impl HandleObject {
    #[inline]
    fn has(&self, flag: u8) -> bool {
        self.flags.get() & flag != 0
    }

    /// Makes the collector see the context again.
    #[inline]
    fn show_context(&self) {
        if self.has(flag::HIDES_CONTEXT) {
            self.flags.set(self.flags.get() & !flag::HIDES_CONTEXT);
            // SAFETY: the flag says that the cell holds a context that was untracked in `create`; attached.
            unsafe { ffi::PyObject_GC_Track(self.context.as_ptr().cast()) };
        }
    }

    fn drop_call(&self) {
        self.show_context();
        // SAFETY: only called attached; each reference is taken out of its cell before it is dropped.
        unsafe {
            ffi::Py_XDECREF(self.callback.take_ptr());
            let args_len = self.args_len.replace(0) as usize;
            for cell in &self.args[..args_len] {
                ffi::Py_XDECREF(cell.take_ptr());
            }
            ffi::Py_XDECREF(self.more_args.take_ptr());
            ffi::Py_XDECREF(self.context.take_ptr());
            ffi::Py_XDECREF(self.event_loop.take_ptr());
        }
    }

    fn args_tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        if let Some(tuple) = self.more_args.get(py) {
            return Ok(tuple.cast_into::<PyTuple>()?);
        }
        let args_len = self.args_len.get() as usize;
        PyTuple::new(
            py,
            self.args[..args_len]
                .iter()
                .filter_map(|cell| cell.get(py))
                .collect::<Vec<_>>(),
        )
    }
}

impl NativeType for HandleObject {
    const NAME: &'static CStr = c"grapeshot._core.Handle";
    const DOC: &'static CStr = c"A callback scheduled on the loop; the interface of asyncio.Handle.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION as u64 | ffi::Py_TPFLAGS_BASETYPE as u64;

    unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let cells = [
            &self.event_loop,
            &self.callback,
            &self.more_args,
            &self.source_traceback,
        ];
        for cell in cells.into_iter().chain(&self.args) {
            // SAFETY: visit and arg are the collector's.
            let result = unsafe { cell.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        if !self.has(flag::HIDES_CONTEXT) {
            // SAFETY: as above.
            return unsafe { self.context.traverse(visit, arg) };
        }
        // A hidden context has no other holder: its referents are visited as ours.
        let context = self.context.as_ptr();
        // SAFETY: as above; the cell holds the context for as long as the flag is up.
        unsafe {
            match (*ffi::Py_TYPE(context)).tp_traverse {
                Some(traverse) => traverse(context, visit, arg),
                None => 0,
            }
        }
    }

    fn clear(this: This<'_, Self>) {
        this.drop_call();
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached, once, with an unreferenced handle; after the cells are emptied nothing
    // refers to the memory, which goes to the freelist or back to the collector's allocator.
    unsafe {
        let handle = &*slf.cast::<HandleObject>();
        if handle.has(flag::TRACKED) {
            ffi::PyObject_GC_UnTrack(slf.cast());
        }
        if !handle.weakrefs.get().is_null() {
            ffi::PyObject_ClearWeakRefs(slf);
        }
        handle.drop_call();
        ffi::Py_XDECREF(handle.source_traceback.take_ptr());
        FREE.give(slf);
    }
}

// ---- methods -------------------------------------------------------------------------------------------------

fn reference(this: This<'_, HandleObject>) -> HandleRef {
    HandleRef(this.as_ptr().cast())
}

fn cancel<'py>(this: This<'py, HandleObject>, args: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let py = this.py();
    args.exactly("cancel", 0)?;
    let handle = reference(this);
    let event_loop = this.event_loop.get(py);
    if handle.cancel(py)
        && this.has(flag::SCHEDULED)
        && let Some(event_loop) = event_loop
    {
        LoopObject::of(&event_loop).reactor().timer_cancelled(py, handle);
    }
    Ok(PyNone::get(py).to_owned().into_any())
}

fn cancelled<'py>(this: This<'py, HandleObject>, args: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    args.exactly("cancelled", 0)?;
    get_cancelled(this)
}

fn get_cancelled(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    Ok(PyBool::new(this.py(), this.has(flag::CANCELLED))
        .to_owned()
        .into_any())
}

fn get_scheduled(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    Ok(PyBool::new(this.py(), this.has(flag::SCHEDULED))
        .to_owned()
        .into_any())
}

fn get_context<'py>(this: This<'py, HandleObject>, args: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    args.exactly("get_context", 0)?;
    context(this)
}

fn or_none<'py>(py: Python<'py>, cell: &ObjectCell) -> Bound<'py, PyAny> {
    cell.get(py)
        .unwrap_or_else(|| PyNone::get(py).to_owned().into_any())
}

fn context(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    this.show_context();
    Ok(or_none(this.py(), &this.context))
}

fn callback(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    Ok(or_none(this.py(), &this.callback))
}

fn call_args(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    if this.has(flag::CANCELLED) {
        return Ok(PyNone::get(this.py()).to_owned().into_any());
    }
    Ok(this.args_tuple(this.py())?.into_any())
}

fn event_loop(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    Ok(or_none(this.py(), &this.event_loop))
}

fn source_traceback(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    Ok(or_none(this.py(), &this.source_traceback))
}

fn asyncio_class(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    let py = this.py();
    Ok(if this.has(flag::TIMER) {
        names().timer_handle_type.bind(py)
    } else {
        names().handle_type.bind(py)
    })
}

fn run_once<'py>(this: This<'py, HandleObject>, args: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    args.exactly("_run", 0)?;
    reference(this).run(this.py())?;
    Ok(PyNone::get(this.py()).to_owned().into_any())
}

fn when<'py>(this: This<'py, HandleObject>, args: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    args.exactly("when", 0)?;
    get_when(this)
}

fn get_when(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    Ok(PyFloat::new(this.py(), this.when_s.get()).into_any())
}

/// `<Handle foo() at file.py:3>` and so on, composed as `asyncio.Handle._repr_info` composes it.
unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr attached with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::<HandleObject>::new(py, slf);
            let mut text = String::from(if this.has(flag::TIMER) {
                "<TimerHandle"
            } else {
                "<Handle"
            });
            if this.has(flag::CANCELLED) {
                text.push_str(" cancelled");
            }
            if this.has(flag::TIMER) {
                text.push_str(&format!(" when={}", this.when_s.get()));
            }
            if let Some(callback) = this.callback.get(py) {
                let helpers = py.import("asyncio.format_helpers")?;
                let source =
                    helpers.call_method1("_format_callback_source", (callback, this.args_tuple(py)?))?;
                text.push(' ');
                text.push_str(&source.extract::<String>()?);
            }
            if let Some(frames) = this.source_traceback.get(py)
                && frames.len()? > 0
            {
                let last = frames.get_item(frames.len()? - 1)?;
                text.push_str(&format!(
                    " created at {}:{}",
                    last.get_item(0)?.str()?,
                    last.get_item(1)?.str()?
                ));
            }
            text.push('>');
            Ok(text.into_pyobject(py)?.into_ptr())
        })
    }
}

/// Ordering and equality of timers by deadline, as `asyncio.TimerHandle` has them.
unsafe extern "C" fn compare_timers(
    a: *mut ffi::PyObject,
    b: *mut ffi::PyObject,
    op: c_int,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_richcompare attached; `a` is a TimerHandle, `b` any live object.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            if ffi::PyObject_TypeCheck(b, TIMER_TYPE.load(Ordering::Relaxed)) == 0 {
                return Ok(ffi::Py_NewRef(ffi::Py_NotImplemented()));
            }
            let (left, right) = (This::<HandleObject>::new(py, a), This::<HandleObject>::new(py, b));
            let (left_s, right_s) = (left.when_s.get(), right.when_s.get());
            let is_same = || -> PyResult<bool> {
                Ok(left_s == right_s
                    && or_none(py, &left.callback).eq(or_none(py, &right.callback))?
                    && left.args_tuple(py)?.eq(right.args_tuple(py)?)?
                    && left.has(flag::CANCELLED) == right.has(flag::CANCELLED))
            };
            let result = match op {
                ffi::Py_LT => left_s < right_s,
                ffi::Py_LE => left_s < right_s || is_same()?,
                ffi::Py_GT => left_s > right_s,
                ffi::Py_GE => left_s > right_s || is_same()?,
                ffi::Py_EQ => is_same()?,
                _ => !is_same()?,
            };
            Ok(PyBool::new(py, result).to_owned().into_ptr())
        })
    }
}

/// `hash(when)`, as asyncio has it.
unsafe extern "C" fn hash_timer(slf: *mut ffi::PyObject) -> ffi::Py_hash_t {
    // SAFETY: CPython calls tp_hash attached with a TimerHandle.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            PyFloat::new(py, This::<HandleObject>::new(py, slf).when_s.get())
                .hash()
                .map(|hash| hash as ffi::Py_hash_t)
        })
    }
}

/// The type of `Handle` is made first; `TimerHandle` inherits its methods.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = leak_table(
        vec![
            method!(
                HandleObject,
                c"cancel",
                cancel,
                c"Cancel the callback; it will not run."
            ),
            method!(
                HandleObject,
                c"cancelled",
                cancelled,
                c"True if the callback was cancelled."
            ),
            method!(
                HandleObject,
                c"get_context",
                get_context,
                c"The contextvars.Context the callback runs in."
            ),
            method!(
                HandleObject,
                c"_run",
                run_once,
                c"Run the callback now; the loop's own way to run it."
            ),
        ],
        ffi::PyMethodDef::zeroed(),
    );
    let getters = leak_table(
        vec![
            getter!(
                HandleObject,
                c"_callback",
                callback,
                c"The callable, None once run or cancelled."
            ),
            getter!(
                HandleObject,
                c"_args",
                call_args,
                c"Its arguments as a tuple, None once cancelled."
            ),
            getter!(HandleObject, c"_context", context, c"The context it runs in."),
            getter!(HandleObject, c"_loop", event_loop, c"The loop."),
            getter!(HandleObject, c"_cancelled", get_cancelled, c"True if cancelled."),
            getter!(
                HandleObject,
                c"_source_traceback",
                source_traceback,
                c"Where it was scheduled (debug mode)."
            ),
            getter!(
                HandleObject,
                c"__class__",
                asyncio_class,
                c"asyncio's class, so that isinstance() holds."
            ),
        ],
        ffi::PyGetSetDef::default(),
    );
    let members = leak_table(
        vec![ffi::PyMemberDef {
            name: c"__weaklistoffset__".as_ptr(),
            type_code: ffi::Py_T_PYSSIZET,
            offset: std::mem::offset_of!(HandleObject, weakrefs) as ffi::Py_ssize_t,
            flags: ffi::Py_READONLY,
            doc: ptr::null(),
        }],
        ffi::PyMemberDef::default(),
    );
    // SAFETY: the functions are those of this layout, the tables are leaked.
    let handle_type = unsafe {
        new_type::<HandleObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_dealloc, dealloc as *mut c_void),
                slot(ffi::Py_tp_repr, repr as *mut c_void),
                slot(ffi::Py_tp_methods, methods),
                slot(ffi::Py_tp_getset, getters),
                slot(ffi::Py_tp_members, members),
            ],
        )?
    };
    // What the base has already stands here again: a method found on the exact type skips the subtype check.
    let timer_methods = leak_table(
        vec![
            method!(
                HandleObject,
                c"cancel",
                cancel,
                c"Cancel the callback; it will not run."
            ),
            method!(
                HandleObject,
                c"cancelled",
                cancelled,
                c"True if the callback was cancelled."
            ),
            method!(
                HandleObject,
                c"when",
                when,
                c"The deadline in seconds of loop.time()."
            ),
        ],
        ffi::PyMethodDef::zeroed(),
    );
    let timer_getters = leak_table(
        vec![
            getter!(
                HandleObject,
                c"_when",
                get_when,
                c"The deadline in seconds of loop.time()."
            ),
            getter!(
                HandleObject,
                c"_scheduled",
                get_scheduled,
                c"True while it waits in the timer heap."
            ),
        ],
        ffi::PyGetSetDef::default(),
    );
    // SAFETY: as above; TimerHandle has the same layout as its base.
    let timer_type = unsafe {
        new_type::<TimerLayout>(
            module,
            Some(&PyTuple::new(module.py(), [&handle_type])?),
            &[
                slot(ffi::Py_tp_dealloc, dealloc as *mut c_void),
                slot(ffi::Py_tp_repr, repr as *mut c_void),
                slot(ffi::Py_tp_richcompare, compare_timers as *mut c_void),
                slot(ffi::Py_tp_hash, hash_timer as *mut c_void),
                slot(ffi::Py_tp_methods, timer_methods),
                slot(ffi::Py_tp_getset, timer_getters),
            ],
        )?
    };
    module.add("Handle", &handle_type)?;
    module.add("TimerHandle", &timer_type)?;
    HANDLE_TYPE.store(handle_type.into_ptr().cast(), Ordering::Release);
    TIMER_TYPE.store(timer_type.into_ptr().cast(), Ordering::Release);
    Ok(())
}

/// `TimerHandle`'s own name over the layout of `HandleObject`.
#[repr(transparent)]
struct TimerLayout(HandleObject);

impl NativeType for TimerLayout {
    const NAME: &'static CStr = c"grapeshot._core.TimerHandle";
    const DOC: &'static CStr = c"A callback scheduled for a time; the interface of asyncio.TimerHandle.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION as u64;

    unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: passed on unchanged.
        unsafe { self.0.traverse(visit, arg) }
    }

    fn clear(this: This<'_, Self>) {
        // SAFETY: the layouts are the same (repr(transparent)).
        HandleObject::clear(unsafe { This::new(this.py(), this.as_ptr()) });
    }
}

/// TypeError in debug mode for what cannot be a callback, with asyncio's wording.
#[cold]
pub(crate) fn check_callback(callback: &Bound<'_, PyAny>, method: &str) -> PyResult<()> {
    let coroutines = callback.py().import("asyncio.coroutines")?;
    if coroutines.call_method1("iscoroutine", (callback,))?.is_truthy()?
        || coroutines
            .py()
            .import("inspect")?
            .call_method1("iscoroutinefunction", (callback,))?
            .is_truthy()?
    {
        return Err(PyTypeError::new_err(format!(
            "coroutines cannot be used with {method}()"
        )));
    }
    if !callback.is_callable() {
        return Err(PyTypeError::new_err(format!(
            "a callable object was expected by {method}(), got {}",
            callback.repr()?
        )));
    }
    Ok(())
}
