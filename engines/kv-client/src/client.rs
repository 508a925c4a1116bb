//! The client: routing, submission, completion.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{CompletionQueue, Device, Opcode, ProtectionDomain, WorkCompletion};
use beeline_kv::wire::{LONG_REPLY_BYTES, Protocol};
use beeline_kv::{DATABASES, hash_key, shard_of_hash};

use crate::connector::Connector;
use crate::counters::ClientCounters;
use crate::error::ClientError;
use crate::link::{Link, shard_of};
use crate::options::{ClientOptions, PutOptions};
use crate::update::Digest;

/// Names a submitted request in its completion. Never reused by one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(u64);

impl Token {
    pub(crate) const NONE: Self = Self(0);
}

/// What to do. Keys and values are copied by [`Client::submit`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Command<'a> {
    /// Stores `value` under `key`.
    Put {
        /// Database, 0..16.
        database: u8,
        /// Up to 65,535 bytes.
        key: &'a [u8],
        /// As long as a segment holds.
        value: &'a [u8],
        /// Expiry and encoding.
        options: PutOptions,
    },
    /// Removes `key`.
    Delete {
        /// Database, 0..16.
        database: u8,
        /// The key.
        key: &'a [u8],
    },
    /// Reads `key`.
    Get {
        /// Database, 0..16.
        database: u8,
        /// Up to [`ClientOptions::longest_key_bytes`].
        key: &'a [u8],
    },
    /// Lists keys of one shard, in hash order.
    Scan {
        /// Database, 0..16.
        database: u8,
        /// Which shard.
        shard: u16,
        /// 0, or what the last scan of this shard returned.
        cursor: u64,
        /// About how many keys.
        count: u32,
    },
    /// Statistics of one shard as text.
    Statistics {
        /// Which shard.
        shard: u16,
    },
    /// Nothing; answered when everything before it on that shard is.
    Ping {
        /// Which shard.
        shard: u16,
    },
}

/// How a request was answered. Borrowed parts live until the next completion is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer<'a> {
    /// Put or delete: persisted at the server's durability, with this version.
    Stored {
        /// Larger is newer, across all clients.
        version: u64,
    },
    /// Get: the value.
    Value {
        /// Its bytes.
        bytes: &'a [u8],
        /// Its encoding.
        kind: u8,
        /// Its version.
        version: u64,
        /// When it expires, ms since the epoch; 0 never.
        expires_at_ms: u64,
    },
    /// Get, delete: there is no such key.
    Missing,
    /// Scan: records to take apart with [`beeline_kv::wire::pop_scan_record`].
    Keys {
        /// Cursor of the next scan; 0 at the end.
        next: u64,
        /// Number of records.
        count: u32,
        /// The records.
        records: &'a [u8],
    },
    /// Statistics: text, one `name value` a line.
    Text(&'a [u8]),
    /// Ping.
    Pong,
}

/// Called with each completion.
pub type Deliver<'a> = dyn FnMut(Token, Result<Answer<'_>, ClientError>) + 'a;

/// What all links share.
#[derive(Debug)]
pub(crate) struct Core {
    pub options: ClientOptions,
    pub device: Arc<dyn Device>,
    pub domain: Arc<dyn ProtectionDomain>,
    pub queue: Rc<dyn CompletionQueue>,
    pub counters: ClientCounters,
    pub scratch: Vec<u8>,
}

/// A client of one store. Stays on its thread.
#[derive(Debug)]
pub struct Client {
    connector: Box<dyn Connector>,
    core: Core,
    links: Vec<Link>,
    last_token: u64,
    /// Counts connections made, so that completions of a dead one are told apart.
    generation: u32,
    /// Where completions are polled to; made once, because clearing it takes longer than a poll.
    completions: Box<[WorkCompletion]>,
    polls: u32,
}

/// Completion entries one link may need: receives, signalled sends, reads, flushes of all.
const COMPLETIONS_PER_REQUEST: u32 = 4;
/// Shards the first completion queue has room for.
const SHARDS_EXPECTED: u16 = 16;
const COMPLETIONS_BATCH: usize = 32;
/// Polls between two looks at the clock: reading it takes longer than an empty poll.
const POLLS_PER_CLOCK: u32 = 16;

