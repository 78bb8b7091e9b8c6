//! `grapeshot.threads.Queue` and `Channel`: bounded queues between tasks of any loop, coros and real threads.
//!
//! ```text
//!   items       [ oldest ... ]     at least as many as are promised, unless the queue is closed
//!   promised    the number of getters that were woken for an item and have not run yet
//!   reserved    the number of putters that were woken for a place and have not run yet
//!   getters, putters, joiners      those that wait
//! ```
//!
//! A getter that runs takes the oldest item. A promised item takes no place any more: its place is free for the next
//! putter. A waiter that is interrupted after it was woken gives its item or place back, for the next one.
//!
//! When the queue is closed, all waiters are woken as if they had got what they wait for, and find that it is closed.
//!
//! Each method runs in a critical section (`in_section`), and wakes waiters after that section. Otherwise a waiter that
//! another core runs at once would find the queue locked, and would go to sleep again.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::limit;
use super::waiters::{Claimed, Party, Source, Waiters, take_or_wait};
use crate::binding::args::Args;
use crate::binding::deallocation::{drop_contents, free_memory};
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::native_type::{
    NativeType, This, alloc_without_arguments, new_type, slot, with_critical_section,
};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{
    class_getitem, getset_slot, getter, members_slot, methods_slot, offset_member, row,
};
use crate::coro::runtime;
use crate::coro::sync::item_queue::ItemQueue;
use crate::coro::sync::limit::Limit;

/// The initial state is all zeroes, except for the items and the waiters.
#[repr(C)]
struct SharedQueue<const CHANNEL: bool> {
    base: ffi::PyObject,
    weakrefs: Cell<*mut ffi::PyObject>,
    items: ItemQueue,
    promised: Cell<usize>,
    reserved: Cell<usize>,
    /// How many items fit; 0 if there is no limit.
    capacity: Cell<usize>,
    /// How many items `task_done()` has not been called for.
    unfinished: Cell<usize>,
    is_closed: Cell<bool>,
    getters: Waiters,
    putters: Waiters,
    joiners: Waiters,
}

type Shared<'py, const C: bool> = This<'py, SharedQueue<C>>;

impl<const C: bool> NativeType for SharedQueue<C> {
    const NAME: &'static CStr = if C {
        c"grapeshot._core.shared_channel"
    } else {
        c"grapeshot._core.shared_queue"
    };
    const DOC: &'static CStr = if C {
        c"shared_channel()\n--\n\nThe native part of grapeshot.threads.Channel."
    } else {
        c"shared_queue()\n--\n\nThe native part of grapeshot.threads.Queue."
    };
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;
    const DEALLOC: ffi::destructor = dealloc::<C>;

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        for waiters in [&self.getters, &self.putters, &self.joiners] {
            // SAFETY: `visit` and `arg` are passed on from the collector.
            let result = unsafe { waiters.tasks.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        // SAFETY: as above.
        unsafe { self.items.traverse(visit, arg) }
    }

    fn clear(this: This<'_, Self>) {
        for waiters in [&this.getters, &this.putters, &this.joiners] {
            waiters.tasks.forget();
        }
        this.items.clear(this.py());
    }

    /// The methods enter the section themselves.
    fn with_access<T>(_: This<'_, Self>, body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        body()
    }
}

fn increase(count: &Cell<usize>) {
    count.set(count.get() + 1);
}

fn decrease(count: &Cell<usize>) {
    count.set(count.get().saturating_sub(1));
}

// ---- what one waits for -------------------------------------------------------------------------------------------

/// An item to get.
struct Item<'a, const C: bool>(&'a SharedQueue<C>);

impl<const C: bool> Source for Item<'_, C> {
    fn waiters(&self) -> &Waiters {
        &self.0.getters
    }

    #[inline]
    fn take(&self, _: Python<'_>) -> bool {
        let is_there = self.0.available() > 0 || self.0.is_closed.get();
        if is_there {
            increase(&self.0.promised);
        }
        is_there
    }

    fn give_back(&self, _: Python<'_>) {
        decrease(&self.0.promised);
    }

    fn holder(&self) -> Party {
        Party::NOBODY
    }

    fn what(&self) -> &'static str {
        "the queue is empty"
    }
}

