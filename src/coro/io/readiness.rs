//! Functions that wait until a descriptor is ready, but do not read or write: `wait_for_read`, `wait_for_write`, and
//! the `_wait` of sockets.

use pyo3::exceptions::{PyPermissionError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::socket::Socket;
use super::wait::{Target, Wait};
use crate::binding::args::Args;
use crate::binding::current_thread;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::coro::coroutine::Outcome;
use crate::coro::runtime::current;
use crate::coro::sync::Limit;
use crate::coro::{scheduler, suspension};
use crate::event_loop::progress::Progress;
use crate::event_loop::reactor::Direction;
use crate::event_loop::watching;

/// The state of the call, which stays on the stack while the coro waits.
struct Kept {
    slf: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    wait: Wait,
    direction: Direction,
    is_anew: bool,
    has_begun: bool,
    fd: i32,
}

impl Kept {
    fn new(slf: *mut ffi::PyObject, args: Args<'static, 'static>, direction: Direction) -> Self {
        Self {
            slf,
            args,
            wait: Wait::new(),
            direction,
            is_anew: false,
            has_begun: false,
            fd: -1,
        }
    }

    /// Ends the previous wait, if there was one, and begins another one unless the call is over.
    fn go_on(
        &mut self,
        object: &Bound<'static, PyAny>,
        socket: Option<&Socket<'static>>,
        outcome: Option<Outcome<'static>>,
    ) -> PyResult<Progress<Bound<'static, PyAny>>> {
        let py = object.py();
        let waiting = socket.map(|socket| &socket.extra().waiting);
        if self.has_begun {
            let is_ready = current(py).is_some_and(|coro| self.wait.end(coro, waiting));
            outcome.transpose()?;
            if is_ready {
                return Ok(Progress::Done(none(py)));
            }
            self.wait.check_time()?;
        }
        self.has_begun = true;
        let target = Target {
            object,
            waiting,
            fd: self.fd,
            direction: self.direction,
            is_anew: self.is_anew,
        };
        match self.wait.begin(target) {
            Ok(Progress::MustWait(())) => Ok(Progress::MustWait(())),
            Ok(Progress::Done(())) => Ok(Progress::Done(none(py))),
            Err(error) if is_always_ready(py, &error) => Ok(Progress::Done(none(py))),
            Err(error) => Err(error),
        }
    }
}

/// Whether the error is epoll's refusal of a regular file or directory. Reads and writes of these never wait.
fn is_always_ready(py: Python<'_>, error: &PyErr) -> bool {
    // On Python 3.11, the type of the `PyErr` itself is OSError. Only the exception object is a PermissionError.
    error.value(py).is_instance_of::<PyPermissionError>()
}

/// `wait_for_read(fd, /, timeout=None)` and `wait_for_write(fd, /, timeout=None)`
fn step_of_function(
    _: Python<'static>,
    kept: &mut Kept,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    if !kept.has_begun {
        let [target, timeout] = kept.args.bind()?;
        let target = target.ok_or_else(no_target)?;
        kept.wait.set_limit(limit_of(timeout)?);
        kept.fd = watching::descriptor(&target)?;
        // The descriptor may be ready already, and an earlier wait may have used up the event. So the poller must
        // check the descriptor again.
        kept.is_anew = true;
    }
    let target = kept.args.get(0).ok_or_else(no_target)?;
    let socket = Socket::from_object(&target);
    if let Some(socket) = &socket {
        // This wait uses up the next event. If `is_drained` stayed set, a later read would wait for that event.
        socket.extra().is_drained.set(false);
    }
    kept.go_on(&target, socket.as_ref(), outcome)
}

#[cold]
fn no_target() -> PyErr {
    PyTypeError::new_err("a descriptor or an object with fileno() is required")
}

/// The time limit of a wait. A timeout of 0 does not prevent the wait: it asks whether the descriptor is ready now.
fn limit_of(timeout: Option<Bound<'_, PyAny>>) -> PyResult<Limit> {
    Ok(match Limit::new(None, timeout)? {
        Limit::AtOnce => Limit::For { timeout_s: 0.0 },
        limit => limit,
    })
}

