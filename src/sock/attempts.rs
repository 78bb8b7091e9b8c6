//! The attempts of socket operations. Each attempt either ends the operation or says what to wait for.
//!
//! On plain sockets (`plain_socket`), most attempts make the system call themselves. The socket's method is called for
//! `sendto` and `recvfrom_into`, for unusual arguments, and for all operations on other sockets. On a non-blocking
//! socket, the method raises `BlockingIOError` instead of blocking, and the operation waits. If the first system call
//! on a plain socket would block, the operation waits only if the socket is non-blocking. If the socket is blocking or
//! has a timeout, its method is called instead, as in asyncio.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use grapeshot_core::sys::socket;
use pyo3::exceptions::{PyBlockingIOError, PyInterruptedError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::operation::{Operation, SocketSteps};
use super::plain_socket;
use crate::binding::new_bytes;
use crate::binding::object_result::none;
use crate::binding::socket_object;
use crate::binding::{base_socket, errors, new_objects};
use crate::event_loop::progress::{Attempt, WaitReason};
use crate::event_loop::reactor::Direction;

/// The loop's method that the operation belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum OperationKind {
    Recv,
    RecvInto,
    RecvFrom,
    RecvFromInto,
    SendAll,
    SendTo,
    Accept,
    /// Waits until the socket is writable and does nothing else, for `sock_connect` and `sendfile`.
    Writable,
    /// Not an operation on a socket: returns the answer of `getaddrinfo` for a host that needs no lookup.
    Answer,
    /// Not an operation on a socket: raises the exception of `getaddrinfo` for a host that needs no lookup.
    Refusal,
}

impl OperationKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Recv => "sock_recv",
            Self::RecvInto => "sock_recv_into",
            Self::RecvFrom => "sock_recvfrom",
            Self::RecvFromInto => "sock_recvfrom_into",
            Self::SendAll => "sock_sendall",
            Self::SendTo => "sock_sendto",
            Self::Accept => "sock_accept",
            Self::Writable => "_wait_writable",
            Self::Answer | Self::Refusal => "getaddrinfo",
        }
    }

    pub(super) fn direction(self) -> Direction {
        match self {
            Self::Recv | Self::RecvInto | Self::RecvFrom | Self::RecvFromInto | Self::Accept => {
                Direction::Read
            }
            Self::SendAll | Self::SendTo | Self::Writable | Self::Answer | Self::Refusal => Direction::Write,
        }
    }
}

/// The outcome of a native attempt. None means that the operation must call the socket's own method instead.
type Answer<'py> = PyResult<Option<Attempt<'py>>>;

#[inline]
pub(super) fn attempt(this: Operation<'_>) -> PyResult<Attempt<'_>> {
    let py = this.py();
    let kind = this.kind.get();
    let Some(socket) = this.subject.get(py) else {
        let first = this.first.get(py).unwrap_or_else(|| none(py));
        return if kind == OperationKind::Refusal {
            Err(PyErr::from_value(first))
        } else {
            Ok(Attempt::Done(first))
        };
    };
    let is_plain = plain_socket::is_plain(&socket);
    if !this.has_waited.get() {
        check(this, &socket, is_plain)?;
    }
    let ended = match kind {
        OperationKind::Writable if this.has_waited.get() => return Ok(Attempt::Done(none(py))),
        OperationKind::Writable => return Ok(would_block(this)),
        _ if !is_plain => None,
        OperationKind::Recv => recv(this, &socket)?,
        OperationKind::RecvInto => recv_into(this, &socket)?,
        OperationKind::RecvFrom => recv_from(this, &socket)?,
        OperationKind::RecvFromInto
        | OperationKind::SendTo
        | OperationKind::Answer
        | OperationKind::Refusal => None,
        OperationKind::SendAll => send_all(this, &socket)?,
        OperationKind::Accept => accept(this, &socket)?,
    };
    match ended {
        Some(attempt) => Ok(attempt),
        None => by_method(this, &socket),
    }
}

/// The checks before the first attempt: TypeError for a TLS socket, ValueError for a blocking socket in debug mode.
#[inline]
fn check(this: Operation<'_>, socket: &Bound<'_, PyAny>, is_plain: bool) -> PyResult<()> {
    if !is_plain {
        let sys = new_objects::module(socket.py(), "sys")?;
        let modules = new_objects::attribute(&sys, "modules")?.cast_into::<PyDict>()?;
        // If no code has imported ssl, there cannot be an SSLSocket.
        if let Some(ssl) = modules.get_item("ssl")?
            && socket.is_instance(&ssl.getattr("SSLSocket")?)?
        {
            return Err(PyTypeError::new_err("Socket cannot be of type SSLSocket"));
        }
    }
    if this.loop_object().reactor().probe.is_debug() && !is_nonblocking(socket, is_plain)? {
        return Err(PyValueError::new_err("the socket must be non-blocking"));
    }
    Ok(())
}

fn is_nonblocking(socket: &Bound<'_, PyAny>, is_plain: bool) -> PyResult<bool> {
    if is_plain {
        base_socket::is_nonblocking(socket)
    } else {
        new_objects::attribute(socket, "gettimeout")?.call0()?.eq(0)
    }
}

/// Handles a failed system call on a plain socket.
#[cold]
fn failed<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>, error: &io::Error) -> Answer<'py> {
    if error.kind() != io::ErrorKind::WouldBlock {
        return Err(errors::os_error(error));
    }
    if this.has_waited.get() || base_socket::is_nonblocking(socket)? {
        return Ok(Some(would_block(this)));
    }
    Ok(None)
}

