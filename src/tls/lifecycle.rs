//! A TLS connection from its handshake to `connection_lost`, and everything that ends it.
//!
//! ```text
//!              connection_made                handshake is done            close(), close_notify, or inner EOF
//!   [ Initial ] ------------> [ Handshake ] ------------> [ Open ] ------------> [ Flushing ]
//!                                  |                         |                        | the backlog is encrypted
//!                       a fault,   |               a fault,  |                        v
//!                       time limit |               abort()   |                  [ Shutdown ]  close_notify sent
//!                                  v                         v                        | the peer's close_notify,
//!                               [ Over ] <----------------------------------------------' inner EOF, fault, time limit
//! ```
//! The application's `connection_made` is called when the handshake is complete. Its `connection_lost` is called once,
//! after the inner transport has called `connection_lost` of this object. If `connection_made` was not called,
//! `connection_lost` is not called either.

use pyo3::exceptions::{PyConnectionAbortedError, PyConnectionResetError, PyOSError, PyTimeoutError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use super::{Flags, Notified, State, Tls, reading, shutdown, writing};
use crate::binding::errors;
use crate::binding::log;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::object_result::none;
use crate::event_loop::probe::Mode;
use crate::event_loop::reactor::flush_policy;
use crate::transports::object;

/// The bytes that a TLS 1.3 record has in addition to its header and its plaintext: the content type and a tag of 16
/// bytes. (The tag is shorter only with the cipher suites that `note_facts` excludes.)
const OVERHEAD_LEN: usize = 17;

// ---- handshake -----------------------------------------------------------------------------------------------

/// `connection_made()` from the inner transport: begins the handshake.
pub(super) fn start(this: Tls<'_>, inner: &Bound<'_, PyAny>) -> PyResult<()> {
    if this.state.get() != State::Initial {
        return Ok(());
    }
    this.inner.set(inner);
    if this.flags.has(Flags::CLOSED) {
        this.state.set(State::Over);
        return this.inner.abort_with(this.py(), None);
    }
    debug_log(this, "starts the TLS handshake")?;
    this.state.set(State::Handshake);
    set_timer(this, &this.handshake_timeout)?;
    continue_handshake(this)
}

/// Starts the timer for the time limit of the handshake or the shutdown.
pub(super) fn set_timer(this: Tls<'_>, timeout: &crate::binding::object_cell::ObjectCell) -> PyResult<()> {
    let py = this.py();
    if let (Some(event_loop), Some(timeout)) = (this.event_loop.get(py), timeout.get(py)) {
        let on_timeout = this.to_bound().getattr(intern!(py, "_on_timeout"))?;
        let timer = event_loop.call_method1(intern!(py, "call_later"), (timeout, on_timeout))?;
        this.timer.set(timer);
    }
    Ok(())
}

pub(super) fn cancel_timer(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    match this.timer.take(py) {
        Some(timer) => timer.call_method0(intern!(py, "cancel")).map(drop),
        None => Ok(()),
    }
}

/// The handshake or the shutdown has exceeded its time limit: aborts the connection.
pub(super) fn on_timeout(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    drop(this.timer.take(py));
    match this.state.get() {
        State::Handshake => {
            let limit = match this.handshake_timeout.get(py) {
                Some(limit) => limit.str()?.to_string_lossy().into_owned(),
                None => String::new(),
            };
            let error = PyConnectionAbortedError::new_err(format!(
                "SSL handshake is taking longer than {limit} seconds: aborting the connection"
            ));
            fail_handshake(this, error, "SSL handshake failed")
        }
        State::Flushing | State::Shutdown => {
            let error = PyTimeoutError::new_err("SSL shutdown timed out");
            this.state.set(State::Over);
            this.inner.abort_with(py, Some(value_of(py, &error)))
        }
        State::Initial | State::Open | State::Over => Ok(()),
    }
}

fn continue_handshake(this: Tls<'_>) -> PyResult<()> {
    match this.engine.handshake(this.py()) {
        // A callback may have ended the connection.
        _ if this.state.get() != State::Handshake => Ok(()),
        Ok(true) => finish_handshake(this),
        Ok(false) => match writing::send_ciphertext(this) {
            Ok(()) => Ok(()),
            Err(error) => fail_handshake(this, error, "SSL handshake failed"),
        },
        Err(error) => fail_handshake(this, error, "SSL handshake failed"),
    }
}

fn finish_handshake(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    cancel_timer(this)?;
    if let Err(error) = note_facts(this) {
        return fail_handshake(this, error, "SSL handshake failed");
    }
    this.state.set(State::Open);
    debug_log(this, "TLS handshake is complete")?;
    this.reactor().probe.log_event(py, Mode::LOG_TLS, || {
        let extra = object::extra_dict(this);
        let cipher = extra.and_then(|extra| extra.get_item(intern!(py, "cipher")));
        let cipher = cipher.ok().flatten().unwrap_or_else(|| none(py));
        let way = if this.engine.is_direct() {
            "OpenSSL"
        } else {
            "MemoryBIO"
        };
        (
            this.to_bound(),
            format!("has agreed on {cipher}, and calls {way}"),
        )
    });
    let is_upgrade = this.notified.get() != Notified::Nothing;
    if this.notified.get() == Notified::Nothing {
        this.notified.set(Notified::Made);
        let own = this.to_bound();
        let made = flush_policy::corked(this, || this.calls.call(py, names(py).connection_made, &[&own]))?;
        if let Err(error) = made {
            return fatal_error(
                this,
                error,
                "Fatal error: protocol.connection_made() call failed.",
            );
        }
    }
    let woken = wake_waiter(this, Ok(&this.to_bound()));
    if is_upgrade {
        // The application gets its new transport only from `start_tls`, so no data may be delivered before `start_tls`
        // has returned.
        this.flags.set(Flags::STARTED);
        this.reactor().ready.defer(this.to_bound(), reading::start_queued);
    }
    woken?;
    match this.state.get() {
        State::Open => reading::read_app(this, &[]),
        _ => Ok(()),
    }
}

/// Stores the facts that are known once the handshake is complete: those for `get_extra_info`, and the overhead of
/// records.
fn note_facts(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    let Some(object) = this.engine.object(py) else {
        return Ok(());
    };
    let certificate = object.call_method0(intern!(py, "getpeercert"))?;
    let extra = object::extra_dict(this)?;
    extra.set_item(intern!(py, "peercert"), certificate)?;
    let cipher = object.call_method0(intern!(py, "cipher"))?;
    let is_fixed = object
        .call_method0(intern!(py, "version"))?
        .eq(intern!(py, "TLSv1.3"))?
        // These cipher suites have a shorter tag. They are off unless the program asks for them.
        && !cipher.str()?.to_string_lossy().contains("CCM_8");
    this.overhead_len.set(if is_fixed { OVERHEAD_LEN } else { 0 });
    extra.set_item(intern!(py, "cipher"), cipher)?;
    let compression = object.call_method0(intern!(py, "compression"))?;
    if !compression.is_none() || !this.engine.is_plain() {
        this.flags.set(Flags::UNCOUNTED);
    }
    extra.set_item(intern!(py, "compression"), compression)?;
    extra.set_item(intern!(py, "ssl_object"), object)?;
    reading::recount(this)
}

/// Ends the connection after a failed handshake: sends OpenSSL's alert to the peer and passes the exception to the
/// waiter.
#[cold]
fn fail_handshake(this: Tls<'_>, error: PyErr, message: &str) -> PyResult<()> {
    let py = this.py();
    cancel_timer(this)?;
    this.state.set(State::Over);
    if errors::leaves_loop(py, &error) {
        return Err(error);
    }
    let is_certificate = error
        .matches(py, this.engine.certificate_error(py))
        .unwrap_or(false);
    let message = if is_certificate {
        "SSL handshake failed on verifying the certificate"
    } else {
        message
    };
    this.reactor().probe.log_event(py, Mode::LOG_TLS, || {
        (this.to_bound(), format!("{message}: {error}"))
    });
    if let Err(error) = writing::send_ciphertext(this)
        && errors::leaves_loop(py, &error)
    {
        return Err(error);
    }
    let exception = value_of(py, &error);
    if this.flags.has(Flags::ACCEPTED) && this.reactor().probe.is_debug() {
        // In debug mode asyncio reports every accepted connection whose setup fails.
        let message = "Error on transport creation for incoming connection";
        object::report(this, error.clone_ref(py), message)?;
    }
    fatal_error(this, error, message)?;
    wake_waiter(this, Err(exception))
}

/// Sets the result or the exception of the Future that waits for the handshake. The result is the transport, or None
/// for a connection that ended without an error before its handshake was complete.
fn wake_waiter(this: Tls<'_>, outcome: Result<&Bound<'_, PyAny>, Bound<'_, PyAny>>) -> PyResult<()> {
    let py = this.py();
    let Some(waiter) = this.waiter.take(py) else {
        return Ok(());
    };
    if waiter.call_method0(intern!(py, "done"))?.is_truthy()? {
        return Ok(());
    }
    match outcome {
        Ok(result) => waiter.call_method1(intern!(py, "set_result"), (result,))?,
        Err(exception) => waiter.call_method1(intern!(py, "set_exception"), (exception,))?,
    };
    Ok(())
}

// ---- proceeding ----------------------------------------------------------------------------------------------

/// Continues the current phase of the connection. Called when ciphertext has arrived while the state is not `Open`,
/// when the application has resumed reading, and when `start_tls` has returned.
pub(super) fn proceed(this: Tls<'_>) -> PyResult<()> {
    match this.state.get() {
        State::Handshake => continue_handshake(this),
        State::Open => reading::read_app(this, &[]),
        State::Flushing => shutdown::continue_shutdown(this),
        State::Shutdown => {
            if shutdown::discard(this)? {
                return shutdown::shut_down(this);
            }
            Ok(())
        }
        State::Initial | State::Over => Ok(()),
    }
}

/// `eof_received()` from the inner transport. True if the inner transport must stay open, because the application must
/// first get the remaining data, or its new transport from `start_tls`. An application that has paused reading is told
/// of the end at once if there is nothing that it must get first.
pub(super) fn inner_eof(this: Tls<'_>) -> PyResult<bool> {
    this.flags.set(Flags::INNER_EOF);
    debug_log(this, "received EOF")?;
    match this.state.get() {
        State::Handshake => {
            let error = PyConnectionResetError::new_err(());
            fail_handshake(this, error, "SSL handshake failed")?;
        }
        State::Open => {
            this.state.set(State::Flushing);
            shutdown::continue_shutdown(this)?;
            return Ok(this.state.get() == State::Flushing && shutdown::must_deliver_first(this));
        }
        State::Flushing => shutdown::continue_shutdown(this)?,
        State::Shutdown => shutdown::shut_down(this)?,
        State::Initial | State::Over => {}
    }
    Ok(false)
}

// ---- the end -------------------------------------------------------------------------------------------------

/// Ends the connection now and discards unsent data. Writes that were only collected are sent first, because without
/// collecting they would already have been sent.
pub(super) fn abort(this: Tls<'_>, exception: Option<Bound<'_, PyAny>>) -> PyResult<()> {
    writing::send_collected(this)?;
    this.flags.set(Flags::CLOSED);
    if this.state.get() != State::Over && this.state.get() != State::Initial {
        this.state.set(State::Over);
    }
    this.inner.abort_with(this.py(), exception)
}

/// Ends the connection after a fault. The error is reported to the exception handler, unless it is an OSError
/// (`SSLError` is one): such errors are ordinary on a network, and only debug mode logs them. Err is only for
/// exceptions that must leave the loop.
#[cold]
pub(super) fn fatal_error(this: Tls<'_>, error: PyErr, message: &str) -> PyResult<()> {
    let py = this.py();
    if errors::leaves_loop(py, &error) {
        return Err(error);
    }
    let exception = value_of(py, &error);
    this.inner.abort_with(py, Some(exception.clone()))?;
    if error.is_instance_of::<PyOSError>(py) {
        return object::log_fault(this, message, &exception);
    }
    object::report(this, error, message)
}

/// `connection_lost(exception)` from the inner transport.
pub(super) fn inner_lost(this: Tls<'_>, exception: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = this.py();
    this.flags.set(Flags::CLOSED);
    this.state.set(State::Over);
    this.lost_writes.set(this.lost_writes.get().saturating_add(1));
    this.backlog.clear();
    cancel_timer(this)?;
    if this.inner.is_ours() {
        // Our transports queue this call, so none of the application's methods is on the stack.
        return lose(this, exception);
    }
    let extra = object::extra_dict(this)?;
    extra.set_item(intern!(py, "_lost_with"), exception)?;
    this.reactor().ready.defer(this.to_bound(), lose_queued);
    Ok(())
}

unsafe fn lose_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `inner_lost` with a transport, to which the queue holds a reference.
    let this: Tls<'_> = unsafe { This::new(py, object) };
    let extra = object::extra_dict(this)?;
    let exception = extra
        .get_item(intern!(py, "_lost_with"))?
        .unwrap_or_else(|| py.None().into_bound(py));
    extra.del_item(intern!(py, "_lost_with"))?;
    // The owner of the inner transport may keep the inner transport's protocol, which is this object, forever. So this
    // object must not keep the inner transport alive.
    drop(this.inner.take(py));
    lose(this, &exception)
}

