//! Creates client sockets. On Linux, connections to 127.0.0.1 have 100 source addresses, 127.0.0.1 to 127.0.0.100, so
//! that closed connections in `TIME_WAIT` do not use up the ports of one pair of addresses.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

const SOURCE_ADDRESSES: u64 = 100;

fn make(address: SocketAddr, ordinal: u64) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    #[cfg(target_os = "linux")]
    if address.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST) {
        // IP_BIND_ADDRESS_NO_PORT: choose the port at connect, when the destination is known.
        let on: libc::c_int = 1;
        // SAFETY: the descriptor is open, and the option is an int that outlives the call.
        let failed = unsafe {
            libc::setsockopt(
                std::os::fd::AsRawFd::as_raw_fd(&socket),
                libc::IPPROTO_IP,
                libc::IP_BIND_ADDRESS_NO_PORT,
                (&raw const on).cast(),
                4,
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        #[allow(clippy::cast_possible_truncation)] // below 100
        let last = 1 + (ordinal % SOURCE_ADDRESSES) as u8;
        socket.bind(&SocketAddr::from(([127, 0, 0, last], 0)).into())?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (ordinal, SOURCE_ADDRESSES, IpAddr::V4(Ipv4Addr::LOCALHOST));
    Ok(socket)
}

/// A connected stream in blocking mode.
///
/// # Errors
/// If socket, bind or connect fails, or if the connect takes longer than 10 s.
pub(crate) fn connect(address: SocketAddr, ordinal: u64) -> io::Result<std::net::TcpStream> {
    let socket = make(address, ordinal)?;
    socket.connect_timeout(&address.into(), Duration::from_secs(10))?;
    Ok(socket.into())
}

/// A nonblocking stream whose connect was started. On loopback the connect is usually complete already.
///
/// # Errors
/// If socket, bind or connect fails.
pub(crate) fn start_connect(address: SocketAddr, ordinal: u64) -> io::Result<std::net::TcpStream> {
    let socket = make(address, ordinal)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(socket.into())
}

/// Makes the stream send a reset when it is closed.
///
/// # Errors
/// If setsockopt fails.
pub(crate) fn reset_on_close(stream: &mio::net::TcpStream) -> io::Result<()> {
    socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO))
}

/// Raises the soft limit of open descriptors to the hard one. If that is not enough, opening a socket fails with
/// EMFILE.
pub(crate) fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is valid for reading and for writing.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}