/// A place for an item to put.
struct Place<'a, const C: bool>(&'a SharedQueue<C>);

impl<const C: bool> Source for Place<'_, C> {
    fn waiters(&self) -> &Waiters {
        &self.0.putters
    }

    #[inline]
    fn take(&self, _: Python<'_>) -> bool {
        let is_there = self.0.has_place() || self.0.is_closed.get();
        if is_there {
            increase(&self.0.reserved);
        }
        is_there
    }

    fn give_back(&self, _: Python<'_>) {
        decrease(&self.0.reserved);
    }

    fn holder(&self) -> Party {
        Party::NOBODY
    }

    fn what(&self) -> &'static str {
        "the queue is full"
    }
}

/// The end of all work, for `join()`. There is nothing to take.
struct Finish<'a, const C: bool>(&'a SharedQueue<C>);

impl<const C: bool> Source for Finish<'_, C> {
    fn waiters(&self) -> &Waiters {
        &self.0.joiners
    }

    fn take(&self, _: Python<'_>) -> bool {
        self.0.unfinished.get() == 0
    }

    fn give_back(&self, _: Python<'_>) {}

    fn holder(&self) -> Party {
        Party::NOBODY
    }

    fn what(&self) -> &'static str {
        "there are unfinished items"
    }
}

impl<const C: bool> SharedQueue<C> {
    /// The number of items that are not promised.
    #[inline]
    fn available(&self) -> usize {
        self.items.len().saturating_sub(self.promised.get())
    }

    #[inline]
    fn has_place(&self) -> bool {
        self.capacity.get() == 0 || self.available() + self.reserved.get() < self.capacity.get()
    }

    /// Claims a waiter whose item, place or end is there. The count, if any, is to be decreased again if the waiter
    /// cannot be woken.
    #[inline]
    fn claim<'py>(&self, py: Python<'py>) -> Option<(Claimed<'py>, Option<&Cell<usize>>)> {
        let is_closed = self.is_closed.get();
        loop {
            let (waiters, count) = if self.getters.len() > 0 && (is_closed || self.available() > 0) {
                (&self.getters, Some(&self.promised))
            } else if self.putters.len() > 0 && (is_closed || self.has_place()) {
                (&self.putters, Some(&self.reserved))
            } else if self.joiners.len() > 0 && self.unfinished.get() == 0 {
                (&self.joiners, None)
            } else {
                return None;
            };
            if let Some(claimed) = waiters.claim_first(py) {
                if let Some(count) = count {
                    increase(count);
                }
                return Some((claimed, count));
            }
        }
    }

    /// Puts an item into the place that is reserved for it.
    #[inline]
    fn push(&self, item: Bound<'_, PyAny>) -> PyResult<()> {
        let py = item.py();
        decrease(&self.reserved);
        if self.is_closed.get() {
            return Err(closed::<C>(py));
        }
        self.items.push(item, false);
        increase(&self.unfinished);
        Ok(())
    }

    /// Takes the item that is promised to the caller.
    #[inline]
    fn pop<'py>(&self, py: Python<'py>) -> ObjectResult<'py> {
        decrease(&self.promised);
        match self.items.pop(py) {
            Some((item, _)) => Ok(item),
            None if self.is_closed.get() => Err(closed::<C>(py)),
            // The collector has emptied the queue.
            None => Err(not_in_time::<C>(py, c"Empty")),
        }
    }
}

/// Runs `body` while no other thread uses the queue. Afterwards it wakes those that can go on.
#[inline]
fn in_section<const C: bool, R>(this: Shared<'_, C>, body: impl FnOnce() -> R) -> R {
    let py = this.py();
    let (result, mut claimed) = with_critical_section(this, || {
        let result = body();
        (result, this.claim(py))
    });
    while let Some((waiter, count)) = claimed {
        let is_woken = waiter.wake(py).is_some();
        claimed = with_critical_section(this, || {
            if let Some(count) = count.filter(|_| !is_woken) {
                decrease(count);
            }
            this.claim(py)
        });
    }
    result
}

// ---- errors -------------------------------------------------------------------------------------------------------

