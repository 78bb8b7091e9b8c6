//! The methods that send: `send`, `sendall`, `sendto`.

use std::ffi::c_int;

use grapeshot_core::sys::socket;
use pyo3::ffi;
use pyo3::prelude::*;

use super::call::{Attempt, Operation, RawArgs, Surroundings};
use super::receiving::{by_base, failed};
use super::socket::Socket;
use super::socket_type::Method;
use crate::binding::native_type::none;
use crate::event_loop::reactor::Direction;

/// An exported buffer, in a box because its address must not change.
struct View(Box<ffi::Py_buffer>);

impl View {
    /// TypeError or BufferError for an object that is not bytes-like and contiguous.
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: attached; on success the view is released once, on drop.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_SIMPLE) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self(view))
    }

    fn as_bytes(&self) -> &[u8] {
        match self.0.len {
            0 => &[],
            // SAFETY: the buffer is exported until the drop.
            len => unsafe { std::slice::from_raw_parts(self.0.buf.cast(), len as usize) },
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: filled by `new`, released once; methods end attached.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
    }
}

/// The content of an exact `bytes` object.
#[inline]
fn exact_bytes<'a>(object: *mut ffi::PyObject) -> Option<&'a [u8]> {
    // SAFETY: an argument, which the caller keeps for the call; bytes do not change.
    unsafe {
        if ffi::PyBytes_CheckExact(object) == 0 {
            return None;
        }
        Some(std::slice::from_raw_parts(
            ffi::PyBytes_AS_STRING(object).cast(),
            ffi::Py_SIZE(object) as usize,
        ))
    }
}

/// `send(data, flags=0)`
pub(super) struct SendOnce(pub(super) RawArgs);

impl Operation for SendOnce {
    #[inline]
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        let Some(&[object]) = self.0.only_positional() else {
            return by_base(socket, Method::Send, Direction::Write, &self.0);
        };
        let Some(data) = exact_bytes(object) else {
            return by_base(socket, Method::Send, Direction::Write, &self.0);
        };
        match socket::send_now(socket.descriptor()?, data) {
            Ok(sent) => {
                surroundings.note_write(sent);
                Ok(Attempt::Done(sent.into_pyobject(socket.py())?.into_any()))
            }
            Err(error) => failed(&error, Direction::Write),
        }
    }
}

/// `sendall(data, flags=0)`, and `write(data)`, which returns the length.
pub(super) struct SendAll {
    args: RawArgs,
    view: Option<View>,
    sent: usize,
    is_write: bool,
}

impl SendAll {
    #[inline]
    pub(super) fn new(args: RawArgs, is_write: bool) -> Self {
        Self {
            args,
            view: None,
            sent: 0,
            is_write,
        }
    }

    fn done<'py>(&self, socket: &Socket<'py>) -> PyResult<Attempt<'py>> {
        Ok(Attempt::Done(if self.is_write {
            self.sent.into_pyobject(socket.py())?.into_any()
        } else {
            none(socket.py())
        }))
    }
}

impl Operation for SendAll {
    #[inline]
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        let (object, flags) = match self.args.only_positional() {
            Some(&[object]) => (object, 0),
            Some(&[object, flags]) if !self.is_write => {
                // SAFETY: an argument, which the caller keeps.
                let flags = unsafe { Bound::from_borrowed_ptr(socket.py(), flags) };
                (object, flags.extract::<c_int>()?)
            }
            // It raises TypeError.
            _ => return by_base(socket, Method::SendAll, Direction::Write, &self.args),
        };
        let fd = socket.descriptor()?;
        let data = if let Some(data) = exact_bytes(object) {
            data
        } else {
            let view = match self.view.take() {
                Some(view) => view,
                // SAFETY: as above.
                None => View::new(&unsafe { Bound::from_borrowed_ptr(socket.py(), object) })?,
            };
            self.view.insert(view).as_bytes()
        };
        // Empty data is sent once, too, as Python does: the call may fail.
        match socket::send_with(fd, &data[self.sent..], flags) {
            Ok(sent) => {
                surroundings.note_write(sent);
                self.sent += sent;
                if self.sent < data.len() {
                    Ok(Attempt::Continues)
                } else {
                    self.done(socket)
                }
            }
            Err(error) => failed(&error, Direction::Write),
        }
    }
}

/// `sendto(data[, flags], address)`
pub(super) struct SendTo {
    args: RawArgs,
    /// The address with a number in place of its name, once that is resolved. An owned reference.
    resolved: Option<Py<PyAny>>,
}

impl SendTo {
    pub(super) fn new(args: RawArgs) -> Self {
        Self { args, resolved: None }
    }
}

impl Operation for SendTo {
    fn attempt<'py>(&mut self, socket: &Socket<'py>, _: &Surroundings<'_>) -> PyResult<Attempt<'py>> {
        let py = socket.py();
        let values = self.args.positional();
        let is_usual = self.args.kwnames.is_null() && matches!(values.len(), 2 | 3);
        let Some(&last) = values.last().filter(|_| is_usual) else {
            return by_base(socket, Method::SendTo, Direction::Write, &self.args);
        };
        if self.resolved.is_none() {
            // SAFETY: an argument, which the caller keeps.
            let address = unsafe { Bound::from_borrowed_ptr(py, last) };
            self.resolved = Some(super::accepting::resolved(socket, address)?.unbind());
        }
        let mut replaced = values.to_vec();
        if let (Some(place), Some(resolved)) = (replaced.last_mut(), &self.resolved) {
            *place = resolved.as_ptr();
        }
        let args = RawArgs::new(
            replaced.as_ptr(),
            replaced.len() as ffi::Py_ssize_t,
            self.args.kwnames,
        );
        by_base(socket, Method::SendTo, Direction::Write, &args)
    }
}