impl Client {
    /// Connects to every shard of the store that `connector` reaches. Bounded by
    /// [`ClientOptions::timeout`] per shard, plus the connector's own bounds.
    ///
    /// Errors: [`ClientError::Connect`], [`ClientError::Refused`], [`ClientError::Fabric`],
    /// [`ClientError::DeviceTooSmall`].
    pub fn connect(
        mut connector: Box<dyn Connector>,
        options: ClientOptions,
    ) -> Result<Self, ClientError> {
        let device = connector.device()?;
        let core = Self::open(Arc::clone(&device), options, SHARDS_EXPECTED)?;
        let mut this = Self {
            connector,
            core,
            links: Vec::new(),
            last_token: 0,
            generation: 0,
            completions: vec![WorkCompletion::EMPTY; COMPLETIONS_BATCH].into(),
            polls: 0,
        };
        let first = this.link(0)?;
        let shards = first.shards();
        this.links.push(first);
        if shards > SHARDS_EXPECTED {
            // The completion queue holds what all links can have outstanding: begin again.
            this.core = Self::open(device, this.core.options.clone(), shards)?;
            this.links.clear();
        }
        for shard in this.shards()..shards {
            let link = this.link(shard)?;
            this.links.push(link);
        }
        Ok(this)
    }

    fn open(
        device: Arc<dyn Device>,
        options: ClientOptions,
        shards: u16,
    ) -> Result<Core, ClientError> {
        let offered = device.attributes().max_inline_bytes;
        if (offered as usize) < LONG_REPLY_BYTES {
            return Err(ClientError::DeviceTooSmall { offered, needed: LONG_REPLY_BYTES as u32 });
        }
        let domain = device.allocate_protection_domain()?;
        let depth = (u32::from(options.window) + 1) * COMPLETIONS_PER_REQUEST * u32::from(shards);
        let depth = depth.max(64).min(device.attributes().max_completion_queue_depth);
        let queue = device.create_completion_queue(depth)?;
        let counters = ClientCounters::default();
        Ok(Core { options, device, domain, queue, counters, scratch: Vec::new() })
    }

    fn link(&mut self, shard: u16) -> Result<Link, ClientError> {
        self.generation = self.generation.wrapping_add(1);
        Link::connect(self.connector.as_mut(), &mut self.core, shard, self.generation)
    }

    /// Shards of the store.
    #[must_use]
    pub fn shards(&self) -> u16 {
        self.links.len() as u16
    }

