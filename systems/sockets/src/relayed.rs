//! Connections between hosts, as this host's program, monitor and relay see them: names, records,
//! and the bell. `docs/sockets-internals.md` has the bytes.
//!
//! ```text
//!  program ── bell: 16 bytes, a datagram ──────────────► relay: sleeps on both names, and on the
//!  monitor ── Adopt: socket, segment; no answer ───────►        fabric
//!  command ── Status, Connections ──► answers ─────────►
//! ```
//!
//! The other end of a relayed connection's segment is the relay. A program that wakes it, or has
//! closed the connection, or has become one more holder of it, sends a bell; a bell that is lost
//! because many were under way costs nothing: whoever finds several at once looks at everything.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::control::name;
use crate::kernel;

/// First four bytes of every record to and from a relay, and of a bell.
const MAGIC: [u8; 4] = *b"BLSR";
/// Version of the records.
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 8;
/// Bytes of a bell.
pub const BELL_BYTES: usize = 16;
/// Most bytes of a record, question or answer.
pub const LONGEST_RECORD: usize = 256;

/// The abstract name under which the relay of this user takes records (`SOCK_SEQPACKET`).
#[must_use]
pub fn relay_name() -> String {
    format!("{}-relay", name())
}

/// The abstract name at which the relay of this user hears bells (`SOCK_DGRAM`).
#[must_use]
pub fn bell_name() -> String {
    format!("{}-bell", name())
}

/// What monitor or command tell a relay. One record per connection of its own, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Stand for the other end of this connection. Two descriptors come with it: the program's
    /// socket, then the segment. Not answered.
    Adopt(Adopted),
    /// How are you? Answered by [`Reply::Status`].
    Status,
    /// Which connections do you carry? One [`Reply::Connection`] each, then [`Reply::End`].
    Connections,
    /// Is the socket that comes with this record one of yours? Answered by [`Reply::Segment`] with
    /// the segment, or [`Reply::End`]: for who has a socket from another program, when the monitor
    /// was restarted meanwhile.
    Resume,
    /// Bring the connection of this name back to the kernel, with the other relay. Not answered: its
    /// segment says so.
    Recall {
        /// Which.
        cookie: u64,
        /// How long its end does not ask anew.
        hold_ms: u64,
    },
}

/// A connection as the end in this host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Address of the program's end.
    pub own: SocketAddr,
    /// Of the other end, in another host.
    pub peer: SocketAddr,
    /// The program that asked.
    pub process: u32,
    /// The kernel's number of the program's socket: the connection's name at this relay.
    pub cookie: u64,
}

/// What a relay answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Counters.
    Status(RelayStatus),
    /// One carried connection, whether both relays have it, and bytes (with headers) that it moved
    /// out of this host and into it.
    Connection {
        /// Which.
        connection: Adopted,
        /// False while it waits for the other relay.
        paired: bool,
        /// Out of this host, into it.
        moved: [u64; 2],
    },
    /// The segment comes with this record; you are end 0.
    Segment,
    /// No more, or none.
    End,
}

/// Counters of a relay, since it began. What is called *now* goes down again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayStatus {
    /// Its process.
    pub process: u32,
    /// Seconds since it began.
    pub up_seconds: u64,
    /// Connections carried now.
    pub connections: u64,
    /// Ends that wait for the other relay now.
    pub waiting: u64,
    /// Relays of other hosts that are linked now.
    pub links: u64,
    /// Connections that both relays had, so far.
    pub paired: u64,
    /// Connections ended because a link broke or the other side erred, so far.
    pub broken: u64,
    /// Bytes (with headers) of rings, sent to other hosts.
    pub sent_bytes: u64,
    /// Bytes (with headers) of rings, received from other hosts.
    pub received_bytes: u64,
    /// Messages sent to other relays.
    pub messages: u64,
    /// One-sided writes to other hosts.
    pub writes: u64,
    /// Bells heard from programs.
    pub bells: u64,
    /// Doorbells sent through the kernel's connections.
    pub doorbells: u64,
    /// Connections brought back to the kernel, so far.
    pub recalled: u64,
    /// Of these, those whose program here slept at nearly every message.
    pub sleepy: u64,
    /// Ends left to the kernel, because the link to the other host would be the kernel's own TCP.
    pub over_tcp: u64,
}

