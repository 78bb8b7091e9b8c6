//! Tells native profile functions about each switch between coros. When a coro stops running, a return is reported for
//! each of its frames; when a coro is resumed, a call is reported for each of its frames. Without these reports, memray
//! would read frames that no longer exist, and attribute the allocations of one coro to another.
//!
//! ```text
//!                     memray's stack
//!   coro A runs       main run_forever | worker handle          the thread's own frames stay below the coro's frames
//!   coro A stops      main run_forever |                        (return, return)
//!   coro B resumes    main run_forever | client send            (call, call)
//! ```
//!
//! Each frame that was reported as called must also be reported as returned, because the profile function may keep a
//! pointer to the frame. So a call is not reported if CPython will not report the frame's return; a return without a
//! call does no harm. The rule matters for the frames that a suspended coro was in when the profile function was set.
//! From 3.12 on, CPython reports the return of such a frame only if the frame's code has been instrumented since, for
//! example because another call has entered the same code.
//!
//! The scheduler calls these functions on the thread's own stack. While no native profile function is set, the only
//! cost is two tests in each run of a coro.

use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::Coro;
use super::pystate::{self, Event, Version};
use super::runtime::Runtime;
use crate::binding::HAS_GIL;

/// Called before the thread state becomes the coro's. Calls a Python function that does nothing, so that a profile
/// function that was just set sees the thread's own frames first. Returns the version of the instrumentation, for
/// `report_calls`.
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

/// Called when the coro is about to run: reports its frames as called, outermost first.
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
            // The coro is inside a trace function, whose frames must not be reported. They cannot be told apart from
            // the coro's other frames, so none are reported.
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

/// Called when the coro waits or has ended: reports its frames as returned, innermost first.
///
/// # Safety
/// As for `report_calls`.
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

/// Runs `body`, which calls foreign code. In builds with a GIL, the collector is switched off meanwhile. The foreign
/// code does not run on the coro's stack, so it must not wait. While `Runtime::collecting` is set to the coro, each
/// wait of the coro fails.
fn undisturbed<'py, F>(runtime: &Runtime, coro: Coro<'py>, body: F)
where
    F: FnOnce(Python<'py>) -> PyResult<()>,
{
    let py = coro.py();
    let collecting = runtime.collecting.replace(coro.as_ptr());
    // Without a GIL the collector stays on: switching it off would affect other threads, too, and is not necessary,
    // because the coro is not evicted meanwhile.
    let was_enabled = if HAS_GIL {
        // SAFETY: attached.
        unsafe { ffi::PyGC_Disable() }
    } else {
        0
    };
    if let Err(error) = body(py) {
        error.write_unraisable(py, None);
    }
    if was_enabled != 0 {
        // SAFETY: attached.
        unsafe { ffi::PyGC_Enable() };
    }
    runtime.collecting.set(collecting);
}
