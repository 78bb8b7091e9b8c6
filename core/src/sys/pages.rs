//! Memory mappings: reserving addresses, making them accessible, giving memory back, guards, and counting mappings. Any
//! thread may call these functions.
//!
//! Source: `mmap(2)`, `madvise(2)`, `proc_sys_vm(5)`.

use std::io;
use std::ptr;

/// The flag with which `mmap(2)` reserves no swap space for the addresses. FreeBSD and its relatives never reserve
/// swap space.
#[cfg(not(any(target_os = "freebsd", target_os = "dragonfly")))]
pub(crate) const NO_RESERVE: libc::c_int = libc::MAP_NORESERVE;
#[cfg(any(target_os = "freebsd", target_os = "dragonfly"))]
pub(crate) const NO_RESERVE: libc::c_int = 0;

/// Asks the system to use only small pages for `len_bytes` from `start`. With huge pages a stack that uses 2 KiB would
/// take 2 MiB. This does nothing on systems that have no huge pages or do not offer the choice.
///
/// # Safety
/// The range belongs to a mapping of the caller.
pub unsafe fn refuse_huge_pages(start: usize, len_bytes: usize) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    // SAFETY: by the contract; the advice does not change the content. A kernel without huge pages refuses it, which
    // does not matter.
    unsafe {
        libc::madvise(start as *mut libc::c_void, len_bytes, libc::MADV_NOHUGEPAGE);
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (start, len_bytes);
}

/// The length of a page.
pub(crate) fn page_len() -> usize {
    // SAFETY: the call takes an integer.
    let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(len).unwrap_or(4096)
}

/// Reserves `len_bytes` of addresses, which cannot be accessed yet. Returns the first address.
pub(crate) fn reserve(len_bytes: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | NO_RESERVE;
    // SAFETY: this makes a new mapping at an address that the kernel chooses.
    let mapping = unsafe { libc::mmap(ptr::null_mut(), len_bytes, libc::PROT_NONE, flags, -1, 0) };
    if mapping == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(mapping as usize)
}

/// Gives back addresses that `reserve` has returned.
///
/// # Safety
/// The range belongs to a mapping of the caller, and nothing uses it any more.
pub(crate) unsafe fn release(start: usize, len_bytes: usize) {
    if len_bytes > 0 {
        // SAFETY: by the contract. The call can fail only if it would have to split a mapping. Then the addresses are
        // lost, with no other effect.
        unsafe { libc::munmap(start as *mut libc::c_void, len_bytes) };
    }
}

/// Makes reserved addresses readable and writable. The system provides memory for a page when it is first used.
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

/// Makes addresses inaccessible again.
///
/// # Safety
/// The range belongs to a mapping of the caller, and nothing uses it.
pub(crate) unsafe fn close(start: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: by the contract.
    match unsafe { libc::mprotect(start as *mut libc::c_void, len_bytes, libc::PROT_NONE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the memory of a range back to the system. The addresses and the guards in the range stay. On Linux the content
/// becomes zero; other systems may keep it until they need the memory.
///
/// # Safety
/// The range belongs to a private anonymous mapping of the caller, and its content is not needed.
pub(crate) unsafe fn discard(start: usize, len_bytes: usize) {
    // SAFETY: by the contract. If the system refuses, the memory stays in use, which does no harm.
    unsafe { libc::madvise(start as *mut libc::c_void, len_bytes, libc::MADV_DONTNEED) };
}

/// `MADV_GUARD_INSTALL`, which libc does not have yet.
#[cfg(any(target_os = "linux", target_os = "android"))]
const GUARD_INSTALL: libc::c_int = 102;

/// Makes every access to the range cause a fault, although the mapping still allows access. The mapping is not split.
/// Only Linux from 6.13 on can do this. Returns false, and changes nothing, if the system cannot do it here.
///
/// # Safety
/// The range belongs to a private anonymous mapping of the caller, and nothing uses it.
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

/// Whether `install_guard` works in this process. A sandbox may accept advice that it does not know, and ignore it. So
/// this checks that a page with a guard cannot be populated.
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
            // SAFETY: the range is the mapping made above, and nothing else uses it.
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
    /// The number of lines of `/proc/self/maps`.
    pub count: usize,
    /// The value of `vm.max_map_count`.
    pub limit: usize,
}

/// Counts the mappings of the process. This takes 0.15 ms for 300 mappings, and 50 ms for 60,000. Returns `None` if the
/// system does not limit the number of mappings, or does not report the count or the limit.
#[allow(clippy::naive_bytecount)] // the kernel takes far longer to write the lines than this takes to count them
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
            // SAFETY: the page is in the mapping made above.
            unsafe { open(start + index * page, page).unwrap() };
        }
        // The margin is for other tests, which make a few mappings at the same time.
        assert!(usage().count > before.count + 1500);
        // SAFETY: as above.
        unsafe { close(start, 2000 * page).unwrap() };
        assert!(usage().count < before.count + 500);
        // SAFETY: as above, and nothing uses it.
        unsafe { release(start, 2000 * page) };
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_discarded_page_is_zero() {
        let page = page_len();
        let start = reserve(2 * page).unwrap();
        // SAFETY: the range is the mapping made above.
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
