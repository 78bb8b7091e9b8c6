//! `SSLTransport`: TLS above any stream transport, with the user's own `ssl.SSLContext`.
//!
//! - `engine`: the `SSLObject` and its BIOs; `buffer_view`: native memory for C functions
//! - `lifecycle`: handshake, and everything that ends a connection; `shutdown`: its orderly end
//! - `reading`, `writing`: the two directions; `inner`: the inner transport
//! - `methods`, `protocol_methods`: what Python sees
//!
//! One object is the application's transport and the protocol of the inner transport at once:
//!
//! ```text
//!   application protocol          data_received   ^    | write
//!                                                 |    v
//!   SSLTransport     reading <-- engine <-- received   writing --> engine --> ciphertext
//!                                                 ^    |
//!   inner transport (StreamTransport, ...)        |    v write
//! ```
//!
//! It belongs to the loop's thread. All fields are cells: a call into Python may re-enter every method. It must not
//! know descriptors: whatever has the methods of `asyncio.Transport` can be below it, another `SSLTransport` too.

mod buffer_view;
mod engine;
mod inner;
mod lifecycle;
mod methods;
mod protocol_methods;
mod reading;
mod shutdown;
mod ssl_module;
mod writing;

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::queue::records::Framing;
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::binding::attributes::{HasInstanceDict, InstanceDict, OwnMethods};
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::native_type::{NativeType, This, extend_type, new_type, slot};
use crate::binding::object_cell::ObjectCell;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::Reactor;
use crate::transports::flags::FlagCell;
use crate::transports::outgoing::Outgoing;
use crate::transports::protocol::{self, ProtocolCalls};
use engine::Engine;
use inner::Inner;

bitflags::bitflags! {
    #[derive(Clone, Copy)]
    struct Flags: u16 {
        /// The application has called `close()` or `abort()`, or the connection is gone.
        const CLOSED = 1;
        /// `pause_reading()` of the application is in force.
        const APP_PAUSED = 1 << 1;
        /// We have paused the inner transport: too much ciphertext is waiting.
        const INNER_PAUSED = 1 << 2;
        /// The inner transport has called `pause_writing()`.
        const INNER_FULL = 1 << 3;
        /// The inner transport has reached the end of its stream.
        const INNER_EOF = 1 << 4;
        /// The application's own callback runs: writes are encrypted when it has returned.
        const CORKED = 1 << 5;
        /// The backlog is being encrypted: a write from inside goes behind it.
        const ENCRYPTING = 1 << 6;
        /// Nobody waits for the handshake: debug mode reports its failure.
        const ACCEPTED = 1 << 7;
        /// The read limits are not the default ones.
        const READ_LIMITED = 1 << 8;
        /// What a record holds does not follow from its length (compression), or may come in several reads (an `SSLObject` with
        /// methods of its own): reads go on until there is nothing.
        const UNCOUNTED = 1 << 9;
        /// `start_tls` is complete, and whoever waits for it has not run yet: the first data comes after that.
        const STARTED = 1 << 10;
        /// The connection was closed inside of the encryption, after which the closing goes on.
        const CLOSE_HELD = 1 << 11;
    }
}

/// Where the TLS connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not connected to an inner transport yet.
    Initial,
    Handshake,
    /// Data goes both ways.
    Open,
    /// Our side is closing; what was written still leaves.
    Flushing,
    /// `close_notify` is sent, the peer's is awaited.
    Shutdown,
    /// Nothing goes any more; the inner transport is closing or closed.
    Over,
}

/// What the application's protocol was told last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notified {
    Nothing,
    Made,
    Eof,
    Lost,
}

/// The object behind `SSLTransport`: the header of `asyncio.BaseTransport`, then our own fields.
#[repr(C)]
struct TlsObject {
    base: ffi::PyObject,
    /// The slot `_extra` of asyncio.BaseTransport: a dict.
    extra: ObjectCell,
    weakrefs: Cell<*mut ffi::PyObject>,
    /// What Python code has set on the transport.
    dict: InstanceDict,
    body: ManuallyDrop<TlsBody>,
    is_body_live: Cell<bool>,
}

