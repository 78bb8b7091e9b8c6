//! The operating system, as the rooms above need it: nonblocking, with `io::Result`, without Python.
//!
//! Everything that differs between systems is decided below this module: the types above the line have
//! the same names and the same meaning everywhere, and one `mod.rs` per topic picks the file that
//! provides them.
//!
//! What a system must provide
//!
//! | module | contract | Linux, Android | macOS, BSD |
//! |---|---|---|---|
//! | [`at_once`] | reads and writes that never block, of shared descriptors in blocking mode | `RWF_NOWAIT`, `/proc/self/fd` | sockets only |
//! | [`child`] | an fd that tells the end of a child process | pidfd; a thread before 5.3 | kqueue with `EVFILT_PROC` |
//! | [`clock`] | the clock of `time.monotonic()` | `CLOCK_MONOTONIC` | `CLOCK_UPTIME_RAW` (Apple), the same |
//! | [`faults`] | a line about a fault in a watched range, whose stack is used up | all | all |
//! | [`file`] | length, position and sending of files | `sendfile` | `sendfile`; none (NetBSD, OpenBSD) |
//! | [`heap`] | large buffers that are freed stay with the process | glibc's thresholds | nothing to do |
//! | [`pages`] | small pages for a mapping | `MADV_NOHUGEPAGE` | nothing to do |
//! | [`pipe`] | pipes and terminals; which writing ends report a lost reader | all | all but named FIFOs (Apple) |
//! | [`poller`] | level-triggered readiness of many fds, one `u64` token each, waits in nanoseconds | epoll | kqueue |
//! | [`prefetch`] | a hint that memory will be read | by processor | by processor |
//! | [`readiness`] | blocking until one fd is ready | all | all |
//! | [`signals`] | a pipe for the numbers of signals, written by handlers | `pipe2` | `pipe` (Apple), `pipe2` |
//! | [`socket`] | socket calls without `SIGPIPE` | `MSG_NOSIGNAL`, `accept4` | `SO_NOSIGPIPE` (Apple), `MSG_NOSIGNAL` |
//! | [`socket::datagram`] | several datagrams per call, one to an address | `recvmmsg` | `recvfrom` |
//! | [`thread`] | a helper thread that gets no signals | all | all |
//! | [`thread_locals`] | other libraries' thread-local pointers | TLS segments and pthread keys | pthread keys |
//! | [`unwinding`] | ended threads hang inside a call | a personality routine (glibc) | the same (FreeBSD); nothing |
//! | [`waker`] | wake a blocked poller from any thread or signal handler | eventfd | pipe |
//!
//! Owner: a [`poller::Poller`] and its events belong to the thread of their loop; [`waker::Waker::wake`]
//! is the one call made from other threads. Nothing here may know about callbacks, transports or Python.

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

pub mod at_once;
pub mod child;
pub mod clock;
pub mod faults;
pub mod file;
pub mod heap;
pub mod pages;
pub mod pipe;
pub mod poller;
pub mod prefetch;
pub mod readiness;
pub mod signals;
pub mod socket;
pub mod thread;
pub mod thread_locals;
pub mod unwinding;
pub mod waker;
