//! The methods that receive: `recv` and its relatives.
//!
//! The usual calls of `recv` and `recv_into` are made here. All others are the base's own methods, which raise
//! `BlockingIOError` where a wait is needed; so their arguments, results and errors are Python's.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::RawFd;

use grapeshot_core::sys::{readiness, socket};
use pyo3::exceptions::{PyEOFError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::call::{Attempt, Operation, RawArgs, Surroundings, is_would_block, ordinary_len};
use super::socket::Socket;
use super::socket_type::{Method, base_method};
use crate::binding::errors;
use crate::binding::native_type::none;
use crate::binding::new_bytes::NewBytes;
use crate::coro::sync::Limit;
use crate::event_loop::reactor::{Direction, Received, receive_direct};

/// The longest object that is made before it is known how much there is, in a thread without a loop.
const MAX_UNKNOWN_LEN: usize = 256 * 1024;

/// Calls a method of the base with the arguments of this call.
#[cold]
#[inline(never)]
pub(super) fn by_base<'py>(
    socket: &Socket<'py>,
    method: Method,
    direction: Direction,
    args: &RawArgs,
) -> PyResult<Attempt<'py>> {
    let py = socket.py();
    let function = base_method(py, method)?;
    let mut values = Vec::with_capacity(args.all().len() + 1);
    values.push(socket.object().as_ptr());
    values.extend_from_slice(args.all());
    // SAFETY: attached; the values are alive for the call, positional ones first, then those of `kwnames`.
    let called = unsafe {
        let count = args.positional().len() + 1;
        let result = ffi::PyObject_Vectorcall(function.as_ptr(), values.as_ptr(), count, args.kwnames);
        Bound::from_owned_ptr_or_err(py, result)
    };
    match called {
        Ok(value) => Ok(Attempt::Done(value)),
        Err(error) if is_would_block(py, &error) => Ok(Attempt::Blocked(direction)),
        Err(error) if direction == Direction::Read && has_no_urgent_data(socket, args, &error) => {
            Ok(Attempt::Blocked(direction))
        }
        Err(error) => Err(error),
    }
}

/// Whether the call has asked for urgent data, of which there is none, and a socket of Python's would wait first: one
/// with a timeout and with nothing to read.
#[cold]
fn has_no_urgent_data(socket: &Socket<'_>, args: &RawArgs, error: &PyErr) -> bool {
    let py = socket.py();
    let errno = || error.value(py).getattr("errno").and_then(|errno| errno.extract());
    // SAFETY: an argument of the call, which its caller keeps.
    let flags = args
        .all()
        .last()
        .map(|flags| unsafe { Bound::from_borrowed_ptr(py, *flags) });
    let asks = flags
        .and_then(|flags| flags.extract::<i32>().ok())
        .is_some_and(|flags| flags & libc::MSG_OOB != 0);
    asks && matches!(socket.extra().limit(), Limit::For { .. })
        && errno().ok() == Some(libc::EINVAL)
        && socket
            .descriptor()
            .is_ok_and(|fd| matches!(readiness::wait_ready(fd, false, Some(0)), Ok(false)))
}

/// The rest of a failed system call.
#[inline]
pub(super) fn failed<'py>(error: &io::Error, direction: Direction) -> PyResult<Attempt<'py>> {
    if error.kind() == io::ErrorKind::WouldBlock {
        return Ok(Attempt::Blocked(direction));
    }
    Err(errors::os_error(error))
}

/// A method of the base that is repeated until it does not block.
pub(super) struct Repeated {
    pub(super) method: Method,
    pub(super) direction: Direction,
    pub(super) args: RawArgs,
}

impl Operation for Repeated {
    fn attempt<'py>(&mut self, socket: &Socket<'py>, _: &Surroundings<'_>) -> PyResult<Attempt<'py>> {
        if self.direction == Direction::Read {
            socket.extra().is_drained.set(false);
        }
        by_base(socket, self.method, self.direction, &self.args)
    }
}

/// `recv(bufsize, flags=0)`
pub(super) struct Recv {
    args: RawArgs,
    /// The number of bytes of an ordinary call.
    len: Option<NonZeroUsize>,
}

impl Recv {
    #[inline]
    pub(super) fn new(args: RawArgs) -> Self {
        let len = match args.only_positional() {
            Some(&[number]) => ordinary_len(number),
            _ => None,
        };
        Self {
            args,
            len: len.and_then(NonZeroUsize::new),
        }
    }

