//! `Handle` and `TimerHandle`: a callback with its arguments and context. The loop runs a handle of `add_reader` or
//! `add_writer` at each event, and any other handle once.
//!
//! Both types have the same layout. A handle stores up to four arguments inline, and more than four in a tuple. Freed
//! handles go to a freelist, because `call_soon` is the loop's hottest path. A handle belongs to the thread of its
//! loop, but any thread may call its methods (`with_critical_section`, `waiting`).
//!
//! With a GIL, the garbage collector does not track handles that run once. If it did, a program with 10,000 pending
//! handles would spend half of its time in the collector. No cycle is missed: a handle that has run or was cancelled
//! refers to nothing, and while the loop runs, every pending handle is reachable from the running loop anyway. While
//! the loop does not run, the handles that other code keeps are tracked (`reactor::tracking`). The loop reports the
//! referents of all other handles to the collector as if the loop itself referred to them.
//!
//! `isinstance(handle, asyncio.Handle)` is true because of `__class__`, as with the objects of `unittest.mock`.
//! Inheriting from asyncio's class would add 64 bytes of unused slots to every handle.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU16, AtomicU64, Ordering};

use grapeshot_core::arch;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::contexts;
use super::pyloop::LoopObject;
use crate::binding::HAS_GIL;
use crate::binding::freelist::Freelist;
use crate::binding::names::names;
use crate::binding::native_type::{NativeType, This, with_critical_section};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_ref::ObjectRef;

/// Timers of `call_later` and sleeps of coros with at least this delay may be as much as `SLACK_NS` late
/// (`reactor::timers`), which is at most a thousandth of the delay.
const MIN_SLACK_DELAY_S: f64 = 1.0;

/// The number of arguments that fit inside the handle. If there are more, a tuple holds all of them.
const INLINE_ARGS: usize = 4;

mod methods;
mod running;
mod slots;
mod waiting;

pub(super) use methods::{check_callback, register};

mod flag {
    /// `cancel()` was called.
    pub(super) const CANCELLED: u16 = 1;
    /// The handle is in the timer heap.
    pub(super) const SCHEDULED: u16 = 1 << 1;
    /// The handle is a `TimerHandle`.
    pub(super) const TIMER: u16 = 1 << 2;
    /// The handle runs repeatedly (`add_reader`) and keeps its callback after a run.
    pub(super) const REPEATS: u16 = 1 << 3;
    /// The collector tracks the handle.
    pub(super) const TRACKED: u16 = 1 << 4;
    /// The context is the template of `Contexts`, which other handles may share. The program must not get it.
    pub(super) const SHARES_CONTEXT: u16 = 1 << 5;
    /// `call_soon_threadsafe` made the handle, and asyncio would have made a `_ThreadSafeHandle` (3.14+). `cancel()`
    /// and `cancelled()` from another thread wait while the callback runs.
    pub(super) const THREADSAFE: u16 = 1 << 6;
    /// The callback of a thread-safe handle is running.
    pub(super) const RUNNING: u16 = 1 << 7;
    /// The callback is running, and another thread waits for it to end.
    pub(super) const AWAITED: u16 = 1 << 8;
    /// The deadline of a `TimerHandle` was given as an int, so `when()` returns an int, as in asyncio.
    pub(super) const WHEN_IS_INT: u16 = 1 << 9;
    /// The cell `callback` holds the text for `repr`.
    pub(super) const HAS_TEXT: u16 = 1 << 10;
    /// The cell `source_traceback` holds a dict of attributes; see `slots`.
    pub(super) const HAS_EXTRAS: u16 = 1 << 11;
    /// The timer may run a little late; see `Timers::time_to_deadline_ns`.
    pub(super) const HAS_SLACK: u16 = 1 << 12;
}

