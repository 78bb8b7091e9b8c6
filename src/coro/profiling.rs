//! Tells native profile functions of each switch: the frames of the coro that is left return, and the frames of the
//! coro that is resumed are called. Without that, memray reads frames that do not exist any more, and attributes the
//! allocations of one coro to another.
//!
//! ```text
//!   what memray has   main run_forever | worker handle          the thread's own frames stay below those of the coro
//!   coro A goes                        | (return, return)
//!   coro B comes      main run_forever | client send            (call, call)
//! ```
//!
//! Each frame that was reported as called must be reported as returned, because the function may keep a pointer to it.
//! A return without a call does no harm. So a frame is left out if CPython will not report its return: from 3.12 on, a
//! frame that a suspended coro was in when the function was set, until its code is entered again.
//!
//! The scheduler calls this on the thread's own stack. Belongs to its thread. It costs nothing while no such function
//! is set.

use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::Coro;
use super::pystate::{self, Event, Version};
use super::runtime::Runtime;

/// Called before the thread state becomes the coro's, so that a function that was just set sees the thread's own frames
/// first. Returns the version of the instrumentation, for `report_calls`.
#[cold]
#[inline(never)]
pub(super) fn prepare(runtime: &Runtime, coro: Coro<'_>) -> Version {
    let mut version = Version::Unknown;
    undisturbed(runtime, coro, |py| {
        version = pystate::call_probe(py)?;
        Ok(())
    });
    version
}

/// The coro is about to run: reports its frames as called, the outermost first.
///
/// # Safety
/// `thread` is the attached thread's state, and shows the frames of the coro.
#[cold]
#[inline(never)]
pub(super) unsafe fn report_calls(
    runtime: &Runtime,
    coro: Coro<'_>,
    thread: *mut ffi::PyThreadState,
    version: Version,
) {
    // SAFETY: by the contract.
    unsafe {
        if pystate::is_tracing(thread) {
            // The frames of the trace function are not reported, and cannot be distinguished from the others.
            return;
        }
        undisturbed(runtime, coro, |py| {
            for frame in pystate::frames(py, thread).iter().rev() {
                if pystate::has_version(frame, version) == Some(true) {
                    pystate::tell(thread, frame, Event::Call)?;
                }
            }
            Ok(())
        });
    }
}

/// The coro waits or has ended: reports its frames as returned, the innermost first.
///
/// # Safety
/// As above.
#[cold]
#[inline(never)]
pub(super) unsafe fn report_returns(runtime: &Runtime, coro: Coro<'_>, thread: *mut ffi::PyThreadState) {
    // SAFETY: by the contract.
    unsafe {
        undisturbed(runtime, coro, |py| {
            let version = pystate::call_probe(py)?;
            for frame in &pystate::frames(py, thread) {
                if pystate::has_version(frame, version) != Some(false) {
                    pystate::tell(thread, frame, Event::Return)?;
                }
            }
            Ok(())
        });
    }
}

/// Runs `body`, which calls foreign code. Meanwhile the collector does not run, and nothing may wait: this is not the
/// coro's stack.
fn undisturbed<'py, F>(runtime: &Runtime, coro: Coro<'py>, body: F)
where
    F: FnOnce(Python<'py>) -> PyResult<()>,
{
    let py = coro.py();
    let collecting = runtime.collecting.replace(coro.as_ptr());
    // SAFETY: attached.
    let was_enabled = unsafe { ffi::PyGC_Disable() };
    if let Err(error) = body(py) {
        error.write_unraisable(py, None);
    }
    if was_enabled != 0 {
        // SAFETY: attached.
        unsafe { ffi::PyGC_Enable() };
    }
    runtime.collecting.set(collecting);
}
