//! The object of a native coroutine, from its creation to its deallocation.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use pyo3::exceptions::{PyImportError, PyRuntimeWarning};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::Steps;
use crate::binding::deallocation::free_memory;
use crate::binding::errors;
use crate::binding::freelist::Freelist;
use crate::binding::lengths::ordinary_len;
use crate::binding::native_type::{NativeType, This, traverse_cells};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::ObjectResult;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::waiter;

/// One type of coroutine, and the freelist of the type's objects.
pub(crate) struct Place {
    pub(super) kind: AtomicPtr<ffi::PyTypeObject>,
    free: Freelist,
}

impl Place {
    pub(crate) const fn new() -> Self {
        Self {
            kind: AtomicPtr::new(ptr::null_mut()),
            free: Freelist::new(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum CoroutineState {
    Created,
    Running,
    Suspended,
    Closed,
}

/// The offset of `frame_state` matters: `python -m asyncio ps` reads a task's coroutine from outside the process. It
/// assumes that every coroutine belongs to Python code and has the state of its frame in this byte. So the byte must
/// say "cleared": otherwise the tool would try to read a frame, and there is none here.
#[repr(C)]
pub(crate) struct CoroutineObject<S: Steps> {
    base: ffi::PyObject,
    pub(crate) event_loop: ObjectCell,
    /// The object whose method was called.
    pub(crate) subject: ObjectCell,
    /// The first argument.
    pub(crate) first: ObjectCell,
    /// The second argument, or an object that the coroutine keeps between its steps.
    pub(crate) second: ObjectCell,
    /// The waiter that was yielded last, while the coroutine is suspended.
    pub(super) waiter: ObjectCell,
    /// Where the coroutine was created; empty unless the loop is in debug mode and the interpreter tracks origins. Any
    /// thread may read the cell, because it does not change while anything refers to the coroutine.
    pub(super) origin: ObjectCell,
    /// Never changes, so any thread may read it.
    pub(crate) kind: Cell<S::Kind>,
    pub(super) state: Cell<CoroutineState>,
    /// Whether the coroutine has been suspended at least once.
    pub(crate) has_waited: Cell<bool>,
    /// At the offset of a generator's `gi_frame_state`.
    pub(super) frame_state: Cell<u8>,
    pub(crate) rest: S,
}

pub(crate) type Coroutine<'py, S> = This<'py, CoroutineObject<S>>;

/// `FRAME_CLEARED` in the running version of CPython (`Include/internal/pycore_frame.h`).
pub(super) fn cleared_frame(py: Python<'_>) -> u8 {
    if py.version_info() >= (3, 15) { 5 } else { 4 }
}

/// The result of `cleared_frame`, stored once.
pub(super) static CLEARED_FRAME: AtomicU8 = AtomicU8::new(0);

/// A new coroutine, on which no step has been taken yet.
#[inline]
pub(crate) fn new_coroutine<'py, S: Steps>(
    event_loop: Bound<'py, PyAny>,
    kind: S::Kind,
    subject: Option<Bound<'py, PyAny>>,
    first: Option<Bound<'py, PyAny>>,
    second: Option<Bound<'py, PyAny>>,
) -> ObjectResult<'py> {
    let py = event_loop.py();
    let origin = if LoopObject::is_loop(&event_loop) && LoopObject::of(&event_loop).reactor().probe.is_debug()
    {
        origin_now(py)?
    } else {
        None
    };
    let place = S::place();
    // SAFETY: attached; `make_type` has made the type for this layout. The object comes with its cells empty.
    unsafe {
        let object =
            Bound::from_owned_ptr_or_err(py, place.free.take_or_alloc(place.kind.load(Ordering::Relaxed)))?;
        let made = &*object.as_ptr().cast::<CoroutineObject<S>>();
        let pointer = |value: Option<Bound<'py, PyAny>>| value.map_or(ptr::null_mut(), Bound::into_ptr);
        made.event_loop.put_new(event_loop.into_ptr());
        made.subject.put_new(pointer(subject));
        made.first.put_new(pointer(first));
        made.second.put_new(pointer(second));
        made.origin.put_new(pointer(origin));
        made.rest.reset();
        made.kind.set(kind);
        made.state.set(CoroutineState::Created);
        made.has_waited.set(false);
        made.frame_state.set(CLEARED_FRAME.load(Ordering::Relaxed));
        if !Freelist::IS_TRACKED {
            ffi::PyObject_GC_Track(object.as_ptr().cast());
        }
        Ok(object)
    }
}

/// The frames of the caller, as `cr_origin` shows them, if the interpreter tracks the origin of coroutines.
fn origin_now(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let sys = py.import("sys")?;
    let depth: usize = sys
        .call_method0("get_coroutine_origin_tracking_depth")?
        .extract()?;
    if depth == 0 {
        return Ok(None);
    }
    let mut frames = Vec::with_capacity(depth);
    let mut frame = sys.call_method1("_getframe", (0,))?;
    while !frame.is_none() && frames.len() < depth {
        let code = frame.getattr("f_code")?;
        frames.push((
            code.getattr("co_filename")?,
            frame.getattr("f_lineno")?,
            code.getattr("co_name")?,
        ));
        frame = frame.getattr("f_back")?;
    }
    Ok(Some(PyTuple::new(py, frames)?.into_any()))
}

impl<S: Steps> CoroutineObject<S> {
    /// The first argument as a number of bytes, if `ordinary_len` accepts it.
    #[inline]
    pub(crate) fn first_as_len(&self) -> Option<usize> {
        // SAFETY: null, or an object that the coroutine keeps alive.
        unsafe { ordinary_len(self.first.as_ptr()) }
    }

    /// The loop, for a coroutine whose `event_loop` is a `LoopObject`.
    pub(crate) fn loop_object(&self) -> &LoopObject {
        // SAFETY: the coroutine holds a reference to its loop from its creation to its deallocation.
        unsafe { &*self.event_loop.as_ptr().cast::<LoopObject>() }
    }
}

/// The coroutine's name with its class, such as `Loop.sock_recv`.
pub(super) fn long_name<S: Steps>(this: Coroutine<'_, S>) -> String {
    let (class, name) = S::names(this.kind.get());
    format!("{class}.{name}")
}

// ---- the end -------------------------------------------------------------------------------------------------------

/// Closes the coroutine and drops the objects that it worked with.
pub(super) fn finish<S: Steps>(this: Coroutine<'_, S>) {
    let py = this.py();
    this.state.set(CoroutineState::Closed);
    S::release(this);
    for cell in [&this.subject, &this.first, &this.second] {
        drop(cell.take(py));
    }
    for cell in this.rest.cells() {
        drop(cell.take(py));
    }
}

/// Ends a coroutine that is not running.
pub(super) fn end<S: Steps>(this: Coroutine<'_, S>) {
    if let Some(waiter) = this.waiter.take(this.py()) {
        waiter::leave(waiter::waiter_of(&waiter));
    }
    finish(this);
}

/// Ends a coroutine to which nothing refers any more. Any thread may free or collect it.
fn end_unreferenced<S: Steps>(this: Coroutine<'_, S>) {
    if let Some(waiter) = this.waiter.take(this.py()) {
        // Fails if another thread runs the loop. The waiter then stays in the fd table until the next event of its
        // descriptor. That event has no effect.
        let _ = S::with_access(this, || {
            waiter::leave(waiter::waiter_of(&waiter));
            Ok(())
        });
    }
    finish(this);
    drop(this.origin.take(this.py()));
}

impl<S: Steps> NativeType for CoroutineObject<S> {
    const NAME: &'static CStr = S::NAME;
    const DOC: &'static CStr = S::DOC;
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc::<S>;

    /// A coroutine that has ended refers only to its loop and to the tuples in `origin`, which hold only strings and
    /// ints. The loop's deallocation itself checks how deep deallocations are nested (see `binding::deallocation`). So
    /// this coroutine's deallocation need not check that.
    #[inline]
    fn is_empty(&self) -> bool {
        self.state.get() == CoroutineState::Closed && !self.waiter.is_set()
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.subject,
            &self.first,
            &self.second,
            &self.waiter,
            &self.origin,
        ]
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's.
        unsafe {
            let result = traverse_cells(self.rest.cells(), visit, arg);
            if result != 0 {
                return result;
            }
            self.rest.traverse_rest(visit, arg)
        }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        S::with_access(this, body)
    }

    fn clear(this: This<'_, Self>) {
        end_unreferenced(this);
    }
}

/// Gives the warning that CPython gives for a coroutine of Python code. While the interpreter shuts down, nothing can
/// be imported, so the warning then does not show where the coroutine was created.
fn warn_never_awaited<S: Steps>(this: Coroutine<'_, S>) -> PyResult<()> {
    let py = this.py();
    match py.import("warnings") {
        Ok(warnings) => warnings
            .call_method1("_warn_unawaited_coroutine", (this.to_bound(),))
            .map(drop),
        Err(error) if error.is_instance_of::<PyImportError>(py) => {
            let message = CString::new(format!("coroutine '{}' was never awaited", long_name(this)))?;
            PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)
        }
        Err(error) => Err(error),
    }
}