    /// The provider in use: "shm", "tcp", ...
    #[must_use]
    pub fn provider(&self) -> &'static str {
        self.core.device.attributes().provider
    }

    /// The protocol in use: the one asked for, or [`Protocol::Replicated`] where a member of a
    /// cluster answered.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.links[0].protocol()
    }

    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> ClientCounters {
        self.core.counters
    }

    /// The options it was connected with.
    #[must_use]
    pub fn options(&self) -> &ClientOptions {
        &self.core.options
    }

    /// Requests submitted and not yet delivered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.links.iter().map(Link::outstanding).sum()
    }

    /// The completion queue, for a loop that sleeps on several things.
    #[must_use]
    pub fn completion_queue(&self) -> &Rc<dyn CompletionQueue> {
        &self.core.queue
    }

    /// The shard that holds `key`.
    #[must_use]
    pub fn shard_of(&self, database: u8, key: &[u8]) -> u16 {
        self.route(self.hash(database, key))
    }

    fn hash(&self, database: u8, key: &[u8]) -> u64 {
        hash_key(self.links[0].hash_seed(), database, key)
    }

    fn route(&self, hash: u64) -> u16 {
        shard_of_hash(hash, self.links.len()) as u16
    }

    /// Takes `command` in; its completion is delivered by [`Client::poll`]. Requests of one key
    /// take effect in the order they were submitted. The first is posted at once; while others are
    /// outstanding, requests are posted some at a time, at the latest by the next
    /// [`Client::poll`], [`Client::wait`] or [`Client::flush`]. Allocates nothing unless a value is longer than
    /// any before it; blocks only to make a lost connection anew.
    ///
    /// Errors: [`ClientError::WindowFull`] (poll and retry), [`ClientError::KeyTooLong`],
    /// [`ClientError::TooLarge`], [`ClientError::NoSuchDatabase`], and those of
    /// [`Client::connect`]. Nothing was submitted then.
    pub fn submit(&mut self, command: Command<'_>) -> Result<Token, ClientError> {
        let (mut shard, mut digest) = self.target(&command)?;
        if self.revive(shard)? {
            // Who answers now may place keys otherwise.
            (shard, digest) = self.target(&command)?;
        }
        let token = Token(self.last_token + 1);
        let link = &mut self.links[usize::from(shard)];
        link.submit(&mut self.core, token, digest, command)?;
        self.last_token = token.0;
        Ok(token)
    }

    fn target(&self, command: &Command<'_>) -> Result<(u16, Digest), ClientError> {
        let (database, key, named) = match *command {
            Command::Put { database, key, .. }
            | Command::Delete { database, key }
            | Command::Get { database, key } => (database, Some(key), 0),
            Command::Scan { database, shard, .. } => (database, None, shard),
            Command::Statistics { shard } | Command::Ping { shard } => (0, None, shard),
        };
        if u16::from(database) >= DATABASES {
            return Err(ClientError::NoSuchDatabase { database });
        }
        let Some(key) = key else {
            let known = usize::from(named) < self.links.len();
            let missing = ClientError::NotConnected { shard: named };
            return if known { Ok((named, Digest::default())) } else { Err(missing) };
        };
        let reads = matches!(command, Command::Get { .. });
        if reads && self.links.len() == 1 {
            // Whatever the hash of the key, there is one place to ask.
            return Ok((0, Digest::default()));
        }
        let hash = self.hash(database, key);
        let shard = self.route(hash);
        let digest = if reads {
            Digest::default()
        } else {
            self.links[usize::from(shard)].digest(hash, database, key)
        };
        Ok((shard, digest))
    }

    /// Makes the connection of `shard` anew if it was lost; whether it did.
    fn revive(&mut self, shard: u16) -> Result<bool, ClientError> {
        if self.links[usize::from(shard)].is_up() {
            return Ok(false);
        }
        if !self.core.options.reconnect {
            return Err(ClientError::NotConnected { shard });
        }
        // The provider may have to change, for instance after the shared-memory peer restarted.
        // Links of the old device cannot share its replacement's queue, so all start again once
        // none of them is working.
        if self.links.iter().any(|link| link.is_up() && link.outstanding() > 0) {
            let fresh = self.link(shard)?;
            self.links[usize::from(shard)] = fresh;
        } else {
            let counters = self.core.counters;
            let expected = self.shards().max(SHARDS_EXPECTED);
            let options = self.core.options.clone();
            let device = self.connector.device()?;
            let core = Self::open(device, options, expected)?;
            self.core = core;
            self.core.counters = counters;
            // Another member of a cluster may answer, with shards and a hash of its own.
            let first = self.link(0)?;
            let shards = first.shards();
            if shards > expected {
                let what = "more shards than before";
                return Err(ClientError::Protocol { shard: 0, what });
            }
            let mut links = vec![first];
            for shard in 1..shards {
                links.push(self.link(shard)?);
            }
            self.links = links;
        }
        self.core.counters.reconnects += 1;
        Ok(true)
    }

    /// Posts what was submitted and waits to be posted with others. For a caller that does
    /// something else before it polls.
    pub fn flush(&mut self) {
        for link in self.links.iter_mut().filter(|link| link.is_up() && link.has_waiting()) {
            link.flush(&mut self.core);
        }
    }

    /// Posts what waits and delivers what completed; returns how many. Does not block, and allocates nothing unless a
    /// value is longer than any before it. `deliver` sees each token once, in order per shard.
    /// Looks for overdue requests every sixteenth time.
    ///
    /// Errors: [`ClientError::Fabric`] when the completion queue itself failed; every outstanding
    /// request was then delivered as lost.
    pub fn poll(&mut self, deliver: &mut Deliver<'_>) -> Result<usize, ClientError> {
        self.flush();
        let mut completions = std::mem::take(&mut self.completions);
        let delivered = self.poll_into(&mut completions, deliver);
        self.completions = completions;
        let mut delivered = delivered?;
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_CLOCK) {
            delivered += self.expire(deliver);
        }
        Ok(delivered)
    }

    fn poll_into(
        &mut self,
        completions: &mut [WorkCompletion],
        deliver: &mut Deliver<'_>,
    ) -> Result<usize, ClientError> {
        let mut delivered = 0;
        loop {
            let polled = self.core.queue.poll(completions);
            let count = self.polled(polled, deliver)?;
            if count > 0 {
                delivered += self.handle(&completions[..count], deliver);
            } else {
                delivered += self.settle(deliver);
            }
            if count < COMPLETIONS_BATCH {
                return Ok(delivered);
            }
        }
    }

    /// As [`Client::poll`], but sleeps until something completed or `timeout` passed.
    ///
    /// Errors: as [`Client::poll`].
    pub fn wait(
        &mut self,
        timeout: Duration,
        deliver: &mut Deliver<'_>,
    ) -> Result<usize, ClientError> {
        // What was submitted since the last look gets its deadline now, not after the sleep.
        let mut delivered = self.expire(deliver);
        self.flush();
        let mut completions = [WorkCompletion::EMPTY; COMPLETIONS_BATCH];
        let waited = self.core.queue.wait(&mut completions, timeout);
        let count = self.polled(waited, deliver)?;
        delivered += self.handle(&completions[..count], deliver) + self.expire(deliver);
        Ok(delivered + self.poll(deliver)?)
    }

    fn polled(
        &mut self,
        result: Result<usize, beeline_fabric::FabricError>,
        deliver: &mut Deliver<'_>,
    ) -> Result<usize, ClientError> {
        result.map_err(|error| {
            for link in &mut self.links {
                link.fail(beeline_fabric::Status::TransportError, deliver);
            }
            ClientError::Fabric(error)
        })
    }

    fn handle(&mut self, completions: &[WorkCompletion], deliver: &mut Deliver<'_>) -> usize {
        if completions.len() > 1 {
            self.look_ahead(completions);
        }
        let mut delivered = 0;
        for completion in completions {
            let Some(link) = self.links.get_mut(shard_of(completion.context)) else { continue };
            if link.context() != completion.context || !link.is_up() {
                continue;
            }
            let index = completion.wr_id as u16;
            delivered += if !completion.is_success() {
                link.fail(completion.status, deliver)
            } else {
                match completion.opcode {
                    Opcode::Receive => link.replied(&mut self.core, index, completion, deliver),
                    Opcode::ReceiveWithImmediate => {
                        link.placed(&mut self.core, index, completion, deliver)
                    }
                    Opcode::Read => link.read(&mut self.core, index, deliver),
                    _ => 0,
                }
            };
        }
        delivered + self.settle(deliver)
    }

    /// Asks for the lines of all results of a batch before the first is copied, so that the misses
    /// overlap.
    fn look_ahead(&mut self, completions: &[WorkCompletion]) {
        let answers = |completion: &&WorkCompletion| {
            completion.is_success()
                && matches!(completion.opcode, Opcode::Receive | Opcode::ReceiveWithImmediate)
        };
        for completion in completions.iter().filter(answers) {
            if let Some(link) = self.links.get_mut(shard_of(completion.context))
                && link.context() == completion.context
            {
                link.look_ahead(completion);
            }
        }
        self.links.iter_mut().for_each(Link::end_look_ahead);
    }

    fn settle(&mut self, deliver: &mut Deliver<'_>) -> usize {
        self.links.iter_mut().map(|link| link.settle(&mut self.core, deliver)).sum()
    }

    fn expire(&mut self, deliver: &mut Deliver<'_>) -> usize {
        if self.links.iter().all(Link::is_idle) {
            return 0;
        }
        let now = self.core.options.clock.monotonic_ns();
        let timeout = self.core.options.timeout;
        self.links.iter_mut().map(|link| link.expire(now, timeout, deliver)).sum()
    }
}
