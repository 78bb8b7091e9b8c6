//! The probe: everything that watches a loop while it runs.
//!
//! Each feature that can be switched on and off has a bit in the probe's mode. Hot code uses one test for all the bits
//! that concern it, and looks at the single bits only if one of them is set:
//!
//! ```text
//!   bit        set by                                    while it is set                                   code
//!   DEBUG      loop.set_debug()                          the loop checks more, and logs slow steps         step
//!   OBSERVED   the latency warning, in threads that      the latency warning knows which step runs, and    observer
//!              have coros or have set a limit            since when
//!   MEASURED   measure_callbacks(),                      durations and delays of steps are counted, and    measuring
//!              add_slow_listener()                       slow steps are reported
//!   TIMED      set_cpu_accounting(), GRAPESHOT_DEBUG     a function gets the wall and CPU time of each     step
//!                                                        step
//!   TASKS      asyncio.run() in a coro                   a function gets each new task and coro            note_task
//!   LOG_IO     GRAPESHOT_DEBUG                           events of connections are logged                  log_event
//!   LOG_TLS    GRAPESHOT_DEBUG                           events of TLS are logged                          log_event
//! ```
//! The counters have no bit: they are always on.
//!
//! Any thread may read or change the mode and the limit for slow steps, and read the counters and the results of
//! measuring. Only the thread that has access to the loop's cells may use the other parts.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::traverse_cells;
use crate::binding::object_cell::ObjectCell;

mod counters;
mod measuring;
pub(super) mod methods;
pub(crate) mod observer;
pub(super) mod step;

pub(crate) use counters::Counters;
use measuring::Measuring;

bitflags::bitflags! {
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(crate) struct Mode: u8 {
        const DEBUG = 1;
        const OBSERVED = 1 << 1;
        const MEASURED = 1 << 2;
        const TIMED = 1 << 3;
        const TASKS = 1 << 4;
        /// The logger is `grapeshot.io`.
        const LOG_IO = 1 << 5;
        /// The logger is `grapeshot.tls`.
        const LOG_TLS = 1 << 6;
        /// The bits that concern each step.
        const STEPS = Self::DEBUG.bits() | Self::OBSERVED.bits() | Self::MEASURED.bits() | Self::TIMED.bits();
    }
}

pub(crate) struct Probe {
    /// The bits of a `Mode`.
    mode: AtomicU8,
    pub(crate) counters: Counters,
    /// Created when a program first asks the loop to measure.
    measuring: OnceLock<Box<Measuring>>,
    /// Debug mode logs steps that take at least this many seconds. Stored as the bits of an `f64`.
    slow_callback_s: AtomicU64,
    /// Gets the wall and CPU time of each step: see `step`.
    step_observer: ObjectCell,
    /// Gets each new task and coro.
    task_observer: ObjectCell,
}

impl Probe {
    pub(super) const fn new() -> Self {
        Self {
            mode: AtomicU8::new(0),
            counters: Counters::new(),
            measuring: OnceLock::new(),
            slow_callback_s: AtomicU64::new(0.1_f64.to_bits()),
            step_observer: ObjectCell::empty(),
            task_observer: ObjectCell::empty(),
        }
    }

    // ---- the mode --------------------------------------------------------------------------------------------

    /// Whether one of these bits is set.
    #[inline(always)]
    pub(crate) fn has(&self, bits: Mode) -> bool {
        Mode::from_bits_retain(self.mode.load(Ordering::Relaxed)).intersects(bits)
    }

    /// Sets these bits, or clears them.
    pub(crate) fn switch(&self, bits: Mode, is_on: bool) {
        if is_on {
            self.mode.fetch_or(bits.bits(), Ordering::Relaxed);
        } else {
            self.mode.fetch_and(!bits.bits(), Ordering::Relaxed);
        }
    }

    /// Whether the loop is in debug mode.
    #[inline]
    pub(crate) fn is_debug(&self) -> bool {
        self.has(Mode::DEBUG)
    }

    fn slow_callback_s(&self) -> f64 {
        f64::from_bits(self.slow_callback_s.load(Ordering::Relaxed))
    }

