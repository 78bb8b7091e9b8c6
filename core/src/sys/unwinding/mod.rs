//! A thread that is ended in the middle of a call out of this library hangs instead of being unwound through it.
//!
//! `pthread_exit` and `pthread_cancel` of glibc and of FreeBSD unwind the stack of the thread that they end. CPython to
//! 3.13 does that to every daemon thread that asks for the GIL once the interpreter has begun to exit, so it can happen
//! inside each call into Python. Rust's frames must not be unwound like that: destructors would use Python without
//! the GIL, and what catches panics aborts the process. A thread that hangs is gone as well: the process exits
//! meanwhile. From 3.14 on CPython hangs its threads itself.
//!
//! ```text
//!   pthread_exit --> _Unwind_ForcedUnwind, from the innermost frame out:
//!                      C, or Rust with nothing to drop or to catch: passed over
//!                      Rust otherwise: its unwind table --> PERSONALITY --> personality() -- forced --> hang()
//!                                                                                | a panic
//!                                                                                v
//!                                                                     Rust's own personality routine
//! ```
//!
//! The unwind tables of ELF files do not name Rust's personality routine but a word of writable data in which its
//! address lies, one for all code that is linked into this library. Another routine in that word guards every call that
//! there is or will be, and costs the calls nothing.
//!
//! Owner: any thread. It must not know which code calls Python.
//!
//! Source: Itanium C++ ABI, "Exception Handling", 1.3.2 (forced unwinding) and 1.6.3 (personality routines); glibc's
//! `nptl/unwind.c`; LLVM's `TargetLoweringObjectFileELF::emitPersonalityValue`.

// 32-bit ARM has unwind tables of its own kind. Elsewhere the end of a thread unwinds nothing.
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