#[repr(C)]
pub(crate) struct HandleObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    /// The callable. In debug mode, a cancelled handle has its text for `repr` here.
    callback: ObjectCell,
    context: ObjectCell,
    args: [ObjectCell; INLINE_ARGS],
    /// A tuple with all arguments, if there are more than `INLINE_ARGS` or the program has set `_args`.
    more_args: ObjectCell,
    source_traceback: ObjectCell,
    weakrefs: Cell<*mut ffi::PyObject>,
    /// A timer stores its deadline here, in seconds of the loop's clock, as the bits of an `f64`. A thread-safe handle,
    /// which is never a timer, stores the thread that runs it.
    when_or_runner: AtomicU64,
    args_len: Cell<u8>,
    flags: AtomicU16,
}

static HANDLE_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static TIMER_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static FREE: Freelist = Freelist::new();

/// A handle that another reference keeps alive.
pub(crate) type Handle<'py> = This<'py, HandleObject>;

/// An owned reference to a handle, as the queues of the loop keep it. Dropping it releases the reference, which may run
/// any code.
pub(crate) struct HandleRef(ObjectRef);

impl Deref for HandleRef {
    type Target = HandleObject;

    #[inline]
    fn deref(&self) -> &HandleObject {
        // SAFETY: `create` and `of` have made this reference for an object of this layout, which it keeps alive. Shared
        // references are enough, because the fields that change are cells and atomics, as for `This`.
        unsafe { &*self.as_ptr().cast::<HandleObject>() }
    }
}

impl HandleRef {
    /// Creates a handle. A null `context` means a copy of the current one. `when_s` makes the handle a `TimerHandle`.
    #[inline]
    pub(crate) fn create(
        py: Python<'_>,
        event_loop: *mut LoopObject,
        callback: *mut ffi::PyObject,
        args: &[*mut ffi::PyObject],
        context: *mut ffi::PyObject,
        when_s: Option<f64>,
    ) -> PyResult<Self> {
        // SAFETY: attached. All pointers are borrowed from the caller's arguments, and the handle takes references of
        // its own. The object comes zeroed, or from the freelist with every cell empty. The object is new, so its only
        // reference goes to the result.
        unsafe {
            let (context, is_shared) = if context.is_null() {
                (*event_loop).reactor().contexts.for_handle(py)?
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
                let error = PyErr::fetch(py);
                ffi::Py_DECREF(context);
                return Err(error);
            }
            let handle = &*object;
            handle.event_loop.put_new(ffi::Py_NewRef(event_loop.cast()));
            handle.callback.put_new(ffi::Py_NewRef(callback));
            handle.context.put_new(context);
            let when_bits = when_s.unwrap_or(0.0).to_bits();
            handle.when_or_runner.store(when_bits, Ordering::Relaxed);
            let tracked = if Freelist::IS_TRACKED { flag::TRACKED } else { 0 };
            let shared = if is_shared { flag::SHARES_CONTEXT } else { 0 };
            let timer = if when_s.is_some() { flag::TIMER } else { 0 };
            handle.flags.store(tracked | shared | timer, Ordering::Relaxed);
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
            Ok(Self(ObjectRef::from_owned_ptr(object.cast())))
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
        handle.raise_flag(flag::REPEATS);
        handle.this(py).track();
        Ok(handle)
    }

    /// An owned reference to a borrowed handle.
    #[inline]
    pub(crate) fn of(handle: Handle<'_>) -> Self {
        Self(ObjectRef::new(handle.to_bound()))
    }

    /// Another reference to the same handle.
    #[inline]
    pub(crate) fn new_ref(&self) -> Self {
        Self(self.0.new_ref())
    }

    /// The handle, borrowed. A function that is not inlined gets a `Handle` rather than a `&HandleRef`, so that the
    /// pointer to the handle can stay in a register.
    #[inline]
    pub(crate) fn this<'a>(&'a self, py: Python<'a>) -> Handle<'a> {
        // SAFETY: as in `deref`; the result does not outlive this reference.
        unsafe { This::new(py, self.as_ptr()) }
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut ffi::PyObject {
        self.0.as_ptr()
    }

    /// Another reference, for Python code.
    pub(crate) fn to_bound<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.0.to_bound(py)
    }

    /// Gives the reference to Python code.
    #[inline]
    pub(crate) fn into_bound(self, py: Python<'_>) -> Bound<'_, PyAny> {
        self.0.into_bound(py)
    }

    /// Asks the processor to load the handle into its cache.
    #[inline]
    pub(crate) fn prefetch(&self) {
        let start = self.as_ptr().cast::<u8>();
        arch::prefetch(start);
        arch::prefetch(start.wrapping_add(std::mem::offset_of!(HandleObject, flags)));
    }

    /// Reports a queue's handle to the collector. A tracked handle is reported itself. If the handle is untracked and
    /// only the queue holds it, its referents are reported in its place. If it is untracked and has other holders,
    /// nothing is reported, so the collector treats its referents as reachable.
    ///
    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(crate) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: the queue's reference keeps the object alive; visit and arg are the collector's.
        unsafe {
            if self.has(flag::TRACKED) {
                return visit(self.as_ptr(), arg);
            }
            if ffi::Py_REFCNT(self.as_ptr()) != 1 {
                return 0;
            }
            NativeType::traverse(&**self, visit, arg)
        }
    }
}

impl<'py> Handle<'py> {
    /// Makes the collector track the handle.
    pub(crate) fn track(self) {
        if !self.has(flag::TRACKED) {
            self.raise_flag(flag::TRACKED);
            // SAFETY: the object is alive, its type supports collection, and it is not tracked yet.
            unsafe { ffi::PyObject_GC_Track(self.as_ptr().cast()) };
        }
    }

