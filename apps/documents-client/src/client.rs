//! The client: one command at a time, over whatever carries it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use beeline_documents_channel::{ClientCounters, MessageType, RegisterOptions, RequestError};
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};

use crate::collection::{Collection, batch_of};
use crate::error::{ClientError, check_command, check_writes};
use crate::follow::{Members, goes_on};
use crate::login::Login;
use crate::raw;
use crate::transport::{Carrier, Road};

/// How often a command is sent to one member at most.
const ATTEMPTS: usize = 3;
/// MongoDB's code for a command that there is not.
const COMMAND_NOT_FOUND: i32 = 59;
/// Between two looks for the member that leads.
const ELECTION: Duration = Duration::from_millis(50);

/// How a client works.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a command, and connecting, may take. Default 30 s.
    pub timeout: Duration,
    /// How long to look for the member of a replica set that leads. Default 30 s.
    pub selection: Duration,
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
    /// It stays at the member of a replica set that the address names, whether that one leads or not. Default false.
    pub direct: bool,
    /// The user that it logs in as, for a store with users; an address may name one too. Default none.
    pub login: Option<Login>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            selection: Duration::from_secs(30),
            is_rdma: true,
            checksum: false,
            spin: Duration::from_micros(50),
            retry_writes: true,
            outstanding: 16,
            register: RegisterOptions { base_bytes: 4 << 20, ..RegisterOptions::default() },
            wire: None,
            direct: false,
            login: None,
        }
    }
}

/// See the crate's documentation. It stays on its thread.
#[derive(Debug)]
pub struct Client {
    pub(crate) road: Road,
    pub(crate) options: Options,
    session: Vec<u8>,
    statements: i64,
    resent: u64,
    members: Members,
}

impl Client {
    /// Connects to the store at `address`, and goes to another member of its replica set where that one leads:
    /// `auto://HOST:PORT` for the best provider, `shm://`, `verbs://`
    /// or `tcp://` for that one, `mongodb://HOST:PORT` for the wire. `USER:PASSWORD@` before the host logs in.
    ///
    /// Errors: [`ClientError::Address`], [`ClientError::Unreachable`]; [`ClientError::Command`] with code 18 for a
    /// user or a password that is wrong.
    pub fn connect(address: &str, options: Options) -> Result<Self, ClientError> {
        let mut road = Road::new(address, &options)?;
        road.open(&options)?;
        let session = rand::random::<[u8; 16]>().to_vec();
        let members = Members::default();
        let mut client = Self { road, options, session, statements: 0, resent: 0, members };
        // Now: once its member is gone, nobody tells of the others.
        client.learn()?;
        Ok(client)
    }

