//! The coroutines of a reader's `read()` and its relatives, and of a writer's `drain()`.
//!
//! ```text
//!   attempt ---- native code has the result ----------------------> done
//!     |  ^ '---- data must come: put a waiter in the reader --.
//!     |  '------ data, end of stream or exception ------------'
//!     '--------- anything else: asyncio's own coroutine does the rest, driven from here
//! ```
//! Data leaves the reader in the step that returns it. So a coroutine that is cancelled has taken no data, even if data
//! had already come for it.

use std::cell::Cell;
use std::ffi::CStr;
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use super::reader::{self, Reader, ReaderObject};
use super::{call, stock, with_access, writer};
use crate::binding::native_type::NativeType;
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::event_loop::coroutine::{self, Coroutine, Place, Steps};
use crate::event_loop::progress::{CoroutineStep, Progress};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::waiter;

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Read,
    ReadExactly,
    ReadUntil,
    ReadLine,
    Next,
    Drain,
}

impl Kind {
    pub(super) const ALL: [Self; 6] = [
        Self::Read,
        Self::ReadExactly,
        Self::ReadUntil,
        Self::ReadLine,
        Self::Next,
        Self::Drain,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::ReadExactly => "readexactly",
            Self::ReadUntil => "readuntil",
            Self::ReadLine => "readline",
            Self::Next => "__anext__",
            Self::Drain => "drain",
        }
    }
}

/// The additional fields of a stream's coroutine. Of the fields that every coroutine has, `subject` is the reader or
/// writer, and `first` is the argument.
pub(super) struct StreamSteps {
    /// asyncio's coroutine that does the rest; empty while native code does the work.
    inner: ObjectCell,
    /// The held data has no separator that begins before this position.
    searched: Cell<usize>,
    /// Whether the waiter in the reader belongs to this coroutine.
    is_waiting: Cell<bool>,
}

type Operation<'py> = Coroutine<'py, StreamSteps>;

static PLACE: Place = Place::new();

/// The outcome of a native attempt. `MustWait` has the number of bytes that the reader must hold before the next
/// attempt. None means that asyncio's coroutine must do the rest.
type Answer<'py> = PyResult<Option<Progress<Bound<'py, PyAny>, usize>>>;

/// The coroutine of a reader's method.
#[inline]
pub(super) fn of_reader<'py>(
    reader: Reader<'py>,
    kind: Kind,
    argument: Option<Bound<'py, PyAny>>,
) -> ObjectResult<'py> {
    let event_loop = reader
        .event_loop
        .get(reader.py())
        .unwrap_or_else(|| none(reader.py()));
    new(event_loop, kind, reader.to_bound(), argument)
}

#[inline]
pub(super) fn new<'py>(
    event_loop: Bound<'py, PyAny>,
    kind: Kind,
    subject: Bound<'py, PyAny>,
    argument: Option<Bound<'py, PyAny>>,
) -> ObjectResult<'py> {
    coroutine::new_coroutine::<StreamSteps>(event_loop, kind, Some(subject), argument, None)
}

#[inline]
fn answer<'py>(this: Operation<'py>, subject: &Bound<'py, PyAny>) -> Answer<'py> {
    if this.kind.get() == Kind::Drain {
        return match writer::writer_of(subject) {
            Some(writer) if writer::is_drained(writer)? => Ok(Some(Progress::Done(none(this.py())))),
            _ => Ok(None),
        };
    }
    let Some(reader) = reader::reader_of(subject) else {
        return Ok(None);
    };
    // asyncio checks for an exception only once, before it waits.
    if !reader::has_own_methods(reader) || (reader.exception.is_set() && !this.has_waited.get()) {
        return Ok(None);
    }
    match this.kind.get() {
        Kind::Read => read(this, reader),
        Kind::ReadExactly => read_exactly(this, reader),
        _ => read_until(this, reader),
    }
}

#[inline]
fn read<'py>(this: Operation<'py>, reader: Reader<'py>) -> Answer<'py> {
    let Some(len) = this.first_as_len() else {
        return Ok(None);
    };
    let held_len = reader::len_bytes(reader);
    if held_len > 0 {
        return take(reader, held_len.min(len));
    }
    if reader.is_eof.get() {
        return Ok(Some(Progress::Done(PyBytes::new(this.py(), &[]).into_any())));
    }
    Ok(Some(Progress::MustWait(1)))
}

