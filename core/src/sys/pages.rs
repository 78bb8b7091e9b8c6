//! The pages of memory mappings, as far as systems differ.
//!
//! Owner: any thread. It must not know what the memory is for.
//!
//! Source: `mmap(2)`, `madvise(2)`, `proc_sys_vm(5)`.

use std::io;
use std::ptr;

/// The flag of `mmap(2)` for addresses that need no swap before they are used. FreeBSD and its
/// relatives never reserve any.
#[cfg(not(any(target_os = "freebsd", target_os = "dragonfly")))]
pub(crate) const NO_RESERVE: libc::c_int = libc::MAP_NORESERVE;
#[cfg(any(target_os = "freebsd", target_os = "dragonfly"))]
pub(crate) const NO_RESERVE: libc::c_int = 0;

/// Asks the system to use only small pages for `len_bytes` from `start`. With a huge page, a stack that uses 2 KiB
/// would take 2 MiB. On a system without huge pages, or without that choice, this does nothing.
///
/// # Safety
/// The range belongs to a mapping of the caller.
pub unsafe fn refuse_huge_pages(start: usize, len_bytes: usize) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    // SAFETY: by the contract; the advice changes no content. A kernel without huge pages refuses, which is as well.
    unsafe {
        libc::madvise(start as *mut libc::c_void, len_bytes, libc::MADV_NOHUGEPAGE);
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (start, len_bytes);
}

/// The length of a page.
pub(crate) fn page_len() -> usize {
    // SAFETY: no memory is involved.
    let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(len).unwrap_or(4096)
}

/// Takes `len_bytes` of addresses, which nobody can access yet. Returns the first address.
pub(crate) fn reserve(len_bytes: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | NO_RESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapping = unsafe { libc::mmap(ptr::null_mut(), len_bytes, libc::PROT_NONE, flags, -1, 0) };
    if mapping == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(mapping as usize)
}

/// Gives addresses of `reserve` back.
///
/// # Safety
/// The range belongs to a mapping of the caller, and nobody uses it any more.
pub(crate) unsafe fn release(start: usize, len_bytes: usize) {
    if len_bytes > 0 {
        // SAFETY: by the contract. It can fail only where a mapping would have to be split: then addresses are lost,
        // and nothing else.
        unsafe { libc::munmap(start as *mut libc::c_void, len_bytes) };
    }
}

/// Makes addresses of `reserve` readable and writable. The system provides memory when a page is first used.
///
/// # Safety
/// The range belongs to a mapping of the caller.
pub(crate) unsafe fn open(start: usize, len_bytes: usize) -> io::Result<()> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: by the contract.
    match unsafe { libc::mprotect(start as *mut libc::c_void, len_bytes, access) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes the access away again.
///
/// # Safety
/// The range belongs to a mapping of the caller, and nobody uses it.
pub(crate) unsafe fn close(start: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: by the contract.
    match unsafe { libc::mprotect(start as *mut libc::c_void, len_bytes, libc::PROT_NONE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the memory of a range back to the system; its content becomes zero. Guards stay.
///
/// # Safety
/// The range belongs to a private anonymous mapping of the caller, and nobody needs its content.
pub(crate) unsafe fn discard(start: usize, len_bytes: usize) {
    // SAFETY: by the contract. A system that refuses keeps the memory, which is as well.
    unsafe { libc::madvise(start as *mut libc::c_void, len_bytes, libc::MADV_DONTNEED) };
}

/// `MADV_GUARD_INSTALL`, which libc does not have yet.
#[cfg(any(target_os = "linux", target_os = "android"))]
const GUARD_INSTALL: libc::c_int = 102;

/// Makes each access to a range fault although its mapping allows it, without splitting the mapping (Linux 6.13).
/// Returns false if the system cannot do that here; then nothing has changed.
///
/// # Safety
/// The range belongs to a private anonymous mapping of the caller, and nobody uses it.
pub(crate) unsafe fn install_guard(start: usize, len_bytes: usize) -> io::Result<bool> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    loop {
        // SAFETY: by the contract.
        if unsafe { libc::madvise(start as *mut libc::c_void, len_bytes, GUARD_INSTALL) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // An older kernel, or a locked mapping.
            Some(libc::EINVAL) => return Ok(false),
            _ => return Err(error),
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    {
        let _ = (start, len_bytes);
        Ok(false)
    }
}

/// Whether `install_guard` works in this process. A sandbox may accept advice that it does not know, so this looks
/// whether a page with a guard can be populated.
pub(crate) fn has_guards() -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        /// `MADV_POPULATE_READ`, which libc does not have on every target.
        const POPULATE_READ: libc::c_int = 22;
        static HAS_GUARDS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *HAS_GUARDS.get_or_init(|| {
            let page = page_len();
            let Ok(start) = reserve(page) else {
                return false;
            };
            // SAFETY: the mapping made above, which nobody uses.
            unsafe {
                let is_installed = open(start, page).is_ok()
                    && libc::madvise(start as *mut libc::c_void, page, POPULATE_READ) == 0
                    && matches!(install_guard(start, page), Ok(true));
                let has_guard =
                    is_installed && libc::madvise(start as *mut libc::c_void, page, POPULATE_READ) != 0;
                release(start, page);
                has_guard
            }
        })
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    false
}

/// How many mappings the process has, and how many the system allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingUsage {
    /// The lines of `/proc/self/maps`.
    pub count: usize,
    /// `vm.max_map_count`.
    pub limit: usize,
}

/// Counts the mappings of the process. It takes 0.15 ms for 300 of them, and 50 ms for 60,000. None if the
/// system has no such limit, or does not tell.
#[allow(clippy::naive_bytecount)] // the kernel takes far longer to write the lines than this to count them
pub fn mapping_usage() -> Option<MappingUsage> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use std::fs::{self, File};
        use std::io::Read;

        let limit = fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
        let limit = limit.trim().parse().ok()?;
        let mut maps = File::open("/proc/self/maps").ok()?;
        let mut count = 0;
        let mut buffer = [0; 8192];
        loop {
            match maps.read(&mut buffer) {
                Ok(0) => return Some(MappingUsage { count, limit }),
                Ok(len) => count += buffer[..len].iter().filter(|byte| **byte == b'\n').count(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn mappings_are_counted() {
        let page = page_len();
        let usage = || mapping_usage().unwrap();
        assert!(usage().limit > usage().count);
        let start = reserve(2000 * page).unwrap();
        let before = usage();
        for index in (0..2000).step_by(2) {
            // SAFETY: the mapping made above.
            unsafe { open(start + index * page, page).unwrap() };
        }
        // Other tests map and unmap a little meanwhile.
        assert!(usage().count > before.count + 1500);
        // SAFETY: as above.
        unsafe { close(start, 2000 * page).unwrap() };
        assert!(usage().count < before.count + 500);
        // SAFETY: as above, and nobody uses it.
        unsafe { release(start, 2000 * page) };
    }

    #[test]
    fn a_discarded_page_is_zero() {
        let page = page_len();
        let start = reserve(2 * page).unwrap();
        // SAFETY: the mapping made above.
        unsafe {
            open(start, 2 * page).unwrap();
            *(start as *mut u8) = 7;
            *((start + page) as *mut u8) = 8;
            discard(start, page);
            assert_eq!((*(start as *const u8), *((start + page) as *const u8)), (0, 8));
            release(start, 2 * page);
        }
    }
}
