//! `accept` and `accept_many`, and the lookup of host names in addresses.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use grapeshot_core::sys::readiness;
use grapeshot_core::sys::socket::{self, Address};
use pyo3::exceptions::PyException;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::call::{self, Operation, Surroundings};
use super::receiving::failed;
use super::socket::Socket;
use crate::binding::args::Args;
use crate::binding::rows::row;
use crate::binding::{base_socket, errors, new_objects, socket_object};
use crate::event_loop::progress::{Attempt, WaitReason};
use crate::event_loop::reactor::Direction;

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method(call::run),
            |_| Accept,
            "accept()",
            "Accept a connection. Return (socket, address); the new socket has the class of this one."
        ),
        row!(
            method(call::run),
            AcceptMany,
            "accept_many(max=0, /)",
            "Accept all pending connections, but at most max (0: no limit). Return a list of (socket, address)."
        ),
    ]
}

/// `accept()`
struct Accept;

impl Operation for Accept {
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        if socket::is_blocking(socket.descriptor()?) {
            return accept_shared(socket, surroundings);
        }
        match accept(socket, surroundings)? {
            Ok(accepted) => Ok(Attempt::Done(connection(socket, accepted)?.into_any())),
            Err(error) => failed(&error, Direction::Read),
        }
    }
}

/// `accept` on a descriptor that has been set to blocking mode, most likely by a process that shares it. That process
/// may take the connection just before this call of `accept`, which would then block. No flag of the system call
/// prevents that. So if a coro accepts, a real thread makes the system call for it.
#[cold]
fn accept_shared<'py>(socket: &Socket<'py>, surroundings: &Surroundings<'_>) -> PyResult<Attempt<'py>> {
    let (py, fd) = (socket.py(), socket.descriptor()?);
    if surroundings.reactor.is_some() && !socket.extra().is_at_once() {
        let accept = py.import("grapeshot.coro._at_once")?.getattr("accept")?;
        let accepted = accept.call1((socket.object(),))?;
        return Ok(if accepted.is_none() {
            Attempt::MustWait(WaitReason::WouldBlock(Direction::Read))
        } else {
            Attempt::Done(accepted)
        });
    }
    if !readiness::wait_ready(fd, false, Some(0)).map_err(|error| errors::os_error(&error))? {
        return Ok(Attempt::MustWait(WaitReason::WouldBlock(Direction::Read)));
    }
    match py.detach(|| socket::accept(fd)) {
        Ok(accepted) => Ok(Attempt::Done(connection(socket, accepted)?.into_any())),
        Err(error) => failed(&error, Direction::Read),
    }
}

/// `accept_many(max=0, /)`: returns a list of at least one item, each of them the result of an `accept`.
struct AcceptMany(Args<'static, 'static>);

impl Operation for AcceptMany {
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>> {
        let py = socket.py();
        let limit = match self.0.only_positional() {
            Some(&[]) => 0,
            // SAFETY: an argument, which the caller keeps alive.
            Some(&[number]) => unsafe { Bound::from_borrowed_ptr(py, number) }.extract::<usize>()?,
            _ => {
                return Err(pyo3::exceptions::PyTypeError::new_err(
                    "accept_many() takes at most one argument, by position",
                ));
            }
        };
        if socket::is_blocking(socket.descriptor()?) {
            return Ok(match accept_shared(socket, surroundings)? {
                Attempt::Done(connection) => {
                    let connections = new_objects::list(py)?;
                    connections.append(connection)?;
                    Attempt::Done(connections.into_any())
                }
                waits @ Attempt::MustWait(_) => waits,
            });
        }
        let connections = new_objects::list(py)?;
        loop {
            // If something fails after connections have been accepted, they must not be lost. So a failed call of
            // `accept` is ignored: if the error persists, the next call raises it. If the socket object of a connection
            // cannot be made, the exception is reported. (But an exception such as `Interrupted` or KeyboardInterrupt
            // ends the call, and the connections are closed.)
            match accept(socket, surroundings) {
                Ok(Ok(accepted)) => {
                    let made = connection(socket, accepted);
                    if let Err(error) = made.and_then(|connection| connections.append(connection)) {
                        if connections.is_empty() || !error.is_instance_of::<PyException>(py) {
                            return Err(error);
                        }
                        error.write_unraisable(py, Some(socket.object()));
                        break;
                    }
                }
                Ok(Err(error)) if connections.is_empty() => return failed(&error, Direction::Read),
                Err(error) if connections.is_empty() => return Err(error),
                Ok(Err(_)) | Err(_) => break,
            }
            if connections.len() == limit {
                break;
            }
        }
        Ok(Attempt::Done(connections.into_any()))
    }
}

/// Makes one system call, `accept`. The inner result is the result of that call. The outer result is Err only if the
/// descriptor could not be read from the socket object.
fn accept(socket: &Socket<'_>, surroundings: &Surroundings<'_>) -> PyResult<io::Result<(OwnedFd, Address)>> {
    let accepted = socket::accept(socket.descriptor()?);
    if let Some(reactor) = surroundings.reactor {
        reactor.probe.counters.note_accept(&accepted);
    }
    Ok(accepted)
}

/// The socket of an accepted connection, and the address of the peer. The class of the new socket is the listener's
/// `_accepted_class`, or, if that is None, the listener's own class.
fn connection<'py>(listener: &Socket<'py>, (fd, peer): (OwnedFd, Address)) -> PyResult<Bound<'py, PyTuple>> {
    let py = listener.py();
    let [family, kind, protocol] = base_socket::shape(listener.object())?;
    let address = if socket_object::is_known_family(family.extract()?) {
        socket_object::address_object(py, &peer)?
    } else {
        crate::binding::object_result::none(py)
    };
    let class = match new_objects::attribute(listener.object(), "_accepted_class")? {
        none if none.is_none() => listener.object().get_type(),
        class => class.cast_into::<PyType>()?,
    };
    let arguments = new_objects::dict(py)?;
    let number = new_objects::int(py, fd.as_raw_fd().into())?;
    let values = [
        ("family", family),
        ("type", nonblocking(&kind)?),
        ("proto", protocol),
        ("fileno", number),
    ];
    for (name, value) in values {
        arguments.set_item(new_objects::string(py, name)?, value)?;
    }
    let connection = socket_object::take_over(&class, &PyTuple::empty(py), Some(&arguments), Some(fd))?;
    if let Some(accepted) = Socket::from_object(&connection) {
        let module = new_objects::module(py, "_socket")?;
        let default: Option<f64> = new_objects::attribute(&module, "getdefaulttimeout")?
            .call0()?
            .extract()?;
        accepted.extra().set_timeout_s(default);
    }
    new_objects::tuple(py, [connection, address].into_iter())
}

/// The socket's type, with the flag that tells the constructor that the descriptor is already non-blocking.
fn nonblocking<'py>(kind: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let kind_number: i32 = kind.extract()?;
    new_objects::int(kind.py(), (kind_number | socket::NONBLOCKING_TYPE).into())
}

/// The address, with a numeric host in place of a host name. The package asks the resolver for the numeric host, and
/// the coro waits for that. An address without a host name is returned unchanged.
pub(super) fn resolved<'py>(socket: &Socket<'py>, address: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = socket.py();
    let family = base_socket::family(socket.object())?;
    let has_host = matches!(family, libc::AF_INET | libc::AF_INET6) && address.is_instance_of::<PyTuple>();
    if !has_host || socket_object::native_address(family, &address).is_some() {
        return Ok(address);
    }
    py.import("grapeshot.coro._dns")?
        .getattr("numeric_address")?
        .call1((family, address))
}
