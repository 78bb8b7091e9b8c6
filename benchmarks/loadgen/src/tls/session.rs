//! One side of a TLS connection, without a socket: ciphertext in, plaintext out, and the other way round.
//!
//! OpenSSL uses a custom BIO. Its reads take data from the slice passed to `open`, and its writes append to a `Vec` of
//! ciphertext that the caller sends. A memory BIO would copy all data once more in each direction.

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;

use anyhow::{anyhow, ensure};

use super::library::{Library, Pointer, library};

const CTRL_FLUSH: c_int = 11;
const BIO_TYPE_SOURCE_SINK: c_int = 0x0400;
const BIO_READ_RETRY: c_int = 0x01 | 0x08;
const SET_MIN_PROTOCOL: c_int = 123;
const TLS_1_3: c_long = 0x0304;
const PEM: c_int = 1;
const ERROR_WANT_READ: c_int = 2;
const ERROR_ZERO_RETURN: c_int = 6;

/// Ciphertext on its way between OpenSSL and the socket. OpenSSL's BIO points to this struct.
struct Transit {
    /// The part of the slice passed to `open` that OpenSSL has not read yet; empty outside `open`.
    incoming: *const u8,
    incoming_len: usize,
    /// Ciphertext to send; the part before `sent` has been sent.
    outgoing: Vec<u8>,
    sent: usize,
}

/// # Safety
/// To be called by OpenSSL only: the BIO's data must be a live [`Transit`], and `buffer` must have `length` bytes.
unsafe extern "C" fn read(bio: Pointer, buffer: *mut c_char, length: c_int) -> c_int {
    let Ok(library) = library() else { return -1 };
    // SAFETY: the session has set its boxed transit as the BIO's data, and frees the BIO before the transit. Nothing
    // else uses the transit during a call into OpenSSL, and the slice behind `incoming` is borrowed for all of that
    // call.
    unsafe {
        let transit = &mut *(library.BIO_get_data)(bio).cast::<Transit>();
        (library.BIO_clear_flags)(bio, BIO_READ_RETRY);
        let count = transit
            .incoming_len
            .min(usize::try_from(length).unwrap_or_default());
        if count == 0 {
            (library.BIO_set_flags)(bio, BIO_READ_RETRY);
            return -1;
        }
        ptr::copy_nonoverlapping(transit.incoming, buffer.cast(), count);
        transit.incoming = transit.incoming.add(count);
        transit.incoming_len -= count;
        c_int::try_from(count).unwrap_or(-1)
    }
}

/// # Safety
/// As for [`read`].
unsafe extern "C" fn write(bio: Pointer, bytes: *const c_char, length: c_int) -> c_int {
    let Ok(library) = library() else { return -1 };
    // SAFETY: as in `read`; OpenSSL passes the length of its bytes.
    unsafe {
        let transit = &mut *(library.BIO_get_data)(bio).cast::<Transit>();
        let count = usize::try_from(length).unwrap_or_default();
        transit
            .outgoing
            .extend_from_slice(std::slice::from_raw_parts(bytes.cast(), count));
    }
    length
}

/// # Safety
/// Always safe: no argument is used except by value.
unsafe extern "C" fn control(_bio: Pointer, command: c_int, _number: c_long, _argument: Pointer) -> c_long {
    c_long::from(command == CTRL_FLUSH)
}

/// The method table of the custom BIO, which all sessions of a context share.
fn new_method(library: &Library) -> anyhow::Result<Pointer> {
    // SAFETY: the functions have the signatures that OpenSSL requires, and the name is static.
    unsafe {
        let method = (library.BIO_meth_new)(BIO_TYPE_SOURCE_SINK | 0x7f, c"transit".as_ptr());
        ensure!(!method.is_null(), "BIO_meth_new: {}", library.take_error());
        (library.BIO_meth_set_read)(method, read);
        (library.BIO_meth_set_write)(method, write);
        (library.BIO_meth_set_ctrl)(method, control);
        Ok(method)
    }
}

/// The settings that all sessions of one side share: TLS 1.3, OpenSSL's default ciphers, no verification of the peer's
/// certificate.
pub(crate) struct Context {
    library: &'static Library,
    raw: Pointer,
    method: Pointer,
    is_server: bool,
}

impl Context {
    fn new(library: &'static Library, is_server: bool) -> anyhow::Result<Self> {
        // SAFETY: the method table comes from OpenSSL, and the result is checked before it is used.
        let raw = unsafe {
            let method = if is_server {
                (library.TLS_server_method)()
            } else {
                (library.TLS_client_method)()
            };
            (library.SSL_CTX_new)(method)
        };
        ensure!(!raw.is_null(), "SSL_CTX_new: {}", library.take_error());
        let method = new_method(library)?;
        // SAFETY: the context was just created; this control takes a number, not a pointer.
        let set = unsafe { (library.SSL_CTX_ctrl)(raw, SET_MIN_PROTOCOL, TLS_1_3, ptr::null_mut()) };
        ensure!(set == 1, "TLS 1.3 is not available: {}", library.take_error());
        Ok(Self {
            library,
            raw,
            method,
            is_server,
        })
    }