#[cold]
fn closed<const C: bool>(py: Python<'_>) -> PyErr {
    let name = if C { "ClosedError" } else { "ShutDown" };
    let made = py
        .import("grapeshot.threads")
        .and_then(|module| module.getattr(name))
        .and_then(|class| {
            if C {
                class.call1(("the channel is closed",))
            } else {
                class.call0()
            }
        });
    made.map_or_else(|error| error, PyErr::from_value)
}

/// The error of a call that had to wait longer than it may. `name`: the class in the module `queue`.
#[cold]
fn not_in_time<const C: bool>(py: Python<'_>, name: &CStr) -> PyErr {
    if C {
        let what = if name == c"Empty" {
            "no item was sent in time"
        } else {
            "no place became free in time"
        };
        return PyTimeoutError::new_err(what);
    }
    let made = py
        .import("queue")
        .and_then(|module| module.getattr(name))
        .and_then(|class| class.call0());
    made.map_or_else(|error| error, PyErr::from_value)
}

/// RuntimeError in a task or callback, which must not block the loop's thread.
#[cold]
fn refuse_in_task<const C: bool>(py: Python<'_>, method: &str) -> PyResult<()> {
    if runtime::current_anywhere(py).is_some() || names(py).read_running_loop.bind(py).call0()?.is_none() {
        return Ok(());
    }
    let kind = if C { "Channel" } else { "Queue" };
    Err(PyRuntimeError::new_err(format!(
        "{kind}.{method}() would block the event loop; use await {kind}.a{method}() in a task"
    )))
}

// ---- methods that wait --------------------------------------------------------------------------------------------

#[inline]
fn take<const C: bool>(py: Python<'_>, source: &impl Source, limit: Limit, method: &str) -> PyResult<bool> {
    if source.take(py) {
        return Ok(true);
    }
    if !limit.is_at_once() {
        refuse_in_task::<C>(py, method)?;
    }
    take_or_wait(py, source, limit)
}

fn put_within<'py, const C: bool>(
    this: Shared<'py, C>,
    item: Option<Bound<'py, PyAny>>,
    limit: Limit,
) -> ObjectResult<'py> {
    let py = this.py();
    let method = if C { "send" } else { "put" };
    let item = item.ok_or_else(|| PyTypeError::new_err(format!("{method}() takes an item")))?;
    in_section(this, || {
        if !take::<C>(py, &Place(&this), limit, method)? {
            return Err(not_in_time::<C>(py, c"Full"));
        }
        this.push(item)?;
        Ok(none(py))
    })
}

fn get_within<const C: bool>(this: Shared<'_, C>, limit: Limit) -> ObjectResult<'_> {
    let py = this.py();
    let method = if C { "receive" } else { "get" };
    in_section(this, || {
        if take::<C>(py, &Item(&this), limit, method)? {
            this.pop(py)
        } else {
            Err(not_in_time::<C>(py, c"Empty"))
        }
    })
}

fn put<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let (Some(item), 1) = (args.get(0), args.values().len()) {
        return put_within(this, Some(item), Limit::Endless);
    }
    let [item, block, timeout] = args.bind()?;
    put_within(this, item, limit::of_get(block, timeout)?)
}

fn put_nowait<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [item] = args.bind()?;
    put_within(this, item, Limit::AtOnce)
}

fn get<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if args.values().is_empty() {
        return get_within(this, Limit::Endless);
    }
    let [block, timeout] = args.bind()?;
    get_within(this, limit::of_get(block, timeout)?)
}

fn get_nowait<'py, const C: bool>(this: Shared<'py, C>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    get_within(this, Limit::AtOnce)
}

fn join<'py>(this: Shared<'py, false>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    in_section(this, || {
        while this.unfinished.get() > 0 {
            take::<false>(py, &Finish(&this), Limit::Endless, "join")?;
        }
        Ok(none(py))
    })
}

// ---- the rest -----------------------------------------------------------------------------------------------------

fn task_done<'py>(this: Shared<'py, false>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    in_section(this, || {
        if this.unfinished.get() == 0 {
            return Err(PyValueError::new_err("task_done() called too many times"));
        }
        decrease(&this.unfinished);
        Ok(none(this.py()))
    })
}