    /// Stops the collector from tracking the handle.
    fn untrack(self) {
        if self.has(flag::TRACKED) && !Freelist::IS_TRACKED {
            self.lower_flag(flag::TRACKED);
            // SAFETY: the object is alive and tracked.
            unsafe { ffi::PyObject_GC_UnTrack(self.as_ptr().cast()) };
        }
    }

    /// True if the handle has more references than the one that a queue holds.
    pub(crate) fn is_kept(self) -> bool {
        // SAFETY: the object is alive.
        unsafe { ffi::Py_REFCNT(self.as_ptr()) > 1 }
    }

    /// Stops the collector from tracking the handle, unless it has more than `own` references.
    pub(crate) fn untrack_unless_kept(self, own: ffi::Py_ssize_t) {
        // SAFETY: the object is alive.
        if unsafe { ffi::Py_REFCNT(self.as_ptr()) } <= own {
            self.untrack();
        }
    }

    pub(crate) fn set_source_traceback(self, traceback: Bound<'_, PyAny>) {
        self.source_traceback.set(traceback);
    }

    /// Marks the handle as cancelled and drops its callback and arguments. True if it was not cancelled before.
    pub(crate) fn cancel(self) -> bool {
        self.cancel_showing(methods::text_if_cancelled(self))
    }

    /// Like `cancel`. If there is a `text`, it becomes the `repr` of the handle.
    fn cancel_showing(self, text: Option<Bound<'_, PyAny>>) -> bool {
        with_critical_section(self, || {
            if self.has(flag::CANCELLED) {
                return false;
            }
            self.raise_flag(flag::CANCELLED);
            self.drop_call();
            if let Some(text) = text {
                self.callback.set(text);
                self.raise_flag(flag::HAS_TEXT);
            }
            true
        })
    }

    /// The loop, unless the handle has run or was cancelled.
    pub(crate) fn event_loop(self) -> Option<Bound<'py, PyAny>> {
        with_critical_section(self, || self.event_loop.get(self.py()))
    }

    /// Makes `cancel()` and `cancelled()` from other threads wait while the callback runs, like `_ThreadSafeHandle` of
    /// 3.14. Does nothing in earlier versions.
    pub(crate) fn set_threadsafe(self) {
        if names(self.py()).threadsafe_handle_type.is_some() {
            self.raise_flag(flag::THREADSAFE);
        }
    }
}

impl HandleObject {
    #[inline]
    pub(crate) fn is_cancelled(&self) -> bool {
        self.has(flag::CANCELLED)
    }

    pub(crate) fn set_scheduled(&self, is_scheduled: bool) {
        if is_scheduled {
            self.raise_flag(flag::SCHEDULED);
        } else {
            self.lower_flag(flag::SCHEDULED);
        }
    }

