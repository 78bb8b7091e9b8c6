//! Tests of queues and of calls that do not block. Most tests of queues run with io_uring (where the kernel has it) and
//! with threads.

use std::ffi::{CString, c_int};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::ring::Ring;
use super::{Call, Entry, MAX_IN_THREADS, MAX_REPETITIONS, MAX_STALE, Queue, State, open_now, read_now};

/// The owner of the memory of a call in these tests.
type Memory = Vec<u8>;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("grapeshot-aio-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn queues() -> Vec<Queue<Memory>> {
    [false, true]
        .map(|only_threads| Queue::new(only_threads).unwrap())
        .into()
}

fn c_path(path: &Path) -> Memory {
    CString::new(path.as_os_str().as_bytes())
        .unwrap()
        .into_bytes_with_nul()
}

fn start(queue: &mut Queue<Memory>, mut memory: Memory, call: impl Fn(*mut u8, usize) -> Call) -> u64 {
    let call = call(memory.as_mut_ptr(), memory.len());
    // SAFETY: the vector owns the memory; moving it does not move the memory.
    unsafe { queue.start(call, memory) }
        .map_err(|(error, _)| error)
        .unwrap()
}

fn open(queue: &mut Queue<Memory>, path: &Path, flags: c_int) -> u64 {
    start(queue, c_path(path), |path, _| Call::Open {
        path: path.cast(),
        flags,
        mode: 0o600,
    })
}

fn read(queue: &mut Queue<Memory>, fd: RawFd, len: usize, offset: i64) -> u64 {
    start(queue, vec![0; len], |buffer, len| Call::Read {
        fd,
        buffer,
        len,
        offset,
    })
}

fn write(queue: &mut Queue<Memory>, fd: RawFd, data: &[u8], offset: i64) -> u64 {
    start(queue, data.to_vec(), |data, len| Call::Write {
        fd,
        data,
        len,
        offset,
    })
}

