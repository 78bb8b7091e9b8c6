//! Where a server listens: `127.0.0.1:8000`, `[::1]:8000` or `unix:/path`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::bail;

const UNIX: &str = "unix:";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Inet(SocketAddr),
    Unix(PathBuf),
}

impl Target {
    /// The address, for a load that supports only IP.
    ///
    /// # Errors
    /// If the address is a unix path.
    pub(crate) fn inet(&self) -> anyhow::Result<SocketAddr> {
        match self {
            Self::Inet(address) => Ok(*address),
            Self::Unix(_) => bail!("{self} is a unix path, but this mode needs an IP address and port"),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix(UNIX) {
            Some("") => Err("a path must follow unix:".into()),
            Some(path) => Ok(Self::Unix(path.into())),
            None => text
                .parse()
                .map(Self::Inet)
                .map_err(|_| format!("{text:?} is neither address:port nor unix:/path")),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inet(address) => address.fmt(formatter),
            Self::Unix(path) => write!(formatter, "{UNIX}{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_shown_as_it_was_written() {
        for text in ["127.0.0.1:80", "[::1]:80", "unix:/tmp/a b.sock"] {
            assert_eq!(Target::from_str(text).expect("a target").to_string(), text);
        }
        for text in ["", "localhost", "unix:", "127.0.0.1"] {
            assert!(Target::from_str(text).is_err(), "{text:?}");
        }
    }
}