/// `_wait(direction, timeout, /)` of a socket. The direction is 0 to read, 1 to write, and 2 to write after an
/// operation such as connect has begun.
fn step_of_socket(
    py: Python<'static>,
    kept: &mut Kept,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    // SAFETY: the receiver of the method, which the caller keeps alive.
    let socket = unsafe { Socket::new(py, kept.slf) };
    if !kept.has_begun {
        let args = kept.args;
        let (Some(direction), timeout) = (args.get(0), args.get(1)) else {
            return Err(PyTypeError::new_err("_wait() takes a direction"));
        };
        (kept.direction, kept.is_anew) = match direction.extract::<u8>()? {
            0 => (Direction::Read, false),
            1 => (Direction::Write, false),
            2 => (Direction::Write, true),
            _ => return Err(PyValueError::new_err("the direction must be 0, 1 or 2")),
        };
        kept.wait.set_limit(limit_of(timeout)?);
        kept.fd = socket.descriptor()?;
        socket.extra().is_drained.set(false);
    }
    kept.go_on(socket.object(), Some(&socket), outcome)
}

/// Runs `step`, which is `step_of_function` or `step_of_socket`; see `suspension::wait_in_steps`.
///
/// # Safety
/// CPython has called a function or, for `step_of_socket`, a method of the native socket `slf` with these arguments.
#[inline(always)]
unsafe fn call_wait(
    slf: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    (step, direction): (
        impl Fn(Python<'static>, &mut Kept, Option<Outcome<'static>>) -> PyResult<Progress<Bound<'static, PyAny>>>,
        Direction,
    ),
) -> *mut ffi::PyObject {
    // SAFETY: by the contract; a step returns `MustWait` only after `Wait::begin`.
    unsafe { suspension::wait_in_steps(Kept::new(slf, args, direction), step) }
}

/// The method-table row for `_wait`.
pub(super) fn wait_method() -> ffi::PyMethodDef {
    row!(
        method(call_wait),
        (step_of_socket, Direction::Read),
        "_wait(direction, timeout=None, /)",
        "Wait until the socket is ready for a direction: 0 to read, 1 to write, 2 to write after connect()."
    )
}

/// `_coro_end_closed_wait(sock, is_write, coro)`: ends the wait of a coro whose socket another thread has closed.
pub(in crate::coro) fn end_closed_wait<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let (Some(socket), Some(is_write), Some(coro)) = (args.get(0), args.get(1), args.get(2))
        && let Some(socket) = Socket::from_object(&socket)
    {
        let direction = if is_write.is_truthy()? {
            Direction::Write
        } else {
            Direction::Read
        };
        let coro = scheduler::coro_from(&coro)?;
        let still_waits = socket
            .extra()
            .waiting
            .get(py, direction)
            .is_some_and(|known| known.as_ptr() == coro.as_ptr());
        if still_waits && coro.thread.get() == current_thread() {
            super::wait::end_closed(coro);
        }
    }
    Ok(none(py))
}

/// `_coro_is_on_loop()`: whether the running coro can wait on its loop.
pub(in crate::coro) fn is_on_loop<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(py, suspension::current_on_loop(py).is_some()))
}

/// The public functions `wait_for_read` and `wait_for_write`.
pub(in crate::coro) fn wait_functions() -> [ffi::PyMethodDef; 2] {
    [
        row!(
            function(call_wait),
            (step_of_function, Direction::Read),
            _coro_wait_for_read as wait_for_read,
            "\
                Wait until a descriptor, or an object with fileno(), can be read without blocking.\n\n\
                The end of a stream and an error count as readable. A listening socket is readable when there is a\n\
                connection. Outside of coros, the call blocks the thread.\n\n\
                Raises TimeoutError after timeout seconds, and SimultaneousError if another coro already waits to\n\
                read from the descriptor."
        ),
        row!(
            function(call_wait),
            (step_of_function, Direction::Write),
            _coro_wait_for_write as wait_for_write,
            "Wait until a descriptor, or an object with fileno(), can be written; see wait_for_read()."
        ),
    ]
}
