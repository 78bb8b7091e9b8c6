//! Plain sockets: `sock_recv` and its relatives, for programs that keep the socket in their own hands.
//!
//! - `operation`: the coroutine that a call returns
//! - `attempts`: what it does, one attempt at a time
//! - `waiter`: what it yields when it has to wait
//! - `plain_socket`: which sockets need no method call
//! - `literals`: `getaddrinfo` where nothing has to be asked, by the same kind of coroutine
//!
//! Each operation makes the system call first and waits only if it would block, in the loop's fd table
//! (`event_loop::reactor::watches`). The call is repeated by the coroutine, never by the event, so a task that is
//! cancelled while it waits has taken nothing from the socket, and the next operation finds it as it was.

mod attempts;
mod literals;
mod operation;
mod plain_socket;
mod waiter;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::{Args, This, method};
use crate::event_loop::pyloop::LoopObject;
use attempts::Kind;

type Object<'py> = PyResult<Bound<'py, PyAny>>;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    plain_socket::register(module.py())?;
    waiter::register(module)?;
    operation::register(module)
}

/// The operation of a call with a socket and up to two more arguments, `required` of all of them.
#[inline]
fn start<'py, const N: usize>(
    this: This<'py, LoopObject>,
    args: Args<'_, 'py>,
    kind: Kind,
    names: [&str; N],
    required: usize,
) -> Object<'py> {
    let given = args.positional().len();
    let mut values = if args.kwnames().is_null() && (required..=N).contains(&given) {
        std::array::from_fn(|index| args.get(index))
    } else {
        args.bind(kind.name(), names)?
    };
    if let Some(missing) = values[..required].iter().position(Option::is_none) {
        return Err(PyTypeError::new_err(format!(
            "{}() missing required argument: '{}'",
            kind.name(),
            names[missing]
        )));
    }
    let mut values = values.iter_mut().map(Option::take);
    let (socket, first, second) = (
        values.next().flatten(),
        values.next().flatten(),
        values.next().flatten(),
    );
    let Some(socket) = socket else {
        return Err(PyTypeError::new_err("a socket is required"));
    };
    operation::new_operation(this, kind, Some(socket), first, second)
}

fn sock_recv<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::Recv, ["sock", "nbytes"], 2)
}

fn sock_recv_into<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::RecvInto, ["sock", "buf"], 2)
}

fn sock_recvfrom<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::RecvFrom, ["sock", "bufsize"], 2)
}

fn sock_recvfrom_into<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::RecvFromInto, ["sock", "buf", "nbytes"], 2)
}

fn sock_sendall<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::SendAll, ["sock", "data"], 2)
}

fn sock_sendto<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::SendTo, ["sock", "data", "address"], 3)
}

fn sock_accept<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::Accept, ["sock"], 1)
}

fn wait_writable<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    start(this, args, Kind::Writable, ["sock"], 1)
}

/// Methods that this room adds to the loop's type.
pub(super) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![
        method!(
            LoopObject,
            c"sock_recv",
            sock_recv,
            c"Receive up to nbytes bytes from a socket."
        ),
        method!(
            LoopObject,
            c"sock_recv_into",
            sock_recv_into,
            c"Receive into a buffer; the number of bytes."
        ),
        method!(
            LoopObject,
            c"sock_recvfrom",
            sock_recvfrom,
            c"Receive a datagram: (data, address)."
        ),
        method!(
            LoopObject,
            c"sock_recvfrom_into",
            sock_recvfrom_into,
            c"Receive a datagram into a buffer: (number of bytes, address)."
        ),
        method!(
            LoopObject,
            c"sock_sendall",
            sock_sendall,
            c"Send all of data on a connected socket."
        ),
        method!(
            LoopObject,
            c"sock_sendto",
            sock_sendto,
            c"Send a datagram; the number of bytes."
        ),
        method!(
            LoopObject,
            c"sock_accept",
            sock_accept,
            c"Accept a connection: (socket, address)."
        ),
        method!(
            LoopObject,
            c"_wait_writable",
            wait_writable,
            c"Wait until a socket takes data, is connected, or has failed."
        ),
        literals::loop_method(),
    ]
}
