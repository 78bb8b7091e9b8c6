//! The pipe through which signal handlers wake a loop. For each signal the pipe gets one byte, the signal's number.
//!
//! The poller watches the reading end. The interpreter's C handler writes to the other end, in whatever thread it runs.
//! If a byte is written before the poller begins to sleep, the sleep ends at once. So no signal is lost between the
//! loop's last check and the wait. An eventfd cannot be used instead, because a write to it must have eight bytes. Only
//! the loop's thread reads.
//!
//! Source: `pipe(2)`, `pipe(7)`, `signal-safety(7)`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// Every pipe has space for at least this many bytes. (On Linux a pipe usually has space for 64 KiB, but only for one
/// or two pages if its user has very many pipes.)
const MIN_CAPACITY_LEN: usize = 4096;
/// [`SignalPipe::drain`] stops once it has taken out this many bytes.
const MAX_DRAINED_LEN: usize = 65536;

/// Both ends of the pipe, nonblocking and close-on-exec.
pub struct SignalPipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

/// The signals that [`SignalPipe::drain`] found.
#[derive(Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The numbers, in the order of their arrival.
    pub numbers: Vec<u8>,
    /// Whether the pipe may have been full. Then numbers may be missing, and the caller must find out in another way
    /// which signals arrived.
    pub is_incomplete: bool,
}

impl SignalPipe {
    /// An empty pipe.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` from `pipe(2)`.
    pub fn new() -> io::Result<Self> {
        let (reader, writer) = nonblocking_pipe()?;
        Ok(Self { reader, writer })
    }

    /// The descriptor to watch for reading. It belongs to the pipe.
    #[must_use]
    pub fn read_fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    /// The descriptor for `signal.set_wakeup_fd`. It belongs to the pipe.
    #[must_use]
    pub fn write_fd(&self) -> RawFd {
        self.writer.as_raw_fd()
    }

    /// Takes out the numbers that have arrived.
    #[must_use]
    pub fn drain(&self) -> Arrived {
        let mut numbers = Vec::new();
        let mut bytes = [0_u8; 1024];
        // The amount is limited, so that a flood of signals does not block the loop.
        while numbers.len() < MAX_DRAINED_LEN {
            match nix::unistd::read(&self.reader, &mut bytes) {
                Ok(len) if len > 0 => numbers.extend_from_slice(&bytes[..len]),
                Err(Errno::EINTR) => {}
                // The pipe is empty. No other error is possible, because this object owns both ends.
                Ok(_) | Err(_) => break,
            }
        }
        Arrived {
            is_incomplete: numbers.len() >= MIN_CAPACITY_LEN,
            numbers,
        }
    }
}

/// Sends the signal to this process, as Ctrl-C does. A system call in which the main thread waits ends with `EINTR`.
///
/// # Errors
/// `EINVAL` if `number` is not the number of a signal.
pub fn send(number: i32) -> io::Result<()> {
    // SAFETY: the call takes two integers.
    Errno::result(unsafe { libc::kill(libc::getpid(), number) })?;
    Ok(())
}

/// A pipe as (reader, writer). Both are nonblocking and close-on-exec.
///
/// # Errors
/// `EMFILE` or `ENFILE` from `pipe(2)`.
#[cfg(not(target_vendor = "apple"))]
pub(super) fn nonblocking_pipe() -> nix::Result<(OwnedFd, OwnedFd)> {
    use nix::fcntl::OFlag;

    nix::unistd::pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)
}

/// A pipe as (reader, writer), both nonblocking and close-on-exec. Apple systems have no `pipe2`, so a child that is
/// forked between the calls inherits the pipe without these flags.
#[cfg(target_vendor = "apple")]
pub(super) fn nonblocking_pipe() -> nix::Result<(OwnedFd, OwnedFd)> {
    use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};

    let (reader, writer) = nix::unistd::pipe()?;
    for end in [&reader, &writer] {
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    }
    Ok((reader, writer))
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use nix::unistd::write;

    use super::{Arrived, MAX_DRAINED_LEN, SignalPipe};

    #[test]
    fn numbers_come_out_in_their_order() {
        let pipe = SignalPipe::new().unwrap();
        assert!(pipe.drain().numbers.is_empty());
        for number in [15, 2, 15] {
            assert_eq!(write(&pipe.writer, &[number]), Ok(1));
        }
        let arrived = Arrived {
            numbers: vec![15, 2, 15],
            is_incomplete: false,
        };
        assert_eq!(pipe.drain(), arrived);
        assert!(pipe.drain().numbers.is_empty());
    }

    #[test]
    fn after_a_full_pipe_the_result_is_incomplete() {
        let pipe = SignalPipe::new().unwrap();
        let mut written = 0;
        let refused = loop {
            match write(&pipe.writer, &[10]) {
                Ok(len) => written += len,
                Err(errno) => break errno,
            }
        };
        assert_eq!(refused, Errno::EAGAIN);
        let arrived = pipe.drain();
        assert_eq!(arrived.numbers.len(), written.min(MAX_DRAINED_LEN));
        assert!(arrived.is_incomplete, "{written} bytes fill this system's pipe");
        let _ = pipe.drain();
        assert_eq!(write(&pipe.writer, &[10]), Ok(1));
        assert_eq!(pipe.drain().numbers, [10]);
    }

    #[test]
    fn both_ends_are_nonblocking_and_closed_on_exec() {
        let pipe = SignalPipe::new().unwrap();
        for fd in [pipe.read_fd(), pipe.write_fd()] {
            // SAFETY: the call takes no pointers.
            let fd_flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
            // SAFETY: as above.
            let status = unsafe { libc::fcntl(fd, libc::F_GETFL) };
            assert_eq!(fd_flags, libc::FD_CLOEXEC);
            assert_eq!(status & libc::O_NONBLOCK, libc::O_NONBLOCK);
        }
    }
}
