//! The methods and types of the shared queues: `grapeshot.threads.Queue` and `Channel` derive from these types.

use std::ffi::c_void;
use std::ptr;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::limit;
use super::shared_queue::{
    Finish, Item, Place, Shared, SharedQueue, in_section, not_in_time, refuse_in_task,
};
use super::waiters::{Source, Waiters, take_or_wait};
use crate::binding::args::Args;
use crate::binding::errors;
use crate::binding::native_type::{alloc_without_arguments, new_type, slot, with_critical_section};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{
    class_getitem, getset_slot, getter, members_slot, methods_slot, offset_member, row,
};
use crate::coro::sync::item_queue::ItemQueue;
use crate::coro::sync::limit::Limit;

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
        while take::<C>(py, &Item(&this), limit, method)? {
            if let Some(item) = this.pop(py)? {
                return Ok(item);
            }
        }
        Err(not_in_time::<C>(py, c"Empty"))
    })
}

fn put<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let (Some(item), 1) = (args.get(0), args.values().len()) {
        return put_within(this, Some(item), Limit::Endless);
    }
    let [item, block, timeout] = args.bind()?;
    put_within(this, item, limit::of_shared_queue(block, timeout)?)
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
    get_within(this, limit::of_shared_queue(block, timeout)?)
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
        this.unfinished.set(this.unfinished.get() - 1);
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
    let is_full = with_critical_section(this, || !this.has_place());
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

/// `_try_get(absent)`: removes and returns the oldest item, or returns `absent` if there is none. Like `_get_promised`,
/// it raises the error of a closed queue if the queue is closed and empty.
fn try_get<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    in_section(this, || {
        let item = if Item(&this).take(py) { this.pop(py)? } else { None };
        Ok(item.unwrap_or_else(|| args.get(0).unwrap_or_else(|| none(py))))
    })
}

/// `_try_put(item)`: puts the item, if there is a place. Returns whether there was one.
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

/// Reads the first argument, `side`: 0 stands for the getters, 1 for the putters, 2 for the joiners. Returns `side` and
/// the queue of these waiters.
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

/// `_enter(side, loop)`: lets the running task of the loop wait. Returns the future that the task has to await, or None
/// if the task has already got what it asked for.
fn enter<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let (side, waiters) = waiters_of(&this, &args)?;
    let Some(event_loop) = args.get(1) else {
        return Ok(none(py));
    };
    let future = super::task_waiters::future_of(&event_loop)?;
    in_section(this, || {
        // An item or a place may have come since the caller looked.
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
        if !waiters.leave(&future) {
            match side {
                0 => Item(&this).give_back(py),
                1 => Place(&this).give_back(py),
                _ => {}
            }
        }
    });
    Ok(none(py))
}

/// `_get_promised(absent)`: removes and returns the item that a task was woken for. Raises the error of a closed queue
/// if the queue is closed and empty. Returns `absent` if the queue is empty but not closed (see `SharedQueue::pop`).
fn get_promised<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let item = in_section(this, || this.pop(this.py()))?;
    Ok(item.unwrap_or_else(|| args.get(0).unwrap_or_else(|| none(this.py()))))
}

/// `_put_reserved(item)`: puts an item into the place that a task was woken for.
fn put_reserved<'py, const C: bool>(this: Shared<'py, C>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    in_section(this, || this.push(args.get(0).unwrap_or_else(|| none(py))))?;
    Ok(none(py))
}

/// `_is_finished()`: whether the work on all items is done.
fn is_finished<'py>(this: Shared<'py, false>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let count = with_critical_section(this, || this.unfinished.get());
    Ok(bool_object(this.py(), count == 0))
}

// ---- the types ----------------------------------------------------------------------------------------------------

/// Methods of both types. Only `grapeshot.threads` calls these methods.
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
            "Let the running task wait. Return the future to await, or None if the task need not wait."
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
            "Put an item into the queue. Raises queue.Full if there is no place, and ShutDown after a shutdown()."
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
            "Remove and return the oldest item. If there is none, raises queue.Empty (ShutDown after shutdown())."
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
            "Say that the work on an item is done. Raises ValueError if the work on all items is already done."
        ),
        row!(
            method,
            shutdown,
            shared_queue.shutdown,
            "\
                Shut the queue down: put() raises ShutDown from now on, and get() once no items are left.\n\n\
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
            c"The number of items for which task_done() was not called yet.",
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
                A coro waits while other coros run; a real thread blocks. Raises TimeoutError if block is false or\n\
                the timeout expires, and ClosedError if the channel is closed."
        ),
        row!(
            method,
            put_nowait::<true>,
            shared_channel.send_nowait,
            "Send an item. Raises TimeoutError if the channel is full, and ClosedError if it is closed."
        ),
        row!(
            method,
            get::<true>,
            shared_channel.receive,
            "\
                Remove and return the oldest item. If the channel is empty, wait for an item.\n\n\
                A coro waits while other coros run; a real thread blocks. Raises TimeoutError if block is false or\n\
                the timeout expires, and ClosedError if the channel is closed and empty."
        ),
        row!(
            method,
            get_nowait::<true>,
            shared_channel.receive_nowait,
            "Remove and return the oldest item. If there is none, raises TimeoutError (ClosedError after close())."
        ),
        row!(
            method,
            close,
            shared_channel.close,
            "Close the channel: send() raises ClosedError from now on, and receive() once no items are left."
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
