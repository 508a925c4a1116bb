//! Where a member copies from: what it asks of the primary, whatever carries it.
//!
//! [`SyncSource`] is the seam: commands of the MongoDB wire over TCP here, one-sided writes in
//! [`super::fabric`]. A source serves one session of one term; a member that hears of another term opens another.

use std::fmt::Debug;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use beeline_documents_query::error::Code;
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};

use crate::engine::whole_field;
use crate::replica::entry::Spot;
use crate::replica::register::Place;
use crate::replica::store::{Fetched, Pairs};
use crate::wire;

/// The name of the command between members.
pub const COMMAND: &str = "beelineReplica";
/// Longest answer of a member.
const LONGEST_ANSWER: usize = 512 << 20;
/// Between two looks, while an answer is awaited, whether the session still lasts.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes of keys or places asked about at once: below what a stranger may send.
pub const ASKED_BYTES: usize = 32 << 10;

/// Why a source did not answer as wished.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyncError {
    /// It cannot be reached, or its answer did not come.
    #[error("the primary at {address} does not answer: {source}")]
    Unreachable {
        /// Where.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It does not lead in this term.
    #[error("{address} refused: {reason}")]
    Refused {
        /// Where.
        address: String,
        /// In its words.
        reason: String,
    },
    /// Its answer cannot be read.
    #[error("the answer of {address} cannot be read: {reason}")]
    Damaged {
        /// Where.
        address: String,
        /// Why.
        reason: String,
    },
}

impl SyncError {
    /// Whether the same may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Damaged { .. })
    }
}

/// What a member tells the primary of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// It has everything up to this time.
    pub applied: u64,
    /// And would have after a crash.
    pub durable: u64,
    /// Its state, as MongoDB numbers states.
    pub state: u8,
}

/// What the primary answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    /// A majority has everything up to this time.
    pub commit: u64,
    /// The newest time at the primary.
    pub latest: u64,
}

/// A primary, as a member that copies it sees it.
pub trait SyncSource: Send + Debug {
    /// What carries its answers, as in `shm`, or `mongodb wire`.
    fn carrier(&self) -> &str {
        "mongodb wire"
    }

    /// The newest of these places that its log has: its index.
    ///
    /// Errors: [`SyncError`].
    fn find(&mut self, spots: &[Spot]) -> Result<Option<usize>, SyncError>;

    /// The interval behind a time: whole entries, oldest first, as `most` bytes hold and one at least; waits so long
    /// for the first. `None`: some of them are there no more.
    ///
    /// Errors: [`SyncError`].
    fn entries(
        &mut self,
        after: u64,
        most: usize,
        wait: Duration,
    ) -> Result<Option<Fetched>, SyncError>;

    /// Its rows, and where its log ends.
    ///
    /// Errors: [`SyncError`].
    fn rows(&mut self) -> Result<(Vec<Vec<u8>>, Spot), SyncError>;

    /// Keys and values of a row behind a key; true: those were the last.
    ///
    /// Errors: [`SyncError`].
    fn page(
        &mut self,
        row: &[u8],
        after: Option<&[u8]>,
        most: usize,
    ) -> Result<(Pairs, bool), SyncError>;

    /// What keys hold; fewer values than keys where they are large.
    ///
    /// Errors: [`SyncError`].
    fn values(&mut self, row: &[u8], keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, SyncError>;

    /// Tells how far this member is.
    ///
    /// Errors: [`SyncError`].
    fn report(&mut self, progress: Progress) -> Result<Told, SyncError>;
}

/// How long a session waits for an answer: twice as long after each that did not come in time, so that a slow
/// primary is followed slowly and not never; and no longer than the session lasts.
#[derive(Clone, Debug, Default)]
pub struct Patience {
    ended: Arc<AtomicBool>,
    /// Answers that did not come in time.
    overdue: Arc<AtomicU32>,
}

impl Patience {
    /// Longest wait for a byte.
    const LONGEST: Duration = Duration::from_secs(30);

    /// Of a session that ends with this.
    #[must_use]
    pub fn of(ended: Arc<AtomicBool>) -> Self {
        Self { ended, overdue: Arc::default() }
    }

