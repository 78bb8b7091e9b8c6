//! The protocol of a transport. The methods that run for each packet are bound once and kept.
//!
//! Used on the loop's thread only. All calls of the protocol's Python methods run in the transport's context, and an
//! exception of the protocol is returned as the error.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::binding::names::{Kept, names};
use crate::binding::new_bytes;
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::none;

use super::lent_buffer::LentBuffer;
use super::stream_reader::{self, Feed};

/// The function that delivers received data to a native protocol object. The data is borrowed for the call.
pub(crate) type Received = unsafe fn(Python<'_>, *mut ffi::PyObject, &[u8]) -> PyResult<()>;

/// The function that delivers a received `bytes` object to a protocol with a native `data_received`, without a Python
/// call. The function itself enters the transport's context where Python code may run.
pub(crate) type ObjectReceived = fn(&ProtocolCalls, &Bound<'_, PyAny>, &Bound<'_, PyBytes>) -> PyResult<()>;

/// How the protocol gets received data.
#[derive(Clone, Copy)]
pub(crate) enum Receiver {
    /// `data_received(data)`.
    Data,
    /// `get_buffer(sizehint)` and `buffer_updated(nbytes)`.
    Buffered,
    /// A native protocol gets a slice, without a Python call and without an object for each read.
    Native,
    /// A protocol with a native `data_received` gets a `bytes` object, without a Python call.
    Object(ObjectReceived),
}

/// The native protocol type; null until the TLS module registers it.
static NATIVE_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
/// The function that delivers data to protocols of the native type; null until the TLS module registers it.
static NATIVE_RECEIVED: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Makes `received` the function that delivers data to protocols whose type is exactly `kind`. The type must never be
/// freed. Called once, when the extension module is set up.
pub(crate) fn register_native(kind: *mut ffi::PyTypeObject, received: Received) {
    NATIVE_RECEIVED.store(received as *mut c_void, Ordering::Relaxed);
    NATIVE_TYPE.store(kind, Ordering::Release);
}

/// The C function of the native `data_received` method; null until it is registered.
static NATIVE_METHOD: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
/// The function that delivers data without calling that method; null until it is registered.
static OBJECT_RECEIVED: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Makes `received` the function that delivers data to protocols whose `data_received` is the native method that `row`
/// defines. Called once, when the extension module is set up.
pub(crate) fn register_object_received(row: &ffi::PyMethodDef, received: ObjectReceived) {
    OBJECT_RECEIVED.store(received as *mut c_void, Ordering::Relaxed);
    // SAFETY: every field of the union is a function pointer.
    let method = unsafe { row.ml_meth.PyCFunctionFastWithKeywords } as *mut c_void;
    NATIVE_METHOD.store(method, Ordering::Release);
}

/// The registered function for `protocol`, whose `data_received` is `method`. None unless `method` is the native method
/// and is bound to this very protocol.
fn object_received(protocol: &Bound<'_, PyAny>, method: &Bound<'_, PyAny>) -> Option<ObjectReceived> {
    // SAFETY: the objects are live; the accessors are called only after the check has shown that `method` is a native
    // function.
    unsafe {
        if ffi::PyCFunction_CheckExact(method.as_ptr()) == 0
            || ffi::PyCFunction_GetSelf(method.as_ptr()) != protocol.as_ptr()
        {
            return None;
        }
        let function = ffi::PyCFunction_GetFunction(method.as_ptr())? as *mut c_void;
        if function != NATIVE_METHOD.load(Ordering::Acquire) {
            return None;
        }
        // `register_object_received` stored this function, of this type, before it stored the method.
        Some(std::mem::transmute::<*mut c_void, ObjectReceived>(
            OBJECT_RECEIVED.load(Ordering::Relaxed),
        ))
    }
}

/// The registered function for `protocol`. None unless the type of `protocol` is the native protocol type.
#[inline]
fn native_received(protocol: &Bound<'_, PyAny>) -> Option<Received> {
    if protocol.get_type_ptr() != NATIVE_TYPE.load(Ordering::Acquire) {
        return None;
    }
    // SAFETY: `register_native` stored this function, of this type, before it stored the protocol type.
    Some(unsafe { std::mem::transmute::<*mut c_void, Received>(NATIVE_RECEIVED.load(Ordering::Relaxed)) })
}

/// A protocol, its cached bound methods, and the context that its callbacks run in.
pub(crate) struct ProtocolCalls {
    protocol: ObjectCell,
    /// `data_received`, `get_buffer` of a BufferedProtocol, or `datagram_received`.
    receive: ObjectCell,
    /// `buffer_updated` of a BufferedProtocol.
    updated: ObjectCell,
    context: ObjectCell,
    /// True while one of the calls is on the stack and the context is therefore entered.
    is_inside: Cell<bool>,
    receiver: Cell<Receiver>,
    /// The transport is for datagrams, so its protocols have `datagram_received`.
    has_datagrams: bool,
    /// Whether `stream_reader` may feed the protocol's reader natively.
    has_reader: Cell<bool>,
}

impl ProtocolCalls {
    /// Binds `protocol` with a copy of the current context.
    pub(crate) fn new(protocol: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::with_context(protocol, copied_context(protocol.py())?)
    }

    /// The same for a `DatagramProtocol`.
    pub(crate) fn for_datagrams(protocol: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::bound(protocol, copied_context(protocol.py())?, true)
    }

    /// Binds `protocol` with `context`, which nothing else may use from now on.
    pub(crate) fn with_context(protocol: &Bound<'_, PyAny>, context: Bound<'_, PyAny>) -> PyResult<Self> {
        Self::bound(protocol, context, false)
    }

    fn bound(protocol: &Bound<'_, PyAny>, context: Bound<'_, PyAny>, has_datagrams: bool) -> PyResult<Self> {
        let py = protocol.py();
        let calls = Self {
            protocol: ObjectCell::empty(),
            receive: ObjectCell::empty(),
            updated: ObjectCell::empty(),
            context: ObjectCell::empty(),
            is_inside: Cell::new(false),
            receiver: Cell::new(Receiver::Data),
            has_datagrams,
            has_reader: Cell::new(false),
        };
        calls.context.set(context);
        if let Err(error) = calls.bind(protocol) {
            calls.drop_all(py);
            return Err(error);
        }
        Ok(calls)
    }

    /// Changes the protocol, with effect from the next event. No cell is changed before all calls into Python are done,
    /// so that the cells always belong to one protocol.
    pub(crate) fn bind(&self, protocol: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = protocol.py();
        let method = |name: Kept| -> PyResult<Bound<'_, PyAny>> {
            let name = name.bind(py).cast_into::<PyString>()?;
            match protocol.getattr_opt(&name)? {
                Some(method) => Ok(method),
                // As in asyncio, a protocol without the method fails when data arrives, and not here.
                None => Ok(none(py)),
            }
        };
        let (receiver, receive, updated) = if self.has_datagrams {
            (Receiver::Data, method(names(py).datagram_received)?, None)
        } else if native_received(protocol).is_some() {
            (Receiver::Native, none(py), None)
        } else if protocol.is_instance(&names(py).buffered_protocol_type.bind(py))? {
            let updated = method(names(py).buffer_updated)?;
            (Receiver::Buffered, method(names(py).get_buffer)?, Some(updated))
        } else {
            let received = method(names(py).data_received)?;
            let lent = if received.is_none() {
                method(names(py).get_buffer)?
            } else {
                none(py)
            };
            let updated = if lent.is_none() {
                none(py)
            } else {
                method(names(py).buffer_updated)?
            };
            if let Some(native) = object_received(protocol, &received) {
                (Receiver::Object(native), received, None)
            } else if updated.is_none() {
                (Receiver::Data, received, None)
            } else {
                // The class does not inherit from BufferedProtocol, but it has that class's methods and no
                // `data_received`.
                (Receiver::Buffered, lent, Some(updated))
            }
        };
        let is_plain = !self.has_datagrams && matches!(receiver, Receiver::Data);
        let has_reader = is_plain && stream_reader::is_stock_protocol(protocol);
        self.receiver.set(receiver);
        self.has_reader.set(has_reader);
        let _before = (
            self.receive.replace(Some(receive), py),
            self.updated.replace(updated, py),
            self.protocol.replace(Some(protocol.clone()), py),
        );
        Ok(())
    }

    pub(crate) fn get<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.protocol.get(py)
    }

    /// A copy of the context that the callbacks run in; None once `drop_all` was called.
    pub(crate) fn copied_context<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(context) = self.context.get(py) else {
            return Ok(None);
        };
        // SAFETY: a live context; the call returns a new reference or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_Copy(context.as_ptr())).map(Some) }
    }

    #[inline]
    pub(crate) fn receiver(&self) -> Receiver {
        self.receiver.get()
    }

    /// Delivers data to a native protocol, which enters its own context. RuntimeError if the protocol is not a native
    /// one.
    #[inline]
    pub(crate) fn deliver_native(&self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        let Some(protocol) = self.protocol.get(py) else {
            return Err(no_protocol());
        };
        let Some(received) = native_received(&protocol) else {
            return Err(no_protocol());
        };
        // SAFETY: the protocol is alive, and of the type that the function was registered for.
        unsafe { received(py, protocol.as_ptr(), data) }
    }

    /// Delivers data in the way that the current protocol requires. Python code may have replaced the protocol since
    /// the data was received.
    #[inline]
    pub(crate) fn deliver(&self, py: Python<'_>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        match self.receiver.get() {
            Receiver::Data => self.data_received(py, data.as_any()),
            Receiver::Native => self.deliver_native(py, data.as_bytes()),
            Receiver::Buffered => self.fill_buffers(py, data),
            Receiver::Object(received) => match self.protocol.get(py) {
                Some(protocol) => received(self, &protocol, data),
                None => Err(no_protocol()),
            },
        }
    }

    /// Copies data into as many buffers of a BufferedProtocol as are needed. If the protocol is replaced in between,
    /// the new one gets the rest.
    #[cold]
    fn fill_buffers(&self, py: Python<'_>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        let mut rest = data.as_bytes();
        while !rest.is_empty() {
            if !matches!(self.receiver.get(), Receiver::Buffered) {
                return self.deliver(py, new_bytes::copied(py, rest)?.cast::<PyBytes>()?);
            }
            self.in_context(py, || {
                let hint = rest.len().into_pyobject(py)?;
                self.fill_buffer(py, hint.as_any(), |memory, capacity| {
                    let len_bytes = rest.len().min(capacity);
                    // SAFETY: `capacity` bytes may be written, and `data` keeps `rest` alive.
                    unsafe { ptr::copy(rest.as_ptr(), memory, len_bytes) };
                    rest = &rest[len_bytes..];
                    Ok((len_bytes, ()))
                })
            })?;
        }
        Ok(())
    }

    /// Access to the buffer of an `asyncio.StreamReader`, if the protocol's reader may be fed natively now.
    #[inline]
    pub(crate) fn feed<'py>(&self, py: Python<'py>) -> Option<Feed<'py>> {
        if !self.has_reader.get() {
            return None;
        }
        Feed::of(&self.protocol.get(py)?)
    }

    /// Completes a delivery after `Feed::extend` or `Feed::receive` has put data into the reader's buffer.
    #[inline]
    pub(crate) fn finish_feed(&self, feed: Feed<'_>) -> PyResult<()> {
        feed.finish(self)
    }

    /// Calls `data_received(data)` in the context, or feeds the stream reader natively where that is possible.
    #[inline]
    pub(crate) fn data_received(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(feed) = self.feed(py)
            && let Ok(bytes) = data.cast_exact::<PyBytes>()
            && feed.extend(bytes.as_bytes())
        {
            return self.finish_feed(feed);
        }
        self.call_data_received(py, data)
    }

    /// Calls `data_received(data)` in the context, even where a stream reader could be fed natively.
    #[inline]
    pub(crate) fn call_data_received(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        self.in_context(py, || call_bound(py, &self.receive, data.as_ptr()).map(drop))
    }

    /// One read into the buffer of a BufferedProtocol. To be called inside `in_context`.
    ///
    /// Calls `get_buffer(sizehint)`, then `fill` with the address and the length of the buffer (at least 1 writable
    /// byte). `fill` returns the number of bytes that it has written; unless that is 0, `buffer_updated` of the same
    /// protocol is called. Returns None, without calling `fill`, if `get_buffer` has replaced the protocol.
    /// RuntimeError if the buffer is empty.
    #[inline(always)]
    pub(crate) fn fill_buffer<R>(
        &self,
        py: Python<'_>,
        size_hint: &Bound<'_, PyAny>,
        fill: impl FnOnce(*mut u8, usize) -> PyResult<(usize, R)>,
    ) -> PyResult<Option<R>> {
        let lender = self.protocol.as_ptr();
        let Some(updated) = self.updated.get(py) else {
            return Err(no_protocol());
        };
        let offered = call_bound(py, &self.receive, size_hint.as_ptr())?;
        let mut buffer = LentBuffer::none();
        let (memory, capacity) = buffer.take(&offered)?;
        if lender != self.protocol.as_ptr() {
            return Ok(None);
        }
        let (len_bytes, filled) = fill(memory, capacity)?;
        drop(buffer);
        if len_bytes > 0 {
            let count = len_bytes.into_pyobject(py)?;
            call_method(&updated, count.as_ptr())?;
        }
        Ok(Some(filled))
    }

    /// Calls `datagram_received(data, addr)`. To be called inside `in_context`.
    #[inline]
    pub(crate) fn datagram_received(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        sender: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let Some(method) = self.receive.get(py) else {
            return Err(no_protocol());
        };
        let call = [ptr::null_mut(), data.as_ptr(), sender.as_ptr()];
        // SAFETY: the caller keeps the arguments alive, and `method` is a reference of our own; call[0] is the free
        // slot that the offset flag requires.
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

    /// Runs `body` in the transport's context.
    ///
    /// A callback may cause further callbacks before it returns. With TLS, for example, `close()` in `data_received`
    /// calls `eof_received` at once if the peer's `close_notify` has already come. Such inner callbacks run in the
    /// context that the outer one has entered, because a context cannot be entered twice.
    #[inline]
    pub(crate) fn in_context<R>(&self, py: Python<'_>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        if self.is_inside.get() {
            return body();
        }
        let Some(context) = self.context.get(py) else {
            return Err(no_protocol());
        };
        self.is_inside.set(true);
        let result = run_in(&context, body);
        self.is_inside.set(false);
        result
    }

    /// Calls `protocol.<name>(*args)` in the context. Only for rare calls, because each call looks the method up by its
    /// name.
    pub(crate) fn call<'py>(
        &self,
        py: Python<'py>,
        name: Kept,
        args: &[&Bound<'py, PyAny>],
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(protocol) = self.protocol.get(py) else {
            return Err(no_protocol());
        };
        let mut call = [ptr::null_mut(); 4];
        call[1] = protocol.as_ptr();
        for (place, arg) in call[2..].iter_mut().zip(args) {
            *place = arg.as_ptr();
        }
        self.in_context(py, || {
            // SAFETY: a reference of ours or of the caller keeps every value alive; call[0] is the free slot that the
            // offset flag requires.
            unsafe {
                let result = ffi::PyObject_VectorcallMethod(
                    name.as_ptr(),
                    call[1..].as_ptr(),
                    (1 + args.len()) | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
                    ptr::null_mut(),
                );
                Bound::from_owned_ptr_or_err(py, result)
            }
        })
    }

    /// Drops all references. The transport must not call the protocol after this.
    pub(crate) fn drop_all(&self, py: Python<'_>) {
        for cell in [&self.protocol, &self.receive, &self.updated, &self.context] {
            drop(cell.take(py));
        }
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(crate) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        for cell in [&self.protocol, &self.receive, &self.updated, &self.context] {
            // SAFETY: `visit` and `arg` come from the collector.
            let result = unsafe { cell.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        0
    }
}

/// Runs `body` in a `contextvars.Context`. RuntimeError if the context is entered already.
#[inline]
pub(crate) fn run_in<R>(context: &Bound<'_, PyAny>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
    let py = context.py();
    // SAFETY: the caller holds a reference to the context, so it is live; it is left below on this thread.
    if unsafe { ffi::PyContext_Enter(context.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let result = body();
    // SAFETY: the context was entered above on this thread. No exception is set: if `body` has failed, the error holds
    // the exception.
    if unsafe { ffi::PyContext_Exit(context.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    result
}

fn copied_context(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: attached; the call returns a new reference or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent()) }
}

/// Calls the bound method in the cell `method` with one argument.
#[inline]
fn call_bound<'py>(
    py: Python<'py>,
    method: &ObjectCell,
    arg: *mut ffi::PyObject,
) -> PyResult<Bound<'py, PyAny>> {
    match method.get(py) {
        Some(method) => call_method(&method, arg),
        None => Err(no_protocol()),
    }
}

/// Calls a bound method with one argument.
#[inline]
fn call_method<'py>(method: &Bound<'py, PyAny>, arg: *mut ffi::PyObject) -> PyResult<Bound<'py, PyAny>> {
    let py = method.py();
    let call = [ptr::null_mut(), arg];
    // SAFETY: the caller keeps `arg` alive, and `method` is a reference of our own; call[0] is the free slot that the
    // offset flag requires.
    unsafe {
        let result = ffi::PyObject_Vectorcall(
            method.as_ptr(),
            call[1..].as_ptr(),
            1 | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
            ptr::null_mut(),
        );
        Bound::from_owned_ptr_or_err(py, result)
    }
}

#[cold]
fn no_protocol() -> PyErr {
    PyRuntimeError::new_err("the transport has no protocol")
}
