//! Tests of the poller's contract. Most run with every way of waiting that this system has.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::{Event, Events, Interest, Poller, Readiness, Token};
use crate::sys::clock::now_ns;

/// Far longer than any wait on a loaded machine. After a lost event the test fails instead of hanging.
const CAP_NS: Option<u64> = Some(60_000_000_000);

/// One poller for each way of waiting, with the name of the way.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn pollers() -> [(&'static str, Poller); 2] {
    [
        ("epoll_pwait2", Poller::new().unwrap()),
        ("epoll_wait", Poller::with_millisecond_waits().unwrap()),
    ]
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn pollers() -> [(&'static str, Poller); 1] {
    [("kqueue", Poller::new().unwrap())]
}

fn pair() -> (UnixStream, UnixStream) {
    let (left, right) = UnixStream::pair().unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    (left, right)
}

/// The events that are ready now.
fn look(poller: &Poller) -> Vec<Event> {
    wait(poller, Some(0))
}

fn wait(poller: &Poller, timeout_ns: Option<u64>) -> Vec<Event> {
    let mut events = Events::with_capacity(16);
    let count = poller.wait(&mut events, timeout_ns).unwrap();
    assert_eq!((count, count == 0), (events.len(), events.is_empty()));
    (0..count).map(|index| events.get(index)).collect()
}

fn event(token: u64, readiness: Readiness) -> Event {
    Event {
        token: Token(token),
        readiness,
    }
}

#[test]
fn interests_combine() {
    let both = Interest::READ.with(Interest::WRITE);
    assert_eq!(both, Interest::BOTH);
    assert_eq!(
        (both.has_read(), both.has_write(), both.is_empty()),
        (true, true, false)
    );
    assert_eq!(both.without(Interest::READ), Interest::WRITE);
    assert_eq!(both.without(both), Interest::NONE);
    assert_eq!(Interest::NONE.without(Interest::READ), Interest::NONE);
    assert!(Interest::NONE.is_empty());
    let on_change = Interest::READ.on_change();
    assert_eq!(
        (
            on_change.has_read(),
            on_change.is_on_change(),
            on_change.is_empty()
        ),
        (true, true, false)
    );
    assert_ne!(on_change, Interest::READ);
    assert_eq!(on_change.with(Interest::WRITE), Interest::BOTH.on_change());
    assert!(Interest::NONE.on_change().is_empty());
    assert_eq!(
        (Interest::READ.has_write(), Interest::WRITE.has_read()),
        (false, false)
    );
}

#[test]
fn readiness_combines() {
    for readable in [Readiness::NONE, Readiness::READ] {
        for writable in [Readiness::NONE, Readiness::WRITE] {
            for hangup in [Readiness::NONE, Readiness::HANGUP] {
                let all = readable.with(writable).with(hangup);
                assert_eq!(all.is_readable(), readable == Readiness::READ);
                assert_eq!(all.is_writable(), writable == Readiness::WRITE);
                assert_eq!(all.is_hangup(), hangup == Readiness::HANGUP);
            }
        }
    }
}

#[test]
fn an_fd_is_readable_until_its_data_is_read() {
    for (name, poller) in pollers() {
        let (mut left, mut right) = pair();
        poller
            .add(left.as_raw_fd(), Token(u64::MAX - 7), Interest::READ)
            .unwrap();
        assert_eq!(look(&poller), [], "{name}");
        right.write_all(b"xy").unwrap();
        let expected = [event(u64::MAX - 7, Readiness::READ)];
        assert_eq!(wait(&poller, CAP_NS), expected, "{name}");
        assert_eq!(wait(&poller, None), expected, "{name}");
        assert_eq!(left.read(&mut [0; 1]).unwrap(), 1);
        assert_eq!(
            look(&poller),
            expected,
            "{name}: level-triggered, one byte is left"
        );
        assert_eq!(left.read(&mut [0; 1]).unwrap(), 1);
        assert_eq!(look(&poller), [], "{name}");
    }
}

#[test]
fn reports_writing_while_there_is_space() {
    for (name, poller) in pollers() {
        let (mut left, _right) = pair();
        poller.add(left.as_raw_fd(), Token(1), Interest::WRITE).unwrap();
        assert_eq!(look(&poller), [event(1, Readiness::WRITE)], "{name}");
        while left.write(&[0; 4096]).is_ok() {}
        assert_eq!(look(&poller), [], "{name}");
    }
}

#[test]
fn both_directions_come_together_or_in_two_events() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        right.write_all(b"x").unwrap();
        poller.add(left.as_raw_fd(), Token(1), Interest::BOTH).unwrap();
        let events = look(&poller);
        assert!(events.iter().all(|event| event.token == Token(1)), "{name}");
        let all = events
            .iter()
            .fold(Readiness::NONE, |all, event| all.with(event.readiness));
        assert_eq!(all, Readiness::READ.with(Readiness::WRITE), "{name}");
    }
}