/// Waits until `count` calls have ended, and returns their results in the order of their tickets.
fn ends(queue: &mut Queue<Memory>, count: usize) -> Vec<(u64, io::Result<usize>, Memory)> {
    let limit = Instant::now() + Duration::from_secs(60);
    let mut ended = Vec::new();
    while ended.len() < count {
        assert!(Instant::now() < limit, "{} of {count} have ended", ended.len());
        ended.extend(
            queue
                .take()
                .into_iter()
                .map(|ended| (ended.ticket, ended.outcome, ended.memory)),
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    ended.sort_by_key(|(ticket, ..)| *ticket);
    ended
}

fn end(queue: &mut Queue<Memory>) -> (io::Result<usize>, Memory) {
    let (_, outcome, memory) = ends(queue, 1).remove(0);
    (outcome, memory)
}

#[test]
fn a_file_is_written_and_read() {
    let folder = Folder::new("whole");
    for mut queue in queues() {
        open(
            &mut queue,
            &folder.file("a"),
            libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC,
        );
        let fd = end(&mut queue).0.unwrap() as RawFd;
        // SAFETY: F_GETFD takes no argument.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_GETFD) }, libc::FD_CLOEXEC);
        write(&mut queue, fd, b"0123456789", 0);
        assert_eq!(end(&mut queue).0.unwrap(), 10);
        start(&mut queue, Vec::new(), |_, _| Call::Sync { fd, only_data: false });
        start(&mut queue, Vec::new(), |_, _| Call::Sync { fd, only_data: true });
        for (_, outcome, _) in ends(&mut queue, 2) {
            assert_eq!(outcome.unwrap(), 0);
        }
        start(&mut queue, Vec::new(), |_, _| Call::Truncate { fd, len: 8 });
        assert_eq!(end(&mut queue).0.unwrap(), 0);
        read(&mut queue, fd, 100, 3);
        let (outcome, data) = end(&mut queue);
        assert_eq!((outcome.unwrap(), &data[..5]), (5, &b"34567"[..]));
        for expected in [b"0123", b"4567"] {
            read(&mut queue, fd, 4, -1);
            assert_eq!(end(&mut queue).1, expected, "the file's own position moves");
        }
        read(&mut queue, fd, 4, 8);
        assert_eq!(end(&mut queue).0.unwrap(), 0);
        start(&mut queue, Vec::new(), |_, _| Call::Close { fd });
        assert_eq!(end(&mut queue).0.unwrap(), 0);
    }
}

#[test]
fn errors_keep_their_numbers() {
    let folder = Folder::new("errors");
    for mut queue in queues() {
        open(&mut queue, &folder.file("none"), libc::O_RDONLY);
        assert_eq!(end(&mut queue).0.unwrap_err().raw_os_error(), Some(libc::ENOENT));
        read(&mut queue, -1, 4, 0);
        assert_eq!(end(&mut queue).0.unwrap_err().raw_os_error(), Some(libc::EBADF));
        open(&mut queue, Path::new("/dev/full"), libc::O_WRONLY);
        let fd = end(&mut queue).0.unwrap() as RawFd;
        write(&mut queue, fd, b"x", -1);
        assert_eq!(end(&mut queue).0.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        super::calls::close(fd);
    }
}

#[test]
fn more_calls_than_can_be_under_way() {
    let folder = Folder::new("many");
    std::fs::write(folder.file("a"), b"content").unwrap();
    for mut queue in queues() {
        let fd = open_now(
            &CString::from_vec_with_nul(c_path(&folder.file("a"))).unwrap(),
            libc::O_RDONLY,
        )
        .unwrap()
        .unwrap();
        let tickets: Vec<u64> = (0..1000).map(|_| read(&mut queue, fd, 7, 0)).collect();
        let ended = ends(&mut queue, 1000);
        assert_eq!(
            ended.iter().map(|(ticket, ..)| *ticket).collect::<Vec<_>>(),
            tickets
        );
        assert!(
            ended
                .iter()
                .all(|(_, outcome, data)| matches!(outcome, Ok(7)) && data == b"content")
        );
        super::calls::close(fd);
    }
}

fn make_fifo(path: &Path) -> CString {
    let name = CString::from_vec_with_nul(c_path(path)).unwrap();
    // SAFETY: the path is a live string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    name
}

/// Opens both ends of a FIFO. Calls that wait to open the FIFO then end.
fn open_both_ends(fifo: &CString) -> RawFd {
    // SAFETY: the path is a live string.
    unsafe { libc::open(fifo.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) }
}

/// How many calls of the queue the threads have begun.
fn begun_in_threads(queue: &Queue<Memory>) -> usize {
    let has_begun = |entry: &&Entry<Memory>| {
        matches!(&entry.state, State::InThread(claim)
            if claim.0.load(std::sync::atomic::Ordering::Acquire))
    };
    queue.calls.values().filter(has_begun).count()
}

#[test]
fn cancelled_calls_keep_their_memory_until_they_end() {
    let folder = Folder::new("cancelled");
    let fifo = folder.file("fifo");
    let name = make_fifo(&fifo);
    for mut queue in queues() {
        // Opening one end of a FIFO waits until the other end is opened.
        let tickets: Vec<u64> = (0..200)
            .map(|_| open(&mut queue, &fifo, libc::O_RDONLY))
            .collect();
        let limit = Instant::now() + Duration::from_secs(60);
        while !queue.has_ring() && begun_in_threads(&queue) == 0 {
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(1));
        }
        let returned: Vec<Memory> = tickets
            .iter()
            .filter_map(|ticket| queue.cancel(*ticket))
            .collect();
        let under_way = 200 - returned.len();
        assert!(under_way > 0);
        if queue.has_ring() {
            assert_eq!(under_way, Ring::MAX_CALLS);
            ends_are_cancelled(&mut queue, under_way);
        } else {
            assert!(under_way <= MAX_IN_THREADS);
            assert!(queue.take().is_empty(), "threads cannot be interrupted");
            let writer = open_both_ends(&name);
            ends_are_cancelled(&mut queue, under_way);
            super::calls::close(writer);
        }
        assert_eq!(queue.cancel(tickets[0]), None);
        assert!(queue.is_empty());
    }
}

/// Makes all threads of the pool wait, so that no later call begins until [`open_both_ends`] has opened the FIFO.
fn occupy_all_threads(fifo: &Path) -> Queue<Memory> {
    let mut queue = Queue::new(true).unwrap();
    for _ in 0..MAX_IN_THREADS {
        open(&mut queue, fifo, libc::O_RDONLY);
    }
    queue
}

#[test]
fn a_call_that_was_cancelled_in_the_pool_is_never_made() {
    let folder = Folder::new("late");
    let name = make_fifo(&folder.file("fifo"));
    let (precious, target) = (folder.file("precious"), folder.file("target"));
    std::fs::write(&precious, b"content").unwrap();
    let file = std::fs::File::create(&target).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);

    let mut busy = occupy_all_threads(&folder.file("fifo"));
    let [mut cancelled, mut stopped, mut dropped] = [(); 3].map(|()| Queue::<Memory>::new(true).unwrap());
    let ticket = open(&mut cancelled, &precious, libc::O_WRONLY | libc::O_TRUNC);
    assert_eq!(cancelled.cancel(ticket), Some(c_path(&precious)));
    assert!(cancelled.is_empty());
    write(&mut stopped, fd, b"late", 0);
    assert_eq!(stopped.stop(Duration::ZERO), [b"late"]);
    assert!(stopped.is_empty());
    write(&mut dropped, fd, b"late", 0);
    // SAFETY: F_DUPFD_CLOEXEC takes a number.
    let closed = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    start(&mut dropped, Vec::new(), |_, _| Call::Close { fd: closed });
    drop(dropped);

    let writer = open_both_ends(&name);
    for (_, outcome, _) in ends(&mut busy, MAX_IN_THREADS) {
        super::calls::close(outcome.unwrap() as RawFd);
    }
    super::calls::close(writer);
    // The queue takes calls again after the cancelled one has left the pool.
    start(&mut cancelled, Vec::new(), |_, _| Call::Sync {
        fd,
        only_data: false,
    });
    assert_eq!(end(&mut cancelled).0.unwrap(), 0);
    let limit = Instant::now() + Duration::from_secs(60);
    while cancelled.in_threads > 0 {
        assert!(Instant::now() < limit);
        assert!(cancelled.take().is_empty());
    }
    let link = format!("/proc/self/fd/{closed}");
    while std::fs::read_link(&link).is_ok_and(|file| file == target) {
        assert!(
            Instant::now() < limit,
            "a close is made after its queue was dropped"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(std::fs::read(&precious).unwrap(), b"content");
    assert_eq!(std::fs::read(&target).unwrap(), b"");
}

#[test]
fn a_cancelled_call_reports_what_it_has_done() {
    let folder = Folder::new("nevertheless");
    std::fs::write(folder.file("a"), b"content").unwrap();
    for mut queue in queues() {
        let mut outcomes = Vec::new();
        let (file, path) = (std::fs::File::open(folder.file("a")).unwrap(), folder.file("a"));
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        for call in ["read", "open", "error"] {
            let ticket = match call {
                "read" => read(&mut queue, fd, 7, 0),
                "open" => open(&mut queue, &path, libc::O_RDONLY),
                _ => read(&mut queue, -1, 7, 0),
            };
            // Wait until the call has ended, but do not call `take` yet.
            super::wait_ready(queue.fd(), false, Some(super::now_ns() + 60_000_000_000)).unwrap();
            assert_eq!(queue.cancel(ticket), None);
            let (outcome, memory) = end(&mut queue);
            outcomes.push(outcome.map_err(|error| error.raw_os_error()));
            assert!(call != "read" || memory == b"content");
        }
        assert_eq!(
            outcomes,
            [Ok(7), Err(Some(libc::ECANCELED)), Err(Some(libc::EBADF))]
        );
    }
}

#[test]
fn tickets_of_cancelled_calls_do_not_pile_up() {
    let folder = Folder::new("stale");
    let fifo = folder.file("fifo");
    let name = make_fifo(&fifo);
    for mut queue in queues() {
        let first = open(&mut queue, &fifo, libc::O_RDONLY);
        for _ in 0..100 {
            let tickets: Vec<u64> = (0..1000)
                .map(|_| open(&mut queue, &fifo, libc::O_RDONLY))
                .collect();
            for ticket in tickets.into_iter().rev() {
                queue.cancel(ticket);
            }
            let waiting = queue.waiting_for_ring.len() + queue.waiting_for_threads.len();
            assert!(waiting <= 2 * queue.len() + MAX_STALE);
            assert!(queue.in_threads <= MAX_IN_THREADS);
        }
        queue.cancel(first);
        let writer = open_both_ends(&name);
        let count = queue.len();
        ends_are_cancelled(&mut queue, count);
        super::calls::close(writer);
    }
}

#[test]
fn a_call_that_waits_for_a_thread_does_not_hold_back_the_ring() {
    let folder = Folder::new("two");
    std::fs::write(folder.file("a"), b"content").unwrap();
    let file = std::fs::File::options()
        .write(true)
        .read(true)
        .open(folder.file("a"))
        .unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let mut queue = Queue::new(false).unwrap();
    let Some(ring) = &mut queue.ring else {
        return;
    };
    ring.forget_truncate();
    (queue.in_ring, queue.in_threads) = (Ring::MAX_CALLS, MAX_IN_THREADS);
    let truncate = start(&mut queue, Vec::new(), |_, _| Call::Truncate { fd, len: 3 });
    let ticket = read(&mut queue, fd, 7, 0);
    assert!(queue.take().is_empty());
    queue.in_ring = 0;
    let (first, outcome, _) = ends(&mut queue, 1).remove(0);
    assert_eq!((first, outcome.unwrap()), (ticket, 7));
    queue.in_threads = 0;
    assert_eq!(ends(&mut queue, 1)[0].0, truncate);
    assert_eq!(std::fs::read(folder.file("a")).unwrap(), b"con");
}

#[test]
fn an_interrupted_call_begins_again_a_limited_number_of_times() {
    for mut queue in queues() {
        for errno in [libc::EINTR, libc::ECANCELED] {
            let entry = Entry {
                call: Call::Sync {
                    fd: -1,
                    only_data: false,
                },
                memory: Vec::new(),
                state: State::InRing,
                repetitions: 0,
            };
            queue.calls.insert(1, entry);
            let mut ended = Vec::new();
            for _ in 0..MAX_REPETITIONS {
                queue.end(1, Err(io::Error::from_raw_os_error(errno)), &mut ended);
                assert!(ended.is_empty() && queue.len() == 1);
            }
            queue.end(1, Err(io::Error::from_raw_os_error(errno)), &mut ended);
            assert_eq!(ended[0].outcome.as_ref().unwrap_err().raw_os_error(), Some(errno));
            assert!(queue.is_empty());
        }
    }
}

#[test]
fn a_queue_of_another_process_does_nothing() {
    let folder = Folder::new("foreign");
    let fifo = folder.file("fifo");
    let name = make_fifo(&fifo);
    for mut queue in queues() {
        let ticket = open(&mut queue, &fifo, libc::O_RDONLY);
        queue.process += 1;
        // SAFETY: the call refers to no memory.
        let refused = unsafe { queue.start(Call::Close { fd: -1 }, b"memory".to_vec()) };
        let (error, memory) = refused.unwrap_err();
        assert_eq!(
            (error.raw_os_error(), &memory[..]),
            (Some(libc::EBADF), &b"memory"[..])
        );
        let writer = open_both_ends(&name);
        super::wait_ready(queue.fd(), false, Some(super::now_ns() + 60_000_000_000)).unwrap();
        assert_eq!(queue.cancel(ticket), None);
        assert!(queue.take().is_empty() && queue.stop(Duration::MAX).is_empty());
        queue.process -= 1;
        super::calls::close(end(&mut queue).0.unwrap() as RawFd);
        super::calls::close(writer);
    }
}

#[test]
fn each_stop_continues_where_the_previous_one_stopped() {
    let folder = Folder::new("again");
    let fifo = folder.file("fifo");
    let name = make_fifo(&fifo);
    for mut queue in queues() {
        for _ in 0..200 {
            open(&mut queue, &fifo, libc::O_RDONLY);
        }
        // SAFETY: the path is a live string.
        let fd = unsafe { libc::open(name.as_ptr(), libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC) };
        start(&mut queue, Vec::new(), |_, _| Call::Close { fd });
        let mut returned = queue.stop(Duration::ZERO).len();
        returned += queue.stop(Duration::from_millis(1)).len();
        let writer = open_both_ends(&name);
        let limit = Instant::now() + Duration::from_secs(60);
        while !queue.is_empty() {
            assert!(Instant::now() < limit);
            returned += queue.stop(Duration::from_millis(1)).len();
        }
        assert_eq!(returned, 201);
        super::calls::close(writer);
    }
}

fn ends_are_cancelled(queue: &mut Queue<Memory>, count: usize) {
    for (_, outcome, memory) in ends(queue, count) {
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
        assert!(memory.ends_with(b"fifo\0"));
    }
}

#[test]
fn stop_waits_for_calls_and_returns_their_memory() {
    let folder = Folder::new("stopped");
    std::fs::write(folder.file("a"), vec![1; 1 << 20]).unwrap();
    for mut queue in queues() {
        open(&mut queue, &folder.file("a"), libc::O_RDONLY);
        let fd = end(&mut queue).0.unwrap() as RawFd;
        for _ in 0..300 {
            read(&mut queue, fd, 1 << 16, 0);
        }
        start(&mut queue, Vec::new(), |_, _| Call::Close { fd });
        assert_eq!(queue.stop(Duration::from_secs(60)).len(), 301);
        assert!(queue.is_empty() && queue.stop(Duration::ZERO).is_empty());
        let opened = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
        assert_ne!(opened, Some(folder.file("a")), "a close is not cancelled");
    }
}

#[test]
fn calls_that_do_not_block() {
    let folder = Folder::new("now");
    std::fs::write(folder.file("a"), b"content").unwrap();
    let path = CString::from_vec_with_nul(c_path(&folder.file("a"))).unwrap();
    assert_eq!(open_now(&path, libc::O_RDWR | libc::O_CREAT).unwrap(), None);
    let Some(fd) = open_now(&path, libc::O_RDONLY).unwrap() else {
        return; // an old kernel, or another system
    };
    let mut buffer = [0; 16];
    // SAFETY: the buffer is live and has the given length.
    let count = unsafe { read_now(fd, buffer.as_mut_ptr(), buffer.len(), 3) }.unwrap();
    assert!(matches!(count, None | Some(4)));
    super::calls::close(fd);
    // SAFETY: as above.
    let error = unsafe { read_now(-1, buffer.as_mut_ptr(), buffer.len(), 3) }.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    let none = CString::from_vec_with_nul(c_path(&folder.file("none"))).unwrap();
    if let Err(error) = open_now(&none, libc::O_RDONLY) {
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}

#[test]
fn read_now_at_the_position_of_the_file_moves_it() {
    let folder = Folder::new("position");
    std::fs::write(folder.file("a"), b"content").unwrap();
    let file = std::fs::File::open(folder.file("a")).unwrap();
    let mut buffer = [0; 4];
    for expected in [&b"cont"[..], b"ent", b""] {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        // SAFETY: the buffer is live and has the given length.
        let Some(count) = unsafe { read_now(fd, buffer.as_mut_ptr(), buffer.len(), -1) }.unwrap() else {
            return; // an old kernel, another system, or data that is not in memory
        };
        assert_eq!(&buffer[..count], expected);
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
#[test]
fn open_now_does_not_wait_for_a_lease() {
    let folder = Folder::new("lease");
    std::fs::write(folder.file("a"), b"content").unwrap();
    let path = CString::from_vec_with_nul(c_path(&folder.file("a"))).unwrap();
    for asked in [0, libc::O_NONBLOCK] {
        let Some(fd) = open_now(&path, libc::O_RDONLY | asked).unwrap() else {
            return; // an old kernel
        };
        // SAFETY: F_GETFL takes no argument.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        assert_eq!(flags & libc::O_NONBLOCK, asked);
        super::calls::close(fd);
    }
    let file = std::fs::File::options()
        .write(true)
        .open(folder.file("a"))
        .unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: these calls take numbers. When the lease is broken, the kernel sends SIGURG, which is ignored by default.
    unsafe {
        // Linux: `include/uapi/asm-generic/fcntl.h`.
        const F_SETSIG: c_int = 10;
        libc::fcntl(fd, F_SETSIG, libc::SIGURG);
        if libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) != 0 {
            return; // a file system without leases
        }
    }
    let begun = Instant::now();
    assert_eq!(open_now(&path, libc::O_RDONLY).unwrap(), None);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "the kernel waits for 45 s"
    );
}