fn done(value: Bound<'_, PyAny>) -> Answer<'_> {
    Ok(Some(Attempt::Done(value)))
}

/// The outcome of an attempt whose call would block: the operation must wait until its socket is ready.
fn would_block(this: Operation<'_>) -> Attempt<'_> {
    Attempt::MustWait(WaitReason::WouldBlock(this.kind.get().direction()))
}

// ---- receiving -----------------------------------------------------------------------------------------------------

fn recv<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>) -> Answer<'py> {
    let Some(len) = this.first_as_len() else {
        return Ok(None);
    };
    let fd = base_socket::descriptor(socket)?;
    let reactor = this.loop_object().reactor();
    let is_stream = || socket::is_stream(fd);
    match reactor.receive(this.py(), fd, len, this.has_waited.get(), is_stream)? {
        None => Ok(None),
        Some(Ok(received)) => done(received.data),
        Some(Err(error)) => failed(this, socket, &error),
    }
}

fn recv_from<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>) -> Answer<'py> {
    let py = this.py();
    let Some(len) = this.first_as_len() else {
        return Ok(None);
    };
    if !socket_object::is_known_family(base_socket::family(socket)?) {
        return Ok(None);
    }
    let fd = base_socket::descriptor(socket)?;
    let reactor = this.loop_object().reactor();
    let received = reactor.scratch.with(|scratch| {
        // If the datagram may be longer than the scratch buffer, the socket's method must receive it.
        if len > scratch.len() && !socket::is_stream(fd) {
            return Ok(None);
        }
        // SAFETY: the scratch buffer is borrowed for this call, and the length is not more than the buffer's.
        let received = unsafe { socket::recv_from_now(fd, scratch.as_mut_ptr(), len.min(scratch.len())) };
        Ok::<_, PyErr>(Some(match received {
            Ok((len_bytes, sender)) => Ok((new_bytes::copied(py, &scratch[..len_bytes])?, sender)),
            Err(error) => Err(error),
        }))
    })?;
    match received {
        None => Ok(None),
        Some(Ok((data, sender))) => {
            let sender = socket_object::address_object(py, &sender)?;
            done((data, sender).into_pyobject(py)?.into_any())
        }
        Some(Err(error)) => failed(this, socket, &error),
    }
}

fn recv_into<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>) -> Answer<'py> {
    let py = this.py();
    let mut view = ffi::Py_buffer::new();
    // SAFETY: attached; the operation keeps the object alive. On success the view is released once, below.
    if unsafe { ffi::PyObject_GetBuffer(this.first.as_ptr(), &raw mut view, ffi::PyBUF_WRITABLE) } != 0 {
        drop(PyErr::fetch(py));
        return Ok(None);
    }
    let received = match (view.len, base_socket::descriptor(socket)) {
        (0, _) => None,
        (_, Err(error)) => Some(Err(error)),
        // SAFETY: the view gives `len` writable bytes until it is released.
        (len, Ok(fd)) => Some(Ok(unsafe { socket::recv_now(fd, view.buf.cast(), len as usize) })),
    };
    // SAFETY: filled above, released once.
    unsafe { ffi::PyBuffer_Release(&raw mut view) };
    match received.transpose()? {
        None => Ok(None),
        Some(Ok(count)) => done(count.into_pyobject(py)?.into_any()),
        Some(Err(error)) => failed(this, socket, &error),
    }
}

