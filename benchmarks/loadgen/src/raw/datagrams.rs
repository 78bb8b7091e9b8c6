//! The UDP server: one recvmmsg receives the datagrams that have arrived (up to 64), and one sendmmsg sends the
//! replies.

use std::io;
use std::mem;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;

use super::announce;
use super::epoll::{Epoll, check};
use crate::target::Target;

const BATCH: usize = 64;
const DATAGRAM_LEN: usize = 65_536;

/// Buffers for a batch. The message headers point into the heap memory of the other members, which never moves.
struct Batch {
    headers: Vec<libc::mmsghdr>,
    pieces: Vec<libc::iovec>,
    addresses: Vec<libc::sockaddr_storage>,
    _bytes: Vec<u8>,
}

impl Batch {
    fn new() -> Self {
        let mut bytes = vec![0_u8; BATCH * DATAGRAM_LEN];
        // SAFETY: for both C structs, a value whose bytes are all zero is valid.
        let (mut headers, mut addresses): (Vec<libc::mmsghdr>, Vec<libc::sockaddr_storage>) =
            unsafe { (vec![mem::zeroed(); BATCH], vec![mem::zeroed(); BATCH]) };
        let mut pieces: Vec<libc::iovec> = bytes
            .chunks_exact_mut(DATAGRAM_LEN)
            .map(|chunk| libc::iovec {
                iov_base: chunk.as_mut_ptr().cast(),
                iov_len: chunk.len(),
            })
            .collect();
        for ((header, piece), address) in headers.iter_mut().zip(&mut pieces).zip(&mut addresses) {
            header.msg_hdr.msg_iov = piece;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_name = (&raw mut *address).cast();
        }
        Self {
            headers,
            pieces,
            addresses,
            _bytes: bytes,
        }
    }

    /// Receives the datagrams that have arrived (up to a batch) and sends them back. Replies that the socket does not
    /// take are lost, as on any network.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most 64 messages of 64 KiB
    fn echo(&mut self, socket: &UdpSocket) -> io::Result<()> {
        for (header, piece) in self.headers.iter_mut().zip(&mut self.pieces) {
            header.msg_hdr.msg_namelen = mem::size_of_val(&self.addresses[0]) as libc::socklen_t;
            piece.iov_len = DATAGRAM_LEN;
        }
        let fd = socket.as_raw_fd();
        // SAFETY: there are as many headers as the count says, and they point to live buffers of the lengths that
        // they state.
        let received = check(unsafe {
            libc::recvmmsg(
                fd,
                self.headers.as_mut_ptr(),
                BATCH as libc::c_uint,
                0,
                std::ptr::null_mut(),
            )
        })? as usize;
        for (header, piece) in self.headers.iter().zip(&mut self.pieces).take(received) {
            piece.iov_len = header.msg_len as usize;
        }
        let mut sent = 0;
        while sent < received {
            // SAFETY: as above. `sent` is less than `received`, so the remaining headers are in the batch, too.
            let outcome = check(unsafe {
                libc::sendmmsg(
                    fd,
                    self.headers.as_mut_ptr().add(sent),
                    (received - sent) as libc::c_uint,
                    0,
                )
            });
            match outcome {
                Ok(count) => sent += count as usize,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(_) => sent += 1, // the error belongs to this peer only, which may be gone
            }
        }
        Ok(())
    }
}

/// Prints the address, then serves until stdin is closed.
///
/// # Errors
/// If the socket or the poller fails.
pub(super) fn run(address: SocketAddr) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(address)?;
    socket.set_nonblocking(true)?;
    let mut epoll = Epoll::new()?;
    epoll.watch_readable(socket.as_raw_fd())?;
    announce(&Target::Inet(socket.local_addr()?), None)?;
    let mut batch = Batch::new();
    let mut ready = Vec::new();
    while epoll.wait(&mut ready)? {
        if ready.is_empty() {
            continue;
        }
        match batch.echo(&socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Not expected: Linux reports a refusal only on a connected socket.
            Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {}
            outcome => outcome?,
        }
    }
    Ok(())
}
