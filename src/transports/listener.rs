//! Listening sockets. When the poller reports a listening socket as ready, its listener accepts a batch of connections
//! immediately, not in a later callback.
//!
//! Used on the loop's thread only. The Python server owns the listening socket; the listener has a reference to the
//! socket.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::sys::poller::{Interest, Readiness};
use grapeshot_core::sys::socket::{self, Address};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::registration::Registration;
use super::stream;
use crate::binding::args::Args;
use crate::binding::native_type::{NativeType, This, new_type, represent, slot};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{methods_slot, row};
use crate::binding::socket_object;
use crate::binding::{errors, log};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::source::Source;

/// When the process or the system has run out of descriptors or memory, a listener accepts nothing for this many
/// seconds.
const RETRY_DELAY_S: f64 = 1.0;

#[repr(C)]
pub(super) struct ListenerObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    socket: ObjectCell,
    factory: ObjectCell,
    server: ObjectCell,
    /// The context in which the server was started; each connection gets a copy.
    context: ObjectCell,
    registration: Registration,
    /// The maximum number of connections to accept per event.
    batch: Cell<u32>,
    /// True while `accept_queued` is in the ready queue.
    is_queued: Cell<bool>,
}

static LISTENER_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

/// Accepts the connections that the poller reported after a call of `loop.stop()`.
unsafe fn accept_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `on_ready` with a listener, to which the queue holds a reference.
    let this: This<'_, ListenerObject> = unsafe { This::new(py, object) };
    this.is_queued.set(false);
    if this.registration.is_entered() {
        return accept(this);
    }
    Ok(())
}

/// Accepts connections until there are no more, the batch is full, a limit is reached or the listening ends.
fn accept(this: This<'_, ListenerObject>) -> PyResult<()> {
    let py = this.py();
    let (Some(event_loop), Some(factory), Some(server), Some(context)) = (
        this.event_loop.get(py),
        this.factory.get(py),
        this.server.get(py),
        this.context.get(py),
    ) else {
        return Ok(());
    };
    let reactor = LoopObject::of(&event_loop).reactor();
    for _ in 0..this.batch.get() {
        if let Some(reached) = reactor.connection_limit_reached() {
            stop(this);
            return LoopObject::of(&event_loop).pause_listener(&this.to_bound(), reached);
        }
        // Other code may have closed the server's socket, for instance the protocol factory of the previous connection.
        let accepted = this.registration.usable_fd(py).and_then(socket::accept);
        reactor.probe.counters.note_accept(&accepted);
        match accepted {
            Ok((fd, peer)) => {
                if reactor.probe.is_debug() {
                    log_connection(&server, &fd, &peer)?;
                }
                // SAFETY: attached, with a context object to which we hold a reference.
                let own = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_Copy(context.as_ptr()))? };
                stream::accept(&event_loop, fd, peer, &factory, &server, own)?;
            }
            Err(error) if socket::is_no_connection(&error) => return Ok(()),
            Err(error) if socket::is_of_connection(&error) => {}
            Err(error) => return on_accept_error(this, &event_loop, &error),
        }
        if !this.registration.is_entered() {
            return Ok(());
        }
    }
    Ok(())
}

impl Source for ListenerObject {
    /// If `loop.stop()` was called before, connections are accepted only after everything that is queued now has run
    /// (`accept_queued`). If a handle of this iteration has called `stop()`, they are accepted in the next run of the
    /// loop. This matters if the handle has also cancelled all tasks: if connections were accepted later in the same
    /// iteration, the tasks that serve them would not be cancelled. asyncio, too, makes the protocol and the transport
    /// of such a connection in the next run, because it makes them in a task.
    fn on_ready(this: This<'_, Self>, _: Readiness) -> PyResult<()> {
        let Some(event_loop) = this.event_loop.get(this.py()) else {
            return Ok(());
        };
        let reactor = LoopObject::of(&event_loop).reactor();
        if !reactor.is_stopping() {
            return accept(this);
        }
        if !this.is_queued.replace(true) {
            reactor.ready.defer(this.to_bound(), accept_queued);
        }
        Ok(())
    }

    fn interest(&self) -> Interest {
        self.registration.interest()
    }

    fn has_descriptor(this: This<'_, Self>) -> bool {
        this.registration.usable_fd(this.py()).is_ok()
    }

    fn on_displaced(this: This<'_, Self>) {
        this.registration.displace();
    }
}

/// Logs an accepted connection in debug mode. Err is only for exceptions that must leave the loop.
#[cold]
fn log_connection(server: &Bound<'_, PyAny>, fd: &OwnedFd, peer: &Address) -> PyResult<()> {
    let py = server.py();
    let described = socket_object::address_object(py, peer)
        .and_then(|address| Ok([address, socket_object::describe(py, fd.as_raw_fd())?.into_any()]));
    match described {
        Ok([address, socket]) => log::debug(
            py,
            "%r got a new connection from %r: %s",
            &[server.clone(), address, socket],
        ),
        Err(error) => {
            error.write_unraisable(py, Some(server));
            Ok(())
        }
    }
}

fn is_out_of_resources(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}

