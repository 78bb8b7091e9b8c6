//! The waker over a pipe, for systems without an eventfd.
//!
//! Purpose: the contract of [`super`]. Coalescing keeps at most a few bytes in the pipe.
//!
//! Owner: the loop's thread; `wake` runs anywhere, in signal handlers too. It must not know why anyone
//! is woken.
//!
//! Source: `pipe(2)`, `pipe(7)`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

use super::Pending;
use crate::sys::signals::nonblocking_pipe;

/// A descriptor that [`Self::wake`] makes readable and [`Self::drain`] makes quiet again.
pub struct Waker {
    reader: OwnedFd,
    writer: OwnedFd,
    pending: Pending,
}

impl Waker {
    /// A waker with nothing pending, nonblocking and close-on-exec at both ends.
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

    /// The descriptor to watch for reading. Stays owned by the waker.
    #[inline]
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    /// Makes the descriptor readable, once until the next [`Self::drain`].
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
        // EAGAIN says that the pipe is full, so readable already; EINTR cannot come from a write that does
        // not block, and EPIPE not while we hold the reading end.
        let _ = nix::unistd::write(&self.writer, &[1]);
        Errno::set_raw(errno);
    }

    /// Makes the descriptor quiet. Call it from the loop's thread, and look only afterwards for the work
    /// that the wakes announced.
    #[inline]
    pub fn drain(&self) {
        let mut bytes = [0_u8; 64];
        // A full buffer may have left some behind; anything else (a short read, EAGAIN) says empty.
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
