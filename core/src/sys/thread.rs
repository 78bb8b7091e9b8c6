//! Starts the library's helper threads. They block the signals of the process, because Python's signal handlers must
//! run in the main thread.
//!
//! Source: `pthread_sigmask(3)`, `signal(7)`.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::thread::{Builder, JoinHandle};

/// The signals that a thread causes itself, which are not blocked. If they were, a fault would end the process without
/// a message.
const FAULTS: [libc::c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGABRT,
];

/// Runs `body` in a new thread, in which all signals except `FAULTS` are blocked from its first instruction on.
///
/// # Errors
/// If the process cannot start another thread.
pub fn spawn<F>(name: String, stack_len_bytes: usize, body: F) -> io::Result<JoinHandle<()>>
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
    let made = Builder::new().name(name).stack_size(stack_len_bytes).spawn(body);
    // SAFETY: `before` was written above; it is the mask that this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    made
}

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
    fn signals_do_not_reach_it() {
        let before = is_blocked(libc::SIGINT);
        let (sender, receiver) = channel();
        let made = spawn("quiet".to_owned(), 64 * 1024, move || {
            let seen = (is_blocked(libc::SIGINT), is_blocked(libc::SIGSEGV));
            sender.send(seen).expect("the test waits");
        });
        made.expect("a thread").join().expect("no panic");
        assert_eq!(receiver.recv(), Ok((true, false)));
        assert_eq!(is_blocked(libc::SIGINT), before);
    }
}
