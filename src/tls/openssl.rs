//! The functions of the OpenSSL library that Python's `ssl` module uses.
//!
//! They are looked up by name in the library that `_ssl` has loaded, so there is never a second copy of OpenSSL in the
//! process. Python does not tell which `SSL*` belongs to an `_SSLSocket`. But OpenSSL calls `note_created` with each
//! `SSL` that it creates. Before such a pointer is used, `is_ssl_of` checks that the `_SSLSocket` really contains it.
//!
//! If a function is not found (for example because OpenSSL is linked into the interpreter and its names are hidden), or
//! if the library is not OpenSSL itself (`LibreSSL` and AWS-LC have functions of the same names that work differently),
//! TLS goes through `ssl.MemoryBIO`.
//!
//! Source: `SSL_get_ex_new_index(3)`, `BIO_meth_new(3)`, `SSL_get_error(3)`. All functions exist from OpenSSL 1.1.1 on.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_ulong, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::{mem, ptr};

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use super::bio;
use crate::binding::is_switched_on;

/// OpenSSL's `SSL`, `BIO` and `BIO_METHOD`, which are only used through pointers.
#[repr(C)]
pub(super) struct Ssl([u8; 0]);
#[repr(C)]
pub(super) struct Bio([u8; 0]);
#[repr(C)]
pub(super) struct BioMethod([u8; 0]);

/// `CRYPTO_EX_INDEX_SSL`: the class of `SSL` objects.
const CLASS_SSL: c_int = 0;
/// The index at which `_ssl` stores a pointer to the `_SSLSocket` in each `SSL` (`SSL_set_app_data`).
const APP_DATA: c_int = 0;
/// `SSL_ERROR_WANT_READ`: the call has stopped because it needs more ciphertext.
const WANT_READ: c_int = 2;

/// This environment variable switches the direct use of OpenSSL off.
const OFF: &str = "GRAPESHOT_MEMORY_BIO";

type BioRead = unsafe extern "C" fn(*mut Bio, *mut c_char, c_int) -> c_int;
type BioWrite = unsafe extern "C" fn(*mut Bio, *const c_char, c_int) -> c_int;
type BioCtrl = unsafe extern "C" fn(*mut Bio, c_int, c_long, *mut c_void) -> c_long;
type BioDestroy = unsafe extern "C" fn(*mut Bio) -> c_int;
type NoteCreated = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void, c_int, c_long, *mut c_void);

/// The functions, each under its name in OpenSSL.
#[allow(non_snake_case)]
pub(super) struct OpenSsl {
    pub(super) SSL_read: unsafe extern "C" fn(*mut Ssl, *mut c_void, c_int) -> c_int,
    pub(super) SSL_write: unsafe extern "C" fn(*mut Ssl, *const c_void, c_int) -> c_int,
    pub(super) SSL_pending: unsafe extern "C" fn(*const Ssl) -> c_int,
    pub(super) SSL_set_bio: unsafe extern "C" fn(*mut Ssl, *mut Bio, *mut Bio),
    SSL_get_error: unsafe extern "C" fn(*const Ssl, c_int) -> c_int,
    SSL_get_ex_data: unsafe extern "C" fn(*const Ssl, c_int) -> *mut c_void,
    ERR_peek_error: unsafe extern "C" fn() -> c_ulong,
    ERR_clear_error: unsafe extern "C" fn(),
    pub(super) BIO_new: unsafe extern "C" fn(*const BioMethod) -> *mut Bio,
    pub(super) BIO_up_ref: unsafe extern "C" fn(*mut Bio) -> c_int,
    pub(super) BIO_free: unsafe extern "C" fn(*mut Bio) -> c_int,
    pub(super) BIO_set_data: unsafe extern "C" fn(*mut Bio, *mut c_void),
    pub(super) BIO_get_data: unsafe extern "C" fn(*mut Bio) -> *mut c_void,
    pub(super) BIO_set_flags: unsafe extern "C" fn(*mut Bio, c_int),
    pub(super) BIO_clear_flags: unsafe extern "C" fn(*mut Bio, c_int),
    /// The methods of our BIOs.
    pub(super) bio_method: *const BioMethod,
}

