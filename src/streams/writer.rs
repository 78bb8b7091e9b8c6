//! `StreamWriter`: `write()`, and a `drain()` that usually has nothing to wait for.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::mem::offset_of;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::attribute::{Customizable, object_row, setattro};
use super::operation::{self, Kind};
use super::{StreamType, new_object, protocol, reader, with_access};
use crate::binding::args::Args;
use crate::binding::attributes::OwnMethods;
use crate::binding::native_type::{NativeType, This, new_type, slot};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{getset_slot, methods_slot, row};
use crate::transports::stream;

#[repr(C)]
pub(super) struct WriterObject {
    base: ffi::PyObject,
    pub(super) event_loop: ObjectCell,
    transport: ObjectCell,
    protocol: ObjectCell,
    reader: ObjectCell,
    /// Whether a program has replaced `drain` on this object.
    is_customized: Cell<bool>,
}

pub(super) type Writer<'py> = This<'py, WriterObject>;

pub(super) static WRITER_TYPE: StreamType = StreamType::new();

pub(super) static OWN_METHODS: OwnMethods = OwnMethods::new();

/// The native side of an object; None if its class is neither our writer type nor a subclass of it.
#[inline]
pub(super) fn writer_of<'py>(object: &Bound<'py, PyAny>) -> Option<Writer<'py>> {
    if !WRITER_TYPE.has(object) {
        return None;
    }
    // SAFETY: a live object of a type with this layout, by the check; the caller's Bound keeps it alive.
    Some(unsafe { This::new(object.py(), object.as_ptr()) })
}

fn transport(this: Writer<'_>) -> Bound<'_, PyAny> {
    this.transport.get(this.py()).unwrap_or_else(|| none(this.py()))
}

#[inline(always)]
fn write<'py>(this: Writer<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (py, data) = (this.py(), args.positional()[0]);
    let transport = transport(this);
    if stream::is_stream(&transport) && stream::has_own_methods(&transport) {
        stream::write_as_method(&transport, data)?;
    } else if let Some(data) = args.get(0) {
        transport.call_method1("write", (data,))?;
    }
    Ok(none(py))
}

fn drain<'py>(this: Writer<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let event_loop = this.event_loop.get(py).unwrap_or_else(|| none(py));
    operation::new(event_loop, Kind::Drain, this.to_bound(), None)
}

/// True if `drain()` has nothing to wait for and nothing to raise.
#[inline]
pub(super) fn is_drained(this: Writer<'_>) -> PyResult<bool> {
    let py = this.py();
    if this.is_customized.get() || !OWN_METHODS.are_those_of_type(&this.to_bound()) {
        return Ok(false);
    }
    if let Some(object) = this.reader.get(py) {
        let has_none = reader::reader_of(&object)
            .is_some_and(|reader| reader::has_own_methods(reader) && !reader.exception.is_set());
        if !has_none {
            return Ok(false);
        }
    }
    let transport = transport(this);
    let is_closing = if stream::is_stream(&transport) && stream::has_own_methods(&transport) {
        stream::is_closing(&transport)?
    } else {
        let name = PyString::intern(py, "is_closing");
        transport.call_method0(name)?.is_truthy()?
    };
    let Some(object) = this.protocol.get(py) else {
        return Ok(false);
    };
    Ok(!is_closing && protocol::is_drained(&object))
}

impl Customizable for WriterObject {
    const METHODS: &'static [&'static str] = &["drain"];

    fn is_customized(&self) -> &Cell<bool> {
        &self.is_customized
    }
}

impl NativeType for WriterObject {
    const NAME: &'static CStr = c"grapeshot._core._StreamWriter";
    const DOC: &'static CStr = c"The native part of grapeshot.streams.StreamWriter.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.event_loop, &self.transport, &self.protocol, &self.reader]
    }

    #[inline(always)]
    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_access(this, &this.event_loop, body)
    }
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(method, write, _StreamWriter.write, "Call transport.write(data)."),
        row!(
            method,
            drain,
            _StreamWriter.drain,
            "A coroutine: wait until the transport can take more data."
        ),
    ]
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let object = object_row::<WriterObject>;
    let getters = vec![
        object(c"_loop", offset_of!(WriterObject, event_loop)),
        object(c"_transport", offset_of!(WriterObject, transport)),
        object(c"_protocol", offset_of!(WriterObject, protocol)),
        object(c"_reader", offset_of!(WriterObject, reader)),
    ];
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind = unsafe {
        new_type::<WriterObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_new, new_object as *mut c_void),
                slot(ffi::Py_tp_setattro, setattro::<WriterObject> as *mut c_void),
                methods_slot(methods()),
                getset_slot(getters),
            ],
        )?
    };
    module.add(kind.name()?, &kind)?;
    WRITER_TYPE.set_base(kind);
    Ok(())
}
