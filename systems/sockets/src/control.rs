//! Records between a program's library and the monitor. `docs/sockets-internals.md` has the bytes.
//!
//! One question per Unix connection (`SOCK_SEQPACKET`, abstract name), one answer. A question
//! about a connection carries the kernel socket itself, so the monitor reads the addresses from
//! the kernel and nobody can ask for a connection that he does not hold.

use std::net::SocketAddr;

/// First four bytes of every record.
const MAGIC: [u8; 4] = *b"BLSM";
/// Version of the records.
const VERSION: u8 = 1;
/// Bytes of a question.
pub const QUESTION_BYTES: usize = 8;
/// Longest time for which a monitor [holds](Question::Hold) a process.
pub const LONGEST_HOLD_SECONDS: u16 = 3600;
/// Most bytes of an answer.
pub const LONGEST_ANSWER: usize = 256;

/// What a library or the command asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Which segment belongs to the connected socket that comes with this record?
    Attach,
    /// As [`Question::Attach`], for a socket that came into this program already introduced: by
    /// `exec`, or in a message. Never begins an introduction.
    Resume,
    /// How are you?
    Status,
    /// Which connections have you introduced? One answer each, then [`Answer::End`].
    Connections,
    /// What do the connections move that you still know? One answer each, then [`Answer::End`].
    Traffic,
    /// As [`Question::Resume`], for who only looks: the end is not his.
    Look,
    /// Introduce nothing of the process whose `pidfd` comes with this record, for so many seconds: it is
    /// about to be moved. 0: go on. The answer is [`Answer::End`].
    Hold {
        /// How long, at most [`LONGEST_HOLD_SECONDS`] as the monitor takes it.
        seconds: u16,
    },
}

/// What the monitor answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The segment comes with this record; you are end 0 or 1.
    Segment {
        /// 0 for who asked first.
        side: u8,
    },
    /// Stay with the kernel.
    Plain,
    /// Stay with the kernel, as does every connection to another host: there are no hosts.
    NoHosts,
    /// Counters.
    Status(Status),
    /// One introduced connection.
    Connection(Introduced),
    /// One introduced connection, and bytes (with headers) that went into its rings so far: from
    /// the first end, and from the second. What the ends wrote, so a hint.
    Traffic(Introduced, [u64; 2]),
    /// No more.
    End,
}

/// Counters of a monitor, since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Its process.
    pub process: u32,
    /// Seconds since it began.
    pub up_seconds: u64,
    /// Questions about a connection.
    pub asked: u64,
    /// Connections of which both ends asked.
    pub paired: u64,
    /// Ends whose other end has not asked yet.
    pub waiting: u64,
    /// Questions answered with "stay with the kernel".
    pub refused: u64,
    /// Of these, those that the policy decided.
    pub denied: u64,
    /// Segments kept for ends that change programs.
    pub kept: u64,
    /// Connections to other hosts that were handed to the relay.
    pub relayed: u64,
    /// Of the refused, those to other hosts where none is configured.
    pub no_hosts: u64,
    /// Of the refused, those to other hosts than the configured ones.
    pub strangers: u64,
    /// Of the refused, those to other hosts that are reached by the kernel's own TCP.
    pub over_tcp: u64,
    /// Of the refused, those of processes that are called back.
    pub held: u64,
}

/// A connection of which both ends asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Introduced {
    /// The end that asked first, and its process.
    pub first: SocketAddr,
    /// Its process.
    pub first_process: u32,
    /// The other.
    pub second: SocketAddr,
    /// Its process.
    pub second_process: u32,
}

impl Introduced {
    fn encode(&self, record: &mut Vec<u8>) {
        record.extend(self.first_process.to_le_bytes());
        record.extend(self.second_process.to_le_bytes());
        record.extend(format!("{} {}", self.first, self.second).as_bytes());
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let (first, rest) = body.split_first_chunk::<4>()?;
        let (second, text) = rest.split_first_chunk::<4>()?;
        let (one, other) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some(Self {
            first: one.parse().ok()?,
            first_process: u32::from_le_bytes(*first),
            second: other.parse().ok()?,
            second_process: u32::from_le_bytes(*second),
        })
    }
}

/// Why a record was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record of {length} bytes is none of version {VERSION}")]
pub struct BadRecord {
    /// Its length.
    pub length: usize,
}