// SAFETY: the fields are function pointers, and a BIO_METHOD that nothing changes after `load`. The callers of the
// functions guarantee that the arguments are valid.
unsafe impl Send for OpenSsl {}
// SAFETY: as above.
unsafe impl Sync for OpenSsl {}

thread_local! {
    /// The `SSL` that was created last in this thread; it may have been freed since.
    static LAST_CREATED: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
}

/// OpenSSL calls this inside `SSL_new`, in the thread of the caller.
unsafe extern "C" fn note_created(
    ssl: *mut c_void,
    _data: *mut c_void,
    _all: *mut c_void,
    _index: c_int,
    _argl: c_long,
    _argp: *mut c_void,
) {
    LAST_CREATED.set(ssl);
}

/// A library that is loaded already.
struct Library(*mut c_void);

impl Library {
    /// The library of the extension module `_ssl`; a search in it includes the libraries to which it is linked. If
    /// `_ssl` is built into the interpreter, a search covers all libraries whose names are global.
    fn of_ssl_module(module: &Bound<'_, PyModule>) -> Option<Self> {
        let version = module.getattr(intern!(module.py(), "OPENSSL_VERSION")).ok()?;
        if !version.extract::<String>().ok()?.starts_with("OpenSSL ") {
            return None;
        }
        let Ok(path) = module.getattr(intern!(module.py(), "__file__")) else {
            return Some(Self(libc::RTLD_DEFAULT));
        };
        let path = CString::new(path.extract::<PathBuf>().ok()?.into_os_string().into_vec()).ok()?;
        // SAFETY: the path ends in NUL. RTLD_NOLOAD loads nothing: it returns the library that Python has loaded, or
        // null. The reference that it adds keeps the library loaded.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        (!library.is_null()).then_some(Self(library))
    }

    /// The function with this name.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to that function.
    unsafe fn find<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the name ends in NUL. A pointer that dlsym has found has the type F, as the caller guarantees.
        unsafe {
            let found = libc::dlsym(self.0, name.as_ptr());
            (!found.is_null()).then(|| mem::transmute_copy(&found))
        }
    }
}

static LOADED: OnceLock<Option<OpenSsl>> = OnceLock::new();

impl OpenSsl {
    /// At the first call, finds the functions of the library that `module` (`_ssl`) uses.
    pub(super) fn load(module: &Bound<'_, PyModule>) {
        let library = if is_switched_on(OFF) {
            None
        } else {
            Library::of_ssl_module(module)
        };
        // SAFETY: each function has the type that OpenSSL's headers declare (ssl.h, bio.h, crypto.h, err.h).
        LOADED.get_or_init(|| library.and_then(|library| unsafe { Self::find_all(&library) }));
    }

