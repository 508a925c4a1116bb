//! The MongoDB wire, as far as a client needs it: OP_MSG with one document each way.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use beeline_documents_channel::RequestError;

const OP_MSG: i32 = 2013;
const HEADER: usize = 16;
const LONGEST: usize = 48_000_000 + 1024;
/// Bytes read at once.
const READ: usize = 16 << 10;

/// A connection that asks one thing at a time.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    requests: i32,
    message: Vec<u8>,
    /// The reply as it comes.
    reply: Vec<u8>,
    /// How long a read or a write waits.
    limit: Option<Duration>,
}

impl Wire {
    pub(crate) fn connect(address: SocketAddr, limit: Duration) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, requests: 0, message: Vec::new(), reply: Vec::new(), limit: None })
    }

    /// Whether the other end has not closed it: nothing waits to be read between a reply and a command.
    pub(crate) fn is_alive(&self) -> bool {
        let looked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        let waits = looked.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        self.stream.set_nonblocking(false).is_ok() && waits
    }

    /// Sends a command and takes its reply. After an error the connection is of no use.
    pub(crate) fn call(&mut self, body: &[u8], limit: Duration) -> Result<Vec<u8>, RequestError> {
        self.requests = self.requests.wrapping_add(1);
        let length = HEADER + 5 + body.len();
        self.message.clear();
        self.message.extend((length as i32).to_le_bytes());
        self.message.extend(self.requests.to_le_bytes());
        self.message.extend(0_i32.to_le_bytes());
        self.message.extend(OP_MSG.to_le_bytes());
        // No flags, one section of one document.
        self.message.extend([0; 5]);
        self.message.extend(body);
        let deadline = Instant::now() + limit;
        let broken = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => RequestError::TimedOut,
            _ => RequestError::Broken,
        };
        self.limit(deadline)?;
        self.stream.write_all(&self.message).map_err(broken)?;
        // A short reply comes with one read.
        if self.reply.is_empty() {
            self.reply.resize(READ, 0);
        }
        let have = self.fill(0, HEADER, deadline)?;
        let word =
            |at: usize| i32::from_le_bytes(std::array::from_fn(|byte| self.reply[at + byte]));
        let length = usize::try_from(word(0)).unwrap_or(0);
        if !(HEADER + 10..=LONGEST).contains(&length)
            || word(8) != self.requests
            || word(12) != OP_MSG
        {
            return Err(RequestError::Broken);
        }
        self.reply.resize(length.max(READ), 0);
        let have = self.fill(have, length, deadline)?;
        if have != length || self.reply[HEADER..HEADER + 5] != [0; 5] {
            return Err(RequestError::Broken);
        }
        if length <= READ {
            return Ok(self.reply[HEADER + 5..length].to_vec());
        }
        let mut whole = std::mem::take(&mut self.reply);
        whole.drain(..HEADER + 5);
        Ok(whole)
    }

    /// Sees to it that no read and no write waits much longer than this.
    fn limit(&mut self, deadline: Instant) -> Result<(), RequestError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RequestError::TimedOut);
        }
        // Two system calls less for each command: a sixteenth more than is left is near enough.
        if self.limit.is_some_and(|limit| limit >= left && limit - left <= left / 16) {
            return Ok(());
        }
        let set = self
            .stream
            .set_read_timeout(Some(left))
            .and_then(|()| self.stream.set_write_timeout(Some(left)));
        self.limit = set.is_ok().then_some(left);
        set.map_err(|_| RequestError::Broken)
    }

    /// Reads until `least` bytes of the reply are there, of which there are `have`; how many are.
    fn fill(
        &mut self,
        mut have: usize,
        least: usize,
        deadline: Instant,
    ) -> Result<usize, RequestError> {
        while have < least {
            match self.stream.read(&mut self.reply[have..]) {
                Ok(0) => return Err(RequestError::Broken),
                Ok(count) => have += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => match error.kind() {
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                        self.limit(deadline)?;
                    }
                    _ => return Err(RequestError::Broken),
                },
            }
        }
        Ok(have)
    }
}