struct TlsBody {
    event_loop: ObjectCell,
    /// The Future of whoever waits for the handshake.
    waiter: ObjectCell,
    /// The TimerHandle of the handshake's or the shutdown's time limit.
    timer: ObjectCell,
    /// The limits in seconds, as they were given.
    handshake_timeout: ObjectCell,
    shutdown_timeout: ObjectCell,
    /// Plaintext that was decrypted at the end of the stream, while the application has paused reading: `bytes`.
    undelivered: ObjectCell,
    engine: Engine,
    inner: Inner,
    calls: ProtocolCalls,
    /// Plaintext that is not encrypted yet, and its watermarks.
    backlog: Outgoing,
    /// Ciphertext in the incoming BIO above which the inner transport is paused, and down to which it stays so.
    read_limits: Cell<(usize, usize)>,
    framing: Cell<Framing>,
    /// Whole records in the incoming BIO that were not read yet (at most: those of a handshake may be read already),
    /// and no less than the plaintext in them.
    records: Cell<usize>,
    capacity: Cell<usize>,
    /// What each record certainly has beside its plaintext.
    overhead_len: Cell<usize>,
    /// Ciphertext that has come after our `close_notify`.
    discarded_len: Cell<usize>,
    state: Cell<State>,
    notified: Cell<Notified>,
    flags: FlagCell<Flags>,
    /// Writes after the end, for the warning about them.
    lost_writes: Cell<u8>,
}

impl Deref for TlsObject {
    type Target = TlsBody;

    #[inline]
    fn deref(&self) -> &TlsBody {
        &self.body
    }
}

/// The native side of an `SSLTransport`.
type Tls<'py> = This<'py, TlsObject>;

/// The default high read limit in bytes, asyncio's for TLS; the low one is a quarter of it.
const READ_HIGH: usize = 256 * 1024;

static TLS_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static OWN_METHODS: OwnMethods = OwnMethods::new();

/// True for an `SSLTransport`.
fn is_tls(transport: &Bound<'_, PyAny>) -> bool {
    transport.get_type_ptr() == TLS_TYPE.load(Ordering::Relaxed)
}

/// True if `write` and the end of an object for which `is_tls` holds may be called natively: nobody has put other methods
/// into their place.
#[inline]
fn has_own_methods(transport: &Bound<'_, PyAny>) -> bool {
    OWN_METHODS.are_in_force(transport, &tls_of(transport).dict)
}

/// The native side of an object for which `is_tls` holds.
fn tls_of<'py>(transport: &Bound<'py, PyAny>) -> Tls<'py> {
    debug_assert!(is_tls(transport));
    // SAFETY: checked by the caller; the caller's Bound keeps the object alive meanwhile.
    unsafe { This::new(transport.py(), transport.as_ptr()) }
}

impl TlsBody {
    #[inline]
    fn reactor(&self) -> &Reactor {
        // SAFETY: the transport holds a reference to its loop from its creation to its deallocation (tp_clear leaves
        // it), and the loop's layout is LoopObject (checked where transports are made).
        unsafe { (*self.event_loop.as_ptr().cast::<LoopObject>()).reactor() }
    }

    fn object_cells(&self) -> [&ObjectCell; 6] {
        [
            &self.undelivered,
            &self.event_loop,
            &self.waiter,
            &self.timer,
            &self.handshake_timeout,
            &self.shutdown_timeout,
        ]
    }
}

impl NativeType for TlsObject {
    const NAME: &'static CStr = c"grapeshot._core.SSLTransport";
    const DOC: &'static CStr = c"TLS above a stream transport; the interface of asyncio.Transport.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc;

    unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's, here and below.
        let result = unsafe { self.extra.traverse(visit, arg) };
        if result != 0 {
            return result;
        }
        // SAFETY: as above.
        let result = unsafe { self.dict.traverse(visit, arg) };
        if result != 0 || !self.is_body_live.get() {
            return result;
        }
        for cell in self.object_cells().into_iter().chain(self.engine.cells()) {
            // SAFETY: as above.
            let result = unsafe { cell.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        // SAFETY: as above. The backlog holds only bytes, which cannot be part of a cycle.
        unsafe {
            match self.inner.traverse(visit, arg) {
                0 => self.calls.traverse(visit, arg),
                result => result,
            }
        }
    }

    /// The loop and the engine stay: methods rely on them, and what refers to them lets go of us.
    fn clear(this: This<'_, Self>) {
        let py = this.py();
        drop(this.extra.take(py));
        this.dict.clear(py);
        if this.is_body_live.get() {
            this.calls.drop_all(py);
            drop(this.inner.take(py));
            drop(this.waiter.take(py));
            drop(this.timer.take(py));
        }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }
}

impl HasInstanceDict for TlsObject {
    fn instance_dict(&self) -> &InstanceDict {
        &self.dict
    }
}

/// A transport dropped while it is open: a ResourceWarning. What is below it warns and cleans up for itself.
unsafe extern "C" fn finalize(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls tp_finalize attached with an object of this type; the current exception is kept aside
    // as PEP 442 asks.
    unsafe {
        let py = Python::assume_attached();
        let pending = PyErr::take(py);
        errors::at_boundary(py, (), || {
            let this = Tls::new(py, slf);
            let is_open = this.is_body_live.get()
                && !this.flags.has(Flags::CLOSED)
                && !matches!(this.state.get(), State::Initial | State::Over);
            if is_open {
                this.flags.set(Flags::CLOSED);
                let category = py.get_type::<pyo3::exceptions::PyResourceWarning>();
                let message = format!("unclosed transport {}", methods::describe(this));
                let warned = names()
                    .warn
                    .bind(py)
                    .call1((message, category, 1, this.to_bound()));
                if let Err(error) = warned {
                    error.write_unraisable(py, Some(&this.to_bound()));
                }
            }
            Ok(())
        });
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached with an unreferenced transport; the finalizer may revive it, then nothing
    // more is done; otherwise the fields are dropped in place and the memory goes back to the allocator.
    unsafe {
        if ffi::PyObject_CallFinalizerFromDealloc(slf) < 0 {
            return;
        }
        let py = Python::assume_attached();
        ffi::PyObject_GC_UnTrack(slf.cast());
        let tls = slf.cast::<TlsObject>();
        if !(*tls).weakrefs.get().is_null() {
            ffi::PyObject_ClearWeakRefs(slf);
        }
        if (*tls).is_body_live.get() {
            drop_fields(py, &(*tls).body);
            ManuallyDrop::drop(&mut (*tls).body);
        }
        (*tls).dict.clear(py);
        drop((*tls).extra.take(py));
        let kind = ffi::Py_TYPE(slf);
        ffi::PyObject_GC_Del(slf.cast());
        ffi::Py_DECREF(kind.cast());
    }
}

/// Gives back every reference of a body that is going away.
fn drop_fields(py: Python<'_>, body: &TlsBody) {
    body.calls.drop_all(py);
    body.engine.drop_all(py);
    drop(body.inner.take(py));
    for cell in body.object_cells() {
        drop(cell.take(py));
    }
}

/// Makes the type on top of `asyncio.Transport` and `asyncio.Protocol`, so that `isinstance()` holds.
fn make_type(module: &Bound<'_, PyModule>, slots: &[ffi::PyType_Slot]) -> PyResult<()> {
    let py = module.py();
    let base = names().transport_type.bind(py);
    let base_size: usize = base.getattr("__basicsize__")?.extract()?;
    if base_size != std::mem::offset_of!(TlsObject, weakrefs) {
        return Err(PyImportError::new_err(format!(
            "asyncio.Transport has objects of {base_size} bytes here, which this build of grapeshot does not know"
        )));
    }
    let mut all = vec![slot(ffi::Py_tp_finalize, finalize as *mut c_void)];
    all.extend(slots.iter().map(|entry| slot(entry.slot, entry.pfunc)));
    let bases = PyTuple::new(py, [base, names().protocol_type.bind(py)])?;
    // SAFETY: the functions are those of this layout, which starts with the base's (checked above); asyncio.Protocol
    // adds nothing to it.
    let kind = unsafe { new_type::<TlsObject>(module, Some(&bases), &all)? };
    // What asyncio's loop.start_tls() asks of a transport.
    kind.setattr("_start_tls_compatible", true)?;
    // And sendfile(): what the system sends is not encrypted, so the file is read and written.
    let mode = py.import("asyncio.constants")?.getattr("_SendfileMode")?;
    kind.setattr("_sendfile_compatible", mode.getattr("FALLBACK")?)?;
    OWN_METHODS.remember(&kind, &["write", "_force_close"])?;
    module.add("SSLTransport", &kind)?;
    let kind = kind.into_ptr().cast();
    TLS_TYPE.store(kind, Ordering::Release);
    protocol::register_native(kind, reading::received_raw);
    Ok(())
}

/// Adds the type to the module, and the method that makes it to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    buffer_view::register(module)?;
    methods::register(module)?;
    extend_type(&module.getattr("Loop")?, protocol_methods::loop_methods())
}