    /// The functions. None if `load` has not been called, the library is not OpenSSL itself, a function is missing, or
    /// the environment variable `GRAPESHOT_MEMORY_BIO` is set to anything but `0` and the empty string. Any thread may
    /// call this, attached or not.
    pub(super) fn loaded() -> Option<&'static Self> {
        LOADED.get()?.as_ref()
    }

    /// # Safety
    /// Functions with these names must be OpenSSL's, or have the same types.
    unsafe fn find_all(library: &Library) -> Option<Self> {
        type SetRead = unsafe extern "C" fn(*mut BioMethod, BioRead) -> c_int;
        type SetWrite = unsafe extern "C" fn(*mut BioMethod, BioWrite) -> c_int;
        type SetCtrl = unsafe extern "C" fn(*mut BioMethod, BioCtrl) -> c_int;
        type SetDestroy = unsafe extern "C" fn(*mut BioMethod, BioDestroy) -> c_int;
        type GetIndex = unsafe extern "C" fn() -> c_int;
        type NewMethod = unsafe extern "C" fn(c_int, *const c_char) -> *mut BioMethod;
        // The last two arguments are functions that OpenSSL calls when an SSL is copied, and when it is freed.
        type NewExIndex =
            unsafe extern "C" fn(c_int, c_long, *mut c_void, NoteCreated, *mut c_void, *mut c_void) -> c_int;
        // SAFETY: the caller's contract. The functions for BIO_METHODs get a BIO_METHOD that was just made, and that no
        // other code knows yet.
        unsafe {
            let set_read: SetRead = library.find(c"BIO_meth_set_read")?;
            let set_write: SetWrite = library.find(c"BIO_meth_set_write")?;
            let set_ctrl: SetCtrl = library.find(c"BIO_meth_set_ctrl")?;
            let set_destroy: SetDestroy = library.find(c"BIO_meth_set_destroy")?;
            let get_index: GetIndex = library.find(c"BIO_get_new_index")?;
            let new_method: NewMethod = library.find(c"BIO_meth_new")?;
            let new_ex_index: NewExIndex = library.find(c"CRYPTO_get_ex_new_index")?;
            let mut found = Self {
                SSL_read: library.find(c"SSL_read")?,
                SSL_write: library.find(c"SSL_write")?,
                SSL_pending: library.find(c"SSL_pending")?,
                SSL_set_bio: library.find(c"SSL_set_bio")?,
                SSL_get_error: library.find(c"SSL_get_error")?,
                SSL_get_ex_data: library.find(c"SSL_get_ex_data")?,
                ERR_peek_error: library.find(c"ERR_peek_error")?,
                ERR_clear_error: library.find(c"ERR_clear_error")?,
                BIO_new: library.find(c"BIO_new")?,
                BIO_up_ref: library.find(c"BIO_up_ref")?,
                BIO_free: library.find(c"BIO_free")?,
                BIO_set_data: library.find(c"BIO_set_data")?,
                BIO_get_data: library.find(c"BIO_get_data")?,
                BIO_set_flags: library.find(c"BIO_set_flags")?,
                BIO_clear_flags: library.find(c"BIO_clear_flags")?,
                bio_method: ptr::null(),
            };
            let method = new_method(get_index() | bio::TYPE_SOURCE_SINK, c"grapeshot".as_ptr());
            if method.is_null() {
                return None;
            }
            set_read(method, bio::read);
            set_write(method, bio::write);
            set_ctrl(method, bio::ctrl);
            set_destroy(method, bio::destroy);
            found.bio_method = method;
            let null = ptr::null_mut();
            (new_ex_index(CLASS_SSL, 0, null, note_created, null, null) >= 0).then_some(found)
        }
    }

    /// Runs `create`, which makes an `ssl.SSLObject`. Returns its result, and the `SSL` that was created last, which
    /// may have been freed since. None if no `SSL` was created.
    pub(super) fn created_by<R>(create: impl FnOnce() -> R) -> (R, Option<NonNull<Ssl>>) {
        LAST_CREATED.set(ptr::null_mut());
        let result = create();
        (result, NonNull::new(LAST_CREATED.get().cast()))
    }

    /// True if `ssl` is the `SSL` of the `_SSLSocket` object `ssl_socket`.
    pub(super) fn is_ssl_of(&self, ssl: NonNull<Ssl>, ssl_socket: &Bound<'_, PyAny>) -> bool {
        let head = size_of::<ffi::PyObject>() / size_of::<usize>();
        // SAFETY: the words that are read belong to a live object: they lie after its head, within the size that its
        // type states. Only this thread has a reference to the new object, so no other thread writes to the object.
        // `ssl` is passed to OpenSSL only if the object has this pointer: then the `SSL` lives as long as the object.
        unsafe {
            let object = ssl_socket.as_ptr();
            let words = (*ffi::Py_TYPE(object)).tp_basicsize as usize / size_of::<usize>();
            let has_pointer = (head..words)
                .any(|word| object.cast::<usize>().add(word).read_volatile() == ssl.addr().get());
            has_pointer && (self.SSL_get_ex_data)(ssl.as_ptr(), APP_DATA) == object.cast()
        }
    }

    /// True if the last call on `ssl`, which has returned `result`, has stopped because it needs more ciphertext.
    ///
    /// # Safety
    /// `ssl` must be live.
    pub(super) unsafe fn needs_input(&self, ssl: *mut Ssl, result: c_int) -> bool {
        // SAFETY: the caller's contract.
        unsafe { (self.SSL_get_error)(ssl, result) == WANT_READ }
    }

    /// Removes errors that other code has left in OpenSSL's error queue of this thread, where the next call would find
    /// them.
    pub(super) fn clear_errors(&self) {
        // SAFETY: the functions have no requirements.
        unsafe {
            if (self.ERR_peek_error)() != 0 {
                (self.ERR_clear_error)();
            }
        }
    }
}
