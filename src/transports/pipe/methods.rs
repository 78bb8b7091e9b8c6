//! The Python interface of pipe transports: the methods of `asyncio.ReadTransport` and `asyncio.WriteTransport`, and
//! `loop._read_pipe` and `loop._write_pipe`. `get_extra_info` is inherited from asyncio.

use std::sync::atomic::Ordering;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::reading::{self, Reading};
use super::writing::{self, Writing};
use super::{Pipe, PipeBody, PipeEnd, lifecycle};
use crate::binding::args::Args;
use crate::binding::attributes::shown;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::event_loop::pyloop::LoopObject;
use crate::transports::object;

// ---- both ends -----------------------------------------------------------------------------------------------

fn is_closing<'py, E: PipeEnd>(this: Pipe<'py, E>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.is_closing.load(Ordering::Relaxed)))
}

fn set_protocol<'py, E: PipeEnd>(this: Pipe<'py, E>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(protocol) = args.get(0) {
        this.calls.bind(&protocol)?;
    }
    Ok(none(this.py()))
}

// ---- reading -------------------------------------------------------------------------------------------------

fn close_reading<'py>(this: Pipe<'py, Reading>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "close", || reading::close(this))
}

fn is_reading<'py>(this: Pipe<'py, Reading>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), reading::is_reading(&this)))
}

fn pause_reading<'py>(this: Pipe<'py, Reading>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    reading::pause(this)?;
    Ok(none(this.py()))
}

fn resume_reading<'py>(this: Pipe<'py, Reading>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    reading::resume(this)?;
    Ok(none(this.py()))
}

// ---- writing -------------------------------------------------------------------------------------------------

fn write<'py>(this: Pipe<'py, Writing>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(data) = args.get(0) {
        writing::write(this, &data)?;
    }
    Ok(none(this.py()))
}

fn writelines<'py>(this: Pipe<'py, Writing>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(items) = args.get(0) {
        writing::writelines(this, &items)?;
    }
    Ok(none(this.py()))
}

fn write_eof<'py>(this: Pipe<'py, Writing>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    writing::close(this)?;
    Ok(none(this.py()))
}

fn can_write_eof<'py>(this: Pipe<'py, Writing>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), true))
}

fn close_writing<'py>(this: Pipe<'py, Writing>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "close", || writing::close(this))
}

fn abort<'py>(this: Pipe<'py, Writing>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    object::end(this, "abort", || writing::abort(this))
}

fn get_write_buffer_size<'py>(this: Pipe<'py, Writing>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let len_bytes = this.end.outgoing.len_bytes();
    Ok(len_bytes.into_pyobject(this.py())?.into_any())
}

fn get_write_buffer_limits<'py>(this: Pipe<'py, Writing>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let limits = this.end.outgoing.watermarks.limits();
    Ok(limits.into_pyobject(this.py())?.into_any())
}

fn set_write_buffer_limits<'py>(this: Pipe<'py, Writing>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limits = args.bind()?;
    this.end.outgoing.watermarks.set(limits)?;
    writing::limits_changed(this)?;
    Ok(none(this.py()))
}

// ---- on the loop ---------------------------------------------------------------------------------------------

fn open<'py, E: PipeEnd>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor().check_closed()?;
    let [pipe, protocol, waiter, extra] = args.bind()?;
    let (Some(pipe), Some(protocol)) = (pipe, protocol) else {
        return Err(PyTypeError::new_err(format!(
            "{}() takes a pipe and a protocol",
            args.name()
        )));
    };
    let given = |value: Option<Bound<'py, PyAny>>| value.filter(|value| !value.is_none());
    let extra = given(extra).map(Bound::cast_into::<PyDict>).transpose()?;
    lifecycle::open::<E>(&this.to_bound(), &pipe, &protocol, given(waiter), extra)
}

/// `loop._read_pipe(pipe, protocol, waiter=None, extra=None)`.
fn open_reading<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    open::<Reading>(this, args)
}

/// `loop._write_pipe(pipe, protocol, waiter=None, extra=None)`.
fn open_writing<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    open::<Writing>(this, args)
}

/// The methods that this module adds to the loop's type.
pub(in crate::transports) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            open_reading,
            Loop._read_pipe,
            "Make the transport of the reading end of a pipe."
        ),
        row!(
            method,
            open_writing,
            Loop._write_pipe,
            "Make the transport of the writing end of a pipe."
        ),
    ]
}

/// The methods that both types have.
fn common_methods<E: PipeEnd>() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            threadsafe_method,
            <E: PipeEnd> is_closing::<E>,
            WritePipeTransport.is_closing,
            "True once the pipe is being closed."
        ),
        row!(
            method,
            <E: PipeEnd> object::get_protocol::<PipeBody<E>>,
            WritePipeTransport.get_protocol,
            "The protocol, None once connection_lost() has run."
        ),
        row!(
            method,
            <E: PipeEnd> set_protocol::<E>,
            WritePipeTransport.set_protocol,
            "Use another protocol from the next event on."
        ),
    ]
}

