//! The Python interface of datagram transports: the methods of `asyncio.DatagramTransport`, the additional methods of
//! asyncio's own transports, and `loop._datagram`. `get_extra_info` is inherited from asyncio.

use std::ptr;
use std::sync::atomic::AtomicPtr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Datagram, DatagramBody, Flags, lifecycle, receiving, sending};
use crate::binding::args::Args;
use crate::binding::attributes::shown;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::binding::socket_object;
use crate::event_loop::pyloop::LoopObject;
use crate::transports::ending;
use crate::transports::object;

pub(super) static DATAGRAM_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

#[inline]
fn sendto<'py>(this: Datagram<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let [data, addr] = if args.kwnames().is_null() && matches!(args.positional().len(), 1 | 2) {
        [args.get(0), args.get(1)]
    } else {
        args.bind()?
    };
    let Some(data) = data else {
        return Err(PyTypeError::new_err(
            "sendto() missing 1 required positional argument: 'data'",
        ));
    };
    let addr = addr.unwrap_or_else(|| none(py));
    sending::send_to(this, &data, &addr)?;
    Ok(none(py))
}

fn close<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "close", || {
        object::check_thread(this)?;
        lifecycle::close(this)
    })
}

fn abort<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "abort", || {
        object::check_thread(this)?;
        ending::finish(this, None)
    })
}

fn is_closing<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.flags.has(Flags::CLOSING)))
}

fn is_reading<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(
        this.py(),
        !this.flags.has(Flags::CLOSING | Flags::PAUSED),
    ))
}

fn pause_reading<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    receiving::pause(this)?;
    Ok(none(this.py()))
}

fn resume_reading<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    receiving::resume(this)?;
    Ok(none(this.py()))
}

fn get_write_buffer_size<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this.outgoing_len.get().into_pyobject(this.py())?.into_any())
}

fn get_write_buffer_limits<'py>(this: Datagram<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this.watermarks.limits().into_pyobject(this.py())?.into_any())
}

fn set_write_buffer_limits<'py>(this: Datagram<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limits = args.bind()?;
    this.watermarks.set(limits)?;
    sending::maybe_pause(this)?;
    Ok(none(this.py()))
}

fn set_protocol<'py>(this: Datagram<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(protocol) = args.get(0) {
        this.calls.bind(&protocol)?;
    }
    Ok(none(this.py()))
}

// ---- on the loop ---------------------------------------------------------------------------------------------

/// `loop._datagram(sock, protocol, remote_address=None, waiter=None)`: makes the transport of a non-blocking socket.
fn open_datagram<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor().check_closed()?;
    let [socket, protocol, remote, waiter] = args.bind()?;
    let (Some(socket), Some(protocol)) = (socket, protocol) else {
        return Err(PyTypeError::new_err("_datagram() takes a socket and a protocol"));
    };
    let given = |value: Option<Bound<'py, PyAny>>| value.filter(|value| !value.is_none());
    lifecycle::open(&this.to_bound(), &socket, &protocol, given(remote), given(waiter))
}

/// The methods that this module adds to the loop's type.
pub(in crate::transports) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![row!(
        method,
        open_datagram,
        Loop._datagram,
        "Make the transport of a datagram socket."
    )]
}

fn sending_methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            sendto,
            DatagramTransport.sendto,
            "Send bytes-like data as one datagram, or queue it if the kernel takes no more."
        ),
        row!(
            method,
            get_write_buffer_size,
            DatagramTransport.get_write_buffer_size,
            "The number of bytes that the kernel has not taken yet; since 3.13 with 8 more per datagram."
        ),
        row!(
            method,
            get_write_buffer_limits,
            DatagramTransport.get_write_buffer_limits,
            "The (low, high) watermarks in bytes."
        ),
        row!(
            method,
            set_write_buffer_limits,
            DatagramTransport.set_write_buffer_limits,
            "Set the watermarks in bytes; ValueError unless high >= low >= 0."
        ),
    ]
}

fn other_methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            threadsafe_method,
            close,
            DatagramTransport.close,
            "Send the queued datagrams, then close the socket."
        ),
        row!(
            threadsafe_method,
            abort,
            DatagramTransport.abort,
            "Close the socket now."
        ),
        row!(
            threadsafe_method,
            is_closing,
            DatagramTransport.is_closing,
            "True once the transport is ending."
        ),
        row!(
            method,
            is_reading,
            DatagramTransport.is_reading,
            "True while datagrams are delivered."
        ),
        row!(
            method,
            pause_reading,
            DatagramTransport.pause_reading,
            "Stop delivering until resume_reading() is called."
        ),
        row!(
            method,
            resume_reading,
            DatagramTransport.resume_reading,
            "Deliver again after pause_reading()."
        ),
        row!(
            method,
            object::get_protocol::<DatagramBody>,
            DatagramTransport.get_protocol,
            "The protocol, None once connection_lost() has run."
        ),
        row!(
            method,
            set_protocol,
            DatagramTransport.set_protocol,
            "Use another protocol from the next event on."
        ),
    ]
}

// ---- private attributes of asyncio's transport that programs use ------------------------------------------------

/// A `TransportSocket`, as from `get_extra_info("socket")`. asyncio's attribute is the socket itself.
fn get_socket(this: Datagram<'_>) -> ObjectResult<'_> {
    let py = this.py();
    match this.socket.get(py) {
        Some(socket) => socket_object::guarded(&socket),
        None => Ok(none(py)),
    }
}

fn get_number(this: Datagram<'_>) -> ObjectResult<'_> {
    object::number(this.py(), this.fileno)
}

fn get_remote(this: Datagram<'_>) -> ObjectResult<'_> {
    Ok(this.remote.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn get_closing(this: Datagram<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.flags.has(Flags::CLOSING)))
}

fn get_lost(this: Datagram<'_>) -> ObjectResult<'_> {
    object::number(this.py(), this.lost_writes.get())
}

fn get_buffer_size(this: Datagram<'_>) -> ObjectResult<'_> {
    object::number(this.py(), this.outgoing_len.get())
}

fn is_protocol_paused(this: Datagram<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.watermarks.is_paused()))
}

#[rustfmt::skip] // one row, one line
fn getters() -> Vec<ffi::PyGetSetDef> {
    vec![
        shown(c"_loop", object::get_loop::<DatagramBody>, c"The loop."),
        shown(c"_protocol", object::protocol::<DatagramBody>, c"The protocol."),
        shown(c"_sock", get_socket, c"The socket as a TransportSocket, None once it is closed."),
        shown(c"_sock_fd", get_number, c"The number of the descriptor."),
        shown(c"_address", get_remote, c"The remote address that the endpoint was made with."),
        shown(c"_closing", get_closing, c"True once the transport is ending."),
        shown(c"_conn_lost", get_lost, c"0 while open."),
        shown(c"_buffer_size", get_buffer_size, c"Bytes that the kernel has not taken yet."),
        shown(c"_protocol_paused", is_protocol_paused, c"True between pause_writing() and resume_writing()."),
    ]
}

pub(in crate::transports) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let mut methods = sending_methods();
    methods.extend(other_methods());
    // asyncio's own datagram transport has both base classes, too: all selector transports of asyncio, even those for
    // datagrams, inherit from `asyncio.Transport`.
    let bases = [
        names(module.py()).transport_type,
        names(module.py()).datagram_transport_type,
    ];
    object::make_type::<DatagramBody>(module, &bases, methods, getters(), &DATAGRAM_TYPE)?;
    Ok(())
}
