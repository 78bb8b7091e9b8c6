//! Feeds asyncio's streams natively: does to a reader what `StreamReaderProtocol.data_received` and
//! `StreamReader.feed_data` would do, without running their Python code and without an intermediate `bytes` object.
//!
//! This applies only to an exact `asyncio.StreamReaderProtocol` over an exact `asyncio.StreamReader`, and only while
//! asyncio's own methods are in place, on both classes and on both objects. Each delivery checks the classes (by their
//! version tags) and the reader; the protocol object is checked when it is bound. If a check fails, or if the reader's
//! buffer cannot grow, the data goes through the Python methods. Until that is decided, nothing is changed. The native
//! code takes asyncio's steps in asyncio's order, so every exception and every intermediate state is the same.
//!
//! Used on the loop's thread only.

use std::ffi::c_char;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::exceptions::PyNotImplementedError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyByteArray, PyString, PyWeakrefMethods, PyWeakrefReference};

use super::protocol::ProtocolCalls;
use crate::binding::attributes;
use crate::binding::names::{Kept, names};
use crate::binding::object_result::none;

unsafe extern "C" {
    /// Public C API (`Doc/c-api/method.rst`), which pyo3-ffi does not export: the type of bound methods, and the
    /// functions that return borrowed references to the function and to the object of a bound method.
    static mut PyMethod_Type: ffi::PyTypeObject;
    fn PyMethod_Function(method: *mut ffi::PyObject) -> *mut ffi::PyObject;
    fn PyMethod_Self(method: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

/// asyncio's classes and their methods as they were when this module was loaded, and the class versions that were last
/// checked.
struct Stock {
    protocol_type: Kept,
    reader_type: Kept,
    /// `StreamReaderProtocol.data_received` and the property `_stream_reader`.
    data_received: Kept,
    stream_reader: Kept,
    feed_data: Kept,
    wakeup_waiter: Kept,
    /// The class `_asyncio.Future` and its `set_result`; None where Future is implemented in Python.
    future: Option<(Kept, Kept)>,
    /// The version tags of the two classes, if the last check has found these methods on them; otherwise 0.
    protocol_version: AtomicU32,
    reader_version: AtomicU32,
}

/// Empty if asyncio's methods are not the ones that this module was written for. Then nothing is fed natively.
static STOCK: PyOnceLock<Stock> = PyOnceLock::new();

/// Remembers asyncio's classes, if their methods are the ones whose work this module does natively.
pub(super) fn register(py: Python<'_>) -> PyResult<()> {
    let streams = py.import("asyncio.streams")?;
    let protocol_type = streams.getattr("StreamReaderProtocol")?;
    let reader_type = streams.getattr("StreamReader")?;
    let data_received = protocol_type.getattr("data_received")?;
    let stream_reader = protocol_type.getattr("_stream_reader")?;
    let feed_data = reader_type.getattr("feed_data")?;
    let wakeup_waiter = reader_type.getattr("_wakeup_waiter")?;
    let steps = [
        "_buffer",
        "extend",
        "_wakeup_waiter",
        "_transport",
        "_paused",
        "len",
        "_limit",
        "pause_reading",
        "NotImplementedError",
    ];
    // With asserts, feed_data first checks for the end of the stream; without them (-O) it does not.
    let checked_steps: Vec<_> = std::iter::once("_eof").chain(steps).collect();
    let is_known = uses(&data_received, &["_stream_reader", "feed_data"])
        && stream_reader
            .getattr_opt("fget")?
            .is_some_and(|getter| uses(&getter, &["_stream_reader_wr"]))
        && (uses(&feed_data, &checked_steps) || uses(&feed_data, &steps))
        && uses(&wakeup_waiter, &["_waiter", "cancelled", "set_result"]);
    if !is_known {
        return Ok(());
    }
    let future_type = py.import("asyncio.futures")?.getattr("Future")?;
    let future = match future_type.getattr("set_result") {
        Ok(set_result) if is_immutable(&future_type) => {
            Some((Kept::new(&future_type), Kept::new(&set_result)))
        }
        _ => None,
    };
    let table = Stock {
        protocol_type: Kept::new(&protocol_type),
        reader_type: Kept::new(&reader_type),
        data_received: Kept::new(&data_received),
        stream_reader: Kept::new(&stream_reader),
        feed_data: Kept::new(&feed_data),
        wakeup_waiter: Kept::new(&wakeup_waiter),
        future,
        protocol_version: AtomicU32::new(0),
        reader_version: AtomicU32::new(0),
    };
    // If the extension module is loaded a second time, it uses the table of the first load.
    STOCK.get_or_init(py, || table);
    Ok(())
}

/// True for a Python function whose code uses exactly these names, in this order. This excludes the function of a later
/// Python version that does something else, and a replacement that was installed before this module was loaded.
fn uses(function: &Bound<'_, PyAny>, expected: &[&str]) -> bool {
    function
        .getattr("__code__")
        .and_then(|code| code.getattr("co_names")?.extract::<Vec<String>>())
        .is_ok_and(|names| names == expected)
}

/// True for a class whose methods cannot be replaced.
fn is_immutable(kind: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the object is live, and it is read as a type object only if the check says so.
    unsafe {
        ffi::PyType_Check(kind.as_ptr()) != 0
            && ffi::PyType_GetFlags(kind.as_ptr().cast()) & ffi::Py_TPFLAGS_IMMUTABLETYPE != 0
    }
}

#[inline]
fn version_of(kind: Kept) -> u32 {
    // SAFETY: a kept type object.
    unsafe { attributes::version_of(kind.as_ptr().cast()) }
}

impl Stock {
    /// Whether both classes still have asyncio's methods.
    #[inline]
    fn is_unpatched(&self, py: Python<'_>) -> bool {
        let (protocol, reader) = (version_of(self.protocol_type), version_of(self.reader_type));
        if protocol != 0
            && reader != 0
            && protocol == self.protocol_version.load(Ordering::Relaxed)
            && reader == self.reader_version.load(Ordering::Relaxed)
        {
            return true;
        }
        self.check_again(py)
    }

    #[cold]
    fn check_again(&self, py: Python<'_>) -> bool {
        let has = |kind: Kept, name: &str, expected: Kept| {
            kind.bind(py)
                .getattr(name)
                .is_ok_and(|found| found.as_ptr() == expected.as_ptr())
        };
        // The attributes that are checked with `lacks` must come from the objects, not from a descriptor of the class.
        let lacks = |kind: Kept, name: &str| matches!(kind.bind(py).getattr_opt(name), Ok(None));
        let (protocol, reader) = (self.protocol_type, self.reader_type);
        let is_unpatched = has(protocol, "data_received", self.data_received)
            && has(protocol, "_stream_reader", self.stream_reader)
            && has(reader, "feed_data", self.feed_data)
            && has(reader, "_wakeup_waiter", self.wakeup_waiter)
            && lacks(protocol, "_stream_reader_wr")
            && ["_eof", "_buffer", "_waiter", "_transport", "_paused", "_limit"]
                .into_iter()
                .all(|name| lacks(reader, name))
            && has_plain_attributes(protocol)
            && has_plain_attributes(reader);
        // The lookups above have given both classes a version tag, unless CPython has run out of tags.
        let versions = if is_unpatched {
            (version_of(protocol), version_of(reader))
        } else {
            (0, 0)
        };
        self.protocol_version.store(versions.0, Ordering::Relaxed);
        self.reader_version.store(versions.1, Ordering::Relaxed);
        is_unpatched
    }
}

/// True for a class without `__getattr__`, `__getattribute__` or `__setattr__`.
fn has_plain_attributes(kind: Kept) -> bool {
    // SAFETY: a kept type object, whose slots are only compared.
    unsafe {
        let kind = &*kind.as_ptr().cast::<ffi::PyTypeObject>();
        kind.tp_getattro.map(|slot| slot as usize) == Some(ffi::PyObject_GenericGetAttr as *const () as usize)
            && kind.tp_setattro.map(|slot| slot as usize)
                == Some(ffi::PyObject_GenericSetAttr as *const () as usize)
    }
}

/// `object.<name>`; None if there is no such attribute.
#[inline]
fn attribute<'py>(object: &Bound<'py, PyAny>, name: Kept) -> Option<Bound<'py, PyAny>> {
    let py = object.py();
    // SAFETY: both objects are live; the call returns a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyObject_GetAttr(object.as_ptr(), name.as_ptr())).ok() }
}

