//! `_queue.SimpleQueue` for coros and real threads. `put` never waits, so finalizers and signal handlers may call it at
//! any point.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::limit;
use super::waiters::{Grants, Source, Waiters, take_or_wait};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::errors;
use crate::binding::native_type::{
    NativeType, This, alloc_without_arguments, new_type, slot, with_critical_section,
};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{class_getitem, members_slot, methods_slot, offset_member, row};
use crate::coro::sync::item_queue::ItemQueue;
use crate::coro::sync::limit::Limit;

#[repr(C)]
struct QueueObject {
    base: ffi::PyObject,
    weakrefs: Cell<*mut ffi::PyObject>,
    items: ItemQueue,
    /// The number of items that are promised to waiters that were woken and have not run yet. Each of these waiters
    /// takes the oldest item when it runs.
    promised: Grants,
    waiters: Waiters,
}

type Queue<'py> = This<'py, QueueObject>;

impl NativeType for QueueObject {
    const NAME: &'static CStr = c"grapeshot._core.thread_queue";
    const DOC: &'static CStr = c"thread_queue()\n--\n\nAn unbounded FIFO queue for coros and real threads.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: `visit` and `arg` are passed on from the collector.
        unsafe { self.items.traverse(visit, arg) }
    }

    fn clear(this: This<'_, Self>) {
        this.items.clear(this.py());
    }

    fn with_access<T>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        with_critical_section(this, body)
    }
}

impl Source for QueueObject {
    fn waiters(&self) -> &Waiters {
        &self.waiters
    }

    #[inline]
    fn take(&self, _: Python<'_>) -> bool {
        let is_there = self.items.len() > self.promised.get();
        if is_there {
            self.promised.add();
        }
        is_there
    }

    fn give_back(&self, py: Python<'_>) {
        self.promised.remove();
        self.promise(py);
    }

    fn what(&self) -> &'static str {
        "the queue is empty"
    }
}

impl QueueObject {
    /// Wakes the first waiter if there is an item that is not promised yet.
    fn promise(&self, py: Python<'_>) {
        if self.items.len() > self.promised.get() && self.waiters.grant_first(py).is_some() {
            self.promised.add();
        }
    }
}

fn push<'py>(this: Queue<'py>, item: Option<Bound<'py, PyAny>>) -> ObjectResult<'py> {
    let item = item.ok_or_else(|| PyTypeError::new_err("put() needs an item"))?;
    this.items.push(item, false);
    this.promise(this.py());
    Ok(none(this.py()))
}

fn put<'py>(this: Queue<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    // `block` and `timeout` exist only for compatibility with queue.Queue.
    let [item, _, _] = args.bind()?;
    push(this, item)
}

fn put_nowait<'py>(this: Queue<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [item] = args.bind()?;
    push(this, item)
}

fn pop(this: Queue<'_>, limit: Limit) -> ObjectResult<'_> {
    let py = this.py();
    if take_or_wait(py, &*this, limit)? {
        this.promised.remove();
        // There is an item, unless the collector's `clear` has emptied the queue.
        if let Some((item, _)) = this.items.pop(py) {
            return Ok(item);
        }
    }
    Err(PyErr::from_value(py.import("_queue")?.getattr("Empty")?.call0()?))
}

fn get<'py>(this: Queue<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [block, timeout] = args.bind()?;
    pop(this, limit::of_get(block, timeout)?)
}

fn get_nowait<'py>(this: Queue<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    pop(this, Limit::AtOnce)
}

fn available(this: Queue<'_>) -> usize {
    this.items.len().saturating_sub(this.promised.get())
}

fn qsize<'py>(this: Queue<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(available(this).into_pyobject(this.py())?.into_any())
}

fn empty<'py>(this: Queue<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), available(this) == 0))
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    let methods = vec![
        row!(
            method,
            put,
            thread_queue.put,
            "Put the item into the queue. Never waits; block and timeout are ignored."
        ),
        row!(
            method,
            put_nowait,
            thread_queue.put_nowait,
            "Put the item into the queue."
        ),
        row!(
            method,
            get,
            thread_queue.get,
            "\
                Remove and return the oldest item. If the queue is empty, wait for an item.\n\n\
                A coro waits while other coros run; a real thread blocks. Raises queue.Empty if block is false and\n\
                there is no item, or if the timeout expires."
        ),
        row!(
            method,
            get_nowait,
            thread_queue.get_nowait,
            "Remove and return the oldest item. Raises queue.Empty if the queue is empty."
        ),
        row!(method, qsize, thread_queue.qsize, "Return the number of items."),
        row!(
            method,
            empty,
            thread_queue.empty,
            "Return whether the queue is empty."
        ),
        class_getitem(),
    ];
    let slots = [
        slot(ffi::Py_tp_new, new as *mut c_void),
        methods_slot(methods),
        members_slot(vec![offset_member(
            c"__weaklistoffset__",
            std::mem::offset_of!(QueueObject, weakrefs),
        )]),
    ];
    // SAFETY: the functions are for this layout; the tables are leaked.
    unsafe { new_type::<QueueObject>(module, None, &slots) }
}

/// # Safety
/// Called by CPython with the type or a subclass of it, a tuple, and a dict or null.
unsafe extern "C" fn new(
    kind: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and the arguments are as described above; the allocation is zeroed and large enough for the
    // layout.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let object = alloc_without_arguments(py, kind, args, kwargs)?;
            let body = object.as_ptr().cast::<QueueObject>();
            (&raw mut (*body).items).write(ItemQueue::new());
            Waiters::init(&raw mut (*body).waiters);
            Ok(object.into_ptr())
        })
    }
}
