//! A client's TLS session on a socket, with the interface (`Wire`) that `engine` expects of a stream. The socket is
//! nonblocking, except during `establish`.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::rc::Rc;

use mio::event::Source;
use mio::{Interest, Registry, Token};

use super::session::{Context, Session, Ticket};
use crate::wire::{RECORD_LEN, Wire};

/// A buffer for ciphertext, shared by all connections of the thread.
pub(crate) type Scratch = Rc<RefCell<Vec<u8>>>;

pub(crate) struct TlsStream<S> {
    socket: S,
    session: Session,
    scratch: Scratch,
    /// How many bytes of plaintext are encrypted before any are sent: one record, or all of a write.
    sealed_at_once: usize,
    /// Whether the last read may have left data in the socket.
    may_hold_more: bool,
    has_socket_ended: bool,
}

impl<S: Read + Write> TlsStream<S> {
    /// The handshake begins with `establish`, `start_handshake` or the first write.
    ///
    /// # Errors
    /// If OpenSSL runs out of memory.
    pub(crate) fn new(
        socket: S,
        context: &Context,
        scratch: &Scratch,
        coalesces: bool,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            socket,
            session: context.session()?,
            scratch: Rc::clone(scratch),
            sealed_at_once: if coalesces { usize::MAX } else { RECORD_LEN },
            may_hold_more: true,
            has_socket_ended: false,
        })
    }

    /// Completes the handshake on a blocking socket.
    ///
    /// # Errors
    /// If the server refuses, closes the connection, or does not answer within the socket's timeout.
    pub(crate) fn establish(&mut self) -> io::Result<()> {
        let mut plain = vec![0; self.scratch.borrow().len() + RECORD_LEN];
        while !self.session.handshake()? {
            self.flush()?;
            let scratch = Rc::clone(&self.scratch);
            let mut ciphertext = scratch.borrow_mut();
            let count = self.socket.read(&mut ciphertext)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if self.session.open(&ciphertext[..count], &mut plain)? > 0 {
                return Err(io::Error::other("the server spoke first"));
            }
        }
        self.flush()
    }

    /// Sends the first message if that was not done yet. Reads do the rest of the handshake.
    ///
    /// # Errors
    /// If the send fails, except when it would block.
    pub(crate) fn start_handshake(&mut self) -> io::Result<()> {
        self.session.handshake()?;
        self.flush()
    }

    /// Converts the socket, for example to mio's type, and keeps the session.
    ///
    /// # Errors
    /// If `change` fails.
    pub(crate) fn convert<T>(self, change: impl FnOnce(S) -> io::Result<T>) -> io::Result<TlsStream<T>> {
        Ok(TlsStream {
            socket: change(self.socket)?,
            session: self.session,
            scratch: self.scratch,
            sealed_at_once: self.sealed_at_once,
            may_hold_more: self.may_hold_more,
            has_socket_ended: self.has_socket_ended,
        })
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Resumes an earlier session.
    ///
    /// # Errors
    /// If OpenSSL rejects the ticket.
    pub(crate) fn resume(&mut self, ticket: &Ticket) -> io::Result<()> {
        self.session.resume(ticket)
    }

    /// Sends `close_notify`: nothing more will be sent.
    ///
    /// # Errors
    /// If the send fails, except when it would block.
    pub(crate) fn shut_down(&mut self) -> io::Result<()> {
        self.session.shut_down();
        self.flush()
    }

    /// Whether the socket has been read to its end.
    pub(crate) fn has_socket_ended(&self) -> bool {
        self.has_socket_ended
    }
}

impl<S: Read + Write> Read for TlsStream<S> {
    /// Returns plaintext, or 0 bytes at the end of the session or of the socket's data. `buffer` must be longer than
    /// the scratch buffer by one record (see `Session::open`).
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let scratch = Rc::clone(&self.scratch);
        let mut ciphertext = scratch.borrow_mut();
        loop {
            let count = self.socket.read(&mut ciphertext)?;
            self.has_socket_ended = count == 0;
            self.may_hold_more = count == ciphertext.len();
            if count == 0 {
                return Ok(0);
            }
            let length = self.session.open(&ciphertext[..count], buffer)?;
            self.flush()?;
            if length > 0 || self.session.has_ended() {
                return Ok(length);
            }
        }
    }
}

impl<S: Read + Write> Write for TlsStream<S> {
    /// Encrypts and sends the bytes in pieces of at most `sealed_at_once`, and may accept only the first pieces. If the
    /// socket does not take all the ciphertext of an accepted piece now, `flush` sends the rest later.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.session.is_established() {
            self.session.handshake()?;
        }
        self.flush()?;
        let mut taken = 0;
        for part in bytes.chunks(self.sealed_at_once) {
            if !self.session.outgoing().is_empty() || !self.session.seal(part)? {
                break;
            }
            taken += part.len();
            self.flush()?;
        }
        if taken == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(taken)
    }

    /// Sends as much as the socket takes now.
    fn flush(&mut self) -> io::Result<()> {
        while !self.session.outgoing().is_empty() {
            match self.socket.write(self.session.outgoing()) {
                Ok(count) => self.session.take_outgoing(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl<S: Source> Source for TlsStream<S> {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket.register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket.reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.socket.deregister(registry)
    }
}

impl<S: Read + Write + Source> Wire for TlsStream<S> {
    fn may_hold_more(&self, _count: usize, _buffer_len: usize) -> bool {
        self.may_hold_more
    }
}
