//! `fifo`: a queue, optionally with a maximum length.
//!
//! ```text
//!   pushers        coros with an item each; they wait only while there are `max_len` items
//!   items          [ oldest ... ]     promised: one item for each waiter that was woken and has not run yet
//!   waiters        coros; they wait only while all items are promised
//! ```
//!
//! Taking an item from a full fifo makes space, and the item of the longest-waiting pusher enters the queue before that
//! pusher runs. If the pusher is interrupted after that, `push` returns, and the interruption is raised at the pusher's
//! next wait. So if `push` raises, the item is certainly not in the queue.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyType};

use super::item_queue::ItemQueue;
use super::limit::{Deadline, Limit};
use super::object::{
    Call, FLAGS, Head, Primitive, argument, call_in_steps, check_thread, end, grant, make_type as make,
    offer_in_queue, type_name, waiting,
};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, slot, with_critical_section};
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{class_getitem, getter, row};
use crate::coro::coroutine::Outcome;
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::wait_queue::WaitQueue;
use crate::coro::{interruption, suspension};
use crate::event_loop::progress::Progress;

#[repr(C)]
pub(super) struct FifoObject {
    head: Head,
    items: ItemQueue,
    promised: Cell<usize>,
    waiters: WaitQueue,
    /// Each waiting pusher holds its item in `wake_value`.
    pushers: WaitQueue,
    /// 0 for no limit.
    max_len: Cell<usize>,
}

type Fifo<'py> = This<'py, FifoObject>;

impl NativeType for FifoObject {
    const NAME: &'static CStr = c"grapeshot.coro.fifo";
    const DOC: &'static CStr =
        c"fifo(maxsize=0)\n--\n\nA queue. `pop` waits for an item. If there is a limit, `push` waits for space.";
    const FLAGS: u64 = FLAGS;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's. The other queues own no references: the runtime keeps waiting
        // coros alive.
        unsafe { self.items.traverse(visit, arg) }
    }

    fn clear(this: This<'_, Self>) {
        this.items.clear(this.py());
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

// SAFETY: repr(C), and the first field is the head.
unsafe impl Primitive for FifoObject {
    fn head(&self) -> &Head {
        &self.head
    }

    unsafe fn init(object: *mut Self) {
        // SAFETY: by the contract; the field is not initialised yet.
        unsafe { ptr::write(&raw mut (*object).items, ItemQueue::new()) };
    }

    fn state(this: This<'_, Self>) -> String {
        let limit = match this.max_len.get() {
            0 => String::new(),
            limit => format!(" of {limit}"),
        };
        let waiting = waiting(this.waiters.len() + this.pushers.len());
        format!("{}{limit} items{waiting}", this.free())
    }
}

impl FifoObject {
    /// The number of items that are not promised.
    #[inline]
    fn free(&self) -> usize {
        self.items.len().saturating_sub(self.promised.get())
    }

    /// Promises an item to the coro that has waited longest, if an item is free.
    #[inline]
    fn promise(this: Fifo<'_>) {
        if this.free() > 0
            && let Some(first) = this.waiters.first(this.py())
        {
            this.promised.set(this.promised.get() + 1);
            grant(first, None);
        }
    }

    /// Removes and returns the oldest item. Items of waiting pushers then enter the queue while there is space.
    #[inline]
    fn take(this: Fifo<'_>) -> Option<Bound<'_, PyAny>> {
        if this.free() == 0 {
            return None;
        }
        let (item, _) = this.items.pop(this.py())?;
        if !this.pushers.is_empty() {
            Self::admit_pushers(this);
        }
        Some(item)
    }

    #[inline]
    fn is_full(&self) -> bool {
        let limit = self.max_len.get();
        limit != 0 && self.items.len() >= limit
    }

    /// Moves items from waiting pushers into the queue while there is space.
    #[cold]
    fn admit_pushers(this: Fifo<'_>) {
        while !this.is_full()
            && let Some(first) = this.pushers.first(this.py())
        {
            let item = first.wake_value.take(this.py());
            grant(first, None);
            this.items.push(item.unwrap_or_else(|| none(this.py())), false);
            Self::promise(this);
        }
    }
}

fn push<'py>(this: Fifo<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (item, limit) = match args.get(0) {
        Some(item) if args.values().len() == 1 => (item, Limit::Endless),
        // `bind` never takes the item from a keyword argument, because the parameter is positional only.
        _ => match args.bind()? {
            [Some(item), block, timeout] => (item, Limit::new(block, timeout)?),
            _ => return Err(PyTypeError::new_err("push() takes an item")),
        },
    };
    check_thread(this)?;
    if this.is_full() {
        wait_for_space(this, item, limit)?;
    } else {
        this.items.push(item, false);
        FifoObject::promise(this);
    }
    Ok(none(this.py()))
}

/// Pushes to a full queue: waits for space.
#[cold]
fn wait_for_space<'py>(this: Fifo<'py>, item: Bound<'py, PyAny>, limit: Limit) -> PyResult<()> {
    let py = this.py();
    let full = || {
        let message = format!("the {} was full{}", type_name(this), limit.describe());
        coro_errors::new(py, ErrorClass::Full, &message)
    };
    if limit.is_at_once() {
        return Err(full());
    }
    let coro = suspension::suspendable(py)?;
    let deadline = Deadline::new(coro, limit)?;
    let mut item = item;
    while this.is_full() {
        let wait = offer_in_queue(&this.pushers, coro, 1, item, &deadline);
        match wait.result {
            Ok(_) if wait.is_granted => return Ok(()),
            Ok(_) if wait.is_late => return Err(full()),
            Ok(offer) => item = offer,
            Err(interruption) if wait.is_granted => return interruption::put_back(coro, interruption),
            Err(interruption) => {
                suspension::forget_wake_value(coro);
                return Err(interruption);
            }
        }
    }
    this.items.push(item, false);
    FifoObject::promise(this);
    Ok(())
}

