//! `add_reader`, `add_writer` and their removal: callbacks on a descriptor's readiness.

use std::os::fd::RawFd;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::handle::{HandleRef, check_callback};
use super::names::names;
use super::native_type::{Args, This, bool_object, method, none};
use super::pyloop::LoopObject;
use super::reactor::{Direction, Slot, Watcher};
use super::scheduling::{os_result, remember_source};

type Object<'py> = PyResult<Bound<'py, PyAny>>;

/// A descriptor from an int or an object with `fileno()`. ValueError otherwise, as `selectors` has it.
pub(crate) fn descriptor(target: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    let number = if target.is_instance_of::<pyo3::types::PyInt>() {
        target.extract::<i64>()
    } else {
        target
            .call_method0(names().fileno.bind(target.py()).cast::<pyo3::types::PyString>()?)
            .and_then(|fd| fd.extract())
    };
    let Ok(number) = number else {
        return Err(PyValueError::new_err(format!(
            "Invalid file object: {}",
            target.repr()?
        )));
    };
    match RawFd::try_from(number) {
        Ok(fd) if fd >= 0 => Ok(fd),
        _ => Err(PyValueError::new_err(format!(
            "Invalid file descriptor: {number}"
        ))),
    }
}

/// RuntimeError if a transport owns the descriptor.
pub(crate) fn refuse_transport(this: &LoopObject, py: Python<'_>, fd: RawFd) -> PyResult<()> {
    match this.reactor().slot(fd) {
        Some(Slot::Source(source)) => Err(PyRuntimeError::new_err(format!(
            "File descriptor {fd} is used by transport {}",
            source.to_bound(py).repr()?
        ))),
        _ => Ok(()),
    }
}

fn add<'py>(
    this: This<'py, LoopObject>,
    args: Args<'_, 'py>,
    direction: Direction,
    name: &str,
) -> Object<'py> {
    let py = this.py();
    args.at_least(name, 2)?;
    let values = args.positional();
    let fd = match args.get(0) {
        Some(target) => descriptor(&target)?,
        None => return Ok(none(py)),
    };
    this.reactor().check_closed()?;
    refuse_transport(&this, py, fd)?;
    let is_debug = this.reactor().is_debug();
    if is_debug && let Some(callback) = args.get(1) {
        this.check_thread()?;
        check_callback(&callback, name)?;
    }
    let handle = HandleRef::create_repeating(py, this.as_ptr().cast(), values[1], &values[2..])?;
    if is_debug {
        remember_source(py, handle)?;
    }
    match this
        .reactor()
        .set_watcher(py, fd, direction, Some(Watcher::Handle(handle)))
    {
        Ok(replaced) => {
            let added = handle.new_ref().into_bound(py);
            if let Some(replaced) = replaced {
                replaced.end(py);
            }
            Ok(added)
        }
        Err(error) => {
            handle.release(py);
            os_result(Err(error))
        }
    }
}

fn remove(this: This<'_, LoopObject>, fd: RawFd, direction: Direction) -> PyResult<bool> {
    let py = this.py();
    if this.reactor().watcher(fd, direction).is_none() {
        return Ok(false);
    }
    let removed = os_result(this.reactor().set_watcher(py, fd, direction, None))?;
    if let Some(removed) = removed {
        removed.end(py);
    }
    Ok(true)
}

fn remove_public<'py>(
    this: This<'py, LoopObject>,
    args: Args<'_, 'py>,
    direction: Direction,
    name: &str,
    is_checked: bool,
) -> Object<'py> {
    let py = this.py();
    args.exactly(name, 1)?;
    let Some(target) = args.get(0) else {
        return Ok(none(py));
    };
    if this.reactor().is_closed() {
        return Ok(bool_object(py, false));
    }
    let fd = descriptor(&target)?;
    if is_checked {
        refuse_transport(&this, py, fd)?;
    }
    Ok(bool_object(py, remove(this, fd, direction)?))
}

fn add_reader<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    add(this, args, Direction::Read, "add_reader").map(|_| none(this.py()))
}

fn add_writer<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    add(this, args, Direction::Write, "add_writer").map(|_| none(this.py()))
}

fn add_reader_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    add(this, args, Direction::Read, "_add_reader")
}

fn add_writer_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    add(this, args, Direction::Write, "_add_writer")
}

fn remove_reader<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    remove_public(this, args, Direction::Read, "remove_reader", true)
}

fn remove_writer<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    remove_public(this, args, Direction::Write, "remove_writer", true)
}

fn remove_reader_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    remove_public(this, args, Direction::Read, "_remove_reader", false)
}

fn remove_writer_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    remove_public(this, args, Direction::Write, "_remove_writer", false)
}

fn ensure_fd_no_transport<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_ensure_fd_no_transport", 1)?;
    if let Some(target) = args.get(0) {
        refuse_transport(&this, this.py(), descriptor(&target)?)?;
    }
    Ok(none(this.py()))
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        method!(
            LoopObject,
            c"add_reader",
            add_reader,
            c"Call callback(*args) whenever fd can be read."
        ),
        method!(
            LoopObject,
            c"add_writer",
            add_writer,
            c"Call callback(*args) whenever fd can be written."
        ),
        method!(
            LoopObject,
            c"remove_reader",
            remove_reader,
            c"End add_reader(); True if there was one."
        ),
        method!(
            LoopObject,
            c"remove_writer",
            remove_writer,
            c"End add_writer(); True if there was one."
        ),
        method!(
            LoopObject,
            c"_add_reader",
            add_reader_handle,
            c"add_reader() that returns the Handle."
        ),
        method!(
            LoopObject,
            c"_add_writer",
            add_writer_handle,
            c"add_writer() that returns the Handle."
        ),
        method!(
            LoopObject,
            c"_remove_reader",
            remove_reader_handle,
            c"remove_reader() as asyncio names it inside."
        ),
        method!(
            LoopObject,
            c"_remove_writer",
            remove_writer_handle,
            c"remove_writer() as asyncio names it inside."
        ),
        method!(
            LoopObject,
            c"_ensure_fd_no_transport",
            ensure_fd_no_transport,
            c"RuntimeError if a transport owns the descriptor."
        ),
    ]
}
