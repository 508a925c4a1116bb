//! The primary's log over fabric: RMongo's Algorithms 3 and 4.
//!
//! ```text
//! secondary                                   primary
//!   OPTIME_REQUEST  from = T_L  ────────────►   waits until its log is longer, or for so long
//!                   T_R         ◄────────────   OPTIME_RESPONSE
//!   OPLOG_SYN_REQUEST (T_L, T_R], room  ────►   reads whole entries, as many as fit
//!   its registered memory       ◄════════════   one-sided write
//! ```
//!
//! Where documents are copied from the beginning, their pages come the same way, as answers to commands. A member
//! whose link breaks soon, or cannot be made, goes on over TCP.
//!
//! Source: spec/rmongo.md 3.8, 3.9.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_documents_channel::{MessageType, RequestError};
use bson::{Document, doc};

use crate::engine::lock;
use crate::replica::entry::Spot;
use crate::replica::source::{
    Asker, COMMAND, Commands, Patience, Progress, Sources, SyncError, SyncSource, TcpSources, Told,
    checked_answer,
};
use crate::replica::store::{Fetched, Pairs};

/// So long a member is not asked for a link again that could not be made, or broke soon.
const AVOIDED: Duration = Duration::from_secs(30);
/// A link that lasted this long is no reason to avoid the next one.
const LASTED: Duration = Duration::from_secs(10);

/// A channel to another member, on a thread of its own.
pub trait MemberLink: Send + Debug {
    /// Sends a request and waits for its outcome.
    ///
    /// Errors: [`RequestError`]; after any but a refusal the link is of no use.
    fn call(
        &self,
        kind: MessageType,
        name: &[u8],
        body: &[u8],
        optimes: (u64, u64),
        timeout: Duration,
    ) -> Result<Vec<u8>, RequestError>;

    /// What carries it, as in `shm`.
    fn provider(&self) -> &str;
}

/// How links are made.
pub trait MemberLinks: Send + Sync + Debug {
    /// To a member.
    ///
    /// Errors: why there is none.
    fn link(&self, member: u16) -> Result<Box<dyn MemberLink>, String>;
}

/// Members by fabric, and by TCP where there is none.
#[derive(Debug)]
pub struct FabricSources {
    /// The way by TCP.
    pub tcp: TcpSources,
    /// The way by fabric.
    pub links: Box<dyn MemberLinks>,
    /// Members whose links broke, and until when they are not asked for one.
    pub avoided: Arc<Mutex<BTreeMap<u16, Instant>>>,
}

impl Sources for FabricSources {
    fn open(
        &self,
        source: u16,
        term: u64,
        patience: &Patience,
    ) -> Result<Box<dyn SyncSource>, SyncError> {
        let avoided = lock(&self.avoided).get(&source).is_some_and(|until| Instant::now() < *until);
        if avoided {
            return self.tcp.open(source, term, patience);
        }
        match self.links.link(source) {
            Ok(link) => {
                let address = format!("member {source} over {}", link.provider());
                // An answer that takes longer breaks the link, and TCP has more patience.
                let (head, patience) = (self.tcp.head(term), self.tcp.patience);
                let avoided = Arc::clone(&self.avoided);
                let since = Instant::now();
                let asker = FabricAsker { link, since, source, address, head, patience, avoided };
                Ok(Box::new(FabricSource { commands: Commands { asker } }))
            }
            Err(reason) => {
                tracing::debug!(source, reason, "a member is not reached over fabric");
                lock(&self.avoided).insert(source, Instant::now() + AVOIDED);
                self.tcp.open(source, term, patience)
            }
        }
    }
}

/// Asks over a link.
#[derive(Debug)]
struct FabricAsker {
    link: Box<dyn MemberLink>,
    since: Instant,
    source: u16,
    address: String,
    head: Document,
    patience: Duration,
    avoided: Arc<Mutex<BTreeMap<u16, Instant>>>,
}

impl FabricAsker {
    fn call(
        &self,
        kind: MessageType,
        what: &str,
        fields: Document,
        optimes: (u64, u64),
        wait: Duration,
    ) -> Result<Vec<u8>, SyncError> {
        let mut command = self.head.clone();
        command.insert(COMMAND, what);
        command.extend(fields);
        let body = command.to_vec().map_err(|error| self.damaged(&error))?;
        let name = self.source.to_string();
        let outcome = self.link.call(kind, name.as_bytes(), &body, optimes, self.patience + wait);
        outcome.map_err(|error| {
            if let RequestError::Refused { text: reason, .. } = error {
                return SyncError::Refused { address: self.address.clone(), reason };
            }
            if self.since.elapsed() < LASTED {
                lock(&self.avoided).insert(self.source, Instant::now() + AVOIDED);
            }
            let source = std::io::Error::other(error);
            SyncError::Unreachable { address: self.address.clone(), source }
        })
    }

    fn answer(&self, bytes: &[u8]) -> Result<Document, SyncError> {
        let answer = Document::from_reader(bytes).map_err(|error| self.damaged(&error))?;
        checked_answer(&self.address, answer)
    }
}

impl Asker for FabricAsker {
    fn ask(&mut self, what: &str, fields: Document, wait: Duration) -> Result<Document, SyncError> {
        let bytes = self.call(MessageType::Command, what, fields, (0, 0), wait)?;
        self.answer(&bytes)
    }

    fn address(&self) -> &str {
        &self.address
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}

/// A primary, over fabric.
#[derive(Debug)]
struct FabricSource {
    commands: Commands<FabricAsker>,
}

impl SyncSource for FabricSource {
    fn find(&mut self, spots: &[Spot]) -> Result<Option<usize>, SyncError> {
        self.commands.find(spots)
    }

    fn entries(
        &mut self,
        after: u64,
        most: usize,
        wait: Duration,
    ) -> Result<Option<Fetched>, SyncError> {
        let asker = &self.commands.asker;
        let fields = doc! { "wait": wait.as_millis() as i64 };
        let told = asker.call(MessageType::OptimeRequest, "optime", fields, (after, 0), wait)?;
        let Ok(told) = <[u8; 8]>::try_from(told.as_slice()) else {
            return Err(asker.damaged(&"an optime has eight bytes"));
        };
        let newest = u64::from_le_bytes(told);
        if newest <= after {
            return Ok(Some(Fetched { entries: Vec::new(), upto: after }));
        }
        let fields = doc! { "most": most as i64 };
        let interval = (after, newest);
        let kind = MessageType::OplogSynRequest;
        let bytes = asker.call(kind, "entries", fields, interval, self.commands.asker.patience)?;
        let answer = asker.answer(&bytes)?;
        self.commands.fetched(&answer)
    }

    fn rows(&mut self) -> Result<(Vec<Vec<u8>>, Spot), SyncError> {
        self.commands.rows()
    }

    fn page(
        &mut self,
        row: &[u8],
        after: Option<&[u8]>,
        most: usize,
    ) -> Result<(Pairs, bool), SyncError> {
        self.commands.page(row, after, most)
    }

    fn values(&mut self, row: &[u8], keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, SyncError> {
        self.commands.values(row, keys)
    }

    fn report(&mut self, progress: Progress) -> Result<Told, SyncError> {
        self.commands.report(progress)
    }

    fn carrier(&self) -> &str {
        self.commands.asker.link.provider()
    }
}