    /// Asks the member that carries commands what it is; true: it leads.
    fn learn(&mut self) -> Result<bool, ClientError> {
        let hello = doc! { "hello": 1, "$db": "admin" };
        match self.send_here(MessageType::Command, "admin", &hello, true, self.options.timeout) {
            Ok(told) => Ok(self.members.learn(&told)),
            // A server of the wire that is older than `hello` stands alone, as far as this client can tell.
            Err(ClientError::Command { code: COMMAND_NOT_FOUND, .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Goes to the member that leads; false: none was found in time.
    fn go_on(&mut self, deadline: Instant) -> bool {
        while let Some(member) = self.members.next() {
            if self.road.turn_to(member, &self.options).is_ok() && self.learn().unwrap_or(false) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(ELECTION);
        }
        false
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

    /// Whether the last connection stands, as far as this end can tell; the next command makes another one
    /// where it does not.
    pub fn is_connected(&mut self) -> bool {
        self.road.is_alive()
    }

    /// What the channel did, where one carries commands.
    #[must_use]
    pub fn counters(&self) -> Option<ClientCounters> {
        match self.road.carrier() {
            Some(Carrier::Channel { channel, .. }) => Some(channel.counters()),
            _ => None,
        }
    }

    /// Commands that were sent again, after a connection broke or to another member of a replica set.
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
    pub fn run(&mut self, database: &str, command: Document) -> Result<Document, ClientError> {
        self.ask(database, command).and_then(check_writes)
    }

    /// As [`Client::run`]; a reply that says of single documents that they were not written is no error.
    ///
    /// Errors: [`ClientError`].
    pub fn ask(&mut self, database: &str, mut command: Document) -> Result<Document, ClientError> {
        let name = command.keys().next().cloned().unwrap_or_default();
        let again = is_read(&name, &command) || command.contains_key("txnNumber");
        command.insert("$db", database);
        // What waits for news has its own time beside that of any command.
        let limit = self.options.timeout + wait_of(&name, &command);
        self.send(kind_of(&name), database, &command, again, limit)
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
        let limit = self.options.timeout;
        self.send(kind, database, &command, numbered, limit).and_then(check_writes)
    }

    fn send(
        &mut self,
        kind: MessageType,
        name: &str,
        command: &Document,
        again: bool,
        limit: Duration,
    ) -> Result<Document, ClientError> {
        let deadline = Instant::now() + self.options.selection;
        loop {
            let outcome = self.send_here(kind, name, command, again, limit);
            let Err(error) = &outcome else { return outcome };
            let stays = self.options.direct || !self.members.are_several();
            if stays || !goes_on(error, again) || !self.go_on(deadline) {
                return outcome;
            }
            self.resent += 1;
        }
    }

    /// Sends a command to the member that carries commands.
    fn send_here(
        &mut self,
        kind: MessageType,
        name: &str,
        command: &Document,
        again: bool,
        limit: Duration,
    ) -> Result<Document, ClientError> {
        let unreadable = |error: bson::error::Error| ClientError::Protocol(error.to_string());
        let body = command.to_vec().map_err(unreadable)?;
        let bytes = self.carry(kind, name, &body, again, limit)?;
        check_command(Document::from_reader(&bytes[..]).map_err(unreadable)?)
    }

    /// The first document that a filter finds. The request is made, and the reply read, as bytes: of a reply only
    /// the document is decoded.
    pub(crate) fn first(
        &mut self,
        database: &str,
        collection: &str,
        filter: Document,
    ) -> Result<Option<Document>, ClientError> {
        let unreadable = |error: bson::error::Error| ClientError::Protocol(error.to_string());
        let body = raw::find_one(database, collection, &filter.to_vec().map_err(unreadable)?);
        if let Ok(bytes) =
            self.carry(MessageType::Query, database, &body, true, self.options.timeout)
            && let Some(found) = raw::first_of(&bytes)
        {
            return Ok(found);
        }
        // A refusal, or a connection that broke: the plain way says which, and where to go on.
        let find = doc! { "find": collection, "filter": filter, "limit": 1, "singleBatch": true };
        let mut reply = self.run(database, find)?;
        let (batch, _) = batch_of(&mut reply)?;
        Ok(batch.into_iter().next())
    }

    /// The session and the number of the next write, where this client numbers its writes.
    pub(crate) fn number(&mut self) -> Option<(&[u8], i64)> {
        self.options.retry_writes.then(|| {
            self.statements += 1;
            (self.session.as_slice(), self.statements)
        })
    }

    pub(crate) fn count_resent(&mut self) {
        self.resent += 1;
    }

    /// Carries a command's bytes; the reply's, which come within `limit`.
    pub(crate) fn carry(
        &mut self,
        kind: MessageType,
        name: &str,
        body: &[u8],
        again: bool,
        limit: Duration,
    ) -> Result<Vec<u8>, ClientError> {
        let mut last = String::new();
        let mut sent = false;
        for attempt in 0..ATTEMPTS {
            self.resent += u64::from(sent);
            let carrier = self.road.open(&self.options)?;
            match carrier.call(kind, name, body, limit, self.options.spin) {
                Ok(bytes) => return Ok(bytes),
                Err(RequestError::Refused { code, text }) => {
                    return Err(ClientError::refused(code, text));
                }
                Err(RequestError::TimedOut) => {
                    if matches!(carrier, Carrier::Wire { .. }) {
                        // Its late reply would be taken for the next command's.
                        self.road.broke();
                    }
                    return Err(ClientError::TimedOut { limit });
                }
                Err(error) => {
                    tracing::debug!(%error, attempt, "a connection to the document store broke");
                    let unsent = error == RequestError::NotSent;
                    sent |= !unsent;
                    last = error.to_string();
                    if error != RequestError::Corrupt {
                        self.road.broke();
                    }
                    if !again && !unsent {
                        break;
                    }
                }
            }
        }
        if !sent {
            let address = self.road.address().to_owned();
            return Err(ClientError::Unreachable { address, reason: last });
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

/// How long a command waits at the end of its cursor before it answers.
fn wait_of(name: &str, command: &Document) -> Duration {
    let wait_ms = match command.get("maxTimeMS").filter(|_| name == "getMore") {
        Some(Bson::Int32(wait)) => u64::try_from(*wait).unwrap_or(0),
        Some(Bson::Int64(wait)) => u64::try_from(*wait).unwrap_or(0),
        _ => 0,
    };
    // The store waits no longer, whatever it is told.
    Duration::from_millis(wait_ms.min(i32::MAX as u64))
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
