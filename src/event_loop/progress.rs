//! `Progress`: whether an operation is done or must wait.
//!
//! For example, these return a `Progress`: a step of a native coroutine, a function that may make the running coro
//! wait, and an attempt to use a descriptor.

use pyo3::prelude::*;

use super::reactor::Direction;

/// Like `std::task::Poll`, but `MustWait` carries a value that the caller needs for the wait, for example the reason,
/// the object to yield, or the number of bytes to wait for. `W` is `()` if the callee has already prepared the wait.
pub(crate) enum Progress<T, W = ()> {
    Done(T),
    MustWait(W),
}

/// The outcome of an attempt to use a descriptor without blocking.
pub(crate) type Attempt<'py> = Progress<Bound<'py, PyAny>, WaitReason>;

/// The outcome of one step of a coroutine: it returns a value, or yields an object because it must wait.
pub(crate) type CoroutineStep<'py> = Progress<Bound<'py, PyAny>, Bound<'py, PyAny>>;

/// Why an operation on a descriptor must wait.
#[derive(Clone, Copy)]
pub(crate) enum WaitReason {
    /// The system call would block until the descriptor is ready in this direction.
    WouldBlock(Direction),
    /// The attempt has done a part of the work. The next attempt may succeed at once, but other code gets a turn first.
    Fairness,
}
