//! The streams that carry a load: TCP or a unix stream, with or without TLS.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream as BlockingTcp};
use std::os::unix::net::UnixStream as BlockingUnix;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use mio::event::Source;
use mio::net::{TcpStream, UnixStream};

use crate::sockets;
use crate::tls::{Context, Scratch, TlsStream};

pub(crate) const BUFFER_LEN: usize = 256 * 1024;
/// The longest plaintext of a TLS record (RFC 8446, 5.1).
pub(crate) const RECORD_LEN: usize = 16 * 1024;
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// A nonblocking stream under an edge-triggered poller.
pub(crate) trait Wire: Read + Write + Source {
    /// Whether there may be more to read, after a read of `count` bytes into a buffer of `buffer_len`.
    fn may_hold_more(&self, count: usize, buffer_len: usize) -> bool {
        count == buffer_len
    }
}

impl Wire for TcpStream {}
impl Wire for UnixStream {}

/// Connects. `upgrade` is an HTTP request that the server must answer with a change of protocol before the load begins.
///
/// # Errors
/// If the connect fails, or if the answer to the upgrade is wrong.
pub(crate) fn tcp(address: SocketAddr, ordinal: u64, upgrade: Option<&[u8]>) -> anyhow::Result<TcpStream> {
    let mut stream =
        sockets::connect(address, ordinal).with_context(|| format!("connection {ordinal} to {address}"))?;
    if let Some(request) = upgrade {
        switch_protocols(&mut stream, request).with_context(|| format!("upgrade of connection {ordinal}"))?;
    }
    stream.set_nonblocking(true)?;
    Ok(TcpStream::from_std(stream))
}

/// Sends the request and reads the head of its answer byte by byte, because the bytes after the head belong to the new
/// protocol.
fn switch_protocols(stream: &mut BlockingTcp, request: &[u8]) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(HANDSHAKE_WITHIN))?;
    stream.write_all(request)?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let first_line = String::from_utf8_lossy(&head);
    let first_line = first_line.lines().next().unwrap_or_default();
    ensure!(
        first_line.starts_with("HTTP/1.1 101 "),
        "the server said {first_line:?}"
    );
    Ok(())
}

/// # Errors
/// If the connect fails.
pub(crate) fn unix(path: &Path) -> anyhow::Result<UnixStream> {
    let stream = BlockingUnix::connect(path).with_context(|| path.display().to_string())?;
    stream.set_nonblocking(true)?;
    Ok(UnixStream::from_std(stream))
}

/// TLS clients of one context, which share one buffer for ciphertext.
pub(crate) struct TlsClient {
    context: Context,
    scratch: Scratch,
    coalesces: bool,
}

impl TlsClient {
    /// `coalesces`: send all records of a write in one call. OpenSSL itself uses one call per record.
    ///
    /// # Errors
    /// If there is no OpenSSL 3.
    pub(crate) fn new(coalesces: bool) -> anyhow::Result<Self> {
        Ok(Self {
            context: Context::client()?,
            // The buffers for plaintext (BUFFER_LEN) must be longer than this one by one record (`Session::open`).
            scratch: Rc::new(RefCell::new(vec![0; BUFFER_LEN - RECORD_LEN])),
            coalesces,
        })
    }

    /// A session on a socket, before its handshake.
    ///
    /// # Errors
    /// If OpenSSL runs out of memory.
    pub(crate) fn start<S: Read + Write>(&self, socket: S) -> anyhow::Result<TlsStream<S>> {
        TlsStream::new(socket, &self.context, &self.scratch, self.coalesces)
    }

    /// # Errors
    /// If the connect or the handshake fails.
    pub(crate) fn tcp(&self, address: SocketAddr, ordinal: u64) -> anyhow::Result<TlsStream<TcpStream>> {
        let stream: BlockingTcp = sockets::connect(address, ordinal)
            .with_context(|| format!("connection {ordinal} to {address}"))?;
        stream.set_read_timeout(Some(HANDSHAKE_WITHIN))?;
        let mut tls = self.start(stream)?;
        tls.establish()
            .with_context(|| format!("handshake {ordinal} with {address}"))?;
        Ok(tls.convert(|stream| {
            stream.set_nonblocking(true)?;
            Ok(TcpStream::from_std(stream))
        })?)
    }

    /// # Errors
    /// If the connect or the handshake fails.
    pub(crate) fn unix(&self, path: &Path) -> anyhow::Result<TlsStream<UnixStream>> {
        let stream = BlockingUnix::connect(path).with_context(|| path.display().to_string())?;
        stream.set_read_timeout(Some(HANDSHAKE_WITHIN))?;
        let mut tls = self.start(stream)?;
        tls.establish().with_context(|| path.display().to_string())?;
        Ok(tls.convert(|stream| {
            stream.set_nonblocking(true)?;
            Ok(UnixStream::from_std(stream))
        })?)
    }
}
