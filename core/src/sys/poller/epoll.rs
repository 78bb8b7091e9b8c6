//! The poller over Linux epoll. [`super`] has its contract.
//!
//! Waits have nanosecond precision if the kernel has `epoll_pwait2` (5.11). An older kernel lacks the call (`ENOSYS`),
//! and an old sandbox may refuse it (`EPERM`). The poller finds that out at its first timed wait. From then on it uses
//! `epoll_wait`, and rounds timeouts *up* to milliseconds. A timer may then fire late, but never early.
//!
//! The kernel may extend a wait by a thousandth of its length (by a two-hundredth in a niced process), so that it can
//! combine wake-ups. A timer of one second would then fire a millisecond late. So the poller divides a long wait into
//! steps. Each step except the last is so short that it ends before the deadline, even if the kernel extends it.
//!
//! Source: `epoll(7)`, `epoll_ctl(2)`, `epoll_wait(2)`.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Event, Interest, Readiness, Token};
use crate::sys::clock::now_ns;

const NS_PER_MS: u64 = 1_000_000;
const NS_PER_S: u64 = 1_000_000_000;

/// A wait up to this length is one step. Dividing it would not help: the kernel may delay every wait of a thread by
/// 50 us anyway (the default of `PR_SET_TIMERSLACK`), which is a thousandth of this length.
const ONE_STEP_NS: u64 = 50 * NS_PER_MS;

// In the libc crate the flags have the type `c_int`, but the field that holds them is a `u32`.
const IN: u32 = libc::EPOLLIN.cast_unsigned();
const OUT: u32 = libc::EPOLLOUT.cast_unsigned();
const ON_CHANGE: u32 = libc::EPOLLET.cast_unsigned();
/// The end of the stream, or urgent data of TCP.
const MORE: u32 = (libc::EPOLLRDHUP | libc::EPOLLPRI).cast_unsigned();
const GONE: u32 = (libc::EPOLLHUP | libc::EPOLLERR).cast_unsigned();

/// The timeout of `epoll_pwait2` in the kernel's own 64-bit layout. On 32-bit machines `libc::timespec` may have an
/// older layout, which the call does not use.
#[repr(C)]
struct KernelTimespec {
    seconds: i64,
    nanoseconds: i64,
}

/// The events of the last wait. The memory is allocated once.
pub struct Events {
    list: Box<[libc::epoll_event]>,
    len: usize,
}

impl Events {
    /// Space for `capacity` events of one wait (0 means one). The next wait returns the events that did not fit.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        // The kernel counts in an int, and refuses more than INT_MAX / size_of::<epoll_event>().
        let capacity = capacity.clamp(1, 1 << 20);
        Self {
            list: vec![libc::epoll_event { events: 0, u64: 0 }; capacity].into_boxed_slice(),
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
        let raw = self.list[..self.len][index];
        Event {
            token: Token(raw.u64),
            readiness: readiness_of(raw.events),
        }
    }
}

#[inline]
fn readiness_of(flags: u32) -> Readiness {
    let mut readiness = Readiness::NONE;
    if flags & (IN | MORE | GONE) != 0 {
        readiness = readiness.with(Readiness::READ);
    }
    if flags & MORE != 0 {
        readiness = readiness.with(Readiness::MORE);
    }
    if flags & (OUT | GONE) != 0 {
        readiness = readiness.with(Readiness::WRITE);
    }
    if flags & GONE != 0 {
        readiness = readiness.with(Readiness::HANGUP);
    }
    readiness
}

/// One epoll instance, closed on drop.
pub struct Poller {
    epoll: OwnedFd,
    /// False once the kernel has refused `epoll_pwait2`. Atomic only so that the poller stays `Sync`.
    has_pwait2: AtomicBool,
}

impl Poller {
    /// The kernel watches a file until its last descriptor is closed.
    pub const KEEPS_CLOSED: bool = true;

