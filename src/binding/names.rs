//! Interned strings, and the few objects of asyncio, `socket`, `signal` and `warnings` that native code needs. They are
//! fetched once at import and kept forever.
//!
//! Nothing writes to the table after `fill`, so any attached thread may read it.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyBool, PyString, PyTuple};

/// A Python object that is never freed.
#[derive(Clone, Copy)]
pub(crate) struct Kept(*mut ffi::PyObject);

// SAFETY: a pointer to an object that is never freed. Using the object requires an attached thread, as with `Py`.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

impl Kept {
    /// Keeps `object` forever.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> Self {
        Self(object.clone().into_ptr())
    }

    #[inline]
    pub(crate) fn as_ptr(self) -> *mut ffi::PyObject {
        self.0
    }

    #[inline]
    pub(crate) fn bind(self, py: Python<'_>) -> Bound<'_, PyAny> {
        // SAFETY: the reference taken in `new` is never released, so the object is alive.
        unsafe { Bound::from_borrowed_ptr(py, self.0) }
    }
}

macro_rules! kept {
    (strings { $($string:ident)* } objects { $($object:ident = $path:literal . $attribute:literal)* }) => {
        #[allow(non_snake_case)] // each field has the name of the string that it holds
        pub(crate) struct Names {
            $(pub(crate) $string: Kept,)*
            $(pub(crate) $object: Kept,)*
            /// `asyncio.events._ThreadSafeHandle`, which exists from 3.14 on.
            pub(crate) threadsafe_handle_type: Option<Kept>,
            /// `_asyncio._get_running_loop`, which `create_task` calls from 3.14 on. None in earlier versions, where
            /// the call would cost more than it saves. (In 3.11, each call makes a system call, `getpid`.)
            pub(crate) get_running_loop: Option<Kept>,
            /// The keyword arguments of a future that never gets callbacks. Such a future calls only its loop's
            /// `get_debug()`, so `loop` is a stand-in that has only this method, which returns False.
            pub(crate) done_future_kwargs: Kept,
            /// `"type"`, which is a keyword of Rust and so cannot be the name of a field.
            pub(crate) type_keyword: Kept,
            /// `"loop"`, also a keyword of Rust.
            pub(crate) loop_keyword: Kept,
            /// `("loop",)`: the keyword names of a vectorcall.
            pub(crate) kw_loop: Kept,
            /// `()`
            pub(crate) no_args: Kept,
        }

        impl Names {
            fn load(py: Python<'_>) -> PyResult<Self> {
                Ok(Self {
                    $($string: Kept::new(PyString::intern(py, stringify!($string)).as_any()),)*
                    $($object: Kept::new(&py.import($path)?.getattr($attribute)?),)*
                    threadsafe_handle_type: py
                        .import("asyncio.events")?
                        .getattr_opt("_ThreadSafeHandle")?
                        .map(|kind| Kept::new(&kind)),
                    get_running_loop: if py.version_info() >= (3, 14) {
                        Some(Kept::new(&py.import("_asyncio")?.getattr("_get_running_loop")?))
                    } else {
                        None
                    },
                    done_future_kwargs: {
                        let attributes = [("get_debug", py.get_type::<PyBool>())].into_py_dict(py)?;
                        let namespace = py.import("types")?.getattr("SimpleNamespace")?;
                        let part_of_loop = namespace.call((), Some(&attributes))?;
                        Kept::new([("loop", part_of_loop)].into_py_dict(py)?.as_any())
                    },
                    no_args: Kept::new(PyTuple::empty(py).as_any()),
                    type_keyword: Kept::new(PyString::intern(py, "type").as_any()),
                    loop_keyword: Kept::new(PyString::intern(py, "loop").as_any()),
                    kw_loop: Kept::new(PyTuple::new(py, [PyString::intern(py, "loop")])?.as_any()),
                })
            }
        }
    };
}

kept! {
    strings {
        connection_made connection_lost data_received eof_received get_buffer buffer_updated pause_writing
        resume_writing datagram_received error_received sendto recvfrom set_result set_exception done fileno close _attach _detach
        _accepting time call_at context Future Task _signal_handlers family proto flags getaddrinfo _resolve
        _stream_reader_wr feed_data _wakeup_waiter _eof _buffer _waiter _transport _paused _limit cancelled pause_reading name socket
        _grapeshot_running greenlet switch
    }
    objects {
        futures_dict = "asyncio.futures"."__dict__"
        tasks_dict = "asyncio.tasks"."__dict__"
        handle_type = "asyncio"."Handle"
        timer_handle_type = "asyncio"."TimerHandle"
        transport_type = "asyncio"."Transport"
        protocol_type = "asyncio"."Protocol"
        read_transport_type = "asyncio"."ReadTransport"
        write_transport_type = "asyncio"."WriteTransport"
        datagram_transport_type = "asyncio"."DatagramTransport"
        future_type = "_asyncio"."Future"
        task_type = "_asyncio"."Task"
        warn = "warnings"."warn"
        set_wakeup_fd = "signal"."set_wakeup_fd"
        socket_dict = "socket"."__dict__"
        native_socket_dict = "_socket"."__dict__"
        address_family = "socket"."AddressFamily"
        socket_kind = "socket"."SocketKind"
        lookup_error = "_socket"."gaierror"
        host_error = "_socket"."herror"
        buffered_protocol_type = "asyncio"."BufferedProtocol"
        read_running_loop = "_asyncio"."_get_running_loop"
        set_running_loop = "_asyncio"."_set_running_loop"
        cancelled_error = "asyncio"."CancelledError"
    }
}

static NAMES: PyOnceLock<Names> = PyOnceLock::new();

/// Loads the table. The module's initialization calls it once, before any native object exists.
pub(crate) fn fill(py: Python<'_>) -> PyResult<()> {
    NAMES.get_or_try_init(py, || Names::load(py)).map(drop)
}

/// The table.
#[inline]
pub(crate) fn names(py: Python<'_>) -> &'static Names {
    // SAFETY: `fill` has run before any code of this crate could be reached from Python.
    unsafe { NAMES.get(py).unwrap_unchecked() }
}
