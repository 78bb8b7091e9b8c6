//! Tests of the socket calls on real sockets. The standard library's results are the reference.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use nix::errno::Errno;

use super::*;
use crate::sys::poller::{Events, Interest, Poller, Token};

/// Far longer than any wait on a loaded machine. After a lost event the test fails instead of hanging.
const CAP_NS: Option<u64> = Some(60_000_000_000);

fn pair() -> (UnixStream, UnixStream) {
    let (left, right) = UnixStream::pair().unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    (left, right)
}

fn wait_readable(fd: RawFd) {
    let poller = Poller::new().unwrap();
    poller.add(fd, Token(0), Interest::READ).unwrap();
    assert_eq!(poller.wait(&mut Events::with_capacity(1), CAP_NS).unwrap(), 1);
}

fn receive(fd: RawFd, capacity: usize) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; capacity];
    // SAFETY: the vector is live, has the given length, and nothing else uses it.
    let count = unsafe { recv(fd, buffer.as_mut_ptr(), buffer.len()) }?;
    buffer.truncate(count);
    Ok(buffer)
}

/// What `Address::view` should return for this address of the standard library.
fn view_of(address: SocketAddr) -> AddressView<'static> {
    match address {
        SocketAddr::V4(address) => AddressView::V4 {
            ip: address.ip().octets(),
            port: address.port(),
        },
        SocketAddr::V6(address) => AddressView::V6 {
            ip: address.ip().octets(),
            port: address.port(),
            flowinfo: address.flowinfo(),
            scope_id: address.scope_id(),
        },
    }
}

