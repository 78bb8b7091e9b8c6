//! The poller over kqueue, for macOS and the BSDs. [`super`] has its contract.
//!
//! kqueue watches the two directions of an fd as two filters. This module does not remember which filters are
//! registered, so the call that sets an interest adds the wanted filters and deletes the others. One wait can return an
//! fd in two events.
//!
//! `EV_EOF` on the read filter without an error only means that the peer will not send more data. The next read finds
//! that out anyway. `EV_EOF` on the read filter with an error, or on the write filter, means that the connection is
//! gone. The poller reports that as a hangup.
//!
//! Source: `kqueue(2)` of macOS, FreeBSD, NetBSD, OpenBSD.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use super::{Event, Interest, Readiness, Token};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("a token is stored in kevent.udata, which must have 64 bits");

const NS_PER_S: u64 = 1_000_000_000;

/// The longest single sleep. Some kernels refuse a timeout above 10^8 seconds.
const MAX_WAIT_NS: u64 = 10_000_000 * NS_PER_S;

// The fields of `kevent` have other widths on NetBSD.
#[cfg(target_os = "netbsd")]
type Filter = u32;
#[cfg(target_os = "netbsd")]
type Flags = u32;
#[cfg(target_os = "netbsd")]
type Count = libc::size_t;
#[cfg(not(target_os = "netbsd"))]
type Filter = i16;
#[cfg(not(target_os = "netbsd"))]
type Flags = u16;
#[cfg(not(target_os = "netbsd"))]
type Count = libc::c_int;

/// The events of the last wait. The memory is allocated once.
pub struct Events {
    list: Box<[MaybeUninit<libc::kevent>]>,
    /// How many entries from the front the last wait filled.
    len: usize,
}

// SAFETY: the pointers in `udata` are numbers (tokens) that are never dereferenced.
unsafe impl Send for Events {}
// SAFETY: as above, and a shared `Events` is only read.
unsafe impl Sync for Events {}

impl Events {
    /// Space for `capacity` events of one wait (0 means one). The next wait returns the events that did not fit.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            list: Box::new_uninit_slice(capacity.clamp(1, 1 << 20)),
            len: 0,
        }
    }

    /// How many events the last wait returned.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the last wait returned no event.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Event number `index` of the last wait.
    ///
    /// # Panics
    /// If `index` is not below [`Self::len`].
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> Event {
        // SAFETY: the last wait filled the first `len` entries, and the slice ends there.
        let raw = unsafe { self.list[..self.len][index].assume_init_ref() };
        Event {
            token: Token(raw.udata.addr() as u64),
            readiness: readiness_of(raw.filter as Filter, raw.flags as Flags, raw.fflags),
        }
    }
}

#[inline]
fn readiness_of(filter: Filter, flags: Flags, fflags: u32) -> Readiness {
    let is_eof = flags & libc::EV_EOF as Flags != 0;
    let is_writing = filter == libc::EVFILT_WRITE as Filter;
    // The `fflags` of an EOF are the socket's error, if it has one.
    if flags & libc::EV_ERROR as Flags != 0 || (is_eof && (is_writing || fflags != 0)) {
        return Readiness::READ.with(Readiness::WRITE).with(Readiness::HANGUP);
    }
    if is_writing {
        Readiness::WRITE
    } else if is_eof {
        Readiness::READ.with(Readiness::MORE)
    } else {
        Readiness::READ
    }
}

/// One kqueue, closed on drop.
pub struct Poller {
    queue: OwnedFd,
}

impl Poller {
    /// Closing an fd deletes its filters, even if a duplicate is open.
    pub const KEEPS_CLOSED: bool = false;

    /// A poller that does not watch any fd yet. Its descriptor is close-on-exec.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM` from `kqueue(2)`.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes no arguments.
        let fd = unsafe { libc::kqueue() };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just opened, and nothing else knows it.
        let queue = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl(&queue, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Ok(Self { queue })
    }

    /// The queue's descriptor itself. It is readable while an event is pending.
    #[cfg(test)]
    pub fn as_raw_fd(&self) -> RawFd {
        self.queue.as_raw_fd()
    }

    /// Watches `fd` for `interest`. If `fd` is watched already, this call does what [`Self::modify`] does.
    ///
    /// # Errors
    /// `EBADF` for a closed fd, `EINVAL` or `ENOTSUP` for one that kqueue cannot watch, `ENOMEM`. After an error
    /// neither direction is watched.
    #[inline]
    pub fn add(&self, fd: RawFd, token: Token, interest: Interest) -> io::Result<()> {
        self.set(fd, token, interest)
    }

    /// Changes the token and the interest of `fd`. If `fd` is not watched, this call does what [`Self::add`] does.
    ///
    /// # Errors
    /// As for [`Self::add`].
    #[inline]
    pub fn modify(&self, fd: RawFd, token: Token, interest: Interest) -> io::Result<()> {
        self.set(fd, token, interest)
    }

