//! Lets signals wake the loop from a blocking poll. From the first blocking poll of a run to the end of the run, the
//! descriptor of `signal.set_wakeup_fd` is the loop's pipe, unless other code has set a descriptor. If the loop has
//! signal handlers, the descriptor stays set between runs.
//!
//! Without the pipe, the loop would notice some signals only at the next event: signals that arrive between the last
//! check of Python's pending signals and the poller's wait, and signals that the kernel delivers to another thread.
//!
//! `Signals` belongs to the thread that runs the loop. Only the main thread may set the descriptor, so a run in another
//! thread does not set it. If another thread closes or collects the loop, the interpreter may still write to the loop's
//! pipe. So the pipe stays open until the main thread has removed the descriptor.
//!
//! ```text
//!   loop closed in the main thread:    set_wakeup_fd(-1), then the pipe is closed
//!   loop closed in another thread:     the pipe goes to ABANDONED; the main thread takes the two steps later, in a
//!                                      pending call, or when it next runs or closes a loop
//! ```

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use grapeshot_core::sys::signals::SignalPipe;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::descriptors::{LoopPoller, SIGNAL_TOKEN};
use crate::binding::names::names;
use crate::binding::{current_thread, errors};

/// Pipes of closed loops that the interpreter may still write to. Never locked across a call into Python.
static ABANDONED: Mutex<Vec<SignalPipe>> = Mutex::new(Vec::new());

/// The state that the loop needs to receive signals.
pub(super) struct Signals {
    /// Created when the loop first blocks in the main thread, or with the first signal handler. Closed with the loop.
    pipe: RefCell<Option<SignalPipe>>,
    /// Whether this run has tried to become the receiver of signals.
    is_prepared: Cell<bool>,
}

impl Signals {
    pub(super) fn new() -> Self {
        Self {
            pipe: RefCell::new(None),
            is_prepared: Cell::new(false),
        }
    }

    /// Called when a run begins. The setup waits until the run blocks for the first time.
    pub(super) fn enter(&self) {
        self.is_prepared.set(false);
    }

    /// Called in the child of a fork. The interpreter does not write to the pipe there: asyncio has reset the
    /// descriptor (before Python 3.12, `grapeshot._loop.signals` has).
    pub(super) fn forget(&self) {
        drop(self.pipe.take());
        self.is_prepared.set(false);
    }

    /// Called when the loop is closed, in any thread.
    pub(super) fn close(&self, py: Python<'_>) {
        let Some(pipe) = self.pipe.take() else { return };
        // The loop may be collected while an exception is set, which must not be lost.
        let pending = PyErr::take(py);
        abandoned().push(pipe);
        if !close_abandoned(py) {
            // SAFETY: callable from any thread. If the interpreter's queue of pending calls is full, the next `close`
            // or run does the work.
            unsafe { ffi::Py_AddPendingCall(Some(close_abandoned_later), ptr::null_mut()) };
        }
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }

    fn write_fd(&self) -> Option<RawFd> {
        self.pipe.borrow().as_ref().map(SignalPipe::write_fd)
    }

    /// The descriptor to which the interpreter writes signal numbers, created and watched on first use.
    pub(super) fn fd(&self, poller: &LoopPoller) -> io::Result<RawFd> {
        if let Some(fd) = self.write_fd() {
            return Ok(fd);
        }
        let pipe = SignalPipe::new()?;
        poller.add_own(pipe.read_fd(), SIGNAL_TOKEN)?;
        let fd = pipe.write_fd();
        self.pipe.replace(Some(pipe));
        Ok(fd)
    }

    /// Called before the poller blocks. The first call of a run sets the descriptor, so that signals wake this loop.
    #[inline]
    pub(super) fn prepare(&self, py: Python<'_>, poller: &LoopPoller) -> PyResult<()> {
        if self.is_prepared.get() {
            return Ok(());
        }
        self.become_receiver(py, poller)
    }

    #[cold]
    fn become_receiver(&self, py: Python<'_>, poller: &LoopPoller) -> PyResult<()> {
        self.is_prepared.set(true);
        if !is_main_thread(py)? {
            return Ok(());
        }
        if !abandoned().is_empty() {
            close_abandoned(py);
        }
        // If no descriptor is free, the loop still runs, but notices a signal only at the next event.
        let Ok(fd) = self.fd(poller) else { return Ok(()) };
        match set_wakeup_fd(py, fd) {
            // Another descriptor was set, by the program or for another loop that has signal handlers and is not
            // running now. That descriptor stays in force.
            Ok(previous) if previous != -1 && previous != fd => put_back(py, previous),
            // An error is a ValueError: the interpreter does not regard this thread as its main thread.
            Ok(_) | Err(_) => {}
        }
        // Signals that arrived before the descriptor was set are not in the pipe, so they would not end the poll. Their
        // handlers run now.
        py.check_signals()
    }