const WORDS: usize = 16;
/// Of relays of before there were more.
const FEWEST_WORDS: usize = 13;

impl RelayStatus {
    fn words(&self) -> [u64; WORDS] {
        let Self { process, up_seconds, connections, waiting, links, paired, broken, .. } = *self;
        let Self { sent_bytes, received_bytes, messages, writes, bells, .. } = *self;
        let Self { doorbells, recalled, sleepy, over_tcp, .. } = *self;
        let process = u64::from(process);
        [
            process,
            up_seconds,
            connections,
            waiting,
            links,
            paired,
            broken,
            sent_bytes,
            received_bytes,
            messages,
            writes,
            bells,
            doorbells,
            recalled,
            sleepy,
            over_tcp,
        ]
    }

    fn from_words(words: [u64; WORDS]) -> Option<Self> {
        let [process, up_seconds, connections, waiting, links, paired, broken, rest @ ..] = words;
        let [sent_bytes, received_bytes, messages, writes, bells, rest @ ..] = rest;
        let [doorbells, recalled, sleepy, over_tcp] = rest;
        let process = u32::try_from(process).ok()?;
        Some(Self {
            process,
            up_seconds,
            connections,
            waiting,
            links,
            paired,
            broken,
            sent_bytes,
            received_bytes,
            messages,
            writes,
            bells,
            doorbells,
            recalled,
            sleepy,
            over_tcp,
        })
    }
}

/// Why a record was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record of {length} bytes is none of a relay's, version {VERSION}")]
pub struct BadRecord {
    /// Its length.
    pub length: usize,
}

fn head(kind: u8) -> [u8; HEAD_BYTES] {
    [MAGIC[0], MAGIC[1], MAGIC[2], MAGIC[3], VERSION, kind, 0, 0]
}

/// Kind and body of a record.
fn parts(record: &[u8]) -> Option<(u8, &[u8])> {
    let (head, body) = record.split_first_chunk::<HEAD_BYTES>()?;
    (head[..4] == MAGIC && head[4] == VERSION && head[6..] == [0, 0]).then_some((head[5], body))
}

impl Adopted {
    fn encode(&self, record: &mut Vec<u8>) {
        record.extend(self.cookie.to_le_bytes());
        record.extend(self.process.to_le_bytes());
        record.extend(format!("{} {}", self.own, self.peer).as_bytes());
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let (cookie, rest) = body.split_first_chunk::<8>()?;
        let (process, text) = rest.split_first_chunk::<4>()?;
        let (own, peer) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some(Self {
            own: own.parse().ok()?,
            peer: peer.parse().ok()?,
            process: u32::from_le_bytes(*process),
            cookie: u64::from_le_bytes(*cookie),
        })
    }
}

impl Request {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut record = Vec::with_capacity(LONGEST_RECORD);
        match self {
            Self::Adopt(connection) => {
                record.extend(head(1));
                connection.encode(&mut record);
            }
            Self::Status => record.extend(head(2)),
            Self::Connections => record.extend(head(3)),
            Self::Resume => record.extend(head(4)),
            Self::Recall { cookie, hold_ms } => {
                record.extend(head(5));
                record.extend(cookie.to_le_bytes());
                record.extend(hold_ms.to_le_bytes());
            }
        }
        record
    }

    /// From bytes.
    ///
    /// Errors: [`BadRecord`].
    pub fn decode(record: &[u8]) -> Result<Self, BadRecord> {
        let bad = BadRecord { length: record.len() };
        match parts(record).ok_or(bad)? {
            (1, body) => Ok(Self::Adopt(Adopted::decode(body).ok_or(bad)?)),
            (2, []) => Ok(Self::Status),
            (3, []) => Ok(Self::Connections),
            (4, []) => Ok(Self::Resume),
            (5, body) => {
                let (words, []) = body.as_chunks::<8>() else { return Err(bad) };
                let [cookie, hold_ms] = words else { return Err(bad) };
                let [cookie, hold_ms] = [*cookie, *hold_ms].map(u64::from_le_bytes);
                Ok(Self::Recall { cookie, hold_ms })
            }
            _ => Err(bad),
        }
    }
}

