//! Point-in-time snapshots: written while the store goes on, restored into an empty pool.
//!
//! ```text
//! header  40 B   "BEEKVSNP" | format u32 = 3, with streams 4, with ends of rows 5 | 0 u32 | version u64 | unix_ms u64 | crc32c u32 | 0 u32
//! block          length u32 | records u32 | crc32c u32 | payload
//! record  32 B   version u64 | expires_at_ms u64 | value_length u32 | key_length u16 | kind u8 |
//!                flags u8 | namespace u32 | 4 zeros, then key, then value
//! end            length 16 | records 0xFFFF_FFFF | crc32c | records u64 | bytes u64
//! ```
//!
//! The version barrier is taken while every shard is locked. Then a thread of the caller's choice
//! streams every committed entry up to that version: until it is done, segments are not freed and
//! overwrites in place are refused, so all of them are still where they were. Entries known to be
//! superseded at the barrier are left out; some stale ones may be in the file, and restoring takes
//! the newest of each key.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError};

use beeline_pmem::{PmemError, Pool, PoolOptions};

use crate::entry::{
    APPENDED, BATCH_MORE, EXPIRES, HEADER_BYTES, Header, STREAM_KEY_BYTES, TOMBSTONE,
    slot_bytes_for,
};
use crate::index::Location;
use crate::segments::{SegmentState, UNTRUSTED};
use crate::space::{FIRST_NAMESPACE, IN_ROWS};
use crate::store::{Store, root};
use crate::unfinished::Unfinished;
use crate::walk;
use crate::{Keyspace, KvError, Opened, StoreOptions, Version};

const MAGIC: &[u8; 8] = b"BEEKVSNP";
/// Since 2 a record's namespace has 32 bits; 1 has databases only, in the same place. Since 3 the head
/// of a row does not keep its length, and changed expiries stand beside values. With 4 there are streams,
/// with 5 rows of services that ended.
const FORMAT: u32 = 5;
const STREAM_FORMAT: u32 = 4;
const PLAIN_FORMAT: u32 = 3;
const HEAD_BYTES: usize = 40;
const RECORD_BYTES: usize = 32;
/// Payload at which a block is written.
const BLOCK_BYTES: usize = 256 << 10;
/// A segment's entries are looked up where more than one byte in so many is superseded. The others go into the file
/// as they are: it is longer by less than that, and no shard is asked.
const STALE_SHARE: u64 = 8;
/// Entries that are looked up together, under one lock of each of their shards.
const TOGETHER: usize = 64;
/// Longest payload accepted: one record of the largest lengths.
const BLOCK_LIMIT: usize = BLOCK_BYTES + RECORD_BYTES + u16::MAX as usize + (512 << 20);
const END: u32 = u32::MAX;

/// No snapshot is being written.
const NONE: u32 = 0;
const WRITING: u32 = 1;
/// The one being written is wanted no more.
const GIVEN_UP: u32 = 2;

/// What a snapshot or a restore moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotReport {
    /// Records written or read.
    pub records: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// The barrier: entries up to this version are in it.
    pub version: Version,
    /// What the records take in segments.
    pub slot_bytes: u64,
}

/// A barrier taken and not yet written out. While it lives, segments are not freed.
#[derive(Debug)]
pub struct Snapshot {
    store: Arc<Store>,
    segments: Vec<Covered>,
    /// Of every namespace there is; entries of others are dead.
    barriers: BTreeMap<u32, Version>,
    version: Version,
    /// That of the file.
    format: u32,
}

/// A segment of a snapshot.
#[derive(Debug)]
struct Covered {
    state: Arc<SegmentState>,
    /// It holds entries up to here.
    tail: u32,
    /// Streams have entries in it.
    holds_runs: bool,
    /// So much of it was superseded at the barrier that its entries' keys are looked up.
    is_looked_up: bool,
}

impl Covered {
    /// As of now; the caller holds every shard.
    fn now(state: Arc<SegmentState>) -> Self {
        let tail = state.tail.load(Ordering::Acquire);
        let is_looked_up = state.stale_bytes() * STALE_SHARE > u64::from(tail);
        let holds_runs = state.holds_runs();
        Self { state, tail, holds_runs, is_looked_up }
    }
}

