//! A few lines of Redis protocol: requests as arrays of bulk strings, replies of RESP2 and RESP3.
//!
//! Not a client to use: it says what a test wants said, malformed requests included.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Patience with one read or write.
const PATIENCE: Duration = Duration::from_secs(20);

/// A reply.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// `+OK`
    Simple(String),
    /// `-ERR ...`
    Error(String),
    /// `:1`
    Integer(i64),
    /// `$3 ...`
    Bulk(Vec<u8>),
    /// `$-1`, `*-1` or `_`
    Null,
    /// `*`, `~` or `>`; a map is the array of its keys and values.
    Array(Vec<Reply>),
    /// `,` `#` `(` and the like, as text.
    Other(String),
}

impl Reply {
    /// The text of a simple or bulk reply.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Simple(text) | Self::Error(text) | Self::Other(text) => text.clone(),
            Self::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Self::Integer(number) => number.to_string(),
            Self::Null | Self::Array(_) => format!("{self:?}"),
        }
    }

    /// True for `+OK`.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        *self == Self::Simple("OK".to_owned())
    }
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects.
    ///
    /// Errors: the socket's.
    pub fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends a request and reads its reply.
    ///
    /// Errors: the socket's, or a reply that is no reply.
    pub fn call(&mut self, words: &[&[u8]]) -> std::io::Result<Reply> {
        self.send(&encode(words))?;
        self.reply()
    }

    /// [`Connection::call`] with the words of `line`.
    ///
    /// # Panics
    ///
    /// When the connection breaks.
    pub fn say(&mut self, line: &str) -> Reply {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        self.call(&words).unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    /// Sends bytes as they are.
    ///
    /// Errors: the socket's.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Reads one reply.
    ///
    /// Errors: the socket's, or a reply that is no reply.
    pub fn reply(&mut self) -> std::io::Result<Reply> {
        let line = self.line()?;
        let (kind, rest) = line.split_at_checked(1).ok_or_else(strange)?;
        let number = || rest.parse::<i64>().map_err(|_| strange());
        Ok(match kind {
            "+" => Reply::Simple(rest.to_owned()),
            "-" => Reply::Error(rest.to_owned()),
            ":" => Reply::Integer(number()?),
            "_" => Reply::Null,
            "$" | "=" | "!" => match usize::try_from(number()?) {
                Ok(length) => Reply::Bulk(self.bulk(length)?),
                Err(_) => Reply::Null,
            },
            "*" | "~" | ">" | "%" => match usize::try_from(number()?) {
                Ok(length) => {
                    let length = if kind == "%" { length * 2 } else { length };
                    Reply::Array((0..length).map(|_| self.reply()).collect::<Result<_, _>>()?)
                }
                Err(_) => Reply::Null,
            },
            _ => Reply::Other(rest.to_owned()),
        })
    }

    /// True when the other end closed the connection, after whatever it still said.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        line.strip_suffix("\r\n").map(str::to_owned).ok_or_else(strange)
    }

    fn bulk(&mut self, length: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; length + 2];
        self.stream.read_exact(&mut bytes)?;
        bytes.truncate(length);
        Ok(bytes)
    }
}

fn strange() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, "not a Redis reply")
}

/// A request as an array of bulk strings.
#[must_use]
pub fn encode(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}
