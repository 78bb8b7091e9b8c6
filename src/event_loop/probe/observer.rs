//! Keeps the observer, which is called before and after the loop runs something (`probe/step.rs`). The observer is the
//! latency warning of the coro mode.
//!
//! At the start of a run, a loop checks whether its thread is observed, and sets or clears `Mode::OBSERVED`. (The
//! latency warning can also set or clear the bit during a run.) If the bit is clear, the observer costs nothing per
//! step, because the loop tests all bits of `Mode::STEPS` at once.
//!
//! Everything except `install` belongs to the loop's thread. The observer is a table of functions, because its code
//! lies in a layer above this one.

use std::sync::OnceLock;

use pyo3::prelude::*;

use crate::event_loop::source::Deferred;

/// The kind of object that the loop runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A handle. The observer gets its callback.
    Callback,
    /// A native object that handles an event or a queued step, and may call methods of its protocol.
    Source,
}

/// The functions of the observer. Only attached threads call them.
pub(crate) struct Observer {
    /// Called when a loop begins to run in this thread. Returns whether the thread is observed.
    pub(crate) enter: fn(&Bound<'_, PyAny>) -> bool,
    /// Called before the loop runs the object. The caller keeps the object until `end` has returned.
    pub(crate) begin: fn(&Bound<'_, PyAny>, Kind),
    /// Called after the loop has run the object. Err is only for exceptions that must leave the loop.
    pub(crate) end: fn(&Bound<'_, PyAny>, Kind) -> PyResult<()>,
    /// Called when the loop stops running in this thread.
    pub(crate) leave: fn(),
    /// The deferred function that resumes a coro. The coro reports its own runs to the watchdog, so the loop does not
    /// call `begin` and `end` for this function.
    pub(crate) own_entry: Deferred,
}

static OBSERVER: OnceLock<Observer> = OnceLock::new();

/// Sets the observer. Only the first call has an effect.
pub(crate) fn install(observer: Observer) {
    let _ = OBSERVER.set(observer);
}

/// The observer; None if there is none.
pub(super) fn get() -> Option<&'static Observer> {
    OBSERVER.get()
}

/// Called when a loop begins to run in this thread. Returns whether the thread is observed.
pub(crate) fn enter(event_loop: &Bound<'_, PyAny>) -> bool {
    OBSERVER
        .get()
        .is_some_and(|observer| (observer.enter)(event_loop))
}

/// Called when the loop stops running in this thread.
pub(crate) fn leave() {
    if let Some(observer) = OBSERVER.get() {
        (observer.leave)();
    }
}

/// Whether this deferred function is `own_entry`. A function may have several addresses, so this may return false for
/// `own_entry`. Then the loop calls `begin` and `end` although it need not, which only costs time.
pub(super) fn is_own_entry(run: Deferred) -> bool {
    OBSERVER
        .get()
        .is_some_and(|observer| std::ptr::fn_addr_eq(observer.own_entry, run))
}