impl Reply {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut record = Vec::with_capacity(LONGEST_RECORD);
        match self {
            Self::Status(status) => {
                record.extend(head(16));
                status.words().iter().for_each(|word| record.extend(word.to_le_bytes()));
            }
            Self::Connection { connection, paired, moved } => {
                record.extend(head(17));
                record.push(u8::from(*paired));
                moved.iter().for_each(|bytes| record.extend(bytes.to_le_bytes()));
                connection.encode(&mut record);
            }
            Self::Segment => record.extend(head(18)),
            Self::End => record.extend(head(19)),
        }
        record
    }

    /// From bytes.
    ///
    /// Errors: [`BadRecord`].
    pub fn decode(record: &[u8]) -> Result<Self, BadRecord> {
        let bad = BadRecord { length: record.len() };
        match parts(record).ok_or(bad)? {
            (16, body) => {
                let (words, []) = body.as_chunks::<8>() else { return Err(bad) };
                if words.len() < FEWEST_WORDS {
                    return Err(bad);
                }
                let word = |at| words.get(at).map_or(0, |word| u64::from_le_bytes(*word));
                let status = RelayStatus::from_words(std::array::from_fn(word));
                Ok(Self::Status(status.ok_or(bad)?))
            }
            (17, [paired @ (0 | 1), body @ ..]) => {
                let (out, body) = body.split_first_chunk::<8>().ok_or(bad)?;
                let (into, body) = body.split_first_chunk::<8>().ok_or(bad)?;
                let connection = Adopted::decode(body).ok_or(bad)?;
                let moved = [u64::from_le_bytes(*out), u64::from_le_bytes(*into)];
                Ok(Self::Connection { connection, paired: *paired == 1, moved })
            }
            (18, []) => Ok(Self::Segment),
            (19, []) => Ok(Self::End),
            _ => Err(bad),
        }
    }
}

/// A bell for the connection named `cookie`, as bytes.
#[must_use]
pub fn encode_bell(cookie: u64) -> [u8; BELL_BYTES] {
    let mut record = [0; BELL_BYTES];
    record[..HEAD_BYTES].copy_from_slice(&head(32));
    record[HEAD_BYTES..].copy_from_slice(&cookie.to_le_bytes());
    record
}

/// The connection that a bell names.
///
/// Errors: [`BadRecord`].
pub fn decode_bell(record: &[u8]) -> Result<u64, BadRecord> {
    let bad = BadRecord { length: record.len() };
    match parts(record).ok_or(bad)? {
        (32, body) => Ok(u64::from_le_bytes(body.try_into().map_err(|_| bad)?)),
        _ => Err(bad),
    }
}

/// What became of a bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// The relay will look.
    Yes,
    /// There is no relay any more: its connections are over.
    NoRelay,
}

/// Named by a bell instead of a connection: look at every one. No socket's cookie is 0.
pub const EVERYTHING: u64 = 0;

/// Wakes the relay for the connection named `cookie`. Three system calls, and no descriptor stays.
#[must_use]
pub fn ring(cookie: u64) -> Rung {
    ring_at(&bell_name(), cookie)
}

fn ring_at(name: &str, cookie: u64) -> Rung {
    let send = || -> rustix::io::Result<()> {
        let socket = bell_socket()?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = rustix::net::sendto(&socket, &encode_bell(cookie), flags, &address);
        close(socket);
        sent.map(drop)
    };
    match send().map_err(std::io::Error::from) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Rung::NoRelay,
        // A full queue holds bells that wake just as well. Whatever else the kernel refuses, the
        // next bell may pass.
        _ => Rung::Yes,
    }
}

