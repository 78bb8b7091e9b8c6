//! Wakes a loop that sleeps in its poller.
//!
//! The poller watches an fd for reading, and any thread or signal handler can make it readable. While one wake is
//! pending, a further one costs one atomic exchange and no system call. The loop's thread creates and drains the
//! waker. [`Waker::wake`] may run in any thread and in signal handlers.
//!
//! The file of each operating system must provide `Waker`, a `Sync` type with the functions `new()`, `fd()`, `wake()`
//! and `drain()`, which are documented in the files. The descriptors of a waker are close-on-exec, and it uses
//! `Pending`.
//!
//! ```text
//!   any thread                                loop's thread
//!   publish the work                          wait ... fd readable
//!   wake:  pending.swap(true)  ----+          drain:  read the fd until empty
//!          was false: write the fd |                  pending.swap(false)
//!                                  +------->  check for work     <- must come after drain
//! ```
//!
//! The order inside `drain` matters. A wake between its two steps does not write, because the flag is still set. It
//! need not write: clearing the flag makes visible all work that was published before that wake, and the loop then
//! checks for work. In the opposite order, the read could consume the byte of a newer wake while that wake's flag
//! stays set. Then no later wake would ever write again.

use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(any(target_os = "linux", target_os = "android"))]
mod eventfd;
#[cfg(any(target_os = "linux", target_os = "android"))]
pub use eventfd::Waker;

// The tests run this implementation on every system.
#[cfg(any(test, not(any(target_os = "linux", target_os = "android"))))]
mod pipe;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub use pipe::Waker;

/// Whether there was a wake since the last drain.
struct Pending(AtomicBool);

impl Pending {
    const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Records a wake. Returns true if the caller must write to the fd.
    #[inline]
    fn set(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Records that the fd is empty. The caller then sees all work whose wake was recorded before this call.
    #[inline]
    fn clear(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::RawFd;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::{Waker, pipe};
    use crate::sys::poller::{Events, Interest, Poller, Token};

    /// Far longer than any wait on a loaded machine. After a lost wake a test fails instead of hanging.
    const CAP_NS: Option<u64> = Some(60_000_000_000);

    /// The functions of a waker, so that each test can run with every implementation.
    trait Contract: Sync {
        fn fd(&self) -> RawFd;
        fn wake(&self);
        fn drain(&self);
    }

    impl Contract for Waker {
        fn fd(&self) -> RawFd {
            self.fd()
        }
        fn wake(&self) {
            self.wake();
        }
        fn drain(&self) {
            self.drain();
        }
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    impl Contract for pipe::Waker {
        fn fd(&self) -> RawFd {
            self.fd()
        }
        fn wake(&self) {
            self.wake();
        }
        fn drain(&self) {
            self.drain();
        }
    }

    fn wakers() -> [(&'static str, Box<dyn Contract>); 2] {
        [
            ("native", Box::new(Waker::new().unwrap())),
            ("pipe", Box::new(pipe::Waker::new().unwrap())),
        ]
    }

    fn watch(waker: &dyn Contract) -> Poller {
        let poller = Poller::new().unwrap();
        poller.add(waker.fd(), Token(1), Interest::READ).unwrap();
        poller
    }

    fn is_ready(poller: &Poller) -> bool {
        poller.wait(&mut Events::with_capacity(1), Some(0)).unwrap() == 1
    }

    #[test]
    fn is_readable_from_wake_to_drain() {
        for (name, waker) in wakers() {
            let poller = watch(waker.as_ref());
            assert!(!is_ready(&poller), "{name}");
            waker.drain();
            for _ in 0..3 {
                waker.wake();
                waker.wake();
                assert!(is_ready(&poller), "{name}");
                assert!(is_ready(&poller), "{name}");
                waker.drain();
                assert!(!is_ready(&poller), "{name}");
            }
        }
    }

    #[test]
    fn is_nonblocking_and_closed_on_exec() {
        for (name, waker) in wakers() {
            // SAFETY: the calls take no pointers.
            let (fd_flags, status) = unsafe {
                (
                    libc::fcntl(waker.fd(), libc::F_GETFD),
                    libc::fcntl(waker.fd(), libc::F_GETFL),
                )
            };
            assert_eq!(fd_flags, libc::FD_CLOEXEC, "{name}");
            assert_eq!(status & libc::O_NONBLOCK, libc::O_NONBLOCK, "{name}");
        }
    }

    #[test]
    fn no_wake_is_lost_between_threads() {
        const THREADS: usize = 3;
        const EACH: usize = 10_000;
        for (name, waker) in wakers() {
            let poller = watch(waker.as_ref());
            let published = AtomicUsize::new(0);
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        for _ in 0..EACH {
                            published.fetch_add(1, Ordering::Relaxed);
                            waker.wake();
                        }
                    });
                }
                let mut events = Events::with_capacity(1);
                while published.load(Ordering::Relaxed) < THREADS * EACH {
                    assert_eq!(
                        poller.wait(&mut events, CAP_NS).unwrap(),
                        1,
                        "{name}: a wake was lost"
                    );
                    waker.drain();
                }
            });
            waker.drain();
            assert!(!is_ready(&poller), "{name}");
        }
    }

    static IN_HANDLER: OnceLock<[Box<dyn Contract + Send>; 2]> = OnceLock::new();

    extern "C" fn wake_all(_signal: libc::c_int) {
        for waker in IN_HANDLER.get().into_iter().flatten() {
            waker.wake();
        }
    }

    #[test]
    fn wakes_from_a_signal_handler() {
        let wakers = IN_HANDLER.get_or_init(|| {
            [
                Box::new(Waker::new().unwrap()),
                Box::new(pipe::Waker::new().unwrap()),
            ]
        });
        // SAFETY: the action is plain data, and its handler does only what a signal handler may do. No other test uses
        // SIGUSR2.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = wake_all as extern "C" fn(libc::c_int) as libc::sighandler_t;
            assert_eq!(
                libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()),
                0
            );
            assert_eq!(libc::raise(libc::SIGUSR2), 0);
        }
        for waker in wakers {
            assert!(is_ready(&watch(waker.as_ref())));
        }
    }
}
