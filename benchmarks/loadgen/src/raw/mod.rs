//! Echo servers on bare epoll, without Python: what any event loop on this machine can at best reach.
//!
//! Each prints where it listens, serves from one thread, and ends when stdin is closed.

mod datagrams;
mod epoll;
mod streams;

use std::io::{self, Write as _};
use std::path::Path;

use crate::target::Target;
use crate::tls;

/// What is served.
pub(crate) enum Kind<'a> {
    Streams,
    /// With the `cert.pem` and `key.pem` of a folder.
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
/// When the listening socket, the certificate or the poller fails; a failing connection is closed instead.
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
