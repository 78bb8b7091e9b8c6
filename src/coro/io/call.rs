//! A socket method that makes a system call, and waits if the call would block.
//!
//! ```text
//!   step 1: too many operations
//!           in a row? -- yes --> yield -----------------.
//!               | no                                    |
//!               v                                       v
//!           attempt <-----------------------------------'
//!               | would block: enter the fd table, leave the stack
//!               v
//!   step 2: leave the fd table; interrupted? raise; attempt again; still blocked and late? raise
//! ```
//!
//! Between two steps only `Call` is on the stack; see `suspension::wait_in_steps`.

use std::os::fd::RawFd;

use pyo3::exceptions::PyBlockingIOError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::socket::Socket;
use super::wait::{Target, Wait};
use crate::binding::args::Args;
use crate::coro::coroutine::{Coro, Outcome};
use crate::coro::scheduler::{self, reactor_of};
use crate::coro::{runtime, suspension};
use crate::event_loop::progress::{Attempt, Progress, WaitReason};
use crate::event_loop::reactor::{Direction, Reactor};

/// The circumstances of an attempt.
pub(super) struct Surroundings<'a> {
    /// The loop of the running coro; None in a thread in which no coro runs.
    pub(super) reactor: Option<&'a Reactor>,
    /// Whether the call has already waited.
    pub(super) has_waited: bool,
}

impl Surroundings<'_> {
    /// Counts the bytes that a system call has sent.
    #[inline]
    pub(super) fn note_write(&self, len_bytes: usize) {
        if let Some(reactor) = self.reactor {
            reactor.probe.counters.note_write(len_bytes);
        }
    }
}

/// One operation on a socket.
pub(super) trait Operation {
    fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        surroundings: &Surroundings<'_>,
    ) -> PyResult<Attempt<'py>>;

    /// Whether it is known that a first attempt would find nothing. The call then begins with a wait if possible.
    #[inline]
    fn is_hopeless(&mut self, _: &Socket<'_>) -> bool {
        false
    }

    /// Cleans up after a failed call, which may have done a part of its work.
    #[cold]
    fn give_up(&mut self, _: &Socket<'_>) {}
}

