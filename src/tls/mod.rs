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
//! know descriptors: anything with the methods of `asyncio.Transport` can be its inner transport, another
//! `SSLTransport` too.

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
use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::queue::records::Framing;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::attributes::OwnMethods;
use crate::binding::native_type::{This, extend_type};
use crate::binding::object_cell::ObjectCell;
use crate::transports::flags::FlagCell;
use crate::transports::object::{Body, TransportObject};
use crate::transports::outgoing::Outgoing;
use crate::transports::protocol::ProtocolCalls;
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
        /// Nothing waits for the handshake: debug mode reports its failure.
        const ACCEPTED = 1 << 7;
        /// The read limits are not the default ones.
        const READ_LIMITED = 1 << 8;
        /// What a record holds does not follow from its length (compression), or may come in several reads (an
        /// `SSLObject` with methods of its own): reads go on until there is nothing.
        const UNCOUNTED = 1 << 9;
        /// `start_tls` is complete, and its waiter has not run yet: the first data comes after that.
        const STARTED = 1 << 10;
        /// The connection was closed inside of the encryption, after which the closing goes on.
        const CLOSE_HELD = 1 << 11;
        /// On the loop's list: writes are encrypted at the end of the running step.
        const HELD = 1 << 12;
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
    /// Nothing is sent or received any more; the inner transport is closing or closed.
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

struct TlsBody {
    /// The Future that waits for the handshake.
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

type TlsObject = TransportObject<TlsBody>;
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

/// True if `write` and the end of an object for which `is_tls` holds may be called natively: they have not been
/// replaced.
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

impl Body for TlsBody {
    const NAME: &'static CStr = c"grapeshot._core.SSLTransport";
    const DOC: &'static CStr = c"TLS above a stream transport; the interface of asyncio.Transport.";

    fn describe(this: Tls<'_>) -> String {
        methods::describe(this)
    }

    fn is_open(&self) -> bool {
        !self.flags.has(Flags::CLOSED) && !matches!(self.state.get(), State::Initial | State::Over)
    }

    /// The inner transport closes what it owns itself.
    fn close(&self, _: Python<'_>) {
        self.flags.set(Flags::CLOSED);
    }

    fn calls(&self) -> &ProtocolCalls {
        &self.calls
    }

    /// The backlog holds only bytes, which cannot be part of a cycle.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        self.engine.cells().into_iter().chain([
            &self.undelivered,
            &self.waiter,
            &self.timer,
            &self.handshake_timeout,
            &self.shutdown_timeout,
            self.inner.cell(),
        ])
    }

    /// The engine stays: methods rely on it, and what it refers to does not refer to the transport.
    fn clear(&self, py: Python<'_>) {
        for cell in [self.inner.cell(), &self.waiter, &self.timer] {
            drop(cell.take(py));
        }
    }
}

/// Adds the type to the module, and the method that makes it to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    buffer_view::register(module)?;
    methods::register(module)?;
    extend_type(&module.getattr("Loop")?, protocol_methods::loop_methods())
}
