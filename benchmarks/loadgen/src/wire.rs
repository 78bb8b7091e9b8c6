//! What a load sends its bytes over: TCP or a unix stream, with or without TLS.

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
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// A nonblocking stream under an edge-triggered poller.
pub(crate) trait Wire: Read + Write + Source {
    /// May there be more to read, after a read of `count` into a buffer of that length?
    fn may_hold_more(&self, count: usize, buffer_len: usize) -> bool {
        count == buffer_len
    }
}

impl Wire for TcpStream {}
impl Wire for UnixStream {}

/// `upgrade`: the HTTP request that must be answered by a change of protocol before the connection is used.
///
/// # Errors
/// What connect says, and what is wrong with the answer.
pub(crate) fn tcp(address: SocketAddr, ordinal: u64, upgrade: Option<&[u8]>) -> anyhow::Result<TcpStream> {
    let mut stream =
        sockets::connect(address, ordinal).with_context(|| format!("connection {ordinal} to {address}"))?;
    if let Some(request) = upgrade {
        switch_protocols(&mut stream, request).with_context(|| format!("upgrade of connection {ordinal}"))?;
    }
    stream.set_nonblocking(true)?;
    Ok(TcpStream::from_std(stream))
}

/// Sends the request and reads the head of its answer, byte by byte: what follows belongs to the other protocol.
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
/// What connect says.
pub(crate) fn unix(path: &Path) -> anyhow::Result<UnixStream> {
    let stream = BlockingUnix::connect(path).with_context(|| path.display().to_string())?;
    stream.set_nonblocking(true)?;
    Ok(UnixStream::from_std(stream))
}

/// TLS clients of one context, which shares its room for ciphertext.
pub(crate) struct TlsClient {
    context: Context,
    scratch: Scratch,
    coalesces: bool,
}

impl TlsClient {
    /// `coalesces`: all records of a write leave in one call, instead of one call for each as OpenSSL itself does it.
    ///
    /// # Errors
    /// When there is no OpenSSL 3.
    pub(crate) fn new(coalesces: bool) -> anyhow::Result<Self> {
        Ok(Self {
            context: Context::client()?,
            scratch: Rc::new(RefCell::new(vec![0; BUFFER_LEN])),
            coalesces,
        })
    }

    /// A session on a socket, before its handshake.
    ///
    /// # Errors
    /// When OpenSSL has no memory.
    pub(crate) fn start<S: Read + Write>(&self, socket: S) -> anyhow::Result<TlsStream<S>> {
        TlsStream::new(socket, &self.context, &self.scratch, self.coalesces)
    }

    /// # Errors
    /// What connect and the handshake say.
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
    /// What connect and the handshake say.
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