fn head(kind: u8) -> [u8; QUESTION_BYTES] {
    head_with(kind, 0)
}

fn head_with(kind: u8, number: u16) -> [u8; QUESTION_BYTES] {
    let [low, high] = number.to_le_bytes();
    [MAGIC[0], MAGIC[1], MAGIC[2], MAGIC[3], VERSION, kind, low, high]
}

/// Kind and body of a record.
fn parts(record: &[u8]) -> Option<(u8, &[u8])> {
    let (head, body) = record.split_at_checked(QUESTION_BYTES)?;
    (head[..4] == MAGIC && head[4] == VERSION).then_some((head[5], body))
}

impl Question {
    /// As bytes.
    #[must_use]
    pub fn encode(self) -> [u8; QUESTION_BYTES] {
        match self {
            Self::Attach => head(1),
            Self::Status => head(2),
            Self::Connections => head(3),
            Self::Resume => head(4),
            Self::Traffic => head(5),
            Self::Look => head(6),
            Self::Hold { seconds } => head_with(7, seconds),
        }
    }

    /// From bytes.
    ///
    /// Errors: [`BadRecord`].
    pub fn decode(record: &[u8]) -> Result<Self, BadRecord> {
        match parts(record) {
            Some((1, [])) => Ok(Self::Attach),
            Some((2, [])) => Ok(Self::Status),
            Some((3, [])) => Ok(Self::Connections),
            Some((4, [])) => Ok(Self::Resume),
            Some((5, [])) => Ok(Self::Traffic),
            Some((6, [])) => Ok(Self::Look),
            Some((7, [])) => {
                let &[.., low, high] = record else {
                    return Err(BadRecord { length: record.len() });
                };
                Ok(Self::Hold { seconds: u16::from_le_bytes([low, high]) })
            }
            _ => Err(BadRecord { length: record.len() }),
        }
    }
}

impl Answer {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut record = Vec::with_capacity(LONGEST_ANSWER);
        match self {
            Self::Segment { side } => {
                record.extend(head(1));
                record.push(*side);
            }
            Self::Plain => record.extend(head(2)),
            Self::Status(status) => {
                record.extend(head(3));
                let Status { process, up_seconds, asked, paired, waiting, .. } = *status;
                let Status { refused, denied, kept, relayed, .. } = *status;
                let process = u64::from(process);
                let Status { no_hosts, strangers, over_tcp, held, .. } = *status;
                let first = [process, up_seconds, asked, paired, waiting];
                let second = [refused, denied, kept, relayed];
                let why = [no_hosts, strangers, over_tcp, held];
                for word in first.into_iter().chain(second).chain(why) {
                    record.extend(word.to_le_bytes());
                }
            }
            Self::Connection(connection) => {
                record.extend(head(4));
                connection.encode(&mut record);
            }
            Self::Traffic(connection, moved) => {
                record.extend(head(6));
                moved.iter().for_each(|bytes| record.extend(bytes.to_le_bytes()));
                connection.encode(&mut record);
            }
            Self::End => record.extend(head(5)),
            Self::NoHosts => record.extend(head(7)),
        }
        record
    }

    /// From bytes.
    ///
    /// Errors: [`BadRecord`].
    pub fn decode(record: &[u8]) -> Result<Self, BadRecord> {
        let bad = BadRecord { length: record.len() };
        match parts(record).ok_or(bad)? {
            (1, [side @ (0 | 1)]) => Ok(Self::Segment { side: *side }),
            (2, []) => Ok(Self::Plain),
            (3, body) => {
                let (words, []) = body.as_chunks::<8>() else { return Err(bad) };
                let [process, up, asked, paired, waiting, rest @ ..] = words else {
                    return Err(bad);
                };
                let [refused, denied, kept, relayed, why @ ..] = rest else { return Err(bad) };
                // Monitors of before there were more say less.
                let why = |at: usize| why.get(at).map_or(0, |word| u64::from_le_bytes(*word));
                Ok(Self::Status(Status {
                    process: u32::try_from(u64::from_le_bytes(*process)).map_err(|_| bad)?,
                    up_seconds: u64::from_le_bytes(*up),
                    asked: u64::from_le_bytes(*asked),
                    paired: u64::from_le_bytes(*paired),
                    waiting: u64::from_le_bytes(*waiting),
                    refused: u64::from_le_bytes(*refused),
                    denied: u64::from_le_bytes(*denied),
                    kept: u64::from_le_bytes(*kept),
                    relayed: u64::from_le_bytes(*relayed),
                    no_hosts: why(0),
                    strangers: why(1),
                    over_tcp: why(2),
                    held: why(3),
                }))
            }
            (4, body) => Ok(Self::Connection(Introduced::decode(body).ok_or(bad)?)),
            (6, body) => {
                let (first, body) = body.split_first_chunk::<8>().ok_or(bad)?;
                let (second, body) = body.split_first_chunk::<8>().ok_or(bad)?;
                let moved = [u64::from_le_bytes(*first), u64::from_le_bytes(*second)];
                Ok(Self::Traffic(Introduced::decode(body).ok_or(bad)?, moved))
            }
            (5, []) => Ok(Self::End),
            (7, []) => Ok(Self::NoHosts),
            _ => Err(bad),
        }
    }
}

