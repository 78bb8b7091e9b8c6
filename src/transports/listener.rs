//! Listening sockets: connections are accepted in batches, straight from the poller's event.
//!
//! Belongs to the loop's thread. The listening socket stays the server's (Python); this holds a reference while it
//! is being listened on.

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
use crate::binding::native_type::{
    Args, NativeType, This, method, methods_slot, new_type, none, represent, slot,
};
use crate::binding::object_cell::ObjectCell;
use crate::binding::socket_object;
use crate::binding::{errors, log};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::source::Source;

/// Seconds until accepting is tried again when the process or the system is out of descriptors or memory.
const RETRY_DELAY_S: f64 = 1.0;

#[repr(C)]
pub(super) struct ListenerObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    socket: ObjectCell,
    factory: ObjectCell,
    server: ObjectCell,
    /// The context of the server; each connection gets a copy.
    context: ObjectCell,
    registration: Registration,
    /// Connections accepted per event at most.
    batch: Cell<u32>,
    /// `accept_queued` is in the ready queue.
    is_queued: Cell<bool>,
}

static LISTENER_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

/// After the run that `stop()` ended.
unsafe fn accept_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `on_ready` with a listener, whose reference the queue holds.
    let this: This<'_, ListenerObject> = unsafe { This::new(py, object) };
    this.is_queued.set(false);
    if this.registration.is_entered() {
        return accept(this);
    }
    Ok(())
}

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
        // The server's socket may have been closed, by the protocol factory for instance.
        let accepted = this.registration.usable_fd(py).and_then(socket::accept);
        reactor.counters.note_accept(&accepted);
        match accepted {
            Ok((fd, peer)) => {
                if reactor.is_debug() {
                    log_connection(&server, &fd, &peer)?;
                }
                // SAFETY: attached, with a context object that we hold.
                let own = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_Copy(context.as_ptr()))? };
                stream::accept(&event_loop, fd, peer, &factory, &server, own)?;
            }
            Err(error) if socket::is_no_connection(&error) => return Ok(()),
            Err(error) => return on_accept_error(this, &event_loop, &error),
        }
        if !this.registration.is_entered() {
            return Ok(());
        }
    }
    Ok(())
}

impl Source for ListenerObject {
    /// After `stop()` no protocol is made any more, as with asyncio, whose tasks would start in the next run. A program
    /// that has just cancelled all tasks would miss those of the new connections.
    fn on_ready(this: This<'_, Self>, _: Readiness) -> PyResult<()> {
        let Some(event_loop) = this.event_loop.get(this.py()) else {
            return Ok(());
        };
        let reactor = LoopObject::of(&event_loop).reactor();
        if !reactor.is_stopping() {
            return accept(this);
        }
        if !this.is_queued.replace(true) {
            reactor.defer(this.to_bound(), accept_queued);
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

/// Debug mode logs each connection. Err is only for what must leave the loop.
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

/// Out of descriptors or memory: reports it, and stops polling the socket for a second, since it would stay ready.
/// Anything else is reported and ends the listening, as in asyncio, where the exception does so.
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

/// `<_Listener fd=5 of <Server sockets=(...)>>`.
unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr attached with an object of this type.
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

/// `loop._listen(sock, protocol_factory, server, backlog)`: the listener, whose `_stop()` ends it.
fn listen<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
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
    // Connections inherit this option, which saves a system call for each. It fails for what is not TCP.
    let _ = socket::set_nodelay(fd);
    // SAFETY: the type is made by `register` for this layout; the allocation comes zeroed, which is a valid state.
    let listener = unsafe {
        let made = ffi::PyType_GenericAlloc(LISTENER_TYPE.load(Ordering::Relaxed), 0);
        Bound::from_owned_ptr_or_err(py, made)?
    };
    // SAFETY: made just above with this layout, kept alive by `listener`.
    let body: This<'_, ListenerObject> = unsafe { This::new(py, listener.as_ptr()) };
    // SAFETY: what is overwritten holds nothing, and the collector finds either of them whole.
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
    body.context
        .set(unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent())? });
    body.batch.set(batch);
    start(body, &this)?;
    Ok(listener)
}

/// `listener._stop()`.
fn stop_listening<'py>(this: This<'py, ListenerObject>, _: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    stop(this);
    Ok(none(this.py()))
}

/// After a pause: listen again, unless the server was closed or the loop has ended meanwhile.
fn resume<'py>(this: This<'py, ListenerObject>, _: Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
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
        method!(ListenerObject, resume, "_resume()", "Listen again after a pause."),
        method!(ListenerObject, stop_listening, "_stop()", "Listen no more."),
    ];
    // SAFETY: the functions are those of this layout, the tables are leaked.
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

/// Methods that this room adds to the loop's type.
pub(super) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![method!(
        LoopObject,
        listen,
        "_listen(sock, protocol_factory, server, backlog)",
        "Accept connections on a listening socket."
    )]
}