/// `tp_finalize`: warns about a coroutine that was never awaited.
pub(super) unsafe extern "C" fn finalize<S: Steps>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls tp_finalize, attached, with an object of this type. The current exception is saved and
    // restored, as PEP 442 requires.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
        if this.state.get() != CoroutineState::Created {
            return;
        }
        let pending = PyErr::take(py);
        errors::at_boundary(py, (), || {
            if let Err(error) = warn_never_awaited(this) {
                error.write_unraisable(py, Some(&this.to_bound()));
            }
            Ok(())
        });
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

unsafe extern "C" fn dealloc<S: Steps>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this, attached, with an unreferenced coroutine. The finalizer of a coroutine that was never
    // started may revive it. If it does, this function returns. In all other cases the cells are emptied, and the
    // memory goes to the freelist or back to the allocator.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
        if this.state.get() == CoroutineState::Created && ffi::PyObject_CallFinalizerFromDealloc(slf) < 0 {
            return;
        }
        ffi::PyObject_GC_UnTrack(slf.cast());
        end_unreferenced(this);
        drop(this.event_loop.take(py));
        if ffi::PyObject_GC_IsFinalized(slf) == 0 {
            S::place().free.give(slf);
        } else {
            // The collector's "finalized" mark stays with the memory, so a new coroutine in the same memory would never
            // be finalized.
            free_memory(slf);
        }
    }
}
