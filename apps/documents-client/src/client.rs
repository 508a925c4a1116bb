//! The client: one command at a time, over whatever carries it.

use std::net::SocketAddr;
use std::time::Duration;

use beeline_documents_channel::{ClientCounters, MessageType, RegisterOptions, RequestError};
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};

use crate::collection::Collection;
use crate::error::{ClientError, check};
use crate::transport::{Carrier, Road};

/// How often a command is sent at most.
const ATTEMPTS: usize = 3;

/// How a client works.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a command, and connecting, may take. Default 30 s.
    pub timeout: Duration,
    /// The channel is wanted; otherwise both ends agree on TCP. Default true.
    pub is_rdma: bool,
    /// Replies carry checksums. Default false.
    pub checksum: bool,
    /// How long to poll for a reply before sleeping. Default 50 us.
    pub spin: Duration,
    /// Writes carry the number of a session, so that they can be sent again and are executed once. Default
    /// true.
    pub retry_writes: bool,
    /// Requests under way at once, 1 to 1024. Default 16.
    pub outstanding: u16,
    /// Size of the memory for replies. Default 4 MiB on a host without load.
    pub register: RegisterOptions,
    /// Where the MongoDB wire is spoken, where the store cannot be asked. Default unknown.
    pub wire: Option<SocketAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            is_rdma: true,
            checksum: false,
            spin: Duration::from_micros(50),
            retry_writes: true,
            outstanding: 16,
            register: RegisterOptions { base_bytes: 4 << 20, ..RegisterOptions::default() },
            wire: None,
        }
    }
}

/// See the crate's documentation. It stays on its thread.
#[derive(Debug)]
pub struct Client {
    road: Road,
    options: Options,
    session: Vec<u8>,
    statements: i64,
    resent: u64,
}

impl Client {
    /// Connects to the store at `address`: `auto://HOST:PORT` for the best provider, `shm://`, `verbs://`
    /// or `tcp://` for that one, `mongodb://HOST:PORT` for the wire.
    ///
    /// Errors: [`ClientError::Address`], [`ClientError::Unreachable`].
    pub fn connect(address: &str, options: Options) -> Result<Self, ClientError> {
        let mut road = Road::new(address, &options)?;
        road.open(&options)?;
        let session = rand::random::<[u8; 16]>().to_vec();
        Ok(Self { road, options, session, statements: 0, resent: 0 })
    }

    /// What carries commands now, as in `shm`, `tcp`, `verbs` or `mongodb wire`.
    #[must_use]
    pub fn transport(&self) -> &str {
        match self.road.carrier() {
            Some(Carrier::Channel { provider, .. }) => provider,
            Some(Carrier::Wire { .. }) => "mongodb wire",
            None => "none",
        }
    }

    /// Why that one.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self.road.carrier() {
            Some(Carrier::Channel { reason, .. } | Carrier::Wire { reason, .. }) => reason,
            None => "the last connection broke",
        }
    }

    /// What the channel did, where one carries commands.
    #[must_use]
    pub fn counters(&self) -> Option<ClientCounters> {
        match self.road.carrier() {
            Some(Carrier::Channel { channel, .. }) => Some(channel.counters()),
            _ => None,
        }
    }

    /// Commands that were sent again after a connection broke.
    #[must_use]
    pub fn resent(&self) -> u64 {
        self.resent
    }

    /// A collection, which is made by its first document.
    pub fn collection(&mut self, database: &str, name: &str) -> Collection<'_> {
        Collection::new(self, database, name)
    }

    /// Runs any command of the store. One that changes something is not sent again, unless it carries a
    /// session and a number itself.
    ///
    /// Errors: [`ClientError`].
    pub fn run(&mut self, database: &str, mut command: Document) -> Result<Document, ClientError> {
        let name = command.keys().next().cloned().unwrap_or_default();
        let again = is_read(&name, &command) || command.contains_key("txnNumber");
        command.insert("$db", database);
        self.send(kind_of(&name), database, &command, again)
    }

    /// Runs a write of one document, which is sent again where its outcome is lost.
    pub(crate) fn write(
        &mut self,
        database: &str,
        mut command: Document,
        single: bool,
    ) -> Result<Document, ClientError> {
        let kind = kind_of(command.keys().next().map_or("", String::as_str));
        command.insert("$db", database);
        let numbered = single && self.options.retry_writes;
        if numbered {
            self.statements += 1;
            let id = Binary { subtype: BinarySubtype::Uuid, bytes: self.session.clone() };
            command.insert("lsid", doc! { "id": id });
            command.insert("txnNumber", self.statements);
        }
        self.send(kind, database, &command, numbered)
    }

    fn send(
        &mut self,
        kind: MessageType,
        name: &str,
        command: &Document,
        again: bool,
    ) -> Result<Document, ClientError> {
        let unreadable = |error: bson::error::Error| ClientError::Protocol(error.to_string());
        let body = command.to_vec().map_err(unreadable)?;
        let mut last = String::new();
        for attempt in 0..ATTEMPTS {
            self.resent += u64::from(attempt > 0);
            let carrier = self.road.open(&self.options)?;
            match carrier.call(kind, name, &body, &self.options) {
                Ok(bytes) => {
                    let reply = Document::from_reader(&bytes[..]).map_err(unreadable)?;
                    return check(reply);
                }
                Err(RequestError::Refused { code, text }) => {
                    return Err(ClientError::Command {
                        code: code as i32,
                        name: String::new(),
                        message: text,
                        labels: Vec::new(),
                    });
                }
                Err(RequestError::TimedOut) => {
                    if matches!(carrier, Carrier::Wire { .. }) {
                        // Its late reply would be taken for the next command's.
                        self.road.broke();
                    }
                    return Err(ClientError::TimedOut { limit: self.options.timeout });
                }
                Err(error) => {
                    tracing::debug!(%error, attempt, "a connection to the document store broke");
                    last = error.to_string();
                    if error != RequestError::Corrupt {
                        self.road.broke();
                    }
                    if !again {
                        break;
                    }
                }
            }
        }
        Err(ClientError::OutcomeUnknown { reason: last })
    }
}

fn kind_of(command: &str) -> MessageType {
    match command {
        "insert" => MessageType::Insert,
        "update" => MessageType::Update,
        "delete" => MessageType::Delete,
        "find" | "getMore" | "aggregate" | "count" | "distinct" => MessageType::Query,
        _ => MessageType::Command,
    }
}

/// Whether executing it twice is as good as once.
fn is_read(name: &str, command: &Document) -> bool {
    match name {
        "find" | "count" | "distinct" | "hello" | "ping" | "buildInfo" | "listCollections"
        | "listDatabases" | "listIndexes" | "collStats" | "dbStats" | "serverStatus"
        | "explain" => true,
        "aggregate" => !command.get_array("pipeline").is_ok_and(|stages| {
            stages
                .iter()
                .filter_map(Bson::as_document)
                .any(|stage| stage.contains_key("$out") || stage.contains_key("$merge"))
        }),
        _ => false,
    }
}