fn read_methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = vec![
        row!(
            threadsafe_method,
            close_reading,
            ReadPipeTransport.close,
            "Stop reading, then close the pipe."
        ),
        row!(
            method,
            is_reading,
            ReadPipeTransport.is_reading,
            "True while data is read."
        ),
        row!(
            method,
            pause_reading,
            ReadPipeTransport.pause_reading,
            "Stop reading until resume_reading() is called."
        ),
        row!(
            method,
            resume_reading,
            ReadPipeTransport.resume_reading,
            "Read again after pause_reading()."
        ),
    ];
    methods.extend(common_methods::<Reading>());
    methods
}

fn write_methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = vec![
        row!(
            method,
            write,
            WritePipeTransport.write,
            "Write bytes-like data, or queue it if the pipe is full."
        ),
        row!(
            method,
            writelines,
            WritePipeTransport.writelines,
            "Write several bytes-like objects in one call."
        ),
        row!(
            method,
            write_eof,
            WritePipeTransport.write_eof,
            "The same as close()."
        ),
        row!(
            method,
            can_write_eof,
            WritePipeTransport.can_write_eof,
            "Return True."
        ),
        row!(
            threadsafe_method,
            close_writing,
            WritePipeTransport.close,
            "Write the buffered data, then close the pipe."
        ),
        row!(
            threadsafe_method,
            abort,
            WritePipeTransport.abort,
            "Close the pipe now and discard the buffered data."
        ),
        row!(
            method,
            get_write_buffer_size,
            WritePipeTransport.get_write_buffer_size,
            "The number of bytes that the kernel has not taken yet."
        ),
        row!(
            method,
            get_write_buffer_limits,
            WritePipeTransport.get_write_buffer_limits,
            "The (low, high) watermarks in bytes."
        ),
        row!(
            method,
            set_write_buffer_limits,
            WritePipeTransport.set_write_buffer_limits,
            "Set the watermarks in bytes; ValueError unless high >= low >= 0."
        ),
    ];
    methods.extend(common_methods::<Writing>());
    methods
}

// ---- private attributes of asyncio's transports that programs use -----------------------------------------------

fn get_pipe<E: PipeEnd>(this: Pipe<'_, E>) -> ObjectResult<'_> {
    Ok(this.pipe.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn get_number<E: PipeEnd>(this: Pipe<'_, E>) -> ObjectResult<'_> {
    object::number(this.py(), this.fileno)
}

fn get_closing<E: PipeEnd>(this: Pipe<'_, E>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.is_closing.load(Ordering::Relaxed)))
}

fn get_paused(this: Pipe<'_, Reading>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), reading::is_paused(&this)))
}

fn is_protocol_paused(this: Pipe<'_, Writing>) -> ObjectResult<'_> {
    let is_paused = this.end.outgoing.watermarks.is_paused();
    Ok(bool_object(this.py(), is_paused))
}

/// The attributes that both types have.
fn common_getters<E: PipeEnd>() -> Vec<ffi::PyGetSetDef> {
    vec![
        shown(c"_loop", object::get_loop::<PipeBody<E>>, c"The loop."),
        shown(c"_protocol", object::protocol::<PipeBody<E>>, c"The protocol."),
        shown(
            c"_pipe",
            get_pipe::<E>,
            c"The pipe object, None once it is closed.",
        ),
        shown(c"_fileno", get_number::<E>, c"The number of the descriptor."),
        shown(
            c"_closing",
            get_closing::<E>,
            c"True once the pipe is being closed.",
        ),
    ]
}

fn read_getters() -> Vec<ffi::PyGetSetDef> {
    let mut rows = common_getters::<Reading>();
    rows.push(shown(
        c"_paused",
        get_paused,
        c"True between pause_reading() and resume_reading().",
    ));
    rows
}

fn write_getters() -> Vec<ffi::PyGetSetDef> {
    let mut rows = common_getters::<Writing>();
    rows.push(shown(
        c"_protocol_paused",
        is_protocol_paused,
        c"True between pause_writing() and resume_writing().",
    ));
    rows
}

pub(in crate::transports) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    object::make_type::<PipeBody<Reading>>(
        module,
        &[names(module.py()).read_transport_type],
        read_methods(),
        read_getters(),
        Reading::kind(),
    )?;
    object::make_type::<PipeBody<Writing>>(
        module,
        &[names(module.py()).write_transport_type],
        write_methods(),
        write_getters(),
        Writing::kind(),
    )?;
    Ok(())
}
