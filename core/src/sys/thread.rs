//! The library's helper threads.
//!
//! Purpose: a thread that the program does not notice. The signals of the process never interrupt it, because Python's
//! handlers must run in the main thread.
//!
//! Owner: whoever starts it.
//!
//! Source: `pthread_sigmask(3)`, `signal(7)`.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::thread::{Builder, JoinHandle};

/// Faults of the thread itself. If they were blocked, they would end the process without a message.
const FAULTS: [libc::c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGABRT,
];

/// Runs `body` in a new thread, which has all signals of the process blocked from its first instruction on.
///
/// # Errors
/// The process cannot start another thread.
pub fn spawn<F>(name: String, stack_len_bytes: usize, body: F) -> io::Result<JoinHandle<()>>
where
    F: FnOnce() + Send + 'static,
{
    let mut blocked = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset fills the set that the other calls change and read; the mask before is written by the last
    // one, which cannot fail with these arguments.
    unsafe {
        libc::sigfillset(blocked.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(blocked.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr());
    }
    let made = Builder::new().name(name).stack_size(stack_len_bytes).spawn(body);
    // SAFETY: the mask that this thread had, written above.
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
        // SAFETY: no mask is set; the current one is written before it is read.
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