/// The state of the call, which stays on the stack while the coro waits.
struct Call<O> {
    slf: *mut ffi::PyObject,
    state: CallState,
    wait: Wait,
    operation: O,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CallState {
    New,
    /// The coro has yielded before its first attempt, or between two attempts that each do a part of the work.
    Yielded,
    Waiting,
}

/// Runs a socket method that may wait. `operation`, the function that the method's `row!` names, makes an operation
/// from the arguments.
///
/// # Safety
/// CPython has called a method of `slf`, an object of the native socket type, with these arguments.
#[inline(always)]
pub(super) unsafe fn run<O: Operation>(
    slf: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    operation: impl FnOnce(Args<'static, 'static>) -> O,
) -> *mut ffi::PyObject {
    let call = Call {
        slf,
        state: CallState::New,
        wait: Wait::new(),
        operation: operation(args),
    };
    // SAFETY: a step returns `MustWait` only after `Wait` or `begin_act` has met the conditions of `prepare_switch`.
    unsafe { suspension::wait_in_steps(call, take_step::<O>) }
}

fn take_step<O: Operation>(
    py: Python<'static>,
    call: &mut Call<O>,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    // SAFETY: the receiver of the method, which the caller keeps alive.
    let socket = unsafe { Socket::new(py, call.slf) };
    let result = go_on(call, &socket, outcome);
    if result.is_err() {
        call.operation.give_up(&socket);
    }
    result
}

#[inline(always)]
fn go_on<O: Operation>(
    call: &mut Call<O>,
    socket: &Socket<'static>,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    let py = socket.py();
    let coro = suspension::current_on_loop(py);
    match (call.state, outcome) {
        (CallState::Waiting, outcome) => {
            if let Some(coro) = runtime::current(py) {
                call.wait.end(coro, Some(&socket.extra().waiting));
            }
            outcome.transpose()?;
        }
        (CallState::Yielded, outcome) => {
            outcome.transpose()?;
        }
        (CallState::New, _) => {
            call.wait.set_limit(socket.extra().limit());
            let is_waiting_call = !socket.extra().is_at_once();
            if let Some(coro) = coro.filter(|coro| is_waiting_call && suspension::can_suspend(*coro)) {
                if call.operation.is_hopeless(socket) && begin_hopeless(call, socket, coro)? {
                    return Ok(Progress::MustWait(()));
                }
                if let Progress::MustWait(()) = suspension::begin_act(coro)? {
                    call.state = CallState::Yielded;
                    return Ok(Progress::MustWait(()));
                }
            }
        }
    }
    let has_waited = call.state == CallState::Waiting;
    if has_waited && let Some(reactor) = coro.and_then(reactor_of) {
        scheduler::prefetch_next(reactor);
    }
    attempt(call, socket, coro, has_waited)
}

/// Begins a wait for data without an attempt to read, because the last read has emptied the socket. Returns false,
/// and begins no wait, if the socket is closed, or if the poller has reported the socket as readable since that read.
/// In the second case, another wait has used up the event, and the data may still be there, so the call must try to
/// read.
#[inline]
fn begin_hopeless<O: Operation>(
    call: &mut Call<O>,
    socket: &Socket<'static>,
    coro: Coro<'static>,
) -> PyResult<bool> {
    let (fd, extra) = (socket.descriptor()?, socket.extra());
    extra.is_drained.set(false);
    if !call.wait.begin_again(coro, fd, &extra.waiting) {
        let is_reported = reactor_of(coro).is_none_or(|reactor| reactor.descriptors.is_reported(fd));
        if is_reported || fd < 0 {
            return Ok(false);
        }
        call.wait.begin_in(coro, target(socket, fd, Direction::Read))?;
    }
    call.state = CallState::Waiting;
    Ok(true)
}

/// Makes attempts until the call is done or has to wait.
#[inline(always)]
fn attempt<O: Operation>(
    call: &mut Call<O>,
    socket: &Socket<'static>,
    coro: Option<Coro<'static>>,
    mut has_waited: bool,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    loop {
        let surroundings = Surroundings {
            reactor: coro.and_then(reactor_of),
            has_waited,
        };
        match call.operation.attempt(socket, &surroundings)? {
            Attempt::Done(value) => return Ok(Progress::Done(value)),
            Attempt::MustWait(WaitReason::Fairness) => {
                let is_waiting_call = !socket.extra().is_at_once();
                let coro = coro.filter(|coro| is_waiting_call && suspension::can_suspend(*coro));
                if let Some(coro) = coro
                    && let Progress::MustWait(()) = suspension::begin_act(coro)?
                {
                    call.state = CallState::Yielded;
                    return Ok(Progress::MustWait(()));
                }
            }
            Attempt::MustWait(WaitReason::WouldBlock(direction)) => {
                if socket.extra().is_at_once() {
                    return Err(would_block());
                }
                call.wait.check_time()?;
                let target = target(socket, socket.descriptor()?, direction);
                if let Progress::MustWait(()) = call.wait.begin(target)? {
                    call.state = CallState::Waiting;
                    return Ok(Progress::MustWait(()));
                }
                has_waited = true;
            }
        }
    }
}

/// Describes a wait for the socket's descriptor in this direction.
#[inline]
fn target<'a, 'py>(socket: &'a Socket<'py>, fd: RawFd, direction: Direction) -> Target<'a, 'py> {
    Target {
        object: socket.object(),
        waiting: Some(&socket.extra().waiting),
        fd,
        direction,
        is_anew: false,
    }
}

/// The error of a call that would block, on a socket with the timeout 0.
#[cold]
pub(super) fn would_block() -> PyErr {
    crate::binding::errors::os_error(&std::io::Error::from_raw_os_error(libc::EAGAIN))
}

/// Whether the error means that the call would block.
pub(super) fn is_would_block(py: Python<'_>, error: &PyErr) -> bool {
    error.value(py).is_instance_of::<PyBlockingIOError>()
}
