//! Echo servers on bare epoll, without Python: the best that any event loop on this machine could reach.
//!
//! Each prints its address, serves from one thread, and ends when stdin is closed.

mod datagrams;
mod epoll;
mod streams;

use std::io::{self, Write as _};
use std::path::Path;

use crate::target::Target;
use crate::tls;

/// What to serve.
pub(crate) enum Kind<'a> {
    Streams,
    /// TLS with the `cert.pem` and `key.pem` of this folder.
    Tls(&'a Path),
    Datagrams,
}

fn announce(address: &Target, openssl: Option<&str>) -> io::Result<()> {
    let mut stdout = io::stdout();
    let ready = serde_json::json!({"address": address.to_string(), "openssl": openssl});
    writeln!(stdout, "{ready}")?;
    stdout.flush()
}

/// Serves until stdin is closed.
///
/// # Errors
/// If the listening socket, the certificate or the poller fails. A connection that fails after it was set up is closed
/// instead.
pub(crate) fn run(address: &Target, kind: &Kind<'_>) -> anyhow::Result<()> {
    match kind {
        Kind::Streams => streams::run(address, None),
        Kind::Tls(folder) => {
            let context = tls::Context::server(&folder.join("cert.pem"), &folder.join("key.pem"))?;
            streams::run(address, Some(context))
        }
        Kind::Datagrams => datagrams::run(address.inet()?),
    }
}
