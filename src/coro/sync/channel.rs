//! `channel`: senders and receivers wait for each other, as in Stackless Python's channels.
//!
//! ```text
//!   on the way     [ oldest ... ]     values that have left their senders; at least as many as are promised
//!   promised       the number of receivers that were woken for a value and have not run yet
//!   senders        coros with a value each; these values are newer than the ones on the way
//!   receivers      coros; they wait only while all values are promised
//! ```
//!
//! A receiver takes its value from `on_the_way` when it runs. If it is interrupted before that, the value goes to the
//! next receiver in the queue, or stays for a later one.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::exceptions::{PyBaseException, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::item_queue::ItemQueue;
use super::limit::{Deadline, Limit};
use super::object::{
    Call, EndedWait, FLAGS, Head, Primitive, call_in_steps, check_thread, end, grant, make_type as make,
    offer_in_queue,
};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, slot, with_critical_section};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{class_getitem, getter, row};
use crate::coro::coroutine::{Coro, Outcome};
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::wait_queue::WaitQueue;
use crate::coro::{scheduler, suspension};
use crate::event_loop::progress::Progress;

#[repr(C)]
pub(super) struct ChannelObject {
    head: Head,
    on_the_way: ItemQueue,
    promised: Cell<usize>,
    /// Each waiting sender holds its value in `wake_value`. The sender's request is `EXCEPTION` if the receiver is to
    /// raise the value.
    senders: WaitQueue,
    receivers: WaitQueue,
    is_closing: Cell<bool>,
}

type Channel<'py> = This<'py, ChannelObject>;

/// The request of a sender whose value the receiver is to raise.
const EXCEPTION: i64 = 1;

impl NativeType for ChannelObject {
    const NAME: &'static CStr = c"grapeshot.coro.channel";
    const DOC: &'static CStr = c"channel()\n--\n\nA rendezvous: `send` and `receive` wait for each other.";
    const FLAGS: u64 = FLAGS;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's. The other queues own no references: the runtime keeps waiting
        // coros alive, and each sender owns its value.
        unsafe { self.on_the_way.traverse(visit, arg) }
    }

    fn clear(this: This<'_, Self>) {
        this.on_the_way.clear(this.py());
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

// SAFETY: repr(C), and the first field is the head.
unsafe impl Primitive for ChannelObject {
    fn head(&self) -> &Head {
        &self.head
    }

    unsafe fn init(object: *mut Self) {
        // SAFETY: by the contract; the field is not initialised yet.
        unsafe { ptr::write(&raw mut (*object).on_the_way, ItemQueue::new()) };
    }

    fn state(this: This<'_, Self>) -> String {
        let state = match (this.is_closing.get(), this.free()) {
            (false, _) => "",
            (true, 0) => ", closed",
            (true, _) => ", closing",
        };
        format!("balance {}{state}", this.balance())
    }
}

impl ChannelObject {
    /// The number of values that are not promised.
    #[inline]
    fn free(&self) -> usize {
        self.senders.len() + self.on_the_way.len().saturating_sub(self.promised.get())
    }

    fn balance(&self) -> isize {
        self.free() as isize - self.receivers.len() as isize
    }

    /// Takes the value of the sender that has waited longest, and wakes that sender.
    #[inline]
    fn take_from_sender(this: Channel<'_>) -> Option<(Bound<'_, PyAny>, bool)> {
        let sender = this.senders.first(this.py())?;
        let is_exception = sender.wait_node.request.get() == EXCEPTION;
        let value = sender.wake_value.take(this.py());
        grant(sender, None);
        Some((value.unwrap_or_else(|| none(this.py())), is_exception))
    }

    /// Removes the oldest value. Returns it, and whether it is an exception; None if all values are promised.
    #[inline]
    fn take(this: Channel<'_>) -> Option<(Bound<'_, PyAny>, bool)> {
        if this.free() == 0 {
            return None;
        }
        let Some(oldest) = this.on_the_way.pop(this.py()) else {
            return Self::take_from_sender(this);
        };
        // A promised value must not depend on its sender, so keep at least the promised number of values on the way.
        while this.on_the_way.len() < this.promised.get()
            && let Some((value, is_exception)) = Self::take_from_sender(this)
        {
            this.on_the_way.push(value, is_exception);
        }
        Some(oldest)
    }

    /// If a value on the way is not promised yet, promises it to the receiver that has waited longest.
    #[inline]
    fn promise(this: Channel<'_>) {
        if this.on_the_way.len() > this.promised.get()
            && let Some(first) = this.receivers.first(this.py())
        {
            this.promised.set(this.promised.get() + 1);
            grant(first, None);
        }
    }
}

#[cold]
fn closed(py: Python<'_>) -> PyErr {
    coro_errors::new(py, ErrorClass::Closed, "the channel is closed")
}

#[cold]
fn late(py: Python<'_>, limit: Limit) -> PyErr {
    let message = format!("no receiver took the value{}", limit.describe());
    coro_errors::new(py, ErrorClass::Timeout, &message)
}

/// Gives a value to a waiting receiver. Returns the value if no receiver waits and the call may wait for one.
#[inline]
fn hand_over<'py>(
    this: Channel<'py>,
    value: Bound<'py, PyAny>,
    is_exception: bool,
    limit: Limit,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    check_thread(this)?;
    if this.is_closing.get() {
        return Err(closed(this.py()));
    }
    if !this.receivers.is_empty() {
        // There are receivers, so no sender waits.
        this.on_the_way.push(value, is_exception);
        ChannelObject::promise(this);
        return Ok(None);
    }
    if limit.is_at_once() {
        return Err(late(this.py(), limit));
    }
    Ok(Some(value))
}

