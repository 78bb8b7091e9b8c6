//! UDP: many sockets, each with one datagram under way. When its reply arrives, the socket sends the next one.
//!
//! A datagram may get lost. If no reply arrives for a while, the datagram is sent again, and the report counts that. A
//! reply to an earlier datagram (which was late, not lost) is ignored.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use mio::net::UdpSocket;
use mio::{Events, Interest, Poll, Token};

use crate::Window;
use crate::echo::{Echo, HEADER_LEN, header};
use crate::engine::Exchange as _;
use crate::report::{Meter, Phase, Report};

/// Larger than any datagram, so that a reply that is too long is noticed.
const BUFFER_LEN: usize = 65_536;

pub(crate) struct Shape {
    pub(crate) size: usize,
    pub(crate) verify_every: u64,
    /// A datagram without a reply for this long counts as lost.
    pub(crate) resend_after: Duration,
}

struct Peer {
    socket: UdpSocket,
    sequence: u64,
    /// When the datagram was first sent.
    started_ns: u64,
    /// When the datagram was last sent.
    sent_ns: u64,
    is_waiting: bool,
}

enum Reply {
    Right,
    Late,
}

/// Judges a datagram that arrived at socket `index` while the reply to message `sequence` was awaited.
fn judge(echo: &Echo, index: usize, sequence: u64, verify_every: u64, reply: &[u8]) -> Result<Reply, String> {
    if reply.len() != echo.request_len() {
        return Err(format!(
            "a reply of {} bytes, expected {}",
            reply.len(),
            echo.request_len()
        ));
    }
    let number: [u8; 8] = reply[8..HEADER_LEN].try_into().unwrap_or_default();
    let answered = u64::from_le_bytes(number);
    if reply[..HEADER_LEN] != header(index as u64, answered) || answered > sequence {
        return Err(format!(
            "socket {index} received a reply to a message that it has not sent"
        ));
    }
    if answered < sequence {
        return Ok(Reply::Late);
    }
    if sequence.is_multiple_of(verify_every) && !echo.is_right(index, sequence, 0, reply) {
        return Err(format!(
            "reply {sequence} on socket {index} has the wrong content"
        ));
    }
    Ok(Reply::Right)
}

struct Load {
    echo: Echo,
    shape: Shape,
    peers: Vec<Peer>,
    buffer: Vec<u8>,
    meter: Meter,
}

impl Load {
    /// Sends the current datagram of this peer, or sends it again. If the socket is full, the datagram counts
    /// as lost.
    fn send(&mut self, index: usize, now_ns: u64) -> Result<(), String> {
        let peer = &mut self.peers[index];
        peer.sent_ns = now_ns;
        match peer.socket.send(self.echo.requests(index, peer.sequence, 1)) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(()),
            Err(error) => Err(format!("send: {error}")),
        }
    }

    /// Issues the next datagram, if the meter allows it.
    fn issue(&mut self, index: usize, now_ns: u64) -> Result<(), String> {
        let peer = &mut self.peers[index];
        peer.is_waiting = self.meter.grant(1) == 1;
        if !peer.is_waiting {
            return Ok(());
        }
        peer.started_ns = now_ns;
        self.send(index, now_ns)
    }

    /// Reads datagrams up to the awaited reply. The socket may hold more: second replies to a datagram that was sent
    /// twice. The poller is edge-triggered, so they are read only when another datagram arrives.
    fn receive(&mut self, index: usize) -> Result<(), String> {
        loop {
            let peer = &mut self.peers[index];
            let count = match peer.socket.recv(&mut self.buffer) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(format!("recv: {error}")),
            };
            let reply = &self.buffer[..count];
            match judge(&self.echo, index, peer.sequence, self.shape.verify_every, reply)? {
                Reply::Right if peer.is_waiting => {
                    let now_ns = self.meter.now_ns();
                    self.meter.record(peer.started_ns, now_ns, true);
                    peer.sequence += 1;
                    return self.issue(index, now_ns);
                }
                Reply::Right | Reply::Late => {}
            }
        }
    }

    /// Resends each datagram that has waited too long for its reply.
    fn resend(&mut self) {
        let now_ns = self.meter.now_ns();
        for index in 0..self.peers.len() {
            let peer = &self.peers[index];
            if !peer.is_waiting
                || u128::from(now_ns.saturating_sub(peer.sent_ns)) < self.shape.resend_after.as_nanos()
            {
                continue;
            }
            self.meter.count_resent();
            if let Err(error) = self.send(index, now_ns) {
                self.meter.fail(&error);
            }
        }
    }
}