fn set_attribute(object: &Bound<'_, PyAny>, name: Kept, value: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: all three objects are live; the result -1 means that an exception is set.
    if unsafe { ffi::PyObject_SetAttr(object.as_ptr(), name.as_ptr(), value) } < 0 {
        return Err(PyErr::fetch(object.py()));
    }
    Ok(())
}

/// True if `object.<name>` is the method `function` of its class, not hidden by an attribute of the object itself.
#[inline]
fn has_own_method(object: &Bound<'_, PyAny>, name: Kept, function: Kept) -> bool {
    attribute(object, name).is_some_and(|found| {
        // SAFETY: the objects are live; the accessors are called only after the check has shown that `found` is a bound
        // method.
        unsafe {
            ffi::Py_TYPE(found.as_ptr()) == &raw mut PyMethod_Type
                && PyMethod_Function(found.as_ptr()) == function.as_ptr()
                && PyMethod_Self(found.as_ptr()) == object.as_ptr()
        }
    })
}

/// Whether a newly bound protocol may be fed natively, judged by its class and its `data_received`. Its reader is
/// checked on each delivery.
pub(super) fn is_stock_protocol(protocol: &Bound<'_, PyAny>) -> bool {
    STOCK.get(protocol.py()).is_some_and(|stock| {
        protocol.get_type_ptr().cast() == stock.protocol_type.as_ptr()
            && stock.is_unpatched(protocol.py())
            && has_own_method(protocol, names(protocol.py()).data_received, stock.data_received)
    })
}

