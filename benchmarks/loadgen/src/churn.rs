//! Connections that live for a few messages ([`Lives`]): connect, messages, close.
//!
//! Every message of 16 bytes or more carries the number of its connection. The content of every reply is compared,
//! which reveals bytes that belong to another connection (a descriptor that was reused too early).

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;

use mio::event::Source;
use mio::net::TcpStream;

use crate::echo::{Echo, Position};
use crate::engine::Exchange as _;
use crate::sockets;
use crate::turnover::{Lives, Step};
use crate::wire::BUFFER_LEN;

pub(crate) struct Shape {
    pub(crate) size: usize,
    pub(crate) messages: u32,
    pub(crate) reset_every: u64,
    pub(crate) leave_every: u64,
}

pub(crate) struct Life {
    stream: TcpStream,
    ordinal: u64,
    position: Position,
    /// The number of messages that were sent completely.
    sent: u32,
    /// The number of bytes of the next message that were sent.
    offset: usize,
    answered: u32,
}

pub(crate) struct Churn {
    address: SocketAddr,
    shape: Shape,
    echo: Echo,
    buffer: Vec<u8>,
}

fn is_nth(ordinal: u64, every: u64) -> bool {
    every > 0 && ordinal % every == every - 1
}

#[allow(clippy::cast_possible_truncation)] // a usize of a 64-bit machine holds every ordinal
fn as_index(ordinal: u64) -> usize {
    ordinal as usize
}

/// Whether to wait for the next event. `NotConnected` means that the connect is still under way.
pub(crate) fn must_wait(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected
    )
}

impl Churn {
    pub(crate) fn new(address: SocketAddr, shape: Shape) -> Self {
        Self {
            address,
            echo: Echo::new(shape.size, 1, 1, None),
            shape,
            buffer: vec![0; BUFFER_LEN],
        }
    }

    fn send(&mut self, life: &mut Life) -> Result<Step, String> {
        while life.sent <= life.answered && life.sent < self.shape.messages {
            let bytes = self
                .echo
                .requests(as_index(life.ordinal), u64::from(life.sent), 1);
            match life.stream.write(&bytes[life.offset..]) {
                Ok(written) => {
                    life.offset += written;
                    if life.offset == self.shape.size {
                        life.offset = 0;
                        life.sent += 1;
                    }
                }
                Err(error) if must_wait(&error) => return Ok(Step::Goes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("send: {error}")),
            }
        }
        let is_last = life.sent == self.shape.messages;
        Ok(if is_last && is_nth(life.ordinal, self.shape.leave_every) {
            Step::Ends
        } else {
            Step::Goes
        })
    }

    fn receive(&mut self, life: &mut Life) -> Result<Step, String> {
        loop {
            let count = match life.stream.read(&mut self.buffer) {
                Ok(0) => return Err("the server closed a connection before its reply".into()),
                Ok(count) => count,
                Err(error) if must_wait(&error) => return Ok(Step::Goes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(format!("recv: {error}")),
            };
            let complete =
                self.echo
                    .replies(&mut life.position, as_index(life.ordinal), &self.buffer[..count])?;
            if complete > u64::from(life.sent - life.answered) {
                return Err("more replies than requests".into());
            }
            life.answered += u32::try_from(complete).unwrap_or(u32::MAX);
            if life.answered == self.shape.messages {
                return Ok(Step::Ends);
            }
            if let Step::Ends = self.send(life)? {
                return Ok(Step::Ends);
            }
            if count < self.buffer.len() {
                return Ok(Step::Goes);
            }
        }
    }
}

impl Lives for Churn {
    type Life = Life;

    fn begin(&mut self, ordinal: u64) -> anyhow::Result<Life> {
        Ok(Life {
            stream: TcpStream::from_std(sockets::start_connect(self.address, ordinal)?),
            ordinal,
            position: Position::default(),
            sent: 0,
            offset: 0,
            answered: 0,
        })
    }

    fn source(life: &mut Life) -> &mut impl Source {
        &mut life.stream
    }

    fn go_on(&mut self, life: &mut Life, is_readable: bool, is_writable: bool) -> Result<Step, String> {
        if is_writable && matches!(self.send(life)?, Step::Ends) {
            return Ok(Step::Ends);
        }
        if is_readable {
            self.receive(life)
        } else {
            Ok(Step::Goes)
        }
    }

    /// Makes every n-th connection (`reset_every`) end with a reset instead of a close.
    fn end(&mut self, life: &mut Life) -> io::Result<()> {
        if is_nth(life.ordinal, self.shape.reset_every) {
            sockets::reset_on_close(&life.stream)?;
        }
        Ok(())
    }
}
