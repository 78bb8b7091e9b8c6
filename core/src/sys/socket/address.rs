//! Socket addresses in the kernel's format, stored compactly.
//!
//! Every connection stores its peer's address for `get_extra_info`, and often its own address too. A `sockaddr_storage`
//! would take 128 bytes for each. Here an address of up to 28 bytes (IPv4 and IPv6) is stored inline, and a longer one
//! (most Unix paths) in a box of its exact length.
//!
//! Source: `ip(7)`, `ipv6(7)`, `unix(7)`.

use std::fmt;
use std::mem::{offset_of, size_of};
use std::net::{Ipv4Addr, Ipv6Addr};

use libc::{sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, sockaddr_un, socklen_t};

/// The longest address that is stored inline: a `sockaddr_in6`, the longer of the two internet addresses.
const INLINE_LEN: usize = size_of::<sockaddr_in6>();

/// Whether the system has an abstract namespace: names of Unix sockets that begin with a NUL and are not in the file
/// system.
const HAS_ABSTRACT_NAMES: bool = cfg!(any(target_os = "linux", target_os = "android"));

/// Space for any address. It consists of plain bytes, so it can be read no matter what the kernel wrote.
#[repr(C, align(8))]
pub(super) struct Storage([u8; size_of::<sockaddr_storage>()]);

impl Storage {
    /// The length to tell the kernel.
    pub(super) const LEN: socklen_t = size_of::<sockaddr_storage>() as socklen_t;

    pub(super) const fn new() -> Self {
        Self([0; size_of::<sockaddr_storage>()])
    }

    /// The pointer for the kernel, which may write [`Self::LEN`] bytes there.
    pub(super) fn as_mut_ptr(&mut self) -> *mut sockaddr {
        self.0.as_mut_ptr().cast()
    }

    /// The socket address that the kernel wrote. `len` is the length that the kernel reported, which is larger than the
    /// space if the kernel had to truncate the address.
    pub(super) fn to_address(&self, len: socklen_t) -> Address {
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(self.0.len());
        Address::new(&self.0[..len])
    }
}

/// The address of a socket of any family.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    repr: Repr,
}

#[derive(Clone, PartialEq, Eq)]
enum Repr {
    /// The bytes after the first `len` are zero.
    Inline {
        len: u8,
        bytes: [u8; INLINE_LEN],
    },
    Boxed(Box<[u8]>),
}

/// The parts of an [`Address`]. Numbers are in host byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressView<'a> {
    /// An IPv4 address.
    V4 {
        /// The bytes in network order.
        ip: [u8; 4],
        /// The TCP or UDP port.
        port: u16,
    },
    /// An IPv6 address.
    V6 {
        /// The bytes in network order.
        ip: [u8; 16],
        /// The TCP or UDP port.
        port: u16,
        /// Traffic class and flow label.
        flowinfo: u32,
        /// The interface of a link-local address, or 0.
        scope_id: u32,
    },
    /// The bytes of a path without the terminating NUL, or of a name in Linux's abstract namespace. Such a name begins
    /// with a NUL, and may contain more of them.
    Unix(&'a [u8]),
    /// The address of a Unix socket that is not bound, or no address at all.
    Unnamed,
    /// An address of another family, see [`Address::family`], or an internet address that is too short.
    Other,
}

impl Address {
    /// An IPv4 address and port.
    #[must_use]
    pub fn v4(ip: [u8; 4], port: u16) -> Self {
        let mut bytes = [0; size_of::<sockaddr_in>()];
        put_family(&mut bytes, libc::AF_INET);
        put(&mut bytes, offset_of!(sockaddr_in, sin_port), port.to_be_bytes());
        put(&mut bytes, offset_of!(sockaddr_in, sin_addr), ip);
        Self::new(&bytes)
    }

    /// An IPv6 address and port. [`AddressView::V6`] explains the parts.
    #[must_use]
    pub fn v6(ip: [u8; 16], port: u16, flowinfo: u32, scope_id: u32) -> Self {
        let mut bytes = [0; size_of::<sockaddr_in6>()];
        put_family(&mut bytes, libc::AF_INET6);
        put(
            &mut bytes,
            offset_of!(sockaddr_in6, sin6_port),
            port.to_be_bytes(),
        );
        put(
            &mut bytes,
            offset_of!(sockaddr_in6, sin6_flowinfo),
            flowinfo.to_be_bytes(),
        );
        put(&mut bytes, offset_of!(sockaddr_in6, sin6_addr), ip);
        put(
            &mut bytes,
            offset_of!(sockaddr_in6, sin6_scope_id),
            scope_id.to_ne_bytes(),
        );
        Self::new(&bytes)
    }