/// Starts `send`: hands the value over if a receiver waits. Otherwise stores the deadline in `call`, and returns the
/// value and the coro that is to wait.
#[inline]
fn begin_send(
    this: Channel<'static>,
    args: Args<'_, 'static>,
    call: &mut Call,
) -> PyResult<Option<(Coro<'static>, Bound<'static, PyAny>)>> {
    let value = match args.get(0) {
        Some(value) if args.values().len() == 1 => value,
        // `bind` never takes the value from a keyword argument, because the parameter is positional only.
        _ => match args.bind()? {
            [Some(value), block, timeout] => {
                call.limit = Limit::new(block, timeout)?;
                value
            }
            _ => return Err(PyTypeError::new_err("send() takes a value")),
        },
    };
    let Some(value) = hand_over(this, value, false, call.limit)? else {
        return Ok(None);
    };
    let coro = suspension::suspendable(this.py())?;
    call.deadline = Some(Deadline::new(coro, call.limit)?);
    if !this.receivers.is_empty() || this.is_closing.get() {
        // A destructor that `Deadline::new` ran has changed the channel, so this call need not wait.
        hand_over(this, value, false, Limit::AtOnce)?;
        return Ok(None);
    }
    Ok(Some((coro, value)))
}

/// Gives a value to a receiver. If no receiver waits, waits for one without a limit.
fn deliver<'py>(this: Channel<'py>, value: Bound<'py, PyAny>, is_exception: bool) -> PyResult<()> {
    let Some(mut value) = hand_over(this, value, is_exception, Limit::Endless)? else {
        return Ok(());
    };
    let coro = suspension::suspendable(this.py())?;
    let deadline = Deadline::new(coro, Limit::Endless)?;
    if !this.receivers.is_empty() || this.is_closing.get() {
        // As in `begin_send`.
        return hand_over(this, value, is_exception, Limit::AtOnce).map(drop);
    }
    let request = if is_exception { EXCEPTION } else { 0 };
    loop {
        let wait = offer_in_queue(&this.senders, coro, request, value, &deadline);
        match sent(coro, wait)? {
            Sent::Taken => return Ok(()),
            Sent::Late => return Err(late(this.py(), Limit::Endless)),
            Sent::Back(offer) => value = offer,
        }
    }
}

/// The fate of a value that was offered.
enum Sent<'py> {
    Taken,
    Late,
    /// The sender was woken for another reason.
    Back(Bound<'py, PyAny>),
}

/// Reads the result of a sender's wait. Err: the wait was interrupted.
#[inline]
fn sent<'py>(coro: Coro<'py>, wait: EndedWait<'py>) -> PyResult<Sent<'py>> {
    match wait.result {
        Ok(_) if wait.is_granted => Ok(Sent::Taken),
        Ok(_) if wait.is_late => Ok(Sent::Late),
        Ok(offer) => Ok(Sent::Back(offer)),
        Err(interruption) => {
            // Drops the value, unless a receiver has taken it.
            suspension::forget_wake_value(coro);
            Err(interruption)
        }
    }
}

/// One step of waiting for the oldest value. The result is None if the channel is closed and no value is left. A value
/// that was sent as an exception is raised.
#[inline]
fn next_value(
    this: Channel<'static>,
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
            ChannelObject::promise(this);
            return Err(interruption);
        }
        if wait.is_late {
            return Err(no_value(this, call.limit));
        }
        coro
    } else {
        check_thread(this)?;
        if let Some(value) = received(this) {
            return value.map(Progress::Done);
        }
        if call.limit.is_at_once() {
            return Err(no_value(this, call.limit));
        }
        let coro = suspension::suspendable(this.py())?;
        call.deadline = Some(Deadline::new(coro, call.limit)?);
        coro
    };
    if let Some(value) = received(this) {
        return value.map(Progress::Done);
    }
    match call.wait_in(&this.receivers, coro, 0) {
        Ok(true) => Ok(Progress::MustWait(())),
        Ok(false) => Err(no_value(this, call.limit)),
        Err(interruption) => {
            ChannelObject::promise(this);
            Err(interruption)
        }
    }
}

