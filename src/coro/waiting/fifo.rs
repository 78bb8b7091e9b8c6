//! `fifo`: a queue without a limit.
//!
//! ```text
//!   items          [ oldest ... ]     promised: as many as there are coros which are woken for one and have not run yet
//!   line           coros, only while there is no item that is not promised
//! ```

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyType};

use super::object::{
    FLAGS, Head, Object, Primitive, check_thread, dealloc, grant, make_type as make, wait_in_line, waiting,
};
use super::parcels::Parcels;
use crate::coro::line::Line;
use crate::coro::suspension;
use crate::event_loop::native_type::{Args, NativeType, This, method, none, one_at_a_time, slot};

#[repr(C)]
pub(super) struct FifoObject {
    head: Head,
    items: Parcels,
    promised: Cell<usize>,
    line: Line,
}

type Fifo<'py> = This<'py, FifoObject>;

impl NativeType for FifoObject {
    const NAME: &'static CStr = c"grapeshot.coro.fifo";
    const DOC: &'static CStr =
        c"fifo()\n--\n\nA queue without a limit: `push` never waits, `pop` waits for an item.";
    const FLAGS: u64 = FLAGS;
    const DEALLOC: ffi::destructor = dealloc::<Self>;

    unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's. Coros that wait are the runtime's.
        unsafe { self.items.traverse(visit, arg) }
    }

    fn clear(this: This<'_, Self>) {
        this.items.clear(this.py());
    }

    fn exclusively<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        one_at_a_time(this, body)
    }
}

// SAFETY: repr(C), and the first field is the head.
unsafe impl Primitive for FifoObject {
    fn head(&self) -> &Head {
        &self.head
    }

    unsafe fn init(object: *mut Self) {
        // SAFETY: the caller's; the memory is not initialised as this type yet.
        unsafe { ptr::write(&raw mut (*object).items, Parcels::new()) };
    }

    fn state(this: This<'_, Self>) -> String {
        format!("{} items{}", this.free(), waiting(this.line.len()))
    }
}

impl FifoObject {
    /// Items that are not promised.
    #[inline]
    fn free(&self) -> usize {
        self.items.len().saturating_sub(self.promised.get())
    }

    /// Promises an item to the coro that has waited longest, if there is one for it.
    #[inline]
    fn promise(this: Fifo<'_>) {
        if this.free() > 0
            && let Some(first) = this.line.first(this.py())
        {
            this.promised.set(this.promised.get() + 1);
            grant(first, None);
        }
    }

    /// The oldest item.
    #[inline]
    fn take(this: Fifo<'_>) -> Option<Bound<'_, PyAny>> {
        if this.free() == 0 {
            return None;
        }
        this.items.pop(this.py()).map(|(item, _)| item)
    }
}

fn push<'py>(this: Fifo<'py>, args: Args<'_, 'py>) -> Object<'py> {
    let Some(item) = args.get(0).filter(|_| args.values().len() == 1) else {
        return Err(PyTypeError::new_err("push() takes one item"));
    };
    check_thread(this)?;
    this.items.push(item, false);
    FifoObject::promise(this);
    Ok(none(this.py()))
}

/// The oldest item, waiting for one.
#[inline]
fn wait_for_item(this: Fifo<'_>) -> PyResult<Bound<'_, PyAny>> {
    check_thread(this)?;
    loop {
        if let Some(item) = FifoObject::take(this) {
            return Ok(item);
        }
        let wait = wait_in_line(&this.line, suspension::suspendable(this.py())?, 1);
        if wait.is_granted {
            this.promised.set(this.promised.get().saturating_sub(1));
        }
        if let Err(interruption) = wait.result {
            FifoObject::promise(this);
            return Err(interruption);
        }
    }
}

fn pop<'py>(this: Fifo<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("pop", 0)?;
    wait_for_item(this)
}

fn pop_all<'py>(this: Fifo<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("pop_all", 0)?;
    let mut items = vec![wait_for_item(this)?];
    while let Some(item) = FifoObject::take(this) {
        items.push(item);
    }
    Ok(PyList::new(this.py(), items)?.into_any())
}

/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn len(slf: *mut ffi::PyObject) -> ffi::Py_ssize_t {
    // SAFETY: attached, and the object is alive.
    unsafe { Fifo::new(Python::assume_attached(), slf).free() as ffi::Py_ssize_t }
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    type T = FifoObject;
    make::<T>(
        module,
        vec![
            method!(
                T,
                c"push",
                push,
                c"Put an item at the end; wake the coro that has waited longest for one."
            ),
            method!(T, c"pop", pop, c"Return the oldest item, waiting for one."),
            method!(
                T,
                c"pop_all",
                pop_all,
                c"Return a list of all items, waiting for one."
            ),
        ],
        Vec::new(),
        &[slot(ffi::Py_sq_length, len as *mut c_void)],
    )
}