    #[inline]
    fn len(&self) -> Option<usize> {
        self.len.map(NonZeroUsize::get)
    }
}

impl Operation for Recv {
    #[inline]
    fn is_hopeless(&self, socket: &Socket<'_>) -> bool {
        socket.extra().is_drained.get() && !socket.extra().has_unread.get() && self.len().is_some()
    }

    #[inline]
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        if socket.extra().has_unread.get()
            && let Some(data) = unread(socket, self.len())?
        {
            return Ok(Attempt::Done(data));
        }
        let Some(len) = self.len() else {
            socket.extra().is_drained.set(false);
            return by_base(socket, Method::Recv, Direction::Read, &self.args);
        };
        let fd = socket.descriptor()?;
        match receive(socket, surroundings, fd, len)? {
            Some(Ok(received)) => {
                socket.note_read(surroundings.reactor, fd, received.len_bytes, received.capacity);
                Ok(Attempt::Done(received.data))
            }
            Some(Err(error)) => failed(&error, Direction::Read),
            None => by_base(socket, Method::Recv, Direction::Read, &self.args),
        }
    }
}

/// Receives up to `len` bytes. None: the base must do it.
#[inline]
fn receive<'py>(
    socket: &Socket<'py>,
    surroundings: &Surroundings<'_>,
    fd: RawFd,
    len: usize,
) -> PyResult<Option<io::Result<Received<'py>>>> {
    let py = socket.py();
    match surroundings.reactor {
        Some(reactor) => reactor.receive(py, fd, len, surroundings.has_waited, || socket.is_stream()),
        None if len <= MAX_UNKNOWN_LEN || socket.is_stream() => {
            receive_direct(py, fd, len.min(MAX_UNKNOWN_LEN)).map(Some)
        }
        None => Ok(None),
    }
}

/// Data that `recv_exact` has left, at most `len` bytes; None if there is none.
#[cold]
fn unread<'py>(socket: &Socket<'py>, len: Option<usize>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(len) = len else { return Ok(None) };
    let data = socket.object().call_method1("_take_unread", (len,))?;
    Ok((!data.is_none()).then_some(data))
}

/// `recv_into(buffer, nbytes=0, flags=0)`
pub(super) struct RecvInto(pub(super) RawArgs);

impl RecvInto {
    /// The buffer and the number of bytes of an ordinary call.
    #[inline]
    fn request(&self) -> Option<(*mut ffi::PyObject, Option<usize>)> {
        match self.0.only_positional() {
            Some(&[buffer]) => Some((buffer, None)),
            Some(&[buffer, number]) => Some((buffer, Some(ordinary_len(number)?))),
            _ => None,
        }
    }
}

impl Operation for RecvInto {
    #[inline]
    fn is_hopeless(&self, socket: &Socket<'_>) -> bool {
        socket.extra().is_drained.get() && !socket.extra().has_unread.get() && self.request().is_some()
    }

    #[inline]
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        let py = socket.py();
        let Some((object, len)) = self.request() else {
            socket.extra().is_drained.set(false);
            return by_base(socket, Method::RecvInto, Direction::Read, &self.0);
        };
        let fd = socket.descriptor()?;
        // SAFETY: an argument, which the caller keeps.
        let object = unsafe { Bound::from_borrowed_ptr(py, object) };
        let Some(buffer) = WritableBuffer::new(&object) else {
            return by_base(socket, Method::RecvInto, Direction::Read, &self.0);
        };
        let capacity = len.unwrap_or(buffer.len());
        if capacity == 0 || capacity > buffer.len() {
            drop(buffer);
            return by_base(socket, Method::RecvInto, Direction::Read, &self.0);
        }
        if socket.extra().has_unread.get() {
            drop(buffer);
            let count = socket
                .object()
                .call_method1("_take_unread_into", (&object, capacity))?;
            if !count.is_none() {
                return Ok(Attempt::Done(count));
            }
            return Ok(Attempt::Continues);
        }
        // SAFETY: the buffer is exported until it is dropped, and at least `capacity` long.
        let received = unsafe { socket::recv_now(fd, buffer.as_mut_ptr(), capacity) };
        drop(buffer);
        match received {
            Ok(len_bytes) => {
                socket.note_read(surroundings.reactor, fd, len_bytes, capacity);
                Ok(Attempt::Done(len_bytes.into_pyobject(py)?.into_any()))
            }
            Err(error) => failed(&error, Direction::Read),
        }
    }
}

