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
use super::wait::{Target, Wait, WaitState, reactor_of};
use crate::binding::args::Args;
use crate::coro::coroutine::{Coro, Outcome};
use crate::coro::scheduler;
use crate::coro::suspension::{self, Begun};
use crate::event_loop::reactor::{Direction, Reactor};

/// The result of an attempt.
pub(super) enum Attempt<'py> {
    Done(Bound<'py, PyAny>),
    /// The system call would have blocked.
    Blocked(Direction),
    /// A part is done, and the next part may be possible without a wait.
    Continues,
}

/// The circumstances of an attempt.
pub(super) struct Surroundings<'a> {
    /// The loop of the running coro; None in a thread in which no coro runs.
    pub(super) reactor: Option<&'a Reactor>,
    /// The call has already waited.
    pub(super) has_waited: bool,
}

impl Surroundings<'_> {
    /// Counts the bytes that a system call has sent.
    #[inline]
    pub(super) fn note_write(&self, len_bytes: usize) {
        if let Some(reactor) = self.reactor {
            reactor.counters.note_write(len_bytes);
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

    /// Whether a first attempt is known to find nothing, so that the call can wait at once.
    #[inline]
    fn is_hopeless(&mut self, _: &Socket<'_>) -> bool {
        false
    }

    /// Called when the call fails, perhaps after a part is done.
    #[cold]
    fn give_up(&mut self, _: &Socket<'_>) {}
}

/// The state of the call, which stays on the stack while the coro waits.
struct Call<O> {
    slf: *mut ffi::PyObject,
    state: State,
    wait: Wait,
    operation: O,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    /// The coro has yielded before its first attempt, or between two parts.
    Yielded,
    Waiting,
}

type Step = PyResult<Begun<'static, ()>>;

/// Calls the function of a row for a socket's method that may wait. The function makes an operation of the arguments,
/// and this runs it.
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
        state: State::New,
        wait: Wait::new(),
        operation: operation(args),
    };
    // SAFETY: a step that returns `Waits` has met the conditions, in `Wait::begin` or `begin_act`.
    unsafe { suspension::wait_in_steps(call, make_step::<O>) }
}

fn make_step<O: Operation>(
    py: Python<'static>,
    call: &mut Call<O>,
    outcome: Option<Outcome<'static>>,
) -> Step {
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
) -> Step {
    let py = socket.py();
    let coro = suspension::current_on_loop(py);
    match (call.state, outcome) {
        (State::Waiting, outcome) => {
            if let Some(coro) = crate::coro::runtime::current(py) {
                call.wait.end(coro, Some(&socket.extra().waiting));
            }
            outcome.transpose()?;
        }
        (State::Yielded, outcome) => {
            outcome.transpose()?;
        }
        (State::New, _) => {
            call.wait.set_limit(socket.extra().limit());
            let is_waiting_call = !socket.extra().is_at_once();
            if let Some(coro) = coro.filter(|coro| is_waiting_call && suspension::can_suspend(*coro)) {
                if call.operation.is_hopeless(socket) && begin_hopeless(call, socket, coro)? {
                    return Ok(Begun::Waits(()));
                }
                if let Begun::Waits(()) = suspension::begin_act(coro)? {
                    call.state = State::Yielded;
                    return Ok(Begun::Waits(()));
                }
            }
        }
    }
    let has_waited = call.state == State::Waiting;
    if has_waited && let Some(reactor) = coro.and_then(reactor_of) {
        scheduler::prefetch_next(reactor);
    }
    attempt(call, socket, coro, has_waited)
}

/// Begins a wait for data on a socket that has had no read event since its last read. Returns false if there was such
/// an event: another wait has used it up, and the data may still be there.
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
    call.state = State::Waiting;
    Ok(true)
}

/// Makes attempts until the call is done or has to wait.
#[inline(always)]
fn attempt<O: Operation>(
    call: &mut Call<O>,
    socket: &Socket<'static>,
    coro: Option<Coro<'static>>,
    mut has_waited: bool,
) -> Step {
    loop {
        let surroundings = Surroundings {
            reactor: coro.and_then(reactor_of),
            has_waited,
        };
        match call.operation.attempt(socket, &surroundings)? {
            Attempt::Done(value) => return Ok(Begun::IsOver(value)),
            Attempt::Continues => {
                let is_waiting_call = !socket.extra().is_at_once();
                let coro = coro.filter(|coro| is_waiting_call && suspension::can_suspend(*coro));
                if let Some(coro) = coro
                    && let Begun::Waits(()) = suspension::begin_act(coro)?
                {
                    call.state = State::Yielded;
                    return Ok(Begun::Waits(()));
                }
            }
            Attempt::Blocked(_) if socket.extra().is_at_once() => return Err(would_block()),
            Attempt::Blocked(direction) => {
                call.wait.check_time()?;
                match begin_wait(call, socket, socket.descriptor()?, direction)? {
                    Begun::Waits(()) => return Ok(Begun::Waits(())),
                    Begun::IsOver(_) => has_waited = true,
                }
            }
        }
    }
}

/// The target of a wait in this direction.
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

/// Begins a wait if the caller is a coro. In a thread without coros, the wait is over when this returns.
#[inline]
fn begin_wait<O: Operation>(
    call: &mut Call<O>,
    socket: &Socket<'static>,
    fd: RawFd,
    direction: Direction,
) -> Step {
    Ok(match call.wait.begin(target(socket, fd, direction))? {
        WaitState::Suspends => {
            call.state = State::Waiting;
            Begun::Waits(())
        }
        WaitState::IsReady => Begun::IsOver(crate::binding::object_result::none(socket.py())),
    })
}

/// The error of a socket with the timeout 0.
#[cold]
pub(super) fn would_block() -> PyErr {
    crate::binding::errors::os_error(&std::io::Error::from_raw_os_error(libc::EAGAIN))
}

/// Whether the error means that the call would block.
pub(super) fn is_would_block(py: Python<'_>, error: &PyErr) -> bool {
    error.value(py).is_instance_of::<PyBlockingIOError>()
}
