//! Blocking-style I/O: waits on the loop's fd table, and sockets.
//!
//! - `wait`: one call's waits on a descriptor; `blocking`: the same in a thread where no coro runs
//! - `at_once`: reads and writes that never block
//! - `call`: a method that tries, waits and tries again; `readiness`: one that only waits
//! - `socket_type`: the native type that derives from `socket.socket`; `socket`: its objects
//! - `receiving`, `sending`, `accepting`: its methods; `by_base`: what they leave to the base's own methods; `exports`: buffers
//!
//! ```text
//!   call --> try the system call --- done --------------------------------> return
//!                 ^       | it would block
//!                 |       v
//!                 |   in the fd table, off the stack        interrupted, closed, late --> raise
//!                 |       | event                                 ^
//!                 '-------+---------------------------------------'
//! ```
//! The coro makes the system call itself, never the event. So a wait that is interrupted, even after its event, has
//! taken nothing from the descriptor. Belongs to the thread of the loop; a socket object may be used in any thread, like
//! Python's own.

mod accepting;
mod at_once;
mod blocking;
mod by_base;
mod call;
mod exports;
mod readiness;
mod receiving;
mod sending;
mod socket;
mod socket_type;
mod wait;

pub(super) use at_once::{read_now, write_now};
pub(super) use readiness::{end_closed_wait, is_on_loop, wait_functions};
pub(super) use socket_type::{bind_methods, socket_type};
