//! The report of a load: counts, rates, latency percentiles and CPU seconds of the measured window.

use std::time::Instant;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::Window;
use crate::cpu_clock;

#[derive(Serialize)]
pub(crate) struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

/// The quantiles of the latency curve in a chart. They are closer together towards 1.
const CURVE: [f64; 14] = [
    0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 0.9975, 0.999, 0.9995, 0.9999, 1.0,
];

#[derive(Serialize)]
pub(crate) struct Report {
    mode: &'static str,
    connections: usize,
    requests: u64,
    seconds: f64,
    rps: f64,
    latency_us: Latency,
    /// Pairs of a quantile and its latency in us.
    curve_us: Vec<(f64, f64)>,
    /// The requested rate in requests per second; null in the closed loop.
    rate: Option<f64>,
    /// Requests that were due before the end of the measured window but had no reply then. The time that each of them
    /// has waited counts as a latency.
    unanswered: u64,
    pub(crate) errors: u64,
    first_error: Option<String>,
    /// Datagrams sent again because no reply came in time; 0 for streams.
    resent: u64,
    /// CPU seconds of the process that --cpu-of names; null where they cannot be read.
    server_cpu_s: Option<f64>,
    /// CPU seconds of the load itself. If they are close to `seconds`, the load is the bottleneck.
    load_cpu_s: Option<f64>,
}

/// The phase of a run. Replies count only while measuring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    WarmUp,
    Measure,
    Drain,
}

/// The phases of one run, and everything that is counted in them.
pub(crate) struct Meter {
    start: Instant,
    warm_up_end_ns: u64,
    /// Length of the measured window; `None` to measure until the budget is spent.
    duration_ns: Option<u64>,
    measure_end_ns: Option<u64>,
    /// Requests that may still be issued; `None` for as many as fit into the time.
    budget: Option<u64>,
    phase: Phase,
    cpu_of: Option<u32>,
    measure_start_ns: u64,
    cpu_start: (Option<f64>, Option<f64>),
    closed: Option<(u64, Option<f64>, Option<f64>)>,
    latency_ns: Histogram<u64>,
    requests: u64,
    errors: u64,
    first_error: Option<String>,
    resent: u64,
    rate: Option<f64>,
    unanswered: u64,
    last_reply_ns: u64,
    stall_ns: u64,
}

/// A duration in ns; u64 holds 584 years.
#[allow(clippy::cast_possible_truncation)]
fn as_ns(duration: std::time::Duration) -> u64 {
    duration.as_nanos() as u64
}

impl Meter {
    /// Starts the clock.
    ///
    /// # Errors
    /// If the histogram cannot be created.
    pub(crate) fn start(window: &Window) -> anyhow::Result<Self> {
        let warm_up_end_ns = if window.requests.is_some() {
            0
        } else {
            as_ns(window.warm_up)
        };
        let mut meter = Self {
            start: Instant::now(),
            warm_up_end_ns,
            duration_ns: window.requests.is_none().then(|| as_ns(window.duration)),
            measure_end_ns: None,
            budget: window.requests,
            phase: Phase::WarmUp,
            cpu_of: window.cpu_of,
            measure_start_ns: 0,
            cpu_start: (None, None),
            closed: None,
            latency_ns: Histogram::new_with_bounds(1, 600_000_000_000, 3)?,
            requests: 0,
            errors: 0,
            first_error: None,
            resent: 0,
            rate: window.rate,
            unanswered: 0,
            last_reply_ns: 0,
            stall_ns: as_ns(window.stall),
        };
        meter.advance();
        Ok(meter)
    }

    pub(crate) fn now_ns(&self) -> u64 {
        as_ns(self.start.elapsed())
    }

    /// Moves to the next phase if its time has come. Returns the current phase, and the most ns that it may still last.
    pub(crate) fn advance(&mut self) -> (Phase, u64) {
        let now_ns = self.now_ns();
        if self.phase == Phase::WarmUp && now_ns >= self.warm_up_end_ns {
            self.phase = Phase::Measure;
            // Count from now, not from when the phase was due: this process may have been delayed.
            self.measure_start_ns = now_ns;
            self.measure_end_ns = self.duration_ns.map(|duration_ns| now_ns + duration_ns);
            self.cpu_start = (self.cpu_of.and_then(cpu_clock::process_s), cpu_clock::own_s());
        }
        if self.phase == Phase::Measure && self.measure_end_ns.is_some_and(|end_ns| now_ns >= end_ns) {
            self.finish();
        }
        let left_ns = match self.phase {
            Phase::WarmUp => self.warm_up_end_ns.saturating_sub(now_ns),
            Phase::Measure => self
                .measure_end_ns
                .map_or(u64::MAX, |end_ns| end_ns.saturating_sub(now_ns)),
            Phase::Drain => u64::MAX,
        };
        (self.phase, left_ns)
    }

