//! Tunes the C library's heap, from which Python (except in free-threaded builds) takes every buffer of more than 512
//! bytes.
//!
//! Source: `mallopt(3)`, `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD`.

use std::hint::black_box;

/// The length of the block that is freed once to make the heap keep memory. The block is never written to, so it does
/// not take physical memory.
const FREED_LEN: usize = 1024 * 1024;

/// Makes the process keep freed buffers of up to a megabyte each (2 MiB in all), instead of returning them to the
/// system after every message.
///
/// glibc returns the top of its heap to the system as soon as 128 KiB (`M_TRIM_THRESHOLD`) are free there. For the next
/// large buffer it gets the memory again, with one page fault per 4 KiB. That took half of the time of an echo of 100
/// KiB over asyncio's streams. A block that is longer than another limit, `M_MMAP_THRESHOLD`, has a mapping of its own.
/// When a program frees such a block, glibc raises this limit to the length of the block, and the other one to twice
/// that length. So this function allocates and frees such a block. It has no effect if the user has set the limits
/// (`MALLOC_TRIM_THRESHOLD_`), or with another C library.
pub fn keep_freed_buffers() {
    // SAFETY: malloc may be called at any time, and free accepts its result, even if that is null. black_box prevents
    // the compiler from optimizing both calls away.
    unsafe { libc::free(black_box(libc::malloc(FREED_LEN))) };
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    /// The bit with which glibc marks a block that has its own mapping, in the word before the block (`IS_MMAPPED` in
    /// malloc.c).
    const IS_MAPPED: usize = 2;

    #[test]
    fn large_blocks_come_from_the_heap_afterwards() {
        keep_freed_buffers();
        // SAFETY: malloc's header is the word before the block. The block is freed once.
        let header = unsafe {
            let block = black_box(libc::malloc(FREED_LEN / 2));
            assert!(!block.is_null());
            let header = block.cast::<usize>().sub(1).read();
            libc::free(block);
            header
        };
        assert_eq!(header & IS_MAPPED, 0);
    }
}