#[test]
fn changes_are_reported_each_time() {
    for (name, poller) in pollers() {
        let (mut left, mut right) = pair();
        let fd = left.as_raw_fd();
        right.write_all(b"x").unwrap();
        poller.add(fd, Token(1), Interest::READ.on_change()).unwrap();
        let readable = [event(1, Readiness::READ)];
        assert_eq!(look(&poller), readable, "{name}: data that was there before");
        for _ in 0..3 {
            assert_eq!(left.read(&mut [0; 8]).unwrap(), 1);
            assert_eq!(look(&poller), [], "{name}");
            right.write_all(b"x").unwrap();
            assert_eq!(wait(&poller, CAP_NS), readable, "{name}");
        }
        poller.modify(fd, Token(1), Interest::BOTH.on_change()).unwrap();
        let all = look(&poller)
            .iter()
            .fold(Readiness::NONE, |all, event| all.with(event.readiness));
        assert_eq!(all, Readiness::READ.with(Readiness::WRITE), "{name}: modified");
    }
}

/// On Linux a closed fd stays watched while a duplicate is open. With `on_change` its events at least do not repeat.
#[cfg(any(target_os = "linux", target_os = "android"))]
#[test]
fn a_change_is_reported_once_even_for_a_closed_fd() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        poller
            .add(left.as_raw_fd(), Token(1), Interest::READ.on_change())
            .unwrap();
        right.write_all(b"x").unwrap();
        assert_eq!(look(&poller), [event(1, Readiness::READ)], "{name}");
        assert_eq!(look(&poller), [], "{name}: nothing has changed");
        let duplicate = left.try_clone().unwrap();
        drop(left);
        right.write_all(b"x").unwrap();
        assert_eq!(
            look(&poller),
            [event(1, Readiness::READ)],
            "{name}: still watched"
        );
        assert_eq!(look(&poller), [], "{name}");
        drop(duplicate);
        assert_eq!(look(&poller), [], "{name}");
    }
}

#[test]
fn modify_replaces_token_and_interest() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        let fd = left.as_raw_fd();
        right.write_all(b"x").unwrap();
        poller.add(fd, Token(1), Interest::READ).unwrap();
        poller.modify(fd, Token(2), Interest::WRITE).unwrap();
        assert_eq!(look(&poller), [event(2, Readiness::WRITE)], "{name}");
        poller.modify(fd, Token(3), Interest::READ).unwrap();
        assert_eq!(look(&poller), [event(3, Readiness::READ)], "{name}");
    }
}

#[test]
fn add_and_modify_stand_in_for_each_other() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        let fd = left.as_raw_fd();
        right.write_all(b"x").unwrap();
        poller.modify(fd, Token(1), Interest::READ).unwrap();
        assert_eq!(look(&poller), [event(1, Readiness::READ)], "{name}");
        poller.add(fd, Token(2), Interest::WRITE).unwrap();
        assert_eq!(look(&poller), [event(2, Readiness::WRITE)], "{name}");
    }
}

#[test]
fn a_removed_fd_has_no_events_and_can_be_removed_again() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        let fd = left.as_raw_fd();
        right.write_all(b"x").unwrap();
        poller.remove(fd).unwrap();
        poller.add(fd, Token(1), Interest::BOTH).unwrap();
        poller.remove(fd).unwrap();
        assert_eq!(look(&poller), [], "{name}");
        poller.remove(fd).unwrap();
        poller.remove(-1).unwrap();
    }
}