    /// The address of a Unix socket: a path, or (on Linux) a name that begins with a NUL. `None` if the name is empty
    /// or too long for a `sockaddr_un`, or if a path contains a NUL.
    #[must_use]
    pub fn unix(name: &[u8]) -> Option<Self> {
        const START: usize = offset_of!(sockaddr_un, sun_path);
        let is_abstract = HAS_ABSTRACT_NAMES && name.first() == Some(&0);
        // In the kernel's format a NUL follows a path, but not an abstract name.
        let len = START + name.len() + usize::from(!is_abstract);
        if name.is_empty() || len > size_of::<sockaddr_un>() || (!is_abstract && name.contains(&0)) {
            return None;
        }
        let mut bytes = [0; size_of::<sockaddr_un>()];
        put_family(&mut bytes, libc::AF_UNIX);
        bytes[START..START + name.len()].copy_from_slice(name);
        Some(Self::new(&bytes[..len]))
    }

    /// A pointer to the `sockaddr`, and its length. The pointer is valid until `self` is moved or dropped.
    #[inline]
    pub(super) fn as_raw(&self) -> (*const sockaddr, socklen_t) {
        let bytes = self.bytes();
        // The length came from the kernel as a socklen_t, or is at most the length of a `sockaddr_*`. So it fits.
        (bytes.as_ptr().cast(), bytes.len() as socklen_t)
    }

    /// Makes an address from the bytes of a `sockaddr`.
    fn new(bytes: &[u8]) -> Self {
        let repr = match u8::try_from(bytes.len()) {
            Ok(len) if bytes.len() <= INLINE_LEN => {
                let mut inline = [0; INLINE_LEN];
                inline[..bytes.len()].copy_from_slice(bytes);
                Repr::Inline { len, bytes: inline }
            }
            _ => Repr::Boxed(bytes.into()),
        };
        Self { repr }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match &self.repr {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Boxed(bytes) => bytes,
        }
    }

    /// The `N` bytes that begin at `offset`, or `None` if the address ends before them.
    fn part<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.bytes().get(offset..)?.first_chunk().copied()
    }

    /// The address family (`AF_INET` ...), or `AF_UNSPEC` if there is no address.
    #[must_use]
    pub fn family(&self) -> i32 {
        const FAMILY_LEN: usize = size_of::<sa_family_t>();
        self.part::<FAMILY_LEN>(offset_of!(sockaddr, sa_family))
            .map_or(libc::AF_UNSPEC, |bytes| {
                i32::from(sa_family_t::from_ne_bytes(bytes))
            })
    }

    /// The parts of the address.
    #[must_use]
    pub fn view(&self) -> AddressView<'_> {
        match self.family() {
            libc::AF_INET => self.view_v4().unwrap_or(AddressView::Other),
            libc::AF_INET6 => self.view_v6().unwrap_or(AddressView::Other),
            libc::AF_UNIX => self.view_unix(),
            libc::AF_UNSPEC => AddressView::Unnamed,
            _ => AddressView::Other,
        }
    }

    fn view_v4(&self) -> Option<AddressView<'_>> {
        Some(AddressView::V4 {
            ip: self.part(offset_of!(sockaddr_in, sin_addr))?,
            port: u16::from_be_bytes(self.part(offset_of!(sockaddr_in, sin_port))?),
        })
    }

    fn view_v6(&self) -> Option<AddressView<'_>> {
        Some(AddressView::V6 {
            ip: self.part(offset_of!(sockaddr_in6, sin6_addr))?,
            port: u16::from_be_bytes(self.part(offset_of!(sockaddr_in6, sin6_port))?),
            flowinfo: u32::from_be_bytes(self.part(offset_of!(sockaddr_in6, sin6_flowinfo))?),
            // Unlike the fields above, this one is in host byte order.
            scope_id: u32::from_ne_bytes(self.part(offset_of!(sockaddr_in6, sin6_scope_id))?),
        })
    }

    fn view_unix(&self) -> AddressView<'_> {
        let path = self
            .bytes()
            .get(offset_of!(sockaddr_un, sun_path)..)
            .unwrap_or_default();
        let is_abstract = HAS_ABSTRACT_NAMES && path.first() == Some(&0);
        let end = if is_abstract {
            path.len()
        } else {
            path.iter().position(|&byte| byte == 0).unwrap_or(path.len())
        };
        if end == 0 {
            AddressView::Unnamed
        } else {
            AddressView::Unix(&path[..end])
        }
    }
}

