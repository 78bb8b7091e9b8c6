//! The Python interface of a stream transport: the methods of `asyncio.Transport`, and asyncio's private attributes.

use grapeshot_core::sys::poller::Interest;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::{
    Flags, OWN_METHODS, STREAM_TYPE, Stream, StreamBody, lifecycle, local_address, sendfile, socket_of,
    sync_interest, writing,
};
use crate::binding::args::Args;
use crate::binding::attributes::shown;
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::binding::socket_object;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::flush_policy;
use crate::transports::object;

#[inline(always)]
fn write<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    writing::write(this, args.positional()[0])?;
    Ok(none(this.py()))
}

fn writelines<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(items) = args.get(0) {
        writing::writelines(this, &items)?;
    }
    Ok(none(this.py()))
}

fn write_eof<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.flags.has(Flags::CLOSING) || this.flags.has(Flags::EOF_WRITTEN) {
        return Ok(none(this.py()));
    }
    writing::send_collected(this)?;
    this.flags.set(Flags::EOF_WRITTEN);
    if !this.flags.has(Flags::BLOCKED) && this.lost_writes.get() == 0 {
        writing::shutdown(this).map_err(|error| errors::os_error(&error))?;
    }
    Ok(none(this.py()))
}

fn can_write_eof<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), true))
}

fn close<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "close", || {
        object::check_thread(this)?;
        lifecycle::close(this)
    })
}

fn abort<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "abort", || {
        object::check_thread(this)?;
        lifecycle::abort(this)
    })
}

fn force_close<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    object::check_thread(this)?;
    lifecycle::abort_with(this, args.get(0).filter(|exception| !exception.is_none()))?;
    Ok(none(this.py()))
}

fn is_closing<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.flags.has(Flags::CLOSING)))
}

fn is_reading<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    flush_policy::send_held(this)?;
    Ok(bool_object(
        this.py(),
        !this.flags.has(Flags::CLOSING | Flags::PAUSED),
    ))
}

fn pause_reading<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if !this.flags.has(Flags::CLOSING) {
        // The poller is changed only when data comes during the pause; most pauses end before that.
        let was_reading = !this.flags.has(Flags::PAUSED);
        this.flags.set(Flags::PAUSED);
        if was_reading {
            object::log_change(this, "%r pauses reading")?;
        }
    }
    Ok(none(this.py()))
}

fn resume_reading<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if !this.flags.has(Flags::CLOSING) && this.flags.has(Flags::PAUSED) {
        this.flags.clear(Flags::PAUSED);
        // The socket may have data by now. As in asyncio, the next iteration must handle that data, so it must poll.
        // `sync_interest` does not ensure this: it does nothing if the poller was not changed during the pause.
        this.reactor().descriptors.poll_next(Interest::READ);
        sync_interest(this)?;
        object::log_change(this, "%r resumes reading")?;
    }
    Ok(none(this.py()))
}

fn get_write_buffer_size<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    // Corked and held data is not waiting for the peer, so it is sent before the size is determined.
    writing::send_collected(this)?;
    let len_bytes = this.outgoing.len_bytes();
    Ok(len_bytes.into_pyobject(this.py())?.into_any())
}

fn get_write_buffer_limits<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this
        .outgoing
        .watermarks
        .limits()
        .into_pyobject(this.py())?
        .into_any())
}

fn set_write_buffer_limits<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limits = args.bind()?;
    flush_policy::send_held(this)?;
    this.outgoing.watermarks.set(limits)?;
    if this.flags.has(Flags::BLOCKED) {
        writing::maybe_pause(this)?;
    }
    Ok(none(this.py()))
}

fn set_protocol<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(protocol) = args.get(0) {
        // Send the held data first: if the kernel does not take all of it, `pause_writing` must be called on the old
        // protocol, which has written the data.
        flush_policy::send_held(this)?;
        this.calls.bind(&protocol)?;
    }
    Ok(none(this.py()))
}

fn get_extra_info<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let [name, default] = args.bind()?;
    let Some(name) = name else {
        return Err(PyTypeError::new_err(
            "get_extra_info() missing 1 required positional argument: 'name'",
        ));
    };
    let default = default.unwrap_or_else(|| none(py));
    if name.eq(names(py).socket.bind(py))? {
        writing::send_collected(this)?;
    }
    let extra = object::extra_dict(this)?;
    if let Some(known) = extra.get_item(&name)? {
        return Ok(known);
    }
    let Ok(key) = name.cast::<PyString>() else {
        return Ok(default);
    };
    let value = match &*key.to_string_lossy() {
        "socket" => socket_of(this)?
            .map(|socket| socket_object::guarded(&socket))
            .transpose()?,
        "sockname" => local_address(py, &this)
            .map(|address| socket_object::address_object(py, &address))
            .transpose()?,
        "peername" => this
            .peer
            .as_ref()
            .map(|address| socket_object::address_object(py, address))
            .transpose()?,
        _ => None,
    };
    match value {
        Some(value) => {
            extra.set_item(name, &value)?;
            Ok(value)
        }
        None => Ok(default),
    }
}

