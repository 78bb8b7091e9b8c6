//! Watches a child where the kernel has no pidfds, or a sandbox refuses them: a thread waits for the child and then
//! writes a byte to a pipe, which makes the reading end readable. (Closing the writing end would not be enough: a
//! process that was forked meanwhile may have a copy of it.) The thread owns only the writing end, and ends when the
//! child has ended. [`super`] has the contract.
//!
//! Source: `waitid(2)`, `pipe(7)`.

use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use crate::sys::signals::nonblocking_pipe;
use crate::sys::thread;

/// Enough for a thread that makes only a few nested calls and has no buffers.
const STACK_LEN: usize = 64 * 1024;

pub(super) fn watch(pid: libc::pid_t) -> io::Result<OwnedFd> {
    let (reader, writer) = nonblocking_pipe()?;
    thread::spawn(format!("waitid-{pid}"), STACK_LEN, move || {
        wait_end(pid);
        // The pipe is empty, so this can fail only if no reader is left.
        let _ = File::from(writer).write(&[0]);
    })?;
    Ok(reader)
}

/// Returns when the child has ended, without fetching its status. Also returns if other code has fetched the status.
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
