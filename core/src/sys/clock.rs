//! The monotonic clock, in nanoseconds. Timers and `loop.time()` use only this clock. CPython reads the same one for
//! `time.monotonic()`, so deadlines that are computed in Python and in Rust can be compared.
//!
//! Any thread may read it.

/// The clock CPython uses for `time.monotonic()`.
///
/// On Apple systems that is `mach_absolute_time`, which `CLOCK_UPTIME_RAW` reads. This clock stands still while the
/// machine sleeps. (The `CLOCK_MONOTONIC` of Apple systems goes on.)
#[cfg(target_vendor = "apple")]
const MONOTONIC: libc::clockid_t = libc::CLOCK_UPTIME_RAW;
#[cfg(not(target_vendor = "apple"))]
const MONOTONIC: libc::clockid_t = libc::CLOCK_MONOTONIC;

/// A clock with the value that `MONOTONIC` had at the kernel's last tick. The value is up to some milliseconds old, and
/// cheaper to read.
#[cfg(any(target_os = "linux", target_os = "android"))]
const COARSE: libc::clockid_t = libc::CLOCK_MONOTONIC_COARSE;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const COARSE: libc::clockid_t = MONOTONIC;

const NS_PER_S: u64 = 1_000_000_000;

/// Nanoseconds on the monotonic clock, counted from a point fixed at boot. The value never decreases.
///
/// 64 bits of nanoseconds last for 584 years of uptime.
///
/// Source: `clock_gettime(2)`; CPython `Python/pytime.c`.
#[inline]
#[must_use]
pub fn now_ns() -> u64 {
    read_ns(MONOTONIC)
}

/// Like `now_ns`, but with the resolution of the kernel's tick (1 to 10 ms) on systems where that is cheaper. The
/// result lags behind `now_ns`, so use it only for durations that are much longer than a tick.
#[inline]
#[must_use]
pub fn coarse_ns() -> u64 {
    read_ns(COARSE)
}

/// The CPU time of this thread in nanoseconds, from the clock of `time.thread_time()`.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    read_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The largest error of a duration that is measured with two readings of `coarse_ns`.
///
/// Source: `clock_getres(2)`.
#[must_use]
pub fn coarse_resolution_ns() -> u64 {
    let mut resolution = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: as in `read_ns`.
    unsafe { libc::clock_getres(COARSE, &raw mut resolution) };
    resolution.tv_sec as u64 * NS_PER_S + resolution.tv_nsec as u64
}

/// A count that rises at a steady rate, read with one instruction if the processor has one for it. Its unit is unknown,
/// one processor may be a little behind another, and the count may restart while the machine sleeps. So use it only to
/// divide a longer period into parts, and to find out which share of the period each part has taken.
///
/// Source: Intel SDM, volume 3, "Time-stamp counter"; Arm ARM, `CNTVCT_EL0`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[must_use]
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 has the instruction, which only reads.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// See the function for `x86_64`.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
#[must_use]
pub fn ticks() -> u64 {
    let count: u64;
    // SAFETY: programs may read this register; the C library's clocks do it too.
    unsafe {
        std::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack, preserves_flags))
    };
    count
}

/// See the function for `x86_64`.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
#[must_use]
pub fn ticks() -> u64 {
    now_ns()
}

#[inline]
fn read_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a live timespec that the call fills. The call can fail only for an unknown clock or a bad
    // pointer, and neither is possible here.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    // The clocks start at zero, at boot or with the thread, so neither field is ever negative.
    now.tv_sec as u64 * NS_PER_S + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{coarse_ns, coarse_resolution_ns, now_ns, ticks};

    #[test]
    fn the_coarse_clock_is_behind_and_follows() {
        let first = coarse_ns();
        assert!(first <= now_ns());
        while coarse_ns() == first {
            std::hint::spin_loop();
        }
        assert!(coarse_ns() - first >= coarse_resolution_ns() / 2);
    }

    #[test]
    fn ticks_rise_at_a_steady_rate() {
        let wait = |duration_ns| {
            let (started, started_ns) = (ticks(), now_ns());
            while now_ns() - started_ns < duration_ns {
                std::hint::spin_loop();
            }
            let took_ns = now_ns() - started_ns;
            (ticks() - started) as f64 / took_ns as f64
        };
        // An attempt also fails if another thread runs between the readings of the two clocks. So a failed attempt
        // proves nothing, and one good attempt is enough.
        let is_steady = |_| (wait(2_000_000) / wait(8_000_000) - 1.0).abs() < 0.05;
        assert!((0..50).any(is_steady));
    }

    #[test]
    fn never_goes_back() {
        let mut last = now_ns();
        for _ in 0..10_000 {
            let now = now_ns();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn counts_nanoseconds_like_the_standard_library() {
        // The interval measured here lies inside one interval of the standard library's clock, and contains another.
        // So the test does not depend on how long anything takes.
        let outer = Instant::now();
        let first = now_ns();
        let inner = Instant::now();
        while inner.elapsed().as_micros() < 200 {
            std::hint::spin_loop();
        }
        let inner_ns = inner.elapsed().as_nanos();
        let own_ns = u128::from(now_ns() - first);
        let outer_ns = outer.elapsed().as_nanos();
        assert!(inner_ns <= own_ns, "{inner_ns} > {own_ns}");
        assert!(own_ns <= outer_ns, "{own_ns} > {outer_ns}");
    }
}