/// A reader that may be fed natively now. Obtaining it changes nothing.
pub(crate) struct Feed<'py> {
    stock: &'static Stock,
    reader: Bound<'py, PyAny>,
    buffer: Bound<'py, PyByteArray>,
}

impl<'py> Feed<'py> {
    /// The reader of a protocol for which `is_stock_protocol` has returned true. None if the data must go through the
    /// Python methods.
    #[inline]
    pub(super) fn of(protocol: &Bound<'py, PyAny>) -> Option<Self> {
        let py = protocol.py();
        let stock = STOCK.get(py).filter(|stock| stock.is_unpatched(py))?;
        let names = names(py);
        let reader = attribute(protocol, names._stream_reader_wr)?
            .cast_exact::<PyWeakrefReference>()
            .ok()?
            .upgrade()?;
        let is_stock = reader.get_type_ptr().cast() == stock.reader_type.as_ptr()
            && has_own_method(&reader, names.feed_data, stock.feed_data)
            && has_own_method(&reader, names._wakeup_waiter, stock.wakeup_waiter)
            && attribute(&reader, names._eof)?.is(&*PyBool::new(py, false));
        if !is_stock {
            return None;
        }
        let buffer = attribute(&reader, names._buffer)?
            .cast_into_exact::<PyByteArray>()
            .ok()?;
        Some(Self {
            stock,
            reader,
            buffer,
        })
    }

    /// Does `_buffer.extend(data)`. Returns false, with nothing changed, if the buffer cannot grow now (there is no
    /// memory, or some code holds a view of the buffer). The caller then calls the Python methods, which raise the
    /// proper exception.
    #[inline]
    pub(crate) fn extend(&self, data: &[u8]) -> bool {
        let old_len = self.buffer.len();
        if !self.resize(old_len + data.len()) {
            return false;
        }
        // SAFETY: the buffer has been resized to hold `data` after its old content, and no Python code runs during the
        // copy.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), self.start().add(old_len).cast(), data.len()) };
        true
    }

    /// Lets `receive` write up to `capacity` bytes directly after the buffer's content; `receive` returns the number of
    /// bytes written. Returns None, with nothing changed and nothing received, if the buffer cannot grow now.
    pub(crate) fn receive(
        &self,
        capacity: usize,
        receive: impl FnOnce(*mut u8, usize) -> io::Result<usize>,
    ) -> Option<io::Result<usize>> {
        let old_len = self.buffer.len();
        if !self.resize(old_len + capacity) {
            return None;
        }
        // SAFETY: the buffer has been resized so that `capacity` bytes may be written from this address on.
        let received = receive(unsafe { self.start().add(old_len).cast() }, capacity);
        // Shrinking fails only if it needs to allocate a smaller block and there is no memory. A failure leaves the
        // length unchanged.
        if !self.resize(old_len + received.as_ref().map_or(0, |len_bytes| *len_bytes)) {
            return Some(Err(io::ErrorKind::OutOfMemory.into()));
        }
        Some(received)
    }

    fn resize(&self, len_bytes: usize) -> bool {
        let buffer = self.buffer.as_ptr();
        // SAFETY: the bytearray is live. A negative result means that an exception is set and nothing was changed.
        let resized = unsafe { ffi::PyByteArray_Resize(buffer, len_bytes as ffi::Py_ssize_t) } >= 0;
        if !resized {
            drop(PyErr::fetch(self.buffer.py()));
        }
        resized
    }

