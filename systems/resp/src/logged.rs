//! Requests as they stand in a replicated log: what every replica runs, and nothing of the
//! connection they came from but database and dialect.
//!
//! ```text
//! request   kind u8 (1 command, 2 transaction) | dialect u8 (2, 3) | database u8 | 0 u8
//!           | watched u32 | watched x ( database u8 | fingerprint u64 | key )
//!           | commands u32 | commands x ( arguments u32 | arguments x bytes )
//! bytes     length u32, then so many
//! ```
//!
//! Numbers are little endian. A command is one, without watched keys. A fingerprint stands for
//! what a key held at WATCH; 0: there was no such key.

use beeline_kv::Store;
use beeline_kv::entry::slot_bytes_for;

use crate::args::{Args, ArgsBuffer};
use crate::commands::{FLOAT_BYTES, builds_on_values};
use crate::output::Version;
use crate::plan::{Placement, Route, route_of_keys, stores};
use crate::session::Session;
use crate::table::{Found, Handler, resolve};

const COMMAND: u8 = 1;
const TRANSACTION: u8 = 2;

/// One request of the log.
#[derive(Clone, Debug, Default)]
pub struct Logged {
    /// Its commands are queued ones.
    pub(crate) is_transaction: bool,
    pub(crate) version: Version,
    pub(crate) database: u8,
    /// Database, key and fingerprint.
    pub(crate) watched: Vec<(u8, Vec<u8>, u64)>,
    pub(crate) requests: ArgsBuffer,
}

fn put_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    // Requests are shorter than 4 GiB: the parser's limits.
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn put_args(args: Args<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(&(args.len() as u32).to_le_bytes());
    args.from(0).for_each(|argument| put_bytes(argument, out));
}

fn put_head(kind: u8, session: &Session, watched: usize, commands: usize, out: &mut Vec<u8>) {
    let dialect = session.version().number() as u8;
    out.extend_from_slice(&[kind, dialect, session.database(), 0]);
    out.extend_from_slice(&(watched as u32).to_le_bytes());
    if watched == 0 {
        out.extend_from_slice(&(commands as u32).to_le_bytes());
    }
}

impl Session {
    /// Appends a command of this connection.
    pub fn log_command(&self, args: Args<'_>, out: &mut Vec<u8>) {
        put_head(COMMAND, self, 0, 1, out);
        put_args(args, out);
    }

    /// Appends the transaction of this connection, which ends with that, and forgets the watched
    /// keys.
    pub fn log_transaction(&mut self, out: &mut Vec<u8>) {
        let mut transaction = std::mem::take(&mut self.transaction);
        let watched = std::mem::take(&mut self.watched);
        put_head(TRANSACTION, self, watched.len(), transaction.commands.len(), out);
        for key in &watched {
            out.push(key.database);
            out.extend_from_slice(&key.fingerprint.unwrap_or(0).to_le_bytes());
            put_bytes(&key.key, out);
        }
        if !watched.is_empty() {
            out.extend_from_slice(&(transaction.commands.len() as u32).to_le_bytes());
        }
        for index in 0..transaction.requests.len() {
            put_args(transaction.requests.get(index), out);
        }
        transaction.clear();
        self.transaction = transaction;
    }
}

/// What is left to decode.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn count(&mut self) -> Option<usize> {
        let bytes = self.take(4)?.first_chunk()?;
        Some(u32::from_le_bytes(*bytes) as usize)
    }

    fn long(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.take(8)?.first_chunk()?))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.count()?;
        self.take(length)
    }
}

impl Logged {
    /// Whether one of its commands may store something, as any write but a deletion does.
    #[must_use]
    pub fn needs_room(&self) -> bool {
        let mut requests = (0..self.requests.len()).map(|index| self.requests.get(index));
        requests.any(|args| matches!(resolve(args), Found::Command(command) if stores(command)))
    }

    /// Where the request works and how much it writes there, where its arguments alone say so; `None` of a
    /// transaction, and of a command that writes what the keyspace holds (APPEND, COPY) or works on more than
    /// the keys among its arguments.
    #[must_use]
    pub fn reach(&self, placement: &impl Placement) -> Option<Reach> {
        if self.is_transaction {
            return None;
        }
        let args = self.requests.get(0);
        let Found::Command(command) = resolve(args) else {
            return Some(Reach { route: Route::Here, bytes: 0 });
        };
        if !command.takes(args.len()) || !matches!(command.handler, Handler::Data(_)) {
            return Some(Reach { route: Route::Here, bytes: 0 });
        }
        if builds_on_values(command) || !command.has_keys() {
            return None;
        }
        let route = route_of_keys(command, args, self.database, placement)?;
        // At most one entry for each argument, of the longest key, and a row's head with it.
        let longest = command.key_positions(args).map(|at| args.get(at).len()).max().unwrap_or(0);
        let each = Store::field_bytes(longest, 0, 0) + Store::head_bytes(longest) + 64;
        let mut bytes = 0;
        for argument in args.from(1) {
            bytes += each + slot_bytes_for(0, 2 * argument.len());
        }
        if command.name.ends_with("float") {
            bytes += FLOAT_BYTES;
        }
        Some(Reach { route, bytes })
    }

