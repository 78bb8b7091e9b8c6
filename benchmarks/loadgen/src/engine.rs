//! The load over long-lived connections, driven by one thread.
//!
//! There are `connections` times `depth` places for requests under way. In the closed loop all of them are always
//! taken: each reply triggers the next request. In the open loop requests come due at a constant rate ([`Arrivals`]),
//! and a free place takes the next one that is due. An [`Exchange`] defines the requests and recognizes the replies.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use anyhow::bail;
use mio::{Events, Interest, Poll, Token};

use crate::Window;
use crate::arrivals::Arrivals;
use crate::report::{Meter, Phase, Report};
use crate::target::Target;
use crate::wire::{self, BUFFER_LEN, TlsClient, Wire};

/// A kind of request and reply. All requests have the same length, so the number of bytes that were sent tells which
/// request comes next, and how much of it was sent.
pub(crate) trait Exchange {
    /// The state that a connection keeps between two reads.
    type State: Default;

    /// The HTTP request that upgrades a new connection to this protocol, if one is needed.
    fn upgrade(&self) -> Option<&[u8]> {
        None
    }

    /// Whether this request's latency counts. The latencies of the requests that `--other-byte` or `--other-path` mixes
    /// in do not count.
    fn is_counted(&self, _connection: usize, _number: u64) -> bool {
        true
    }

    fn request_len(&self) -> usize;

    /// The bytes of at least one and up to `count` requests of a connection, from number `first` on. `count` is at most
    /// the depth.
    fn requests(&mut self, connection: usize, first: u64, count: usize) -> &[u8];

    /// Consumes the bytes that arrived and returns how many replies are now complete.
    ///
    /// # Errors
    /// The reason why a reply is wrong.
    fn replies(&mut self, state: &mut Self::State, connection: usize, input: &[u8]) -> Result<u64, String>;
}

struct Connection<W, S> {
    stream: W,
    state: S,
    /// The number of requests that were sent completely.
    sent: u64,
    /// The number of bytes of the next request that were sent.
    offset: usize,
    issued: u64,
    answered: u64,
    started_ns: VecDeque<u64>,
}

impl<W: Wire, S> Connection<W, S> {
    /// Issues up to `wanted` requests and sends as much as the socket takes.
    fn issue<E: Exchange<State = S>>(
        &mut self,
        index: usize,
        wanted: u64,
        now_ns: u64,
        meter: &mut Meter,
        exchange: &mut E,
    ) -> io::Result<()> {
        let granted = meter.grant(wanted);
        self.issued += granted;
        for _ in 0..granted {
            self.started_ns.push_back(now_ns);
        }
        self.flush(index, exchange)
    }

