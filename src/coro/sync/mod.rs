//! What coros synchronize with: the native primitives.
//!
//! - `object`: what they have in common as Python objects, and the wait itself; `limit`: how long it may last
//! - `semaphore`, `lock` (and mutex), `condition`, `fifo`, `channel`
//!
//! All of them grant in the same way. Who gives (a permit, the lock, an item) gives to the coro that stands first in
//! line, before that one runs:
//!
//! ```text
//!   waiting, queued ------- granted: removed, ready -------------> runs: has it
//!      |                        |
//!      | interrupted, late      | interrupted
//!      v                        v
//!   removed, ready          ready, and still granted ------------> runs: gives it back or on, and raises
//! ```
//!
//! Therefore nothing is lost, whenever an interruption comes, and nobody waits for what is there. Items never are in
//! anybody's hands on the way: a fifo and a channel count how many of them are promised, and the coro takes the oldest
//! one when it runs. So the order is kept as well.
//!
//! An object belongs to the thread of the loop that runs where it is made, as the coros in its queues do; one that is
//! made where none runs, to the first thread that uses it under a loop.

mod channel;
mod condition;
mod fifo;
mod item_queue;
mod limit;
mod lock;
mod object;
mod semaphore;

use pyo3::prelude::*;

pub(super) use limit::{end_wait, set_end_wait};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("semaphore", semaphore::make_type(module)?)?;
    module.add("lock", lock::make_type(module)?)?;
    module.add("mutex", lock::make_recursive_type(module)?)?;
    module.add("condition_variable", condition::make_type(module)?)?;
    module.add("fifo", fifo::make_type(module)?)?;
    module.add("channel", channel::make_type(module)?)
}