#[test]
fn no_interest_means_not_watched() {
    for (name, poller) in pollers() {
        let (left, right) = pair();
        let fd = left.as_raw_fd();
        drop(right);
        poller.add(fd, Token(1), Interest::NONE).unwrap();
        assert_eq!(look(&poller), [], "{name}");
        poller.modify(fd, Token(1), Interest::READ).unwrap();
        assert_eq!(look(&poller).len(), 1, "{name}");
        poller.modify(fd, Token(1), Interest::NONE).unwrap();
        assert_eq!(look(&poller), [], "{name}: a hangup must not be reported");
        poller.modify(fd, Token(2), Interest::READ).unwrap();
        assert_eq!(look(&poller).len(), 1, "{name}");
    }
}

#[test]
fn a_peer_that_is_gone_makes_everything_ready() {
    for (name, poller) in pollers() {
        let (left, right) = pair();
        poller.add(left.as_raw_fd(), Token(1), Interest::WRITE).unwrap();
        drop(right);
        let everything = Readiness::READ.with(Readiness::WRITE).with(Readiness::HANGUP);
        assert_eq!(look(&poller), [event(1, everything)], "{name}");
    }
}

#[test]
fn a_half_closed_peer_is_only_readable() {
    for (name, poller) in pollers() {
        let (left, right) = pair();
        poller.add(left.as_raw_fd(), Token(1), Interest::READ).unwrap();
        right.shutdown(std::net::Shutdown::Write).unwrap();
        let events = look(&poller);
        let found: Vec<_> = events
            .iter()
            .map(|Event { readiness, .. }| {
                (
                    readiness.is_readable(),
                    readiness.is_writable(),
                    readiness.is_hangup(),
                )
            })
            .collect();
        assert_eq!(found, [(true, false, false)], "{name}");
    }
}

#[test]
fn an_invalid_fd_is_refused() {
    for (name, poller) in pollers() {
        let error = poller.add(-1, Token(1), Interest::READ).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF), "{name}");
        let error = poller.modify(-1, Token(1), Interest::READ).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF), "{name}");
    }
}

#[test]
fn events_that_do_not_fit_come_with_the_next_wait() {
    for (name, poller) in pollers() {
        let mut pairs: Vec<_> = (0..5).map(|_| pair()).collect();
        for (index, (left, right)) in pairs.iter_mut().enumerate() {
            right.write_all(b"x").unwrap();
            poller
                .add(left.as_raw_fd(), Token(index as u64), Interest::READ)
                .unwrap();
        }
        let mut seen = [false; 5];
        // A capacity of 0 means one.
        let mut events = Events::with_capacity(0);
        for _ in 0..5 {
            assert_eq!(poller.wait(&mut events, CAP_NS).unwrap(), 1, "{name}");
            let index = usize::try_from(events.get(0).token.0).unwrap();
            assert!(
                !std::mem::replace(&mut seen[index], true),
                "{name}: {index} was read already"
            );
            assert_eq!(pairs[index].0.read(&mut [0; 8]).unwrap(), 1);
        }
        assert_eq!(poller.wait(&mut events, Some(0)).unwrap(), 0, "{name}");
    }
}

#[test]
#[should_panic(expected = "out of bounds")]
fn events_of_an_earlier_wait_are_gone() {
    let poller = Poller::new().unwrap();
    let (left, mut right) = pair();
    right.write_all(b"x").unwrap();
    poller.add(left.as_raw_fd(), Token(1), Interest::READ).unwrap();
    let mut events = Events::with_capacity(4);
    assert_eq!(poller.wait(&mut events, CAP_NS).unwrap(), 1);
    poller.remove(left.as_raw_fd()).unwrap();
    assert_eq!(poller.wait(&mut events, Some(0)).unwrap(), 0);
    let _ = events.get(0);
}

