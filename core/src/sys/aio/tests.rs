//! Each test runs with io_uring (where the kernel has it) and with threads.

use std::ffi::{CString, c_int};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Call, MAX_IN_THREADS, Queue, open_now, read_now};

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

/// Waits for `count` ends, and returns them by ticket.
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

#[test]
fn cancelled_calls_keep_their_memory_until_they_end() {
    let folder = Folder::new("cancelled");
    let fifo = folder.file("fifo");
    let name = CString::from_vec_with_nul(c_path(&fifo)).unwrap();
    // SAFETY: the path is a live string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    for mut queue in queues() {
        // Opening a FIFO waits until the other end is opened, too.
        let tickets: Vec<u64> = (0..200)
            .map(|_| open(&mut queue, &fifo, libc::O_RDONLY))
            .collect();
        let returned: Vec<Memory> = tickets
            .iter()
            .filter_map(|ticket| queue.cancel(*ticket))
            .collect();
        let under_way = 200 - returned.len();
        assert!(under_way >= MAX_IN_THREADS, "{under_way} calls have begun");
        if queue.has_ring() {
            ends_are_cancelled(&mut queue, under_way);
        } else {
            assert!(queue.take().is_empty(), "threads cannot be interrupted");
            // SAFETY: the path is a live string, and the descriptor is new.
            let writer = unsafe { libc::open(name.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
            ends_are_cancelled(&mut queue, under_way);
            super::calls::close(writer);
        }
        assert_eq!(queue.cancel(tickets[0]), None);
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
