//! `loop.sock_recv` and its relatives, for programs that use sockets without a transport.
//!
//! - `operation`: the coroutine that a call returns
//! - `attempts`: the attempts of which an operation consists
//! - `plain_socket`: the sockets that native code may use without calling their methods
//!
//! Each operation (except `_wait_writable`) first makes the system call, and waits only if the call would block. While
//! it waits, it has an entry in the loop's fd table (`event_loop::reactor::descriptors::waiting`). When the socket is
//! ready, the loop only wakes the coroutine, and the coroutine repeats the call. So a task that is cancelled while it
//! waits has taken no data from the socket, and the next operation finds all of the data.

mod attempts;
mod operation;
mod plain_socket;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::args::Args;
use crate::binding::native_type::This;
use crate::binding::object_result::ObjectResult;
use crate::binding::rows::{extend_type, row};
use crate::event_loop::pyloop::LoopObject;
use attempts::OperationKind;

/// Makes the type of the operations, and adds the methods to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    plain_socket::register(module.py())?;
    operation::register(module)?;
    extend_type(&module.getattr("Loop")?, loop_methods())
}

/// A coroutine that returns `answer` in its first step. `loop.getaddrinfo` uses it when the answer is known already.
pub(crate) fn answered<'py>(this: This<'py, LoopObject>, answer: Bound<'py, PyAny>) -> ObjectResult<'py> {
    operation::new_operation(this, OperationKind::Answer, None, Some(answer), None)
}

/// A coroutine that raises `error` in its first step.
#[cold]
pub(crate) fn refused(this: This<'_, LoopObject>, error: PyErr) -> ObjectResult<'_> {
    let error = error.into_value(this.py()).into_bound(this.py()).into_any();
    operation::new_operation(this, OperationKind::Refusal, None, Some(error), None)
}

/// The operation for a call with a socket and up to two more arguments; `N` is the number of parameters of the method.
#[inline]
fn start<'py, const N: usize>(
    this: This<'py, LoopObject>,
    args: Args<'_, 'py>,
    kind: OperationKind,
) -> ObjectResult<'py> {
    let mut values = args.bind::<N>()?.into_iter();
    let (socket, first, second) = (
        values.next().flatten(),
        values.next().flatten(),
        values.next().flatten(),
    );
    let Some(socket) = socket else {
        return Err(PyTypeError::new_err("a socket is required as the first argument"));
    };
    operation::new_operation(this, kind, Some(socket), first, second)
}

fn sock_recv<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<2>(this, args, OperationKind::Recv)
}

fn sock_recv_into<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<2>(this, args, OperationKind::RecvInto)
}

fn sock_recvfrom<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<2>(this, args, OperationKind::RecvFrom)
}

fn sock_recvfrom_into<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<3>(this, args, OperationKind::RecvFromInto)
}

fn sock_sendall<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<2>(this, args, OperationKind::SendAll)
}

fn sock_sendto<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<3>(this, args, OperationKind::SendTo)
}

fn sock_accept<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<1>(this, args, OperationKind::Accept)
}

fn wait_writable<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start::<1>(this, args, OperationKind::Writable)
}

/// The methods that this module adds to the loop's type.
pub(crate) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            sock_recv,
            Loop.sock_recv,
            "Receive up to nbytes bytes from a socket."
        ),
        row!(
            method,
            sock_recv_into,
            Loop.sock_recv_into,
            "Receive into a buffer; return the number of bytes."
        ),
        row!(
            method,
            sock_recvfrom,
            Loop.sock_recvfrom,
            "Receive a datagram; return (data, address)."
        ),
        row!(
            method,
            sock_recvfrom_into,
            Loop.sock_recvfrom_into,
            "Receive a datagram into a buffer; return (number of bytes, address)."
        ),
        row!(
            method,
            sock_sendall,
            Loop.sock_sendall,
            "Send all of data on a connected socket."
        ),
        row!(
            method,
            sock_sendto,
            Loop.sock_sendto,
            "Send a datagram; return the number of bytes."
        ),
        row!(
            method,
            sock_accept,
            Loop.sock_accept,
            "Accept a connection; return (socket, address)."
        ),
        row!(
            method,
            wait_writable,
            Loop._wait_writable,
            "Wait until a socket can take data, is connected, or has failed."
        ),
    ]
}
