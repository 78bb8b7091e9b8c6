//! The interface to the operating system. Most calls that can fail return `io::Result`. A call does not block unless
//! its description says so.
//!
//! The differences between systems are hidden in here. The types and functions have the same names and the same meaning
//! on every system. A topic whose implementations differ a lot is a folder, and its `mod.rs` selects the file.
//!
//! The modules, and what each uses on the supported systems ("POSIX": the same calls everywhere):
//!
//! | module | contract | Linux, Android | macOS, BSD |
//! |---|---|---|---|
//! | [`aio`] | calls on files, made while the loop runs | io_uring; threads | threads |
//! | [`at_once`] | calls that never block, for files in blocking mode | `RWF_NOWAIT`, `/proc/self/fd` | only sockets |
//! | [`child`] | an fd that is readable once a child has ended | pidfd; a thread before 5.3 | kqueue, `EVFILT_PROC` |
//! | [`clock`] | the clock of `time.monotonic()` | `CLOCK_MONOTONIC` | `CLOCK_UPTIME_RAW` (Apple), `CLOCK_MONOTONIC` |
//! | [`faults`] | a message when a stack overflows into its guard | POSIX | POSIX |
//! | [`mod@file`] | length and position of files, and sending them | `sendfile` | `sendfile`; none (NetBSD, OpenBSD) |
//! | [`heap`] | keeps freed large buffers in the process | glibc's thresholds | nothing to do |
//! | [`pages`] | memory mappings and guards in them | `MADV_NOHUGEPAGE`, `MADV_GUARD_INSTALL` | guards by `mprotect` |
//! | [`pipe`] | pipes and terminals; whether they report a lost reader | POSIX | POSIX; named FIFOs do not (Apple) |
//! | [`poller`] | level-triggered readiness of fds with a `u64` token each, waits in nanoseconds | epoll | kqueue |
//! | [`pool`] | threads for calls that block | POSIX | POSIX |
//! | [`readiness`] | the state of a few fds, without a poller | POSIX | POSIX |
//! | [`resolver`] | name resolution in a pool of threads | `getaddrinfo`, `gethostbyname_r` | `getaddrinfo` |
//! | [`signals`] | a pipe to which signal handlers write the signals' numbers | `pipe2` | `pipe` (Apple), `pipe2` |
//! | [`socket`] | socket calls without `SIGPIPE` | `MSG_NOSIGNAL`, `accept4` | `SO_NOSIGPIPE` (Apple), `MSG_NOSIGNAL` |
//! | [`socket::datagram`] | receiving several datagrams per call, sending one | `recvmmsg` | `recvfrom` |
//! | [`thread`] | starts a helper thread that receives no signals | POSIX | POSIX |
//! | [`thread_locals`] | other libraries' thread-local pointers | pthread keys; on Linux TLS segments | pthread keys |
//! | [`unwinding`] | hangs threads that would unwind | a personality routine (glibc) | the same (FreeBSD); nothing |
//! | [`waker`] | wakes a blocked poller from any thread or signal handler | eventfd | pipe |
//!
//! A [`poller::Poller`] and its events belong to the thread of their loop. Other threads wake that loop with
//! [`waker::Waker::wake`].

#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    target_vendor = "apple",
    target_os = "freebsd",
    target_os = "dragonfly",
    target_os = "netbsd",
    target_os = "openbsd",
)))]
compile_error!("grapeshot needs epoll or kqueue: Linux, Android, macOS or a BSD");

pub mod aio;
pub mod at_once;
pub mod child;
pub mod clock;
pub mod faults;
pub mod file;
pub mod heap;
pub mod pages;
pub mod pipe;
pub mod poller;
pub mod pool;
pub mod readiness;
pub mod resolver;
pub mod signals;
pub mod socket;
pub mod thread;
pub mod thread_locals;
pub mod unwinding;
pub mod waker;
