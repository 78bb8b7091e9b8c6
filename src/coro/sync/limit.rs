//! The time limit of a wait: `block=` and `timeout=` of the methods that wait.
//!
//! If the coro still waits when the limit is reached, a timer of the loop removes the coro from its queue and makes it
//! ready without a grant. If the coro got its grant earlier, it is already ready: the timer changes nothing, and the
//! coro keeps what it was granted.

use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::coro::coroutine::{Coro, Status};
use crate::coro::{scheduler, suspension};
use crate::event_loop::handle::HandleRef;

#[derive(Clone, Copy, Default)]
pub(in crate::coro) enum Limit {
    /// Wait without a limit.
    #[default]
    Endless,
    /// Do not wait.
    AtOnce,
    For {
        timeout_s: f64,
    },
}

impl Limit {
    /// Reads `block=True, timeout=None`. If `block` is false, the timeout is checked but not used. With a timeout of 0
    /// or less, the method does not wait.
    #[cold]
    pub(in crate::coro) fn new(
        block: Option<Bound<'_, PyAny>>,
        timeout: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let is_blocking = block.map_or(Ok(true), |block| block.is_truthy())?;
        let timeout_s = match timeout.filter(|timeout| !timeout.is_none()) {
            Some(timeout) => timeout.extract::<f64>()?,
            None => f64::INFINITY,
        };
        if timeout_s.is_nan() {
            return Err(PyValueError::new_err("a timeout cannot be NaN"));
        }
        Ok(if !is_blocking || timeout_s <= 0.0 {
            Self::AtOnce
        } else if timeout_s.is_infinite() {
            Self::Endless
        } else {
            Self::For { timeout_s }
        })
    }

    /// Whether the method must not wait.
    #[inline]
    pub(in crate::coro) fn is_at_once(self) -> bool {
        matches!(self, Self::AtOnce)
    }

    /// The seconds that a wait may last; None if there is no limit.
    pub(in crate::coro) fn timeout_s(self) -> Option<f64> {
        match self {
            Self::For { timeout_s } => Some(timeout_s),
            Self::AtOnce => Some(0.0),
            Self::Endless => None,
        }
    }

    /// The limit as a part of a message, such as ` for 0.5 seconds`; empty if there was no limit or no wait.
    pub(in crate::coro) fn describe(self) -> String {
        match self {
            Self::For { timeout_s } => format!(" for {timeout_s} seconds"),
            Self::Endless | Self::AtOnce => String::new(),
        }
    }
}

/// `_coro_end_wait`, the function that the timers call.
static END_WAIT: AtomicPtr<ffi::PyObject> = AtomicPtr::new(std::ptr::null_mut());

pub(in crate::coro) fn set_end_wait(function: &Bound<'_, PyAny>) {
    END_WAIT.store(function.clone().into_ptr(), Ordering::Release);
}

/// The time limit of one call, which may wait several times. Make it before the last check of the condition that the
/// coro waits for: making it may run destructors, which may wait, and the condition may change meanwhile.
pub(in crate::coro) struct Deadline<'py> {
    coro: Coro<'py>,
    timer: Option<HandleRef>,
}

impl<'py> Deadline<'py> {
    #[inline]
    pub(in crate::coro) fn new(coro: Coro<'py>, limit: Limit) -> PyResult<Self> {
        Self::with_timer(coro, limit, |when_s| {
            suspension::set_timer(coro, when_s, END_WAIT.load(Ordering::Relaxed))
        })
    }

    /// Like `new`, for waits that use no queue. When the limit is reached, the coro is made ready.
    #[inline]
    pub(in crate::coro) fn outside_of_queues(coro: Coro<'py>, limit: Limit) -> PyResult<Self> {
        Self::with_timer(coro, limit, |when_s| suspension::set_wake_timer(coro, when_s))
    }

    #[inline]
    fn with_timer(
        coro: Coro<'py>,
        limit: Limit,
        set: impl FnOnce(f64) -> PyResult<HandleRef>,
    ) -> PyResult<Self> {
        suspension::forget_wake_value(coro);
        let timer = match limit {
            Limit::For { timeout_s } => Some(set(suspension::now_s(coro)? + timeout_s)?),
            Limit::Endless | Limit::AtOnce => None,
        };
        Ok(Self { coro, timer })
    }

    /// Whether the timeout has expired: the timer has run, or is due.
    #[inline]
    pub(in crate::coro) fn is_over(&self) -> bool {
        self.timer.as_ref().is_some_and(|timer| !timer.is_scheduled())
    }
}

impl Drop for Deadline<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            suspension::end_timer(self.coro, timer);
        }
    }
}

/// Ends a wait whose timeout has expired: a coro that still waits is woken without a grant.
pub(in crate::coro) fn end_wait(coro: Coro<'_>) {
    let node = &coro.wait_node;
    let is_woken = node.exclusive(|| {
        let is_waiting = coro.status.get() == Status::Waiting && node.is_queued();
        if is_waiting {
            node.is_late.set(true);
            scheduler::claim(coro);
        }
        is_waiting
    });
    if is_woken {
        scheduler::queue(coro);
    }
}
