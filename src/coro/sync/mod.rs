//! The native primitives that coros synchronize with.
//!
//! - `semaphore`, `lock` (also the mutex), `condition`, `fifo`, `channel`: the primitives
//! - `wakeup`: a primitive that only the package itself uses
//! - `object`: the parts that all primitives share, and the wait itself
//! - `limit`: the time limit of a wait
//! - `item_queue`: the items of a fifo, of a channel, or of a queue of the module `threads`
//!
//! All primitives grant requests in the same way. A permit, the lock or an item is given to the first coro in the queue
//! before that coro runs:
//!
//! ```text
//!   waiting, queued ------- granted: removed, ready -------------> runs: has it
//!      |                        |
//!      | interrupted, late      | interrupted
//!      v                        v
//!   removed, ready          ready, and still granted ------------> runs: passes it on or back, and raises
//! ```
//!
//! So nothing is lost, no matter when an interruption comes, and the first coro in a queue never waits for something
//! that is available. A fifo and a channel count how many items are promised to woken coros. A woken coro takes the
//! oldest item when it runs, so the items keep their order.
//!
//! Like the coros in its queues, a primitive can be used in one thread only: the thread whose loop was running when the
//! primitive was made. If no loop was running then, the primitive belongs to the first thread that uses it while a loop
//! runs there.

mod channel;
mod condition;
mod fifo;
pub(super) mod item_queue;
pub(super) mod limit;
mod lock;
pub(super) mod object;
mod semaphore;
mod wakeup;

use pyo3::prelude::*;

pub(super) use limit::{Deadline, Limit, end_wait, set_end_wait};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("semaphore", semaphore::make_type(module)?)?;
    module.add("lock", lock::make_type(module)?)?;
    module.add("mutex", lock::make_recursive_type(module)?)?;
    module.add("condition_variable", condition::make_type(module)?)?;
    module.add("fifo", fifo::make_type(module)?)?;
    module.add("channel", channel::make_type(module)?)?;
    module.add("wakeup", wakeup::make_type(module)?)
}
