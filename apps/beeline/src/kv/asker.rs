//! The few words of Redis protocol that a backup and a watch need.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::exit::{Exit, Failure};

/// The node said no.
#[derive(Debug)]
struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// A connection to a node's Redis door.
pub(super) struct Asker {
    stream: BufReader<TcpStream>,
    patience: Duration,
    deadline: Instant,
}

/// Longest answer understood.
const LONGEST_BYTES: u64 = 1 << 20;

impl Asker {
    /// Connects; the node has `patience` for everything that is asked, see [`Self::renew`].
    pub fn open(address: SocketAddr, patience: Duration) -> anyhow::Result<Self> {
        let stream =
            TcpStream::connect_timeout(&address, Duration::from_secs(5)).map_err(|error| {
                anyhow::anyhow!("no node answers at {address}: {error}; check --resp-address")
            })?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        let deadline = Instant::now() + patience;
        Ok(Self { stream: BufReader::new(stream), patience, deadline })
    }

    /// The node's patience begins anew.
    pub fn renew(&mut self) {
        self.deadline = Instant::now() + self.patience;
    }

    /// The texts of the answer, flat.
    ///
    /// Errors: a node that refuses has failed; one that does not answer in time, breaks off, or answers
    /// otherwise than a node does, is unreachable.
    pub fn ask(&mut self, words: &[&str]) -> Result<Vec<String>, Failure> {
        self.exchange(words).map_err(|error| {
            let exit = if error.is::<Refused>() { Exit::Failed } else { Exit::Unreachable };
            Failure::new(exit, error)
        })
    }

    fn exchange(&mut self, words: &[&str]) -> anyhow::Result<Vec<String>> {
        let mut bytes = format!("*{}\r\n", words.len());
        for word in words {
            bytes.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.stream.get_mut().write_all(bytes.as_bytes())?;
        let mut texts = Vec::new();
        let mut left = 1_u64;
        while left > 0 {
            anyhow::ensure!(Instant::now() < self.deadline, "the node did not answer in time");
            left -= 1;
            let mut line = String::new();
            (&mut self.stream).take(LONGEST_BYTES).read_line(&mut line)?;
            let line = line.strip_suffix("\r\n").context("the node broke off its answer")?;
            let (kind, rest) = line.split_at_checked(1).context("an empty answer")?;
            match kind {
                "-" => return Err(Refused(format!("the node refused {}: {rest}", words[0])).into()),
                "*" | "%" => {
                    let count = rest.parse::<u64>()?.min(LONGEST_BYTES);
                    left += if kind == "%" { count * 2 } else { count };
                }
                "$" => {
                    let length = rest.parse::<u64>()?.min(LONGEST_BYTES);
                    let mut body = vec![0; usize::try_from(length)? + 2];
                    self.stream.read_exact(&mut body)?;
                    body.truncate(usize::try_from(length)?);
                    texts.push(String::from_utf8_lossy(&body).into_owned());
                }
                _ => texts.push(rest.to_owned()),
            }
        }
        Ok(texts)
    }
}
