//! Addresses: which provider, and where.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use crate::error::OpenError;

/// Port of the bootstrap service.
pub const DEFAULT_PORT: u16 = 4790;

/// Where a bootstrap service answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BootstrapAddress {
    /// TCP; a name is resolved at each attempt.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl BootstrapAddress {
    /// All socket addresses behind a TCP address.
    pub(crate) fn resolve(host: &str) -> std::io::Result<Vec<SocketAddr>> {
        Ok(host.to_socket_addrs()?.collect())
    }
}

impl std::fmt::Display for BootstrapAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(host) => f.write_str(host),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A service's address, read: `auto://host:port`, `tcp://host:port`, `shm://host:port`,
/// `verbs://host:port`; with a
/// path instead of a host (`auto:///run/beeline.sock`), a Unix socket. The port defaults to
/// [`DEFAULT_PORT`], the scheme to `auto`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceUrl {
    /// The provider insisted on; `None` for `auto`.
    pub provider: Option<String>,
    /// Where to ask.
    pub address: BootstrapAddress,
}

/// Splits `scheme://rest`.
pub(crate) fn split(url: &str) -> Option<(&str, &str)> {
    url.split_once("://")
}

fn with_port(host: &str) -> String {
    let has_port = match host.strip_prefix('[') {
        Some(literal) => literal.contains("]:"),
        None => host.contains(':'),
    };
    if has_port { host.to_owned() } else { format!("{host}:{DEFAULT_PORT}") }
}

impl ServiceUrl {
    /// Reads an address.
    ///
    /// Errors: [`OpenError::Url`].
    pub fn parse(url: &str) -> Result<Self, OpenError> {
        let bad = |reason| OpenError::Url { url: url.to_owned(), reason };
        let (scheme, rest) = split(url).unwrap_or(("auto", url));
        let provider = match scheme {
            "auto" => None,
            "tcp" | "shm" | "verbs" => Some(scheme.to_owned()),
            _ => return Err(bad("a service is reached by auto://, tcp://, shm:// or verbs://")),
        };
        if rest.is_empty() {
            return Err(bad("it names no host and no socket"));
        }
        let address = if rest.starts_with('/') {
            BootstrapAddress::Unix(PathBuf::from(rest))
        } else {
            BootstrapAddress::Tcp(with_port(rest.trim_end_matches('/')))
        };
        Ok(Self { provider, address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_their_defaults() {
        let tcp = |host: &str| BootstrapAddress::Tcp(host.to_owned());
        let read = |url| ServiceUrl::parse(url).unwrap();
        assert_eq!(read("auto://db:7"), ServiceUrl { provider: None, address: tcp("db:7") });
        assert_eq!(read("db").address, tcp("db:4790"));
        assert_eq!(read("[::1]").address, tcp("[::1]:4790"));
        assert_eq!(read("tcp://[::1]:9").provider.as_deref(), Some("tcp"));
        assert_eq!(
            read("auto:///run/b.sock").address,
            BootstrapAddress::Unix("/run/b.sock".into())
        );
        assert!(ServiceUrl::parse("ftp://x").is_err());
        assert!(ServiceUrl::parse("auto://").is_err());
    }
}