    /// # Errors
    /// If there is no OpenSSL 3.
    pub(crate) fn client() -> anyhow::Result<Self> {
        Self::new(library()?, false)
    }

    /// # Errors
    /// If there is no OpenSSL 3, or if the files are not a certificate and its key in PEM form.
    pub(crate) fn server(certificate: &Path, key: &Path) -> anyhow::Result<Self> {
        let library = library()?;
        let made = Self::new(library, true)?;
        let certificate = CString::new(certificate.as_os_str().as_bytes())?;
        let key = CString::new(key.as_os_str().as_bytes())?;
        // SAFETY: we own the context, and the paths end with a zero.
        let outcome = unsafe {
            if (library.SSL_CTX_use_certificate_chain_file)(made.raw, certificate.as_ptr()) == 1 {
                (library.SSL_CTX_use_PrivateKey_file)(made.raw, key.as_ptr(), PEM)
            } else {
                0
            }
        };
        ensure!(outcome == 1, "certificate: {}", library.take_error());
        Ok(made)
    }

    /// A new session. It begins with a full handshake, unless an earlier session is resumed.
    ///
    /// # Errors
    /// If OpenSSL runs out of memory.
    pub(crate) fn session(&self) -> anyhow::Result<Session> {
        let library = self.library;
        let mut transit = Box::new(Transit {
            incoming: ptr::null(),
            incoming_len: 0,
            outgoing: Vec::new(),
            sent: 0,
        });
        // SAFETY: results are checked before they are used. The session owns the BIO from SSL_set_bio on. The BIO
        // points to the transit, which is boxed and therefore stays in place when the session moves.
        unsafe {
            let ssl = (library.SSL_new)(self.raw);
            let bio = (library.BIO_new)(self.method);
            if ssl.is_null() || bio.is_null() {
                (library.SSL_free)(ssl);
                (library.BIO_free)(bio);
                return Err(anyhow!("SSL_new: {}", library.take_error()));
            }
            (library.BIO_set_data)(bio, (&raw mut *transit).cast());
            (library.BIO_set_init)(bio, 1);
            (library.SSL_set_bio)(ssl, bio, bio);
            if self.is_server {
                (library.SSL_set_accept_state)(ssl);
            } else {
                (library.SSL_set_connect_state)(ssl);
            }
            Ok(Session {
                library,
                ssl,
                transit,
                has_ended: false,
            })
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: we own the context; sessions have references of their own. The method table is not freed, because a
        // session may still use it.
        unsafe { (self.library.SSL_CTX_free)(self.raw) };
    }
}

/// What a later session needs in order to resume an earlier one.
pub(crate) struct Ticket {
    library: &'static Library,
    raw: Pointer,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // SAFETY: we own the reference.
        unsafe { (self.library.SSL_SESSION_free)(self.raw) };
    }
}

pub(crate) struct Session {
    library: &'static Library,
    ssl: Pointer,
    transit: Box<Transit>,
    has_ended: bool,
}

impl Session {
    /// Does as much of the handshake as is possible without another message from the peer. Returns true once the
    /// handshake is complete.
    ///
    /// # Errors
    /// If either side refuses the handshake.
    pub(crate) fn handshake(&mut self) -> io::Result<bool> {
        // SAFETY: we own the session.
        let outcome = unsafe { (self.library.SSL_do_handshake)(self.ssl) };
        Ok(self.check(outcome)? > 0)
    }

    pub(crate) fn is_established(&self) -> bool {
        // SAFETY: we own the session.
        unsafe { (self.library.SSL_is_init_finished)(self.ssl) == 1 }
    }

    /// The ticket that the server has sent, if any.
    pub(crate) fn ticket(&self) -> Option<Ticket> {
        // SAFETY: we own the session; the returned reference becomes the ticket's.
        unsafe {
            let raw = (self.library.SSL_get1_session)(self.ssl);
            if raw.is_null() {
                return None;
            }
            let ticket = Ticket {
                library: self.library,
                raw,
            };
            ((self.library.SSL_SESSION_is_resumable)(raw) == 1).then_some(ticket)
        }
    }

    /// Resumes the session from which this ticket comes. Must be called before the handshake.
    ///
    /// # Errors
    /// If OpenSSL rejects the ticket.
    pub(crate) fn resume(&mut self, ticket: &Ticket) -> io::Result<()> {
        // SAFETY: we own both; OpenSSL takes a reference of its own.
        let outcome = unsafe { (self.library.SSL_set_session)(self.ssl, ticket.raw) };
        self.check(outcome).map(drop)
    }

    /// Whether the server has resumed a session.
    pub(crate) fn is_resumed(&self) -> bool {
        // SAFETY: we own the session.
        unsafe { (self.library.SSL_session_reused)(self.ssl) == 1 }
    }

