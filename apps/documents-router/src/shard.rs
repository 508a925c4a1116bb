//! A shard: a few threads with a client each, which carry commands to it.
//!
//! A client stays on its thread, so a command goes to a thread and its reply comes back; as many commands are
//! under way as there are threads. Invariant: no command goes to a store that is not this shard of this cluster:
//! each connection first reads the mark that the shard got when it was added.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_documents_client::{Client, ClientError, Options};
use beeline_documents_query::error::Code;
use bson::oid::ObjectId;
use bson::{Bson, Document, doc};
use tokio::sync::oneshot;

use crate::error::{Refusal, Result, refuse};

/// Where a store keeps which shard it is.
pub const MARK: (&str, &str) = ("config", "shardIdentity");
/// A thread without commands ends after so long.
const IDLE: Duration = Duration::from_secs(30);
/// Stack of a thread: replies may be nested deeply.
const STACK: usize = 8 << 20;

/// How shards are reached.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// How long a command may take there.
    pub timeout: Duration,
    /// How long to look for the member of a shard that leads.
    pub selection: Duration,
    /// Commands under way in one shard at once.
    pub most: usize,
    /// Commands that wait for those, beyond which more are refused.
    pub most_waiting: usize,
}

impl Default for ShardOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            selection: Duration::from_secs(30),
            most: 64,
            most_waiting: 10_000,
        }
    }
}

struct Job {
    database: String,
    command: Document,
    /// It is not sent any more then: where its documents belong may have changed.
    before: Option<Instant>,
    answer: oneshot::Sender<Result<Document>>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

/// See the module's documentation.
pub struct Shard {
    name: String,
    address: String,
    /// The cluster it has to belong to; `None`: it is not looked at.
    cluster: Option<ObjectId>,
    options: ShardOptions,
    state: Mutex<State>,
    came: Condvar,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("name", &self.name).field("address", &self.address).finish()
    }
}

impl Shard {
    /// A shard; nothing is connected before the first command. `address`: addresses of members, apart by commas.
    #[must_use]
    pub fn new(
        name: &str,
        address: &str,
        cluster: Option<ObjectId>,
        options: &ShardOptions,
    ) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            address: address.to_owned(),
            cluster,
            options: options.clone(),
            state: Mutex::default(),
            came: Condvar::new(),
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries a command there; its reply, which may say of single documents that they were not written.
    ///
    /// Errors: the shard's; [`Code::FailedToSatisfyReadPreference`] where it cannot be reached.
    pub async fn ask(self: &Arc<Self>, database: &str, command: Document) -> Result<Document> {
        self.ask_before(database, command, None).await
    }

    /// The same, unless it cannot be sent in time.
    ///
    /// Errors: as [`Shard::ask`]; [`Code::StaleConfig`]: nothing was sent.
    pub async fn ask_before(
        self: &Arc<Self>,
        database: &str,
        command: Document,
        before: Option<Instant>,
    ) -> Result<Document> {
        let (answer, reply) = oneshot::channel();
        self.push(Job { database: database.to_owned(), command, before, answer })?;
        match reply.await {
            Ok(reply) => reply,
            Err(_) => refuse(Code::InterruptedAtShutdown, "the router is stopping"),
        }
    }

    fn push(self: &Arc<Self>, job: Job) -> Result<()> {
        let mut state = self.state();
        if state.closed {
            return refuse(Code::InterruptedAtShutdown, "the router is stopping");
        }
        if state.jobs.len() >= self.options.most_waiting {
            return refuse(
                Code::ExceededMemoryLimit,
                format!("{} commands wait for shard {}, the most", state.jobs.len(), self.name),
            );
        }
        state.jobs.push_back(job);
        if state.jobs.len() > state.idle && state.threads < self.options.most {
            state.threads += 1;
            let shard = Arc::clone(self);
            let builder = std::thread::Builder::new().name(format!("to-{}", self.name));
            if let Err(error) = builder.stack_size(STACK).spawn(move || shard.work()) {
                state.threads -= 1;
                if state.threads == 0 {
                    state.jobs.pop_back();
                    return refuse(Code::InternalError, format!("no thread can be made: {error}"));
                }
            }
        }
        drop(state);
        self.came.notify_one();
        Ok(())
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let (guard, waited) =
                self.came.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }

