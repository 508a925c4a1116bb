//! A connection to a member's Redis door, for what an operator's program asks of members. Members among
//! themselves use the fabric.
//!
//! ```text
//! BEELINE.LOG <cluster, hexadecimal> STATUS   bulk string: lines `name:value`
//! BEELINE.LOG <cluster> JOIN <id> <log> <resp> | LEAVE <id> | TRANSFER <id> | SNAPSHOT   OK
//! ```
//!
//! Errors begin with NOTLEADER (ask another), NOTNOW (ask again), or are final.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The name of the command.
pub(crate) const COMMAND: &str = "beeline.log";
/// Between two looks whether an answer is still wanted.
const LOOK: Duration = Duration::from_millis(50);
/// Longest reply accepted.
const REPLY_LIMIT_BYTES: usize = 1 << 30;

/// Why a peer gave no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// It cannot be reached, or the connection broke.
    #[error("{address}: {source}")]
    Unreachable {
        /// Whom we asked.
        address: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It answered with an error: the line of the reply.
    #[error("{line}")]
    Error {
        /// Without the leading `-`.
        line: String,
    },
    /// It answered nonsense.
    #[error("{address} does not speak as a member does")]
    Protocol {
        /// Whom we asked.
        address: String,
    },
    /// It did not answer in time, or its answer is not wanted any more.
    #[error("{address} did not answer in time")]
    TimedOut {
        /// Whom we asked.
        address: String,
    },
}