    /// Whether the peer has announced the end of its data (`close_notify`).
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Consumes all of the ciphertext that the socket returned, handshake messages included. Writes the plaintext to
    /// the start of `plain`, and returns its length. `plain` must be longer than the ciphertext by one record (16 KiB),
    /// because OpenSSL may still hold a part of a record from earlier calls.
    ///
    /// # Errors
    /// If OpenSSL rejects the ciphertext.
    pub(crate) fn open(&mut self, ciphertext: &[u8], plain: &mut [u8]) -> io::Result<usize> {
        self.transit.incoming = ciphertext.as_ptr();
        self.transit.incoming_len = ciphertext.len();
        let outcome = self.open_all(plain);
        self.transit.incoming_len = 0;
        outcome
    }

    fn open_all(&mut self, plain: &mut [u8]) -> io::Result<usize> {
        let mut length = 0;
        loop {
            let room = c_int::try_from(plain.len() - length).unwrap_or(c_int::MAX);
            // SAFETY: the buffer has the given length, and the caller borrows the incoming slice.
            let outcome =
                unsafe { (self.library.SSL_read)(self.ssl, plain[length..].as_mut_ptr().cast(), room) };
            match usize::try_from(self.check(outcome)?) {
                Ok(count @ 1..) => length += count,
                _ => return Ok(length),
            }
        }
    }

    /// Encrypts all of `plain`. Returns false, without doing anything, while the handshake is under way.
    ///
    /// # Errors
    /// If the session has failed or is shut down.
    pub(crate) fn seal(&mut self, plain: &[u8]) -> io::Result<bool> {
        if !self.is_established() {
            return Ok(false);
        }
        let length = c_int::try_from(plain.len()).map_err(io::Error::other)?;
        // SAFETY: pointer and length come from a slice.
        let outcome = unsafe { (self.library.SSL_write)(self.ssl, plain.as_ptr().cast::<c_void>(), length) };
        Ok(self.check(outcome)? == length)
    }

    /// Announces the end of our data (`close_notify`).
    pub(crate) fn shut_down(&mut self) {
        // SAFETY: we own the session. A session that can no longer send `close_notify` is closed anyway.
        unsafe {
            if (self.library.SSL_shutdown)(self.ssl) < 0 {
                (self.library.ERR_clear_error)();
            }
        }
    }

    /// Ciphertext to send to the socket.
    pub(crate) fn outgoing(&self) -> &[u8] {
        &self.transit.outgoing[self.transit.sent..]
    }

    /// Removes `count` bytes that the socket has taken.
    pub(crate) fn take_outgoing(&mut self, count: usize) {
        let transit = &mut *self.transit;
        transit.sent += count;
        if transit.sent == transit.outgoing.len() {
            transit.outgoing.clear();
            transit.sent = 0;
        }
    }

    /// Returns a positive result as it is. Returns 0 if the peer must send something first, or has sent `close_notify`.
    fn check(&mut self, outcome: c_int) -> io::Result<c_int> {
        if outcome > 0 {
            return Ok(outcome);
        }
        // SAFETY: we own the session, and this is the result of its last call.
        match unsafe { (self.library.SSL_get_error)(self.ssl, outcome) } {
            ERROR_WANT_READ => Ok(0),
            ERROR_ZERO_RETURN => {
                self.has_ended = true;
                Ok(0)
            }
            _ => Err(io::Error::other(format!("TLS: {}", self.library.take_error()))),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: we own the session, which frees its BIO; the transit is dropped afterwards.
        unsafe { (self.library.SSL_free)(self.ssl) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::certificate;

    fn carry(from: &mut Session, to: &mut Session, piece: usize, plain: &mut [u8]) -> usize {
        let mut length = 0;
        while !from.outgoing().is_empty() {
            let taken = from.outgoing()[..piece.min(from.outgoing().len())].to_vec();
            from.take_outgoing(taken.len());
            length += to.open(&taken, &mut plain[length..]).expect("good ciphertext");
        }
        length
    }

    #[test]
    fn two_sides_understand_each_other_in_any_pieces() {
        let folder = std::env::temp_dir().join(format!("loadgen-session-{}", std::process::id()));
        let (certificate, key) = certificate::make(&folder).expect("a certificate");
        let server_side = Context::server(&certificate, &key).expect("a server");
        let client_side = Context::client().expect("a client");
        std::fs::remove_dir_all(&folder).expect("the folder");
        let message: Vec<u8> = (0..100_000_usize).map(crate::echo::pattern_byte).collect();
        let mut plain = vec![0; 400_000];
        for piece in [1, 100, 70_000] {
            let (mut client, mut server) = (
                client_side.session().expect("a session"),
                server_side.session().expect("a session"),
            );
            assert!(!client.seal(b"too early").expect("not failed"));
            while !(client.handshake().expect("no failure") && server.is_established()) {
                carry(&mut client, &mut server, piece, &mut plain);
                carry(&mut server, &mut client, piece, &mut plain);
            }
            assert!(client.seal(&message).expect("not failed"));
            let length = carry(&mut client, &mut server, piece, &mut plain);
            assert_eq!(plain[..length], message);
            server.shut_down();
            carry(&mut server, &mut client, piece, &mut plain);
            assert!(client.has_ended() && !server.has_ended());
        }
    }
}
