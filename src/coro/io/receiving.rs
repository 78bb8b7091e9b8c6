//! The methods that receive: `recv` and its relatives.
//!
//! `recv_exact` and the usual forms of `recv` and `recv_into` are implemented here: those with positional arguments,
//! without flags, and with a length that is not 0 and fits.
//! All other calls go to the base's own methods, so their arguments, results and errors are exactly Python's. When a
//! wait is needed, the base's methods raise `BlockingIOError`.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::RawFd;

use grapeshot_core::sys::socket;
use pyo3::exceptions::{PyEOFError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::by_base::{BaseCall, Method};
use super::call::{self, Operation, Surroundings};
use super::socket::Socket;
use crate::binding::args::Args;
use crate::binding::errors;
use crate::binding::exports::View;
use crate::binding::lengths::{is_zero, ordinary_len};
use crate::binding::new_bytes::NewBytes;
use crate::binding::object_result::none;
use crate::binding::rows::row;
use crate::event_loop::progress::{Attempt, WaitReason};
use crate::event_loop::reactor::{Direction, Received, receive_direct};

/// In a thread in which no coro runs, `receive` allocates at most this many bytes before it knows how much data there
/// is. If a datagram may be longer, the base handles the call.
const MAX_UNKNOWN_LEN: usize = 256 * 1024;

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method(call::run),
            Recv::new,
            "recv(bufsize, flags=0, /)",
            "Receive up to bufsize bytes. Returns b'' at the end of the stream."
        ),
        row!(
            method(call::run),
            RecvInto::new,
            "recv_into(buffer, nbytes=0, flags=0)",
            "Receive into a buffer. Return the number of bytes."
        ),
        row!(
            method(call::run),
            RecvExact::new,
            "recv_exact(nbytes, /)",
            "\
                Receive exactly nbytes bytes. Raises EOFError if the stream ends earlier.\n\n\
                If the call fails or is interrupted, the next recv() returns the bytes that were received before."
        ),
        row!(
            method(call::run),
            |args| BaseCall::new(Method::RecvFrom, args),
            "recvfrom(bufsize, flags=0, /)",
            "Receive a datagram. Return (data, address)."
        ),
        row!(
            method(call::run),
            |args| BaseCall::new(Method::RecvFromInto, args),
            "recvfrom_into(buffer, nbytes=0, flags=0)",
            "Receive a datagram into a buffer. Return (number of bytes, address)."
        ),
        row!(
            method(call::run),
            |args| BaseCall::new(Method::RecvMsg, args),
            "recvmsg(bufsize, ancbufsize=0, flags=0, /)",
            "Receive data and ancillary data. Return (data, ancdata, msg_flags, address)."
        ),
        row!(
            method(call::run),
            |args| BaseCall::new(Method::RecvMsgInto, args),
            "recvmsg_into(buffers, ancbufsize=0, flags=0, /)",
            "Receive into several buffers. Return (number of bytes, ancdata, msg_flags, address)."
        ),
    ]
}

/// Turns the error of a system call into the result of an attempt.
#[inline]
pub(super) fn failed<'py>(error: &io::Error, direction: Direction) -> PyResult<Attempt<'py>> {
    if error.kind() == io::ErrorKind::WouldBlock {
        return Ok(Attempt::MustWait(WaitReason::WouldBlock(direction)));
    }
    Err(errors::os_error(error))
}

/// `recv(bufsize, flags=0)`
struct Recv {
    call: BaseCall,
    /// The number of bytes, for a call of the usual form.
    len: Option<NonZeroUsize>,
}

impl Recv {
    #[inline]
    fn new(args: Args<'static, 'static>) -> Self {
        let len = match args.only_positional() {
            // SAFETY: an argument, which the caller keeps alive.
            Some(&[number]) => unsafe { ordinary_len(number) },
            // SAFETY: as above. The second argument is the flags.
            Some(&[number, flags]) if unsafe { is_zero(flags) } => unsafe { ordinary_len(number) },
            _ => None,
        };
        Self {
            call: BaseCall::new(Method::Recv, args),
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
    fn is_hopeless(&mut self, socket: &Socket<'_>) -> bool {
        socket.extra().is_drained.get() && !socket.extra().has_unread.get() && self.len().is_some()
    }

    #[inline]
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        if socket.extra().has_unread.get()
            && socket.descriptor()? >= 0
            && let Some(data) = unread(socket, self.len())?
        {
            return Ok(Attempt::Done(data));
        }
        let Some(len) = self.len() else {
            return self.call.attempt(socket, surroundings);
        };
        let fd = socket.descriptor()?;
        match receive(socket, surroundings, fd, len)? {
            Some(Ok(received)) => {
                socket.note_read(surroundings.reactor, fd, received.len_bytes, received.capacity);
                Ok(Attempt::Done(received.data))
            }
            Some(Err(error)) => failed(&error, Direction::Read),
            None => self.call.attempt(socket, surroundings),
        }
    }
}

/// Receives up to `len` bytes. None if the base must handle the call.
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

/// Received data that was put back (`_put_back`), for example by `recv_exact`: at most `len` bytes. None if no such
/// data is left, or if `len` is None.
#[cold]
fn unread<'py>(socket: &Socket<'py>, len: Option<usize>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(len) = len else { return Ok(None) };
    let data = socket.object().call_method1("_take_unread", (len,))?;
    Ok((!data.is_none()).then_some(data))
}