/// The result for a receiver that need not wait: a value, an exception, or None for the end of the channel.
#[inline]
fn received(this: Channel<'_>) -> Option<PyResult<Option<Bound<'_, PyAny>>>> {
    match ChannelObject::take(this) {
        Some((exception, true)) => Some(Err(PyErr::from_value(exception))),
        Some((value, false)) => Some(Ok(Some(value))),
        None => this.is_closing.get().then_some(Ok(None)),
    }
}

#[cold]
fn no_value(this: Channel<'_>, limit: Limit) -> PyErr {
    let message = format!("no value was sent{}", limit.describe());
    coro_errors::new(this.py(), ErrorClass::Timeout, &message)
}

fn send(
    this: Channel<'static>,
    args: Args<'_, 'static>,
    call: &mut Call,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    let py = this.py();
    let (coro, value) = if let Some(outcome) = outcome {
        let coro = suspension::running(py)?;
        match sent(coro, end(coro, outcome))? {
            Sent::Taken => return Ok(Progress::Done(none(py))),
            Sent::Late => return Err(late(py, call.limit)),
            Sent::Back(offer) => (coro, offer),
        }
    } else if let Some(begun) = begin_send(this, args, call)? {
        begun
    } else {
        return Ok(Progress::Done(none(py)));
    };
    if call.offer_in(&this.senders, coro, value)? {
        Ok(Progress::MustWait(()))
    } else {
        Err(late(py, call.limit))
    }
}

fn send_exception<'py>(this: Channel<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let given: Vec<_> = (0..args.positional().len())
        .filter_map(|index| args.get(index))
        .collect();
    let exception = match given.as_slice() {
        [kind, rest @ ..] if kind.is_instance_of::<PyType>() => kind.call1(PyTuple::new(py, rest)?)?,
        [exception] => exception.clone(),
        _ => none(py),
    };
    if !exception.is_instance_of::<PyBaseException>() {
        return Err(PyTypeError::new_err(
            "an exception is required, or an exception class and its arguments",
        ));
    }
    deliver(this, exception, true)?;
    Ok(none(py))
}

fn send_sequence<'py>(this: Channel<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let mut sent = 0_usize;
    if let Some(values) = args.get(0) {
        for value in values.try_iter()? {
            deliver(this, value?, false)?;
            sent += 1;
        }
    }
    Ok(sent.into_pyobject(this.py())?.into_any())
}

fn receive(
    this: Channel<'static>,
    args: Args<'_, 'static>,
    call: &mut Call,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    if outcome.is_none() && !args.values().is_empty() {
        let [block, timeout] = args.bind()?;
        call.limit = Limit::new(block, timeout)?;
    }
    match next_value(this, call, outcome)? {
        Progress::MustWait(()) => Ok(Progress::MustWait(())),
        Progress::Done(Some(value)) => Ok(Progress::Done(value)),
        Progress::Done(None) => Err(closed(this.py())),
    }
}

fn close<'py>(this: Channel<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    this.is_closing.set(true);
    // The channel is closed and has no value for these receivers, so their calls end when they run.
    while let Some(receiver) = this.receivers.first(this.py()) {
        scheduler::make_ready(receiver);
    }
    Ok(none(this.py()))
}

fn balance(this: Channel<'_>) -> ObjectResult<'_> {
    Ok(this.balance().into_pyobject(this.py())?.into_any())
}

fn is_closing(this: Channel<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.is_closing.get()))
}

fn is_closed(this: Channel<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.is_closing.get() && this.free() == 0))
}

/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn next(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and the object is alive. Null without an exception ends an iteration.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this: Channel<'static> = This::new(py, slf);
            ChannelObject::with_access(this, || {
                let (mut call, mut outcome) = (Call::default(), None);
                loop {
                    match next_value(this, &mut call, outcome)? {
                        Progress::MustWait(()) => {
                            outcome = Some(suspension::suspend(suspension::running(py)?));
                        }
                        Progress::Done(value) => return Ok(value.map_or(ptr::null_mut(), Bound::into_ptr)),
                    }
                }
            })
        })
    }
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    make::<ChannelObject>(
        module,
        vec![
            row!(
                method(call_in_steps),
                send,
                channel.send,
                "Wait for a receiver and give it a value. Raises ClosedError if the channel is closed."
            ),
            row!(
                method,
                send_exception,
                channel.send_exception,
                "Wait for a receiver and raise exc in it, or exc(*args) if exc is a class."
            ),
            row!(
                method,
                send_sequence,
                channel.send_sequence,
                "Send each value of an iterable. Return the number of values."
            ),
            row!(
                method(call_in_steps),
                receive,
                channel.receive,
                "Wait for a sender and return its value. Raises ClosedError if the channel is closed and empty."
            ),
            row!(
                method,
                close,
                channel.close,
                "Refuse new values. Receivers still get the values of waiting senders, and then ClosedError."
            ),
            class_getitem(),
        ],
        vec![
            getter(
                c"balance",
                balance,
                c"The number of values that can be received without waiting, or minus the number of \
                  waiting receivers.",
            ),
            getter(c"closing", is_closing, c"Whether the channel was closed."),
            getter(
                c"closed",
                is_closed,
                c"Whether the channel was closed and nothing is left in it.",
            ),
        ],
        &[
            slot(ffi::Py_tp_iter, ffi::PyObject_SelfIter as *mut c_void),
            slot(ffi::Py_tp_iternext, next as *mut c_void),
        ],
    )
}
