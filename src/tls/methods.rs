//! The Python interface of a TLS transport for the application: the methods of `asyncio.Transport`, and asyncio's
//! private attributes.

use pyo3::exceptions::{PyNotImplementedError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use super::{
    Flags, OWN_METHODS, READ_HIGH, State, TLS_TYPE, Tls, TlsBody, TlsObject, lifecycle, protocol_methods,
    reading, shutdown, writing,
};
use crate::binding::args::Args;
use crate::binding::attributes::shown;
use crate::binding::names::names;
use crate::binding::native_type::NativeType;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::event_loop::reactor::flush_policy;
use crate::transports::flow::buffer_limits;
use crate::transports::object;
use crate::transports::protocol;

#[inline]
fn write<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(data) = args.get(0) {
        writing::write(this, &data)?;
    }
    Ok(none(this.py()))
}

fn writelines<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(items) = args.get(0) {
        writing::writelines(this, &items)?;
    }
    Ok(none(this.py()))
}

fn write_eof<'py>(_: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Err(PyNotImplementedError::new_err(()))
}

fn can_write_eof<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), false))
}

fn close<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "close", || shutdown::close(this))
}

fn abort<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "abort", || lifecycle::abort(this, None))
}

fn force_close<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    lifecycle::abort(this, args.get(0).filter(|exception| !exception.is_none()))?;
    Ok(none(this.py()))
}

fn is_closing<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let is_closed = this.flags.has(Flags::CLOSED);
    if is_closed || this.loop_object().is_owned_elsewhere() {
        // In another thread, only a finalizer such as `asyncio.StreamWriter.__del__` calls this. If the answer is
        // false, the finalizer calls `close` next, which does no harm if the inner transport is closing already. So
        // there is no need to ask the inner transport.
        return Ok(bool_object(py, is_closed));
    }
    let is_closing = TlsObject::with_access(this, || this.inner.is_closing(py))?;
    Ok(bool_object(py, is_closing))
}

fn is_reading<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), !this.flags.has(Flags::APP_PAUSED)))
}

fn pause_reading<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.flags.set(Flags::APP_PAUSED);
    Ok(none(this.py()))
}

fn resume_reading<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.flags.has(Flags::APP_PAUSED) {
        this.flags.clear(Flags::APP_PAUSED);
        if !this.reactor().is_closed() {
            this.reactor()
                .ready
                .defer(this.to_bound(), reading::resume_queued);
        }
    }
    Ok(none(this.py()))
}

fn set_write_buffer_limits<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limits = args.bind()?;
    flush_policy::send_held(this)?;
    this.backlog.watermarks.set(limits)?;
    writing::control_app(this)?;
    Ok(none(this.py()))
}

fn get_write_buffer_limits<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this
        .backlog
        .watermarks
        .limits()
        .into_pyobject(this.py())?
        .into_any())
}

fn get_write_buffer_size<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    // Send writes that were only collected: they do not wait for the peer, so the size must not include them.
    writing::send_collected(this)?;
    let py = this.py();
    let len_bytes = this.backlog.len_bytes() + this.engine.unsent_len(py)?;
    Ok(len_bytes.into_pyobject(py)?.into_any())
}

fn set_read_buffer_limits<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    this.read_limits.set(buffer_limits(args.bind()?, READ_HIGH)?);
    this.flags.set(Flags::READ_LIMITED);
    reading::control_inner(this)?;
    Ok(none(this.py()))
}

fn get_read_buffer_limits<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let (high, low) = this.read_limits.get();
    Ok((low, high).into_pyobject(this.py())?.into_any())
}

fn get_read_buffer_size<'py>(this: Tls<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    Ok(this.engine.unread_len(py)?.into_pyobject(py)?.into_any())
}

fn set_protocol<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(protocol) = args.get(0) {
        flush_policy::send_held(this)?;
        this.calls.bind(&protocol)?;
    }
    Ok(none(this.py()))
}

fn get_extra_info<'py>(this: Tls<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let [name, default] = args.bind()?;
    let Some(name) = name else {
        return Err(PyTypeError::new_err(
            "get_extra_info() missing 1 required positional argument: 'name'",
        ));
    };
    let default = default.unwrap_or_else(|| none(py));
    if let Some(known) = object::extra_dict(this)?.get_item(&name)? {
        return Ok(known);
    }
    if name.eq(intern!(py, "socket"))? {
        writing::send_collected(this)?;
    }
    match this.inner.get(py) {
        Some(inner) => inner.call_method1(intern!(py, "get_extra_info"), (name, default)),
        None => Ok(default),
    }
}

// ---- private attributes of asyncio's TLS transport that programs use --------------------------------------------

/// `_ssl_protocol` and `_app_transport`: in asyncio these are the protocol of the inner transport and the application's
/// transport. Here both are this object.
fn ssl_protocol(this: Tls<'_>) -> ObjectResult<'_> {
    Ok(this.to_bound())
}

/// `_transport`: the inner transport; None before and after the connection.
fn inner_transport(this: Tls<'_>) -> ObjectResult<'_> {
    let py = this.py();
    let is_there = !matches!(this.state.get(), State::Initial) && this.calls.get(py).is_some();
    Ok(this
        .inner
        .get(py)
        .filter(|_| is_there)
        .unwrap_or_else(|| none(py)))
}

fn is_closed(this: Tls<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.flags.has(Flags::CLOSED)))
}

