//! The crate that `.ci/kqueue` puts in the place of `libc`. It has everything from the real `libc` (here `system`), and
//! the declarations of libkqueue's `<sys/event.h>` that the core uses.

#![allow(non_camel_case_types, clippy::missing_safety_doc, missing_docs)]

pub use system::*;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kevent {
    pub ident: uintptr_t,
    pub filter: i16,
    pub flags: u16,
    pub fflags: u32,
    pub data: intptr_t,
    pub udata: *mut c_void,
}

pub const EVFILT_READ: i16 = -1;
pub const EVFILT_WRITE: i16 = -2;
pub const EVFILT_PROC: i16 = -5;
pub const EVFILT_TIMER: i16 = -7;
pub const EV_ADD: u16 = 0x0001;
pub const EV_DELETE: u16 = 0x0002;
pub const EV_RECEIPT: u16 = 0x0040;
pub const EV_ERROR: u16 = 0x4000;
pub const EV_EOF: u16 = 0x8000;
pub const NOTE_EXIT: u32 = 0x8000_0000;

mod library {
    use super::{c_int, timespec};

    #[link(name = "kqueue")]
    unsafe extern "C" {
        pub fn kqueue() -> c_int;
        pub fn kevent(
            queue: c_int,
            changes: *const super::kevent,
            change_count: c_int,
            events: *mut super::kevent,
            event_count: c_int,
            timeout: *const timespec,
        ) -> c_int;
    }
}

pub use library::kqueue;

pub unsafe fn kevent(
    queue: c_int,
    changes: *const kevent,
    change_count: c_int,
    events: *mut kevent,
    event_count: c_int,
    timeout: *const timespec,
) -> c_int {
    // SAFETY: errno belongs to this thread, and the caller upholds the contract of kevent(2). errno is cleared because
    // libkqueue 2.7 would put an earlier errno into the receipt for a filter that is registered already.
    unsafe {
        *__errno_location() = 0;
        library::kevent(queue, changes, change_count, events, event_count, timeout)
    }
}
