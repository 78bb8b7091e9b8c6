//! If a thread is ended while it is in a call out of this library, it hangs. Its stack is not unwound through this
//! library.
//!
//! `pthread_exit` and `pthread_cancel` of glibc and of FreeBSD unwind the stack of the thread that they end. Up to 3.13
//! CPython ends every daemon thread in this way that asks for the GIL once the interpreter has begun to exit. So it can
//! happen inside every call into Python. Rust's frames must not be unwound like that: destructors would use Python
//! without the GIL, and code that catches panics aborts the process. A thread that hangs does no harm, because the
//! process is exiting. From 3.14 on CPython hangs its threads itself.
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
//! The unwind tables of ELF files do not name Rust's personality routine directly. They name a word of writable data
//! that holds its address, and all code that is linked into this library shares one such word. Another routine in that
//! word protects every call, present and future, and costs the calls nothing.
//!
//! Owner: any thread. It must not know which code calls Python.
//!
//! Source: Itanium C++ ABI, "Exception Handling", 1.3.2 (forced unwinding) and 1.6.3 (personality routines); glibc's
//! `nptl/unwind.c`; LLVM's `TargetLoweringObjectFileELF::emitPersonalityValue`.

// 32-bit ARM has a different kind of unwind tables. On the other systems the end of a thread unwinds nothing.
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