/// Without the C library's name for it, which is ours, and may wait for a lock of our caller's.
fn close(socket: OwnedFd) {
    let _ = kernel::close(std::os::fd::IntoRawFd::into_raw_fd(socket));
}

fn bell_socket() -> rustix::io::Result<OwnedFd> {
    let fresh = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
    };
    fresh().or_else(|error| {
        if error != rustix::io::Errno::MFILE {
            return Err(error);
        }
        // The program has all the descriptors it may have. A bell is worth one more for a moment.
        use rustix::process::{Resource, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let more = rustix::process::Rlimit {
            current: limit.current.map(|now| now.saturating_add(16)),
            maximum: limit.maximum,
        };
        setrlimit(Resource::Nofile, more)?;
        let socket = fresh();
        let _ = setrlimit(Resource::Nofile, limit);
        socket
    })
}

/// The relay's side of the bell.
#[derive(Debug)]
pub struct Belfry(OwnedFd);

/// Most bells that are heard at a time: more than the queue holds, which is eleven or so.
const HEARD_AT_A_TIME: u32 = 16;

/// What a relay heard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Connections named.
    pub cookies: Vec<u64>,
    /// Several were queued, so that some may have been dropped: look at every connection.
    pub all: bool,
    /// Another user rang, too. He may be a program of ours that became somebody else, so that what he names
    /// counts; but whoever he is can crowd the queue for as long as he likes.
    pub strangers: bool,
}

impl Belfry {
    /// Takes the name of this user's relay's bell.
    ///
    /// Errors: `AddrInUse` when there is a relay; the kernel's.
    pub fn bind() -> std::io::Result<Self> {
        Self::bind_at(&bell_name())
    }

    fn bind_at(name: &str) -> std::io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        rustix::net::sockopt::set_socket_passcred(&socket, true)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        Ok(Self(socket))
    }

    /// Takes what was rung since the last time. Never waits. What is no bell counts as one for
    /// everybody: it may have taken a bell's place in the queue.
    pub fn hear(&self, heard: &mut Heard) {
        heard.cookies.clear();
        (heard.all, heard.strangers) = (false, false);
        let own = rustix::process::geteuid().as_raw();
        let mut record = [0; BELL_BYTES + 1];
        // Bounded: a program that rings without end does not keep us here.
        for turn in 0..HEARD_AT_A_TIME {
            let received = kernel::receive_from_user(self.0.as_raw_fd(), &mut record);
            let Ok((length, user)) = received else { return };
            heard.strangers |= !user.is_some_and(|user| user == own || user == 0);
            match decode_bell(record.get(..length).unwrap_or_default()) {
                Ok(EVERYTHING) | Err(_) => heard.all = true,
                Ok(cookie) => heard.cookies.push(cookie),
            }
            heard.all |= turn >= 4;
        }
    }
}

impl std::os::fd::AsFd for Belfry {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adopted() -> Adopted {
        Adopted {
            own: "10.0.0.1:80".parse().unwrap(),
            peer: "[fd00::2]:40000".parse().unwrap(),
            process: 77,
            cookie: u64::MAX - 1,
        }
    }

    #[test]
    fn every_record_comes_back_as_it_was_and_cut_short_as_no_such() {
        let requests = [
            Request::Adopt(adopted()),
            Request::Status,
            Request::Connections,
            Request::Resume,
            Request::Recall { cookie: 7, hold_ms: u64::MAX },
        ];
        for request in requests {
            let record = request.encode();
            assert!(record.len() <= LONGEST_RECORD);
            assert_eq!(Request::decode(&record), Ok(request));
            for cut in 0..record.len() {
                assert_ne!(Request::decode(&record[..cut]), Ok(request));
            }
        }
        let status = RelayStatus { process: 7, broken: 9, recalled: 8, ..RelayStatus::default() };
        let status = RelayStatus { sleepy: 5, doorbells: 6, over_tcp: 4, ..status };
        let replies = [
            Reply::Status(status),
            Reply::Connection { connection: adopted(), paired: true, moved: [1, u64::MAX] },
            Reply::Segment,
            Reply::End,
        ];
        for reply in replies {
            let record = reply.encode();
            assert!(record.len() <= LONGEST_RECORD);
            assert_eq!(Reply::decode(&record), Ok(reply));
            for cut in 0..record.len() {
                assert_ne!(Reply::decode(&record[..cut]), Ok(reply));
            }
        }
        assert_eq!(decode_bell(&encode_bell(5)), Ok(5));
    }

