//! A BIO of our own, through which OpenSSL reads ciphertext from our buffers and writes ciphertext to them.
//!
//! ```text
//!   `incoming`, then lent ciphertext --> read()  [ SSL ]  write() --> the window, then `outgoing`
//! ```
//!
//! Ciphertext that has just been received is lent for the duration of one call, and only what OpenSSL did not read is
//! copied. Ciphertext that OpenSSL writes goes to the *window*, a `bytes` object that is passed on without a copy.
//!
//! OpenSSL and the connection's `Direct` (`direct`) each hold a reference to the BIO. So after the transport was freed,
//! the `ssl.SSLObject` can still read what is left in the buffers. A lock protects the buffers, because a program may
//! use that object in another thread.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{ptr, slice};

use super::openssl::{Bio, OpenSsl};

/// `BIO_TYPE_SOURCE_SINK`: a BIO that is the end of a chain.
pub(super) const TYPE_SOURCE_SINK: c_int = 0x0400;
/// `BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY`: there is nothing to read yet.
const RETRY_READ: c_int = 0x01 | 0x08;
/// `BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY`: all flags that a call may set.
const RETRY_ANY: c_int = 0x07 | 0x08;
const CTRL_EOF: c_int = 2;
const CTRL_PENDING: c_int = 10;
const CTRL_FLUSH: c_int = 11;
const CTRL_WPENDING: c_int = 13;
/// An empty buffer with more capacity than this is freed, so that idle connections need little memory.
const KEPT_CAPACITY: usize = 1024;

/// The buffers of one connection.
pub(super) struct Buffers {
    /// Received ciphertext. OpenSSL has already read the bytes before `incoming_start`.
    incoming: Vec<u8>,
    incoming_start: usize,
    /// Ciphertext that follows the content of `incoming`, in the caller's memory.
    lent: *const u8,
    lent_len: usize,
    /// Memory for the ciphertext that OpenSSL writes, and how much of it is filled.
    window: *mut u8,
    window_capacity: usize,
    window_len: usize,
    /// The ciphertext that did not fit into the window, or came while there was no window, and all that came after it.
    outgoing: Vec<u8>,
    /// True once memory for ciphertext could not be allocated. From then on, OpenSSL's reads and writes fail.
    pub(super) is_broken: bool,
}

// SAFETY: the pointers lead to memory that may be used from any thread. `lend` and `open_window` demand that the memory
// is valid until `withdraw` or `close_window` is called. Every use of the buffers holds the lock, so no other thread is
// using the memory while `withdraw` or `close_window` runs.
unsafe impl Send for Buffers {}

impl Buffers {
    pub(super) const fn new() -> Self {
        Self {
            incoming: Vec::new(),
            incoming_start: 0,
            lent: ptr::null(),
            lent_len: 0,
            window: ptr::null_mut(),
            window_capacity: 0,
            window_len: 0,
            outgoing: Vec::new(),
            is_broken: false,
        }
    }

    /// The number of bytes that OpenSSL has not read.
    pub(super) fn incoming_len(&self) -> usize {
        self.incoming.len() - self.incoming_start + self.lent_len
    }

    /// The number of bytes that OpenSSL has written and that are still here, in the window or in `outgoing`.
    pub(super) fn outgoing_len(&self) -> usize {
        self.outgoing.len() + self.window_len
    }

    /// Appends a copy of `data` to the ciphertext that OpenSSL can read. False if there is no memory.
    #[must_use]
    pub(super) fn keep(&mut self, data: &[u8]) -> bool {
        self.withdraw();
        self.append(data)
    }

    fn append(&mut self, data: &[u8]) -> bool {
        // If OpenSSL has read at least half of the buffer, remove that part. So each byte is moved at most once on
        // average.
        if self.incoming_start > 0 && self.incoming_start * 2 >= self.incoming.len() {
            self.incoming.drain(..self.incoming_start);
            self.incoming_start = 0;
        }
        if self.incoming.try_reserve(data.len()).is_err() {
            self.is_broken = true;
            return false;
        }
        self.incoming.extend_from_slice(data);
        true
    }

    /// Lets OpenSSL read `len` bytes at `memory`, once it has read the content of `incoming`.
    ///
    /// # Safety
    /// The memory must stay valid and unchanged until `withdraw`.
    pub(super) unsafe fn lend(&mut self, memory: *const u8, len: usize) {
        self.withdraw();
        self.lent = memory;
        self.lent_len = len;
    }

    /// Ends `lend`: copies what OpenSSL has not read.
    pub(super) fn withdraw(&mut self) {
        if self.lent_len > 0 {
            // SAFETY: `lend` demands that the memory is valid until now.
            let rest = unsafe { slice::from_raw_parts(self.lent, self.lent_len) };
            self.append(rest);
            self.lent_len = 0;
        }
        self.lent = ptr::null();
    }

    /// True if `open_window` may be called: there is no window, and no older ciphertext that must be sent first.
    pub(super) fn may_open_window(&self) -> bool {
        self.window.is_null() && self.outgoing.is_empty()
    }

    /// Lets OpenSSL write to `memory`.
    ///
    /// # Safety
    /// The memory must stay valid until `close_window`, and nothing else may use it until then.
    pub(super) unsafe fn open_window(&mut self, memory: *mut u8, capacity: usize) {
        self.window = memory;
        self.window_capacity = capacity;
        self.window_len = 0;
    }

    /// Ends `open_window`. Returns the number of bytes in the window.
    pub(super) fn close_window(&mut self) -> usize {
        let len = self.window_len;
        self.window = ptr::null_mut();
        self.window_capacity = 0;
        self.window_len = 0;
        len
    }

