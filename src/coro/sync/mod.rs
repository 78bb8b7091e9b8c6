//! What coros synchronize with: the native primitives.
//!
//! - `object`: what the primitives have in common as Python objects, and the wait itself; `limit`: how long it may last
//! - `semaphore`, `lock` (and mutex), `condition`, `fifo`, `channel`
//!
//! All of them grant in the same way. A permit, the lock or an item goes to the first coro in the queue, before that
//! coro runs:
//!
//! ```text
//!   waiting, queued ------- granted: removed, ready -------------> runs: has it
//!      |                        |
//!      | interrupted, late      | interrupted
//!      v                        v
//!   removed, ready          ready, and still granted ------------> runs: gives it back or on, and raises
//! ```
//!
//! So nothing is lost, whenever an interruption comes, and no coro waits for something that is available. A fifo and a
//! channel count how many items are promised; the woken coro takes the oldest item when it runs. So the order of the
//! items is kept.
//!
//! An object belongs to the thread in whose running loop it is made, as the coros in its queues do. An object that is
//! made where no loop runs belongs to the first thread that uses it under a loop.

mod channel;
mod condition;
mod fifo;
pub(super) mod item_queue;
pub(super) mod limit;
mod lock;
pub(super) mod object;
mod semaphore;

use pyo3::prelude::*;

pub(super) use limit::{Deadline, Limit, end_wait, set_end_wait};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("semaphore", semaphore::make_type(module)?)?;
    module.add("lock", lock::make_type(module)?)?;
    module.add("mutex", lock::make_recursive_type(module)?)?;
    module.add("condition_variable", condition::make_type(module)?)?;
    module.add("fifo", fifo::make_type(module)?)?;
    module.add("channel", channel::make_type(module)?)
}