/// An entry whose key is looked up.
#[derive(Clone, Copy, Debug)]
struct Question {
    header: Header,
    /// Where its key begins among the others' keys.
    key: usize,
    hash: u64,
    owner: usize,
    place: Location,
    /// The answer: false when the entry is of no use for certain.
    is_wanted: bool,
}

/// Entries whose keys are looked up together.
#[derive(Debug, Default)]
struct Questions {
    list: Vec<Question>,
    keys: Vec<u8>,
}

impl Questions {
    fn clear(&mut self) {
        self.list.clear();
        self.keys.clear();
    }
}

impl Store {
    /// Ends the snapshot that is being written, if there is one: its writer fails before the next
    /// segment. A snapshot keeps everything that was there when it began, so under overwrites it
    /// takes the room of whatever comes after it. Returns whether one is still there.
    pub fn give_up_snapshot(&self) -> bool {
        // In one step, so that the mark goes with its snapshot: made after a look, it might meet the next.
        let given_up =
            self.snapshots.compare_exchange(WRITING, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire);
        given_up != Err(NONE)
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.store.snapshots.store(NONE, Ordering::Release);
    }
}

impl Keyspace<'_> {
    /// Commits, and takes the barrier of a snapshot. Cheap; [`Snapshot::write`] does the work
    /// without any lock.
    ///
    /// Errors: [`KvError::NeedsAllShards`], [`KvError::SnapshotInProgress`],
    /// [`KvError::Replacing`], the pool's.
    pub fn begin_snapshot(&mut self) -> Result<Snapshot, KvError> {
        self.needs_all()?;
        let store = Arc::clone(self.store());
        if store.is_replacing() {
            return Err(KvError::Replacing);
        }
        self.commit()?;
        let free =
            store.snapshots.compare_exchange(NONE, WRITING, Ordering::AcqRel, Ordering::Acquire);
        if free.is_err() {
            return Err(KvError::SnapshotInProgress);
        }
        // Marks that upkeep has left to the next opening count as well.
        let ended = |shard: &mut crate::Shard| {
            shard.spaces.get(crate::row_ends::ROW_ENDS).is_some_and(|marks| marks.live > 0)
        };
        let format = if self.shards_mut().any(ended) {
            FORMAT
        } else if store.namespaces().iter().any(|(_, options)| options.stream) {
            STREAM_FORMAT
        } else {
            PLAIN_FORMAT
        };
        Ok(Snapshot {
            segments: store.table.all().into_iter().map(Covered::now).collect(),
            barriers: store.barriers(),
            version: store.newest_version(),
            format,
            store,
        })
    }
}

fn io_error(path: &Path) -> impl Fn(std::io::Error) -> KvError + '_ {
    move |source| KvError::Io { path: path.display().to_string(), source }
}

impl Snapshot {
    /// Writes the snapshot to `path`, by way of a neighbouring temporary file that takes its place
    /// once it is on media.
    ///
    /// Errors: [`KvError::Io`] naming the file; `path` is then as it was before.
    pub fn write(self, path: &Path) -> Result<SnapshotReport, KvError> {
        self.write_asking(path, &mut |questions| self.answer(questions))
    }