    fn lasts(&self, first: Duration) -> Duration {
        let grown = first * (1 << self.overdue.load(Ordering::Relaxed).min(8));
        grown.min(Self::LONGEST.max(first))
    }
}

/// How a member reaches others.
pub trait Sources: Send + Sync + Debug {
    /// The primary of a term.
    ///
    /// Errors: [`SyncError`].
    fn open(
        &self,
        source: u16,
        term: u64,
        patience: &Patience,
    ) -> Result<Box<dyn SyncSource>, SyncError>;
}

pub(crate) fn binary(bytes: &[u8]) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() })
}

pub(crate) fn bytes_of(value: Option<&Bson>) -> Option<Vec<u8>> {
    match value {
        Some(Bson::Binary(binary)) => Some(binary.bytes.clone()),
        _ => None,
    }
}

pub(crate) fn spot_to(spot: &Spot) -> Document {
    doc! { "n": spot.place.term as i64, "t": spot.place.time as i64, "r": binary(&spot.row) }
}

pub(crate) fn spot_from(document: &Document) -> Option<Spot> {
    let place = Place {
        term: whole_field(document, "n")? as u64,
        time: whole_field(document, "t")? as u64,
    };
    Some(Spot { place, row: bytes_of(document.get("r"))? })
}

/// Members by their MongoDB doors.
#[derive(Debug)]
pub struct TcpSources {
    /// The cluster.
    pub cluster: u64,
    /// This member.
    pub me: u16,
    /// Where each member listens.
    pub members: std::collections::BTreeMap<u16, SocketAddr>,
    /// Bytes that a segment of its pool holds.
    pub segment: usize,
    /// How long an answer may take beyond what it is asked to wait, at first.
    pub patience: Duration,
}

impl Sources for TcpSources {
    fn open(
        &self,
        source: u16,
        term: u64,
        patience: &Patience,
    ) -> Result<Box<dyn SyncSource>, SyncError> {
        let Some(address) = self.members.get(&source) else {
            let reason = "--documents-members of this member does not name it".to_owned();
            return Err(SyncError::Refused { address: format!("member {source}"), reason });
        };
        let unreachable = |source| SyncError::Unreachable { address: address.to_string(), source };
        let stream = TcpStream::connect_timeout(address, self.patience).map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        stream.set_write_timeout(Some(self.patience)).map_err(unreachable)?;
        stream.set_read_timeout(Some(LOOK)).map_err(unreachable)?;
        let (address, head) = (address.to_string(), self.head(term));
        let (first, patience) = (self.patience, patience.clone());
        let asker = TcpAsker { stream, address, head, first, patience, requests: 0 };
        Ok(Box::new(Commands { asker }))
    }
}

impl TcpSources {
    /// What every command of this member begins with.
    pub(crate) fn head(&self, term: u64) -> Document {
        let members: Vec<i32> = self.members.keys().map(|member| i32::from(*member)).collect();
        doc! {
            COMMAND: "", "cluster": self.cluster as i64, "term": term as i64, "member": i32::from(self.me),
            "members": members, "segment": self.segment as i64, "$db": "admin",
        }
    }
}

/// Carries commands to a member.
pub(crate) trait Asker: Send + Debug {
    /// Sends a command and takes its answer.
    ///
    /// Errors: [`SyncError`].
    fn ask(&mut self, what: &str, fields: Document, wait: Duration) -> Result<Document, SyncError>;

    /// Where the member is.
    fn address(&self) -> &str;

    /// How long an answer may take.
    fn patience(&self) -> Duration;

    /// What cannot be read.
    fn damaged(&self, reason: &dyn std::fmt::Display) -> SyncError {
        SyncError::Damaged { address: self.address().to_owned(), reason: reason.to_string() }
    }
}

/// An answer, unless it is a refusal.
pub(crate) fn checked_answer(address: &str, answer: Document) -> Result<Document, SyncError> {
    if answer.get_f64("ok").unwrap_or(0.0) == 1.0 {
        return Ok(answer);
    }
    let reason = answer.get_str("errmsg").unwrap_or("no reason was given").to_owned();
    let address = address.to_owned();
    if whole_field(&answer, "code") == Some(Code::InternalError as i64) {
        return Err(SyncError::Damaged { address, reason });
    }
    Err(SyncError::Refused { address, reason })
}

