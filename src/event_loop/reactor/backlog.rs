//! Answers a question of the watchdog: does other work wait while a callback or coro runs?

use grapeshot_core::sys::{clock, readiness};
use pyo3::prelude::*;

use super::{FdUse, Reactor};
use crate::event_loop::pyloop::LoopObject;

impl Reactor {
    /// Whether the loop could run something else now: a ready entry, a due timer, or an object that waits for a
    /// descriptor which is ready. Takes nothing out of the queues or the poller.
    ///
    /// Any thread that holds the GIL may call this: no cell stays borrowed where a thread can lose the GIL.
    pub(crate) fn has_backlog(&self, py: Python<'_>, event_loop: &LoopObject) -> bool {
        self.ready_len() > 0
            || self.has_events.get()
            || !self.inbox.is_empty()
            || self.has_due_timer(py, event_loop, clock::now_ns())
            || readiness::is_any_ready(self.fds.borrow().iter().map(|(fd, fd_use)| {
                let interest = match fd_use {
                    FdUse::Source(source) => source.interest(py),
                    FdUse::Watch(watch) => watch.waited_for(),
                };
                (fd, interest)
            }))
    }
}
