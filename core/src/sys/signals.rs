//! The pipe through which signal handlers wake a loop. Each signal is one byte, its number.
//!
//! Purpose: an fd that the poller watches for reading, and one that the interpreter's C handler writes to. A byte that
//! was written before the poller sleeps ends that sleep at once, so no signal is lost between the last check and the
//! wait. An eventfd cannot be used: a write to it must have eight bytes.
//!
//! Owner: the loop's thread reads; handlers write, on any thread. It must not know what a signal means.
//!
//! Source: `pipe(2)`, `pipe(7)`, `signal-safety(7)`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// Every pipe holds at least this much. (Linux gives 64 KiB, and this much to a user who has very many pipes.)
const MIN_CAPACITY_LEN: usize = 4096;
/// The most bytes of one read.
const MAX_DRAINED_LEN: usize = 65536;

/// Both ends of the pipe, nonblocking and close-on-exec.
pub struct SignalPipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

/// What [`SignalPipe::drain`] found.
#[derive(Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The numbers in the order of their arrival.
    pub numbers: Vec<u8>,
    /// The pipe may have been full, so that numbers were lost. Then the caller must find out in another way which
    /// signals came.
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

    /// The descriptor to watch for reading. Stays owned by the pipe.
    #[must_use]
    pub fn read_fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    /// The descriptor for `signal.set_wakeup_fd`. Stays owned by the pipe.
    #[must_use]
    pub fn write_fd(&self) -> RawFd {
        self.writer.as_raw_fd()
    }

    /// Takes out what has arrived.
    #[must_use]
    pub fn drain(&self) -> Arrived {
        let mut numbers = Vec::new();
        let mut bytes = [0_u8; 1024];
        // Bounded, so that a storm of signals does not block the loop.
        while numbers.len() < MAX_DRAINED_LEN {
            match nix::unistd::read(&self.reader, &mut bytes) {
                Ok(len) if len > 0 => numbers.extend_from_slice(&bytes[..len]),
                Err(Errno::EINTR) => {}
                // The pipe is empty. No other error is possible: we own both ends.
                Ok(_) | Err(_) => break,
            }
        }
        Arrived {
            is_incomplete: numbers.len() >= MIN_CAPACITY_LEN,
            numbers,
        }
    }
}

/// Sends the signal to this process, as Ctrl-C does: a system call of the main thread ends with `EINTR`.
///
/// # Errors
/// `EINVAL` for a number that is no signal's.
pub fn send(number: i32) -> io::Result<()> {
    // SAFETY: passes two integers to the kernel.
    Errno::result(unsafe { libc::kill(libc::getpid(), number) })?;
    Ok(())
}

/// A pipe, (reader, writer), both nonblocking and close-on-exec.
///
/// # Errors
/// `EMFILE` or `ENFILE` from `pipe(2)`.
#[cfg(not(target_vendor = "apple"))]
pub(super) fn nonblocking_pipe() -> nix::Result<(OwnedFd, OwnedFd)> {
    use nix::fcntl::OFlag;

    nix::unistd::pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)
}

/// Without `pipe2`, a child that is forked between the calls inherits the pipe. It can do no harm with it before
/// `exec`.
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
    fn a_full_pipe_is_known_to_be_incomplete() {
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
            // SAFETY: the calls take no pointers.
            let (fd_flags, status) =
                unsafe { (libc::fcntl(fd, libc::F_GETFD), libc::fcntl(fd, libc::F_GETFL)) };
            assert_eq!(fd_flags, libc::FD_CLOEXEC);
            assert_eq!(status & libc::O_NONBLOCK, libc::O_NONBLOCK);
        }
    }
}