    fn start(&self) -> *mut c_char {
        // SAFETY: a live bytearray.
        unsafe { ffi::PyByteArray_AsString(self.buffer.as_ptr()) }
    }

    /// Does what follows `_buffer.extend` in asyncio: wakes the task that waits for data, and pauses the transport if
    /// the buffer holds too much. `calls` provides the context for anything that may run Python code.
    #[inline]
    pub(super) fn finish(self, calls: &ProtocolCalls) -> PyResult<()> {
        let is_undisturbed = self.wake(calls)?;
        // Usually the buffer does not hold too much, and then asyncio's other conditions do not matter.
        if is_undisturbed
            && let Some(limit) = attribute(&self.reader, names(self.reader.py())._limit)
            && let Ok(limit) = limit.extract::<usize>()
            && self.buffer.len() <= limit.saturating_mul(2)
        {
            return Ok(());
        }
        self.pause(calls)
    }

    /// Does what the reader's `_wakeup_waiter()` does. Returns false if code has run that may have changed the reader.
    #[inline]
    fn wake(&self, calls: &ProtocolCalls) -> PyResult<bool> {
        let py = self.reader.py();
        let names = names(py);
        let waiter = self.required(names._waiter)?;
        if waiter.is_none() {
            return Ok(true);
        }
        let nothing = none(py);
        set_attribute(&self.reader, names._waiter, nothing.as_ptr())?;
        if let Some((kind, set_result)) = self.stock.future
            && waiter.get_type_ptr().cast() == kind.as_ptr()
        {
            return match call(py, set_result, &waiter, &nothing) {
                // asyncio checks for cancellation before it calls set_result. Here the check is made only if
                // set_result has failed. The answer is the same: set_result may make the future done and then fail,
                // but it never cancels the future.
                Err(_) if is_cancelled(&waiter)? => Ok(true),
                result => result.map(|()| true),
            };
        }
        calls.in_context(py, || {
            if !is_cancelled(&waiter)? {
                let name = names.set_result.bind(py);
                waiter.call_method1(name.cast::<PyString>()?, (nothing,))?;
            }
            Ok(false)
        })
    }

    /// Does the rest of `feed_data`: pauses the transport if the buffer holds more than twice the limit.
    #[cold]
    fn pause(&self, calls: &ProtocolCalls) -> PyResult<()> {
        let py = self.reader.py();
        let names = names(py);
        let transport = self.required(names._transport)?;
        if transport.is_none() || self.required(names._paused)?.is_truthy()? {
            return Ok(());
        }
        let twice = 2_i32.into_pyobject(py)?.mul(self.required(names._limit)?)?;
        let len_bytes = self.required(names._buffer)?.len()?;
        if !len_bytes.into_pyobject(py)?.gt(twice)? {
            return Ok(());
        }
        let name = names.pause_reading.bind(py);
        let paused = calls.in_context(py, || transport.call_method0(name.cast::<PyString>()?));
        match paused {
            Ok(_) => set_attribute(&self.reader, names._paused, PyBool::new(py, true).as_ptr()),
            Err(error) if error.is_instance_of::<PyNotImplementedError>(py) => {
                set_attribute(&self.reader, names._transport, none(py).as_ptr())
            }
            Err(error) => Err(error),
        }
    }

    /// `reader.<name>`. `AttributeError` if there is no such attribute.
    fn required(&self, name: Kept) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: as in `attribute`.
        unsafe {
            Bound::from_owned_ptr_or_err(
                self.reader.py(),
                ffi::PyObject_GetAttr(self.reader.as_ptr(), name.as_ptr()),
            )
        }
    }
}

fn is_cancelled(waiter: &Bound<'_, PyAny>) -> PyResult<bool> {
    let name = names(waiter.py()).cancelled.bind(waiter.py());
    waiter.call_method0(name.cast::<PyString>()?)?.is_truthy()
}

/// Calls the unbound method `method` on `object` with one argument.
#[inline]
fn call(
    py: Python<'_>,
    method: Kept,
    object: &Bound<'_, PyAny>,
    argument: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let call = [ptr::null_mut(), object.as_ptr(), argument.as_ptr()];
    // SAFETY: a reference keeps every value alive; call[0] is the free slot that the offset flag requires.
    unsafe {
        let result = ffi::PyObject_Vectorcall(
            method.as_ptr(),
            call[1..].as_ptr(),
            2 | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
            ptr::null_mut(),
        );
        Bound::from_owned_ptr_or_err(py, result).map(drop)
    }
}
