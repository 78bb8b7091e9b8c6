//! The functions of OpenSSL 3 that this crate needs, from the libssl that is found at run time.
//!
//! The library is loaded, not linked, so the build needs no headers and is quick. The harness puts the path of the
//! library that CPython's `ssl` uses into `LOADGEN_LIBSSL`. So the raw server uses the same library, and shows how fast
//! a server with that library can be.
//!
//! Source: the manual pages ssl(7) and crypto(7) of OpenSSL 3.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_long, c_uchar, c_ulong, c_void};
use std::sync::OnceLock;

use anyhow::{Context as _, bail};
use libloading::Library as SharedObject;

/// A pointer to an object of OpenSSL, which is never dereferenced here.
pub(crate) type Pointer = *mut c_void;

const FIRST_VERSION: c_ulong = 0x3000_0000;
const NAMES: [&str; 3] = ["libssl.so.3", "libssl.3.dylib", "libssl.so"];

/// Declares the table of functions and the code that fills it, so that names and signatures are listed only once.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),* $(; $variadic:tt)?) $(-> $result:ty)?;)*) => {
        /// Each member is the function of the same name, with its C signature.
        #[allow(non_snake_case)]
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),* $(, $variadic)?) $(-> $result)?,)*
        }

        impl Library {
            /// # Safety
            /// Before a function is called, the shared object must be known to be OpenSSL 3's libssl.
            unsafe fn from_shared(object: &SharedObject) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the signatures are those of OpenSSL 3's headers, and the caller guarantees that `object`
                    // is its libssl. The functions of libcrypto are found through libssl, which depends on it.
                    $($name: unsafe { *object.get(concat!(stringify!($name), "\0").as_bytes())? },)*
                })
            }
        }
    };
}

functions! {
    OpenSSL_version_num: fn() -> c_ulong;
    OpenSSL_version: fn(c_int) -> *const c_char;
    ERR_clear_error: fn();
    ERR_get_error: fn() -> c_ulong;
    ERR_error_string_n: fn(c_ulong, *mut c_char, usize);

    TLS_client_method: fn() -> Pointer;
    TLS_server_method: fn() -> Pointer;
    SSL_CTX_new: fn(Pointer) -> Pointer;
    SSL_CTX_free: fn(Pointer);
    SSL_CTX_ctrl: fn(Pointer, c_int, c_long, Pointer) -> c_long;
    SSL_CTX_use_certificate_chain_file: fn(Pointer, *const c_char) -> c_int;
    SSL_CTX_use_PrivateKey_file: fn(Pointer, *const c_char, c_int) -> c_int;

    SSL_new: fn(Pointer) -> Pointer;
    SSL_free: fn(Pointer);
    SSL_set_bio: fn(Pointer, Pointer, Pointer);
    SSL_set_connect_state: fn(Pointer);
    SSL_set_accept_state: fn(Pointer);
    SSL_do_handshake: fn(Pointer) -> c_int;
    SSL_is_init_finished: fn(Pointer) -> c_int;
    SSL_read: fn(Pointer, Pointer, c_int) -> c_int;
    SSL_write: fn(Pointer, *const c_void, c_int) -> c_int;
    SSL_shutdown: fn(Pointer) -> c_int;
    SSL_get_error: fn(Pointer, c_int) -> c_int;
    SSL_get1_session: fn(Pointer) -> Pointer;
    SSL_set_session: fn(Pointer, Pointer) -> c_int;
    SSL_session_reused: fn(Pointer) -> c_int;
    SSL_SESSION_is_resumable: fn(Pointer) -> c_int;
    SSL_SESSION_free: fn(Pointer);

    BIO_meth_new: fn(c_int, *const c_char) -> Pointer;
    BIO_meth_set_read: fn(Pointer, unsafe extern "C" fn(Pointer, *mut c_char, c_int) -> c_int) -> c_int;
    BIO_meth_set_write: fn(Pointer, unsafe extern "C" fn(Pointer, *const c_char, c_int) -> c_int) -> c_int;
    BIO_meth_set_ctrl: fn(Pointer, unsafe extern "C" fn(Pointer, c_int, c_long, Pointer) -> c_long) -> c_int;
    BIO_new: fn(Pointer) -> Pointer;
    BIO_free: fn(Pointer) -> c_int;
    BIO_new_file: fn(*const c_char, *const c_char) -> Pointer;
    BIO_set_data: fn(Pointer, Pointer);
    BIO_get_data: fn(Pointer) -> Pointer;
    BIO_set_init: fn(Pointer, c_int);
    BIO_set_flags: fn(Pointer, c_int);
    BIO_clear_flags: fn(Pointer, c_int);

    EVP_PKEY_Q_keygen: fn(Pointer, *const c_char, *const c_char; ...) -> Pointer;
    EVP_PKEY_free: fn(Pointer);
    EVP_sha256: fn() -> Pointer;
    X509_new: fn() -> Pointer;
    X509_free: fn(Pointer);
    X509_set_version: fn(Pointer, c_long) -> c_int;
    X509_get_serialNumber: fn(Pointer) -> Pointer;
    ASN1_INTEGER_set: fn(Pointer, c_long) -> c_int;
    X509_getm_notBefore: fn(Pointer) -> Pointer;
    X509_getm_notAfter: fn(Pointer) -> Pointer;
    X509_gmtime_adj: fn(Pointer, c_long) -> Pointer;
    X509_set_pubkey: fn(Pointer, Pointer) -> c_int;
    X509_get_subject_name: fn(Pointer) -> Pointer;
    X509_set_issuer_name: fn(Pointer, Pointer) -> c_int;
    X509_NAME_add_entry_by_txt: fn(Pointer, *const c_char, c_int, *const c_uchar, c_int, c_int, c_int) -> c_int;
    X509_sign: fn(Pointer, Pointer, Pointer) -> c_int;
    PEM_write_bio_X509: fn(Pointer, Pointer) -> c_int;
    PEM_write_bio_PrivateKey: fn(Pointer, Pointer, Pointer, *const c_uchar, c_int, Pointer, Pointer) -> c_int;
}

