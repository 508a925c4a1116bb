//! The state of one connection.

use crate::args::{Args, ArgsBuffer};
use crate::output::{Output, Version};
use crate::server::Server;
use crate::table::Command;

/// The name of the only user.
pub const DEFAULT_USER: &str = "default";

/// Whether replies are sent, as CLIENT REPLY switches it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Replies {
    #[default]
    On,
    Off,
    /// SKIP was just executed: the reply of the next command is dropped.
    SkipNext,
    /// The reply of the current command is dropped.
    Skip,
}

/// A key whose entry must stay the same for EXEC to run.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    pub database: u8,
    pub key: Vec<u8>,
    /// Version of the entry at WATCH; `None`: there was no such key.
    pub version: Option<beeline_kv::Version>,
    /// Where there was no such key: whether it came and went since.
    pub absent: Option<std::sync::Arc<crate::AbsentWatch>>,
    /// What the key held, where versions say nothing to other replicas.
    pub fingerprint: Option<u64>,
}

/// A transaction between MULTI and EXEC.
#[derive(Debug, Default)]
pub(crate) struct Transaction {
    pub open: bool,
    /// A command was refused while queueing: EXEC must fail.
    pub failed: bool,
    pub requests: ArgsBuffer,
    pub commands: Vec<&'static Command>,
}

impl Transaction {
    pub fn clear(&mut self) {
        self.open = false;
        self.failed = false;
        self.requests.clear();
        self.commands.clear();
    }
}

/// What CLIENT LIST shows of a connection. Plain data: the node keeps copies of it where other
/// threads can read them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientInfo {
    /// Number of the connection, unique in the life of the node.
    pub id: u64,
    /// Remote `address:port`.
    pub address: String,
    /// Local `address:port`.
    pub local_address: String,
    /// File descriptor.
    pub descriptor: i32,
    /// Name given by CLIENT SETNAME.
    pub name: Vec<u8>,
    /// Client library and its version, given by CLIENT SETINFO.
    pub library: (Vec<u8>, Vec<u8>),
    /// When it connected, in Unix microseconds.
    pub connected_us: u64,
    /// When its latest command began, in Unix microseconds.
    pub active_us: u64,
    /// Selected database.
    pub database: u8,
    /// Queued commands; `None` outside a transaction.
    pub queued: Option<usize>,
    /// Bytes of queued commands.
    pub queued_bytes: usize,
    /// Watched keys.
    pub watched: usize,
    /// Received bytes that wait to be parsed, and free room behind them.
    pub query_buffer: (usize, usize),
    /// Reply bytes that wait to be sent.
    pub output_bytes: usize,
    /// Latest command.
    pub command: &'static str,
    /// User.
    pub user: &'static str,
    /// Protocol version.
    pub version: i64,
    /// Exempt from eviction.
    pub no_evict: bool,
    /// Does not mark keys used.
    pub no_touch: bool,
}

impl ClientInfo {
    /// Appends the line of CLIENT LIST, without its end.
    pub fn write_line(&self, now_us: u64, out: &mut Vec<u8>) {
        let seconds = |since: u64| now_us.saturating_sub(since) / 1_000_000;
        let mut flags = String::new();
        for (set, letter) in
            [(self.queued.is_some(), 'x'), (self.no_evict, 'e'), (self.no_touch, 'T')]
        {
            if set {
                flags.push(letter);
            }
        }
        if flags.is_empty() {
            flags.push('N');
        }
        let queued = self.queued.map_or(-1, |count| i64::try_from(count).unwrap_or(i64::MAX));
        let text = format!(
            "id={} addr={} laddr={} fd={} name=",
            self.id, self.address, self.local_address, self.descriptor
        );
        out.extend_from_slice(text.as_bytes());
        out.extend_from_slice(&self.name);
        let text = format!(
            " age={} idle={} flags={flags} db={} sub=0 psub=0 ssub=0 multi={queued} qbuf={} \
             qbuf-free={} multi-mem={} obl={} tot-mem={} \
             events=r cmd={} user={} redir=-1 resp={} lib-name=",
            seconds(self.connected_us),
            seconds(self.active_us),
            self.database,
            self.query_buffer.0,
            self.query_buffer.1,
            self.queued_bytes,
            self.output_bytes,
            self.query_buffer.0 + self.query_buffer.1 + self.queued_bytes + self.output_bytes,
            self.command,
            self.user,
            self.version,
        );
        out.extend_from_slice(text.as_bytes());
        out.extend_from_slice(&self.library.0);
        out.extend_from_slice(b" lib-ver=");
        out.extend_from_slice(&self.library.1);
    }
}

