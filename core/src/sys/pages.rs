//! The pages of memory mappings, as far as systems differ.
//!
//! Owner: any thread. It must not know what the memory is for.
//!
//! Source: `mmap(2)`, `madvise(2)`.

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