fn open(address: SocketAddr) -> io::Result<UdpSocket> {
    let any = match address {
        SocketAddr::V4(_) => SocketAddr::from(([0, 0, 0, 0], 0)),
        SocketAddr::V6(_) => SocketAddr::from(([0_u16; 8], 0)),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(address)?;
    Ok(socket)
}

/// Runs the load and reports the measured window.
///
/// # Errors
/// If a socket cannot be made or the poller fails. A wrong reply is counted in the report instead.
pub(crate) fn run(window: &Window, shape: Shape) -> anyhow::Result<Report> {
    ensure!(
        shape.size >= HEADER_LEN,
        "a datagram has at least {HEADER_LEN} bytes"
    );
    let address = window.address.inet()?;
    let mut poll = Poll::new()?;
    let mut peers = Vec::with_capacity(window.connections);
    for index in 0..window.connections {
        let mut socket = open(address).with_context(|| format!("socket {index} to {address}"))?;
        poll.registry()
            .register(&mut socket, Token(index), Interest::READABLE)?;
        peers.push(Peer {
            socket,
            sequence: 0,
            started_ns: 0,
            sent_ns: 0,
            is_waiting: false,
        });
    }
    let mut load = Load {
        echo: Echo::new(shape.size, 1, shape.verify_every, None),
        buffer: vec![0; BUFFER_LEN],
        meter: Meter::start(window)?,
        shape,
        peers,
    };
    for index in 0..load.peers.len() {
        let now_ns = load.meter.now_ns();
        if let Err(error) = load.issue(index, now_ns) {
            load.meter.fail(&error);
        }
    }
    let mut events = Events::with_capacity(1024);
    let between_looks_ns = u64::try_from(load.shape.resend_after.as_nanos() / 4)?;
    let mut next_look_ns = between_looks_ns;
    loop {
        let (phase, left_ns) = load.meter.advance();
        if (phase == Phase::Drain || load.meter.is_spent()) && !load.peers.iter().any(|peer| peer.is_waiting)
        {
            break;
        }
        if load.meter.has_stalled() {
            load.meter.fail(&"no more replies arrived");
        }
        if load.meter.has_stalled() || load.meter.has_too_many_errors() {
            break;
        }
        if load.meter.now_ns() >= next_look_ns {
            load.resend();
            next_look_ns = load.meter.now_ns() + between_looks_ns;
        }
        let timeout = if window.spin {
            Duration::ZERO
        } else {
            Duration::from_nanos(left_ns.min(between_looks_ns))
        };
        match poll.poll(&mut events, Some(timeout)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            if let Err(error) = load.receive(event.token().0) {
                load.meter.fail(&error);
            }
        }
    }
    Ok(load.meter.report("datagrams", window.connections))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_awaited_reply_is_right() {
        let mut echo = Echo::new(100, 1, 1, None);
        let reply = echo.requests(3, 7, 1).to_vec();
        assert!(matches!(judge(&echo, 3, 7, 1, &reply), Ok(Reply::Right)));
        assert!(matches!(judge(&echo, 3, 8, 1, &reply), Ok(Reply::Late)));
        assert!(judge(&echo, 3, 6, 1, &reply).is_err(), "from the future");
        assert!(judge(&echo, 4, 7, 1, &reply).is_err(), "of another socket");
        assert!(judge(&echo, 3, 7, 1, &reply[..99]).is_err(), "cut off");
        let mut damaged = reply;
        damaged[99] ^= 1;
        assert!(judge(&echo, 3, 7, 1, &damaged).is_err());
    }
}