/// The state of one connection that commands read and change.
#[derive(Debug)]
pub struct Session {
    /// What CLIENT LIST shows. The node sets identity, addresses and buffer sizes.
    pub info: ClientInfo,
    pub(crate) version: Version,
    pub(crate) authenticated: bool,
    pub(crate) replies: Replies,
    pub(crate) transaction: Transaction,
    pub(crate) watched: Vec<Watched>,
    pub(crate) closing: bool,
    pub(crate) stale_reads: bool,
}

impl Session {
    /// A fresh connection. `info` carries what the node knows; the rest starts as Redis' does.
    #[must_use]
    pub fn new(mut info: ClientInfo, server: &dyn Server) -> Self {
        info.user = DEFAULT_USER;
        info.command = "NULL";
        info.version = Version::Resp2.number();
        Self {
            info,
            version: Version::Resp2,
            authenticated: !server.password_required(),
            replies: Replies::On,
            transaction: Transaction::default(),
            watched: Vec::new(),
            closing: false,
            stale_reads: false,
        }
    }

    /// Whether READONLY allows it to see a replica's state as it is, which may be old.
    #[inline]
    #[must_use]
    pub fn reads_stale(&self) -> bool {
        self.stale_reads
    }

    /// A request was refused by the node: a transaction that was being queued fails.
    pub fn refuse_queued(&mut self) {
        self.transaction.failed |= self.transaction.open;
    }

    /// EXEC was refused by the node: the transaction is over, as after any other error of EXEC.
    pub fn drop_transaction(&mut self) {
        self.transaction.clear();
        self.watched.clear();
    }

    /// Number of the connection.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.info.id
    }

    /// Selected database.
    #[inline]
    #[must_use]
    pub fn database(&self) -> u8 {
        self.info.database
    }

    /// The dialect of its replies.
    #[inline]
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether it may run commands; tell its parser
    /// ([`crate::RequestParser::set_authenticated`]).
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Whether it is between MULTI and EXEC.
    #[inline]
    #[must_use]
    pub fn in_transaction(&self) -> bool {
        self.transaction.open
    }

    /// An up-to-date copy for other threads to show.
    #[must_use]
    pub fn snapshot(&self) -> ClientInfo {
        let mut info = self.info.clone();
        self.refresh(&mut info);
        info
    }

    pub(crate) fn refresh(&self, info: &mut ClientInfo) {
        info.queued = self.transaction.open.then_some(self.transaction.commands.len());
        info.queued_bytes = self.transaction.requests.bytes();
        info.watched = self.watched.len();
        info.version = self.version.number();
    }

    pub(crate) fn set_version(&mut self, version: Version, out: &mut Output) {
        self.version = version;
        out.set_version(version);
    }

    /// Copies a request into the open transaction. `false`: it has no room.
    pub(crate) fn queue(&mut self, command: &'static Command, args: Args<'_>) -> bool {
        let queued = self.transaction.requests.push(args);
        if queued {
            self.transaction.commands.push(command);
        }
        queued
    }

    /// To be called when the reply of a command has been appended behind the first `start` bytes
    /// of `out`: drops it where the client switched replies off.
    pub(crate) fn finish_reply(&mut self, out: &mut Output, start: usize) {
        if !self.takes_reply() {
            out.truncate(start);
        }
    }

    /// Whether the client wants the reply of the command that runs now. To be asked once per
    /// command: CLIENT REPLY SKIP counts them. [`crate::Executor::execute`] does so itself; a node
    /// asks when it sends a command to another shard.
    pub fn takes_reply(&mut self) -> bool {
        match self.replies {
            Replies::On => return true,
            Replies::Off => {}
            Replies::SkipNext => self.replies = Replies::Skip,
            Replies::Skip => self.replies = Replies::On,
        }
        false
    }
}
