//! Connections that live for a TLS handshake ([`Lives`]): connect, handshake, close. Handshakes are full, or resume an
//! earlier session.
//!
//! The client sends `close_notify` as soon as the handshake is complete on its side. The life ends well only if the
//! server answers with its own `close_notify` and then closes the connection. The server can read the client's
//! `close_notify` only after it has verified the handshake, so a handshake counts only if both sides have completed it.

use std::io::{self, Read as _};
use std::net::SocketAddr;

use mio::event::Source;
use mio::net::TcpStream;

use crate::churn::must_wait;
use crate::sockets;
use crate::tls::{Ticket, TlsStream};
use crate::turnover::{Lives, Step};
use crate::wire::{BUFFER_LEN, TlsClient};

pub(crate) struct Life {
    stream: TlsStream<TcpStream>,
    has_said_goodbye: bool,
    must_resume: bool,
}

pub(crate) struct Handshakes {
    address: SocketAddr,
    client: TlsClient,
    buffer: Vec<u8>,
    /// Whether handshakes resume a session.
    resumes: bool,
    /// The newest ticket that a server has sent.
    ticket: Option<Ticket>,
}

impl Handshakes {
    /// # Errors
    /// If there is no OpenSSL 3.
    pub(crate) fn new(address: SocketAddr, resumes: bool) -> anyhow::Result<Self> {
        Ok(Self {
            address,
            client: TlsClient::new(false)?,
            buffer: vec![0; BUFFER_LEN],
            resumes,
            ticket: None,
        })
    }
}

impl Life {
    fn go_on(&mut self, buffer: &mut [u8], is_readable: bool) -> io::Result<Step> {
        self.stream.start_handshake()?;
        loop {
            if !self.has_said_goodbye && self.stream.session().is_established() {
                self.has_said_goodbye = true;
                self.stream.shut_down()?;
            }
            if !is_readable {
                return Ok(Step::Goes);
            }
            match self.stream.read(buffer) {
                Ok(0) if self.stream.has_socket_ended() => {
                    return if self.stream.session().has_ended() {
                        Ok(Step::Ends)
                    } else {
                        Err(io::Error::other("the server closed without close_notify"))
                    };
                }
                Ok(0) => {}
                Ok(_) => return Err(io::Error::other("a server that should be silent sent something")),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // This `read` has completed the handshake, and then found no more data. Go on, to send `close_notify`.
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && !self.has_said_goodbye
                        && self.stream.session().is_established() => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Lives for Handshakes {
    type Life = Life;

    fn begin(&mut self, ordinal: u64) -> anyhow::Result<Life> {
        let socket = TcpStream::from_std(sockets::start_connect(self.address, ordinal)?);
        let mut stream = self.client.start(socket)?;
        if let Some(ticket) = &self.ticket {
            stream.resume(ticket)?;
        }
        Ok(Life {
            stream,
            has_said_goodbye: false,
            must_resume: self.ticket.is_some(),
        })
    }

    fn end(&mut self, life: &mut Life) -> io::Result<()> {
        let session = life.stream.session();
        if life.must_resume && !session.is_resumed() {
            return Err(io::Error::other("the server has not resumed the session"));
        }
        if self.resumes {
            self.ticket = session.ticket().or_else(|| self.ticket.take());
        }
        Ok(())
    }

    fn source(life: &mut Life) -> &mut impl Source {
        &mut life.stream
    }

    fn go_on(&mut self, life: &mut Life, is_readable: bool, _is_writable: bool) -> Result<Step, String> {
        match life.go_on(&mut self.buffer, is_readable) {
            Err(error) if must_wait(&error) => Ok(Step::Goes),
            outcome => outcome.map_err(|error| error.to_string()),
        }
    }
}
