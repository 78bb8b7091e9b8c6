//! The methods that send: `send`, `sendall`, `write`, `sendto`, `sendmsg`.

use std::ffi::c_int;

use grapeshot_core::sys::socket;
use pyo3::ffi;
use pyo3::prelude::*;

use super::by_base::{BaseCall, Method};
use super::call::{self, Operation, Surroundings};
use super::receiving::failed;
use super::socket::Socket;
use crate::binding::args::Args;
use crate::binding::exports::View;
use crate::binding::object_result::none;
use crate::binding::rows::row;
use crate::event_loop::progress::{Attempt, WaitReason};
use crate::event_loop::reactor::Direction;

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method(call::run),
            SendOnce::new,
            "send(data, flags=0, /)",
            "Send some or all of data. Return how many bytes were sent."
        ),
        row!(
            method(call::run),
            |args| SendAll::new(args, false),
            "sendall(data, flags=0, /)",
            "Send all of data. After an exception it is unknown how much was sent."
        ),
        row!(
            method(call::run),
            |args| SendAll::new(args, true),
            "write(data, /)",
            "Send all of data. Return its length."
        ),
        row!(
            method(call::run),
            |args| BaseCall::new(Method::SendTo, args),
            "sendto(data, flags_or_address, address=..., /)",
            "Send a datagram to an address, whose host may be a name. Return the number of bytes."
        ),
        row!(
            method(call::run),
            |args| BaseCall::new(Method::SendMsg, args),
            "sendmsg(buffers, ancdata=(), flags=0, address=None, /)",
            "Send several buffers and ancillary data. Return the number of bytes."
        ),
    ]
}

/// The content of an exact `bytes` object.
#[inline]
fn exact_bytes<'a>(object: *mut ffi::PyObject) -> Option<&'a [u8]> {
    // SAFETY: an argument, which the caller keeps alive during the call; bytes objects do not change.
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
struct SendOnce(BaseCall);

impl SendOnce {
    #[inline]
    const fn new(args: Args<'static, 'static>) -> Self {
        Self(BaseCall::new(Method::Send, args))
    }
}

impl Operation for SendOnce {
    #[inline]
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        let Some(&[object]) = self.0.args.only_positional() else {
            return self.0.attempt(socket, surroundings);
        };
        let Some(data) = exact_bytes(object) else {
            return self.0.attempt(socket, surroundings);
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

/// `sendall(data, flags=0)`, and also `write(data)`, which returns the length.
struct SendAll {
    args: Args<'static, 'static>,
    view: Option<Box<View>>,
    sent: usize,
    is_write: bool,
}

impl SendAll {
    #[inline]
    fn new(args: Args<'static, 'static>, is_write: bool) -> Self {
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
                // SAFETY: an argument, which the caller keeps alive.
                let flags = unsafe { Bound::from_borrowed_ptr(socket.py(), flags) };
                (object, flags.extract::<c_int>()?)
            }
            Some(_) if self.is_write => return Err(self.args.wrong_count("exactly 1", None)),
            // The base's method raises TypeError.
            _ => return BaseCall::new(Method::SendAll, self.args).attempt(socket, surroundings),
        };
        let fd = socket.descriptor()?;
        let data = if let Some(data) = exact_bytes(object) {
            data
        } else {
            let view = if let Some(view) = self.view.take() {
                view
            } else {
                // SAFETY: an argument, which the caller keeps alive.
                let object = unsafe { Bound::from_borrowed_ptr(socket.py(), object) };
                View::boxed(&object, ffi::PyBUF_SIMPLE)?
            };
            self.view.insert(view).as_bytes()
        };
        // Even for empty data there is one system call, as in Python, because the call may fail.
        match socket::send_with(fd, &data[self.sent..], flags) {
            Ok(sent) => {
                surroundings.note_write(sent);
                self.sent += sent;
                if self.sent < data.len() {
                    Ok(Attempt::MustWait(WaitReason::Fairness))
                } else {
                    self.done(socket)
                }
            }
            Err(error) => failed(&error, Direction::Write),
        }
    }
}