/// `recv_into(buffer, nbytes=0, flags=0)`
struct RecvInto {
    call: BaseCall,
    /// The export of the buffer, in a call that waits. It keeps the buffer from being resized during the wait.
    kept: Option<Box<View>>,
}

impl RecvInto {
    #[inline]
    fn new(args: Args<'static, 'static>) -> Self {
        Self {
            call: BaseCall::new(Method::RecvInto, args),
            kept: None,
        }
    }

    /// The buffer and the number of bytes, for a call of the usual form.
    #[inline]
    fn request<'py>(&self, py: Python<'py>) -> Option<(Bound<'py, PyAny>, Option<usize>)> {
        let (buffer, len) = match self.call.args.only_positional() {
            Some(&[buffer]) => (buffer, None),
            // SAFETY: an argument, which the caller keeps alive.
            Some(&[buffer, number]) => (buffer, Some(unsafe { ordinary_len(number) }?)),
            // SAFETY: as above. The third argument is the flags.
            Some(&[buffer, number, flags]) if unsafe { is_zero(flags) } => {
                // SAFETY: as above.
                (buffer, Some(unsafe { ordinary_len(number) }?))
            }
            _ => return None,
        };
        // SAFETY: an argument, which the caller keeps alive.
        Some((unsafe { Bound::from_borrowed_ptr(py, buffer) }, len))
    }

    /// Exports the buffer until the call is over. Returns false if the base must handle the arguments.
    fn keep(&mut self, py: Python<'_>) -> bool {
        if self.kept.is_none()
            && let Some((object, len)) = self.request(py)
        {
            self.kept = View::boxed(&object, ffi::PyBUF_WRITABLE)
                .ok()
                .filter(|view| capacity_of(view, len).is_some());
        }
        self.kept.is_some()
    }

    /// Receives into the buffer, for a call of the usual form. None if the base must handle the arguments.
    #[inline]
    fn receive(&mut self, socket: &Socket<'_>, fd: RawFd) -> Option<(io::Result<usize>, usize)> {
        let (object, len) = self.request(socket.py())?;
        let opened;
        let view = if let Some(kept) = &self.kept {
            kept
        } else {
            opened = View::new(&object, ffi::PyBUF_WRITABLE).ok()?;
            &opened
        };
        let capacity = capacity_of(view, len)?;
        // SAFETY: the buffer is exported until the view is dropped, and at least `capacity` long.
        let received = unsafe { socket::recv_now(fd, view.as_mut_ptr(), capacity) };
        Some((received, capacity))
    }

    /// Copies data that was put back (`_put_back`) into the buffer, and returns its length. None if there is no such
    /// data, or if the base must handle the arguments.
    #[cold]
    fn take_unread<'py>(&mut self, socket: &Socket<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some((object, len)) = self.request(socket.py()).filter(|_| self.keep(socket.py())) else {
            return Ok(None);
        };
        let Some(capacity) = self.kept.as_ref().and_then(|view| capacity_of(view, len)) else {
            return Ok(None);
        };
        let count = socket
            .object()
            .call_method1("_take_unread_into", (&object, capacity))?;
        Ok((!count.is_none()).then_some(count))
    }
}

/// The number of bytes that a call may receive. None if the base must handle the arguments, because the buffer is empty
/// or the call asks for more bytes than the buffer holds.
#[inline]
fn capacity_of(view: &View, len: Option<usize>) -> Option<usize> {
    let capacity = len.unwrap_or(view.len());
    (capacity > 0 && capacity <= view.len()).then_some(capacity)
}

impl Operation for RecvInto {
    #[inline]
    fn is_hopeless(&mut self, socket: &Socket<'_>) -> bool {
        socket.extra().is_drained.get() && !socket.extra().has_unread.get() && self.keep(socket.py())
    }

    #[inline]
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        if socket.extra().has_unread.get()
            && socket.descriptor()? >= 0
            && let Some(count) = self.take_unread(socket)?
        {
            return Ok(Attempt::Done(count));
        }
        let fd = socket.descriptor()?;
        match self.receive(socket, fd) {
            Some((Ok(len_bytes), capacity)) => {
                socket.note_read(surroundings.reactor, fd, len_bytes, capacity);
                Ok(Attempt::Done(len_bytes.into_pyobject(socket.py())?.into_any()))
            }
            Some((Err(error), _)) => {
                self.keep(socket.py());
                failed(&error, Direction::Read)
            }
            None => self.call.attempt(socket, surroundings),
        }
    }
}

/// `recv_exact(nbytes, /)`
struct RecvExact {
    args: Args<'static, 'static>,
    /// The `bytes` object that is being filled; `done` is the number of bytes written.
    data: Option<NewBytes<'static>>,
    done: usize,
}

impl RecvExact {
    fn new(args: Args<'static, 'static>) -> Self {
        Self {
            args,
            data: None,
            done: 0,
        }
    }

    /// Allocates the object, copies into it the data that was put back, and returns the object's length. Err if the
    /// argument is not a valid number.
    #[cold]
    fn begin(&mut self, socket: &Socket<'_>) -> PyResult<usize> {
        let py = self.args.py();
        let len = match self.args.only_positional() {
            // SAFETY: an argument, which the caller keeps alive.
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
            // SAFETY: at most `len` bytes are copied; the new object is unshared and has `len` bytes.
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
            // SAFETY: the object is unshared and has `missing` bytes after the first `done`.
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
                        return Ok(Attempt::MustWait(WaitReason::Fairness));
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

    /// Puts the received part back, for the next call that reads.
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