    fn work(&self) {
        let mut client = None;
        while let Some(Job { database, command, before, answer }) = self.next() {
            let reply = self.carry(&mut client, &database, command, before);
            // Where the client's connection has ended, nobody waits for it.
            let _ = answer.send(reply);
        }
    }

    fn carry(
        &self,
        client: &mut Option<Client>,
        database: &str,
        command: Document,
        before: Option<Instant>,
    ) -> Result<Document> {
        let retryable = command.contains_key("txnNumber") && !command.contains_key("autocommit");
        let refused = |error| Refusal::of_shard(&self.name, error, retryable);
        if client.as_mut().is_none_or(|client| !client.is_connected()) {
            *client = Some(self.connect().map_err(refused)?);
            if let (Some(open), Some(cluster)) = (client.as_mut(), self.cluster)
                && let Err(error) = self.check(open, cluster)
            {
                *client = None;
                return Err(error);
            }
        }
        let Some(open) = client.as_mut() else {
            return refuse(Code::InternalError, "a connection was made");
        };
        if before.is_some_and(|before| Instant::now() >= before) {
            return refuse(
                Code::StaleConfig,
                format!("the routing table grew old before a command went to shard {}", self.name),
            );
        }
        let reply = open.ask(database, command);
        if matches!(
            reply,
            Err(ClientError::Unreachable { .. }
                | ClientError::TimedOut { .. }
                | ClientError::OutcomeUnknown { .. }
                | ClientError::Protocol(_))
        ) {
            *client = None;
        }
        reply.map_err(refused)
    }

    fn connect(&self) -> Result<Client, ClientError> {
        let mut last = None;
        for address in self.address.split(',') {
            let options = Options {
                timeout: self.options.timeout,
                selection: self.options.selection,
                ..Options::default()
            };
            match Client::connect(address.trim(), options) {
                Ok(client) => return Ok(client),
                Err(error) => last = Some(error),
            }
        }
        let address = self.address.clone();
        Err(last.unwrap_or(ClientError::Address { address, reason: "it is empty".to_owned() }))
    }

    /// Reads which shard of which cluster the store says it is.
    fn check(&self, client: &mut Client, cluster: ObjectId) -> Result<()> {
        let find = doc! { "find": MARK.1, "filter": { "_id": "shardIdentity" }, "limit": 1 };
        let found = client.ask(MARK.0, find);
        let mut found = found.map_err(|error| Refusal::of_shard(&self.name, error, false))?;
        let mark =
            batch_of(&mut found).map(|(batch, _)| batch.into_iter().next()).unwrap_or_default();
        let same = mark.as_ref().is_some_and(|mark| {
            mark.get_str("shardName").is_ok_and(|name| name == self.name)
                && mark.get_object_id("clusterId").is_ok_and(|id| id == cluster)
        });
        if same {
            return Ok(());
        }
        refuse(
            Code::StaleConfig,
            format!(
                "the store at {} is not shard {} of this cluster: it says {}; was its data replaced?",
                self.address,
                self.name,
                mark.map_or_else(|| "nothing of shards".to_owned(), |mark| mark.to_string())
            ),
        )
    }

    /// No more commands: those under way are answered, threads end.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.jobs.clear();
        drop(state);
        self.came.notify_all();
    }
}

/// The documents of a reply's batch, and the number of its cursor.
pub(crate) fn batch_of(reply: &mut Document) -> Option<(Vec<Document>, i64)> {
    let Some(Bson::Document(mut cursor)) = reply.remove("cursor") else { return None };
    let batch = cursor.remove("firstBatch").or_else(|| cursor.remove("nextBatch"))?;
    let Bson::Array(batch) = batch else { return None };
    let documents = batch.into_iter().filter_map(|one| match one {
        Bson::Document(document) => Some(document),
        _ => None,
    });
    Some((documents.collect(), cursor.get_i64("id").unwrap_or(0)))
}
