//! io_uring: the kernel makes the calls, and signals on an eventfd when one has ended. [`super`] has the contract.
//!
//! Each call is handed over with a system call of its own, so the queue of submissions never fills up. The queue of
//! completions has room for all calls and their cancellations, so it never overflows.
//!
//! Source: `io_uring_setup(2)`, `io_uring_enter(2)`, `io_uring_register(2)`.

use std::io;
use std::os::fd::RawFd;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, Probe, opcode, squeue};

use super::calls::{Call, MAX_LEN};

/// The completion of a cancellation has this number, and the completion of a call has its ticket.
const CANCELLATION: u64 = u64::MAX;
/// The maximum number of attempts to hand over a call if the kernel reports a temporary error.
const ATTEMPTS: usize = 3;

/// A ring of one loop.
pub(super) struct Ring {
    uring: IoUring,
    can_truncate: bool,
    /// False once the kernel has refused a call. That call may still be in the queue of submissions, so the queue
    /// must never be handed over again.
    accepts: bool,
}

impl Ring {
    /// The maximum number of calls under way.
    pub(super) const MAX_CALLS: usize = 128;

    /// A ring that signals on `eventfd` when a call has ended. None if the kernel has no io_uring or too old a version
    /// of it, or does not allow this process to use it.
    pub(super) fn new(eventfd: RawFd) -> Option<Self> {
        let uring = IoUring::builder()
            .setup_clamp()
            .setup_cqsize(4 * Self::MAX_CALLS as u32)
            .build(2 * Self::MAX_CALLS as u32)
            .ok()?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe).ok()?;
        let needed = [
            opcode::OpenAt::CODE,
            opcode::Close::CODE,
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::AsyncCancel::CODE,
        ];
        let has_room = uring.params().cq_entries() as usize >= 2 * Self::MAX_CALLS;
        if !has_room || !needed.iter().all(|code| probe.is_supported(*code)) {
            return None;
        }
        // Without this feature, offset -1 does not mean the file's position.
        if !uring.params().is_feature_rw_cur_pos() {
            return None;
        }
        uring.submitter().register_eventfd(eventfd).ok()?;
        Some(Self {
            can_truncate: probe.is_supported(opcode::Ftruncate::CODE),
            uring,
            accepts: true,
        })
    }

    /// Makes the ring behave as on an old kernel, where io_uring cannot truncate files.
    #[cfg(test)]
    pub(super) fn forget_truncate(&mut self) {
        self.can_truncate = false;
    }

    /// Whether the kernel can make this call.
    pub(super) fn supports(&self, call: Call) -> bool {
        self.accepts && (self.can_truncate || !matches!(call, Call::Truncate { .. }))
    }

    /// Hands the call to the kernel. Returns false if the kernel does not accept the call; from then on, the ring
    /// supports no calls.
    pub(super) fn begin(&mut self, ticket: u64, call: Call) -> bool {
        let len_of = |len: usize| len.min(MAX_LEN) as u32;
        let entry = match call {
            Call::Open { path, flags, mode } => opcode::OpenAt::new(Fd(libc::AT_FDCWD), path)
                .flags(flags | libc::O_CLOEXEC)
                .mode(mode)
                .build()
                // Without this flag the kernel first tries to open the file without waiting. For a FIFO, that succeeds
                // even if nobody has opened its other end.
                .flags(squeue::Flags::ASYNC),
            Call::Close { fd } => opcode::Close::new(Fd(fd)).build(),
            Call::Read {
                fd,
                buffer,
                len,
                offset,
            } => opcode::Read::new(Fd(fd), buffer, len_of(len))
                .offset(offset as u64)
                .build(),
            Call::Write {
                fd,
                data,
                len,
                offset,
            } => opcode::Write::new(Fd(fd), data, len_of(len))
                .offset(offset as u64)
                .build(),
            Call::Sync { fd, only_data } => {
                let flags = if only_data {
                    FsyncFlags::DATASYNC
                } else {
                    FsyncFlags::empty()
                };
                opcode::Fsync::new(Fd(fd)).flags(flags).build()
            }
            Call::Truncate { fd, len } => opcode::Ftruncate::new(Fd(fd), len as u64).build(),
        };
        self.hand_over(&entry.user_data(ticket))
    }

    /// Asks the kernel to interrupt a call. A call that the kernel does not interrupt ends as usual.
    pub(super) fn cancel(&mut self, ticket: u64) {
        if self.accepts {
            self.hand_over(&opcode::AsyncCancel::new(ticket).build().user_data(CANCELLATION));
        }
    }

    fn hand_over(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the contract of `Queue::start` keeps the memory to which the entry refers valid until the call has
        // ended. If the entry is pushed and not accepted, it is never handed over later.
        if unsafe { self.uring.submission().push(entry) }.is_err() {
            // This does not happen: the queue is empty between two calls, so it has room.
            self.accepts = false;
            return false;
        }
        for _ in 0..ATTEMPTS {
            match self.uring.submit() {
                Ok(count) if count > 0 => return true,
                Err(error) if !is_passing(&error) => break,
                _ => {}
            }
        }
        self.accepts = false;
        false
    }

    /// Removes a call that has ended, and returns its ticket and its outcome.
    pub(super) fn take(&mut self) -> Option<(u64, io::Result<usize>)> {
        let mut completed = self.uring.completion();
        loop {
            let entry = completed.next()?;
            if entry.user_data() != CANCELLATION {
                let outcome = usize::try_from(entry.result()).map_err(|_| error_of(entry.result()));
                return Some((entry.user_data(), outcome));
            }
        }
    }
}

/// The error of a call that has failed.
fn error_of(result: i32) -> io::Error {
    match result.wrapping_neg() {
        // The kernel's own numbers for an interrupted call. System calls do not return them to programs, but io_uring
        // returns them from an `open` that was interrupted. Source: `include/linux/errno.h` of Linux.
        512..=514 | 516 => io::Error::from_raw_os_error(libc::EINTR),
        errno => io::Error::from_raw_os_error(errno),
    }
}

/// Whether the kernel may accept the call at the next attempt.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
    )
}
