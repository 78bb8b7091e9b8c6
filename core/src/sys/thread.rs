//! Starts the library's helper threads. They block the signals of the process, so that a signal interrupts a thread of
//! the program and not a helper thread.
//!
//! Source: `pthread_sigmask(3)`, `signal(7)`, `gettid(2)`, `tgkill(2)`.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::{Builder, JoinHandle};

/// The signals that a thread causes itself. They are not blocked, because otherwise a fault would end the process
/// without a message.
const FAULTS: [libc::c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGABRT,
];

/// A thread that `spawn` has started. If this value is dropped, the thread continues to run.
pub struct HelperThread {
    handle: JoinHandle<()>,
    /// The system's number of the thread, only on Linux; 0 on other systems, and before the thread runs.
    number: Arc<AtomicI32>,
}

impl HelperThread {
    /// Waits until the thread has ended, and until the system no longer counts it.
    ///
    /// `JoinHandle::join` returns a moment before the system stops counting the thread. After a fork in that moment,
    /// CPython would warn that the process has several threads.
    pub fn join(self) {
        // Err means that the thread panicked, which was already written to stderr.
        drop(self.handle.join());
        wait_gone(self.number.load(Ordering::Relaxed));
    }
}

/// Runs `body` in a new thread, in which all signals except `FAULTS` are blocked from its first instruction on.
///
/// # Errors
/// If the process cannot start another thread.
pub fn spawn<F>(name: String, stack_len_bytes: usize, body: F) -> io::Result<HelperThread>
where
    F: FnOnce() + Send + 'static,
{
    let mut blocked = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the set that the other calls change and read. The last call writes `before`, and
    // cannot fail with these arguments.
    unsafe {
        libc::sigfillset(blocked.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(blocked.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr());
    }
    let number = Arc::new(AtomicI32::new(0));
    let own_number = Arc::clone(&number);
    let made = Builder::new()
        .name(name)
        .stack_size(stack_len_bytes)
        .spawn(move || {
            own_number.store(current_number(), Ordering::Relaxed);
            body();
        });
    // SAFETY: `before` was written above; it is the mask that this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    Ok(HelperThread {
        handle: made?,
        number,
    })
}

#[cfg(target_os = "linux")]
fn current_number() -> libc::pid_t {
    // SAFETY: the call cannot fail, and changes nothing. (glibc has a function for it only since 2.30.)
    unsafe { libc::syscall(libc::SYS_gettid) as libc::pid_t }
}

/// Waits until the system has forgotten a thread of this process, which has already ended.
#[cfg(target_os = "linux")]
fn wait_gone(number: libc::pid_t) {
    // Usually the system has already forgotten the thread, and otherwise it will do so in a moment. So the wait is
    // short. It has a limit, because another thread may have got the same number by now.
    for _ in 0..1000 {
        // SAFETY: signal 0 is not sent: the call only tells whether the thread exists.
        if unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number, 0) } != 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

#[cfg(not(target_os = "linux"))]
fn current_number() -> i32 {
    0
}

#[cfg(not(target_os = "linux"))]
fn wait_gone(_: i32) {}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;
    use std::ptr;
    use std::sync::mpsc::channel;

    use super::spawn;

    fn is_blocked(signal: libc::c_int) -> bool {
        let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the call changes no mask, and writes the current one before it is read.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), mask.as_mut_ptr());
            libc::sigismember(mask.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn signals_do_not_reach_a_helper_thread() {
        let before = is_blocked(libc::SIGINT);
        let (sender, receiver) = channel();
        let made = spawn("quiet".to_owned(), 64 * 1024, move || {
            let seen = (is_blocked(libc::SIGINT), is_blocked(libc::SIGSEGV));
            sender.send(seen).expect("the test waits");
        });
        made.expect("a thread").join();
        assert_eq!(receiver.recv(), Ok((true, false)));
        assert_eq!(is_blocked(libc::SIGINT), before);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_does_not_count_a_thread_after_join() {
        for _ in 0..100 {
            let made = spawn("short".to_owned(), 64 * 1024, || ()).expect("a thread");
            let number = std::sync::Arc::clone(&made.number);
            made.join();
            let number = number.load(std::sync::atomic::Ordering::Relaxed);
            assert!(!std::path::Path::new(&format!("/proc/self/task/{number}")).exists());
        }
    }
}
