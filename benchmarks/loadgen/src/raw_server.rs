//! An echo server on bare epoll: level-triggered, one recv and one send per readiness. What any event loop on this
//! machine can at best reach.
//!
//! A connection whose reply did not fit keeps the rest and is not read until it is sent, so nothing is lost and nothing
//! grows. One thread; ends when stdin is closed.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

const BUFFER_LEN: usize = 256 * 1024;
const STDIN: RawFd = 0;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

#[allow(clippy::cast_sign_loss)] // a descriptor in use is not negative
fn control(epoll: RawFd, operation: libc::c_int, fd: RawFd, interest: libc::c_int) -> io::Result<()> {
    let mut event = libc::epoll_event {
        events: interest as u32,
        u64: fd as u64,
    };
    // SAFETY: `event` outlives the call; a descriptor that is not open is answered by an error.
    check(unsafe { libc::epoll_ctl(epoll, operation, fd, &raw mut event) }).map(drop)
}

fn send(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: pointer and length are those of a live slice.
    let sent = unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    usize::try_from(sent)
        .map_err(|_| io::Error::last_os_error())
        .or_else(|error| {
            if error.kind() == io::ErrorKind::WouldBlock {
                Ok(0)
            } else {
                Err(error)
            }
        })
}

struct Server {
    epoll: OwnedFd,
    listener: TcpListener,
    buffer: Vec<u8>,
    /// Open connections and what is still to be sent on them.
    unsent: HashMap<RawFd, (OwnedFd, Vec<u8>)>,
}

impl Server {
    fn accept(&mut self) -> io::Result<()> {
        loop {
            // SAFETY: null is allowed for an address that nobody wants.
            let accepted = check(unsafe {
                libc::accept4(
                    self.listener.as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
                )
            });
            match accepted {
                Ok(fd) => {
                    // SAFETY: accept4 just made this descriptor, and nothing else owns it.
                    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
                    socket2::SockRef::from(&owned).set_tcp_nodelay(true)?;
                    control(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN)?;
                    self.unsent.insert(fd, (owned, Vec::new()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// One recv and one send. An error closes the connection, as the end of the stream does.
    fn echo(&mut self, fd: RawFd) -> io::Result<bool> {
        // SAFETY: the buffer is live and as long as it says.
        let received = unsafe { libc::recv(fd, self.buffer.as_mut_ptr().cast(), self.buffer.len(), 0) };
        let Ok(received) = usize::try_from(received) else {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock {
                Ok(true)
            } else {
                Err(error)
            };
        };
        if received == 0 {
            return Ok(false);
        }
        let sent = send(fd, &self.buffer[..received])?;
        if sent < received {
            if let Some((_, unsent)) = self.unsent.get_mut(&fd) {
                unsent.extend_from_slice(&self.buffer[sent..received]);
                control(self.epoll.as_raw_fd(), libc::EPOLL_CTL_MOD, fd, libc::EPOLLOUT)?;
            }
        }
        Ok(true)
    }

    fn flush(&mut self, fd: RawFd) -> io::Result<bool> {
        if let Some((_, unsent)) = self.unsent.get_mut(&fd) {
            let sent = send(fd, unsent)?;
            unsent.drain(..sent);
            if unsent.is_empty() {
                *unsent = Vec::new();
                control(self.epoll.as_raw_fd(), libc::EPOLL_CTL_MOD, fd, libc::EPOLLIN)?;
            }
        }
        Ok(true)
    }
}

/// Serves until stdin is closed; prints the port first.
///
/// # Errors
/// When the listening socket or the poller fails; a failing connection is closed instead.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)] // fds and event counts
pub(crate) fn run(address: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)?;
    socket2::SockRef::from(&listener).listen(4096)?;
    listener.set_nonblocking(true)?;
    // SAFETY: the descriptor is checked before it is owned, and nothing else owns it.
    let epoll = unsafe { OwnedFd::from_raw_fd(check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) };
    control(
        epoll.as_raw_fd(),
        libc::EPOLL_CTL_ADD,
        listener.as_raw_fd(),
        libc::EPOLLIN,
    )?;
    match control(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, STDIN, libc::EPOLLIN) {
        Err(error) if error.raw_os_error() != Some(libc::EPERM) => return Err(error.into()),
        _ => {} // EPERM: stdin is a file or /dev/null, which has no end to wait for
    }
    let mut stdout = io::stdout();
    writeln!(
        stdout,
        "{}",
        serde_json::json!({"port": listener.local_addr()?.port()})
    )?;
    stdout.flush()?;

    let mut server = Server {
        epoll,
        listener,
        buffer: vec![0; BUFFER_LEN],
        unsent: HashMap::new(),
    };
    let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; 1024];
    loop {
        // SAFETY: the events are live and as many as the length says.
        let count = unsafe {
            libc::epoll_wait(
                server.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as libc::c_int,
                -1,
            )
        };
        let count = match check(count) {
            Ok(count) => count as usize,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        for event in &events[..count] {
            let (fd, readiness) = (event.u64 as RawFd, event.events as libc::c_int);
            if fd == STDIN {
                return Ok(());
            }
            if fd == server.listener.as_raw_fd() {
                server.accept()?;
                continue;
            }
            let outcome = if readiness & libc::EPOLLOUT != 0 {
                server.flush(fd)
            } else {
                server.echo(fd)
            };
            if !matches!(outcome, Ok(true)) {
                server.unsent.remove(&fd); // closes it, which also takes it out of the poller
            }
        }
    }
}
