//! Connections that keep coming and going: a fixed number of places, each of which is filled again as soon as it is
//! free.
//!
//! A request here is the whole life of one connection; its latency runs from the start of the connect to the end of
//! the life. An implementation of [`Lives`] defines what happens in between.

use std::io;
use std::time::Duration;

use mio::event::Source;
use mio::{Events, Interest, Poll, Registry, Token};

use crate::Window;
use crate::report::{Meter, Phase, Report};

pub(crate) enum Step {
    Goes,
    Ends,
}

/// A kind of connection life.
pub(crate) trait Lives {
    type Life;

    /// Begins a new life by starting its connect.
    ///
    /// # Errors
    /// If the connect fails.
    fn begin(&mut self, ordinal: u64) -> anyhow::Result<Self::Life>;

    /// The socket for the poller to watch.
    fn source(life: &mut Self::Life) -> &mut impl Source;

    /// Makes as much progress as possible without waiting.
    ///
    /// # Errors
    /// The reason why the life has failed.
    fn go_on(&mut self, life: &mut Self::Life, is_readable: bool, is_writable: bool) -> Result<Step, String>;

    /// Called just before a life that ended well is dropped.
    ///
    /// # Errors
    /// If a call on the socket fails.
    fn end(&mut self, _life: &mut Self::Life) -> io::Result<()> {
        Ok(())
    }
}

struct Place<L> {
    life: L,
    started_ns: u64,
}

/// The places for connections; each is vacant or holds a life.
struct Places<L> {
    taken: Vec<Option<Place<L>>>,
    vacant: Vec<usize>,
    next_ordinal: u64,
}

impl<L> Places<L> {
    fn new(count: usize) -> Self {
        Self {
            taken: (0..count).map(|_| None).collect(),
            vacant: (0..count).collect(),
            next_ordinal: 0,
        }
    }

    fn are_all_vacant(&self) -> bool {
        self.vacant.len() == self.taken.len()
    }

    /// Starts a life in every vacant place, as far as the meter allows.
    fn fill(&mut self, lives: &mut impl Lives<Life = L>, registry: &Registry, meter: &mut Meter) {
        while !meter.has_too_many_errors() {
            let Some(&index) = self.vacant.last() else { return };
            if meter.grant(1) == 0 {
                return;
            }
            let (ordinal, started_ns) = (self.next_ordinal, meter.now_ns());
            self.next_ordinal += 1;
            match begin(lives, ordinal, registry, Token(index)) {
                Ok(life) => {
                    self.taken[index] = Some(Place { life, started_ns });
                    self.vacant.pop();
                }
                Err(error) => meter.fail(&format!("connect: {error:#}")),
            }
        }
    }
}

fn begin<K: Lives>(
    lives: &mut K,
    ordinal: u64,
    registry: &Registry,
    token: Token,
) -> anyhow::Result<K::Life> {
    let mut life = lives.begin(ordinal)?;
    registry.register(
        K::source(&mut life),
        token,
        Interest::READABLE | Interest::WRITABLE,
    )?;
    Ok(life)
}

/// Runs the load and reports the measured window.
///
/// # Errors
/// If the poller fails. A failed connection is counted in the report instead.
pub(crate) fn run<K: Lives>(mode: &'static str, window: &Window, mut lives: K) -> anyhow::Result<Report> {
    let mut poll = Poll::new()?;
    let mut places = Places::new(window.connections);
    let mut events = Events::with_capacity(1024);
    let mut meter = Meter::start(window)?;
    loop {
        let (phase, left_ns) = meter.advance();
        places.fill(&mut lives, poll.registry(), &mut meter);
        if places.are_all_vacant() && (phase == Phase::Drain || meter.is_spent()) {
            break;
        }
        if meter.has_stalled() {
            meter.fail(&"no more replies arrived");
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
            let index = event.token().0;
            let Some(place) = &mut places.taken[index] else {
                continue;
            };
            match lives.go_on(&mut place.life, event.is_readable(), event.is_writable()) {
                Ok(Step::Goes) => continue,
                Ok(Step::Ends) => {
                    meter.record(place.started_ns, meter.now_ns(), true);
                    if let Err(error) = lives.end(&mut place.life) {
                        meter.fail(&error);
                    }
                }
                Err(error) => meter.fail(&error),
            }
            places.taken[index] = None;
            places.vacant.push(index);
        }
    }
    Ok(meter.report(mode, window.connections))
}
