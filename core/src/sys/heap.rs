//! The C library's heap, from which Python takes every buffer above 512 bytes.
//!
//! Owner: any thread. Knows nothing of who allocates.
//!
//! Source: `mallopt(3)`, `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD`.

use std::hint::black_box;

/// The length of the block that is freed once to make the heap keep memory. The block is never written to, so it costs
/// no memory.
const FREED_LEN: usize = 1024 * 1024;

/// Lets freed buffers of up to a megabyte stay with the process, 2 MiB at most, instead of going back to the system
/// with every message.
///
/// glibc returns the top of its heap to the system as soon as 128 KiB are free there, and gets it again, with one page
/// fault per 4 KiB, for the next large buffer. That took half of the time of an echo of 100 KiB over asyncio's streams.
/// glibc raises both limits when a program first frees a larger block, and this function does that. Nothing changes if
/// the user has set the limits (`MALLOC_TRIM_THRESHOLD_`), or with another C library.
pub fn keep_freed_buffers() {
    // SAFETY: malloc may be called at any time, and free takes what it returned, null included. black_box keeps the
    // pair from being optimized away.
    unsafe { libc::free(black_box(libc::malloc(FREED_LEN))) };
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    /// glibc marks a block that has a mapping of its own in the word before the block (`IS_MMAPPED` in malloc.c).
    const IS_MAPPED: usize = 2;

    #[test]
    fn large_blocks_come_from_the_heap_afterwards() {
        keep_freed_buffers();
        // SAFETY: the block is one of malloc's, whose header is the word before it; it is freed once.
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