    /// True while the handle is in the timer heap.
    pub(crate) fn is_scheduled(&self) -> bool {
        self.has(flag::SCHEDULED)
    }

    /// Lets the loop run the timer a little late, if its delay is so long that this does not matter.
    #[inline]
    pub(crate) fn allow_slack(&self, delay_s: f64) {
        if delay_s >= MIN_SLACK_DELAY_S {
            self.raise_flag(flag::HAS_SLACK);
        }
    }

    /// Whether the loop may run the timer a little late. A cancelled timer has slack too, because it does not run.
    #[inline]
    pub(crate) fn has_slack(&self) -> bool {
        self.has(flag::HAS_SLACK) || self.has(flag::CANCELLED)
    }

    /// Makes `when()` return an int, for a deadline that was given as an int.
    pub(crate) fn set_when_int(&self) {
        self.raise_flag(flag::WHEN_IS_INT);
    }

    #[inline]
    fn has(&self, flag: u16) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    #[inline]
    fn raise_flag(&self, flag: u16) {
        if HAS_GIL {
            // No atomic read-modify-write is needed, because only threads that hold the GIL change flags.
            self.flags
                .store(self.flags.load(Ordering::Relaxed) | flag, Ordering::Relaxed);
        } else {
            self.flags.fetch_or(flag, Ordering::AcqRel);
        }
    }

    #[inline]
    fn lower_flag(&self, flag: u16) {
        if HAS_GIL {
            self.flags
                .store(self.flags.load(Ordering::Relaxed) & !flag, Ordering::Relaxed);
        } else {
            self.flags.fetch_and(!flag, Ordering::AcqRel);
        }
    }

    /// The deadline of a timer in seconds of the loop's clock.
    #[inline]
    pub(crate) fn when_s(&self) -> f64 {
        f64::from_bits(self.when_or_runner.load(Ordering::Relaxed))
    }

    /// Whether the handle still refers to its loop, and the loop is in debug mode.
    #[inline]
    fn is_debug(&self) -> bool {
        let event_loop = self.event_loop.as_ptr().cast::<LoopObject>();
        // SAFETY: the cell holds the loop that the handle was made for, or nothing.
        !event_loop.is_null() && unsafe { (*event_loop).reactor().probe.is_debug() }
    }

    /// Gives the handle a context of its own, which the program may get.
    fn own_context(&self, py: Python<'_>) -> PyResult<()> {
        if self.has(flag::SHARES_CONTEXT)
            && let Some(template) = self.context.get(py)
        {
            let own = contexts::copy(&template)?;
            self.lower_flag(flag::SHARES_CONTEXT);
            self.context.set(own);
        }
        Ok(())
    }

    #[inline(always)]
    fn drop_args(&self) {
        // SAFETY: as in `drop_call`.
        unsafe {
            let args_len = self.args_len.replace(0) as usize;
            for cell in &self.args[..args_len] {
                ffi::Py_XDECREF(cell.take_ptr());
            }
            ffi::Py_XDECREF(self.more_args.take_ptr());
        }
    }

    fn drop_call(&self) {
        // SAFETY: all callers are attached. Each reference is taken out of its cell before it is dropped.
        unsafe {
            ffi::Py_XDECREF(self.callback.take_ptr());
            self.drop_args();
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
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION | ffi::Py_TPFLAGS_BASETYPE;
    const DEALLOC: ffi::destructor = dealloc;

    /// True for a handle that has run or was cancelled, unless it still holds a source traceback, extra attributes or a
    /// text for `repr`.
    #[inline]
    fn is_empty(&self) -> bool {
        !self.callback.is_set() && !self.source_traceback.is_set() && !self.event_loop.is_set()
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.callback,
            &self.context,
            &self.more_args,
            &self.source_traceback,
        ]
        .into_iter()
        .chain(&self.args)
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }

    fn clear(this: This<'_, Self>) {
        this.drop_call();
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached, once, with an unreferenced handle. After the cells are emptied, nothing
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