/// The test checks only a lower bound, because an upper bound would depend on the machine.
#[test]
fn a_wait_is_never_too_short() {
    for (name, poller) in pollers() {
        for timeout_ns in [1, 999, 250_000, 999_999, 1_000_001, 3_141_592, 60_000_001] {
            let start_ns = now_ns();
            assert_eq!(wait(&poller, Some(timeout_ns)), [], "{name}");
            let waited_ns = now_ns() - start_ns;
            assert!(waited_ns >= timeout_ns, "{name}: {waited_ns} < {timeout_ns}");
        }
    }
}

#[test]
fn a_timeout_counts_from_its_beginning() {
    for (name, poller) in pollers() {
        // The timeout is longer than one step of epoll (`ONE_STEP_NS`), and most of it has passed already.
        let (began_ns, timeout_ns) = (now_ns() - 70_000_000, 80_000_000);
        let mut events = Events::with_capacity(1);
        let count = poller
            .wait_since(&mut events, Some(timeout_ns), began_ns)
            .unwrap();
        assert_eq!(count, 0, "{name}");
        assert!(now_ns() - began_ns >= timeout_ns, "{name}");
    }
}

#[test]
fn a_timeout_of_centuries_is_accepted() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        right.write_all(b"x").unwrap();
        poller.add(left.as_raw_fd(), Token(1), Interest::READ).unwrap();
        assert_eq!(wait(&poller, Some(u64::MAX)).len(), 1, "{name}");
    }
}

#[test]
fn an_event_ends_a_wait_that_has_begun() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        poller.add(left.as_raw_fd(), Token(1), Interest::READ).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                right.write_all(b"x").unwrap();
                // This read keeps the stream open until the waiting thread has seen the byte.
                right.set_nonblocking(false).unwrap();
                assert_eq!(right.read(&mut [0; 1]).unwrap(), 1);
            });
            assert_eq!(wait(&poller, CAP_NS), [event(1, Readiness::READ)], "{name}");
            (&left).write_all(b"y").unwrap();
        });
    }
}

#[test]
fn a_closed_fd_is_not_taken_for_the_watched_one() {
    for (name, poller) in pollers() {
        let (left, mut right) = pair();
        let fd = left.as_raw_fd();
        poller.add(fd, Token(1), Interest::READ).unwrap();
        assert!(poller.is_watching(fd, Token(1), Interest::READ), "{name}");
        let duplicate = left.try_clone().unwrap();
        drop(left);
        if Poller::KEEPS_CLOSED {
            // By now another test may have opened a file that got this number. The poller does not watch that file.
            assert!(!poller.is_watching(fd, Token(1), Interest::READ), "{name}");
        }
        right.write_all(b"x").unwrap();
        assert_eq!(look(&poller).is_empty(), !Poller::KEEPS_CLOSED, "{name}");
        drop(duplicate);
        assert!(look(&poller).is_empty(), "{name}");
    }
}

extern "C" fn ignore(_signal: libc::c_int) {}

#[test]
fn a_signal_interrupts_a_wait() {
    // SAFETY: the action is plain data with a handler that does nothing. No other test depends on SIGURG, which is
    // ignored by default.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as libc::sighandler_t;
        assert_eq!(
            libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut()),
            0
        );
    }
    for (name, poller) in pollers() {
        // SAFETY: the call has no arguments.
        let waiting = unsafe { libc::pthread_self() };
        let is_over = AtomicBool::new(false);
        let result = thread::scope(|scope| {
            scope.spawn(|| {
                // The thread repeats the signal, because the first one may arrive before the wait has begun.
                while !is_over.load(Ordering::Acquire) {
                    // SAFETY: the waiting thread cannot leave this scope before this thread ends, so it exists.
                    unsafe { libc::pthread_kill(waiting, libc::SIGURG) };
                    thread::park_timeout(Duration::from_millis(1));
                }
            });
            let result = poller.wait(&mut Events::with_capacity(1), CAP_NS);
            is_over.store(true, Ordering::Release);
            result
        });
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Interrupted, "{name}");
    }
}

#[test]
fn is_closed_on_exec() {
    for (name, poller) in pollers() {
        // SAFETY: the call takes no pointers.
        let flags = unsafe { libc::fcntl(poller.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags, libc::FD_CLOEXEC, "{name}");
    }
}
