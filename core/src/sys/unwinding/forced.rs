//! For systems on which `pthread_exit` unwinds the stack: a personality routine that runs before Rust's own.

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The arguments are the version, the actions, the exception's class, the exception and the frame. The result tells the
/// unwinder what to do next.
type Personality = unsafe extern "C" fn(c_int, c_int, u64, *mut c_void, *mut c_void) -> c_int;

/// The bit `_UA_FORCE_UNWIND` of the actions.
const FORCED: c_int = 8;

unsafe extern "C" {
    /// The word that the unwind tables of this library refer to. It holds the address of the personality routine.
    #[link_name = "DW.ref.rust_eh_personality"]
    static PERSONALITY: AtomicPtr<c_void>;
}

/// The address of Rust's own personality routine, which was in `PERSONALITY` before.
static ORIGINAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// From now on, a thread that is ended by `pthread_exit` or `pthread_cancel` hangs as soon as the unwinding reaches a
/// Rust frame of this library that has something to drop or to catch. Call this before any other thread runs code of
/// the library. Further calls have no effect.
pub fn hang_threads_that_end() {
    let hook = personality as *mut c_void;
    // SAFETY: this is an aligned word of the library's writable data. Apart from this function, only the unwinder reads
    // it.
    let word = unsafe { &PERSONALITY };
    let before = word.load(Ordering::Relaxed);
    if before != hook {
        ORIGINAL.store(before, Ordering::Release);
        word.store(hook, Ordering::Release);
    }
}

/// # Safety
/// Only the unwinder may call this, for a Rust frame.
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
    // SAFETY: Rust's own routine was stored before the unwinder could call this function. It gets the same arguments.
    unsafe {
        let original = mem::transmute::<*mut c_void, Personality>(ORIGINAL.load(Ordering::Acquire));
        original(version, actions, class, exception, frame)
    }
}

#[cold]
fn hang() -> ! {
    loop {
        // SAFETY: the call only waits for a signal.
        unsafe { libc::pause() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;

    #[test]
    fn panics_are_still_caught() {
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
