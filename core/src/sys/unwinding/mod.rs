//! Makes a thread hang if it is ended while it has frames of this library on its stack, because these frames must not
//! be unwound.
//!
//! `pthread_exit` and `pthread_cancel` of glibc and of FreeBSD unwind the stack of the thread that they end. When the
//! interpreter exits, CPython up to 3.13 ends every daemon thread in this way as soon as the thread asks for the GIL.
//! That can happen inside any call into Python. If that unwound Rust frames, destructors would use Python without the
//! GIL, and code that catches panics would abort the process. A thread that hangs does no harm, because the process is
//! exiting. From 3.14 on CPython itself makes these threads hang.
//!
//! ```text
//!   pthread_exit --> _Unwind_ForcedUnwind, from the innermost frame out:
//!                      C, or Rust with nothing to drop or to catch: skipped
//!                      Rust otherwise: its unwind table --> PERSONALITY --> personality() -- forced --> hang()
//!                                                                                | a panic
//!                                                                                v
//!                                                                     Rust's own personality routine
//! ```
//!
//! The unwind tables of ELF files do not refer to Rust's personality routine directly. They refer to a word of
//! writable data that holds its address, and all code that is linked into this library shares one such word. This
//! module replaces the address in that word. That protects every call from this library into Python, at no cost for the
//! calls.
//!
//! Source: Itanium C++ ABI, "Exception Handling", 1.3 (unwinding) and 1.6 (personality routines); glibc's
//! `nptl/unwind.c`; LLVM's `TargetLoweringObjectFileELF::emitPersonalityValue`.

// `forced.rs` is for glibc and FreeBSD, except on 32-bit ARM, which has a different kind of unwind tables. On other
// systems `pthread_exit` does not unwind the stack.
#[cfg_attr(
    all(
        any(all(target_os = "linux", target_env = "gnu"), target_os = "freebsd"),
        not(target_arch = "arm")
    ),
    path = "forced.rs"
)]
#[cfg_attr(
    not(all(
        any(all(target_os = "linux", target_env = "gnu"), target_os = "freebsd"),
        not(target_arch = "arm")
    )),
    path = "none.rs"
)]
mod imp;

pub use imp::hang_threads_that_end;