    /// As [`Snapshot::write`], by a thread of its own that calls `stand_back` first, and may give itself a lower
    /// priority there. The calling thread looks keys up for it meanwhile: that takes shards' locks, and a shard
    /// would wait for a thread that stands back and holds its lock until that thread is given a processor again.
    ///
    /// Errors: as [`Snapshot::write`].
    pub fn write_beside(
        self,
        path: &Path,
        stand_back: impl FnOnce() + Send,
    ) -> Result<SnapshotReport, KvError> {
        let snapshot = &self;
        std::thread::scope(|scope| {
            let (ask, asked) = channel::<Questions>();
            let (answer, answers) = channel::<Questions>();
            let writing = move || {
                stand_back();
                snapshot.write_asking(path, &mut |questions| {
                    // The other end is there for as long as this one is.
                    let asked = ask.send(std::mem::take(questions));
                    *questions = asked.ok().and_then(|()| answers.recv().ok()).unwrap_or_default();
                })
            };
            let builder = std::thread::Builder::new().name("snapshot-file".into());
            let writer = builder.spawn_scoped(scope, writing).map_err(io_error(path))?;
            for mut questions in asked {
                snapshot.answer(&mut questions);
                if answer.send(questions).is_err() {
                    break;
                }
            }
            writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn write_asking(
        &self,
        path: &Path,
        ask: &mut dyn FnMut(&mut Questions),
    ) -> Result<SnapshotReport, KvError> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let partial = path.with_file_name(name);
        let outcome = self.write_file(&partial, ask).and_then(|report| {
            std::fs::rename(&partial, path).map_err(io_error(path))?;
            sync_parent(path).map_err(io_error(path))?;
            Ok(report)
        });
        if outcome.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
        outcome
    }

    fn write_file(
        &self,
        path: &Path,
        ask: &mut dyn FnMut(&mut Questions),
    ) -> Result<SnapshotReport, KvError> {
        let failed = io_error(path);
        let mut file = File::create(path).map_err(&failed)?;
        let report = self.write_to_asking(&mut file, ask).map_err(&failed)?;
        file.sync_all().map_err(&failed)?;
        Ok(report)
    }

    /// Writes the snapshot to `out`, which is not synchronised.
    ///
    /// Errors: `out`'s.
    pub fn write_to(&self, out: &mut dyn Write) -> std::io::Result<SnapshotReport> {
        self.write_to_asking(out, &mut |questions| self.answer(questions))
    }

    fn write_to_asking(
        &self,
        out: &mut dyn Write,
        ask: &mut dyn FnMut(&mut Questions),
    ) -> std::io::Result<SnapshotReport> {
        let mut out = BlockWriter {
            out: BufWriter::with_capacity(1 << 20, out),
            payload: Vec::with_capacity(BLOCK_BYTES * 2),
            records: 0,
            report: SnapshotReport { version: self.version, ..SnapshotReport::default() },
        };
        out.head(self.format, self.store.clock.unix_ms())?;
        let (mut copy, mut questions) = (Vec::new(), Questions::default());
        for Covered { state, tail, holds_runs, is_looked_up } in &self.segments {
            if self.store.snapshots.load(Ordering::Acquire) == GIVEN_UP {
                return Err(std::io::Error::other(
                    "the pool has no room for what was overwritten while the snapshot was written",
                ));
            }
            let length = *tail as usize;
            state.segment.read_ahead(0, length);
            let bytes = if state.is(UNTRUSTED) {
                copy.clear();
                copy.resize(length, 0);
                state.segment.read(0, &mut copy);
                &copy
            } else {
                state.bytes(0, length)
            };
            let mut outcome = Ok(());
            walk::walk(&self.store.sealer, state, bytes, |found| {
                let header = &found.header;
                if outcome.is_err() || found.spoilt || !self.is_before_barrier(header) {
                    return;
                }
                if header.is_appended() && !holds_runs {
                    return;
                }
                let body = body_of(bytes, header, found.offset);
                // A tombstone may be needed against older entries that could not be ruled out.
                if !is_looked_up || header.is_tombstone() || header.is_appended() {
                    outcome = out.record(header, body);
                    return;
                }
                let place = Location::new(state.id, found.offset, 0);
                self.add_question(&mut questions, header, body, place);
                if questions.list.len() >= TOGETHER {
                    outcome = out.answered(&mut questions, bytes, ask);
                }
            });
            outcome?;
            out.answered(&mut questions, bytes, ask)?;
        }
        out.finish()
    }

    fn is_before_barrier(&self, header: &Header) -> bool {
        let barrier = self.barriers.get(&header.namespace).copied().unwrap_or(Version::MAX);
        header.version <= self.version && header.version >= barrier
    }

    fn add_question(
        &self,
        questions: &mut Questions,
        header: &Header,
        body: &[u8],
        place: Location,
    ) {
        let key = &body[..usize::from(header.key_length)];
        let hash = self.store.place(header.namespace, key);
        let owner = self.store.owner_of(hash);
        let (header, at) = (*header, questions.keys.len());
        questions.keys.extend_from_slice(key);
        let question = Question { header, key: at, hash, owner, place, is_wanted: true };
        questions.list.push(question);
    }

    /// Looks the keys up. Where a shard is busy, or gone, its entries are wanted.
    fn answer(&self, questions: &mut Questions) {
        let Questions { list, keys } = questions;
        for owner in 0..self.store.shards() {
            let mut own = list.iter_mut().filter(|question| question.owner == owner).peekable();
            if own.peek().is_none() {
                continue;
            }
            // Of a shard that is not at hand everything is wanted.
            let _busy_or_gone = self.store.peers.ask(owner, |shard| {
                for question in own {
                    let Question { header, hash, place, .. } = *question;
                    let key = &keys[question.key..][..usize::from(header.key_length)];
                    let newest = shard.newest_version_of(header.namespace, hash, key, place);
                    question.is_wanted = newest
                        .is_none_or(|newest| newest > self.version || newest <= header.version);
                }
            });
        }
    }
}

/// Key and value of the entry at `offset`.
fn body_of<'b>(bytes: &'b [u8], header: &Header, offset: u32) -> &'b [u8] {
    let start = (offset + HEADER_BYTES) as usize;
    &bytes[start..(u64::from(offset) + header.used_bytes()) as usize]
}