    /// Ends the measured window now.
    pub(crate) fn finish(&mut self) {
        if self.phase != Phase::Drain {
            self.phase = Phase::Drain;
            self.closed = Some((
                self.now_ns(),
                self.cpu_of.and_then(cpu_clock::process_s),
                cpu_clock::own_s(),
            ));
        }
    }

    /// How many of `wanted` requests may be issued now.
    pub(crate) fn grant(&mut self, wanted: u64) -> u64 {
        if self.phase == Phase::Drain {
            return 0;
        }
        match &mut self.budget {
            None => wanted,
            Some(left) => {
                let granted = wanted.min(*left);
                *left -= granted;
                granted
            }
        }
    }

    /// Counts a reply. Its latency counts only if `is_counted`.
    pub(crate) fn record(&mut self, started_ns: u64, now_ns: u64, is_counted: bool) {
        self.last_reply_ns = now_ns;
        if self.phase == Phase::Measure {
            self.requests += 1;
            if is_counted {
                self.latency_ns
                    .saturating_record(now_ns.saturating_sub(started_ns).max(1));
            }
        }
    }

    /// Counts the requests that were due but have no reply at the end of the measured window. Their latencies, which
    /// are still growing, are the longest ones and would otherwise be missing.
    pub(crate) fn record_unanswered(&mut self, due_ns: impl Iterator<Item = u64>) {
        let Some((end_ns, ..)) = self.closed else { return };
        for due_ns in due_ns.filter(|&due_ns| due_ns < end_ns) {
            self.unanswered += 1;
            self.latency_ns.saturating_record((end_ns - due_ns).max(1));
        }
    }

    /// Counts a datagram that was lost and is sent again.
    pub(crate) fn count_resent(&mut self) {
        if self.phase == Phase::Measure {
            self.resent += 1;
        }
    }

    pub(crate) fn fail(&mut self, error: &impl ToString) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| error.to_string());
    }

    /// Whether the number of requests is fixed and all of them have been issued.
    pub(crate) fn is_spent(&self) -> bool {
        self.budget == Some(0)
    }

    /// Whether the load fails so often that it should be stopped.
    pub(crate) fn has_too_many_errors(&self) -> bool {
        self.errors >= 1000
    }

    pub(crate) fn has_stalled(&self) -> bool {
        self.now_ns().saturating_sub(self.last_reply_ns) > self.stall_ns
    }

    #[allow(clippy::cast_precision_loss)] // counts and ns stay far below 2^53
    pub(crate) fn report(mut self, mode: &'static str, connections: usize) -> Report {
        self.finish();
        let (end_ns, server_cpu_end, own_cpu_end) = self.closed.unwrap_or_default();
        let seconds = end_ns.saturating_sub(self.measure_start_ns) as f64 / 1e9;
        let percentile_us = |q: f64| self.latency_ns.value_at_quantile(q) as f64 / 1e3;
        Report {
            mode,
            connections,
            requests: self.requests,
            seconds,
            rps: if seconds > 0.0 {
                self.requests as f64 / seconds
            } else {
                0.0
            },
            latency_us: Latency {
                p50: percentile_us(0.50),
                p90: percentile_us(0.90),
                p99: percentile_us(0.99),
                p999: percentile_us(0.999),
                max: self.latency_ns.max() as f64 / 1e3,
            },
            curve_us: CURVE.iter().map(|&q| (q, percentile_us(q))).collect(),
            rate: self.rate,
            unanswered: self.unanswered,
            errors: self.errors,
            first_error: self.first_error,
            resent: self.resent,
            server_cpu_s: difference(self.cpu_start.0, server_cpu_end),
            load_cpu_s: difference(self.cpu_start.1, own_cpu_end),
        }
    }
}

fn difference(start: Option<f64>, end: Option<f64>) -> Option<f64> {
    Some(end? - start?)
}
