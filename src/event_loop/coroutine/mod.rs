//! Coroutines written in native code. A module that offers coroutines implements `Steps` for each type of coroutine.
//!
//! - `object`: the object and its states, from its creation to its deallocation
//! - `protocol`: steps, `send`, `throw` and `close`
//! - `attributes`: the table of methods, the attributes, and the creation of the type
//!
//! ```text
//!   [ created ] --- first step: an attempt ---------------------> done at once: [ closed ]
//!                          | it must wait
//!                          v
//!                     [ suspended ] <--- yields a waiter ---.
//!                          | step after the wake-up         | it must wait
//!                          '------- another attempt --------+---> done: [ closed ]
//!   throw() and close() lead from [ created ] and [ suspended ] to [ closed ], and end the wait; but throw() leads
//!   to [ suspended ] if a coroutine that this one drives catches the exception and waits again
//! ```
//! `collections.abc.Coroutine` recognizes the objects by their methods. A task takes a coroutine's steps through
//! `am_send`. An `await` takes them through `tp_iternext`. The objects have no frame, and only the loop's thread may
//! use them.

mod attributes;
mod object;
mod protocol;

use std::ffi::{CStr, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use super::progress::CoroutineStep;
use super::pyloop::LoopObject;
use crate::binding::object_cell::ObjectCell;

pub(crate) use attributes::make_type;
pub(crate) use object::{Coroutine, Place, new_coroutine};
pub(crate) use protocol::{raised, yield_waiter};

/// The behaviour of one type of coroutine. The struct that implements this trait has the fields that this type of
/// coroutine adds to the object (`CoroutineObject::rest`). New memory is zeroed, so zero bytes must be a valid value of
/// the struct.
pub(crate) trait Steps: Sized + 'static {
    /// Fully qualified name of the type.
    const NAME: &'static CStr;
    const DOC: &'static CStr;
    /// Says which method returned the coroutine. The size of this type must be one byte: see `CoroutineObject`.
    type Kind: Copy + 'static;

    /// Where the type and its freelist are stored.
    fn place() -> &'static Place;

    /// The names of the class and of the method that returned the coroutine.
    fn names(kind: Self::Kind) -> (&'static str, &'static str);

    /// Makes one attempt. `value` is the value that was sent to the coroutine, borrowed for the call.
    ///
    /// `MustWait` contains the object to yield. This is either a waiter from `yield_waiter`, or, if the coroutine
    /// drives another one, the object that the other one has yielded.
    fn attempt(this: Coroutine<'_, Self>, value: *mut ffi::PyObject) -> PyResult<CoroutineStep<'_>>;

    /// Prepares the added fields for a new coroutine, which may reuse the memory of a coroutine that has ended.
    fn reset(&self) {}

    /// Drops the values in the added fields when the coroutine has ended, except for the values in cells.
    fn release(_this: Coroutine<'_, Self>) {}

    /// Throws into the coroutine that this one drives, if it drives one.
    fn throw_inside<'py>(
        _this: Coroutine<'py, Self>,
        _error: &Bound<'py, PyAny>,
    ) -> Option<PyResult<Bound<'py, PyAny>>> {
        None
    }

    /// Closes the coroutine that this one drives, if it drives one.
    fn close_inside(_this: Coroutine<'_, Self>) -> PyResult<()> {
        Ok(())
    }

    /// The cells among the added fields.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        []
    }

    /// See `NativeType::traverse_rest`.
    ///
    /// # Safety
    /// Only the collector calls this. Nothing in it may run Python code.
    unsafe fn traverse_rest(&self, _visit: ffi::visitproc, _arg: *mut c_void) -> c_int {
        0
    }

    /// See `NativeType::with_access`.
    fn with_access<R>(this: Coroutine<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }
}