struct BlockWriter<'o> {
    out: BufWriter<&'o mut dyn Write>,
    payload: Vec<u8>,
    records: u32,
    report: SnapshotReport,
}

impl BlockWriter<'_> {
    fn head(&mut self, format: u32, unix_ms: u64) -> std::io::Result<()> {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&format.to_le_bytes());
        head.extend_from_slice(&[0; 4]);
        head.extend_from_slice(&self.report.version.to_le_bytes());
        head.extend_from_slice(&unix_ms.to_le_bytes());
        head.extend_from_slice(&beeline_wire::crc32c(&head).to_le_bytes());
        head.extend_from_slice(&[0; 4]);
        self.write(&head)
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.report.bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn record(&mut self, header: &Header, body: &[u8]) -> std::io::Result<()> {
        let mut record = [0; RECORD_BYTES];
        record[0..8].copy_from_slice(&header.version.to_le_bytes());
        record[8..16].copy_from_slice(&header.expires_at_ms.to_le_bytes());
        record[16..20].copy_from_slice(&header.value_length.to_le_bytes());
        record[20..22].copy_from_slice(&header.key_length.to_le_bytes());
        record[22] = header.kind;
        record[23] = header.flags & !BATCH_MORE;
        record[24..28].copy_from_slice(&header.namespace.to_le_bytes());
        self.payload.extend_from_slice(&record);
        self.payload.extend_from_slice(body);
        self.records += 1;
        self.report.records += 1;
        let value_length = header.value_length as usize;
        self.report.slot_bytes += slot_bytes_for(usize::from(header.key_length), value_length);
        if self.payload.len() >= BLOCK_BYTES { self.block() } else { Ok(()) }
    }

    /// The entries among `questions`, which lie in `bytes`, that are wanted.
    fn answered(
        &mut self,
        questions: &mut Questions,
        bytes: &[u8],
        ask: &mut dyn FnMut(&mut Questions),
    ) -> std::io::Result<()> {
        if !questions.list.is_empty() {
            ask(questions);
        }
        for Question { header, place, .. } in questions.list.iter().filter(|one| one.is_wanted) {
            self.record(header, body_of(bytes, header, place.offset()))?;
        }
        questions.clear();
        Ok(())
    }

    fn block(&mut self) -> std::io::Result<()> {
        if self.records == 0 {
            return Ok(());
        }
        let payload = std::mem::take(&mut self.payload);
        self.block_of(self.records, &payload)?;
        self.payload = payload;
        self.payload.clear();
        self.records = 0;
        Ok(())
    }

    fn block_of(&mut self, records: u32, payload: &[u8]) -> std::io::Result<()> {
        let mut head = [0; 12];
        head[0..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        head[4..8].copy_from_slice(&records.to_le_bytes());
        let crc = beeline_wire::crc32c_append(beeline_wire::crc32c(&head[..8]), payload);
        head[8..12].copy_from_slice(&crc.to_le_bytes());
        self.write(&head)?;
        self.write(payload)
    }

    fn finish(mut self) -> std::io::Result<SnapshotReport> {
        self.block()?;
        let mut totals = self.report.records.to_le_bytes().to_vec();
        totals.extend_from_slice(&self.report.bytes.to_le_bytes());
        self.block_of(END, &totals)?;
        self.out.flush()?;
        Ok(self.report)
    }
}

fn sync_parent(path: &Path) -> std::io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// A record of a snapshot file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub version: Version,
    pub expires_at_ms: u64,
    pub key_length: u16,
    pub kind: u8,
    pub flags: u8,
    pub namespace: u32,
}

impl Record {
    /// True for an entry of a stream.
    pub fn is_appended(&self) -> bool {
        self.flags & APPENDED != 0
    }