fn read_exactly<'py>(this: Operation<'py>, reader: Reader<'py>) -> Answer<'py> {
    match this.first_as_len() {
        Some(len) if reader::len_bytes(reader) >= len => take(reader, len),
        Some(len) if !reader.is_eof.get() => Ok(Some(Progress::MustWait(len))),
        _ => Ok(None),
    }
}

fn read_until<'py>(this: Operation<'py>, reader: Reader<'py>) -> Answer<'py> {
    let given = this.first.get(this.py());
    let separator: &[u8] = match &given {
        None => b"\n",
        Some(given) => match given.cast_exact::<PyBytes>() {
            Ok(bytes) if !bytes.as_bytes().is_empty() => bytes.as_bytes(),
            _ => return Ok(None),
        },
    };
    let (start, limit) = (this.rest.searched.get(), reader.limit());
    let (found, len) = reader::with_bytes(reader, |held| {
        // Other code may have read data since the last attempt.
        let start = if start > held.len() { 0 } else { start };
        (
            position(&held[start..], separator).map(|index| start + index),
            held.len(),
        )
    });
    match found {
        Some(index) if index <= limit => return take(reader, index + separator.len()),
        Some(_) => return Ok(None),
        None => {}
    }
    let searched = (len + 1).saturating_sub(separator.len());
    if searched > limit || reader.is_eof.get() {
        return Ok(None);
    }
    this.rest.searched.set(searched);
    Ok(Some(Progress::MustWait(1)))
}

/// The index of the first occurrence of `needle`, which must not be empty.
fn position(held: &[u8], needle: &[u8]) -> Option<usize> {
    let mut start = 0;
    while held.len() - start >= needle.len() {
        let rest = &held[start..];
        // SAFETY: the call gets the memory of `rest` and its length.
        let found = unsafe { libc::memchr(rest.as_ptr().cast(), i32::from(needle[0]), rest.len()) };
        if found.is_null() {
            return None;
        }
        start += found.addr() - rest.as_ptr().addr();
        if held[start..].starts_with(needle) {
            return Some(start);
        }
        start += 1;
    }
    None
}

/// Takes `len` bytes, and lets asyncio resume a transport that the reader has paused.
#[inline]
fn take(reader: Reader<'_>, len: usize) -> Answer<'_> {
    let taken = reader::take(reader, len)?;
    if reader.is_paused.get() {
        reader.to_bound().call_method0("_maybe_resume_transport")?;
    }
    Ok(Some(Progress::Done(taken)))
}

/// Puts a new waiter for `len` bytes into the reader. None if native code cannot wait.
#[inline]
fn wait<'py>(this: Operation<'py>, reader: Reader<'py>, len: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = this.py();
    // In three cases this must be left to asyncio's code: if the loop is not one of ours, if another coroutine already
    // waits (asyncio then raises RuntimeError), and if the reader has paused the transport (asyncio then resumes it).
    let Some(event_loop) = reader.event_loop.get(py) else {
        return Ok(None);
    };
    if reader.waiter.is_set() || reader.is_paused.get() || !LoopObject::is_loop(&event_loop) {
        return Ok(None);
    }
    let waiter = waiter::new_signal(&event_loop)?;
    reader.waiter.set(waiter.clone());
    reader.wanted.set(len);
    this.rest.is_waiting.set(true);
    Ok(Some(waiter))
}

/// Ends the wait: sets `_waiter` to None, as at the end of asyncio's `_wait_for_data`.
fn end_wait(this: Operation<'_>) {
    if !this.rest.is_waiting.replace(false) {
        return;
    }
    if let Some(subject) = this.subject.get(this.py())
        && let Some(reader) = reader::reader_of(&subject)
    {
        reader.wanted.set(0);
        drop(reader.waiter.take(this.py()));
    }
}

