//! One `recvmmsg(2)` for all datagrams that have arrived (Linux, Android).
//!
//! The kernel writes the senders and lengths into arrays on the stack. Only the elements that are used are initialised.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;

use super::super::address::{Address, Storage};
use super::super::retried_int;
use super::{Batch, MAX_BATCH};

/// See [`super::recv_batch`].
#[inline]
pub(super) fn receive(
    fd: RawFd,
    buffer: &mut [u8],
    slot_len: usize,
    limit: usize,
    mut each: impl FnMut(&[u8], Address),
) -> io::Result<Batch> {
    let mut messages = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MAX_BATCH];
    let mut slices = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_BATCH];
    let mut senders = [const { MaybeUninit::<Storage>::uninit() }; MAX_BATCH];
    let limit = limit.min(MAX_BATCH);
    for (index, slot) in buffer.chunks_exact_mut(slot_len).take(limit).enumerate() {
        let slice = slices[index].write(libc::iovec {
            iov_base: slot.as_mut_ptr().cast(),
            iov_len: slot_len,
        });
        // SAFETY: `mmsghdr` is plain data. A value whose bytes are all zero is valid.
        let message = messages[index].write(unsafe { MaybeUninit::zeroed().assume_init() });
        message.msg_hdr.msg_iov = ptr::from_mut(slice);
        message.msg_hdr.msg_iovlen = 1;
        message.msg_hdr.msg_name = senders[index].write(Storage::new()).as_mut_ptr().cast();
        message.msg_hdr.msg_namelen = Storage::LEN;
    }
    let count = retried_int(|| {
        // SAFETY: the caller guarantees that the buffer has `limit` slots. So `limit` headers were initialised above,
        // and they live during the call, like the slots and senders that they point to.
        unsafe {
            libc::recvmmsg(
                fd,
                messages.as_mut_ptr().cast(),
                limit as libc::c_uint,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        }
    })?;
    for index in 0..count {
        // SAFETY: the first `limit` elements were initialised above, and the kernel has filled `count` of them.
        let (message, sender) = unsafe {
            (
                messages[index].assume_init_ref(),
                senders[index].assume_init_ref(),
            )
        };
        let start = index * slot_len;
        let len_bytes = slot_len.min(message.msg_len as usize);
        each(
            &buffer[start..start + len_bytes],
            sender.to_address(message.msg_hdr.msg_namelen),
        );
    }
    // The socket keeps an error that occurs after the first datagram, and the next call returns it.
    Ok(Batch { error: None })
}
