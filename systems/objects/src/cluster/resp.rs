//! As much of Redis' protocol as the directory needs: commands out, simple replies in.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

/// Patience with the directory.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest text taken from it.
const LONGEST: usize = 1 << 20;

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Text(Vec<u8>),
    Number(i64),
    Nothing,
    List(Vec<Reply>),
    Error(String),
}

/// A connection to a RESP server.
pub(super) struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects, and says the password if there is one.
    pub(super) fn open(address: &str, password: &str) -> io::Result<Self> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, TIMEOUT) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(TIMEOUT))?;
                    stream.set_write_timeout(Some(TIMEOUT))?;
                    let mut connection = Self { stream: BufReader::new(stream) };
                    if !password.is_empty() {
                        let reply = connection.ask(&[&[b"AUTH", password.as_bytes()]])?;
                        if let Some(Reply::Error(text)) = reply.first() {
                            return Err(io::Error::other(text.clone()));
                        }
                    }
                    return Ok(connection);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Sends commands together and takes their replies.
    pub(super) fn ask(&mut self, commands: &[&[&[u8]]]) -> io::Result<Vec<Reply>> {
        let mut bytes = Vec::new();
        for command in commands {
            write!(bytes, "*{}\r\n", command.len())?;
            for word in *command {
                write!(bytes, "${}\r\n", word.len())?;
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        self.stream.get_mut().write_all(&bytes)?;
        commands.iter().map(|_| self.reply(0)).collect()
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        let read = self.stream.by_ref().take(4096).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = String::from_utf8(line).map_err(io::Error::other)?;
        Ok(text.trim_end().to_owned())
    }

    fn reply(&mut self, depth: u32) -> io::Result<Reply> {
        let strange = || io::Error::from(io::ErrorKind::InvalidData);
        let line = self.line()?;
        let (kind, rest) = line.split_at_checked(1).ok_or_else(strange)?;
        let number = || rest.parse::<i64>().map_err(io::Error::other);
        match kind {
            "+" => Ok(Reply::Text(rest.as_bytes().to_vec())),
            "-" => Ok(Reply::Error(rest.to_owned())),
            ":" => Ok(Reply::Number(number()?)),
            "$" => match usize::try_from(number()?) {
                Err(_) => Ok(Reply::Nothing),
                Ok(length) if length > LONGEST => Err(strange()),
                Ok(length) => {
                    let mut text = vec![0; length + 2];
                    self.stream.read_exact(&mut text)?;
                    text.truncate(length);
                    Ok(Reply::Text(text))
                }
            },
            "*" => match usize::try_from(number()?) {
                Err(_) => Ok(Reply::Nothing),
                Ok(length) if length > 1 << 16 || depth > 3 => Err(strange()),
                Ok(length) => {
                    let all = (0..length).map(|_| self.reply(depth + 1));
                    Ok(Reply::List(all.collect::<io::Result<_>>()?))
                }
            },
            "_" => Ok(Reply::Nothing),
            _ => Err(strange()),
        }
    }
}