    /// The part of the record's body that says where it belongs.
    pub fn place_of<'b>(&self, body: &'b [u8]) -> &'b [u8] {
        let ends = if self.is_appended() { STREAM_KEY_BYTES } else { 0 };
        &body[..usize::from(self.key_length).saturating_sub(ends)]
    }
}

/// Splits a payload into records; `None` when they do not fill it exactly or make no sense.
fn records_of(mut payload: &[u8]) -> Option<Vec<(Record, &[u8])>> {
    let mut records = Vec::new();
    while !payload.is_empty() {
        let (head, rest) = payload.split_first_chunk::<RECORD_BYTES>()?;
        let u64_at = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let value_length = u32::from_le_bytes([head[16], head[17], head[18], head[19]]) as usize;
        let key_length = u16::from_le_bytes([head[20], head[21]]);
        let flags = head[23];
        let namespace = u32::from_le_bytes([head[24], head[25], head[26], head[27]]);
        let expires_at_ms = u64_at(8);
        if flags & !(TOMBSTONE | EXPIRES | APPENDED) != 0
            || (flags & APPENDED != 0
                && (flags != APPENDED
                    || usize::from(key_length) < STREAM_KEY_BYTES
                    || namespace & !IN_ROWS < FIRST_NAMESPACE))
            || (flags & EXPIRES != 0) != (expires_at_ms != 0)
            || (flags & TOMBSTONE != 0 && value_length != 0)
        {
            return None;
        }
        let body = rest.get(..usize::from(key_length) + value_length)?;
        if flags & APPENDED != 0 {
            crate::streams::split_entry_key(&body[..usize::from(key_length)])?;
        }
        payload = &rest[body.len()..];
        let version = u64_at(0);
        let record =
            Record { version, expires_at_ms, key_length, kind: head[22], flags, namespace };
        records.push((record, body));
    }
    Some(records)
}

/// Reads a snapshot file, calling `visit` with the records of each block that checks out.
pub(crate) fn read_file(
    path: &Path,
    mut visit: impl FnMut(Record, &[u8]) -> Result<(), KvError>,
) -> Result<SnapshotReport, KvError> {
    let bad = |reason| KvError::Snapshot { path: path.display().to_string(), reason };
    let file = File::open(path).map_err(io_error(path))?;
    let file_bytes = file.metadata().map_err(io_error(path))?.len();
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut fill = |buffer: &mut [u8]| {
        input.read_exact(buffer).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => bad("is cut short"),
            _ => io_error(path)(error),
        })
    };
    let mut head = [0; HEAD_BYTES];
    fill(&mut head)?;
    if &head[..8] != MAGIC {
        return Err(bad("is not a snapshot"));
    }
    let crc = u32::from_le_bytes([head[32], head[33], head[34], head[35]]);
    if beeline_wire::crc32c(&head[..32]) != crc || head[36..] != [0; 4] {
        return Err(bad("has a damaged header"));
    }
    let format = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
    if format == 0 || format > FORMAT {
        let (found, supported) = (u64::from(format), u64::from(FORMAT));
        return Err(KvError::Format { what: "the snapshot", found, supported });
    }
    let mut version = [0; 8];
    version.copy_from_slice(&head[16..24]);
    let mut report = SnapshotReport {
        version: u64::from_le_bytes(version),
        bytes: HEAD_BYTES as u64,
        ..SnapshotReport::default()
    };
    let mut payload = Vec::new();
    loop {
        let mut block = [0; 12];
        fill(&mut block)?;
        let length = u32::from_le_bytes([block[0], block[1], block[2], block[3]]) as usize;
        let records = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        let crc = u32::from_le_bytes([block[8], block[9], block[10], block[11]]);
        if length > BLOCK_LIMIT {
            return Err(bad("has a damaged block"));
        }
        // No memory for bytes that are not there.
        if report.bytes + 12 + length as u64 > file_bytes {
            return Err(bad("is cut short"));
        }
        payload.clear();
        payload.resize(length, 0);
        fill(&mut payload)?;
        if beeline_wire::crc32c_append(beeline_wire::crc32c(&block[..8]), &payload) != crc {
            return Err(bad("has a damaged block"));
        }
        if records == END {
            let mut totals = report.records.to_le_bytes().to_vec();
            totals.extend_from_slice(&report.bytes.to_le_bytes());
            if payload != totals {
                return Err(bad("lacks blocks"));
            }
            report.bytes += 12 + length as u64;
            return Ok(report);
        }
        report.bytes += 12 + length as u64;
        let list = records_of(&payload).ok_or_else(|| bad("has a damaged record"))?;
        if list.len() != records as usize {
            return Err(bad("has a damaged record"));
        }
        for (record, body) in list {
            // Versions up to the header's are set aside for them, and no more.
            if record.version > report.version {
                return Err(bad("has a record that is newer than the snapshot"));
            }
            report.records += 1;
            let key_length = usize::from(record.key_length);
            report.slot_bytes += slot_bytes_for(key_length, body.len() - key_length);
            visit(record, body)?;
        }
    }
}

