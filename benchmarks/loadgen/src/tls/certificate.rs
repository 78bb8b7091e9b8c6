//! Makes a self-signed certificate (ECDSA, P-256) for the servers under load. Each process of the harness makes a new
//! one, which all of its servers use.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context as _, ensure};

use super::library::{Library, Pointer, library};

const VALID_FOR_S: i32 = 30 * 86_400;
const MBSTRING_ASC: i32 = 0x1001;
const LAST: i32 = -1;

/// An object of OpenSSL that is freed when it goes out of scope.
struct Owned(Pointer, unsafe extern "C" fn(Pointer));

impl Owned {
    fn new(
        library: &Library,
        made: Pointer,
        free: unsafe extern "C" fn(Pointer),
        what: &str,
    ) -> anyhow::Result<Self> {
        ensure!(!made.is_null(), "{what}: {}", library.take_error());
        Ok(Self(made, free))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: we own the object, it is not null, and `self.1` is OpenSSL's function that frees such objects.
        unsafe { (self.1)(self.0) };
    }
}

fn sign(library: &Library, key: &Owned) -> anyhow::Result<Owned> {
    // SAFETY: X509_new has no arguments.
    let made = unsafe { (library.X509_new)() };
    let certificate = Owned::new(library, made, library.X509_free, "X509_new")?;
    let name = "localhost";
    // SAFETY: we own both objects; the results of the getters live in the certificate; the name has the given length.
    let signed = unsafe {
        let x509 = certificate.0;
        (library.X509_set_version)(x509, 2) == 1
            && (library.ASN1_INTEGER_set)((library.X509_get_serialNumber)(x509), 1) == 1
            && !(library.X509_gmtime_adj)((library.X509_getm_notBefore)(x509), -3600).is_null()
            && !(library.X509_gmtime_adj)((library.X509_getm_notAfter)(x509), VALID_FOR_S.into()).is_null()
            && (library.X509_set_pubkey)(x509, key.0) == 1
            && (library.X509_NAME_add_entry_by_txt)(
                (library.X509_get_subject_name)(x509),
                c"CN".as_ptr(),
                MBSTRING_ASC,
                name.as_ptr(),
                i32::try_from(name.len())?,
                LAST,
                0,
            ) == 1
            && (library.X509_set_issuer_name)(x509, (library.X509_get_subject_name)(x509)) == 1
            && (library.X509_sign)(x509, key.0, (library.EVP_sha256)()) > 0
    };
    ensure!(signed, "X509_sign: {}", library.take_error());
    Ok(certificate)
}

/// Writes one object with one of OpenSSL's PEM functions.
fn write_pem(library: &Library, path: &Path, write: impl FnOnce(Pointer) -> i32) -> anyhow::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: path and mode end with a zero.
    let file = unsafe { (library.BIO_new_file)(name.as_ptr(), c"w".as_ptr()) };
    ensure!(!file.is_null(), "{}: {}", path.display(), library.take_error());
    let written = write(file);
    // SAFETY: the BIO was created above and is not used afterwards.
    unsafe { (library.BIO_free)(file) };
    ensure!(written == 1, "{}: {}", path.display(), library.take_error());
    Ok(())
}

/// Creates the folder with `cert.pem` and `key.pem`, and returns the two paths.
///
/// # Errors
/// If there is no OpenSSL 3, or if the files cannot be written.
pub(crate) fn make(folder: &Path) -> anyhow::Result<(PathBuf, PathBuf)> {
    let library = library()?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    // SAFETY: null means the default library; the argument after "EC" is the name of the curve.
    let made = unsafe {
        (library.EVP_PKEY_Q_keygen)(ptr::null_mut(), ptr::null(), c"EC".as_ptr(), c"P-256".as_ptr())
    };
    let key = Owned::new(library, made, library.EVP_PKEY_free, "EVP_PKEY_Q_keygen")?;
    let certificate = sign(library, &key)?;
    let paths = (folder.join("cert.pem"), folder.join("key.pem"));
    // SAFETY: we own the objects and the file is open; null means no encryption and no password.
    write_pem(library, &paths.0, |file| unsafe {
        (library.PEM_write_bio_X509)(file, certificate.0)
    })?;
    // SAFETY: as above.
    write_pem(library, &paths.1, |file| unsafe {
        let none = ptr::null_mut();
        (library.PEM_write_bio_PrivateKey)(file, key.0, none, ptr::null(), 0, none, none)
    })?;
    Ok(paths)
}
