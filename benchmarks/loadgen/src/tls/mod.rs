//! TLS through OpenSSL: [`session`] is one side without a socket, [`stream`] connects it to one.

pub(crate) mod certificate;
mod library;
mod session;
mod stream;

pub(crate) use library::library;
pub(crate) use session::{Context, Session, Ticket};
pub(crate) use stream::{Scratch, TlsStream};
