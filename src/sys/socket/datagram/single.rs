//! One `recvfrom(2)` per datagram, until nothing more is there: for systems without `recvmmsg`.

use std::io;
use std::os::fd::RawFd;

use super::super::address::Address;
use super::{Batch, recv_from};

/// See [`super::recv_batch`].
#[inline]
pub(super) fn receive(
    fd: RawFd,
    buffer: &mut [u8],
    slot_len: usize,
    limit: usize,
    mut each: impl FnMut(&[u8], Address),
) -> io::Result<Batch> {
    let mut count = 0;
    for slot in buffer.chunks_exact_mut(slot_len).take(limit) {
        match recv_from(fd, slot) {
            Ok((len_bytes, sender)) => {
                each(&slot[..len_bytes], sender);
                count += 1;
            }
            Err(error) if count == 0 => return Err(error),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => {
                let error = Some(error);
                return Ok(Batch { count, error });
            }
        }
    }
    Ok(Batch { count, error: None })
}
