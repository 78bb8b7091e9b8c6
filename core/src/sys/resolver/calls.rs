//! The C library's blocking lookups, and copies of what they return. [`super`] runs them in its threads.
//!
//! Source: `getaddrinfo(3)`, `getnameinfo(3)`, `gethostbyname(3)`.

use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;

/// A question for the C library. The fields are the arguments of its functions.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Question {
    /// `getaddrinfo(3)`.
    Addresses(AddressQuestion),
    /// `getnameinfo(3)`.
    Names(NameQuestion),
    /// `gethostbyname(3)`, for an IPv4 host.
    HostByName(CString),
    /// `gethostbyaddr(3)`, for an address or for the first address of a name.
    HostByAddress(CString),
}

/// The arguments of `getaddrinfo(3)`; the last four are the fields of its hints.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct AddressQuestion {
    /// A name or a numeric address.
    pub host: Option<CString>,
    /// The name of a service, or a port number.
    pub service: Option<CString>,
    /// `AF_UNSPEC` for any family.
    pub family: c_int,
    /// The type of the socket (`SOCK_STREAM` ...), 0 for any.
    pub kind: c_int,
    /// `IPPROTO_TCP` ..., 0 for any.
    pub protocol: c_int,
    /// `AI_*`.
    pub flags: c_int,
}

/// The arguments of `getnameinfo(3)`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct NameQuestion {
    /// A numeric address, in any form that `getaddrinfo` understands.
    pub host: CString,
    /// A port number.
    pub port: CString,
    /// The flow label of an IPv6 address, in host byte order.
    pub flow_info: u32,
    /// The scope of an IPv6 address.
    pub scope_id: u32,
    /// `NI_*`.
    pub flags: c_int,
}

/// One entry of the list that `getaddrinfo` returns.
#[derive(Debug, PartialEq, Eq)]
pub struct AddressInfo {
    /// `AF_INET` or `AF_INET6`.
    pub family: c_int,
    /// The type of the socket.
    pub kind: c_int,
    /// The protocol of the socket.
    pub protocol: c_int,
    /// The official name of the host, if it was asked for.
    pub canonical_name: Option<CString>,
    /// The address and the port. The flow label of an IPv6 address is in host byte order.
    pub address: SocketAddr,
}

/// The entry of a host, from `gethostbyname` or `gethostbyaddr`.
#[derive(Debug, PartialEq, Eq)]
pub struct HostEntry {
    /// The official name.
    pub name: CString,
    /// Other names.
    pub aliases: Vec<CString>,
    /// Numeric addresses.
    pub addresses: Vec<CString>,
}

/// The answer of the C library.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Question::Addresses`].
    Addresses(Vec<AddressInfo>),
    /// To [`Question::Names`]: a host and a service.
    Names(CString, CString),
    /// To the other questions.
    Host(HostEntry),
}

/// The reason why a lookup has no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// The code that `getaddrinfo` or `getnameinfo` returned (`EAI_NONAME` ...), but not `EAI_SYSTEM`.
    Lookup(c_int),
    /// The `h_errno` of `gethostbyname` or `gethostbyaddr`.
    Host(c_int),
    /// The errno of a system call.
    System(c_int),
    /// The host of [`Question::Names`] stands for several addresses.
    Ambiguous,
}

/// The result of a lookup.
pub type Outcome = Result<Answer, Failure>;

/// Asks the C library in the calling thread. This may take seconds.
///
/// # Errors
/// The reason why there is no answer.
pub fn look_up(question: &Question) -> Outcome {
    match question {
        Question::Addresses(question) => addresses(question),
        Question::Names(question) => names(question),
        Question::HostByName(name) => host_by_name(name),
        Question::HostByAddress(name) => host_by_address(name),
    }
}

fn addresses(question: &AddressQuestion) -> Outcome {
    let hints = hints(question.family, question.kind, question.protocol, question.flags);
    let found = List::ask(question.host.as_deref(), question.service.as_deref(), &hints)?;
    Ok(Answer::Addresses(
        found.entries().filter_map(address_info).collect(),
    ))
}

