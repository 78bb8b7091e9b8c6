//! The waker on a pipe, for systems without an eventfd.
//!
//! Purpose: the contract of [`super`]. `Pending` limits the content of the pipe to a few bytes.
//!
//! Owner: the loop's thread. `wake` may run in any thread and in signal handlers. It must not know the reason for a
//! wake.
//!
//! Source: `pipe(2)`, `pipe(7)`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

use super::Pending;
use crate::sys::signals::nonblocking_pipe;

/// A descriptor. [`Self::wake`] makes it readable, and [`Self::drain`] ends that.
pub struct Waker {
    reader: OwnedFd,
    writer: OwnedFd,
    pending: Pending,
}

impl Waker {
    /// A waker without a pending wake. Both ends of the pipe are nonblocking and close-on-exec.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` from `pipe(2)`.
    pub fn new() -> io::Result<Self> {
        let (reader, writer) = nonblocking_pipe()?;
        Ok(Self {
            reader,
            writer,
            pending: Pending::new(),
        })
    }

    /// The descriptor to watch for reading. The waker owns it.
    #[inline]
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    /// Makes the descriptor readable. Further calls have no effect until the next [`Self::drain`].
    ///
    /// Callable from any thread and from signal handlers: it takes no lock, allocates nothing, never
    /// blocks and leaves `errno` as it was.
    #[inline]
    pub fn wake(&self) {
        if self.pending.set() {
            self.write();
        }
    }

    fn write(&self) {
        let errno = Errno::last_raw();
        // EAGAIN means that the pipe is full, so it is readable already. A write that does not block cannot fail with
        // EINTR. It cannot fail with EPIPE while the waker holds the reading end.
        let _ = nix::unistd::write(&self.writer, &[1]);
        Errno::set_raw(errno);
    }

    /// Makes the descriptor unreadable again. Call it from the loop's thread, and only then look for the work that the
    /// wakes announced.
    #[inline]
    pub fn drain(&self) {
        let mut bytes = [0_u8; 64];
        // If a read fills the buffer, the pipe may hold more bytes. Any other result (a short read, EAGAIN) means that
        // it is empty.
        while nix::unistd::read(&self.reader, &mut bytes) == Ok(bytes.len()) {}
        self.pending.clear();
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use nix::unistd::{read, write};

    use super::Waker;

    #[test]
    fn writes_once_until_it_is_drained() {
        let waker = Waker::new().unwrap();
        for _ in 0..2 {
            for _ in 0..5 {
                waker.wake();
            }
            assert_eq!(read(&waker.reader, &mut [0; 64]), Ok(1));
            waker.drain();
        }
    }

    #[test]
    fn a_full_pipe_neither_blocks_nor_touches_errno() {
        let waker = Waker::new().unwrap();
        while write(&waker.writer, &[0; 4096]).is_ok() {}
        while write(&waker.writer, &[0]).is_ok() {}
        Errno::set_raw(4321);
        waker.wake();
        assert_eq!(Errno::last_raw(), 4321);
        waker.drain();
        assert_eq!(read(&waker.reader, &mut [0; 64]), Err(Errno::EAGAIN));
        waker.wake();
        assert_eq!(read(&waker.reader, &mut [0; 64]), Ok(1));
    }
}
