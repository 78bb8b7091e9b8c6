//! asyncio's streams in native code: the native base classes of `grapeshot.streams.StreamReader`, `StreamWriter` and
//! `StreamReaderProtocol`. The second base of each of these classes is asyncio's class of the same name.
//!
//! - `reader`: the data that a reader holds, and how data gets in and out
//! - `operation`: the coroutines of `read()` and its relatives, and of `drain()`
//! - `writer`, `protocol`: the other two classes
//! - `attribute`: fields of native objects that asyncio's own code sets
//!
//! Native code handles the common cases: reading data that the reader already holds, waiting for data, writing to one
//! of our transports, and a drain with nothing to wait for. In almost all other cases (the end of the stream,
//! exceptions, limits, flow control, other loops) asyncio's own functions work on the same objects, so these cases work
//! exactly as in the running version of Python. For an object of a subclass, and for one with methods that a program
//! has replaced, asyncio's functions do everything. (Only the writer's `write()` and the protocol's `data_received()`
//! stay native, since they just call the transport and the reader.)
//!
//! The objects are used on their loop's thread only.

mod attribute;
mod operation;
mod protocol;
mod reader;
mod writer;

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

use self::attribute::Customizable;
use crate::binding::names::Kept;
use crate::binding::native_type::{This, with_critical_section};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::ObjectResult;
use crate::binding::rows::bind_methods;
use crate::event_loop::pyloop::LoopObject;

/// asyncio's functions as they were when `grapeshot.streams` was imported: the coroutine functions, in the order of
/// `operation::Kind`, and `StreamReader.feed_data`.
struct Stock {
    coroutines: Vec<Kept>,
    feed_data: Kept,
}

static STOCK: PyOnceLock<Stock> = PyOnceLock::new();

fn stock(py: Python<'_>) -> PyResult<&'static Stock> {
    STOCK.get_or_try_init(py, || {
        let streams = py.import("asyncio.streams")?;
        let (reader, writer) = (streams.getattr("StreamReader")?, streams.getattr("StreamWriter")?);
        let coroutines = operation::Kind::ALL
            .iter()
            .map(|kind| {
                let class = if *kind == operation::Kind::Drain {
                    &writer
                } else {
                    &reader
                };
                Ok(Kept::new(&class.getattr(kind.name())?))
            })
            .collect::<PyResult<_>>()?;
        Ok(Stock {
            coroutines,
            feed_data: Kept::new(&reader.getattr("feed_data")?),
        })
    })
}

/// Runs `body` with access to the object: like `LoopObject::with_access_of` if the loop is one of ours, otherwise with
/// the object itself locked.
#[inline(always)]
fn with_access<T, R>(
    this: This<'_, T>,
    event_loop: &ObjectCell,
    body: impl FnOnce() -> PyResult<R>,
) -> PyResult<R> {
    if crate::binding::HAS_GIL {
        return body();
    }
    match event_loop.get(this.py()) {
        Some(event_loop) if LoopObject::is_loop(&event_loop) => {
            LoopObject::of(&event_loop).with_loop_access(this.py(), body)
        }
        _ => with_critical_section(this, body),
    }
}

/// A native base type and the Python class that is built on it. Native code compares an object's type with these two to
/// find out whether the object has the native layout.
struct StreamType {
    base: AtomicPtr<ffi::PyTypeObject>,
    class: AtomicPtr<ffi::PyTypeObject>,
}

impl StreamType {
    const fn new() -> Self {
        Self {
            base: AtomicPtr::new(ptr::null_mut()),
            class: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn set_base(&self, base: Bound<'_, PyType>) {
        self.base.store(base.into_ptr().cast(), Ordering::Release);
    }

    /// Stores the class, which must be a subclass of the base.
    fn set_class(&self, class: &Bound<'_, PyType>) {
        self.class
            .store(class.clone().into_ptr().cast(), Ordering::Release);
    }

    /// True for an object of the class, the base or any other subclass.
    #[inline]
    fn has(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type_ptr() == self.class.load(Ordering::Relaxed)
            // SAFETY: attached, with a live object; the base is stored before any object can exist.
            || unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), self.base.load(Ordering::Relaxed)) != 0 }
    }
}

/// `_set_stream_types(reader, writer, protocol)`: sets the classes whose objects native code treats as its own. Called
/// once. The native methods are also added to the reader's and the writer's class, because CPython specializes a method
/// call only if it finds the method on the object's exact type.
#[pyfunction(name = "_set_stream_types")]
fn set_stream_types(
    reader: &Bound<'_, PyType>,
    writer: &Bound<'_, PyType>,
    protocol: &Bound<'_, PyType>,
) -> PyResult<()> {
    stock(reader.py())?;
    let core = reader.py().import("grapeshot._core")?;
    for (class, place, base) in [
        (reader, &reader::READER_TYPE, "_StreamReader"),
        (writer, &writer::WRITER_TYPE, "_StreamWriter"),
        (protocol, &protocol::PROTOCOL_TYPE, "_StreamReaderProtocol"),
    ] {
        if !class.is_subclass(&core.getattr(base)?)? {
            return Err(PyTypeError::new_err(format!(
                "{class} must be a subclass of {base}"
            )));
        }
        place.set_class(class);
    }
    bind_methods(reader, &core.getattr("_StreamReader")?, reader::methods())?;
    bind_methods(writer, &core.getattr("_StreamWriter")?, writer::methods())?;
    reader::OWN_METHODS.remember(reader, reader::ReaderObject::METHODS)?;
    writer::OWN_METHODS.remember(writer, writer::WriterObject::METHODS)?;
    protocol::OWN_METHODS.remember(protocol, protocol::ProtocolObject::METHODS)?;
    Ok(())
}

/// Adds the types to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    operation::register(module)?;
    reader::register(module)?;
    writer::register(module)?;
    protocol::register(module)?;
    module.add_function(wrap_pyfunction!(set_stream_types, module)?)
}

/// `tp_new` of a type whose `__init__` is asyncio's.
unsafe extern "C" fn new_object(
    kind: *mut ffi::PyTypeObject,
    _args: *mut ffi::PyObject,
    _kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_new, attached, with a type of this module or a subclass. The memory comes zeroed, and
    // zeroed memory is a valid object of each of these types.
    unsafe { ffi::PyType_GenericAlloc(kind, 0) }
}

/// Calls `function(*args)`.
fn call(function: Kept, args: Bound<'_, PyTuple>) -> ObjectResult<'_> {
    function.bind(args.py()).call1(args)
}
