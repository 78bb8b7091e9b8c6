//! Connections that are made, exchange some messages and are closed, without end.
//!
//! A request is one connection's whole life here; its latency runs from the start of the connect to the last reply.
//! Every message carries the connection's own number and its content is compared, so that bytes which belong to
//! another connection (a descriptor used again too early) are seen.

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Registry, Token};

use crate::Window;
use crate::echo::{Echo, Position};
use crate::engine::Exchange as _;
use crate::report::{Meter, Phase, Report};
use crate::sockets;

pub(crate) struct Shape {
    pub(crate) size: usize,
    pub(crate) messages: u32,
    pub(crate) reset_every: u64,
    pub(crate) leave_every: u64,
}

struct Life {
    stream: TcpStream,
    ordinal: u64,
    position: Position,
    started_ns: u64,
    /// Messages sent completely, and bytes of the next one.
    sent: u32,
    offset: usize,
    answered: u32,
}

enum Step {
    Goes,
    Ends,
}

struct Churn<'a> {
    shape: &'a Shape,
    echo: Echo,
    buffer: Vec<u8>,
}

fn is_nth(ordinal: u64, every: u64) -> bool {
    every > 0 && ordinal % every == every - 1
}

#[allow(clippy::cast_possible_truncation)] // an ordinal that fits no usize needs 584 years on a 64-bit machine
fn as_index(ordinal: u64) -> usize {
    ordinal as usize
}

impl Churn<'_> {
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
                // NotConnected: the connect is still under way; both are followed by an event.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected
                    ) =>
                {
                    return Ok(Step::Goes);
                }
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
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected
                    ) =>
                {
                    return Ok(Step::Goes);
                }
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

    /// Closes a finished life in the way its number asks for.
    fn end(&self, life: &Life, meter: &mut Meter) {
        meter.record(life.started_ns, meter.now_ns());
        if is_nth(life.ordinal, self.shape.reset_every) {
            if let Err(error) = sockets::reset_on_close(&life.stream) {
                meter.fail(&error);
            }
        }
    }
}

/// The places for connections, each vacant or with a life in it.
struct Places {
    address: SocketAddr,
    lives: Vec<Option<Life>>,
    vacant: Vec<usize>,
    next_ordinal: u64,
}

impl Places {
    /// Starts a life in every vacant place, as far as the meter grants it.
    fn fill(&mut self, registry: &Registry, meter: &mut Meter) {
        while !self.vacant.is_empty() && !meter.has_too_many_errors() && meter.grant(1) == 1 {
            let (ordinal, started_ns) = (self.next_ordinal, meter.now_ns());
            self.next_ordinal += 1;
            match (self.vacant.last(), sockets::start_connect(self.address, ordinal)) {
                (Some(&place), Ok(stream)) => {
                    let mut stream = TcpStream::from_std(stream);
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    if let Err(error) = registry.register(&mut stream, Token(place), interest) {
                        meter.fail(&error);
                        continue;
                    }
                    let position = Position::default();
                    self.lives[place] = Some(Life {
                        stream,
                        ordinal,
                        position,
                        started_ns,
                        sent: 0,
                        offset: 0,
                        answered: 0,
                    });
                    self.vacant.pop();
                }
                (_, Err(error)) => meter.fail(&format!("connect: {error}")),
                (None, Ok(_)) => return,
            }
        }
    }
}

/// Runs the load and reports the measured window.
///
/// # Errors
/// When the poller fails; a failed connection is counted in the report instead.
pub(crate) fn run(window: &Window, shape: &Shape) -> anyhow::Result<Report> {
    let mut poll = Poll::new()?;
    let mut churn = Churn {
        shape,
        echo: Echo::new(shape.size, 1, 1, None),
        buffer: vec![0; 256 * 1024],
    };
    let mut places = Places {
        address: window.address,
        lives: (0..window.connections).map(|_| None).collect(),
        vacant: (0..window.connections).collect(),
        next_ordinal: 0,
    };
    let mut events = Events::with_capacity(1024);
    let mut meter = Meter::start(window)?;
    loop {
        let (phase, left_ns) = meter.advance();
        places.fill(poll.registry(), &mut meter);
        if places.vacant.len() == places.lives.len() && (phase == Phase::Drain || meter.is_spent()) {
            break;
        }
        if meter.has_stalled() {
            meter.fail(&"no reply arrived any more");
        }
        if meter.has_stalled() || meter.has_too_many_errors() {
            break;
        }
        let timeout = if window.spin {
            Duration::ZERO
        } else {
            Duration::from_nanos(left_ns.min(100_000_000))
        };
        match poll.poll(&mut events, Some(timeout)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            let place = event.token().0;
            let Some(life) = &mut places.lives[place] else {
                continue;
            };
            let mut step = Ok(Step::Goes);
            if event.is_writable() {
                step = churn.send(life);
            }
            if matches!(step, Ok(Step::Goes)) && event.is_readable() {
                step = churn.receive(life);
            }
            match step {
                Ok(Step::Goes) => continue,
                Ok(Step::Ends) => churn.end(life, &mut meter),
                Err(error) => meter.fail(&error),
            }
            places.lives[place] = None;
            places.vacant.push(place);
        }
    }
    Ok(meter.report("churn", window.connections))
}