/// An exported writable buffer, which is given back on drop.
struct WritableBuffer<'a, 'py> {
    view: ffi::Py_buffer,
    /// Keeps the proof that the thread is attached.
    _object: &'a Bound<'py, PyAny>,
}

impl<'a, 'py> WritableBuffer<'a, 'py> {
    /// None if the object has no such buffer; the base then raises the right error.
    fn new(object: &'a Bound<'py, PyAny>) -> Option<Self> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: attached; on success the view is released once, on drop.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut view, ffi::PyBUF_WRITABLE) } != 0 {
            drop(PyErr::fetch(object.py()));
            return None;
        }
        Some(Self {
            view,
            _object: object,
        })
    }

    fn len(&self) -> usize {
        self.view.len as usize
    }

    fn as_mut_ptr(&self) -> *mut u8 {
        self.view.buf.cast()
    }
}

impl Drop for WritableBuffer<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: filled by `new`, released once.
        unsafe { ffi::PyBuffer_Release(&raw mut self.view) };
    }
}

/// `recv_exact(n, /)`
pub(super) struct RecvExact {
    args: RawArgs,
    /// The object that is filled, an owned `bytes`, and how much of it is written.
    data: Option<NewBytes<'static>>,
    done: usize,
}

impl RecvExact {
    pub(super) fn new(args: RawArgs) -> Self {
        Self {
            args,
            data: None,
            done: 0,
        }
    }

    /// Makes the object; an error for a wrong number.
    #[cold]
    fn begin(&mut self, socket: &Socket<'_>) -> PyResult<usize> {
        // SAFETY: attached, as the socket proves; the bytes object does not outlive the call.
        let py = unsafe { Python::assume_attached() };
        let len = match self.args.only_positional() {
            // SAFETY: an argument, which the caller keeps.
            Some(&[number]) => unsafe { Bound::from_borrowed_ptr(py, number) }.extract::<isize>()?,
            _ => {
                return Err(PyTypeError::new_err("recv_exact() takes exactly one argument"));
            }
        };
        let len = usize::try_from(len)
            .map_err(|_| PyValueError::new_err("negative number of bytes in recv_exact"))?;
        let mut data = NewBytes::with_capacity(py, len)?;
        if socket.extra().has_unread.get()
            && let Some(unread) = unread(socket, Some(len))?
        {
            let unread = unread.cast::<PyBytes>()?;
            let part = unread.as_bytes();
            // SAFETY: `part` has at most `len` bytes; the new object is unshared and has so many.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), data.as_mut_ptr(), part.len().min(len)) };
            self.done = part.len().min(len);
        }
        self.data = Some(data);
        Ok(len)
    }
}

impl Operation for RecvExact {
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        let py = socket.py();
        if self.data.is_none() && self.begin(socket)? == 0 {
            self.data = None;
            return Ok(Attempt::Done(PyBytes::new(py, b"").into_any()));
        }
        let fd = socket.descriptor()?;
        let Some(data) = &mut self.data else {
            return Ok(Attempt::Done(none(py)));
        };
        let missing = data.capacity() - self.done;
        if missing > 0 {
            // SAFETY: the object is unshared and has `missing` bytes behind the first `done`.
            match unsafe { socket::recv_now(fd, data.as_mut_ptr().add(self.done), missing) } {
                Ok(0) => {
                    return Err(PyEOFError::new_err(format!(
                        "the stream ended after {} of {} bytes",
                        self.done,
                        data.capacity()
                    )));
                }
                Ok(len_bytes) => {
                    self.done += len_bytes;
                    socket.note_read(surroundings.reactor, fd, len_bytes, missing);
                    if self.done < data.capacity() {
                        return Ok(Attempt::Continues);
                    }
                }
                Err(error) => return failed(&error, Direction::Read),
            }
        }
        match self.data.take() {
            Some(data) => Ok(Attempt::Done(data.finish(self.done)?)),
            None => Ok(Attempt::Done(none(py))),
        }
    }

    /// What was received goes to the next call.
    #[cold]
    fn give_up(&mut self, socket: &Socket<'_>) {
        let Some(data) = self.data.take().filter(|_| self.done > 0) else {
            return;
        };
        let kept = data
            .finish(self.done)
            .and_then(|part| socket.object().call_method1("_put_back", (part,)));
        match kept {
            Ok(_) => socket.extra().has_unread.set(true),
            Err(error) => error.write_unraisable(socket.py(), Some(socket.object())),
        }
    }
}