/// One step of waiting for the oldest item. The result is None if the timeout expires first.
#[inline]
fn next_item(
    this: Fifo<'static>,
    args: Args<'_, 'static>,
    call: &mut Call,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Option<Bound<'static, PyAny>>>> {
    let coro = if let Some(outcome) = outcome {
        let coro = suspension::running(this.py())?;
        let wait = end(coro, outcome);
        if wait.is_granted {
            this.promised.set(this.promised.get().saturating_sub(1));
        }
        if let Err(interruption) = wait.result {
            FifoObject::promise(this);
            return Err(interruption);
        }
        if wait.is_late {
            return Ok(Progress::Done(None));
        }
        coro
    } else {
        call.limit = limit_of(args)?;
        check_thread(this)?;
        if let Some(item) = FifoObject::take(this) {
            return Ok(Progress::Done(Some(item)));
        }
        if call.limit.is_at_once() {
            return Ok(Progress::Done(None));
        }
        let coro = suspension::suspendable(this.py())?;
        call.deadline = Some(Deadline::new(coro, call.limit)?);
        coro
    };
    if let Some(item) = FifoObject::take(this) {
        return Ok(Progress::Done(Some(item)));
    }
    match call.wait_in(&this.waiters, coro, 1) {
        Ok(true) => Ok(Progress::MustWait(())),
        Ok(false) => Ok(Progress::Done(None)),
        Err(interruption) => {
            FifoObject::promise(this);
            Err(interruption)
        }
    }
}

#[inline]
fn limit_of(args: Args<'_, '_>) -> PyResult<Limit> {
    if args.values().is_empty() {
        return Ok(Limit::Endless);
    }
    let [block, timeout] = args.bind()?;
    Limit::new(block, timeout)
}

fn pop(
    this: Fifo<'static>,
    args: Args<'_, 'static>,
    call: &mut Call,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    match next_item(this, args, call, outcome)? {
        Progress::MustWait(()) => Ok(Progress::MustWait(())),
        Progress::Done(Some(item)) => Ok(Progress::Done(item)),
        Progress::Done(None) => Err(empty(this, call.limit)),
    }
}

#[cold]
fn empty(this: Fifo<'_>, limit: Limit) -> PyErr {
    let message = format!("the {} was empty{}", type_name(this), limit.describe());
    coro_errors::new(this.py(), ErrorClass::Empty, &message)
}

fn pop_all(
    this: Fifo<'static>,
    args: Args<'_, 'static>,
    call: &mut Call,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    let Progress::Done(first) = next_item(this, args, call, outcome)? else {
        return Ok(Progress::MustWait(()));
    };
    let mut items: Vec<_> = first.into_iter().collect();
    // When an item is taken, the item of a waiting pusher may enter the queue. This call takes at most `most` items, so
    // such new items stay for the next call.
    let most = match this.max_len.get() {
        0 => usize::MAX,
        limit => limit,
    };
    while (1..most).contains(&items.len())
        && let Some(item) = FifoObject::take(this)
    {
        items.push(item);
    }
    Ok(Progress::Done(PyList::new(this.py(), items)?.into_any()))
}

fn max_len(this: Fifo<'_>) -> ObjectResult<'_> {
    Ok(this.max_len.get().into_pyobject(this.py())?.into_any())
}

/// # Safety
/// Called by CPython with an object of this type, a tuple, and a dict or null.
unsafe extern "C" fn init(
    slf: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> c_int {
    // SAFETY: attached, and the arguments are as described above.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            let this: Fifo<'_> = This::new(py, slf);
            let limit = match argument(py, args, kwargs, "fifo", "maxsize")? {
                Some(limit) if !limit.is_none() => limit.extract::<isize>()?,
                _ => 0,
            };
            FifoObject::with_access(this, || {
                check_thread(this)?;
                this.max_len.set(limit.max(0).unsigned_abs());
                FifoObject::admit_pushers(this);
                Ok(0)
            })
        })
    }
}

/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn len(slf: *mut ffi::PyObject) -> ffi::Py_ssize_t {
    // SAFETY: attached, and the object is alive.
    let this = unsafe { Fifo::new(Python::assume_attached(), slf) };
    with_critical_section(this, || this.free() as ffi::Py_ssize_t)
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    make::<FifoObject>(
        module,
        vec![
            row!(
                method,
                push,
                fifo.push,
                "Append an item. If there is a limit, wait for space. Raises Full after timeout seconds."
            ),
            row!(
                method(call_in_steps),
                pop,
                fifo.pop,
                "Wait for an item, then remove and return the oldest one. Raises Empty after timeout seconds."
            ),
            row!(
                method(call_in_steps),
                pop_all,
                fifo.pop_all,
                "Wait for an item, then remove and return all items as a list. Return [] if timeout seconds pass first."
            ),
            class_getitem(),
        ],
        vec![getter(
            c"maxsize",
            max_len,
            c"The greatest number of items. 0 means any number.",
        )],
        &[
            slot(ffi::Py_tp_init, init as *mut c_void),
            slot(ffi::Py_sq_length, len as *mut c_void),
        ],
    )
}