fn shutdown<'py>(this: Shared<'py, false>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let [immediate] = args.bind()?;
    let is_immediate = immediate.map_or(Ok(false), |immediate| immediate.is_truthy())?;
    in_section(this, || {
        this.is_closed.set(true);
        if is_immediate {
            let unfinished = this.unfinished.get().saturating_sub(this.items.len());
            this.unfinished.set(unfinished);
            this.items.clear(py);
        }
        Ok(none(py))
    })
}

fn close<'py>(this: Shared<'py, true>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    in_section(this, || this.is_closed.set(true));
    Ok(none(this.py()))
}

fn qsize<'py, const C: bool>(this: Shared<'py, C>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let count = with_critical_section(this, || this.available());
    Ok(count.into_pyobject(this.py())?.into_any())
}

fn empty<'py>(this: Shared<'py, false>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let count = with_critical_section(this, || this.available());
    Ok(bool_object(this.py(), count == 0))
}

fn full<'py>(this: Shared<'py, false>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let is_full = with_critical_section(this, || {
        this.capacity.get() > 0 && this.available() >= this.capacity.get()
    });
    Ok(bool_object(this.py(), is_full))
}

fn capacity<const C: bool>(this: Shared<'_, C>) -> ObjectResult<'_> {
    let capacity = with_critical_section(this, || this.capacity.get());
    Ok(capacity.into_pyobject(this.py())?.into_any())
}

fn is_closed<const C: bool>(this: Shared<'_, C>) -> ObjectResult<'_> {
    let is_closed = with_critical_section(this, || this.is_closed.get());
    Ok(bool_object(this.py(), is_closed))
}

fn unfinished(this: Shared<'_, false>) -> ObjectResult<'_> {
    let count = with_critical_section(this, || this.unfinished.get());
    Ok(count.into_pyobject(this.py())?.into_any())
}

/// `_limit(capacity)`: sets the capacity; 0 means no limit.
fn set_capacity<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [capacity] = args.bind()?;
    if let Some(capacity) = capacity {
        let capacity = capacity.extract()?;
        in_section(this, || this.capacity.set(capacity));
    }
    Ok(none(this.py()))
}

// ---- for tasks ----------------------------------------------------------------------------------------------------

/// `_try_get(absent)`: the oldest item, or `absent` if there is none.
fn try_get<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    in_section(this, || {
        if Item(&this).take(py) {
            return this.pop(py);
        }
        Ok(args.get(0).unwrap_or_else(|| none(py)))
    })
}

/// `_try_put(item)`: whether there was a place for the item.
fn try_put<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    in_section(this, || {
        let is_there = Place(&this).take(py);
        if is_there {
            this.push(args.get(0).unwrap_or_else(|| none(py)))?;
        }
        Ok(bool_object(py, is_there))
    })
}

/// The queue of waiters with this number: 0 getters, 1 putters, 2 joiners.
fn waiters_of<'a, const C: bool>(
    this: &'a Shared<'_, C>,
    args: &Args<'_, '_>,
) -> PyResult<(u8, &'a Waiters)> {
    let side: u8 = args.get(0).map_or(Ok(0), |side| side.extract())?;
    Ok((
        side,
        match side {
            0 => &this.getters,
            1 => &this.putters,
            _ => &this.joiners,
        },
    ))
}

/// `_enter(side, loop)`: lets the running task of the loop wait. Returns the future that it has to await, or None if it
/// need not wait: it has then got what it waits for.
fn enter<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let (side, waiters) = waiters_of(&this, &args)?;
    let Some(event_loop) = args.get(1) else {
        return Ok(none(py));
    };
    let future = super::task_waiters::future_of(&event_loop)?;
    in_section(this, || {
        // An item or a place may have come since the caller has looked.
        let is_there = match side {
            0 => Item(&this).take(py),
            1 => Place(&this).take(py),
            _ => Finish(&this).take(py),
        };
        if is_there {
            return Ok(none(py));
        }
        waiters.tasks.add(waiters.ticket(), event_loop, &future);
        Ok(future)
    })
}

