//! What the loop runs, and since when, is told to the observer: the watchdog of the coro mode.
//!
//! A loop asks at the start of a run whether the thread is observed (`Reactor::set_observed`). Loops of other threads
//! pay nothing: the bit lies beside that of debug mode, and both are tested at once.
//!
//! Everything except `install` belongs to the loop's thread. This module must not know what the observer does.

use std::sync::OnceLock;

use pyo3::prelude::*;

use super::source::Deferred;

/// What runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A handle; the observer gets its callback.
    Callback,
    /// A native object that handles an event or does a queued step: it may call the methods of a protocol.
    Source,
}

/// The functions of the observer. They are called attached.
pub(crate) struct Observer {
    /// A loop begins to run in this thread. Returns whether the thread is observed.
    pub(crate) enter: fn(&Bound<'_, PyAny>) -> bool,
    /// A run begins. The caller keeps the object until `end` has returned.
    pub(crate) begin: fn(&Bound<'_, PyAny>, Kind),
    /// The run has ended. Err is only for exceptions that must leave the loop.
    pub(crate) end: fn(&Bound<'_, PyAny>, Kind) -> PyResult<()>,
    /// The loop stops running in this thread.
    pub(crate) leave: fn(),
    /// Queued entries with this function observe themselves.
    pub(crate) own_entry: Deferred,
}

static OBSERVER: OnceLock<Observer> = OnceLock::new();

/// Sets the observer for good. A second call has no effect.
pub(crate) fn install(observer: Observer) {
    let _ = OBSERVER.set(observer);
}

/// A loop begins to run in this thread. Returns whether the thread is observed.
pub(super) fn enter(event_loop: &Bound<'_, PyAny>) -> bool {
    OBSERVER
        .get()
        .is_some_and(|observer| (observer.enter)(event_loop))
}

/// The loop stops running in this thread.
pub(super) fn leave() {
    if let Some(observer) = OBSERVER.get() {
        (observer.leave)();
    }
}

/// Whether entries with this function observe themselves. A wrong "no" costs time only.
pub(super) fn is_own_entry(run: Deferred) -> bool {
    OBSERVER
        .get()
        .is_some_and(|observer| std::ptr::fn_addr_eq(observer.own_entry, run))
}

/// A run that the observer was told of.
pub(super) struct Run<'py> {
    object: Bound<'py, PyAny>,
    kind: Kind,
    observer: &'static Observer,
}

impl<'py> Run<'py> {
    /// None if there is no observer.
    pub(super) fn begin(object: Bound<'py, PyAny>, kind: Kind) -> Option<Self> {
        let observer = OBSERVER.get()?;
        (observer.begin)(&object, kind);
        Some(Self {
            object,
            kind,
            observer,
        })
    }

    pub(super) fn end(self) -> PyResult<()> {
        (self.observer.end)(&self.object, self.kind)
    }
}
