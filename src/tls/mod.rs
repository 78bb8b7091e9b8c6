//! `SSLTransport`: TLS above any stream transport, with the user's own `ssl.SSLContext`.
//!
//! - `engine`: the `SSLObject`; `direct`, `bio`, `openssl`: how its data goes directly through OpenSSL's C functions;
//!   `buffer_view`: how the C functions of Python's `ssl` module use native memory, where OpenSSL cannot be called
//!   directly
//! - `lifecycle`: the handshake, and everything that ends a connection; `shutdown`: the orderly end
//! - `reading`, `writing`: the two directions; `inner`: the inner transport
//! - `methods`, `protocol_methods`: the Python interface, as a transport and as a protocol
//!
//! One object is both the application's transport and the protocol of the inner transport:
//!
//! ```text
//!   application protocol          data_received   ^    | write
//!                                                 |    v
//!   SSLTransport     reading <-- engine <-- received   writing --> engine --> ciphertext
//!                                                 ^    |
//!   inner transport (StreamTransport, ...)        |    v write
//! ```
//!
//! The object is used on the loop's thread only, except that any thread may call `close`, `abort` and `is_closing`. All
//! fields are cells, because a call into Python may re-enter any method. An `SSLTransport` has no descriptor of its own:
//! any object with the methods of `asyncio.Transport` can be its inner transport, including another `SSLTransport`.

mod bio;
mod buffer_view;
mod direct;
mod engine;
mod inner;
mod lifecycle;
mod methods;
mod openssl;
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
use crate::binding::flags::FlagCell;
use crate::binding::native_type::This;
use crate::binding::object_cell::ObjectCell;
use crate::binding::rows::extend_type;
use crate::transports::object::{Body, TransportObject};
use crate::transports::outgoing::Outgoing;
use crate::transports::protocol::ProtocolCalls;
use engine::Engine;
use inner::Inner;

bitflags::bitflags! {
    #[derive(Clone, Copy)]
    struct Flags: u16 {
        /// The application has called `close()` or `abort()`, the peer has sent `close_notify`, or the connection is
        /// gone.
        const CLOSED = 1;
        /// The application has called `pause_reading()` and not yet `resume_reading()`.
        const APP_PAUSED = 1 << 1;
        /// We have paused the inner transport: too much ciphertext is waiting.
        const INNER_PAUSED = 1 << 2;
        /// The inner transport has called `pause_writing()`.
        const INNER_FULL = 1 << 3;
        /// The inner transport has reached the end of its stream.
        const INNER_EOF = 1 << 4;
        /// A callback of the application's own protocol is running: writes are encrypted when it returns.
        const CORKED = 1 << 5;
        /// Plaintext is being encrypted. A write in the meantime goes to the end of the backlog.
        const ENCRYPTING = 1 << 6;
        /// An accepted connection: no caller waits for the handshake, so debug mode reports it if it fails.
        const ACCEPTED = 1 << 7;
        /// `set_read_buffer_limits()` was called.
        const READ_LIMITED = 1 << 8;
        /// The length of a record does not tell how much plaintext it has (compression), or the plaintext may come in
        /// several reads (an `SSLObject` with methods of its own). So reads continue until there is no more data.
        const UNCOUNTED = 1 << 9;
        /// The handshake of `start_tls` is complete, but `start_tls` has not returned yet. Until then, no data is
        /// delivered.
        const STARTED = 1 << 10;
        /// `close()` was called while plaintext was being encrypted. The shutdown continues after the encryption.
        const CLOSE_HELD = 1 << 11;
        /// The transport is on the loop's list of the transports that hold data (`flush_policy`). The data is encrypted
        /// when the loop empties the list.
        const HELD = 1 << 12;
    }
}

/// The state of the TLS connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not connected to an inner transport yet.
    Initial,
    Handshake,
    /// Data is sent and received.
    Open,
    /// Our side is closing, but data that was written is still sent.
    Flushing,
    /// We have sent `close_notify` and wait for the peer's.
    Shutdown,
    /// Nothing is sent or received any more, and the inner transport is closing or closed.
    Over,
}