fn open() -> anyhow::Result<&'static Library> {
    let choice = env::var("LOADGEN_LIBSSL").ok();
    let names = choice
        .as_deref()
        .map_or_else(|| NAMES.to_vec(), |path| vec![path]);
    // SAFETY: libssl's initialization may run at any time on any thread.
    let found = names
        .iter()
        .find_map(|name| unsafe { SharedObject::new(name) }.ok());
    let Some(object) = found else {
        bail!(
            "cannot load any of {}; set LOADGEN_LIBSSL to the path of OpenSSL's libssl",
            names.join(", ")
        );
    };
    // SAFETY: the library is OpenSSL (of any version) or an imitation: the default names belong to such libraries, and
    // a path in LOADGEN_LIBSSL must lead to one. `from_shared` only looks the functions up. Until the version is
    // checked, only `OpenSSL_version_num` is called.
    let library =
        unsafe { Library::from_shared(&object) }.context("this libssl is not OpenSSL 3 or later")?;
    // SAFETY: the function has no arguments and no side effects.
    if unsafe { (library.OpenSSL_version_num)() } < FIRST_VERSION {
        bail!("OpenSSL 3 or later is needed");
    }
    std::mem::forget(object); // the functions are used until the process ends
    Ok(Box::leak(Box::new(library)))
}

/// The library, which the first call loads.
///
/// # Errors
/// If there is no OpenSSL 3.
pub(crate) fn library() -> anyhow::Result<&'static Library> {
    static LOADED: OnceLock<&'static Library> = OnceLock::new();
    if let Some(library) = LOADED.get() {
        return Ok(library);
    }
    let library = open()?;
    Ok(LOADED.get_or_init(|| library))
}

impl Library {
    /// The version text, for example `OpenSSL 3.0.19 27 Jan 2026`.
    pub(crate) fn version(&self) -> String {
        // SAFETY: 0 asks for the version text, which is static.
        unsafe { CStr::from_ptr((self.OpenSSL_version)(0)) }
            .to_string_lossy()
            .into_owned()
    }

    /// The text of the oldest error in the thread's queue. The call empties the queue.
    pub(crate) fn take_error(&self) -> String {
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY: the length is that of the buffer, and OpenSSL ends the text with a zero.
        unsafe {
            let code = (self.ERR_get_error)();
            (self.ERR_clear_error)();
            if code == 0 {
                return "no reason given".into();
            }
            (self.ERR_error_string_n)(code, text.as_mut_ptr(), text.len());
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        }
    }
}
