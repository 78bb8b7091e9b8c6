//! Finds out whether descriptors are ready, or waits for a single descriptor, without a poller.
//!
//! [`wait_ready`] is for a blocking read or write on a nonblocking descriptor, in a thread that does not run a loop.
//! [`is_any_ready`] checks descriptors without taking their events from the poller. The descriptors may be of any kind.
//!
//! Any thread may make the calls; they keep no state.
//!
//! Source: `poll(2)`.

use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;

use super::clock::now_ns;
use super::poller::Interest;

const NS_PER_MS: u64 = 1_000_000;

/// Waits until a read, or a write if `is_write`, would not block. Stops waiting when [`now_ns`] reaches `deadline_ns`
/// (`None`: no limit). Returns whether the descriptor is ready. A descriptor with an error or a hangup is ready for
/// both.
///
/// # Errors
/// `Interrupted` if a signal arrived, `EBADF` for a closed descriptor, `ENOMEM`.
pub fn wait_ready(fd: RawFd, is_write: bool, deadline_ns: Option<u64>) -> io::Result<bool> {
    if fd < 0 {
        // `poll` would ignore a negative descriptor, and wait.
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    let events = if is_write { libc::POLLOUT } else { libc::POLLIN };
    loop {
        let timeout_ms = match deadline_ns {
            None => -1,
            // Rounded up, so that the wait does not end early.
            Some(deadline_ns) => c_int::try_from(deadline_ns.saturating_sub(now_ns()).div_ceil(NS_PER_MS))
                .unwrap_or(c_int::MAX),
        };
        let mut entry = libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        // SAFETY: the call gets one live entry and writes only to it.
        let count = unsafe { libc::poll(&raw mut entry, 1, timeout_ms) };
        if count < 0 {
            return Err(io::Error::last_os_error());
        }
        if entry.revents & libc::POLLNVAL != 0 {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        if count > 0 {
            return Ok(true);
        }
        // One call waits for at most 24 days, so the deadline may not have been reached.
        if deadline_ns.is_some_and(|deadline_ns| now_ns() >= deadline_ns) {
            return Ok(false);
        }
    }
}

/// Whether one of these descriptors is ready for a direction (reading or writing) that its [`Interest`] contains. The
/// call does not wait. A closed descriptor is not ready. If the system call fails, the result is true.
pub fn is_any_ready(watched: impl Iterator<Item = (RawFd, Interest)>) -> bool {
    let mut entries: Vec<libc::pollfd> = watched
        .filter(|(_, interest)| interest.has_read() || interest.has_write())
        .map(|(fd, interest)| libc::pollfd {
            fd,
            events: if interest.has_read() { libc::POLLIN } else { 0 }
                | if interest.has_write() { libc::POLLOUT } else { 0 },
            revents: 0,
        })
        .collect();
    if entries.is_empty() {
        return false;
    }
    // SAFETY: the call gets the live entries and their number, and writes only to them.
    let count = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, 0) };
    count < 0 || entries.iter().any(|entry| entry.revents & !libc::POLLNVAL != 0)
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::{Interest, is_any_ready, now_ns, wait_ready};

    #[test]
    fn a_socket_is_ready_to_write_at_once_and_to_read_once_there_is_data() {
        let Ok((mut near, far)) = UnixStream::pair() else {
            panic!("no sockets")
        };
        assert!(matches!(wait_ready(far.as_raw_fd(), true, None), Ok(true)));
        assert!(matches!(
            wait_ready(far.as_raw_fd(), false, Some(now_ns() + 1_000_000)),
            Ok(false)
        ));
        assert!(near.write_all(b"x").is_ok());
        assert!(matches!(wait_ready(far.as_raw_fd(), false, None), Ok(true)));
    }

    #[test]
    fn one_ready_descriptor_of_several_is_enough() {
        let Ok((mut near, far)) = UnixStream::pair() else {
            panic!("no sockets")
        };
        let (one, other) = (near.as_raw_fd(), far.as_raw_fd());
        let both = |interest| is_any_ready([(one, Interest::READ), (other, interest)].into_iter());
        assert!(!is_any_ready([].into_iter()));
        assert!(!is_any_ready([(1 << 20, Interest::BOTH)].into_iter()));
        assert!(!both(Interest::READ));
        assert!(!both(Interest::NONE));
        assert!(both(Interest::WRITE));
        assert!(near.write_all(b"x").is_ok());
        assert!(both(Interest::READ.on_change()));
        assert!(!both(Interest::NONE));
    }

    #[test]
    fn a_hangup_is_readiness_and_a_closed_descriptor_is_an_error() {
        let Ok((near, far)) = UnixStream::pair() else {
            panic!("no sockets")
        };
        drop(near);
        assert!(matches!(wait_ready(far.as_raw_fd(), false, None), Ok(true)));
        let error = wait_ready(1 << 20, false, None).err();
        assert!(error.is_some_and(|error| error.kind() != ErrorKind::Interrupted));
        let error = wait_ready(-1, false, Some(0)).err();
        assert_eq!(error.and_then(|error| error.raw_os_error()), Some(libc::EBADF));
    }
}