/// Reports the error and stops polling the socket, because the poller would otherwise report it as ready again and
/// again. If the process or the system is out of descriptors or memory, listening resumes after `RETRY_DELAY_S`. Any
/// other error that gets here concerns the listening socket itself, and listening does not resume.
#[cold]
fn on_accept_error(
    this: This<'_, ListenerObject>,
    event_loop: &Bound<'_, PyAny>,
    error: &io::Error,
) -> PyResult<()> {
    let py = this.py();
    let own = this.to_bound();
    let Some(socket) = this.socket.get(py) else {
        return Ok(());
    };
    let guarded = socket_object::guarded(&socket)?;
    stop(this);
    if !is_out_of_resources(error) {
        return errors::report(
            event_loop,
            "socket.accept() failed",
            errors::os_error(error),
            &[("socket", &guarded)],
        );
    }
    let message = "socket.accept() out of system resource";
    errors::report(
        event_loop,
        message,
        errors::os_error(error),
        &[("socket", &guarded)],
    )?;
    event_loop.call_method1("call_later", (RETRY_DELAY_S, own.getattr("_resume")?))?;
    Ok(())
}

impl NativeType for ListenerObject {
    const NAME: &'static CStr = c"grapeshot._core._Listener";
    const DOC: &'static CStr = c"A listening socket registered with the loop.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.socket,
            &self.factory,
            &self.server,
            &self.context,
            self.registration.owner().cell(),
        ]
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }
}

/// The repr, for example `<_Listener fd=5 of <Server sockets=(...)>>`.
unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr, attached, with an object of this type.
    unsafe {
        represent::<ListenerObject>(slf, |this| {
            let server = match this.server.get(this.py()) {
                Some(server) => server.repr()?.to_string(),
                None => "no server".to_owned(),
            };
            Ok(format!(
                "<_Listener fd={} of {server}>",
                this.registration.number()
            ))
        })
    }
}

/// Begins listening: enters the listener into the fd table and the poller.
fn start(this: This<'_, ListenerObject>, event_loop: &LoopObject) -> PyResult<()> {
    this.registration
        .enter(this, event_loop.reactor(), Interest::READ)
        .map_err(|error| errors::os_error(&error))
}

/// Ends listening. Does nothing the second time.
fn stop(this: This<'_, ListenerObject>) {
    if let Some(event_loop) = this.event_loop.get(this.py()) {
        this.registration
            .leave(this, LoopObject::of(&event_loop).reactor());
    }
}

/// `loop._listen(sock, protocol_factory, server, backlog)`: starts listening and returns the listener. Its `_stop()`
/// ends the listening.
fn listen<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    this.reactor().check_closed()?;
    let [socket, factory, server, backlog] = args.bind()?;
    let (Some(socket), Some(factory), Some(server), Some(backlog)) = (socket, factory, server, backlog)
    else {
        return Err(PyTypeError::new_err(
            "_listen() takes a socket, a protocol factory, a server and a backlog",
        ));
    };
    let fd: RawFd = socket.call_method0("fileno")?.extract()?;
    if fd < 0 {
        return Err(errors::os_error(&io::Error::from_raw_os_error(libc::EBADF)));
    }
    let batch = backlog.extract::<i64>()?.clamp(1, 1024) as u32;
    // Accepted connections inherit TCP_NODELAY from the listening socket, which saves a system call for each of them.
    // `set_nodelay` fails for sockets that are not TCP.
    let _ = socket::set_nodelay(fd);
    // SAFETY: `register` made the type for this layout; the allocation comes zeroed, which is a valid state.
    let listener = unsafe {
        let made = ffi::PyType_GenericAlloc(LISTENER_TYPE.load(Ordering::Relaxed), 0);
        Bound::from_owned_ptr_or_err(py, made)?
    };
    // SAFETY: the object was made just above with this layout, and `listener` keeps it alive.
    let body: This<'_, ListenerObject> = unsafe { This::new(py, listener.as_ptr()) };
    // SAFETY: the field that is overwritten holds no reference, and it is valid for the collector before and after.
    unsafe {
        let place = listener.as_ptr().cast::<ListenerObject>();
        ptr::write(&raw mut (*place).registration, Registration::new(fd));
    }
    body.registration.set_owner(&socket);
    body.event_loop.set(this.to_bound());
    body.socket.set(socket);
    body.factory.set(factory);
    body.server.set(server);
    // SAFETY: attached; the call returns a new reference or null with an exception set.
    let context = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent())? };
    body.context.set(context);
    body.batch.set(batch);
    start(body, &this)?;
    Ok(listener)
}

/// `listener._stop()`.
fn stop_listening<'py>(this: This<'py, ListenerObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    stop(this);
    Ok(none(this.py()))
}

/// `listener._resume()`: listens again after a pause, unless the server or its socket was closed in the meantime.
fn resume<'py>(this: This<'py, ListenerObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    if let (Some(event_loop), Some(server)) = (this.event_loop.get(py), this.server.get(py))
        && server.call_method0("is_serving")?.is_truthy()?
        && this.registration.usable_fd(py).is_ok()
        && !this.registration.is_entered()
    {
        start(this, LoopObject::of(&event_loop))?;
    }
    Ok(none(py))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![
        row!(
            method,
            resume,
            "_resume()",
            "Listen again after a pause, if the server still serves."
        ),
        row!(method, stop_listening, "_stop()", "Stop listening."),
    ];
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind = unsafe {
        new_type::<ListenerObject>(
            module,
            None,
            &[slot(ffi::Py_tp_repr, repr as *mut c_void), methods_slot(methods)],
        )?
    };
    LISTENER_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}

/// The methods that this module adds to the loop's type.
pub(super) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![row!(
        method,
        listen,
        Loop._listen,
        "Accept connections on a listening socket."
    )]
}