/// `_leave(side, future)`: ends the wait of a task that was interrupted.
fn leave<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let (side, waiters) = waiters_of(&this, &args)?;
    let Some(future) = args.get(1) else {
        return Ok(none(py));
    };
    in_section(this, || {
        if !waiters.tasks.remove(&future) {
            match side {
                0 => Item(&this).give_back(py),
                1 => Place(&this).give_back(py),
                _ => {}
            }
        }
    });
    Ok(none(py))
}

/// `_get_promised()`: the item that a task was woken for.
fn get_promised<'py, const C: bool>(this: Shared<'py, C>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    in_section(this, || this.pop(this.py()))
}

/// `_put_reserved(item)`: puts an item into the place that a task was woken for.
fn put_reserved<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    in_section(this, || this.push(args.get(0).unwrap_or_else(|| none(py))))?;
    Ok(none(py))
}

/// `_is_finished()`: whether there are no unfinished items.
fn is_finished<'py>(this: Shared<'py, false>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let count = with_critical_section(this, || this.unfinished.get());
    Ok(bool_object(this.py(), count == 0))
}

// ---- the types ----------------------------------------------------------------------------------------------------

/// The methods of both types that only `grapeshot.threads` calls.
fn methods<const C: bool>() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            <const C: bool> set_capacity::<C>,
            shared_queue._limit,
            "Set the capacity."
        ),
        row!(
            method,
            <const C: bool> try_get::<C>,
            shared_queue._try_get,
            "Return the oldest item, or the argument if there is no item."
        ),
        row!(
            method,
            <const C: bool> try_put::<C>,
            shared_queue._try_put,
            "Put an item, if there is a place. Return whether there was one."
        ),
        row!(
            method,
            <const C: bool> enter::<C>,
            shared_queue._enter,
            "Let the running task wait. Return the future to await, or None if it need not wait."
        ),
        row!(
            method,
            <const C: bool> leave::<C>,
            shared_queue._leave,
            "End the wait of a task that was interrupted."
        ),
        row!(
            method,
            <const C: bool> get_promised::<C>,
            shared_queue._get_promised,
            "Return the item that the task was woken for."
        ),
        row!(
            method,
            <const C: bool> put_reserved::<C>,
            shared_queue._put_reserved,
            "Put an item into the place that the task was woken for."
        ),
        class_getitem(),
    ]
}

pub(super) fn make_queue_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    let mut methods = methods::<false>();
    methods.extend([
        row!(
            method,
            put::<false>,
            shared_queue.put,
            "\
                Put an item into the queue. If the queue is full, wait until there is a place.\n\n\
                A coro waits while other coros run; a real thread blocks. Raises queue.Full if block is false or the\n\
                timeout expires, and ShutDown if the queue was shut down."
        ),
        row!(
            method,
            put_nowait::<false>,
            shared_queue.put_nowait,
            "Put an item into the queue. Raises queue.Full if there is no place."
        ),
        row!(
            method,
            get::<false>,
            shared_queue.get,
            "\
                Remove and return the oldest item. If the queue is empty, wait for an item.\n\n\
                A coro waits while other coros run; a real thread blocks. Raises queue.Empty if block is false or the\n\
                timeout expires, and ShutDown if the queue was shut down and has no items left."
        ),
        row!(
            method,
            get_nowait::<false>,
            shared_queue.get_nowait,
            "Remove and return the oldest item. Raises queue.Empty if there is none."
        ),
        row!(
            method,
            join,
            shared_queue.join,
            "Wait until task_done() was called for each item that was put."
        ),
        row!(
            method,
            task_done,
            shared_queue.task_done,
            "Say that the work on an item is done. Raises ValueError if it was said for all items."
        ),
        row!(
            method,
            shutdown,
            shared_queue.shutdown,
            "\
                Shut the queue down: put() raises ShutDown from now on, and get() when no items are left.\n\n\
                If immediate is true, the items that are left are dropped."
        ),
        row!(
            method,
            qsize::<false>,
            shared_queue.qsize,
            "Return the number of items."
        ),
        row!(
            method,
            empty,
            shared_queue.empty,
            "Return whether there are no items."
        ),
        row!(method, full, shared_queue.full, "Return whether there is no place."),
        row!(
            method,
            is_finished,
            shared_queue._is_finished,
            "Return whether join() need not wait."
        ),
    ]);
    let attributes = vec![
        getter(
            c"_capacity",
            capacity::<false>,
            c"How many items fit; 0 if there is no limit.",
        ),
        getter(
            c"unfinished_tasks",
            unfinished,
            c"How many items task_done() has not been called for.",
        ),
        getter(
            c"is_shutdown",
            is_closed::<false>,
            c"Whether shutdown() was called.",
        ),
    ];
    make::<false>(module, methods, attributes)
}

