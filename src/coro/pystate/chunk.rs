//! Root chunks of the data stack, the memory of Python frames. They are small and pooled. The interpreter's own chunks
//! take 16 KiB and a mapping each, which would be most of the memory of an idle coro.
//!
//! ```text
//!   block    | previous | size | top | data[0] (unused) | data[1] ...                             | tail        |
//!            '------- _PyStackChunk: frames, one after the other, up to `size` -------------------'-------------'
//! ```
//!
//! CPython never frees a root chunk. Frames that do not fit go to further chunks, which CPython allocates and frees
//! itself. The tail of a block holds the other data that a coro needs from its first run to its end, so that a coro
//! needs only one allocation.

use std::ffi::c_void;
use std::ptr;

use pyo3::ffi;

use super::common_offsets::{CHUNK_DATA, CHUNK_PREVIOUS, CHUNK_SIZE, CHUNK_TOP};
use super::field;

/// Space for about ten frames of ordinary functions, in addition to the tail. (Together with the allocator's own word
/// this is a multiple of 16.)
const BLOCK_LEN: usize = 1784;
/// The largest number of free chunks to keep for later coros.
const KEPT: usize = 1024;

/// The address of the first frame, and the end of the chunk.
///
/// # Safety
/// `chunk` was made by `take`.
pub(super) unsafe fn bounds(chunk: *mut u8) -> (*mut u8, *mut u8) {
    // The first word of a root chunk stays unused: CPython frees a chunk when the frame at its very start ends.
    // SAFETY: a chunk made by `take` has the size in its header.
    unsafe { (chunk.add(CHUNK_DATA + size_of::<usize>()), tail(chunk).cast()) }
}

/// The tail of the block that begins with a root chunk, aligned to 8 bytes.
///
/// # Safety
/// `chunk` was made by `take`.
pub(in crate::coro) unsafe fn tail(chunk: *mut u8) -> *mut c_void {
    // SAFETY: by the contract.
    unsafe { chunk.add(*field::<usize>(chunk, CHUNK_SIZE)).cast() }
}

/// The address of the first frame in a root chunk, computed from the tail of its block. The tail has `tail_len` bytes.
#[inline]
pub(in crate::coro) fn first_frame(tail: *mut c_void, tail_len: usize) -> *mut u8 {
    let chunk = tail.cast::<u8>().wrapping_sub(BLOCK_LEN - tail_len);
    chunk.wrapping_add(CHUNK_DATA + size_of::<usize>())
}

/// The first chunk of a chain.
///
/// # Safety
/// `chunk` is null or the innermost of a chain of live chunks.
#[inline]
pub(super) unsafe fn root(mut chunk: *mut u8) -> *mut u8 {
    // SAFETY: a live chunk has a header, and the first one's `previous` is null (contract).
    unsafe {
        while !chunk.is_null() {
            let previous: *mut u8 = *field(chunk, CHUNK_PREVIOUS);
            if previous.is_null() {
                break;
            }
            chunk = previous;
        }
    }
    chunk
}

/// The total length of a chunk and all chunks before it, in bytes.
///
/// # Safety
/// `chunk` is null or the innermost of a chain of live chunks.
pub(super) unsafe fn total_len(mut chunk: *mut u8) -> usize {
    let mut len = 0;
    while !chunk.is_null() {
        // SAFETY: a live chunk has a header, and the chain ends in null (contract).
        unsafe {
            len += *field::<usize>(chunk, CHUNK_SIZE);
            chunk = *field(chunk, CHUNK_PREVIOUS);
        }
    }
    len
}

/// The free blocks.
pub(in crate::coro) struct Chunks {
    /// The length of each block's tail, a multiple of 8.
    tail_len: usize,
    kept: Vec<*mut u8>,
}

impl Chunks {
    /// A pool of blocks with tails of `tail_len` bytes.
    pub(in crate::coro) const fn new(tail_len: usize) -> Self {
        assert!(tail_len.is_multiple_of(8) && tail_len < BLOCK_LEN / 2);
        Self {
            tail_len,
            kept: Vec::new(),
        }
    }

    /// An empty root chunk, or None if there is no memory.
    #[inline]
    pub(in crate::coro) fn take(&mut self) -> Option<*mut u8> {
        if let Some(chunk) = self.kept.pop() {
            return Some(chunk);
        }
        // SAFETY: a plain allocation, checked below; the header's fields are inside it.
        unsafe {
            let chunk = libc::malloc(BLOCK_LEN).cast::<u8>();
            if chunk.is_null() {
                return None;
            }
            *field::<usize>(chunk, CHUNK_PREVIOUS) = 0;
            *field::<usize>(chunk, CHUNK_SIZE) = BLOCK_LEN - self.tail_len;
            *field::<usize>(chunk, CHUNK_TOP) = 0;
            Some(chunk)
        }
    }

    /// Takes back the chunks of a coro that has ended. If the coro's frames were abandoned, there may be chunks after
    /// the root; they belong to the interpreter and go back to its arena allocator.
    ///
    /// # Safety
    /// `chunk` is the innermost chunk of a coro that has no live frames.
    #[inline]
    pub(in crate::coro) unsafe fn give(&mut self, mut chunk: *mut u8) {
        // SAFETY: the chain of a coro ends in a root chunk that `take` has made (contract).
        unsafe {
            loop {
                let previous: *mut u8 = *field(chunk, CHUNK_PREVIOUS);
                if previous.is_null() {
                    break;
                }
                free_later_chunk(chunk);
                chunk = previous;
            }
            *field::<usize>(chunk, CHUNK_TOP) = 0;
            if self.kept.len() < KEPT {
                self.kept.push(chunk);
            } else {
                libc::free(chunk.cast());
            }
        }
    }
}

#[cold]
unsafe fn free_later_chunk(chunk: *mut u8) {
    let mut arena = ffi::PyObjectArenaAllocator {
        ctx: ptr::null_mut(),
        alloc: None,
        free: None,
    };
    // SAFETY: the chunk came from the interpreter's arena allocator, with its size in the header.
    unsafe {
        ffi::PyObject_GetArenaAllocator(&raw mut arena);
        if let Some(free) = arena.free {
            free(arena.ctx, chunk.cast(), *field::<usize>(chunk, CHUNK_SIZE));
        }
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        for chunk in &self.kept {
            // SAFETY: made by `take`, and no coro uses it.
            unsafe { libc::free(chunk.cast()) };
        }
    }
}