fn failure(code: c_int) -> Failure {
    if code == libc::EAI_SYSTEM {
        Failure::System(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    } else {
        Failure::Lookup(code)
    }
}

fn hints(family: c_int, kind: c_int, protocol: c_int, flags: c_int) -> libc::addrinfo {
    // SAFETY: for this C structure of integers and pointers, all zeros are valid: no flags, and null pointers.
    let mut hints: libc::addrinfo = unsafe { MaybeUninit::zeroed().assume_init() };
    hints.ai_family = family;
    hints.ai_socktype = kind;
    hints.ai_protocol = protocol;
    hints.ai_flags = flags;
    hints
}

/// The list that `getaddrinfo` allocates.
struct List(*mut libc::addrinfo);

impl List {
    fn ask(host: Option<&CStr>, service: Option<&CStr>, hints: &libc::addrinfo) -> Result<Self, Failure> {
        let mut first = ptr::null_mut();
        let text = |text: Option<&CStr>| text.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: the texts and the hints are valid during the call, which writes `first` if it returns 0.
        let code = unsafe { libc::getaddrinfo(text(host), text(service), hints, &raw mut first) };
        if code == 0 {
            Ok(Self(first))
        } else {
            Err(failure(code))
        }
    }

    fn entries(&self) -> impl Iterator<Item = &libc::addrinfo> {
        // SAFETY: the list is valid until it is dropped, and ends with a null pointer.
        let at = |entry: *mut libc::addrinfo| unsafe { entry.as_ref() };
        std::iter::successors(at(self.0), move |entry| at(entry.ai_next))
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // Not every system accepts a null pointer here.
        if !self.0.is_null() {
            // SAFETY: `getaddrinfo` made the list, and this is the only pointer to it.
            unsafe { libc::freeaddrinfo(self.0) };
        }
    }
}

/// None for an address that is neither IPv4 nor IPv6. No known C library returns such an address.
fn address_info(entry: &libc::addrinfo) -> Option<AddressInfo> {
    let canonical_name = (!entry.ai_canonname.is_null()).then(|| {
        // SAFETY: the name is part of the list, and ends with a null byte.
        unsafe { CStr::from_ptr(entry.ai_canonname) }.to_owned()
    });
    Some(AddressInfo {
        family: entry.ai_family,
        kind: entry.ai_socktype,
        protocol: entry.ai_protocol,
        canonical_name,
        address: socket_address(entry)?,
    })
}

fn socket_address(entry: &libc::addrinfo) -> Option<SocketAddr> {
    let len = usize::try_from(entry.ai_addrlen).ok()?;
    if entry.ai_family == libc::AF_INET && len >= size_of::<libc::sockaddr_in>() {
        // SAFETY: the family and the length say that this is such a structure. It may be unaligned in principle.
        let raw = unsafe { entry.ai_addr.cast::<libc::sockaddr_in>().read_unaligned() };
        let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
        Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
    } else if entry.ai_family == libc::AF_INET6 && len >= size_of::<libc::sockaddr_in6>() {
        // SAFETY: as above.
        let raw = unsafe { entry.ai_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
        let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
        let flow_info = u32::from_be(raw.sin6_flowinfo);
        Some(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), flow_info, raw.sin6_scope_id).into())
    } else {
        None
    }
}

