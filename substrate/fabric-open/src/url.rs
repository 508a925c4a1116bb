//! Addresses: which provider, and where.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use beeline_fabric_ntb::Side;

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

/// This host's end of a memory window, as an address names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowFile {
    /// What this end reads, or both halves.
    pub inbound: PathBuf,
    /// What this end writes, where that is another file.
    pub outbound: Option<PathBuf>,
    /// Which end this is; `None`: the one the service leaves.
    pub side: Option<Side>,
}

/// A service's address, read: `auto://host:port`, `tcp://host:port`, `shm://host:port`,
/// `ntb://host:port`, `verbs://host:port`; with a path instead of a host
/// (`auto:///run/beeline.sock`), a Unix socket. The port defaults to [`DEFAULT_PORT`], the scheme
/// to `auto`. With `?window=/FILE[&outbound=/FILE][&side=N]` the memory window towards the service
/// is that one, else one that the service is seen in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceUrl {
    /// The provider insisted on; `None` for `auto`.
    pub provider: Option<String>,
    /// Where to ask.
    pub address: BootstrapAddress,
    /// The memory window to take.
    pub window: Option<WindowFile>,
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

fn window(query: &str) -> Result<Option<WindowFile>, &'static str> {
    let (mut inbound, mut outbound, mut side) = (None, None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("window", path)) if path.starts_with('/') => inbound = Some(path.into()),
            Some(("outbound", path)) if path.starts_with('/') => outbound = Some(path.into()),
            Some(("side", "0")) => side = Some(Side::First),
            Some(("side", "1")) => side = Some(Side::Second),
            _ => return Err("the parameters are window=/FILE, outbound=/FILE and side=0 or 1"),
        }
    }
    match inbound {
        Some(inbound) => Ok(Some(WindowFile { inbound, outbound, side })),
        None if outbound.is_none() && side.is_none() => Ok(None),
        None => Err("outbound and side belong to a window"),
    }
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
            "tcp" | "shm" | "ntb" | "verbs" => Some(scheme.to_owned()),
            _ => {
                let known = "a service is reached by auto://, tcp://, shm://, ntb:// or verbs://";
                return Err(bad(known));
            }
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let window = window(query).map_err(bad)?;
        if window.is_some() && !matches!(scheme, "auto" | "ntb") {
            return Err(bad("a window belongs to auto:// and ntb://"));
        }
        if rest.is_empty() {
            return Err(bad("it names no host and no socket"));
        }
        let address = if rest.starts_with('/') {
            BootstrapAddress::Unix(PathBuf::from(rest))
        } else {
            BootstrapAddress::Tcp(with_port(rest.trim_end_matches('/')))
        };
        Ok(Self { provider, address, window })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_their_defaults() {
        let tcp = |host: &str| BootstrapAddress::Tcp(host.to_owned());
        let read = |url| ServiceUrl::parse(url).unwrap();
        let plain = ServiceUrl { provider: None, address: tcp("db:7"), window: None };
        assert_eq!(read("auto://db:7"), plain);
        assert_eq!(read("db").address, tcp("db:4790"));
        assert_eq!(read("[::1]").address, tcp("[::1]:4790"));
        assert_eq!(read("tcp://[::1]:9").provider.as_deref(), Some("tcp"));
        assert_eq!(
            read("auto:///run/b.sock").address,
            BootstrapAddress::Unix("/run/b.sock".into())
        );
        let window = read("ntb://db?window=/sys/x/resource2_wc&side=1");
        assert_eq!(window.address, tcp("db:4790"));
        let file = WindowFile {
            inbound: "/sys/x/resource2_wc".into(),
            outbound: None,
            side: Some(Side::Second),
        };
        assert_eq!(window.window, Some(file));
        for wrong in [
            "ftp://x",
            "auto://",
            "auto://?window=/f",
            "tcp://db?window=/f",
            "ntb://db?window=f",
            "ntb://db?side=1",
            "ntb://db?window=/f&side=2",
            "ntb://db?pane=1",
        ] {
            assert!(ServiceUrl::parse(wrong).is_err(), "{wrong}");
        }
    }
}
