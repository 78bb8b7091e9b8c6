//! For handles of `call_soon_threadsafe`: `cancel()` and `cancelled()` wait while another thread runs the callback, as
//! in asyncio since 3.14.
//!
//! asyncio's `_ThreadSafeHandle` (`Lib/asyncio/events.py`, 3.14) has a lock in each handle for this. Here, one flag
//! says that the callback runs and another one that a thread waits. All handles share one mutex and one condition
//! variable, because such waits are rare.

use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use super::{Handle, flag};
use crate::binding::current_thread;

static MUTEX: Mutex<()> = Mutex::new(());
static RUN_ENDED: Condvar = Condvar::new();

/// How often a waiting thread checks for signals.
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

impl Handle<'_> {
    /// Called just before the callback, never at the same time as `cancel`. True if the caller must call `end_run`
    /// afterwards. False if the handle is not thread-safe, and in a nested run, in which the callback runs its own
    /// handle.
    #[inline]
    pub(super) fn begin_run(self) -> bool {
        let is_begun = self.has(flag::THREADSAFE) && !self.has(flag::RUNNING);
        if is_begun {
            self.when_or_runner.store(current_thread(), Ordering::Relaxed);
            self.raise_flag(flag::RUNNING);
        }
        is_begun
    }

    /// Called after the callback has ended and its exception, if any, was reported.
    #[inline]
    pub(super) fn end_run(self) {
        if self.has(flag::RUNNING) {
            self.lower_flag(flag::RUNNING);
            if self.has(flag::AWAITED) {
                self.lower_flag(flag::AWAITED);
                drop(MUTEX.lock().unwrap_or_else(PoisonError::into_inner));
                RUN_ENDED.notify_all();
            }
        }
    }

    /// Waits while another thread runs the callback. The wait releases the GIL. Err is the exception of a signal
    /// handler that ran in this thread.
    #[inline]
    pub(super) fn wait_until_not_running(self) -> PyResult<()> {
        if self.has(flag::RUNNING) {
            self.wait()
        } else {
            Ok(())
        }
    }

    #[cold]
    fn wait(self) -> PyResult<()> {
        if self.when_or_runner.load(Ordering::Relaxed) == current_thread() {
            // The callback itself has called `cancel()` or `cancelled()`, so this wait would never end.
            return Ok(());
        }
        let (py, flags) = (self.py(), &self.flags);
        while flags.load(Ordering::Acquire) & flag::RUNNING != 0 {
            self.raise_flag(flag::AWAITED);
            py.detach(|| {
                let guard = MUTEX.lock().unwrap_or_else(PoisonError::into_inner);
                // No notification is missed: if the run has ended since the last check, the check below sees that.
                // Otherwise `end_run` needs the mutex before it notifies, and only the wait below releases the mutex.
                if flags.load(Ordering::Acquire) & flag::RUNNING != 0 {
                    drop(RUN_ENDED.wait_timeout(guard, SIGNAL_CHECK));
                }
            });
            py.check_signals()?;
        }
        Ok(())
    }
}
