//! Tests with datagrams over real sockets, for every implementation of `receive`.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use super::super::{AddressView, local_address, take_error};
use super::*;
use crate::sys::poller::{Events, Interest, Poller, Token};

/// Far longer than any wait on a loaded machine. After a lost event the test fails instead of hanging.
const CAP_NS: Option<u64> = Some(60_000_000_000);

/// A function that receives a batch. Each test runs with every implementation.
type Receive = fn(RawFd, &mut [u8], usize, usize, &mut dyn FnMut(&[u8], Address)) -> io::Result<Batch>;

fn ways() -> [(&'static str, Receive); 2] {
    [
        ("native", |fd, buffer, slot_len, limit, each| {
            recv_batch(fd, buffer, slot_len, limit, each)
        }),
        ("single", |fd, buffer, slot_len, limit, each| {
            single::receive(fd, buffer, slot_len, limit, each)
        }),
    ]
}

fn bound() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

fn wait_readable(socket: &impl AsRawFd) {
    let poller = Poller::new().unwrap();
    poller.add(socket.as_raw_fd(), Token(0), Interest::READ).unwrap();
    assert_eq!(poller.wait(&mut Events::with_capacity(1), CAP_NS).unwrap(), 1);
}

fn address_of(socket: &UdpSocket) -> Address {
    match socket.local_addr().unwrap() {
        SocketAddr::V4(address) => Address::v4(address.ip().octets(), address.port()),
        SocketAddr::V6(address) => Address::v6(
            address.ip().octets(),
            address.port(),
            address.flowinfo(),
            address.scope_id(),
        ),
    }
}

fn collect(
    receive: Receive,
    socket: &impl AsRawFd,
    slots: usize,
    slot_len: usize,
    limit: usize,
) -> io::Result<Vec<(Vec<u8>, Address)>> {
    let mut buffer = vec![0; slots * slot_len];
    let mut got = Vec::new();
    let batch = receive(
        socket.as_raw_fd(),
        &mut buffer,
        slot_len,
        limit,
        &mut |data, from| got.push((data.to_vec(), from)),
    )?;
    assert!(batch.error.is_none(), "{:?}", batch.error);
    Ok(got)
}

#[test]
fn a_batch_keeps_order_and_senders() {
    for (way, receive) in ways() {
        let (receiver, senders) = (bound(), [bound(), bound()]);
        let error = collect(receive, &receiver, 4, 64, 4).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{way}");
        let sent: Vec<_> = (0..5_usize)
            .map(|index| {
                let sender = &senders[index % 2];
                // The first datagram is empty, which is allowed.
                let data = vec![7; index];
                send_to(sender.as_raw_fd(), &data, &address_of(&receiver)).unwrap();
                (data, address_of(sender))
            })
            .collect();
        assert_eq!(collect(receive, &receiver, 4, 64, 3).unwrap(), sent[..3], "{way}");
        assert_eq!(collect(receive, &receiver, 4, 64, 9).unwrap(), sent[3..], "{way}");
    }
}

#[test]
fn a_batch_takes_as_many_datagrams_as_there_are_slots() {
    for (way, receive) in ways() {
        let (receiver, sender) = (bound(), bound());
        for _ in 0..2 * MAX_BATCH {
            send_to(sender.as_raw_fd(), b"datagram", &address_of(&receiver)).unwrap();
        }
        assert_eq!(collect(receive, &receiver, 3, 4, MAX_BATCH).unwrap().len(), 3);
        let cut = collect(receive, &receiver, MAX_BATCH, 4, MAX_BATCH).unwrap();
        assert_eq!(cut.len(), MAX_BATCH, "{way}");
        assert!(cut.iter().all(|(data, _)| data == b"data"), "{way}");
    }
    let receiver = bound();
    for (buffer_len, slot_len, limit) in [(0, 64, 4), (63, 64, 4), (64, 64, 0), (64, 0, 4)] {
        let mut buffer = vec![0; buffer_len];
        let error = recv_batch(receiver.as_raw_fd(), &mut buffer, slot_len, limit, |_, _| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn the_largest_datagram_fits() {
    for (way, receive) in ways() {
        let (receiver, sender) = (bound(), bound());
        let data: Vec<u8> = (0..65_507).map(|index| (index % 251) as u8).collect();
        send_to(sender.as_raw_fd(), &data, &address_of(&receiver)).unwrap();
        let got = collect(receive, &receiver, 1, INTERNET_SLOT_LEN, 1).unwrap();
        assert!(got == [(data.clone(), address_of(&sender))], "{way}");
        let error = send_to(sender.as_raw_fd(), &vec![0; 65_508], &address_of(&receiver)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
    }
}

#[test]
fn a_refusal_is_reported_once() {
    for (way, receive) in ways() {
        let socket = bound();
        // This port was free a moment ago, so the datagram is refused.
        let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        socket.connect(free).unwrap();
        socket.send(b"anyone?").unwrap();
        wait_readable(&socket);
        let error = collect(receive, &socket, 2, 64, 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{way}");
        let error = collect(receive, &socket, 2, 64, 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{way}");
        assert!(take_error(socket.as_raw_fd()).unwrap().is_none());
    }
}

#[test]
fn ipv6_addresses_are_complete() {
    let (Ok(receiver), Ok(sender)) = (UdpSocket::bind("[::1]:0"), UdpSocket::bind("[::1]:0")) else {
        return; // no IPv6 here
    };
    for (way, receive) in ways() {
        send_to(sender.as_raw_fd(), b"x", &address_of(&receiver)).unwrap();
        wait_readable(&receiver);
        let got = collect(receive, &receiver, 1, 64, 1).unwrap();
        assert_eq!(got, [(b"x".to_vec(), address_of(&sender))], "{way}");
    }
}

#[test]
fn unix_senders_have_their_path_or_nothing() {
    let folder = std::env::temp_dir().join(format!("grapeshot-datagram-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (path, other) = (folder.join("receiver"), folder.join("sender"));
    let receiver = UnixDatagram::bind(&path).unwrap();
    receiver.set_nonblocking(true).unwrap();
    let (named, unnamed) = (
        UnixDatagram::bind(&other).unwrap(),
        UnixDatagram::unbound().unwrap(),
    );
    let to = Address::unix(path.as_os_str().as_encoded_bytes()).unwrap();
    assert_eq!(to, local_address(receiver.as_raw_fd()).unwrap());
    for (way, receive) in ways() {
        send_to(named.as_raw_fd(), b"1", &to).unwrap();
        send_to(unnamed.as_raw_fd(), b"2", &to).unwrap();
        let got = collect(receive, &receiver, 2, 64, 2).unwrap();
        let views: Vec<_> = got
            .iter()
            .map(|(data, from)| (data.as_slice(), from.view()))
            .collect();
        let name = AddressView::Unix(other.as_os_str().as_encoded_bytes());
        assert_eq!(views, [(&b"1"[..], name), (b"2", AddressView::Unnamed)], "{way}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