    /// Stops watching `fd`. Also succeeds if `fd` was not watched, or is closed.
    ///
    /// # Errors
    /// Errors of `kevent(2)` other than `ENOENT` and `EBADF`. An fd that was watched causes none.
    #[inline]
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.set(fd, Token(0), Interest::NONE)
    }

    /// Whether `fd` is still watched. If the fd was closed and now refers to another file, it watches that file
    /// instead, and returns whether that succeeded.
    #[must_use]
    pub fn is_watching(&self, fd: RawFd, token: Token, interest: Interest) -> bool {
        self.set(fd, token, interest).is_ok()
    }

    /// Waits until an fd is ready or `timeout_ns` has passed (`None`: no limit; `Some(0)`: does not wait). Returns the
    /// number of events that `events` now holds; 0 means that the time has passed. One system call waits for the whole
    /// timeout, so the time at which it began is not needed.
    ///
    /// # Errors
    /// `ErrorKind::Interrupted` if a signal arrived. `events` is empty then.
    #[inline]
    pub fn wait_since(
        &self,
        events: &mut Events,
        timeout_ns: Option<u64>,
        _began_ns: u64,
    ) -> io::Result<usize> {
        events.len = 0;
        let timeout = timeout_ns.map(|timeout_ns| {
            let timeout_ns = timeout_ns.min(MAX_WAIT_NS);
            libc::timespec {
                tv_sec: (timeout_ns / NS_PER_S).cast_signed(),
                tv_nsec: (timeout_ns % NS_PER_S).cast_signed(),
            }
        });
        // SAFETY: no changes are given; the list is live, exclusively borrowed and has the given length; the
        // timeout, if any, lives during the call.
        let count = unsafe {
            libc::kevent(
                self.queue.as_raw_fd(),
                ptr::null(),
                0,
                events.list.as_mut_ptr().cast::<libc::kevent>(),
                events.list.len() as Count,
                timeout.as_ref().map_or(ptr::null(), ptr::from_ref),
            )
        };
        // -1 is the only value that does not fit.
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        events.len = count;
        Ok(count)
    }

    /// Sets the interest of `fd`: adds or deletes one filter for each direction.
    fn set(&self, fd: RawFd, token: Token, interest: Interest) -> io::Result<()> {
        // The receipts have the same order as the changes.
        let [read, write] = self.exchange([
            change(fd, libc::EVFILT_READ as Filter, token, interest.has_read()),
            change(fd, libc::EVFILT_WRITE as Filter, token, interest.has_write()),
        ])?;
        let refused = [(read, interest.has_read()), (write, interest.has_write())]
            .into_iter()
            .find_map(|(errno, is_wanted)| refusal(errno, is_wanted));
        match refused {
            None => Ok(()),
            Some(error) => {
                // If one direction stayed registered, it would report events for a token that the caller no longer
                // uses.
                if !interest.is_empty() {
                    self.set(fd, token, Interest::NONE)?;
                }
                Err(error)
            }
        }
    }

    /// Applies two changes and returns the errno of each (0: success).
    fn exchange(&self, mut changes: [libc::kevent; 2]) -> io::Result<[i32; 2]> {
        // SAFETY: both lists are the same two live entries, which the kernel allows: it reads all changes before it
        // overwrites them with receipts. With EV_RECEIPT the call returns at once, so it needs no timeout.
        let count = unsafe {
            libc::kevent(
                self.queue.as_raw_fd(),
                changes.as_ptr(),
                changes.len() as Count,
                changes.as_mut_ptr(),
                changes.len() as Count,
                ptr::null(),
            )
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            // A signal interrupts the call only after the kernel has applied all changes (FreeBSD's manual).
            return if error.kind() == io::ErrorKind::Interrupted {
                Ok([0; 2])
            } else {
                Err(error)
            };
        }
        Ok(changes.map(|receipt| {
            if receipt.flags as Flags & libc::EV_ERROR as Flags == 0 {
                0
            } else {
                i32::try_from(receipt.data).unwrap_or(libc::EINVAL)
            }
        }))
    }
}

/// One change: adds the filter under `token`, or deletes it.
#[inline]
fn change(fd: RawFd, filter: Filter, token: Token, is_wanted: bool) -> libc::kevent {
    let action = if is_wanted { libc::EV_ADD } else { libc::EV_DELETE };
    // SAFETY: `kevent` is plain data, and valid if all of its bytes are zero. (On some systems it has further fields.)
    let mut change: libc::kevent = unsafe { MaybeUninit::zeroed().assume_init() };
    change.ident = fd as libc::uintptr_t;
    change.filter = filter;
    change.flags = action as Flags | libc::EV_RECEIPT as Flags;
    change.udata = ptr::without_provenance_mut(token.0 as usize);
    change
}

/// The error that the receipt of one change reports, if any.
fn refusal(errno: i32, is_wanted: bool) -> Option<io::Error> {
    match (errno, is_wanted) {
        (0, _)
        // The filter did not exist, or closing the fd has already deleted it.
        | (libc::ENOENT | libc::EBADF, false)
        // macOS returns EPIPE for a pipe whose other end is gone, but watches it.
        | (libc::EPIPE, true) => None,
        _ => Some(io::Error::from_raw_os_error(errno)),
    }
}
