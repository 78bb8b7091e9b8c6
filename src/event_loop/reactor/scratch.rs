//! The loop's buffer for small reads.

use std::cell::Cell;

use grapeshot_core::sys::heap;

/// The length of the buffer.
const LEN: usize = 256 * 1024;

/// Allocated on first use. A nested use gets a buffer of its own.
pub(crate) struct Scratch(Cell<Vec<u8>>);

impl Scratch {
    pub(super) const fn new() -> Self {
        Self(Cell::new(Vec::new()))
    }

    /// Calls `read` with the buffer (256 KiB).
    #[inline]
    pub(crate) fn with<R>(&self, read: impl FnOnce(&mut [u8]) -> R) -> R {
        self.with_len(LEN, read)
    }

    /// `with` for `len_bytes` of the buffer, which grows if necessary. Pages that were never written take no memory.
    #[inline]
    pub(crate) fn with_len<R>(&self, len_bytes: usize, read: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut buffer = self.0.take();
        if buffer.len() < len_bytes {
            buffer = vec![0; len_bytes.max(LEN)];
            heap::keep_freed_buffers();
        }
        let result = read(&mut buffer[..len_bytes]);
        self.0.set(buffer);
        result
    }

    /// Frees the buffer.
    pub(super) fn free(&self) {
        self.0.take();
    }
}
