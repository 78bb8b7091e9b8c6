//! Models of the protocols between threads, for loom. loom runs a test in every order in which its threads could take
//! turns, and with every value that a relaxed load could return. [`check`] limits how often threads are preempted,
//! because the tests would otherwise take far too long.
//!
//! | module | what it is | used by |
//! |---|---|---|
//! | [`inbox`] | the real file, compiled with loom's types | `tests/inbox.rs` |
//! | [`exclusive`] | the real `spin_lock.rs`, compiled with loom's types | `tests/wait_queue.rs` |
//! | [`wait_queue`] | a copy of the protocol of `src/coro/wait_queue.rs` | `tests/wait_queue.rs` |
//! | [`shared_queue`] | a copy of the protocol of `src/coro/threads/shared_queue.rs` | `tests/shared_queue.rs` |
//!
//! A copy names the functions that it mirrors. If one of them changes, the copy has to change, too.

pub mod exclusive;
pub mod parts;
pub mod shared_queue;
pub mod wait_queue;

// `inbox.rs` takes its types from the `parts` beside it.
#[path = "../../src/queue/inbox.rs"]
pub mod inbox;

/// Runs a model in every order in which threads are preempted at most three times. The environment variable
/// `LOOM_MAX_PREEMPTIONS` sets another limit.
pub fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}