fn accept<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>) -> Answer<'py> {
    let is_known = socket_object::is_known_family(base_socket::family(socket)?);
    // On a blocking socket, the system call could block.
    if !is_known || !base_socket::is_nonblocking(socket)? {
        return Ok(None);
    }
    let accepted = socket::accept(base_socket::descriptor(socket)?);
    this.loop_object().reactor().probe.counters.note_accept(&accepted);
    match accepted {
        Ok((fd, peer)) => {
            let py = this.py();
            let connection = connection(socket, fd)?;
            let peer = socket_object::address_object(py, &peer)?;
            done((connection, peer).into_pyobject(py)?.into_any())
        }
        Err(error) => failed(this, socket, &error),
    }
}

/// Makes the non-blocking `socket.socket` of an accepted connection.
fn connection<'py>(listener: &Bound<'py, PyAny>, fd: OwnedFd) -> PyResult<Bound<'py, PyAny>> {
    let [family, kind, protocol] = base_socket::shape(listener)?;
    let number = fd.as_raw_fd().into_pyobject(listener.py())?.into_any();
    let arguments = PyTuple::new(listener.py(), [family, kind, protocol, number])?;
    socket_object::take_over(&listener.get_type(), &arguments, None, Some(fd))
}

// ---- sending -------------------------------------------------------------------------------------------------------

/// Sends until all data is sent or the kernel takes no more. If the kernel takes only a part of the data twice in a
/// row, the operation continues in the loop's next iteration.
fn send_all<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>) -> Answer<'py> {
    let py = this.py();
    let fd = base_socket::descriptor(socket)?;
    for _ in 0..2 {
        // SAFETY: the memory is not used after the system call, and no other code runs until then.
        let data = unsafe { unsent(this)? };
        let result = socket::send_now(fd, data);
        if let Ok(sent) = result {
            note_write(this, sent);
        }
        match result {
            Ok(sent) if sent == data.len() => return done(none(py)),
            Ok(sent) => this.rest.sent.set(this.rest.sent.get() + sent),
            Err(error) => return failed(this, socket, &error),
        }
    }
    Ok(Some(Attempt::MustWait(WaitReason::Fairness)))
}

#[inline]
fn note_write(this: Operation<'_>, len_bytes: usize) {
    this.loop_object().reactor().probe.counters.note_write(len_bytes);
}

/// The data that is left to send. TypeError if it is not bytes-like, BufferError if it is not contiguous.
///
/// # Safety
/// The memory must not be used after any other code has run.
#[inline]
unsafe fn unsent<'a>(this: Operation<'_>) -> PyResult<&'a [u8]> {
    let data = this.first.as_ptr();
    // SAFETY: the operation keeps its data and the view of the data until the operation ends.
    unsafe {
        let whole = if ffi::PyBytes_CheckExact(data) != 0 {
            std::slice::from_raw_parts(ffi::PyBytes_AS_STRING(data).cast(), ffi::Py_SIZE(data) as usize)
        } else {
            let view = view_of(this)?;
            match (*view).len {
                0 => &[],
                len => std::slice::from_raw_parts((*view).buf.cast(), len as usize),
            }
        };
        Ok(&whole[this.rest.sent.get()..])
    }
}

/// The exported buffer of the data, which stays exported until the operation ends.
fn view_of(this: Operation<'_>) -> PyResult<*mut ffi::Py_buffer> {
    let known = this.rest.view.get();
    if !known.is_null() {
        return Ok(known);
    }
    let mut view = Box::new(ffi::Py_buffer::new());
    // SAFETY: attached; the operation keeps the object alive. On success the view is released once, by `release_view`.
    if unsafe { ffi::PyObject_GetBuffer(this.first.as_ptr(), &raw mut *view, ffi::PyBUF_SIMPLE) } != 0 {
        return Err(PyErr::fetch(this.py()));
    }
    let view = Box::into_raw(view);
    this.rest.view.set(view);
    Ok(view)
}

