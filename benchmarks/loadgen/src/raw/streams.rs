//! The stream server: one recv and one send for each event, over TCP or unix, with or without OpenSSL in between.
//!
//! If a reply does not fit into the socket, the connection keeps the rest and reads nothing until the rest is sent.
//! So no data is lost, and the rest does not grow.

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use super::announce;
use super::epoll::{Epoll, check};
use crate::target::Target;
use crate::tls::{Context, Session, library};
use crate::wire::{BUFFER_LEN, RECORD_LEN};

fn send(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: pointer and length come from a live slice.
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

/// A nonblocking recv: `None` when it would block.
fn receive(fd: RawFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: pointer and length come from a live slice.
    let received = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    match usize::try_from(received) {
        Ok(count) => Ok(Some(count)),
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            error => Err(error),
        },
    }
}

struct Connection {
    /// Closes the descriptor when the connection is dropped.
    _owned: OwnedFd,
    unsent: Vec<u8>,
    session: Option<Session>,
}

struct Server {
    epoll: Epoll,
    listener: OwnedFd,
    is_tcp: bool,
    tls: Option<Context>,
    buffer: Vec<u8>,
    plain: Vec<u8>,
    connections: HashMap<RawFd, Connection>,
}

impl Server {
    fn accept(&mut self) -> anyhow::Result<()> {
        loop {
            // SAFETY: null is allowed when the caller does not want the address.
            let accepted = check(unsafe {
                libc::accept4(
                    self.listener.as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
                )
            });
            let fd = match accepted {
                Ok(fd) => fd,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            // SAFETY: accept4 just returned this descriptor, and nothing else owns it.
            let owned = unsafe { OwnedFd::from_raw_fd(fd) };
            if self.is_tcp {
                socket2::SockRef::from(&owned).set_tcp_nodelay(true)?;
            }
            self.epoll.watch_readable(fd)?;
            let session = self.tls.as_ref().map(Context::session).transpose()?;
            let connection = Connection {
                _owned: owned,
                unsent: Vec::new(),
                session,
            };
            self.connections.insert(fd, connection);
        }
    }

    /// One recv and one send. Returns false at the end of the stream.
    fn echo(&mut self, fd: RawFd) -> io::Result<bool> {
        let Some(received) = receive(fd, &mut self.buffer)? else {
            return Ok(true);
        };
        if received == 0 {
            return Ok(false);
        }
        let sent = send(fd, &self.buffer[..received])?;
        if sent < received
            && let Some(connection) = self.connections.get_mut(&fd)
        {
            connection.unsent.extend_from_slice(&self.buffer[sent..received]);
            self.epoll.choose(fd, true)?;
        }
        Ok(true)
    }

    /// Like `echo`, with a TLS session in between. Returns false at the end of the stream or of the session.
    fn echo_sealed(&mut self, fd: RawFd) -> io::Result<bool> {
        let Some(session) = self
            .connections
            .get_mut(&fd)
            .and_then(|connection| connection.session.as_mut())
        else {
            return Ok(false);
        };
        let Some(received) = receive(fd, &mut self.buffer)? else {
            return Ok(true);
        };
        if received == 0 {
            return Ok(false);
        }
        let length = session.open(&self.buffer[..received], &mut self.plain)?;
        if length > 0 {
            session.seal(&self.plain[..length])?;
        }
        let has_ended = session.has_ended();
        if has_ended {
            session.shut_down();
        }
        if !session.outgoing().is_empty() {
            let sent = send(fd, session.outgoing())?;
            session.take_outgoing(sent);
            if !session.outgoing().is_empty() {
                self.epoll.choose(fd, true)?;
            }
        }
        Ok(!has_ended)
    }

    fn flush(&mut self, fd: RawFd) -> io::Result<bool> {
        let Some(connection) = self.connections.get_mut(&fd) else {
            return Ok(false);
        };
        let is_sent = if let Some(session) = &mut connection.session {
            let sent = send(fd, session.outgoing())?;
            session.take_outgoing(sent);
            session.outgoing().is_empty()
        } else {
            let sent = send(fd, &connection.unsent)?;
            connection.unsent.drain(..sent);
            connection.unsent.is_empty()
        };
        if is_sent {
            connection.unsent = Vec::new();
            self.epoll.choose(fd, false)?;
        }
        Ok(true)
    }
}

/// Opens a listening socket and returns it with its actual address.
fn listen(address: &Target) -> anyhow::Result<(OwnedFd, Target)> {
    let (owned, address): (OwnedFd, Target) = match address {
        Target::Inet(address) => {
            let listener = TcpListener::bind(address)?;
            let address = listener.local_addr()?;
            (listener.into(), Target::Inet(address))
        }
        Target::Unix(path) => (UnixListener::bind(path)?.into(), address.clone()),
    };
    let socket = socket2::SockRef::from(&owned);
    socket.listen(4096)?;
    socket.set_nonblocking(true)?;
    Ok((owned, address))
}

/// Prints the address, then serves until stdin is closed.
///
/// # Errors
/// If the listening socket or the poller fails. A connection that fails after it was set up is closed instead.
pub(super) fn run(address: &Target, tls: Option<Context>) -> anyhow::Result<()> {
    let (listener, address) = listen(address)?;
    let epoll = Epoll::new()?;
    epoll.watch_readable(listener.as_raw_fd())?;
    let openssl = match &tls {
        Some(_) => Some(library()?.version()),
        None => None,
    };
    announce(&address, openssl.as_deref())?;

    let mut server = Server {
        epoll,
        listener,
        is_tcp: matches!(address, Target::Inet(_)),
        tls,
        buffer: vec![0; BUFFER_LEN],
        plain: vec![0; BUFFER_LEN + RECORD_LEN],
        connections: HashMap::new(),
    };
    let mut ready = Vec::new();
    while server.epoll.wait(&mut ready)? {
        for event in &ready {
            if event.fd == server.listener.as_raw_fd() {
                server.accept()?;
                continue;
            }
            let outcome = if event.is_writable {
                server.flush(event.fd)
            } else if server.tls.is_some() {
                server.echo_sealed(event.fd)
            } else {
                server.echo(event.fd)
            };
            if !matches!(outcome, Ok(true)) {
                server.connections.remove(&event.fd); // closing it also removes it from the poller
            }
        }
    }
    Ok(())
}