    /// Takes the ciphertext that is not in the window.
    pub(super) fn take_outgoing(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outgoing)
    }

    /// Moves unread ciphertext to `target`, up to `capacity` bytes. Returns the number of bytes.
    fn give(&mut self, target: *mut u8, capacity: usize) -> usize {
        let kept = &self.incoming[self.incoming_start..];
        if !kept.is_empty() {
            let len = kept.len().min(capacity);
            // SAFETY: OpenSSL guarantees `capacity` writable bytes at `target`, which is its own memory.
            unsafe { ptr::copy_nonoverlapping(kept.as_ptr(), target, len) };
            self.incoming_start += len;
            if self.incoming_start == self.incoming.len() {
                self.incoming_start = 0;
                self.incoming.clear();
                if self.incoming.capacity() > KEPT_CAPACITY {
                    self.incoming = Vec::new();
                }
            }
            return len;
        }
        let len = self.lent_len.min(capacity);
        if len > 0 {
            // SAFETY: as above, and `lend` demands that the lent memory is valid.
            unsafe {
                ptr::copy_nonoverlapping(self.lent, target, len);
                self.lent = self.lent.add(len);
            }
            self.lent_len -= len;
        }
        len
    }

    /// Takes `data`, which OpenSSL writes. False if there is no memory.
    fn take(&mut self, data: &[u8]) -> bool {
        if self.is_broken {
            return false;
        }
        if self.outgoing.is_empty() && data.len() <= self.window_capacity - self.window_len {
            // SAFETY: as checked, the window has space for `data` (if there is no window, only for empty data), and
            // `open_window` demands that its memory is valid and not used by other code.
            unsafe { ptr::copy_nonoverlapping(data.as_ptr(), self.window.add(self.window_len), data.len()) };
            self.window_len += data.len();
            return true;
        }
        if self.outgoing.try_reserve(data.len()).is_err() {
            self.is_broken = true;
            return false;
        }
        self.outgoing.extend_from_slice(data);
        true
    }
}

// OpenSSL calls `read`, `write`, `ctrl` and `destroy` only for BIOs that `Direct::new` has made. `Direct::new` needs
// the loaded `OpenSsl`, the table of OpenSSL's own functions. So in these four, `OpenSsl::loaded()` never returns None.

/// Locks the buffers. Code that holds the lock never calls Python and never panics.
pub(super) fn locked(buffers: &Mutex<Buffers>) -> MutexGuard<'_, Buffers> {
    buffers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// `bio` must be one of our BIOs, and live.
unsafe fn buffers_of<'a>(openssl: &OpenSsl, bio: *mut Bio) -> &'a Mutex<Buffers> {
    // SAFETY: each of our BIOs has data that `Direct::new` has set and that lives as long as the BIO.
    unsafe { &*(openssl.BIO_get_data)(bio).cast() }
}

pub(super) unsafe extern "C" fn read(bio: *mut Bio, target: *mut c_char, capacity: c_int) -> c_int {
    let Some(openssl) = OpenSsl::loaded() else {
        return -1;
    };
    // SAFETY: OpenSSL passes one of our BIOs, and memory of its own with `capacity` bytes.
    unsafe {
        (openssl.BIO_clear_flags)(bio, RETRY_ANY);
        let mut buffers = locked(buffers_of(openssl, bio));
        if buffers.is_broken {
            return -1;
        }
        match buffers.give(target.cast(), usize::try_from(capacity).unwrap_or(0)) {
            0 => {
                (openssl.BIO_set_flags)(bio, RETRY_READ);
                -1
            }
            len => len as c_int,
        }
    }
}

pub(super) unsafe extern "C" fn write(bio: *mut Bio, data: *const c_char, len: c_int) -> c_int {
    let Some(openssl) = OpenSsl::loaded() else {
        return -1;
    };
    let Ok(len_bytes) = usize::try_from(len) else {
        return -1;
    };
    // SAFETY: OpenSSL passes one of our BIOs and `len` readable bytes (null only for no bytes).
    unsafe {
        (openssl.BIO_clear_flags)(bio, RETRY_ANY);
        if len_bytes == 0 {
            return 0;
        }
        let data = slice::from_raw_parts(data.cast::<u8>(), len_bytes);
        if locked(buffers_of(openssl, bio)).take(data) {
            len
        } else {
            -1
        }
    }
}

pub(super) unsafe extern "C" fn ctrl(bio: *mut Bio, command: c_int, _: c_long, _: *mut c_void) -> c_long {
    let Some(openssl) = OpenSsl::loaded() else {
        return 0;
    };
    // SAFETY: OpenSSL passes one of our BIOs.
    let buffers = unsafe { locked(buffers_of(openssl, bio)) };
    match command {
        CTRL_FLUSH => 1,
        CTRL_EOF => c_long::from(buffers.is_broken),
        CTRL_PENDING => buffers.incoming_len() as c_long,
        CTRL_WPENDING => buffers.outgoing_len() as c_long,
        _ => 0,
    }
}

pub(super) unsafe extern "C" fn destroy(bio: *mut Bio) -> c_int {
    let Some(openssl) = OpenSsl::loaded() else {
        return 0;
    };
    // SAFETY: OpenSSL passes one of our BIOs when the last reference has gone. Its data is the Box that `Direct::new`
    // has stored, and is not used again.
    unsafe {
        drop(Box::from_raw(
            (openssl.BIO_get_data)(bio).cast::<Mutex<Buffers>>(),
        ));
    };
    1
}