    /// A poller that does not watch any fd yet. Its descriptor is close-on-exec.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM` from `epoll_create1(2)`.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: `fd` was just opened, and nothing else knows it.
            epoll: unsafe { OwnedFd::from_raw_fd(fd) },
            has_pwait2: AtomicBool::new(true),
        })
    }

    /// A poller that behaves as if the kernel had no `epoll_pwait2`.
    ///
    /// # Errors
    /// As for [`Self::new`].
    #[cfg(test)]
    pub(super) fn with_millisecond_waits() -> io::Result<Self> {
        let poller = Self::new()?;
        poller.has_pwait2.store(false, Ordering::Relaxed);
        Ok(poller)
    }

    /// The epoll descriptor itself. It is readable while an event is pending.
    #[cfg(test)]
    pub fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Watches `fd` for `interest`. If `fd` is watched already, this call does what [`Self::modify`] does.
    ///
    /// # Errors
    /// `EPERM` for a regular file or a directory, `EBADF` for a closed fd, `ENOSPC` or `ENOMEM`.
    #[inline]
    pub fn add(&self, fd: RawFd, token: Token, interest: Interest) -> io::Result<()> {
        self.set(fd, token, interest, libc::EPOLL_CTL_ADD)
    }

    /// Changes the token and the interest of `fd`. If `fd` is not watched, this call does what [`Self::add`] does.
    ///
    /// # Errors
    /// As for [`Self::add`].
    #[inline]
    pub fn modify(&self, fd: RawFd, token: Token, interest: Interest) -> io::Result<()> {
        self.set(fd, token, interest, libc::EPOLL_CTL_MOD)
    }

    /// Stops watching `fd`. Also succeeds if `fd` was not watched, or is closed.
    ///
    /// # Errors
    /// Any other errno of `epoll_ctl(2)`, but never for an fd that was watched.
    #[inline]
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        match self.control(libc::EPOLL_CTL_DEL, fd, 0, Token(0)) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EBADF)) => Ok(()),
            other => other,
        }
    }

    /// Whether `fd` still refers to the open file for which it was added. If so, this call also sets the token and the
    /// interest.
    #[must_use]
    pub fn is_watching(&self, fd: RawFd, token: Token, interest: Interest) -> bool {
        self.control(libc::EPOLL_CTL_MOD, fd, flags_of(interest), token)
            .is_ok()
    }

    /// Waits until an fd is ready or `timeout_ns` has passed (`None`: no limit; `Some(0)`: does not wait). A timeout of
    /// more than `ONE_STEP_NS` counts from `began_ns` (a recent reading of [`now_ns`]), a shorter one from the call.
    /// Returns the number of events that `events` now holds; 0 means that the time has passed.
    ///
    /// # Errors
    /// `ErrorKind::Interrupted` if a signal arrived. `events` is empty then.
    #[inline]
    pub fn wait_since(
        &self,
        events: &mut Events,
        timeout_ns: Option<u64>,
        began_ns: u64,
    ) -> io::Result<usize> {
        events.len = 0;
        let count = match timeout_ns {
            None => self.wait_ms(events, -1),
            Some(0) => self.wait_ms(events, 0),
            Some(timeout_ns) => self.wait_ns(events, timeout_ns, began_ns),
        };
        // -1 is the only value that does not fit.
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        events.len = count;
        Ok(count)
    }

    /// Calls `epoll_wait` and returns its result unchanged.
    #[inline]
    fn wait_ms(&self, events: &mut Events, timeout_ms: i32) -> libc::c_long {
        // SAFETY: the list is live, exclusively borrowed and has the given length; the kernel fills it with
        // plain data from the front.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                events.list.as_mut_ptr(),
                capacity_of(events),
                timeout_ms,
            )
        };
        libc::c_long::from(count)
    }

    /// Waits until `timeout_ns` after `began_ns`, in as many steps as necessary to end on time. If the timeout is short
    /// enough for one step, it counts from the call.
    fn wait_ns(&self, events: &mut Events, timeout_ns: u64, began_ns: u64) -> libc::c_long {
        if timeout_ns <= ONE_STEP_NS {
            return self.wait_step(events, timeout_ns);
        }
        let deadline_ns = began_ns.saturating_add(timeout_ns);
        let mut remaining_ns = timeout_ns;
        loop {
            let count = self.wait_step(events, step_of(remaining_ns));
            if count != 0 {
                return count;
            }
            remaining_ns = deadline_ns.saturating_sub(now_ns());
            if remaining_ns == 0 {
                return 0;
            }
        }
    }

    /// Calls `epoll_pwait2`. If the kernel refuses it, calls `epoll_wait` with the timeout rounded up to milliseconds.
    fn wait_step(&self, events: &mut Events, timeout_ns: u64) -> libc::c_long {
        if self.has_pwait2.load(Ordering::Relaxed) {
            let timeout = KernelTimespec {
                // Both fit: u64::MAX nanoseconds are 584 years.
                seconds: (timeout_ns / NS_PER_S).cast_signed(),
                nanoseconds: (timeout_ns % NS_PER_S).cast_signed(),
            };
            // SAFETY: as in `wait_ms`. The timeout lives during the call. The null pointer leaves the signal mask
            // unchanged, so its size is ignored. The call is made by its number, because glibc has a function for it
            // only since 2.35.
            let count = unsafe {
                libc::syscall(
                    libc::SYS_epoll_pwait2,
                    self.epoll.as_raw_fd(),
                    events.list.as_mut_ptr(),
                    capacity_of(events),
                    &raw const timeout,
                    ptr::null::<libc::sigset_t>(),
                    0_usize,
                )
            };
            if count >= 0 || !is_missing(nix::errno::Errno::last_raw()) {
                return count;
            }
            self.has_pwait2.store(false, Ordering::Relaxed);
        }
        self.wait_ms(events, ms_rounded_up(timeout_ns))
    }

    #[inline]
    fn set(&self, fd: RawFd, token: Token, interest: Interest, operation: i32) -> io::Result<()> {
        if interest.is_empty() {
            return self.remove(fd);
        }
        let flags = flags_of(interest);
        let Err(error) = self.control(operation, fd, flags, token) else {
            return Ok(());
        };
        // EEXIST: the fd is already registered, so its registration is changed. ENOENT: the fd is not registered, for
        // example because other code has closed it and opened another file under its number. So the fd is added.
        match (operation, error.raw_os_error()) {
            (libc::EPOLL_CTL_ADD, Some(libc::EEXIST)) => self.control(libc::EPOLL_CTL_MOD, fd, flags, token),
            (libc::EPOLL_CTL_MOD, Some(libc::ENOENT)) => self.control(libc::EPOLL_CTL_ADD, fd, flags, token),
            _ => Err(error),
        }
    }

    #[inline]
    fn control(&self, operation: i32, fd: RawFd, flags: u32, token: Token) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: flags,
            u64: token.0,
        };
        // SAFETY: `event` lives during the call, which only reads it; a bad fd gives an error.
        let result = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd, &raw mut event) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[inline]
