//! The orderly end of a TLS connection: written data is sent, `close_notify` is exchanged, and the application is told.
//!
//! Data that comes after the application's `close()` is discarded, as asyncio's documentation says. Such data may have
//! been on the way already, and `SSL_shutdown` would fail on it. Data that the peer sent before it ended the connection
//! is delivered before the end is reported.

use pyo3::ffi;
use pyo3::prelude::*;

use super::lifecycle::{abort, cancel_timer, fatal_error, set_timer, value_of};
use super::{Flags, Notified, State, Tls, reading, writing};
use crate::binding::log;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::event_loop::reactor::flush_policy;
use crate::transports::protocol::Receiver;

/// `close()`, called by the application.
pub(super) fn close(this: Tls<'_>) -> PyResult<()> {
    if this.flags.has(Flags::CLOSED) {
        return Ok(());
    }
    this.flags.set(Flags::CLOSED);
    if this.state.get() == State::Flushing && this.flags.has(Flags::INNER_EOF) {
        // The stream has ended while the application had paused reading. The data that the application has not got yet
        // is discarded now.
        this.state.set(State::Shutdown);
        return shut_down(this);
    }
    start_shutdown(this)
}

/// Begins to end our side: written data is sent, then `close_notify`.
pub(super) fn start_shutdown(this: Tls<'_>) -> PyResult<()> {
    match this.state.get() {
        State::Initial | State::Handshake => abort(this, None),
        State::Open => {
            this.flags.set(Flags::CLOSED);
            this.state.set(State::Flushing);
            set_timer(this, &this.shutdown_timeout)?;
            continue_shutdown(this)
        }
        State::Flushing | State::Shutdown | State::Over => Ok(()),
    }
}

/// First delivers the received data, unless the application has called `close()`. Then encrypts the written data and
/// sends `close_notify`.
pub(super) fn continue_shutdown(this: Tls<'_>) -> PyResult<()> {
    if this.flags.has(Flags::ENCRYPTING) {
        // A callback of the SSLContext has closed the connection in the middle of a write.
        this.flags.set(Flags::CLOSE_HELD);
        return Ok(());
    }
    if this.state.get() != State::Flushing {
        return Ok(());
    }
    if this.flags.has(Flags::CLOSED) {
        if !discard(this)? {
            return Ok(());
        }
        writing::flush(this)?;
    } else {
        if this.flags.has(Flags::STARTED) {
            return Ok(());
        }
        let delivered = reading::deliver_undelivered(this)
            .and_then(|()| reading::read_app(this, &[]))
            .and_then(|()| reading::look_ahead(this));
        if let Err(error) = delivered {
            return fatal_error(this, error, "Fatal error on SSL protocol");
        }
    }
    if this.state.get() != State::Flushing || must_deliver_first(this) {
        return Ok(());
    }
    if !this.backlog.is_empty() && !this.flags.has(Flags::INNER_EOF) {
        // The inner transport is full, or the peer renegotiates. When there is room, or when the peer has answered,
        // this function is called again. If neither happens, the time limit ends the connection.
        return Ok(());
    }
    this.state.set(State::Shutdown);
    shut_down(this)
}

/// True if the application must get data, or the transport that `start_tls` returns, before it may be told of the end.
pub(super) fn must_deliver_first(this: Tls<'_>) -> bool {
    !this.flags.has(Flags::CLOSED) && (this.flags.has(Flags::STARTED) || this.undelivered.is_set())
}

/// Discards data that came after `close()`, and reports the peer's `close_notify` if that has come. False if the
/// connection has failed.
pub(super) fn discard(this: Tls<'_>) -> PyResult<bool> {
    match reading::discard(this) {
        Ok(is_closed) => {
            if is_closed {
                call_eof_received(this)?;
            }
            reading::control_inner(this)?;
            Ok(true)
        }
        Err(error) => {
            cancel_timer(this)?;
            fatal_error(this, error, "Fatal error on transport")?;
            Ok(false)
        }
    }
}

/// Sends `close_notify`, and closes the inner transport once the peer's `close_notify` has come or the stream has
/// ended.
pub(super) fn shut_down(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    let is_done = if this.flags.has(Flags::INNER_EOF) {
        Ok(true)
    } else {
        this.engine.shutdown(py)
    };
    if this.state.get() != State::Shutdown {
        return Ok(());
    }
    let sent = writing::send_ciphertext(this);
    match is_done.and_then(|is_done| sent.map(|()| is_done)) {
        Ok(false) => Ok(()),
        Ok(true) => {
            call_eof_received(this)?;
            // The inner transport first sends its buffered data. A peer that does not read can delay that forever, so
            // the timer runs until `connection_lost`. (If the inner transport reached the end of its stream before any
            // `close()` or `close_notify`, there is no timer yet.)
            if !this.timer.is_set() {
                set_timer(this, &this.shutdown_timeout)?;
            }
            // Queued, as in asyncio: closing may call connection_lost at once, and the application may be on the stack
            // now.
            this.reactor().ready.defer(this.to_bound(), close_inner);
            Ok(())
        }
        Err(error) => {
            cancel_timer(this)?;
            fatal_error(this, error, "Fatal error on transport")
        }
    }
}

unsafe fn close_inner(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `shut_down` with a transport, to which the queue holds a reference.
    let this: Tls<'_> = unsafe { This::new(py, object) };
    match this.inner.close(py) {
        Err(error) => fatal_error(this, error, "Fatal error on transport"),
        Ok(()) => Ok(()),
    }
}

/// Calls the application's `eof_received()`, but only once. Its result makes no difference: as in asyncio, a TLS
/// transport always closes both directions together.
pub(super) fn call_eof_received(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    if this.notified.get() != Notified::Made {
        return Ok(());
    }
    this.notified.set(Notified::Eof);
    let answer = flush_policy::corked(this, || {
        this.calls.call(py, names(py).eof_received, &[])?.is_truthy()
    })?;
    match answer {
        Ok(true) if !matches!(this.calls.receiver(), Receiver::Native) => {
            let text = "returning true from eof_received() has no effect when using ssl";
            log::warning(py, text, &[])
        }
        Ok(_) => Ok(()),
        // As in asyncio, CancelledError is not reported, because it ends the connection on purpose.
        Err(error) if error.is_instance(py, &names(py).cancelled_error.bind(py)) => {
            this.inner.abort_with(py, Some(value_of(py, &error)))
        }
        Err(error) => fatal_error(this, error, "Error calling eof_received()"),
    }
}