impl PeerError {
    /// Whether the same may succeed later or at another member.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Error { line } => line.starts_with("NOT"),
            Self::Unreachable { .. } | Self::TimedOut { .. } => true,
            Self::Protocol { .. } => false,
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Peer {
    address: String,
    cluster: String,
    stream: TcpStream,
    received: Vec<u8>,
}

impl Peer {
    /// Connects, and gives the password if there is one.
    ///
    /// Errors: [`PeerError`].
    pub fn connect(
        address: &str,
        cluster: u64,
        password: Option<&str>,
        timeout: Duration,
    ) -> Result<Self, PeerError> {
        let failed = |source| PeerError::Unreachable { address: address.to_owned(), source };
        let mut last = io::Error::new(io::ErrorKind::InvalidInput, "no such address");
        for resolved in address.to_socket_addrs().map_err(failed)? {
            match TcpStream::connect_timeout(&resolved, timeout) {
                Ok(stream) => {
                    stream.set_nodelay(true).map_err(failed)?;
                    stream.set_read_timeout(Some(LOOK)).map_err(failed)?;
                    stream.set_write_timeout(Some(timeout)).map_err(failed)?;
                    let cluster = format!("{cluster:016x}");
                    let (address, received) = (address.to_owned(), Vec::new());
                    let mut peer = Self { address, cluster, stream, received };
                    if let Some(password) = password {
                        let deadline = Instant::now() + timeout;
                        peer.exchange(&[b"AUTH", password.as_bytes()], deadline, &mut || true)?;
                    }
                    return Ok(peer);
                }
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    /// Connects to some member, and learns which cluster it is of.
    ///
    /// Errors: [`PeerError`]; [`PeerError::Error`] for a node that is no member.
    pub fn discover(
        address: &str,
        password: Option<&str>,
        timeout: Duration,
    ) -> Result<Self, PeerError> {
        let mut peer = Self::connect(address, 0, password, timeout)?;
        let deadline = Instant::now() + timeout;
        let info = peer.exchange(&[b"INFO", b"replication"], deadline, &mut || true)?;
        let info = String::from_utf8_lossy(&info).into_owned();
        let cluster = info.lines().find_map(|line| line.strip_prefix("cluster_id:"));
        let Some(cluster) = cluster else {
            let line = format!("the node at {address} is no member of a cluster");
            return Err(PeerError::Error { line });
        };
        peer.cluster = cluster.to_owned();
        Ok(peer)
    }

    /// Where it leads to.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Asks, and waits for the answer until `deadline` while it is `wanted`. After an error other
    /// than [`PeerError::Error`] the connection is of no use any more.
    ///
    /// Errors: [`PeerError`].
    pub fn ask(
        &mut self,
        words: &[&[u8]],
        deadline: Instant,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u8>, PeerError> {
        let cluster = self.cluster.clone();
        let mut request = vec![COMMAND.as_bytes(), cluster.as_bytes()];
        request.extend_from_slice(words);
        self.exchange(&request, deadline, wanted)
    }

    fn exchange(
        &mut self,
        words: &[&[u8]],
        deadline: Instant,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u8>, PeerError> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        let failed = |source| PeerError::Unreachable { address: self.address.clone(), source };
        self.stream.write_all(&bytes).map_err(failed)?;
        self.received.clear();
        let mut part = vec![0; 64 << 10];
        loop {
            match reply(&self.received) {
                Parsed::More => {}
                Parsed::Value(value) => return Ok(value),
                Parsed::Error(line) => return Err(PeerError::Error { line }),
                Parsed::Nonsense => {
                    return Err(PeerError::Protocol { address: self.address.clone() });
                }
            }
            match self.stream.read(&mut part) {
                Ok(0) => {
                    let source = io::ErrorKind::UnexpectedEof.into();
                    return Err(PeerError::Unreachable { address: self.address.clone(), source });
                }
                Ok(count) => self.received.extend_from_slice(&part[..count]),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) =>
                {
                    if Instant::now() >= deadline || !wanted() {
                        return Err(PeerError::TimedOut { address: self.address.clone() });
                    }
                }
                Err(source) => {
                    return Err(PeerError::Unreachable { address: self.address.clone(), source });
                }
            }
        }
    }
}

enum Parsed {
    More,
    Value(Vec<u8>),
    Error(String),
    Nonsense,
}

/// The one reply awaited: a bulk string, an integer, a line or an error.
fn reply(received: &[u8]) -> Parsed {
    let Some(end) = received.windows(2).position(|two| two == b"\r\n") else {
        return if received.len() > 64 << 10 { Parsed::Nonsense } else { Parsed::More };
    };
    let (line, rest) = (&received[..end], &received[end + 2..]);
    match line.split_first() {
        Some((b'+' | b':', value)) if rest.is_empty() => Parsed::Value(value.to_vec()),
        Some((b'-', line)) if rest.is_empty() => {
            Parsed::Error(String::from_utf8_lossy(line).into_owned())
        }
        Some((b'$', length)) => {
            let length = str::from_utf8(length).ok().and_then(|text| text.parse::<usize>().ok());
            match length {
                Some(length) if length > REPLY_LIMIT_BYTES => Parsed::Nonsense,
                Some(length) if rest.len() < length + 2 => Parsed::More,
                Some(length) if rest.len() == length + 2 && rest.ends_with(b"\r\n") => {
                    Parsed::Value(rest[..length].to_vec())
                }
                _ => Parsed::Nonsense,
            }
        }
        _ => Parsed::Nonsense,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(parsed: Parsed) -> String {
        match parsed {
            Parsed::More => "more".into(),
            Parsed::Value(value) => String::from_utf8_lossy(&value).into_owned(),
            Parsed::Error(line) => format!("error {line}"),
            Parsed::Nonsense => "nonsense".into(),
        }
    }

    #[test]
    fn replies_are_read_whole_and_nothing_else_is_taken_for_one() {
        for (received, expected) in [
            ("", "more"),
            ("$3\r\nab", "more"),
            ("$3\r\nabc\r", "more"),
            ("$3\r\nabc\r\n", "abc"),
            ("$0\r\n\r\n", ""),
            (":42\r\n", "42"),
            ("+OK\r\n", "OK"),
            ("-NOTLEADER ask n2\r\n", "error NOTLEADER ask n2"),
            ("$-1\r\n", "nonsense"),
            ("$99999999999\r\n", "nonsense"),
            ("*1\r\n:1\r\n", "nonsense"),
            ("+OK\r\n+OK\r\n", "nonsense"),
            ("$1\r\nabc\r\n", "nonsense"),
        ] {
            assert_eq!(text(reply(received.as_bytes())), expected, "{received:?}");
        }
    }
}