/// The last event that the application's protocol was told of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notified {
    Nothing,
    Made,
    Eof,
    Lost,
}

struct TlsBody {
    /// The Future to complete after the handshake.
    waiter: ObjectCell,
    /// The TimerHandle for the time limit of the handshake or the shutdown.
    timer: ObjectCell,
    /// The time limits in seconds, as the Python objects that the caller passed.
    handshake_timeout: ObjectCell,
    shutdown_timeout: ObjectCell,
    /// Plaintext (`bytes`) that was decrypted at the end of the stream while the application had paused reading.
    undelivered: ObjectCell,
    engine: Engine,
    inner: Inner,
    calls: ProtocolCalls,
    /// Plaintext that is not encrypted yet, and its watermarks.
    backlog: Outgoing,
    /// The read limits: the amount of ciphertext in the incoming BIO at which the inner transport is paused, and the
    /// amount at which it is resumed.
    read_limits: Cell<(usize, usize)>,
    /// The position in the stream of received records.
    framing: Cell<Framing>,
    /// An upper bound of the number of whole, unread records in the incoming BIO. (After the handshake, OpenSSL may
    /// have read some of the records that were counted during it.)
    records: Cell<usize>,
    /// An upper bound of the bytes of plaintext in these records.
    capacity: Cell<usize>,
    /// The smallest number of bytes that a record has in addition to its header and its plaintext.
    overhead_len: Cell<usize>,
    /// The amount of ciphertext that has come after our `close_notify`, in bytes.
    discarded_len: Cell<usize>,
    state: Cell<State>,
    notified: Cell<Notified>,
    flags: FlagCell<Flags>,
    /// The number of writes that were ignored, for the warning about them. The loss of the inner transport counts as
    /// such a write, too.
    lost_writes: Cell<u8>,
}

type TlsObject = TransportObject<TlsBody>;
/// The native side of an `SSLTransport`.
type Tls<'py> = This<'py, TlsObject>;

/// The default of the high read limit in bytes, the same as asyncio's for TLS. The low limit is a quarter of it.
const READ_HIGH: usize = 256 * 1024;

static TLS_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static OWN_METHODS: OwnMethods = OwnMethods::new();

/// True for an `SSLTransport`.
fn is_tls(transport: &Bound<'_, PyAny>) -> bool {
    transport.get_type_ptr() == TLS_TYPE.load(Ordering::Relaxed)
}

/// True if no program has replaced `write` or `_force_close` of the transport. Native code then writes to the transport
/// and ends it without calling these methods. Requires that `is_tls` has returned true for the object.
#[inline]
fn has_own_methods(transport: &Bound<'_, PyAny>) -> bool {
    OWN_METHODS.are_in_force(transport, &tls_of(transport).dict)
}

/// The native side of an object for which `is_tls` has returned true.
fn tls_of<'py>(transport: &Bound<'py, PyAny>) -> Tls<'py> {
    debug_assert!(is_tls(transport));
    // SAFETY: the caller has checked the type, and its Bound keeps the object alive.
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

    /// Only marks the transport as closed: the inner transport closes the descriptor.
    fn close(&self, _: Python<'_>) {
        self.flags.set(Flags::CLOSED);
    }

    fn calls(&self) -> &ProtocolCalls {
        &self.calls
    }

    /// The backlog is left out: it holds only `bytes` objects, which cannot be part of a cycle.
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

    /// The engine stays, because methods rely on it and its objects do not refer to the transport.
    fn clear(&self, py: Python<'_>) {
        for cell in [self.inner.cell(), &self.waiter, &self.timer] {
            drop(cell.take(py));
        }
    }
}

/// Adds the type to the module. Adds the method that creates its objects to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    buffer_view::register(module)?;
    methods::register(module)?;
    extend_type(&module.getattr("Loop")?, protocol_methods::loop_methods())
}