    fn set_slow_callback_s(&self, limit_s: f64) {
        self.slow_callback_s.store(limit_s.to_bits(), Ordering::Relaxed);
    }

    // ---- measuring -------------------------------------------------------------------------------------------

    /// Switches measuring on or off. Steps that take at least `slow_ns` are reported.
    fn set_measured(&self, is_on: bool, slow_ns: u64) {
        if !is_on && self.measured().is_none() {
            return;
        }
        let measuring = self.measuring.get_or_init(|| Box::new(Measuring::new()));
        measuring.set_slow_ns(slow_ns);
        if is_on && !self.has(Mode::MEASURED) {
            measuring.restart();
        }
        self.switch(Mode::MEASURED, is_on);
    }

    /// None while measuring is off.
    #[inline]
    pub(super) fn measuring(&self) -> Option<&Measuring> {
        if self.has(Mode::MEASURED) {
            self.measured()
        } else {
            None
        }
    }

    /// The results of measuring, even after it was switched off; None if it was never on.
    fn measured(&self) -> Option<&Measuring> {
        self.measuring.get().map(Box::as_ref)
    }

    /// Forgets when the entries of the ready queue became ready. Called when all entries are removed without being run.
    pub(super) fn forget_marks(&self) {
        if let Some(measuring) = self.measured() {
            measuring.forget_marks();
        }
    }

    // ---- the two observers -----------------------------------------------------------------------------------

    /// Passes a new task or coro to the task observer. Returns false if there is no observer.
    #[inline]
    pub(crate) fn note_task(&self, task: &Bound<'_, PyAny>) -> PyResult<bool> {
        if !self.has(Mode::TASKS) {
            return Ok(false);
        }
        let Some(observer) = self.task_observer.get(task.py()) else {
            return Ok(false);
        };
        observer.call1((task,))?;
        Ok(true)
    }

    fn set_step_observer(&self, py: Python<'_>, observer: Option<Bound<'_, PyAny>>) {
        self.switch(Mode::TIMED, observer.is_some());
        drop(self.step_observer.replace(observer, py));
    }

    fn set_task_observer(&self, py: Python<'_>, observer: Option<Bound<'_, PyAny>>) {
        self.switch(Mode::TASKS, observer.is_some());
        drop(self.task_observer.replace(observer, py));
    }

    /// Drops both observers. Called when the loop is freed or cleared by the collector.
    pub(super) fn forget_observers(&self, py: Python<'_>) {
        self.set_step_observer(py, None);
        self.set_task_observer(py, None);
    }

    /// Reports the references to the two observers.
    ///
    /// # Safety
    /// `visit` and `arg` are the collector's.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: by the contract.
        unsafe { traverse_cells([&self.step_observer, &self.task_observer], visit, arg) }
    }

    // ---- the log of events -----------------------------------------------------------------------------------

    /// Logs an event if `topic`, one of the `LOG_` bits, is set. `what` returns the object that the event is about, and
    /// a text. An exception from the logger goes to `sys.unraisablehook`, except for `KeyboardInterrupt`, which is
    /// raised again later.
    #[inline(always)]
    pub(crate) fn log_event<'py>(
        &self,
        py: Python<'py>,
        topic: Mode,
        what: impl FnOnce() -> (Bound<'py, PyAny>, String),
    ) {
        if self.has(topic) {
            let (object, text) = what();
            write_event(py, topic, &object, &text);
        }
    }
}

#[cold]
#[inline(never)]
fn write_event(py: Python<'_>, topic: Mode, object: &Bound<'_, PyAny>, text: &str) {
    let name = if topic == Mode::LOG_TLS {
        "grapeshot.tls"
    } else {
        "grapeshot.io"
    };
    let logged = py
        .import("logging")
        .and_then(|logging| logging.call_method1("getLogger", (name,)))
        .and_then(|logger| logger.call_method1("debug", ("%r %s", object, text)));
    if let Err(error) = logged {
        if error.is_instance_of::<PyKeyboardInterrupt>(py) {
            // SAFETY: callable at any time. Ctrl-C is raised again later, in the user's code.
            unsafe { ffi::PyErr_SetInterrupt() };
        } else {
            error.write_unraisable(py, Some(object));
        }
    }
}
