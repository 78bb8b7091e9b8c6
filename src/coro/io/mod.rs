//! Blocking-style I/O: sockets, and waits for descriptors (in the loop's fd table).
//!
//! - `wait`: the waits of one call on a descriptor
//! - `at_once`: reads and writes that never block
//! - `call`: methods that try, wait and try again; `readiness`: functions that only wait
//! - `socket_type`: the native type that derives from `socket.socket`; `socket`: its objects
//! - `receiving`, `sending`, `accepting`: the methods of the native type
//! - `by_base`: the methods of `socket.socket`, and calls that are passed on to these methods
//!
//! ```text
//!   call --> try the system call --- done --------------------------------> return
//!                 ^       | it would block
//!                 |       v
//!                 |   in the fd table, off the stack        interrupted, closed, late --> raise
//!                 |       | event                                 ^
//!                 '-------+---------------------------------------'
//! ```
//! The system call is made by the coro itself, never by the event handler. So a wait that is interrupted, even after
//! its event, has taken nothing from the descriptor. A coro uses a socket in the thread of its loop. A thread in which
//! no coro runs can use the same socket object. There, the socket's methods block the thread, like those of Python's
//! own sockets.

mod accepting;
mod at_once;
mod by_base;
mod call;
mod readiness;
mod receiving;
mod sending;
mod socket;
mod socket_type;
mod wait;

pub(super) use at_once::{read_now, write_now};
pub(super) use readiness::{end_closed_wait, is_on_loop, wait_functions};
pub(super) use socket_type::{bind_methods, socket_type};