/// Releases the exported buffer, if there is one.
pub(super) fn release_view(this: &SocketSteps) {
    let view = this.view.replace(ptr::null_mut());
    if !view.is_null() {
        // SAFETY: `view_of` made the view, and it has been taken out of the only place that refers to it. The thread is
        // attached whenever an operation ends.
        unsafe {
            let mut view = Box::from_raw(view);
            ffi::PyBuffer_Release(&raw mut *view);
        }
    }
}

/// # Safety
/// Only the collector may call this, with its own `visit` and `arg`.
pub(super) unsafe fn traverse_view(this: &SocketSteps, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
    let view = this.view.get();
    if view.is_null() {
        return 0;
    }
    // SAFETY: a filled view holds a reference to its exporter.
    unsafe { visit((*view).obj, arg) }
}

// ---- the socket's methods -----------------------------------------------------------------------------------------

/// An attempt by the socket's own method.
fn by_method<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>) -> PyResult<Attempt<'py>> {
    let py = this.py();
    match call_method(this, socket) {
        Err(error)
            if error.is_instance_of::<PyBlockingIOError>(py)
                || error.is_instance_of::<PyInterruptedError>(py) =>
        {
            Ok(would_block(this))
        }
        attempt => attempt,
    }
}

/// Calls a method of a socket by its name.
fn by_name<'py>(
    socket: &Bound<'py, PyAny>,
    name: &str,
    args: impl pyo3::call::PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    new_objects::attribute(socket, name)?.call1(args)
}

/// Calls the socket's method for the operation. If the method raises `BlockingIOError`, so does this function.
fn call_method<'py>(this: Operation<'py>, socket: &Bound<'py, PyAny>) -> PyResult<Attempt<'py>> {
    let py = this.py();
    let argument = |cell: &crate::binding::object_cell::ObjectCell| cell.get(py).unwrap_or_else(|| none(py));
    let (first, second) = (argument(&this.first), argument(&this.second));
    let value = match this.kind.get() {
        OperationKind::Recv => by_name(socket, "recv", (first,))?,
        OperationKind::RecvInto => by_name(socket, "recv_into", (first,))?,
        OperationKind::RecvFrom => by_name(socket, "recvfrom", (first,))?,
        OperationKind::RecvFromInto => {
            let len = if second.is_truthy()? {
                second
            } else {
                new_objects::int(py, first.len()? as i64)?
            };
            by_name(socket, "recvfrom_into", (first, len))?
        }
        OperationKind::SendTo => {
            let count = by_name(socket, "sendto", (first, second))?;
            note_write(this, count.extract().unwrap_or(0));
            count
        }
        OperationKind::SendAll => return send_by_method(this, socket, &first),
        OperationKind::Accept => {
            let accepted = new_objects::attribute(socket, "accept")?.call0()?;
            accepted.get_item(0)?.call_method1("setblocking", (false,))?;
            accepted
        }
        OperationKind::Writable | OperationKind::Answer | OperationKind::Refusal => none(py),
    };
    Ok(Attempt::Done(value))
}

/// Calls `send()` once per attempt: with the data object itself if nothing was sent before, else with a view of the
/// data that is left. (Earlier attempts may have sent data with system calls, without this function.)
fn send_by_method<'py>(
    this: Operation<'py>,
    socket: &Bound<'py, PyAny>,
    data: &Bound<'py, PyAny>,
) -> PyResult<Attempt<'py>> {
    let py = this.py();
    let whole = if let Some(whole) = this.second.get(py) {
        whole
    } else {
        let memory = py.import("builtins")?.getattr("memoryview")?;
        let whole = memory.call1((data,))?.call_method1("cast", ("B",))?;
        this.second.set(whole.clone());
        whole
    };
    let sent = this.rest.sent.get();
    let rest = if sent == 0 {
        data.clone()
    } else {
        whole.get_item(pyo3::types::PySlice::new(py, sent as isize, isize::MAX, 1))?
    };
    let count: usize = by_name(socket, "send", (rest,))?.extract()?;
    note_write(this, count);
    this.rest.sent.set(sent + count);
    Ok(if this.rest.sent.get() == whole.len()? {
        Attempt::Done(none(py))
    } else {
        would_block(this)
    })
}
