//! The coroutine of one socket operation: how it runs its attempts and how it waits.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::attempts::{self, OperationKind};
use super::plain_socket;
use crate::binding::native_type::This;
use crate::binding::object_result::ObjectResult;
use crate::binding::{base_socket, errors};
use crate::event_loop::coroutine::{self, Coroutine, Place, Steps};
use crate::event_loop::progress::{Attempt, CoroutineStep, Progress, WaitReason};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::{waiter, watching};

/// The additional fields of a socket operation. Of the fields that every coroutine has, `subject` is the socket,
/// `first` is the number of bytes, the buffer or the data, and `second` is a further argument or an object that is kept
/// between the steps.
pub(super) struct SocketSteps {
    /// The exported buffer of the data that is being sent; null if there is none.
    pub(super) view: Cell<*mut ffi::Py_buffer>,
    /// The number of bytes that have been sent.
    pub(super) sent: Cell<usize>,
}

pub(super) type Operation<'py> = Coroutine<'py, SocketSteps>;

static PLACE: Place = Place::new();

/// Makes the coroutine of an operation. No attempt is made yet.
pub(super) fn new_operation<'py>(
    event_loop: This<'py, LoopObject>,
    kind: OperationKind,
    socket: Option<Bound<'py, PyAny>>,
    first: Option<Bound<'py, PyAny>>,
    second: Option<Bound<'py, PyAny>>,
) -> ObjectResult<'py> {
    coroutine::new_coroutine::<SocketSteps>(event_loop.to_bound(), kind, socket, first, second)
}

impl Steps for SocketSteps {
    const NAME: &'static CStr = c"grapeshot._core._SocketOperation";
    const DOC: &'static CStr = c"The coroutine of one sock_* call.";
    type Kind = OperationKind;

    fn place() -> &'static Place {
        &PLACE
    }

    fn names(kind: OperationKind) -> (&'static str, &'static str) {
        ("Loop", kind.name())
    }

    #[inline]
    fn attempt(this: Operation<'_>, _: *mut ffi::PyObject) -> PyResult<CoroutineStep<'_>> {
        Ok(match attempts::attempt(this)? {
            Attempt::Done(value) => Progress::Done(value),
            Attempt::MustWait(reason) => coroutine::yield_waiter(this, new_wait(this, reason)?),
        })
    }

    fn reset(&self) {
        self.sent.set(0);
    }

    fn release(this: Operation<'_>) {
        attempts::release_view(&this.rest);
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's; the view holds its own reference to its exporter.
        unsafe { attempts::traverse_view(self, visit, arg) }
    }
}

/// Makes the waiter that the coroutine yields. The waiter is pending until the descriptor has an event. But if the
/// coroutine yields only for fairness, the waiter is finished already: the task continues in the next iteration, after
/// other code has run.
fn new_wait(this: Operation<'_>, reason: WaitReason) -> ObjectResult<'_> {
    let py = this.py();
    let (Some(event_loop), Some(socket)) = (this.event_loop.get(py), this.subject.get(py)) else {
        return Err(PyRuntimeError::new_err(
            "the operation has already ended and has released its socket",
        ));
    };
    let owner = this.loop_object();
    owner.reactor().check_closed()?;
    let mut fd = -1;
    if plain_socket::is_plain(&socket) {
        fd = base_socket::descriptor(&socket)?;
    }
    if fd < 0 {
        // The general function raises the proper error for a closed socket.
        fd = watching::descriptor(&socket)?;
    }
    watching::refuse_transport(owner, py, fd)?;
    let direction = this.kind.get().direction();
    let waiter = waiter::new_waiter(&event_loop, fd, direction)?;
    if let WaitReason::Fairness = reason {
        waiter::finish_now(waiter::waiter_of(&waiter));
        return Ok(waiter);
    }
    let entry = waiter::entry(&waiter);
    let is_anew = this.kind.get() == OperationKind::Writable;
    match owner
        .reactor()
        .descriptors
        .wait_once(&socket, fd, direction, entry, is_anew)
    {
        Ok(replaced) => {
            if let Some(replaced) = replaced {
                replaced.end(py);
            }
            Ok(waiter)
        }
        Err(error) => {
            waiter::finish_now(waiter::waiter_of(&waiter));
            Err(errors::os_error(&error))
        }
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    coroutine::make_type::<SocketSteps>(module)
}