/// Tells the application and the waiter of the end, and drops the references to both.
fn lose(this: Tls<'_>, exception: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = this.py();
    let was_made = matches!(this.notified.get(), Notified::Made | Notified::Eof);
    let protocol = this.calls.get(py);
    let result = if was_made {
        this.notified.set(Notified::Lost);
        this.calls
            .call(py, names(py).connection_lost, &[exception])
            .map(drop)
    } else {
        Ok(())
    };
    this.calls.drop_all(py);
    let outcome = if exception.is_none() {
        Ok(exception)
    } else {
        Err(exception.clone())
    };
    wake_waiter(this, outcome)?;
    if let (Err(error), Some(event_loop), Some(protocol)) = (result, this.event_loop.get(py), protocol) {
        return errors::report(
            &event_loop,
            "Fatal error: protocol.connection_lost() call failed.",
            error,
            &[("transport", &this.to_bound()), ("protocol", &protocol)],
        );
    }
    Ok(())
}

// ---- helpers -------------------------------------------------------------------------------------------------

pub(super) fn value_of<'py>(py: Python<'py>, error: &PyErr) -> Bound<'py, PyAny> {
    error.clone_ref(py).into_value(py).into_bound(py).into_any()
}

fn debug_log(this: Tls<'_>, what: &str) -> PyResult<()> {
    this.reactor()
        .probe
        .log_event(this.py(), Mode::LOG_TLS, || (this.to_bound(), what.to_owned()));
    if !this.reactor().probe.is_debug() {
        return Ok(());
    }
    log::debug(this.py(), &format!("%r {what}"), &[this.to_bound()])
}
