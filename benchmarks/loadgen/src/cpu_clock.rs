//! CPU time of a process, in seconds with ns resolution, read exactly at the edges of the measured window.
//!
//! Source: `clock_getcpuclockid(3)`. /proc/<pid>/stat would round to 10 ms. The clock of another process is read only
//! on Linux; elsewhere `process_s` returns `None`.

#[cfg(target_os = "linux")]
pub(crate) fn process_s(pid: u32) -> Option<f64> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: `clock` is valid for writing; the call returns an error for an unknown pid.
    let failed = unsafe { libc::clock_getcpuclockid(libc::pid_t::try_from(pid).ok()?, &raw mut clock) };
    if failed != 0 { None } else { read_s(clock) }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn process_s(_pid: u32) -> Option<f64> {
    None
}

pub(crate) fn own_s() -> Option<f64> {
    read_s(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn read_s(clock: libc::clockid_t) -> Option<f64> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for writing.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    #[allow(clippy::cast_precision_loss)] // CPU seconds stay far below 2^53
    Some(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}