fn names(question: &NameQuestion) -> Outcome {
    let hints = hints(libc::AF_UNSPEC, libc::SOCK_DGRAM, 0, libc::AI_NUMERICHOST);
    let found = List::ask(Some(&question.host), Some(&question.port), &hints)?;
    let mut entries = found.entries();
    let (Some(entry), None) = (entries.next(), entries.next()) else {
        return Err(Failure::Ambiguous);
    };
    let mut v6: libc::sockaddr_in6;
    let (address, address_len) = if entry.ai_family == libc::AF_INET6 {
        // SAFETY: the family says that this is such a structure.
        v6 = unsafe { entry.ai_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
        v6.sin6_flowinfo = question.flow_info.to_be();
        v6.sin6_scope_id = question.scope_id;
        (
            (&raw const v6).cast(),
            size_of::<libc::sockaddr_in6>() as libc::socklen_t,
        )
    } else {
        (entry.ai_addr.cast_const(), entry.ai_addrlen)
    };
    // NI_MAXHOST and NI_MAXSERV are not larger than this on any system.
    let mut host = [0_u8; 1025];
    let mut service = [0_u8; 32];
    // SAFETY: the address is part of the list or a copy, and the lengths belong to the address and the buffers. On
    // success, both buffers hold texts that end with a null byte.
    let code = unsafe {
        libc::getnameinfo(
            address,
            address_len,
            host.as_mut_ptr().cast(),
            host.len() as _,
            service.as_mut_ptr().cast(),
            service.len() as _,
            question.flags,
        )
    };
    if code != 0 {
        return Err(failure(code));
    }
    Ok(Answer::Names(text_in(&host), text_in(&service)))
}

fn text_in(buffer: &[u8]) -> CString {
    CStr::from_bytes_until_nul(buffer).unwrap_or_default().to_owned()
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod hosts {
    //! The forms of `gethostbyname` and `gethostbyaddr` that are safe in several threads. The libc crate does not
    //! declare them.

    use std::ffi::{CStr, CString, c_char, c_int, c_void};
    use std::{ptr, slice};

    use super::{Answer, Failure, HostEntry, Outcome};

    unsafe extern "C" {
        fn gethostbyname_r(
            name: *const c_char,
            entry: *mut libc::hostent,
            buffer: *mut c_char,
            buffer_len: usize,
            result: *mut *mut libc::hostent,
            error: *mut c_int,
        ) -> c_int;
        fn gethostbyaddr_r(
            address: *const c_void,
            address_len: libc::socklen_t,
            family: c_int,
            entry: *mut libc::hostent,
            buffer: *mut c_char,
            buffer_len: usize,
            result: *mut *mut libc::hostent,
            error: *mut c_int,
        ) -> c_int;
    }

    /// If an entry does not fit into a buffer of this many bytes or more, no larger buffer is tried.
    const MAX_BUFFER: usize = 1 << 20;

    pub(super) fn by_name(name: &CStr) -> Outcome {
        with_buffer(libc::AF_INET, &|entry, buffer, len, result, error| {
            // SAFETY: all pointers are valid during the call, and `len` is the length of the buffer.
            unsafe { gethostbyname_r(name.as_ptr(), entry, buffer, len, result, error) }
        })
    }

    pub(super) fn by_address(family: c_int, address: &[u8]) -> Outcome {
        with_buffer(family, &|entry, buffer, len, result, error| {
            let (address, address_len) = (address.as_ptr().cast(), address.len() as libc::socklen_t);
            // SAFETY: as above, and `address_len` is the length of the address.
            unsafe { gethostbyaddr_r(address, address_len, family, entry, buffer, len, result, error) }
        })
    }

    type Call<'a> =
        &'a dyn Fn(*mut libc::hostent, *mut c_char, usize, *mut *mut libc::hostent, *mut c_int) -> c_int;

    /// Calls with larger and larger buffers until the entry fits.
    fn with_buffer(family: c_int, call: Call<'_>) -> Outcome {
        let mut len = 8192;
        loop {
            let mut buffer = vec![0_u8; len];
            // SAFETY: for this C structure of integers and pointers, all zeros are valid.
            let mut entry: libc::hostent = unsafe { std::mem::zeroed() };
            let (mut result, mut error) = (ptr::null_mut(), 0);
            let code = call(
                &raw mut entry,
                buffer.as_mut_ptr().cast(),
                len,
                &raw mut result,
                &raw mut error,
            );
            if code == libc::ERANGE && len < MAX_BUFFER {
                len *= 4;
                continue;
            }
            // SAFETY: null, or it points to `entry`, whose texts are in `buffer`.
            return match unsafe { result.as_ref() } {
                None => Err(Failure::Host(error)),
                Some(found) if found.h_addrtype != family => Err(Failure::System(libc::EAFNOSUPPORT)),
                // SAFETY: as above.
                Some(found) => Ok(unsafe { copied(found) }),
            };
        }
    }

    /// # Safety
    /// The entry was filled by the C library, and its buffer is alive.
    unsafe fn copied(entry: &libc::hostent) -> Answer {
        let len = usize::try_from(entry.h_length).unwrap_or(0);
        // SAFETY: by the contract. Each list ends with a null pointer, each text with a null byte, and each address has
        // the length that the entry says.
        unsafe {
            Answer::Host(HostEntry {
                name: CStr::from_ptr(entry.h_name).to_owned(),
                aliases: items(entry.h_aliases)
                    .map(|alias| CStr::from_ptr(alias).to_owned())
                    .collect(),
                addresses: items(entry.h_addr_list)
                    .map(|address| text_of(slice::from_raw_parts(address.cast::<u8>(), len)))
                    .collect(),
            })
        }
    }

    /// # Safety
    /// The list is null, or ends with a null pointer.
    unsafe fn items(list: *mut *mut c_char) -> impl Iterator<Item = *mut c_char> {
        let mut next = list;
        std::iter::from_fn(move || {
            if next.is_null() {
                return None;
            }
            // SAFETY: by the contract; the iterator does not go past the null pointer.
            unsafe {
                let item = *next;
                if item.is_null() {
                    next = std::ptr::null_mut();
                    return None;
                }
                next = next.add(1);
                Some(item)
            }
        })
    }

    fn text_of(address: &[u8]) -> CString {
        let text = match (<[u8; 4]>::try_from(address), <[u8; 16]>::try_from(address)) {
            (Ok(v4), _) => std::net::Ipv4Addr::from(v4).to_string(),
            (_, Ok(v6)) => crate::sys::socket::ipv6_text(v6),
            _ => String::new(),
        };
        CString::new(text).unwrap_or_default()
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod hosts {
    //! Not used: [`super::super::HAS_HOST_LOOKUPS`] is false.

    use std::ffi::{CStr, c_int};

    use super::{Failure, Outcome};

    pub(super) fn by_name(_: &CStr) -> Outcome {
        Err(Failure::System(libc::ENOSYS))
    }

    pub(super) fn by_address(_: c_int, _: &[u8]) -> Outcome {
        Err(Failure::System(libc::ENOSYS))
    }
}

/// Looks up the name with `getaddrinfo` first, as CPython does, so that an unknown name gives the error of that
/// function.
fn host_by_name(name: &CStr) -> Outcome {
    List::ask(Some(name), None, &hints(libc::AF_INET, libc::SOCK_DGRAM, 0, 0))?;
    hosts::by_name(name)
}

fn host_by_address(name: &CStr) -> Outcome {
    let found = List::ask(Some(name), None, &hints(libc::AF_UNSPEC, libc::SOCK_DGRAM, 0, 0))?;
    match found.entries().find_map(socket_address) {
        Some(SocketAddr::V4(address)) => hosts::by_address(libc::AF_INET, &address.ip().octets()),
        Some(SocketAddr::V6(address)) => hosts::by_address(libc::AF_INET6, &address.ip().octets()),
        None => Err(Failure::System(libc::EAFNOSUPPORT)),
    }
}

/// The message for a code of `getaddrinfo` or `getnameinfo`.
#[must_use]
pub fn lookup_message(code: c_int) -> CString {
    // SAFETY: the function accepts any code, and returns a text that lives forever.
    copy_of(unsafe { libc::gai_strerror(code) })
}

/// The message for an `h_errno`.
#[must_use]
pub fn host_message(code: c_int) -> CString {
    // SAFETY: as above.
    copy_of(unsafe { hstrerror(code) })
}

unsafe extern "C" {
    fn hstrerror(code: c_int) -> *const c_char;
}

fn copy_of(text: *const c_char) -> CString {
    if text.is_null() {
        return CString::default();
    }
    // SAFETY: a text of the C library, which ends with a null byte.
    unsafe { CStr::from_ptr(text) }.to_owned()
}