/// A member's MongoDB door.
#[derive(Debug)]
struct TcpAsker {
    stream: TcpStream,
    address: String,
    head: Document,
    /// How long an answer may take at first.
    first: Duration,
    patience: Patience,
    requests: i32,
}

impl TcpAsker {
    fn exchange(&mut self, message: &[u8], wait: Duration) -> std::io::Result<Vec<u8>> {
        self.stream.write_all(message)?;
        let mut answer = vec![0; 4];
        self.fill(&mut answer, wait)?;
        let length = wire::length(&answer, LONGEST_ANSWER)
            .map_err(std::io::Error::other)?
            .unwrap_or(wire::HEADER);
        answer.resize(length, 0);
        self.fill(&mut answer[4..], wait)?;
        Ok(answer)
    }

    /// Reads as many bytes, with a look now and then whether the session still lasts.
    fn fill(&mut self, mut rest: &mut [u8], wait: Duration) -> std::io::Result<()> {
        let (most, mut heard) = (self.patience() + wait, Instant::now());
        while !rest.is_empty() {
            match self.stream.read(rest) {
                Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => (rest, heard) = (&mut rest[read..], Instant::now()),
                Err(error) => match error.kind() {
                    _ if self.patience.ended.load(Ordering::SeqCst) => {
                        return Err(std::io::Error::other("this member follows it no more"));
                    }
                    std::io::ErrorKind::Interrupted => {}
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                        if heard.elapsed() < most => {}
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                        self.patience.overdue.fetch_add(1, Ordering::Relaxed);
                        let why = format!("no byte came for {} ms", most.as_millis());
                        return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, why));
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }
}

impl Asker for TcpAsker {
    fn ask(&mut self, what: &str, fields: Document, wait: Duration) -> Result<Document, SyncError> {
        let mut command = self.head.clone();
        command.insert(COMMAND, what);
        command.extend(fields);
        self.requests = self.requests.wrapping_add(1);
        let message = wire::frame(self.requests, &command);
        let answer = self
            .exchange(&message, wait)
            .map_err(|source| SyncError::Unreachable { address: self.address.clone(), source })?;
        let (_, answer) =
            wire::read(&answer, LONGEST_ANSWER).map_err(|error| self.damaged(&error))?;
        checked_answer(&self.address, answer.body)
    }

    fn address(&self) -> &str {
        &self.address
    }

    fn patience(&self) -> Duration {
        self.patience.lasts(self.first)
    }
}

/// A source by commands, whatever carries them.
#[derive(Debug)]
pub(crate) struct Commands<A> {
    pub(crate) asker: A,
}

impl<A: Asker> Commands<A> {
    /// Entries, as an answer holds them.
    ///
    /// Errors: [`SyncError::Damaged`].
    pub(crate) fn fetched(&self, answer: &Document) -> Result<Option<Fetched>, SyncError> {
        if answer.get_bool("gone").unwrap_or(false) {
            return Ok(None);
        }
        let lacks = |what: &str| self.asker.damaged(&what);
        let entries = all_bytes(answer, "entries").ok_or_else(|| lacks("it has no entries"))?;
        let upto = whole_field(answer, "upto").ok_or_else(|| lacks("it has no time"))?;
        Ok(Some(Fetched { entries, upto: upto as u64 }))
    }
}

fn all_bytes(answer: &Document, field: &str) -> Option<Vec<Vec<u8>>> {
    answer.get_array(field).ok()?.iter().map(|one| bytes_of(Some(one))).collect()
}

impl<A: Asker> SyncSource for Commands<A> {
    fn find(&mut self, spots: &[Spot]) -> Result<Option<usize>, SyncError> {
        for (chunk, start) in spots.chunks(200).zip((0..).step_by(200)) {
            let asked: Vec<Document> = chunk.iter().map(spot_to).collect();
            let answer = self.asker.ask("find", doc! { "spots": asked }, Duration::ZERO)?;
            if let Some(index) = whole_field(&answer, "index").filter(|index| *index >= 0) {
                return Ok(Some(start + index as usize));
            }
        }
        Ok(None)
    }