    #[test]
    fn records_changed_anywhere_are_refused_or_other_whole_records() {
        // Hostile bytes: every record with every byte changed, and with bytes behind it.
        let records = [
            Request::Adopt(adopted()).encode(),
            Reply::Status(RelayStatus::default()).encode(),
            Reply::Connection { connection: adopted(), paired: false, moved: [3, 4] }.encode(),
            encode_bell(9).to_vec(),
        ];
        for record in records {
            for place in 0..record.len() {
                for change in [1, 0x20, 0x80, 0xff] {
                    let mut hostile = record.clone();
                    hostile[place] ^= change;
                    if let Ok(request) = Request::decode(&hostile) {
                        assert_eq!(Request::decode(&request.encode()), Ok(request));
                    }
                    if let Ok(reply) = Reply::decode(&hostile) {
                        assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
                    }
                    if place < HEAD_BYTES {
                        assert!(decode_bell(&hostile).is_err());
                    }
                }
            }
            let mut longer = record.clone();
            longer.extend([0; 3]);
            assert!(Request::decode(&longer).is_err() && Reply::decode(&longer).is_err());
            assert!(decode_bell(&longer).is_err());
        }
        let whole = Request::Adopt(adopted()).encode();
        let text = String::from_utf8_lossy(&whole[HEAD_BYTES + 12..]).into_owned();
        for wrong in ["", " ", "10.0.0.1:80", "10.0.0.1:80 ", "a b", &format!("{text} {text}")] {
            let mut record = whole[..HEAD_BYTES + 12].to_vec();
            record.extend(wrong.as_bytes());
            assert!(Request::decode(&record).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn bells_are_heard_many_mean_look_everywhere_and_no_relay_is_told() {
        let name = format!("beeline-test-bell-{}", std::process::id());
        let ring = |cookie| ring_at(&name, cookie);
        assert_eq!(ring(1), Rung::NoRelay);
        let belfry = Belfry::bind_at(&name).unwrap();
        let mut heard = Heard::default();
        assert_eq!(ring(5), Rung::Yes);
        assert_eq!(ring(6), Rung::Yes);
        belfry.hear(&mut heard);
        assert_eq!(heard, Heard { cookies: vec![5, 6], ..Heard::default() });
        assert_eq!(ring(EVERYTHING), Rung::Yes);
        belfry.hear(&mut heard);
        assert_eq!(heard, Heard { all: true, ..Heard::default() });
        assert_eq!(ring(5), Rung::Yes);
        assert_eq!(ring(6), Rung::Yes);
        belfry.hear(&mut heard);
        assert_eq!(heard, Heard { cookies: vec![5, 6], ..Heard::default() });
        // More than the queue holds: the last are dropped, and everything is looked at.
        (0..100).for_each(|cookie| assert_eq!(ring(cookie), Rung::Yes));
        belfry.hear(&mut heard);
        assert!(heard.all && heard.cookies.len() < 100, "{heard:?}");
        belfry.hear(&mut heard);
        assert_eq!(heard, Heard::default());
        if rustix::process::geteuid().is_root() {
            // What another user names is looked at, and that it was another is told.
            let stranger = || {
                let nobody = rustix::process::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
                assert_eq!(ring(8), Rung::Yes);
            };
            std::thread::scope(|scope| _ = scope.spawn(stranger));
            belfry.hear(&mut heard);
            assert_eq!(heard, Heard { cookies: vec![8], all: false, strangers: true });
            assert_eq!(ring(9), Rung::Yes);
            belfry.hear(&mut heard);
            assert_eq!(heard, Heard { cookies: vec![9], ..Heard::default() });
        }
        drop(belfry);
        assert_eq!(ring(7), Rung::NoRelay);
    }
}