/// Checks a snapshot file from end to end without restoring it.
///
/// Errors: [`KvError::Snapshot`] naming the first thing wrong, [`KvError::Format`],
/// [`KvError::Io`].
pub fn check_snapshot(path: &Path) -> Result<SnapshotReport, KvError> {
    read_file(path, |_, _| Ok(()))
}

/// Makes a pool in `directory`, restores a snapshot into it and opens the store.
///
/// The store is there whole or not at all: until everything is on media the directory is marked,
/// and nothing opens a marked one (see [`KvError::Unfinished`]). What an earlier restore left
/// unfinished is removed first; what a failed one made is removed at its end.
///
/// Errors: as [`restore`]; `Exists` when a pool is there.
pub fn restore_directory(
    path: &Path,
    directory: &Path,
    pool: &PoolOptions,
    options: StoreOptions,
) -> Result<(Opened, SnapshotReport), KvError> {
    check_snapshot(path)?;
    let unfinished = Unfinished::begin(directory)?;
    let pool = match Pool::create(directory, pool) {
        Ok(pool) => pool,
        Err(error) => {
            // Made by somebody else after we looked, or perhaps a part of ours.
            if matches!(error, PmemError::Exists { .. } | PmemError::Busy { .. }) {
                unfinished.unmark();
            } else {
                unfinished.undo();
            }
            return Err(error.into());
        }
    };
    match restore(path, pool, options) {
        Ok(restored) => {
            unfinished.finish()?;
            Ok(restored)
        }
        Err(error) => {
            unfinished.undo();
            Err(error)
        }
    }
}

/// Restores a snapshot into `pool`, which has to be empty, and opens the store.
///
/// The file is checked from end to end before the first record is stored. A crash leaves a part of
/// it in the pool; [`restore_directory`] is safe against that.
///
/// Errors: as [`check_snapshot`]; [`KvError::Snapshot`] when the pool is not empty;
/// [`KvError::PoolFull`]; the pool's.
pub fn restore(
    path: &Path,
    pool: Pool,
    options: StoreOptions,
) -> Result<(Opened, SnapshotReport), KvError> {
    check_snapshot(path)?;
    if !pool.segments().is_empty() {
        let path = PathBuf::from(path).display().to_string();
        return Err(KvError::Snapshot { path, reason: "can be restored into an empty pool only" });
    }
    // Barriers of the pool's former contents say nothing about the records, which keep their
    // versions.
    for word in root::BARRIER..=root::BARRIER_ALL {
        pool.store_root_word(word, 0);
    }
    let mut persister = pool.persister();
    persister.flush_root();
    persister.fence()?;
    let (store, shards, mut recovered) = Store::open_unfinished(pool, options)?;
    let mut uncommitted = 0_u32;
    let commit = |uncommitted: &mut u32| {
        *uncommitted = 0;
        shards
            .iter()
            .try_for_each(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).commit())
    };
    let report = read_file(path, |record, body| {
        let owner = store.shard_for(record.namespace, record.place_of(body));
        let mut shard = shards[owner].lock().unwrap_or_else(PoisonError::into_inner);
        shard.restore_record(&record, body)?;
        drop(shard);
        uncommitted += 1;
        if uncommitted == 1024 { commit(&mut uncommitted) } else { Ok(()) }
    })?;
    commit(&mut uncommitted)?;
    crate::catalog::load(&store, &shards)?;
    store.version_seen(report.version);
    store.begin_feed_anew();
    recovered.keys = store.stats().total.keys;
    Ok(((store, shards, recovered), report))
}

#[cfg(test)]
mod tests;
