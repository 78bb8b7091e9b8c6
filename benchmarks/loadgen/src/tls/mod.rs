//! TLS through OpenSSL: [`session`] is one side of a connection, without a socket; [`stream`] puts it on a socket.

pub(crate) mod certificate;
mod library;
mod session;
mod stream;

pub(crate) use library::library;
pub(crate) use session::{Context, Session, Ticket};
pub(crate) use stream::{Scratch, TlsStream};
