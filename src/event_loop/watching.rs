//! `add_reader`, `add_writer` and their removal: callbacks on a descriptor's readiness.

use std::os::fd::RawFd;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::call_methods::{os_result, remember_source};
use super::fileno::number_of;
use super::handle::{HandleRef, check_callback};
use super::pyloop::LoopObject;
use super::reactor::{Direction, Watcher};
use crate::binding::args::Args;
use crate::binding::native_type::This;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;

fn valid_fd(number: i64) -> Option<RawFd> {
    RawFd::try_from(number).ok().filter(|fd| *fd >= 0)
}

fn invalid_fd(number: i64) -> PyErr {
    PyValueError::new_err(format!("Invalid file descriptor: {number}"))
}

/// The descriptor that an int or an object with `fileno()` stands for. Raises ValueError for anything else, as
/// `selectors` does.
pub(crate) fn descriptor(target: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    let number = number_of(target)?;
    valid_fd(number).ok_or_else(|| invalid_fd(number))
}

/// Raises RuntimeError if a transport owns the descriptor. But if other code has closed the transport's socket, this
/// ends the transport's registration instead, because the number may belong to another file now.
pub(crate) fn refuse_transport(this: &LoopObject, py: Python<'_>, fd: RawFd) -> PyResult<()> {
    let descriptors = &this.reactor().descriptors;
    let Some((token, source)) = descriptors.source(fd) else {
        return Ok(());
    };
    if source.has_descriptor(py) {
        return Err(PyRuntimeError::new_err(format!(
            "File descriptor {fd} is used by transport {}",
            source.to_bound(py).repr()?
        )));
    }
    descriptors.displace(py, token);
    Ok(())
}

/// `add_reader` and `add_writer`. Returns a new reference to the handle.
fn add<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>, direction: Direction) -> ObjectResult<'py> {
    let py = this.py();
    let (values, descriptors) = (args.positional(), &this.reactor().descriptors);
    let Some(target) = args.get(0) else {
        return Ok(none(py));
    };
    let number = number_of(&target)?;
    this.reactor().check_closed()?;
    let fd = match valid_fd(number) {
        Some(fd) => {
            refuse_transport(&this, py, fd)?;
            descriptors.end_displaced(fd, &target);
            fd
        }
        None => descriptors.fd_of(&target).ok_or_else(|| invalid_fd(number))?,
    };
    let is_debug = this.reactor().probe.is_debug();
    if is_debug && let Some(callback) = args.get(1) {
        this.check_thread()?;
        check_callback(&callback, args.name())?;
    }
    let handle = HandleRef::create_repeating(py, this.as_ptr().cast(), values[1], &values[2..])?;
    if is_debug {
        remember_source(handle.this(py))?;
    }
    let added = handle.to_bound(py);
    let watcher = Some(Watcher::with_target(handle, &target));
    let replaced = if valid_fd(number).is_some() {
        descriptors.set_watcher(py, fd, direction, watcher)
    } else {
        descriptors.set_closed_watcher(fd, direction, watcher)
    };
    if let Some(replaced) = os_result(replaced)? {
        replaced.end(py);
    }
    Ok(added)
}

fn remove(this: This<'_, LoopObject>, fd: RawFd, direction: Direction) -> PyResult<bool> {
    let py = this.py();
    let descriptors = &this.reactor().descriptors;
    if !descriptors.is_watched(fd, direction) {
        return Ok(false);
    }
    let removed = os_result(descriptors.set_watcher(py, fd, direction, None))?;
    if let Some(removed) = removed {
        removed.end(py);
    }
    Ok(true)
}

/// Removes the callback of a file object that is closed, and so has no number any more. Raises ValueError if the object
/// is not registered, unless its registration ended because another object got its number.
fn remove_closed(
    this: This<'_, LoopObject>,
    target: &Bound<'_, PyAny>,
    number: i64,
    direction: Direction,
) -> PyResult<bool> {
    let (py, descriptors) = (this.py(), &this.reactor().descriptors);
    let Some(fd) = descriptors.fd_of(target) else {
        return if descriptors.was_displaced(target) {
            Ok(false)
        } else {
            Err(invalid_fd(number))
        };
    };
    // The closed object may be registered only for the other direction.
    if !descriptors.is_registered_for(fd, direction, target) {
        return Ok(false);
    }
    match os_result(descriptors.set_closed_watcher(fd, direction, None))? {
        Some(removed) => {
            removed.end(py);
            Ok(true)
        }
        None => Ok(false),
    }
}

fn remove_public<'py>(
    this: This<'py, LoopObject>,
    args: Args<'_, 'py>,
    direction: Direction,
    is_checked: bool,
) -> ObjectResult<'py> {
    let py = this.py();
    let Some(target) = args.get(0) else {
        return Ok(none(py));
    };
    if this.reactor().is_closed() {
        return Ok(bool_object(py, false));
    }
    let number = match number_of(&target) {
        // In asyncio, only the check for transports rejects an object whose `fileno()` fails. Without that check, the
        // object is found by its identity.
        Err(_) if !is_checked && this.reactor().descriptors.fd_of(&target).is_some() => -1,
        number => number?,
    };
    let Some(fd) = valid_fd(number) else {
        return Ok(bool_object(py, remove_closed(this, &target, number, direction)?));
    };
    if is_checked {
        refuse_transport(&this, py, fd)?;
    }
    Ok(bool_object(py, remove(this, fd, direction)?))
}

fn add_reader<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    add(this, args, Direction::Read).map(|_| none(this.py()))
}

fn add_writer<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    add(this, args, Direction::Write).map(|_| none(this.py()))
}

fn add_reader_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    add(this, args, Direction::Read)
}

fn add_writer_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    add(this, args, Direction::Write)
}

fn remove_reader<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    remove_public(this, args, Direction::Read, true)
}

fn remove_writer<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    remove_public(this, args, Direction::Write, true)
}

fn remove_reader_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    remove_public(this, args, Direction::Read, false)
}

fn remove_writer_handle<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    remove_public(this, args, Direction::Write, false)
}

fn ensure_fd_no_transport<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(target) = args.get(0) {
        refuse_transport(&this, this.py(), descriptor(&target)?)?;
    }
    Ok(none(this.py()))
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            add_reader,
            Loop.add_reader,
            "Call callback(*args) whenever fd can be read."
        ),
        row!(
            method,
            add_writer,
            Loop.add_writer,
            "Call callback(*args) whenever fd can be written."
        ),
        row!(
            method,
            remove_reader,
            Loop.remove_reader,
            "Undo add_reader(); True if there was a reader."
        ),
        row!(
            method,
            remove_writer,
            Loop.remove_writer,
            "Undo add_writer(); True if there was a writer."
        ),
        row!(
            method,
            add_reader_handle,
            Loop._add_reader,
            "add_reader() that returns the Handle."
        ),
        row!(
            method,
            add_writer_handle,
            Loop._add_writer,
            "add_writer() that returns the Handle."
        ),
        row!(
            method,
            remove_reader_handle,
            Loop._remove_reader,
            "remove_reader() without the check for transports; asyncio's internal name."
        ),
        row!(
            method,
            remove_writer_handle,
            Loop._remove_writer,
            "remove_writer() without the check for transports; asyncio's internal name."
        ),
        row!(
            method,
            ensure_fd_no_transport,
            Loop._ensure_fd_no_transport,
            "Raise RuntimeError if a transport owns the descriptor."
        ),
    ]
}