fn flags_of(interest: Interest) -> u32 {
    let mut flags = 0;
    if interest.has_read() {
        flags |= IN;
    }
    if interest.has_write() {
        flags |= OUT;
    }
    if interest.is_on_change() {
        flags |= ON_CHANGE;
        if interest.has_read() {
            flags |= MORE;
        }
    }
    flags
}

/// The length of the list. [`Events::with_capacity`] has limited it, so it fits an int.
#[inline]
fn capacity_of(events: &Events) -> i32 {
    events.list.len() as i32
}

/// Whether this errno of `epoll_pwait2` means that the call is not available. Older seccomp profiles return `EPERM`
/// for a system call number that they do not know. The call itself never fails with `EPERM`.
fn is_missing(errno: i32) -> bool {
    matches!(errno, libc::ENOSYS | libc::EPERM)
}

/// The length of the next step if `remaining_ns` are left. A long wait is shortened by more than the kernel may add to
/// it.
fn step_of(remaining_ns: u64) -> u64 {
    if remaining_ns <= ONE_STEP_NS {
        remaining_ns
    } else {
        remaining_ns - remaining_ns / 128
    }
}

/// The timeout for `epoll_wait`: never shorter than `timeout_ns`, except that the longest possible sleep is 24 days.
fn ms_rounded_up(timeout_ns: u64) -> i32 {
    i32::try_from(timeout_ns.div_ceil(NS_PER_MS)).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::Ordering;

    use proptest::prelude::*;

    use super::{
        Events, Interest, NS_PER_MS, ONE_STEP_NS, Poller, Token, is_missing, ms_rounded_up, step_of,
    };
    use crate::sys::clock::now_ns;

    #[test]
    fn a_regular_file_is_refused() {
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let poller = Poller::new().unwrap();
        let error = poller
            .add(file.as_raw_fd(), Token(1), Interest::READ)
            .unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }

    /// Makes `epoll_pwait2` fail with `errno` in the calling thread, until the thread ends.
    fn refuse_pwait2(errno: i32) {
        // Bits of <linux/filter.h>: load a word of the seccomp data, compare it, return.
        const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
        let statement = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut filter = [
            statement(LOAD, 0, 0, 0), // the number of the call is at offset 0
            statement(JUMP_IF_EQUAL, 0, 1, libc::SYS_epoll_pwait2 as u32),
            statement(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
            statement(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: both calls affect only this thread; the program lives during the call, which copies it.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(
                libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const program
                ),
                0,
                "{}",
                std::io::Error::last_os_error()
            );
        }
    }

    #[test]
    fn falls_back_where_the_kernel_refuses_and_remembers_it() {
        for errno in [libc::ENOSYS, libc::EPERM] {
            std::thread::spawn(move || {
                refuse_pwait2(errno);
                let poller = Poller::new().unwrap();
                let mut events = Events::with_capacity(1);
                assert_eq!(poller.wait(&mut events, Some(0)).unwrap(), 0);
                assert!(poller.has_pwait2.load(Ordering::Relaxed), "not asked yet");
                for _ in 0..2 {
                    let start_ns = now_ns();
                    assert_eq!(poller.wait(&mut events, Some(1_200_000)).unwrap(), 0);
                    assert!(now_ns() - start_ns >= 1_200_000);
                    assert!(!poller.has_pwait2.load(Ordering::Relaxed));
                }
            })
            .join()
            .unwrap();
        }
    }

    #[test]
    fn epoll_pwait2_is_used_where_the_kernel_has_it() {
        let poller = Poller::new().unwrap();
        // SAFETY: the call has no valid pointers or descriptors, so it can only fail: with EFAULT or EINVAL if it
        // exists.
        let result = unsafe { libc::syscall(libc::SYS_epoll_pwait2, -1, 0, 0, 0, 0, 0) };
        assert_eq!(result, -1);
        let exists = !is_missing(nix::errno::Errno::last_raw());
        poller.wait(&mut Events::with_capacity(1), Some(1)).unwrap();
        assert_eq!(poller.has_pwait2.load(Ordering::Relaxed), exists);
    }

    proptest! {
        /// Each step but the last ends before the deadline, even if the kernel oversleeps by a two-hundredth. No step
        /// has a length of 0.
        #[test]
        fn a_step_leaves_room_for_oversleeping(remaining_ns in prop_oneof![1..ONE_STEP_NS * 3, 1_u64..]) {
            let step_ns = step_of(remaining_ns);
            prop_assert!(0 < step_ns && step_ns <= remaining_ns);
            if remaining_ns > ONE_STEP_NS {
                prop_assert!(u128::from(step_ns) * 201 / 200 < u128::from(remaining_ns));
            } else {
                prop_assert_eq!(step_ns, remaining_ns);
            }
        }

        #[test]
        fn milliseconds_are_rounded_up(timeout_ns in 1_u64..u64::from(i32::MAX as u32) * NS_PER_MS) {
            let ms = u64::from(ms_rounded_up(timeout_ns).unsigned_abs());
            prop_assert!(ms * NS_PER_MS >= timeout_ns);
            prop_assert!((ms - 1) * NS_PER_MS < timeout_ns);
        }

        #[test]
        fn a_long_timeout_is_cut_to_the_longest(timeout_ns in (i32::MAX as u64 * NS_PER_MS)..) {
            prop_assert_eq!(ms_rounded_up(timeout_ns), i32::MAX);
        }
    }
}