/// `_sslcontext`: the `ssl.SSLContext` that the connection was made with.
fn ssl_context(this: Tls<'_>) -> ObjectResult<'_> {
    let context = object::extra_dict(this)?.get_item(intern!(this.py(), "sslcontext"))?;
    Ok(context.unwrap_or_else(|| none(this.py())))
}

/// `_sslobj`: the `ssl.SSLObject`.
fn ssl_object(this: Tls<'_>) -> ObjectResult<'_> {
    let py = this.py();
    Ok(this.engine.object(py).unwrap_or_else(|| none(py)))
}

/// `_app_reading_paused`: whether the application has paused reading.
fn is_reading_paused(this: Tls<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.flags.has(Flags::APP_PAUSED)))
}

/// `_protocol_paused`: whether the application was told to stop writing.
fn is_paused(this: Tls<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.backlog.watermarks.is_paused()))
}

/// The repr, for example `<SSLTransport open over <StreamTransport ...>>`.
pub(super) fn describe(this: Tls<'_>) -> String {
    let state = match this.state.get() {
        State::Initial => "new",
        State::Handshake => "handshaking",
        State::Open => "open",
        State::Flushing | State::Shutdown => "closing",
        State::Over => "closed",
    };
    let inner = match this.inner.get(this.py()) {
        Some(inner) => inner
            .repr()
            .map_or_else(|_| String::from("?"), |text| text.to_string_lossy().into_owned()),
        None => String::from("nothing"),
    };
    format!("<SSLTransport {state} over {inner}>")
}

#[rustfmt::skip] // one row, one line
fn rows() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(method, write, SSLTransport.write, "Encrypt and send bytes-like data, or queue it if the inner transport is full."),
        row!(method, writelines, SSLTransport.writelines, "Encrypt and send several bytes-like objects together."),
        row!(method, write_eof, SSLTransport.write_eof, "Raise NotImplementedError: TLS ends both directions at once."),
        row!(method, can_write_eof, SSLTransport.can_write_eof, "Return False."),
        row!(threadsafe_method, close, SSLTransport.close, "Send the buffered data and close_notify, then end the connection."),
        row!(threadsafe_method, abort, SSLTransport.abort, "End the connection now."),
        row!(method, force_close, SSLTransport._force_close, "End the connection now, with an exception."),
        row!(threadsafe_method, is_closing, SSLTransport.is_closing, "True once the connection is ending."),
        row!(method, is_reading, SSLTransport.is_reading, "True while data is delivered."),
        row!(method, pause_reading, SSLTransport.pause_reading, "Stop delivering until resume_reading() is called."),
        row!(method, resume_reading, SSLTransport.resume_reading, "Deliver again after pause_reading()."),
        row!(method, get_write_buffer_size, SSLTransport.get_write_buffer_size, "The number of bytes that wait to be sent to the inner transport."),
        row!(method, get_write_buffer_limits, SSLTransport.get_write_buffer_limits, "The (low, high) watermarks in bytes."),
        row!(method, set_write_buffer_limits, SSLTransport.set_write_buffer_limits, "Set the watermarks in bytes."),
        row!(method, get_read_buffer_size, SSLTransport.get_read_buffer_size, "The number of bytes that wait to be decrypted."),
        row!(method, get_read_buffer_limits, SSLTransport.get_read_buffer_limits, "The (low, high) read limits in bytes."),
        row!(method, set_read_buffer_limits, SSLTransport.set_read_buffer_limits, "Set the read limits in bytes."),
        row!(method, object::get_protocol::<TlsBody>, SSLTransport.get_protocol, "The protocol, None once the connection is lost."),
        row!(method, set_protocol, SSLTransport.set_protocol, "Use another protocol from the next event on."),
        row!(method, get_extra_info, SSLTransport.get_extra_info, "Return information about TLS, or else about the inner transport."),
    ]
}

#[rustfmt::skip] // one row, one line
fn getters() -> Vec<ffi::PyGetSetDef> {
    vec![
        shown(c"_loop", object::get_loop::<TlsBody>, c"The loop."),
        shown(c"_closed", is_closed, c"True once the connection is ending."),
        shown(c"_ssl_protocol", ssl_protocol, c"The protocol of the inner transport."),
        shown(c"_transport", inner_transport, c"The inner transport."),
        shown(c"_app_transport", ssl_protocol, c"The transport of the application."),
        shown(c"_app_protocol", object::protocol::<TlsBody>, c"The protocol of the application."),
        shown(c"_sslcontext", ssl_context, c"The ssl.SSLContext."),
        shown(c"_sslobj", ssl_object, c"The ssl.SSLObject."),
        shown(c"_app_reading_paused", is_reading_paused, c"True after pause_reading()."),
        shown(c"_protocol_paused", is_paused, c"True between pause_writing and resume_writing."),
    ]
}

/// Makes the type with the bases `asyncio.Transport` and `asyncio.Protocol`, so that `isinstance()` works.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let mut methods = rows();
    methods.extend(protocol_methods::rows());
    let bases = [
        names(module.py()).transport_type,
        names(module.py()).protocol_type,
    ];
    let kind = object::make_type::<TlsBody>(module, &bases, methods, getters(), &TLS_TYPE)?;
    // asyncio's loop.start_tls() checks this attribute of a transport.
    kind.setattr("_start_tls_compatible", true)?;
    // sendfile() checks this attribute. The system call cannot encrypt, so the file must be read and written.
    let mode = module
        .py()
        .import("asyncio.constants")?
        .getattr("_SendfileMode")?;
    kind.setattr("_sendfile_compatible", mode.getattr("FALLBACK")?)?;
    OWN_METHODS.remember(&kind, &["write", "_force_close"])?;
    protocol::register_native(kind.into_ptr().cast(), reading::received_raw);
    Ok(())
}
