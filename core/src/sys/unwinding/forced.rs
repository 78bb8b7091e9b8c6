//! For systems where the end of a thread unwinds its stack: a personality routine that runs before Rust's own.

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The arguments are the version, the actions, the exception's class, the exception and the frame. The result says what
/// the unwinder does next.
type Personality = unsafe extern "C" fn(c_int, c_int, u64, *mut c_void, *mut c_void) -> c_int;

/// `_UA_FORCE_UNWIND`, one bit of the actions.
const FORCED: c_int = 8;

unsafe extern "C" {
    /// The word that the unwind tables of this library refer to. It holds the address of the personality routine.
    #[link_name = "DW.ref.rust_eh_personality"]
    static PERSONALITY: AtomicPtr<c_void>;
}

/// The address of Rust's own personality routine, which was in the word before.
static RUSTS_OWN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// From now on a thread that `pthread_exit` or `pthread_cancel` ends hangs as soon as the unwinding reaches a frame of
/// this library. Call it before any other thread is in the library. Another call changes nothing.
pub fn hang_threads_that_end() {
    let hook = personality as *mut c_void;
    // SAFETY: an aligned word of the library's writable data, which nobody but the unwinder reads.
    let word = unsafe { &PERSONALITY };
    let before = word.load(Ordering::Relaxed);
    if before != hook {
        RUSTS_OWN.store(before, Ordering::Release);
        word.store(hook, Ordering::Release);
    }
}

/// # Safety
/// Called by the unwinder, for a frame of Rust's.
unsafe extern "C" fn personality(
    version: c_int,
    actions: c_int,
    class: u64,
    exception: *mut c_void,
    frame: *mut c_void,
) -> c_int {
    if actions & FORCED != 0 {
        hang();
    }
    // SAFETY: Rust's own routine was stored before the unwinder could come here, and gets what the unwinder has passed.
    unsafe {
        let own = mem::transmute::<*mut c_void, Personality>(RUSTS_OWN.load(Ordering::Acquire));
        own(version, actions, class, exception, frame)
    }
}

#[cold]
fn hang() -> ! {
    loop {
        // SAFETY: waits for a signal, again and again.
        unsafe { libc::pause() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;

    #[test]
    fn panics_are_caught_as_before() {
        for _ in 0..2 {
            hang_threads_that_end();
            // SAFETY: as in `hang_threads_that_end`.
            let now = unsafe { PERSONALITY.load(Ordering::Relaxed) };
            assert_eq!(now, personality as *mut c_void);
            let caught = catch_unwind(|| {
                let dropped = Box::new(1);
                assert!(*dropped == 2, "on purpose");
            });
            assert!(caught.is_err());
        }
    }
}
