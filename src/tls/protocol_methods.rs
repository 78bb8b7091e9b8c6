//! The Python interface of a TLS transport for its inner transport: the methods of an `asyncio.Protocol`. Also
//! `Loop._tls`, which makes the object.

use std::cell::Cell;

use grapeshot_core::queue::records::Framing;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use super::engine::Engine;
use super::inner::{self, Inner};
use super::{Flags, Notified, READ_HIGH, State, TLS_TYPE, Tls, TlsBody, lifecycle, reading, writing};
use crate::binding::args::Args;
use crate::binding::flags::FlagCell;
use crate::binding::native_type::This;
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::event_loop::pyloop::LoopObject;
use crate::transports::flow::Watermarks;
use crate::transports::object;
use crate::transports::outgoing::{Data, Outgoing};
use crate::transports::protocol::ProtocolCalls;

/// asyncio's high watermark for data that waits to be encrypted, in bytes.
const WRITE_HIGH: usize = 512 * 1024;

fn connection_made<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(inner) = args.get(0) {
        lifecycle::start(this, &inner)?;
    }
    Ok(none(this.py()))
}

fn connection_lost<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(exception) = args.get(0) {
        lifecycle::inner_lost(this, &exception)?;
    }
    Ok(none(this.py()))
}

fn data_received<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(data) = args.get(0) {
        let source = Data::new(&data)?;
        reading::received(this, source.as_slice())?;
    }
    Ok(none(this.py()))
}

fn eof_received<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let stays = lifecycle::inner_eof(this)?;
    Ok(bool_object(this.py(), stays))
}

fn pause_writing<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.flags.set(Flags::INNER_FULL);
    Ok(none(this.py()))
}

fn resume_writing<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    writing::inner_drained(this)?;
    Ok(none(this.py()))
}

fn on_timeout<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    lifecycle::on_timeout(this)?;
    Ok(none(this.py()))
}

/// `_feed(data)`: takes ciphertext that was received before the handshake.
fn feed<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(data) = args.get(0) {
        let source = Data::new(&data)?;
        reading::feed(this, source.as_slice())?;
    }
    Ok(none(this.py()))
}

#[rustfmt::skip] // one row, one line
pub(super) fn rows() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(method, connection_made, SSLTransport.connection_made, "Start the handshake over the inner transport."),
        row!(method, connection_lost, SSLTransport.connection_lost, "End the connection: the inner transport is lost."),
        row!(method, data_received, SSLTransport.data_received, "Take ciphertext from the inner transport."),
        row!(method, eof_received, SSLTransport.eof_received, "Handle the end of the inner transport's stream."),
        row!(method, pause_writing, SSLTransport.pause_writing, "Stop writing to the inner transport, which is full."),
        row!(method, resume_writing, SSLTransport.resume_writing, "Write to the inner transport again."),
        row!(method, on_timeout, SSLTransport._on_timeout, "Abort the connection: the handshake or the shutdown takes too long."),
        row!(method, feed, SSLTransport._feed, "Take ciphertext that was received before the handshake."),
    ]
}

// ---- creation --------------------------------------------------------------------------------------------------

/// `loop._tls(protocol, sslcontext, waiter, server_side, server_hostname, handshake_timeout, shutdown_timeout,
/// call_connection_made=True, accepted=False, below=None)`: makes the transport. If `below` is a transport of
/// grapeshot, the application's protocol is called in a copy of the `contextvars` context of `below`. Otherwise, the
/// protocol is called in a copy of the current context.
fn make<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [
        protocol,
        sslcontext,
        waiter,
        server_side,
        server_hostname,
        handshake_timeout,
        shutdown_timeout,
        call_made,
        accepted,
        below,
    ] = args.bind()?;
    let (Some(protocol), Some(sslcontext), Some(handshake_timeout), Some(shutdown_timeout)) =
        (protocol, sslcontext, handshake_timeout, shutdown_timeout)
    else {
        return Err(PyTypeError::new_err(
            "_tls() takes a protocol, a context and two time limits",
        ));
    };
    let is_true = |value: Option<Bound<'py, PyAny>>, default: bool| match value {
        Some(value) => value.is_truthy(),
        None => Ok(default),
    };
    let given = |value: Option<Bound<'py, PyAny>>| value.filter(|value| !value.is_none());
    let engine = Engine::new(
        &sslcontext,
        is_true(server_side, false)?,
        given(server_hostname).as_ref(),
    )?;
    let context = match given(below) {
        Some(below) => inner::copied_context(&below)?,
        None => None,
    };
    let calls = match context {
        Some(context) => ProtocolCalls::with_context(&protocol, context),
        None => ProtocolCalls::new(&protocol),
    };
    let body = new_body(engine, calls?);
    body.handshake_timeout.set(handshake_timeout);
    body.shutdown_timeout.set(shutdown_timeout);
    if let Some(waiter) = given(waiter) {
        body.waiter.set(waiter);
    }
    if !is_true(call_made, true)? {
        body.notified.set(Notified::Made);
    }
    if is_true(accepted, false)? {
        body.flags.set(Flags::ACCEPTED);
    }
    let transport = object::make(&TLS_TYPE, &this.to_bound(), body)?;
    let extra = object::extra_dict(super::tls_of(&transport))?;
    extra.set_item(intern!(this.py(), "sslcontext"), sslcontext)?;
    Ok(transport)
}

fn new_body(engine: Engine, calls: ProtocolCalls) -> TlsBody {
    TlsBody {
        waiter: ObjectCell::empty(),
        timer: ObjectCell::empty(),
        handshake_timeout: ObjectCell::empty(),
        shutdown_timeout: ObjectCell::empty(),
        undelivered: ObjectCell::empty(),
        engine,
        inner: Inner::none(),
        calls,
        backlog: Outgoing::with_watermarks(Watermarks::with_default(WRITE_HIGH)),
        read_limits: Cell::new((READ_HIGH, READ_HIGH / 4)),
        framing: Cell::new(Framing::default()),
        records: Cell::new(0),
        capacity: Cell::new(0),
        overhead_len: Cell::new(0),
        discarded_len: Cell::new(0),
        state: Cell::new(State::Initial),
        notified: Cell::new(Notified::Nothing),
        flags: FlagCell::new(),
        lost_writes: Cell::new(0),
    }
}

/// The method that this module adds to the loop's type.
pub(super) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![row!(
        method,
        make,
        Loop._tls,
        "Make a TLS transport, to be used as the protocol of its inner transport."
    )]
}
