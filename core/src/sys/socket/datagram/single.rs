//! One `recvfrom(2)` for each datagram, for systems other than Linux and Android.

use std::io;
use std::os::fd::RawFd;

use super::super::address::Address;
use super::super::recv_from_now;
use super::Batch;

/// See [`super::recv_batch`].
#[inline]
pub(super) fn receive(
    fd: RawFd,
    buffer: &mut [u8],
    slot_len: usize,
    limit: usize,
    mut each: impl FnMut(&[u8], Address),
) -> io::Result<Batch> {
    let mut is_first = true;
    for slot in buffer.chunks_exact_mut(slot_len).take(limit) {
        // SAFETY: the slot is live, has the given length, and is borrowed for the call.
        match unsafe { recv_from_now(fd, slot.as_mut_ptr(), slot.len()) } {
            Ok((len_bytes, sender)) => {
                each(&slot[..len_bytes], sender);
                is_first = false;
            }
            Err(error) if is_first => return Err(error),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => {
                return Ok(Batch { error: Some(error) });
            }
        }
    }
    Ok(Batch { error: None })
}