    fn flush<E: Exchange<State = S>>(&mut self, index: usize, exchange: &mut E) -> io::Result<()> {
        self.stream.flush()?;
        let length = exchange.request_len();
        while self.sent < self.issued {
            let count = usize::try_from(self.issued - self.sent).unwrap_or(usize::MAX);
            let bytes = exchange.requests(index, self.sent, count);
            match self.stream.write(&bytes[self.offset..]) {
                Ok(written) => {
                    let position = self.offset + written;
                    self.sent += (position / length) as u64;
                    self.offset = position % length;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads until the socket is empty. Each reply triggers the next request, or frees a place for the next due one.
    fn receive<E: Exchange<State = S>>(
        &mut self,
        index: usize,
        buffer: &mut [u8],
        meter: &mut Meter,
        arrivals: &mut Option<Arrivals>,
        exchange: &mut E,
    ) -> Result<(), String> {
        loop {
            let count = match self.stream.read(buffer) {
                Ok(0) => {
                    return Err(format!(
                        "the server closed a connection, {} replies missing",
                        self.started_ns.len()
                    ));
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(format!("recv: {error}")),
            };
            let complete = exchange.replies(&mut self.state, index, &buffer[..count])?;
            if complete > 0 {
                let now_ns = meter.now_ns();
                for _ in 0..complete {
                    let started_ns = self.started_ns.pop_front().ok_or("more replies than requests")?;
                    meter.record(started_ns, now_ns, exchange.is_counted(index, self.answered));
                    self.answered += 1;
                }
                match arrivals {
                    Some(arrivals) => arrivals.give_back(index, complete),
                    None => self
                        .issue(index, complete, now_ns, meter, exchange)
                        .map_err(|error| format!("send: {error}"))?,
                }
            }
            if !self.stream.may_hold_more(count, buffer.len()) {
                return Ok(());
            }
        }
    }
}

/// Runs the load over the transport that the options name, and reports the measured part.
///
/// # Errors
/// If the connections cannot be made or the poller fails. A wrong reply is counted in the report instead.
pub(crate) fn run<E: Exchange>(
    mode: &'static str,
    window: &Window,
    depth: u32,
    exchange: E,
) -> anyhow::Result<Report> {
    match (&window.address, window.tls) {
        (&Target::Inet(address), false) => {
            let upgrade = exchange.upgrade().map(<[u8]>::to_vec);
            run_over(mode, window, depth, exchange, |index| {
                wire::tcp(address, index, upgrade.as_deref())
            })
        }
        (_, _) if exchange.upgrade().is_some() => bail!("websockets are supported only over TCP without TLS"),
        (Target::Unix(path), false) => run_over(mode, window, depth, exchange, |_| wire::unix(path)),
        (&Target::Inet(address), true) => {
            let client = TlsClient::new(window.coalesce)?;
            run_over(mode, window, depth, exchange, |index| client.tcp(address, index))
        }
        (Target::Unix(path), true) => {
            let client = TlsClient::new(window.coalesce)?;
            run_over(mode, window, depth, exchange, |_| client.unix(path))
        }
    }
}

/// Issues the requests that have come due, as far as there are free places.
fn issue_due<E: Exchange, W: Wire>(
    arrivals: &mut Arrivals,
    connections: &mut [Option<Connection<W, E::State>>],
    meter: &mut Meter,
    exchange: &mut E,
) {
    arrivals.advance(meter.now_ns());
    while let Some((index, due_ns)) = arrivals.take() {
        let Some(connection) = &mut connections[index] else {
            continue;
        };
        if let Err(error) = connection.issue(index, 1, due_ns, meter, exchange) {
            meter.fail(&format!("send: {error}"));
            connections[index] = None;
        }
    }
}

/// Waits until a socket is ready or the time is up. `epoll_wait` would round the time up to milliseconds.
fn wait(poll: &mut Poll, events: &mut Events, at_most_ns: u64) -> io::Result<()> {
    let mut watched = libc::pollfd {
        fd: poll.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    #[cfg(target_os = "linux")]
    if at_most_ns > 0 {
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(at_most_ns / 1_000_000_000).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::try_from(at_most_ns % 1_000_000_000).unwrap_or(0),
        };
        // SAFETY: the descriptor record and the timespec outlive the call, the count of descriptors is one, and a
        // null mask leaves the signal mask unchanged.
        unsafe { libc::ppoll(&raw mut watched, 1, &raw const time, std::ptr::null()) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (&mut watched, at_most_ns); // without ppoll: poll without sleeping
    poll.poll(events, Some(Duration::ZERO))
}

fn run_over<E: Exchange, W: Wire>(
    mode: &'static str,
    window: &Window,
    depth: u32,
    mut exchange: E,
    connect: impl Fn(u64) -> anyhow::Result<W>,
) -> anyhow::Result<Report> {
    let mut poll = Poll::new()?;
    let mut connections: Vec<Option<Connection<W, E::State>>> = Vec::with_capacity(window.connections);
    for index in 0..window.connections {
        let mut stream = connect(index as u64)?;
        // Register both interests permanently. This costs nothing, because the poller is edge-triggered: it does not
        // report a socket in every iteration just because the socket is writable.
        poll.registry()
            .register(&mut stream, Token(index), Interest::READABLE | Interest::WRITABLE)?;
        connections.push(Some(Connection {
            stream,
            state: E::State::default(),
            sent: 0,
            offset: 0,
            issued: 0,
            answered: 0,
            started_ns: VecDeque::with_capacity(depth as usize),
        }));
    }

    let places = (0..depth).flat_map(|_| 0..window.connections);
    let mut arrivals = window.rate.map(|rate| Arrivals::new(rate, places));
    let mut meter = Meter::start(window)?;
    for (index, slot) in connections.iter_mut().enumerate().filter(|_| arrivals.is_none()) {
        let now_ns = meter.now_ns();
        let Some(connection) = slot else { continue };
        if let Err(error) = connection.issue(index, u64::from(depth), now_ns, &mut meter, &mut exchange) {
            meter.fail(&format!("send: {error}"));
            *slot = None;
        }
    }

    let mut events = Events::with_capacity(1024);
    let mut buffer = vec![0_u8; BUFFER_LEN];
    loop {
        let (phase, left_ns) = meter.advance();
        if phase == Phase::Drain
            && let Some(waiting) = arrivals.take()
        {
            let under_way = connections.iter().enumerate().flat_map(|(index, slot)| {
                slot.iter()
                    .flat_map(move |open| (open.answered..).zip(&open.started_ns).map(move |of| (index, of)))
            });
            let counted = under_way
                .filter(|&(index, (number, _))| exchange.is_counted(index, number))
                .map(|(_, (_, &due_ns))| due_ns);
            meter.record_unanswered(counted.chain(waiting.waiting()));
        }
        if let Some(arrivals) = &mut arrivals {
            issue_due(arrivals, &mut connections, &mut meter, &mut exchange);
        }
        let mut open = connections.iter().flatten();
        // Check all connections only when all requests were issued or the time is over, not in every iteration.
        if (phase == Phase::Drain || meter.is_spent())
            && open.all(|connection| connection.started_ns.is_empty())
        {
            break;
        }
        if meter.has_stalled() {
            meter.fail(&"no more replies arrived");
            break;
        }
        let mut timeout_ns = left_ns.min(100_000_000);
        if let Some(arrivals) = &arrivals {
            timeout_ns = timeout_ns.min(arrivals.left_ns(meter.now_ns()));
        }
        let waited = match (window.spin, window.rate) {
            (true, _) => poll.poll(&mut events, Some(Duration::ZERO)),
            (false, Some(_)) => wait(&mut poll, &mut events, timeout_ns),
            (false, None) => poll.poll(&mut events, Some(Duration::from_nanos(timeout_ns))),
        };
        match waited {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            let index = event.token().0;
            let Some(connection) = &mut connections[index] else {
                continue;
            };
            let mut outcome = Ok(());
            if event.is_readable() {
                outcome = connection.receive(index, &mut buffer, &mut meter, &mut arrivals, &mut exchange);
            }
            if outcome.is_ok() && event.is_writable() {
                outcome = connection
                    .flush(index, &mut exchange)
                    .map_err(|error| format!("send: {error}"));
            }
            if let Err(error) = outcome {
                meter.fail(&error);
                connections[index] = None;
            }
        }
        if connections.iter().all(Option::is_none) {
            break;
        }
    }
    Ok(meter.report(mode, window.connections))
}