/// `<StreamTransport fd=7 read=polling write=<idle, bufsize=0>>`, or `<StreamTransport closed fd=7>`, in the words that
/// asyncio's own transports use.
pub(super) fn describe(this: Stream<'_>) -> String {
    let mut text = String::from("<StreamTransport");
    let is_open = this.fd() >= 0;
    if !is_open {
        text.push_str(" closed");
    } else if this.flags.has(Flags::CLOSING) {
        text.push_str(" closing");
    }
    text += &format!(" fd={}", this.registration.number());
    if is_open && !this.reactor().is_closed() {
        let read = if this.registration.interest().has_read() && !this.flags.has(Flags::PAUSED) {
            "polling"
        } else {
            "idle"
        };
        let write = if this.flags.has(Flags::BLOCKED) {
            "polling"
        } else {
            "idle"
        };
        let len_bytes = this.outgoing.len_bytes();
        text += &format!(" read={read} write=<{write}, bufsize={len_bytes}>");
    }
    text.push('>');
    text
}

// ---- for loop.sendfile ------------------------------------------------------------------------------------------

fn start_sendfile<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(future) = args.get(0) {
        sendfile::start(this, future)?;
    }
    Ok(none(this.py()))
}

fn wait_writable<'py>(this: Stream<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(future) = args.get(0) {
        sendfile::wait_writable(this, future)?;
    }
    Ok(none(this.py()))
}

fn end_sendfile<'py>(this: Stream<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    sendfile::end(this)?;
    Ok(none(this.py()))
}

fn is_protocol_paused(this: Stream<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.outgoing.watermarks.is_paused()))
}

/// The attribute `_paused` of asyncio's own transport: whether `pause_reading()` is in force.
fn is_reading_paused(this: Stream<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.flags.has(Flags::PAUSED)))
}

// ---- on the loop ---------------------------------------------------------------------------------------------

/// `loop._stream(sock, protocol, waiter=None, server=None)`: makes the transport of a connected, non-blocking socket.
fn open_stream<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor().check_closed()?;
    let [socket, protocol, waiter, server] = args.bind()?;
    let (Some(socket), Some(protocol)) = (socket, protocol) else {
        return Err(PyTypeError::new_err("_stream() takes a socket and a protocol"));
    };
    let given = |value: Option<Bound<'py, PyAny>>| value.filter(|value| !value.is_none());
    lifecycle::open(&this.to_bound(), &socket, &protocol, given(waiter), given(server))
}

/// `loop._server_transports(server)`: the open transports that `server` has accepted.
fn server_transports<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let Some(server) = args.get(0) else {
        return Ok(none(py));
    };
    let stream_type = super::STREAM_TYPE.load(std::sync::atomic::Ordering::Relaxed);
    let mut transports = this.reactor().descriptors.sources(py);
    transports.retain(|source| {
        // SAFETY: the source is alive, and only its type is read.
        let kind = unsafe { ffi::Py_TYPE(source.as_ptr()) };
        kind == stream_type && lifecycle::stream_of(source).server.as_ptr() == server.as_ptr()
    });
    Ok(pyo3::types::PyList::new(py, transports)?.into_any())
}

/// The methods that this module adds to the loop's type.
pub(in crate::transports) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            open_stream,
            Loop._stream,
            "Make the transport of a connected stream socket."
        ),
        row!(
            method,
            server_transports,
            Loop._server_transports,
            "Return the open transports of a server."
        ),
    ]
}

fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            write,
            StreamTransport.write,
            "Send bytes-like data, or queue it if the kernel takes no more."
        ),
        row!(
            method,
            writelines,
            StreamTransport.writelines,
            "Send several bytes-like objects in one call."
        ),
        row!(
            method,
            write_eof,
            StreamTransport.write_eof,
            "End our side of the connection once the buffer is empty."
        ),
        row!(
            method,
            can_write_eof,
            StreamTransport.can_write_eof,
            "Return True."
        ),
        row!(
            threadsafe_method,
            close,
            StreamTransport.close,
            "Send the buffered data, then end the connection."
        ),
        row!(
            threadsafe_method,
            abort,
            StreamTransport.abort,
            "End the connection now."
        ),
        row!(
            method,
            force_close,
            StreamTransport._force_close,
            "End the connection now, with an exception."
        ),
        row!(
            threadsafe_method,
            is_closing,
            StreamTransport.is_closing,
            "True once the connection is ending."
        ),
        row!(
            method,
            is_reading,
            StreamTransport.is_reading,
            "True unless reading is paused or the connection is ending."
        ),
        row!(
            method,
            pause_reading,
            StreamTransport.pause_reading,
            "Stop receiving until resume_reading() is called."
        ),
        row!(
            method,
            resume_reading,
            StreamTransport.resume_reading,
            "Receive again after pause_reading()."
        ),
        row!(
            method,
            get_write_buffer_size,
            StreamTransport.get_write_buffer_size,
            "The number of bytes that the kernel has not taken yet."
        ),
        row!(
            method,
            get_write_buffer_limits,
            StreamTransport.get_write_buffer_limits,
            "The (low, high) watermarks in bytes."
        ),
        row!(
            method,
            set_write_buffer_limits,
            StreamTransport.set_write_buffer_limits,
            "Set the watermarks in bytes; ValueError unless high >= low >= 0."
        ),
        row!(
            method,
            object::get_protocol::<StreamBody>,
            StreamTransport.get_protocol,
            "The protocol, None once the connection is lost."
        ),
        row!(
            method,
            set_protocol,
            StreamTransport.set_protocol,
            "Use another protocol from the next event on."
        ),
        row!(
            method,
            get_extra_info,
            StreamTransport.get_extra_info,
            "The socket, the local address (sockname) or the peer's (peername); default for any other name."
        ),
        row!(
            method,
            start_sendfile,
            StreamTransport._start_sendfile,
            "Refuse writes, and complete the future once the buffer is empty."
        ),
        row!(
            method,
            wait_writable,
            StreamTransport._wait_writable,
            "Complete the future once the socket can take data."
        ),
        row!(
            method,
            end_sendfile,
            StreamTransport._end_sendfile,
            "Accept writes again."
        ),
    ]
}

// ---- private attributes of asyncio's transport that programs use ------------------------------------------------

/// A `TransportSocket`, as from `get_extra_info("socket")`. asyncio's attribute is the socket itself.
fn get_socket(this: Stream<'_>) -> ObjectResult<'_> {
    let py = this.py();
    writing::send_collected(this)?;
    match socket_of(this)? {
        Some(socket) if this.fd() >= 0 => socket_object::guarded(&socket),
        _ => Ok(none(py)),
    }
}

fn get_number(this: Stream<'_>) -> ObjectResult<'_> {
    object::number(this.py(), this.registration.number())
}

fn get_server(this: Stream<'_>) -> ObjectResult<'_> {
    Ok(this.server.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn get_closing(this: Stream<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.flags.has(Flags::CLOSING)))
}

fn get_eof(this: Stream<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.flags.has(Flags::EOF_WRITTEN)))
}

fn get_lost(this: Stream<'_>) -> ObjectResult<'_> {
    object::number(this.py(), this.lost_writes.get())
}

fn get_high(this: Stream<'_>) -> ObjectResult<'_> {
    object::number(this.py(), this.outgoing.watermarks.limits().1)
}

fn get_low(this: Stream<'_>) -> ObjectResult<'_> {
    object::number(this.py(), this.outgoing.watermarks.limits().0)
}

#[rustfmt::skip] // one row, one line
fn getters() -> Vec<ffi::PyGetSetDef> {
    vec![
        shown(c"_loop", object::get_loop::<StreamBody>, c"The loop."),
        shown(c"_protocol", object::protocol::<StreamBody>, c"The protocol."),
        shown(c"_sock", get_socket, c"The socket as a TransportSocket, None once it is closed."),
        shown(c"_sock_fd", get_number, c"The number of the descriptor."),
        shown(c"_server", get_server, c"The server that accepted the connection."),
        shown(c"_closing", get_closing, c"True once the connection is ending."),
        shown(c"_eof", get_eof, c"True after write_eof()."),
        shown(c"_conn_lost", get_lost, c"0 while connected."),
        shown(c"_high_water", get_high, c"The high watermark in bytes."),
        shown(c"_low_water", get_low, c"The low watermark in bytes."),
        shown(c"_paused", is_reading_paused, c"True between pause_reading() and resume_reading()."),
        shown(c"_protocol_paused", is_protocol_paused, c"True between pause_writing() and resume_writing()."),
    ]
}

pub(in crate::transports) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let bases = [names(module.py()).transport_type];
    let kind = object::make_type::<StreamBody>(module, &bases, methods(), getters(), &STREAM_TYPE)?;
    OWN_METHODS.remember(&kind, &["write", "_force_close", "is_closing"])?;
    // start_tls() checks this attribute of a transport.
    kind.setattr("_start_tls_compatible", true)?;
    // asyncio's `loop.sendfile` checks this attribute of a transport.
    let mode = module
        .py()
        .import("asyncio.constants")?
        .getattr("_SendfileMode")?;
    kind.setattr("_sendfile_compatible", mode.getattr("TRY_NATIVE")?)
}
