//! The counterpart of `free_threaded.rs` for builds with the GIL, which need none of it.

use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

/// The part of a thread state that exists only in free-threaded builds.
pub(super) struct Unlocked;

#[expect(clippy::unused_self, reason = "the counterparts need it")]
impl Unlocked {
    pub(super) const fn empty() -> Self {
        Self
    }

    /// # Safety
    /// There are no requirements.
    #[inline(always)]
    pub(super) unsafe fn swap(&mut self, _thread: *mut u8) {}

    /// # Safety
    /// There are no requirements.
    #[inline(always)]
    pub(super) unsafe fn leave_slot(&mut self) {}

    #[inline(always)]
    pub(super) fn return_to_slot(&mut self) {}

    pub(super) fn after_fork(&mut self) {}

    /// # Safety
    /// There are no requirements.
    pub(super) unsafe fn traverse(
        &self,
        _innermost: *mut u8,
        _is_own: bool,
        _visit: ffi::visitproc,
        _arg: *mut c_void,
    ) -> c_int {
        0
    }
}

/// # Safety
/// There are no requirements.
#[inline(always)]
pub(super) unsafe fn resume_critical_sections() {}

#[inline(always)]
pub(super) fn may_run() -> bool {
    true
}

/// There is nothing to look up.
pub(super) fn look_up() -> Option<&'static str> {
    None
}

/// There is nothing to check.
///
/// # Safety
/// There are no requirements.
pub(super) unsafe fn check(_py: Python<'_>, _thread: *mut u8) -> PyResult<Option<&'static str>> {
    Ok(None)
}
