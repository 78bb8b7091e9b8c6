//! What native profile functions hear of a switch: the frames of a coro that goes return, those of one that comes are
//! called. Without it memray reads frames that are gone, and books what one coro allocates under another.
//!
//! ```text
//!   what memray has   main run_forever | worker handle          the thread's own frames stay below those of the coro
//!   coro A goes                        | (return, return)
//!   coro B comes      main run_forever | client send            (call, call)
//! ```
//!
//! A frame that was called must return, since the function may keep a pointer to it; a return of one that was not
//! called does no harm. So frames are left out whose own return will not be told: those that a suspended coro was in
//! when the function was set, from 3.12 on, until their code is entered anew.
//!
//! Called on the thread's own stack by the scheduler. Belongs to its thread; costs nothing while there is no such
//! function.

use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::Coro;
use super::pystate::{self, Event, Version};
use super::runtime::Runtime;

/// Before the thread state becomes the coro's: a function that has only just been set takes the thread's own frames
/// now. What code is instrumented with, for `report_calls`.
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

/// The coro is going to run: its frames are called, the outermost first.
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
            // Which of the frames are those of the trace function, of which nobody hears, is not known.
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

/// The coro has waited or ended: its frames return, the innermost first.
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

/// Runs `body`, which calls foreign code. The collector does not run meanwhile, and what runs may not wait: this is not
/// the coro's stack.
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
