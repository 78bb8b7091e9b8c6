//! The end of a child where the kernel has no descriptor for it: a thread waits, and closes a pipe.
//!
//! Purpose: the contract of [`super`].
//!
//! Owner: the thread owns the writing end and nothing else; it ends with the child.
//!
//! Source: `waitid(2)`, `pipe(7)`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::ptr;
use std::thread::Builder;

use crate::sys::signals::nonblocking_pipe;

/// A few calls deep, and no buffers.
const STACK_LEN: usize = 64 * 1024;

pub(super) fn watch(pid: libc::pid_t) -> io::Result<OwnedFd> {
    let (reader, writer) = nonblocking_pipe()?;
    Builder::new()
        .name(format!("waitid-{pid}"))
        .stack_size(STACK_LEN)
        .spawn(move || {
            block_signals();
            wait_end(pid);
            drop(writer);
        })?;
    Ok(reader)
}

/// The program's signal handlers are for its own threads.
fn block_signals() {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset fills the set, which is then only read; no old mask is asked for.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), ptr::null_mut());
    }
}

/// Returns when the child has ended, leaving its status to be fetched, or when somebody else has fetched it.
fn wait_end(pid: libc::pid_t) {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    loop {
        // SAFETY: `info` is live and large enough for the call to fill.
        let result = unsafe {
            libc::waitid(
                libc::P_PID,
                pid.cast_unsigned(),
                info.as_mut_ptr(),
                libc::WEXITED | libc::WNOWAIT,
            )
        };
        if result == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}
