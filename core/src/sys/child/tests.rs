//! Tests of what `mod.rs` requires of `watch`, for the system's own mechanism and for the thread that replaces it.

#![allow(clippy::zombie_processes)] // the tests fetch the status themselves

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use super::{ExitWatch, Reaped, thread, watch};
use crate::sys::poller::{Events, Interest, Poller, Token};

/// Far longer than any wait on a loaded machine. After a lost event the test fails instead of hanging.
const CAP_NS: Option<u64> = Some(60_000_000_000);

type WatchChild = fn(libc::pid_t) -> io::Result<OwnedFd>;

const WAYS: [(&str, WatchChild); 2] = [("native", watch), ("thread", thread::watch)];

/// A shell that runs `script`. A `read` in the script waits until the test closes the input.
fn shell(script: &str) -> Child {
    Command::new("/bin/sh")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap()
}

fn pid(child: &Child) -> libc::pid_t {
    child.id().cast_signed()
}

fn watched(way: WatchChild, child: &Child) -> ExitWatch {
    ExitWatch::of(way(pid(child)).unwrap(), pid(child))
}

fn is_readable(exit: &ExitWatch, timeout_ns: Option<u64>) -> bool {
    let poller = Poller::new().unwrap();
    poller.add(exit.fd(), Token(1), Interest::READ).unwrap();
    poller.wait(&mut Events::with_capacity(1), timeout_ns).unwrap() == 1
}

#[test]
fn the_fd_is_readable_once_the_child_has_ended() {
    for (name, way) in WAYS {
        let mut child = shell("read line; exit 7");
        let exit = watched(way, &child);
        assert!(!is_readable(&exit, Some(0)), "{name}");
        assert_eq!(exit.reap(), Reaped::Running, "{name}");
        drop(child.stdin.take());
        assert!(is_readable(&exit, CAP_NS), "{name}");
        assert!(is_readable(&exit, Some(0)), "{name}");
        assert_eq!(exit.reap(), Reaped::Ended(7), "{name}");
        assert_eq!(exit.reap(), Reaped::Unknown, "{name}");
    }
}

#[test]
fn a_signal_is_a_negative_number() {
    for (name, way) in WAYS {
        let mut child = shell("read line");
        let exit = watched(way, &child);
        child.kill().unwrap();
        assert!(is_readable(&exit, CAP_NS), "{name}");
        assert_eq!(exit.reap(), Reaped::Ended(-libc::SIGKILL), "{name}");
    }
}

#[test]
fn a_child_that_ended_before_the_watch_began_is_noticed() {
    for (name, way) in WAYS {
        let mut child = shell("read line; exit 3");
        let first = watched(way, &child);
        drop(child.stdin.take());
        assert!(is_readable(&first, CAP_NS), "{name}");
        let second = watched(way, &child);
        assert!(is_readable(&second, CAP_NS), "{name}");
        assert_eq!(second.reap(), Reaped::Ended(3), "{name}");
    }
}

#[test]
fn a_status_that_other_code_has_fetched_is_unknown() {
    for (name, way) in WAYS {
        let mut child = shell("read line");
        let exit = watched(way, &child);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_readable(&exit, CAP_NS), "{name}");
        assert_eq!(exit.reap(), Reaped::Unknown, "{name}");
    }
}

#[test]
fn a_process_that_is_gone_cannot_be_watched() {
    let mut child = shell("exit");
    let pid = pid(&child);
    child.wait().unwrap();
    let error = watch(pid).err().and_then(|error| error.raw_os_error());
    assert_eq!(error, Some(libc::ESRCH));
}

#[test]
fn the_descriptor_is_closed_on_exec() {
    for (name, way) in WAYS {
        let mut child = shell("read line");
        let fd = way(pid(&child)).unwrap();
        // SAFETY: the call takes no pointers.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags, libc::FD_CLOEXEC, "{name}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn the_thread_reports_the_end_although_a_forked_process_has_its_pipe() {
    let mut child = shell("read line");
    let exit = watched(thread::watch, &child);
    // SAFETY: the forked process calls only functions that are safe after a fork.
    let holder = unsafe { libc::fork() };
    if holder == 0 {
        // SAFETY: as above.
        unsafe {
            libc::pause();
            libc::_exit(0);
        }
    }
    assert!(holder > 0);
    child.kill().unwrap(); // `holder` has the child's input, too, so closing that would not end the child
    let is_reported = is_readable(&exit, CAP_NS);
    let mut status = 0;
    // SAFETY: `holder` is a child of this process that nobody else waits for; `status` is a live int.
    unsafe {
        libc::kill(holder, libc::SIGKILL);
        libc::waitpid(holder, &raw mut status, 0);
    }
    assert!(is_reported);
    assert_eq!(exit.reap(), Reaped::Ended(-libc::SIGKILL));
}