pub(super) fn make_channel_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    let mut methods = methods::<true>();
    methods.extend([
        row!(
            method,
            put::<true>,
            shared_channel.send,
            "\
                Send an item. If the channel is full, wait until there is a place.\n\n\
                A coro waits while other coros run; a real thread blocks. Raises TimeoutError if block is false or the\n\
                timeout expires, and ClosedError if the channel is closed."
        ),
        row!(
            method,
            put_nowait::<true>,
            shared_channel.send_nowait,
            "Send an item. Raises TimeoutError if the channel is full."
        ),
        row!(
            method,
            get::<true>,
            shared_channel.receive,
            "\
                Remove and return the oldest item. If the channel is empty, wait for an item.\n\n\
                A coro waits while other coros run; a real thread blocks. Raises TimeoutError if block is false or the\n\
                timeout expires, and ClosedError if the channel is closed and empty."
        ),
        row!(
            method,
            get_nowait::<true>,
            shared_channel.receive_nowait,
            "Remove and return the oldest item. Raises TimeoutError if there is none."
        ),
        row!(
            method,
            close,
            shared_channel.close,
            "Close the channel: send() raises ClosedError from now on, and receive() when no items are left."
        ),
        row!(
            method,
            qsize::<true>,
            shared_channel.qsize,
            "Return the number of items."
        ),
    ]);
    let attributes = vec![
        getter(
            c"capacity",
            capacity::<true>,
            c"How many items fit; 0 if there is no limit.",
        ),
        getter(c"is_closed", is_closed::<true>, c"Whether close() was called."),
    ];
    make::<true>(module, methods, attributes)
}

fn make<'py, const C: bool>(
    module: &Bound<'py, PyModule>,
    methods: Vec<ffi::PyMethodDef>,
    attributes: Vec<ffi::PyGetSetDef>,
) -> PyResult<Bound<'py, PyType>> {
    let slots = [
        slot(ffi::Py_tp_new, new::<C> as *mut c_void),
        methods_slot(methods),
        getset_slot(attributes),
        members_slot(vec![offset_member(
            c"__weaklistoffset__",
            std::mem::offset_of!(SharedQueue<C>, weakrefs),
        )]),
    ];
    // SAFETY: the functions are for this layout; the tables are leaked.
    unsafe { new_type::<SharedQueue<C>>(module, None, &slots) }
}

/// # Safety
/// Called by CPython with the type or a subclass of it, a tuple, and a dict or null.
unsafe extern "C" fn new<const C: bool>(
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
            let body = object.as_ptr().cast::<SharedQueue<C>>();
            (&raw mut (*body).items).write(ItemQueue::new());
            Waiters::init(&raw mut (*body).getters);
            Waiters::init(&raw mut (*body).putters);
            Waiters::init(&raw mut (*body).joiners);
            Ok(object.into_ptr())
        })
    }
}

/// # Safety
/// Called by CPython with an unreferenced queue. It has no waiters: the frame of a coro or thread that waits, and the
/// coroutine of a task that waits, would keep it alive.
unsafe extern "C" fn dealloc<const C: bool>(slf: *mut ffi::PyObject) {
    // SAFETY: attached; nothing else refers to the object. Its fields are dropped, then the memory is freed.
    unsafe {
        ffi::PyObject_GC_UnTrack(slf.cast());
        if !(*slf.cast::<SharedQueue<C>>()).weakrefs.get().is_null() {
            ffi::PyObject_ClearWeakRefs(slf);
        }
        drop_contents::<SharedQueue<C>>(slf);
        free_memory(slf);
    }
}