#[test]
fn bytes_arrive_as_they_were_sent() {
    let (left, right) = pair();
    assert_eq!(
        receive(right.as_raw_fd(), 8).unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
    assert_eq!(send(left.as_raw_fd(), b"hello").unwrap(), 5);
    assert_eq!(receive(right.as_raw_fd(), 2).unwrap(), b"he");
    assert_eq!(receive(right.as_raw_fd(), 8).unwrap(), b"llo");
    drop(left);
    assert_eq!(receive(right.as_raw_fd(), 8).unwrap(), b"");
}

#[test]
fn borrowed_sockets_do_not_block_whatever_their_mode() {
    let (left, right) = UnixStream::pair().unwrap();
    let mut buffer = [0; 8];
    // SAFETY: the buffer is live, has the given length, and nothing else uses it.
    let mut receive_now = || unsafe { recv_now(right.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) };
    assert_eq!(receive_now().unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(send_now(left.as_raw_fd(), b"abc").unwrap(), 3);
    assert_eq!(receive_now().unwrap(), 3);
    let block = vec![0; 1 << 16];
    let error = loop {
        if let Err(error) = send_now(left.as_raw_fd(), &block) {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(right);
    assert_eq!(
        send_now(left.as_raw_fd(), b"x").unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
    assert!(is_stream(left.as_raw_fd()));
    assert!(!is_stream(-1));
}

#[test]
fn borrowed_datagrams_come_with_their_senders() {
    let (ours, theirs) = (
        UdpSocket::bind("127.0.0.1:0").unwrap(),
        UdpSocket::bind("127.0.0.1:0").unwrap(),
    );
    let mut buffer = [0; 4];
    // SAFETY: the buffer is live, has the given length, and nothing else uses it.
    let mut receive_now = || unsafe { recv_from_now(ours.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) };
    assert_eq!(receive_now().unwrap_err().kind(), ErrorKind::WouldBlock);
    theirs.send_to(b"abcdef", ours.local_addr().unwrap()).unwrap();
    let (len, sender) = receive_now().unwrap();
    assert_eq!((len, sender.view()), (4, view_of(theirs.local_addr().unwrap())));
    assert_eq!(&buffer, b"abcd");
    assert!(!is_stream(ours.as_raw_fd()));
    let (left, right) = pair();
    assert_eq!(send_now(left.as_raw_fd(), b"x").unwrap(), 1);
    // SAFETY: as above.
    let (len, sender) = unsafe { recv_from_now(right.as_raw_fd(), buffer.as_mut_ptr(), 4) }.unwrap();
    assert_eq!((len, sender.family()), (1, libc::AF_UNSPEC));
}

#[test]
fn a_send_to_a_full_socket_is_partial_and_the_next_would_block() {
    let (left, right) = pair();
    let data = vec![7; 8 << 20];
    let sent = send(left.as_raw_fd(), &data).unwrap();
    assert!(0 < sent && sent < data.len());
    assert_eq!(
        send(left.as_raw_fd(), &data).unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
    let slices = [IoSlice::new(&data)];
    assert_eq!(
        send_vectored(left.as_raw_fd(), &slices).unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
    let mut received = 0;
    while received < sent {
        received += receive(right.as_raw_fd(), 1 << 20).unwrap().len();
    }
    assert_eq!(received, sent);
}

#[test]
fn slices_arrive_in_their_order() {
    let (left, right) = pair();
    let slices = ["one ", "", "two ", "three"].map(|text| IoSlice::new(text.as_bytes()));
    assert_eq!(send_vectored(left.as_raw_fd(), &slices).unwrap(), 13);
    assert_eq!(receive(right.as_raw_fd(), 64).unwrap(), b"one two three");
    assert_eq!(send_vectored(left.as_raw_fd(), &[]).unwrap(), 0);
}

#[test]
fn no_more_slices_are_used_than_the_system_takes() {
    let (left, right) = pair();
    let bytes: Vec<u8> = (0..MAX_SLICES + 10).map(|index| (index % 251) as u8).collect();
    let slices: Vec<_> = bytes.chunks(1).map(IoSlice::new).collect();
    assert_eq!(send_vectored(left.as_raw_fd(), &slices).unwrap(), MAX_SLICES);
    assert_eq!(receive(right.as_raw_fd(), 4096).unwrap(), bytes[..MAX_SLICES]);
}

/// Whether a SIGPIPE is pending for the calling thread, which has blocked it.
fn is_sigpipe_pending() -> bool {
    // SAFETY: a signal set is plain data that the calls fill and read.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        assert_eq!(libc::sigpending(&raw mut set), 0);
        libc::sigismember(&raw const set, libc::SIGPIPE) == 1
    }
}

#[test]
fn a_peer_that_is_gone_raises_no_signal() {
    // The test runs in its own thread, which blocks the signal. If the signal were raised, it would stay pending, and
    // disappear with the thread.
    thread::spawn(|| {
        // SAFETY: as in `is_sigpipe_pending`. The last call changes only this thread's mask.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGPIPE);
            assert_eq!(
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()),
                0
            );
        }
        let (left, right) = pair();
        suppress_sigpipe(left.as_raw_fd()).unwrap();
        drop(right);
        assert_eq!(
            send(left.as_raw_fd(), b"x").unwrap_err().kind(),
            ErrorKind::BrokenPipe
        );
        let slices = [IoSlice::new(b"x")];
        assert_eq!(
            send_vectored(left.as_raw_fd(), &slices).unwrap_err().kind(),
            ErrorKind::BrokenPipe
        );
        assert!(!is_sigpipe_pending());
        // To check the test itself: a plain write does raise the signal on systems that do not suppress it per socket.
        #[cfg(not(target_vendor = "apple"))]
        {
            assert_eq!(nix::unistd::write(&left, b"x"), Err(Errno::EPIPE));
            assert!(is_sigpipe_pending());
        }
    })
    .join()
    .unwrap();
}

#[test]
fn interrupted_calls_are_repeated() {
    let mut answers = [-1, -1, 3].into_iter();
    let result = retried(|| {
        Errno::set_raw(libc::EINTR);
        answers.next().unwrap()
    });
    assert_eq!(result.unwrap(), 3);
    let mut calls = 0;
    let result = retried_int(|| {
        calls += 1;
        Errno::set_raw(libc::EAGAIN);
        -1
    });
    assert_eq!((result.unwrap_err().kind(), calls), (ErrorKind::WouldBlock, 1));
}

#[test]
fn accepted_connections_are_ready_to_use() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let fd = listener.as_raw_fd();
    assert_eq!(accept(fd).unwrap_err().kind(), ErrorKind::WouldBlock);
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, peer) = accept(fd).unwrap();
    assert_eq!(accept(fd).unwrap_err().kind(), ErrorKind::WouldBlock);

    let accepted = TcpStream::from(accepted);
    let fd = accepted.as_raw_fd();
    assert_eq!(receive(fd, 8).unwrap_err().kind(), ErrorKind::WouldBlock);
    // SAFETY: the call takes no pointers.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_GETFD) }, libc::FD_CLOEXEC);
    assert_eq!(peer.family(), libc::AF_INET);
    assert_eq!(peer.view(), view_of(client.local_addr().unwrap()));
    assert_eq!(peer_address(fd).unwrap(), peer);
    assert_eq!(
        local_address(fd).unwrap().view(),
        view_of(client.peer_addr().unwrap())
    );
}

#[test]
fn ipv6_addresses_are_complete() {
    let Ok(listener) = TcpListener::bind("[::1]:0") else {
        // This machine has no IPv6. The tests of `address` still cover how IPv6 addresses are parsed.
        return;
    };
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (_accepted, peer) = accept(listener.as_raw_fd()).unwrap();
    assert_eq!(peer.family(), libc::AF_INET6);
    assert_eq!(peer.view(), view_of(client.local_addr().unwrap()));
}

#[test]
fn unix_sockets_have_a_path_or_nothing() {
    let path = std::env::temp_dir().join(format!("grapeshot-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let client = UnixStream::connect(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let (accepted, peer) = accept(listener.as_raw_fd()).unwrap();
    let expected = AddressView::Unix(path.as_os_str().as_encoded_bytes());
    assert_eq!(peer.view(), AddressView::Unnamed);
    assert_eq!(local_address(accepted.as_raw_fd()).unwrap().view(), expected);
    assert_eq!(peer_address(client.as_raw_fd()).unwrap().view(), expected);
    assert_eq!(
        local_address(client.as_raw_fd()).unwrap().view(),
        AddressView::Unnamed
    );
}

#[cfg(any(target_os = "linux", target_os = "android"))]
#[test]
fn abstract_names_are_kept_whole() {
    use std::os::linux::net::SocketAddrExt;

    let name = format!("grapeshot\0{}\0", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let bound = local_address(listener.as_raw_fd()).unwrap();
    assert_eq!(bound.view(), AddressView::Unix(format!("\0{name}").as_bytes()));
    assert_eq!(bound.family(), libc::AF_UNIX);
}

#[test]
fn addresses_need_a_socket_and_a_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(
        peer_address(listener.as_raw_fd()).unwrap_err().kind(),
        ErrorKind::NotConnected
    );
    let waker = crate::sys::waker::Waker::new().unwrap();
    assert_eq!(
        local_address(waker.fd()).unwrap_err().raw_os_error(),
        Some(libc::ENOTSOCK)
    );
    assert_eq!(local_address(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
}

#[test]
fn the_writing_half_closes_alone() {
    let (left, mut right) = pair();
    shutdown_write(left.as_raw_fd()).unwrap();
    assert_eq!(receive(right.as_raw_fd(), 8).unwrap(), b"");
    right.write_all(b"still here").unwrap();
    assert_eq!(receive(left.as_raw_fd(), 64).unwrap(), b"still here");
    assert_eq!(
        send(left.as_raw_fd(), b"x").unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );

    let unconnected = UdpSocket::bind("127.0.0.1:0").unwrap();
    let error = shutdown_write(unconnected.as_raw_fd()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotConnected);
}

#[test]
fn nodelay_is_for_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert!(!client.nodelay().unwrap());
    set_nodelay(client.as_raw_fd()).unwrap();
    assert!(client.nodelay().unwrap());
    let (left, _right) = pair();
    set_nodelay(left.as_raw_fd()).unwrap_err();
}

#[test]
fn an_error_is_taken_once() {
    // This port was free a moment ago, so the datagram is refused.
    let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(free).unwrap();
    assert!(take_error(socket.as_raw_fd()).unwrap().is_none());
    socket.send(b"anyone?").unwrap();
    wait_readable(socket.as_raw_fd());
    let error = take_error(socket.as_raw_fd()).unwrap().unwrap();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert!(take_error(socket.as_raw_fd()).unwrap().is_none());
    assert_eq!(take_error(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
}

#[test]
fn a_reset_reaches_the_reader() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _peer) = accept(listener.as_raw_fd()).unwrap();
    client.write_all(b"unread").unwrap();
    wait_readable(accepted.as_raw_fd());
    // If a socket is closed while it has unread data, the connection is reset.
    drop(accepted);
    let error = client.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    client.shutdown(Shutdown::Both).unwrap_err();
}
