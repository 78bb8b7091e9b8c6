//! The waker on a Linux eventfd: one descriptor with a counter. [`super`] has the contract.
//!
//! Source: `eventfd(2)`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Pending;

/// A descriptor that [`Self::wake`] makes readable, until [`Self::drain`].
pub struct Waker {
    event: OwnedFd,
    pending: Pending,
}

impl Waker {
    /// A waker without a pending wake. Its descriptor is nonblocking and close-on-exec.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM` from `eventfd(2)`.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        Ok(Self {
            event: event.into(),
            pending: Pending::new(),
        })
    }

    /// The descriptor to watch for reading. The waker owns it.
    #[inline]
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
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
        let one = 1_u64.to_ne_bytes();
        // On this descriptor the write can fail only with EAGAIN, when the counter is at its maximum. Then the
        // descriptor is readable already.
        let _ = nix::unistd::write(&self.event, &one);
        Errno::set_raw(errno);
    }

    /// Makes the descriptor unreadable again. Call this in the loop's thread, and check for work only after it.
    #[inline]
    pub fn drain(&self) {
        let mut count = [0_u8; 8];
        // One read resets the counter. EAGAIN means that the counter was zero.
        let _ = nix::unistd::read(&self.event, &mut count);
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
        let mut count = [0; 8];
        for _ in 0..2 {
            for _ in 0..5 {
                waker.wake();
            }
            assert_eq!(read(&waker.event, &mut count), Ok(8));
            assert_eq!(u64::from_ne_bytes(count), 1);
            waker.drain();
        }
    }

    #[test]
    fn a_full_counter_neither_blocks_nor_changes_errno() {
        let waker = Waker::new().unwrap();
        assert_eq!(write(&waker.event, &(u64::MAX - 1).to_ne_bytes()), Ok(8));
        Errno::set_raw(4321);
        waker.wake();
        assert_eq!(Errno::last_raw(), 4321);
        waker.drain();
        assert_eq!(read(&waker.event, &mut [0; 8]), Err(Errno::EAGAIN));
        waker.wake();
        assert_eq!(read(&waker.event, &mut [0; 8]), Ok(8));
    }
}
