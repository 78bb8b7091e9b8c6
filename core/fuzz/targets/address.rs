//! Checks that a socket address returns the parts that it was made from. Also checks that the standard library parses
//! the text of an IPv6 address back to the same address, and that it accepts the same Unix names as this crate.
#![no_main]

use std::net::Ipv6Addr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;

use grapeshot_core::sys::socket::{Address, AddressView, ipv6_text};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    V4([u8; 4], u16),
    V6([u8; 16], u16, u32, u32),
    /// An IPv6 address that is mostly zeros, so its text contains `::`.
    Sparse(u16, u8, u16, u8),
    Unix(&'a [u8]),
}

fn check_v6(ip: [u8; 16], port: u16, flowinfo: u32, scope_id: u32) {
    let address = Address::v6(ip, port, flowinfo, scope_id);
    let expected = AddressView::V6 {
        ip,
        port,
        flowinfo,
        scope_id,
    };
    assert_eq!(address.view(), expected);
    assert_eq!(ipv6_text(ip).parse(), Ok(Ipv6Addr::from(ip)));
    assert!(address == address.clone());
}

fuzz_target!(|input: Input<'_>| {
    match input {
        Input::V4(ip, port) => {
            let address = Address::v4(ip, port);
            assert_eq!(address.view(), AddressView::V4 { ip, port });
            assert!(!format!("{address:?}").is_empty());
        }
        Input::V6(ip, port, flowinfo, scope_id) => check_v6(ip, port, flowinfo, scope_id),
        Input::Sparse(first, at, second, other) => {
            let mut segments = [0; 8];
            segments[usize::from(at % 8)] = first;
            segments[usize::from(other % 8)] = second;
            check_v6(
                Ipv6Addr::from(segments).octets(),
                first,
                second.into(),
                other.into(),
            );
        }
        Input::Unix(name) => {
            let known = match name.split_first() {
                Some((0, rest)) => SocketAddr::from_abstract_name(rest).is_ok(),
                Some(_) => {
                    use std::os::unix::ffi::OsStrExt;
                    SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name)).is_ok()
                }
                None => false,
            };
            let address = Address::unix(name);
            assert_eq!(address.is_some(), known);
            if let Some(address) = address {
                assert_eq!(address.view(), AddressView::Unix(name));
                assert!(!format!("{address:?}").is_empty());
            }
        }
    }
});