    /// Reads one request, which fills `bytes`; `None` where it does not.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut logged = Self::default();
        logged.read(bytes).then_some(logged)
    }

    /// As [`Logged::decode`], into memory that is there. `false`: what is in it then is no request.
    #[must_use]
    pub fn read(&mut self, bytes: &[u8]) -> bool {
        self.watched.clear();
        self.requests.clear();
        self.read_rest(Rest(bytes)).unwrap_or(false)
    }

    fn read_rest(&mut self, mut rest: Rest<'_>) -> Option<bool> {
        self.is_transaction = match rest.byte()? {
            COMMAND => false,
            TRANSACTION => true,
            _ => return None,
        };
        self.version = match rest.byte()? {
            2 => Version::Resp2,
            3 => Version::Resp3,
            _ => return None,
        };
        self.database = rest.byte()?;
        if u16::from(self.database) >= beeline_kv::DATABASES || rest.byte()? != 0 {
            return None;
        }
        for _ in 0..rest.count()? {
            let database = rest.byte()?;
            let fingerprint = rest.long()?;
            self.watched.push((database, rest.bytes()?.to_vec(), fingerprint));
        }
        let commands = rest.count()?;
        for _ in 0..commands {
            self.requests.begin();
            for _ in 0..rest.count()? {
                if !self.requests.push_word(rest.bytes()?) {
                    return None;
                }
            }
        }
        Some(rest.0.is_empty() && (self.is_transaction || commands == 1))
    }
}

/// What is known of a request before it runs: [`Logged::reach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The shards of its keys.
    pub route: Route,
    /// Bytes of entries that it stores at most, deletions included.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Shards by the last byte of a key.
    struct LastByte;

    impl Placement for LastByte {
        fn shard_of(&self, database: u8, key: &[u8]) -> usize {
            usize::from(database) + usize::from(key.last().copied().unwrap_or(0) - b'0')
        }

        fn shard_of_cursor(&self, _cursor: u64) -> usize {
            0
        }
    }

    fn reach_of(request: &str, database: u8) -> Option<Route> {
        let mut logged = Logged { database, ..Logged::default() };
        let words: Vec<&[u8]> = request.split(' ').map(str::as_bytes).collect();
        assert!(logged.requests.push_words(&words));
        logged.reach(&LastByte).map(|reach| reach.route)
    }

    #[test]
    fn a_request_reaches_the_shards_of_its_keys_or_nobody_knows_where() {
        for request in ["set k1 v", "INCR k1", "hset k1 f v g w", "del k1 a1", "mset k1 a b1 c"] {
            assert_eq!(reach_of(request, 0), Some(Route::Shard(1)), "{request}");
            assert_eq!(reach_of(request, 2), Some(Route::Shard(3)), "{request}");
        }
        for request in ["mset k1 a k2 b", "del k1 k2", "msetex 2 k1 a k2 b EX 5"] {
            assert!(matches!(reach_of(request, 0), Some(Route::Shards(_))), "{request}");
        }
        for request in ["append k1 v", "rename k1 a1", "copy k1 a1", "expire k1 5", "flushall"] {
            assert_eq!(reach_of(request, 0), None, "{request}");
        }
        for request in ["nonsense k1", "set k1", "select 3"] {
            assert_eq!(
                reach_of(request, 0),
                Some(Route::Here),
                "{request}: an error, wherever it runs"
            );
        }
        let transaction = Logged { is_transaction: true, ..Logged::default() };
        assert_eq!(transaction.reach(&LastByte), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = Logged::decode(&bytes);
        }

        #[test]
        fn a_cut_or_longer_request_is_none(cut in 0_usize..30) {
            let mut bytes = vec![COMMAND, 2, 0, 0, 0, 0, 0, 0];
            bytes.extend_from_slice(&1_u32.to_le_bytes());
            let mut requests = ArgsBuffer::new();
            prop_assert!(requests.push_words(&[b"SET", b"key", b"value"]));
            put_args(requests.get(0), &mut bytes);
            prop_assert!(Logged::decode(&bytes).is_some());
            prop_assert!(Logged::decode(&bytes[..bytes.len() - cut.max(1)]).is_none());
            bytes.push(0);
            prop_assert!(Logged::decode(&bytes).is_none());
        }
    }
}
