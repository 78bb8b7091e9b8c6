//! The open loop: requests are due at a constant rate, whether or not the server has answered the previous ones.
//!
//! A latency begins when its request is due, not when a connection becomes free for it. Otherwise a server that stalls
//! would hide the requests that should have been sent during the stall ("coordinated omission").

use std::collections::VecDeque;

pub(crate) struct Arrivals {
    interval_ns: f64,
    /// The number of requests that have come due so far.
    count: u64,
    /// The due times of requests that wait for a connection.
    waiting: VecDeque<u64>,
    /// The free places, as indices of their connections. A connection has as many places as requests that it may have
    /// under way (`--depth`).
    free: VecDeque<usize>,
}

impl Arrivals {
    pub(crate) fn new(rate: f64, free: impl Iterator<Item = usize>) -> Self {
        Self {
            interval_ns: 1e9 / rate,
            count: 0,
            waiting: VecDeque::new(),
            free: free.collect(),
        }
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss
    )] // below 2^53
    fn next_due_ns(&self) -> u64 {
        (self.count as f64 * self.interval_ns) as u64
    }

    /// The time until the next request is due.
    pub(crate) fn left_ns(&self, now_ns: u64) -> u64 {
        self.next_due_ns().saturating_sub(now_ns)
    }

    /// Queues the requests that have come due.
    pub(crate) fn advance(&mut self, now_ns: u64) {
        while self.next_due_ns() <= now_ns {
            self.waiting.push_back(self.next_due_ns());
            self.count += 1;
        }
    }

    /// Takes the next due request and a place for it. The place that has been free for the longest time comes first.
    pub(crate) fn take(&mut self) -> Option<(usize, u64)> {
        if self.waiting.is_empty() {
            return None;
        }
        let index = self.free.pop_front()?;
        Some((index, self.waiting.pop_front()?))
    }

    /// Frees `count` places of this connection after as many replies.
    pub(crate) fn give_back(&mut self, index: usize, count: u64) {
        for _ in 0..count {
            self.free.push_back(index);
        }
    }

    /// The due times of requests that have no connection yet.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = u64> {
        self.waiting.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_due_at_the_rate_and_wait_for_a_place() {
        let mut arrivals = Arrivals::new(1000.0, 0..2);
        arrivals.advance(3_500_000);
        assert_eq!(arrivals.take(), Some((0, 0)));
        assert_eq!(arrivals.take(), Some((1, 1_000_000)));
        assert_eq!(arrivals.take(), None);
        assert_eq!(arrivals.waiting().collect::<Vec<_>>(), [2_000_000, 3_000_000]);
        assert_eq!(arrivals.left_ns(3_500_000), 500_000);
        arrivals.give_back(1, 1);
        assert_eq!(arrivals.take(), Some((1, 2_000_000)));
    }
}