    /// Called when a run ends: removes the descriptor, unless signal handlers of this loop still need it.
    pub(super) fn leave(&self, event_loop: &Bound<'_, PyAny>) {
        let py = event_loop.py();
        let Some(fd) = self.write_fd() else { return };
        if has_handlers(event_loop) {
            return;
        }
        // The call fails only in a thread that may not set the descriptor. In such a thread, this run has not set it.
        if let Ok(current) = set_wakeup_fd(py, -1)
            && current != -1
            && current != fd
        {
            put_back(py, current);
        }
    }

    /// Takes the numbers out of the pipe. If the loop has signal handlers, `_signals_arrived` gets the numbers.
    #[cold]
    pub(super) fn take(&self, event_loop: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = event_loop.py();
        let arrived = self.pipe.borrow().as_ref().map(SignalPipe::drain);
        // The interpreter marks a signal before it writes the number, so this call runs the Python handler of each of
        // these signals. The numbers are passed on even if a handler has raised KeyboardInterrupt, because they are no
        // longer in the pipe.
        let checked = py.check_signals();
        if let Some(arrived) = arrived
            && has_handlers(event_loop)
        {
            let numbers = PyBytes::new(py, &arrived.numbers);
            let passed = event_loop.call_method1("_signals_arrived", (numbers, arrived.is_incomplete));
            if let Err(error) = passed {
                checked?;
                return Err(error);
            }
        }
        checked
    }
}

fn abandoned() -> impl std::ops::DerefMut<Target = Vec<SignalPipe>> {
    ABANDONED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stops the interpreter from writing to the pipes of closed loops, and then closes the pipes. Returns false in a
/// thread that is not allowed to do that.
fn close_abandoned(py: Python<'_>) -> bool {
    let Ok(current) = set_wakeup_fd(py, -1) else {
        return false;
    };
    let pipes = mem::take(&mut *abandoned());
    if current != -1 && !pipes.iter().any(|pipe| pipe.write_fd() == current) {
        put_back(py, current);
    }
    true
}

/// The pending call for `close_abandoned`. The main thread runs it.
extern "C" fn close_abandoned_later(_: *mut c_void) -> c_int {
    // SAFETY: the interpreter runs pending calls in an attached thread.
    let py = unsafe { Python::assume_attached() };
    errors::at_boundary(py, -1, || {
        if !abandoned().is_empty() {
            close_abandoned(py);
        }
        Ok(0)
    })
}

/// `signal.set_wakeup_fd(fd, warn_on_full_buffer=False)`: returns the previous descriptor, -1 if there was none.
fn set_wakeup_fd(py: Python<'_>, fd: RawFd) -> PyResult<RawFd> {
    let options = PyDict::new(py);
    options.set_item("warn_on_full_buffer", false)?;
    names(py)
        .set_wakeup_fd
        .bind(py)
        .call((fd,), Some(&options))?
        .extract()
}

/// Restores a descriptor that other code had set. If it has been closed since, the call fails and nothing is restored.
fn put_back(py: Python<'_>, fd: RawFd) {
    let _ = names(py).set_wakeup_fd.bind(py).call1((fd,));
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let main = py.import("threading")?.call_method0("main_thread")?;
    Ok(main.getattr("ident")?.extract::<Option<u64>>()? == Some(current_thread()))
}

/// Whether this loop has handlers from `add_signal_handler`.
fn has_handlers(event_loop: &Bound<'_, PyAny>) -> bool {
    let handlers = names(event_loop.py())
        ._signal_handlers
        .bind(event_loop.py())
        .cast_into::<PyString>()
        .map_err(PyErr::from)
        .and_then(|name| event_loop.getattr(name));
    handlers.is_ok_and(|handlers| handlers.is_truthy().unwrap_or(false))
}

/// Runs Python's handlers for signals that have arrived. Native code that works through a long batch calls this with
/// each index; only every 64th call checks for signals.
#[inline]
pub(super) fn check_signals_at(py: Python<'_>, index: usize) -> PyResult<()> {
    const EVERY: usize = 64;
    if index % EVERY == EVERY - 1 {
        // SAFETY: attached; a failure leaves an exception set.
        if unsafe { ffi::PyErr_CheckSignals() } != 0 {
            return Err(PyErr::fetch(py));
        }
    }
    Ok(())
}