/// Variable that names another monitor than the user's usual one.
pub const NAME_VARIABLE: &str = "BEELINE_SOCKETS_MONITOR";
/// Most bytes of a monitor's name: the relay's and its bells' have some more, and the kernel allows 107.
pub const LONGEST_NAME: usize = 100;

static NAME: std::sync::OnceLock<String> = std::sync::OnceLock::new();

/// Before anybody asks for it: the monitor's [`name`] is `given`, whatever the environment says.
pub fn set_name(given: &str) {
    NAME.get_or_init(|| given.to_owned());
}

/// The abstract name under which the monitor of this user listens: one per network namespace, as
/// addresses are. [`NAME_VARIABLE`] as it was when first asked chooses another.
///
/// The name has the versions of records and of segments. After an upgrade new programs have a monitor
/// of their own version beside the earlier one; that one would introduce them by segments that they cannot
/// map, and they would stay on the kernel's connections.
#[must_use]
pub fn name() -> &'static str {
    NAME.get_or_init(|| {
        let given = std::env::var(NAME_VARIABLE).ok();
        given
            .filter(|name| (1..=LONGEST_NAME).contains(&name.len()))
            .unwrap_or_else(|| usual_name(rustix::process::geteuid().as_raw()))
    })
}

fn usual_name(user: u32) -> String {
    format!("beeline-sockets-{VERSION}.{}-{user}", crate::segment::VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitors_of_two_versions_of_segments_have_two_names() {
        assert_eq!(usual_name(1000), format!("beeline-sockets-1.{}-1000", crate::segment::VERSION));
        let magic = crate::segment::MAGIC.to_le_bytes();
        assert_eq!(
            magic[7],
            crate::segment::VERSION,
            "the version that a segment says is the name's"
        );
    }

    #[test]
    fn every_record_comes_back_as_it_was() {
        for question in [
            Question::Attach,
            Question::Resume,
            Question::Status,
            Question::Connections,
            Question::Traffic,
            Question::Look,
            Question::Hold { seconds: 0 },
            Question::Hold { seconds: 0xFEDC },
        ] {
            assert_eq!(Question::decode(&question.encode()), Ok(question));
        }
        let status =
            Status { process: 7, asked: 2, denied: 3, kept: 4, held: 5, ..Status::default() };
        let connection = Introduced {
            first: "127.0.0.1:80".parse().unwrap(),
            first_process: 1,
            second: "[::1]:4000".parse().unwrap(),
            second_process: 2,
        };
        for answer in [
            Answer::Segment { side: 1 },
            Answer::Plain,
            Answer::NoHosts,
            Answer::Status(status),
            Answer::Connection(connection),
            Answer::Traffic(connection, [5, u64::MAX]),
            Answer::End,
        ] {
            let record = answer.encode();
            assert!(record.len() <= LONGEST_ANSWER);
            assert_eq!(Answer::decode(&record), Ok(answer));
            // Cut short it is refused, or another whole record; it never panics.
            for cut in 0..record.len() {
                assert_ne!(Answer::decode(&record[..cut]), Ok(answer));
            }
        }
        assert!(Question::decode(b"BLSM\x02\x01\0\0").is_err());
    }
}