    fn entries(
        &mut self,
        after: u64,
        most: usize,
        wait: Duration,
    ) -> Result<Option<Fetched>, SyncError> {
        let fields =
            doc! { "after": after as i64, "most": most as i64, "wait": wait.as_millis() as i64 };
        let answer = self.asker.ask("entries", fields, wait)?;
        self.fetched(&answer)
    }

    fn rows(&mut self) -> Result<(Vec<Vec<u8>>, Spot), SyncError> {
        let answer = self.asker.ask("rows", Document::new(), Duration::ZERO)?;
        let rows =
            all_bytes(&answer, "rows").ok_or_else(|| self.asker.damaged(&"it has no rows"))?;
        let last = answer.get_document("last").ok().and_then(spot_from);
        Ok((rows, last.ok_or_else(|| self.asker.damaged(&"it has no place"))?))
    }

    fn page(
        &mut self,
        row: &[u8],
        after: Option<&[u8]>,
        most: usize,
    ) -> Result<(Pairs, bool), SyncError> {
        let mut fields = doc! { "row": binary(row), "most": most as i64 };
        if let Some(after) = after {
            fields.insert("after", binary(after));
        }
        let patience = self.asker.patience();
        let answer = self.asker.ask("page", fields, patience)?;
        let keys = all_bytes(&answer, "keys").unwrap_or_default();
        let values = all_bytes(&answer, "values").unwrap_or_default();
        if keys.len() != values.len() {
            return Err(self.asker.damaged(&"keys and values differ in number"));
        }
        let whole = answer.get_bool("whole").map_err(|error| self.asker.damaged(&error))?;
        Ok((keys.into_iter().zip(values).collect(), whole))
    }

    fn values(&mut self, row: &[u8], keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, SyncError> {
        let keys: Vec<Bson> = keys.iter().map(|key| binary(key)).collect();
        let fields = doc! { "row": binary(row), "keys": keys };
        let patience = self.asker.patience();
        let answer = self.asker.ask("values", fields, patience)?;
        let values = answer.get_array("values").map_err(|error| self.asker.damaged(&error))?;
        Ok(values.iter().map(|value| bytes_of(Some(value))).collect())
    }

    fn report(&mut self, progress: Progress) -> Result<Told, SyncError> {
        let fields = doc! {
            "applied": progress.applied as i64, "durable": progress.durable as i64, "state": i32::from(progress.state),
        };
        let answer = self.asker.ask("report", fields, Duration::ZERO)?;
        let time = |field: &str| whole_field(&answer, field).unwrap_or(0) as u64;
        Ok(Told { commit: time("commit"), latest: time("latest") })
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const FIRST: Duration = Duration::from_millis(100);

    /// A primary that answers each command after so long.
    fn slow(after: Duration) -> TcpSources {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let members = [(1, listener.local_addr().unwrap())].into();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut asked = [0; 4096];
                    while stream.read(&mut asked).is_ok_and(|read| read > 0) {
                        std::thread::sleep(after);
                        let answer = wire::frame(1, &doc! { "commit": 7_i64, "ok": 1.0 });
                        let _ = stream.write_all(&answer);
                    }
                });
            }
        });
        TcpSources { cluster: 1, me: 2, members, segment: 1, patience: FIRST }
    }

    #[test]
    fn a_primary_slower_than_the_first_patience_is_followed_all_the_same() {
        let (sources, patience) = (slow(FIRST * 5), Patience::default());
        let told = (0..8).find_map(|_| {
            let mut source = sources.open(1, 1, &patience).unwrap();
            source.report(Progress::default()).ok()
        });
        assert_eq!(told.map(|told| told.commit), Some(7));
    }

    #[test]
    fn a_session_that_ends_waits_for_no_answer() {
        let (sources, ended) = (slow(Duration::from_secs(3600)), Arc::<AtomicBool>::default());
        let patience = Patience { ended: Arc::clone(&ended), overdue: Arc::new(8.into()) };
        let mut source = sources.open(1, 1, &patience).unwrap();
        let waiting = std::thread::spawn(move || source.report(Progress::default()).is_err());
        std::thread::sleep(FIRST);
        let began = Instant::now();
        ended.store(true, Ordering::SeqCst);
        assert!(waiting.join().unwrap());
        assert!(began.elapsed() < Duration::from_secs(10), "it waited for an answer");
    }
}