/// Makes asyncio's own coroutine, which does the rest, and drives its first step.
#[cold]
fn delegate<'py>(this: Operation<'py>, subject: Bound<'py, PyAny>) -> PyResult<CoroutineStep<'py>> {
    let py = this.py();
    let function = stock(py)?.coroutines[this.kind.get() as usize];
    let args = match this.first.get(py) {
        Some(argument) => PyTuple::new(py, [subject, argument])?,
        None => PyTuple::new(py, [subject])?,
    };
    let inner = call(function, args)?;
    this.rest.inner.set(inner.clone());
    // SAFETY: None lives forever.
    forward(this, &inner, unsafe { ffi::Py_None() })
}

/// Sends `value` into asyncio's coroutine.
fn forward<'py>(
    this: Operation<'py>,
    inner: &Bound<'py, PyAny>,
    value: *mut ffi::PyObject,
) -> PyResult<CoroutineStep<'py>> {
    let py = this.py();
    let mut result = ptr::null_mut();
    // SAFETY: attached, with a live iterator and a value that the caller keeps alive. The result is a new reference, or
    // null with an exception set.
    unsafe {
        match ffi::PyIter_Send(inner.as_ptr(), value, &raw mut result) {
            ffi::PySendResult::PYGEN_RETURN => Ok(Progress::Done(Bound::from_owned_ptr(py, result))),
            ffi::PySendResult::PYGEN_NEXT => Ok(Progress::MustWait(Bound::from_owned_ptr(py, result))),
            ffi::PySendResult::PYGEN_ERROR => Err(PyErr::fetch(py)),
        }
    }
}

impl Steps for StreamSteps {
    const NAME: &'static CStr = c"grapeshot._core._StreamOperation";
    const DOC: &'static CStr = c"The coroutine of one call of a stream's method.";
    type Kind = Kind;

    fn place() -> &'static Place {
        &PLACE
    }

    fn names(kind: Kind) -> (&'static str, &'static str) {
        let class = if kind == Kind::Drain {
            "StreamWriter"
        } else {
            "StreamReader"
        };
        (class, kind.name())
    }

    #[inline]
    fn attempt(this: Operation<'_>, value: *mut ffi::PyObject) -> PyResult<CoroutineStep<'_>> {
        let py = this.py();
        if let Some(inner) = this.rest.inner.get(py) {
            return forward(this, &inner, value);
        }
        end_wait(this);
        let Some(subject) = this.subject.get(py) else {
            return Ok(Progress::Done(none(py)));
        };
        match answer(this, &subject)? {
            Some(Progress::Done(value)) => return Ok(Progress::Done(value)),
            Some(Progress::MustWait(len)) => {
                if let Some(reader) = reader::reader_of(&subject)
                    && let Some(waiter) = wait(this, reader, len)?
                {
                    return Ok(coroutine::yield_waiter(this, waiter));
                }
            }
            None => {}
        }
        delegate(this, subject)
    }

    fn reset(&self) {
        self.searched.set(0);
        self.is_waiting.set(false);
    }

    fn release(this: Operation<'_>) {
        if !this.rest.is_waiting.get() {
            return;
        }
        let subject = this.subject.get(this.py());
        if let Some(reader) = subject.as_ref().and_then(reader::reader_of) {
            // `with_access` locks the reader, and not this coroutine, which may be about to be freed. If another thread
            // runs the loop, access is refused and the waiter stays in the reader. Waking the waiter then has no
            // effect.
            let _ = ReaderObject::with_access(reader, || {
                end_wait(this);
                Ok(())
            });
        }
    }

    fn throw_inside<'py>(this: Operation<'py>, error: &Bound<'py, PyAny>) -> Option<ObjectResult<'py>> {
        let inner = this.rest.inner.get(this.py())?;
        Some(inner.call_method1(PyString::intern(this.py(), "throw"), (error,)))
    }

    fn close_inside(this: Operation<'_>) -> PyResult<()> {
        match this.rest.inner.get(this.py()) {
            Some(inner) => inner.call_method0("close").map(drop),
            None => Ok(()),
        }
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.inner]
    }

    fn with_access<R>(this: Operation<'_>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_access(this, &this.event_loop, body)
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    coroutine::make_type::<StreamSteps>(module)
}
