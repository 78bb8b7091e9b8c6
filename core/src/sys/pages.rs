//! Memory mappings: what differs between systems about their pages.
//!
//! Owner: any thread. Knows nothing of what the memory is for.
//!
//! Source: `mmap(2)`, `madvise(2)`.

/// The flag of `mmap(2)` for addresses that need no swap before they are used. FreeBSD and its
/// relatives never reserve any.
#[cfg(not(any(target_os = "freebsd", target_os = "dragonfly")))]
pub(crate) const NO_RESERVE: libc::c_int = libc::MAP_NORESERVE;
#[cfg(any(target_os = "freebsd", target_os = "dragonfly"))]
pub(crate) const NO_RESERVE: libc::c_int = 0;

/// Asks that `len_bytes` from `start` are backed by small pages only: a huge page would make a stack of which 2 KiB are
/// used take 2 MiB. A system without huge pages, or without the choice, does nothing.
///
/// # Safety
/// The range is a mapping of the caller's.
pub unsafe fn refuse_huge_pages(start: usize, len_bytes: usize) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    // SAFETY: by the contract; the advice changes no content. A kernel without huge pages refuses, which is as well.
    unsafe {
        libc::madvise(start as *mut libc::c_void, len_bytes, libc::MADV_NOHUGEPAGE);
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (start, len_bytes);
}
