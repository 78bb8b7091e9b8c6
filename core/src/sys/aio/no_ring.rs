//! For systems without io_uring, and for processors other than x86-64 and AArch64: there is never a ring.

use std::io;
use std::os::fd::RawFd;

use super::calls::Call;

/// No value of this type exists.
pub(super) enum Ring {}

impl Ring {
    pub(super) const MAX_CALLS: usize = 0;

    pub(super) fn new(_: RawFd) -> Option<Self> {
        None
    }

    /// Makes the ring behave as on an old kernel, where io_uring cannot truncate files.
    #[cfg(test)]
    pub(super) fn forget_truncate(&mut self) {
        match *self {}
    }

    pub(super) fn supports(&self, _: Call) -> bool {
        match *self {}
    }

    pub(super) fn begin(&mut self, _: u64, _: Call) -> bool {
        match *self {}
    }

    pub(super) fn cancel(&mut self, _: u64) {
        match *self {}
    }

    pub(super) fn take(&mut self) -> Option<(u64, io::Result<usize>)> {
        match *self {}
    }
}
