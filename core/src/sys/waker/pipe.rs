//! The waker on a pipe, for systems without an eventfd. [`super`] has the contract. Because of `Pending` there are
//! never more than a few bytes in the pipe.
//!
//! Source: `pipe(2)`, `pipe(7)`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

use super::Pending;
use crate::sys::signals::nonblocking_pipe;

/// A descriptor that [`Self::wake`] makes readable, until [`Self::drain`].
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
    /// Any thread and any signal handler may call this: it takes no lock, does not allocate, never blocks and does not
    /// change `errno`.
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

    /// Makes the descriptor unreadable again. Call this in the loop's thread, and check for work only after it.
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
    fn a_full_pipe_neither_blocks_nor_changes_errno() {
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