/// Writes the family. Some systems have a length field in addresses, which the kernel fills in.
fn put_family(bytes: &mut [u8], family: i32) {
    put(
        bytes,
        offset_of!(sockaddr, sa_family),
        (family as sa_family_t).to_ne_bytes(),
    );
}

fn put<const N: usize>(bytes: &mut [u8], offset: usize, field: [u8; N]) {
    bytes[offset..offset + N].copy_from_slice(&field);
}

/// The text of an IPv6 address, as `inet_ntop(3)` writes it: in the form of RFC 5952, with one addition. If the first
/// 96 bits are zero and the last 32 bits are a number of 65,536 or more, that number is written in dotted decimals
/// (`::192.0.2.1`, the deprecated IPv4-compatible form). Rust's standard library does not do that.
#[must_use]
pub fn ipv6_text(ip: [u8; 16]) -> String {
    let ip = Ipv6Addr::from(ip);
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, high, _] if high != 0 => {
            let [.., a, b, c, d] = ip.octets();
            format!("::{}", Ipv4Addr::new(a, b, c, d))
        }
        _ => ip.to_string(),
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.view() {
            AddressView::Other => write!(formatter, "Other(family {})", self.family()),
            view => view.fmt(formatter),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use libc::{sockaddr_in, sockaddr_in6};
    use proptest::prelude::*;

    use super::{Address, AddressView, INLINE_LEN, Repr, Storage, ipv6_text};

    /// A `sockaddr` of this family, with `parts` at their offsets and zeros elsewhere.
    fn address(family: i32, len: usize, parts: &[(usize, &[u8])]) -> Address {
        let mut bytes = vec![0; len];
        let family = libc::sa_family_t::try_from(family).unwrap().to_ne_bytes();
        let start = offset_of!(libc::sockaddr, sa_family);
        bytes[start..start + family.len()].copy_from_slice(&family);
        for (offset, part) in parts {
            bytes[*offset..offset + part.len()].copy_from_slice(part);
        }
        Address::new(&bytes)
    }

    #[test]
    fn is_small() {
        assert!(size_of::<Address>() <= 32, "{}", size_of::<Address>());
    }

    #[test]
    fn internet_addresses_are_read_from_network_order() {
        let v4 = address(
            libc::AF_INET,
            size_of::<sockaddr_in>(),
            &[
                (offset_of!(sockaddr_in, sin_port), &[0x1f, 0x90]),
                (offset_of!(sockaddr_in, sin_addr), &[192, 0, 2, 1]),
            ],
        );
        let expected = AddressView::V4 {
            ip: [192, 0, 2, 1],
            port: 8080,
        };
        assert_eq!((v4.view(), v4.family()), (expected, libc::AF_INET));

        let ip = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let v6 = address(
            libc::AF_INET6,
            size_of::<sockaddr_in6>(),
            &[
                (offset_of!(sockaddr_in6, sin6_port), &[0x1f, 0x90]),
                (offset_of!(sockaddr_in6, sin6_flowinfo), &[0, 1, 2, 3]),
                (offset_of!(sockaddr_in6, sin6_addr), &ip),
                (offset_of!(sockaddr_in6, sin6_scope_id), &7_u32.to_ne_bytes()),
            ],
        );
        let expected = AddressView::V6 {
            ip,
            port: 8080,
            flowinfo: 0x0001_0203,
            scope_id: 7,
        };
        assert_eq!((v6.view(), v6.family()), (expected, libc::AF_INET6));
        assert!(matches!(v6.repr, Repr::Inline { .. }));
    }

    #[test]
    fn a_path_ends_at_its_nul_or_with_the_address() {
        let start = offset_of!(libc::sockaddr_un, sun_path);
        let closed = address(libc::AF_UNIX, start + 6, &[(start, b"/a/b\0x")]);
        assert_eq!(closed.view(), AddressView::Unix(b"/a/b"));
        let long = [b'p'; 108];
        let open = address(libc::AF_UNIX, start + long.len(), &[(start, &long)]);
        assert_eq!(open.view(), AddressView::Unix(&long));
        assert!(matches!(&open.repr, Repr::Boxed(bytes) if bytes.len() == start + long.len()));
        assert_eq!(open.clone(), open);
        assert_eq!(address(libc::AF_UNIX, start, &[]).view(), AddressView::Unnamed);
    }

    #[test]
    fn paths_and_names_survive_a_round_trip() {
        let longest = [b'p'; size_of::<libc::sockaddr_un>() - offset_of!(libc::sockaddr_un, sun_path) - 1];
        for name in [&b"/a/b"[..], b"\0name\0more", &longest] {
            assert_eq!(Address::unix(name).unwrap().view(), AddressView::Unix(name));
        }
        for name in [&b""[..], b"/a\0b", &[b'p'; 200], &[0; 200]] {
            assert_eq!(Address::unix(name), None);
        }
    }

    #[test]
    fn truncated_and_unknown_addresses_have_no_parts() {
        let short = size_of::<sockaddr_in>() / 4;
        assert_eq!(address(libc::AF_INET, short, &[]).view(), AddressView::Other);
        assert_eq!(address(libc::AF_INET6, short, &[]).view(), AddressView::Other);
        assert_eq!(Address::new(&[]).view(), AddressView::Unnamed);
        let other = address(200, 40, &[]);
        assert_eq!((other.view(), other.family()), (AddressView::Other, 200));
        assert_eq!(format!("{other:?}"), "Other(family 200)");
        assert_eq!(Storage::new().to_address(0).family(), libc::AF_UNSPEC);
    }

    unsafe extern "C" {
        fn inet_ntop(
            family: std::ffi::c_int,
            ip: *const std::ffi::c_void,
            text: *mut std::ffi::c_char,
            len: libc::socklen_t,
        ) -> *const std::ffi::c_char;
    }

    fn inet_ntop_text(ip: [u8; 16]) -> String {
        let mut text = [0_u8; 64];
        // SAFETY: the call reads 16 bytes, and writes a string of at most 46 bytes including its NUL.
        let written = unsafe { inet_ntop(libc::AF_INET6, ip.as_ptr().cast(), text.as_mut_ptr().cast(), 64) };
        assert!(!written.is_null());
        let text = std::ffi::CStr::from_bytes_until_nul(&text).unwrap();
        text.to_str().unwrap().to_owned()
    }

    proptest! {
        /// Most segments are zero or small, because the text of such addresses has special forms.
        #[test]
        fn ipv6_text_equals_the_text_of_the_system(
            segments in prop::array::uniform8(prop_oneof![3 => Just(0), 1 => 0_u16..3, 1 => Just(0xffff), 2 => any::<u16>()])
        ) {
            let ip = std::net::Ipv6Addr::from(segments).octets();
            prop_assert_eq!(ipv6_text(ip), inet_ntop_text(ip));
        }

        #[test]
        fn internet_addresses_survive_a_round_trip(
            ip in any::<[u8; 16]>(), port in any::<u16>(), flowinfo in any::<u32>(), scope_id in any::<u32>()
        ) {
            let first = [ip[0], ip[1], ip[2], ip[3]];
            let v4 = Address::v4(first, port);
            prop_assert_eq!(v4.view(), AddressView::V4 { ip: first, port });
            let v6 = Address::v6(ip, port, flowinfo, scope_id);
            prop_assert_eq!(v6.view(), AddressView::V6 { ip, port, flowinfo, scope_id });
        }

        /// The bytes and the length need not be consistent.
        #[test]
        fn any_bytes_can_be_viewed(bytes in prop::collection::vec(any::<u8>(), 0..=128), len in any::<u32>()) {
            let given = Address::new(&bytes);
            prop_assert_eq!(given.bytes(), &bytes[..]);
            prop_assert_eq!(matches!(given.repr, Repr::Inline { .. }), bytes.len() <= INLINE_LEN);
            if let AddressView::Unix(path) = given.view() {
                prop_assert!(bytes.windows(path.len()).any(|window| window == path));
            }
            let shown = format!("{given:?}");
            prop_assert!(!shown.is_empty());

            let mut storage = Storage::new();
            let kept_len = bytes.len().min(storage.0.len());
            storage.0[..kept_len].copy_from_slice(&bytes[..kept_len]);
            let capacity = storage.0.len();
            let kept = storage.to_address(len);
            prop_assert_eq!(kept.bytes().len(), capacity.min(len as usize));
        }
    }
}
