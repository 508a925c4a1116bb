//! Opening a store: walks every segment, rebuilds the indexes, leaves clean tails behind.
//!
//! Threads take segments one by one, verify the entries, and hand them in groups to the shard
//! whose index they belong to. The order does not matter: the largest version wins, equal
//! versions are copies the collector made.
//!
//! What recovery writes: zeros over what a crash left behind the last good entry of the store's
//! own logs (so that an append can never connect to it), and exact counts. Both may be cut short
//! and done again. In a segment that is not in its first life since it was zeroed, only entries of
//! this life can connect: these are looked for, and lose their seals, where appending goes on.
//! Of entries that were not acknowledged a crash may keep a later one and lose an earlier one in another
//! segment. So a row's last field may be gone and the one that was to take its place never have come: the
//! head of such a row is deleted ([`Shard::end_hollow_rows`]).
//!
//! Source: BOOM-KV §3.6.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use beeline_pmem::{Persister, PmemError, Pool, Segment};

use crate::entry::{EXPIRES, TOMBSTONE};
use crate::fault::{self, KnownBug};
use crate::index::{Location, Slot};
use crate::peers::Peer;
use crate::segments::{FORMAT, FORMAT_PLAIN, QUARANTINED, SETTLED, SegmentState, UNTRUSTED, word};
use crate::shard::Shard;
use crate::shard::log::{Appended, Chain};
use crate::stats;
use crate::store::{Store, root};
use crate::streams::{Found as FoundRuns, Run, find_entry, split_stream};
use crate::walk::{self, Found, Walked};
use crate::{KvError, RecoveryReport, StoreOptions, Version};

/// Entries handed over at a time.
const GROUP: usize = 512;

/// Store, shards and what recovery found.
pub type Opened = (Arc<Store>, Vec<Arc<Mutex<Shard>>>, RecoveryReport);

/// An entry on its way into an index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recovered {
    pub hash: u64,
    pub version: Version,
    pub location: Location,
    pub slot_bytes: u32,
    pub key_length: u16,
    pub namespace: u32,
}

/// The head of a row, as it lies on media.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecoveredHead {
    pub database: u32,
    pub hash: u64,
    pub location: Location,
}

/// A segment of this process's own logs that could take more entries.
#[derive(Debug)]
struct Candidate {
    state: Arc<SegmentState>,
    newest: Version,
}

impl Store {
    /// Opens the store in `pool`: recovers what is in it and hands out its shards, each behind
    /// the lock it lives in.
    ///
    /// Errors: [`KvError::Format`], [`KvError::Unfinished`], the pool's.
    pub fn open(pool: Pool, options: StoreOptions) -> Result<Opened, KvError> {
        if let Some(directory) = pool.directory() {
            crate::refuse_unfinished(&directory)?;
        }
        Self::open_unfinished(pool, options)
    }

    /// [`Store::open`] for whoever is restoring into the pool.
    pub(crate) fn open_unfinished(pool: Pool, options: StoreOptions) -> Result<Opened, KvError> {
        let started = Instant::now();
        refuse_lost(&pool, options.accept_damage)?;
        let segments = pool.segments();
        let store = Self::new(pool, &options)?;
        let shards: Vec<_> = (0..store.shards())
            .map(|index| Arc::new(Mutex::new(Shard::new(Arc::clone(&store), index))))
            .collect();
        store.peers.set(shards.iter().map(|shard| {
            let shard: Arc<Mutex<dyn Peer>> = Arc::clone(shard) as _;
            Arc::downgrade(&shard)
        }));
        let mut states = Vec::with_capacity(segments.len());
        for segment in segments {
            states.push(adopt(&store, segment)?);
        }
        let report =
            recover_all(&store, &shards, &states, options.recovery_threads, options.accept_damage)?;
        store.raise_format()?;
        store.begin_feed_anew();
        let report = RecoveryReport { seconds: started.elapsed().as_secs_f64(), ..report };
        Ok((store, shards, report))
    }
}

/// Refuses a pool that lost track of segments, unless that is accepted; then that much is never asked
/// about again.
fn refuse_lost(pool: &Pool, accept: bool) -> Result<(), KvError> {
    let findings = pool.report().findings;
    let (pages, descriptors) = (findings.damaged_pages, findings.damaged_descriptors);
    let files = findings.orphans_set_aside;
    if pages == 0 && descriptors == 0 && files == 0 {
        return Ok(());
    }
    let lost = u64::from(pages.min(0xFFFF)) << 48
        | u64::from(descriptors.min(0xFF_FFFF)) << 24
        | u64::from(files.min(0xFF_FFFF));
    if pool.root_word(root::ACCEPTED) == lost {
        return Ok(());
    }
    if !accept {
        return Err(KvError::DamagedPool { pages, descriptors, files });
    }
    pool.store_root_word(root::ACCEPTED, lost);
    let mut persister = pool.persister();
    persister.flush_root();
    Ok(persister.fence()?)
}

fn adopt(store: &Arc<Store>, segment: Arc<Segment>) -> Result<Arc<SegmentState>, KvError> {
    let found = segment.word(word::FORMAT);
    if ![0, FORMAT_PLAIN, FORMAT].contains(&found) {
        return Err(KvError::Format { what: "a segment", found, supported: FORMAT });
    }
    let owner = (segment.word(word::OWNER) as u32) % store.shards() as u32;
    let flags = if segment.is_shared() { UNTRUSTED } else { 0 }
        | if store.pool.report().findings.clean { SETTLED } else { 0 };
    let first = crate::entry::FIRST_ENTRY;
    let state = Arc::new(SegmentState::new(segment, owner, flags, first, false));
    store.table.insert(Arc::clone(&state));
    Ok(state)
}

fn recover_all(
    store: &Arc<Store>,
    shards: &[Arc<Mutex<Shard>>],
    states: &[Arc<SegmentState>],
    threads: usize,
    accept_damage: bool,
) -> Result<RecoveryReport, KvError> {
    let threads = if threads == 0 { shards.len() } else { threads };
    let threads = threads.clamp(1, states.len().max(1));
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut worker = Worker::new(store, shards);
        while let Some(state) = states.get(next.fetch_add(1, Ordering::Relaxed)) {
            worker.take(state)?;
        }
        worker.finish()
    };
    let results: Vec<Result<Outcome, KvError>> = if threads == 1 {
        vec![worker()]
    } else {
        std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
            handles
                .into_iter()
                .map(|handle| {
                    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        })
    };
    let mut report = RecoveryReport { segments: states.len() as u64, ..RecoveryReport::default() };
    let mut candidates = Vec::new();
    let mut empty = Vec::new();
    let mut held = Vec::new();
    let mut heads = Vec::new();
    let mut damaged = Vec::new();
    let mut runs = Vec::new();
    for result in results {
        let outcome = result?;
        report.entries += outcome.report.entries;
        report.damaged += outcome.report.damaged;
        report.torn += outcome.report.torn;
        report.bytes += outcome.report.bytes;
        candidates.extend(outcome.candidates);
        empty.extend(outcome.empty);
        held.push(outcome.held);
        heads.push(outcome.heads);
        damaged.extend(outcome.damaged);
        runs.extend(outcome.runs);
        store.version_seen(outcome.newest);
    }
    settle_damage(store, &damaged, accept_damage)?;
    stats::add(&store.counters[0].damaged, report.damaged);
    take_in_held(store, shards, held, runs)?;
    for state in empty {
        store.table.remove(state.id);
        store.pool.free(Arc::clone(&state.segment))?;
    }
    // Of a pool with room for more: what is kept aside takes room on the disk.
    let slots = store.pool.capacity_bytes() / u64::from(store.pool.segment_bytes());
    store.pool.keep_reserve((store.shards() + 1).min(slots as usize / 8));
    let mut index_bytes = 0;
    for shard in shards {
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        for (chain, streams) in [(Chain::Data, false), (Chain::Appends, true)] {
            let mine = candidates
                .iter()
                .filter(|candidate| candidate.state.owner as usize == shard.index())
                .filter(|candidate| candidate.state.holds_runs() == streams);
            if let Some(best) = mine.max_by_key(|candidate| candidate.newest) {
                cut_off(store, &best.state)?;
                shard.resume_head(chain, &best.state);
            }
        }
        shard.end_hollow_rows(heads.iter().flatten())?;
        shard.tick();
        let stats = shard.stats();
        report.keys += stats.keys;
        index_bytes += stats.index_bytes;
    }
    report.index_bytes_per_key = index_bytes as f64 / report.keys.max(1) as f64;
    Ok(report)
}

/// Refuses a store with damage in what was acknowledged, unless that is accepted; then it is noted
/// beside each segment, which from then on is one as others are.
fn settle_damage(
    store: &Store,
    damaged: &[(Arc<SegmentState>, u32, u32)],
    accept: bool,
) -> Result<(), KvError> {
    if damaged.is_empty() {
        return Ok(());
    }
    if !accept {
        let entries = damaged.iter().map(|(_, _, fresh)| u64::from(*fresh)).sum();
        return Err(KvError::DamagedData { entries, segments: damaged.len() as u64 });
    }
    let mut persister = store.pool.persister();
    for (state, missing, _) in damaged {
        state.accept(*missing);
        persister.flush_words_now(&state.segment);
        state.clear(QUARANTINED);
    }
    Ok(persister.fence()?)
}

/// Takes in the entries of services' namespaces, now that the catalog is known.
fn take_in_held(
    store: &Arc<Store>,
    shards: &[Arc<Mutex<Shard>>],
    held: Vec<Vec<Recovered>>,
    runs: Vec<(u32, FoundRuns)>,
) -> Result<(), KvError> {
    crate::catalog::load(store, shards)?;
    let mut guards: Vec<_> =
        shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner)).collect();
    for entry in held.into_iter().flatten() {
        if entry.version >= store.barrier(entry.namespace) {
            guards[store.owner_of(entry.hash)].install_recovered(&entry);
        }
    }
    for (namespace, found) in runs {
        if store.barrier(namespace) == Version::MAX {
            continue;
        }
        for (stream, runs) in found {
            let Some((key, _)) = split_stream(&stream) else { continue };
            guards[store.owner_of(store.place(namespace, key))].hold_runs(namespace, stream, runs);
        }
    }
    guards.iter_mut().for_each(|shard| shard.put_in_order());
    Ok(())
}

/// Makes sure that no append connects to entries of this life behind the last accepted one.
fn cut_off(store: &Store, state: &SegmentState) -> Result<(), PmemError> {
    if state.began_zeroed() || fault::is_on(KnownBug::KeepTail) {
        return Ok(());
    }
    let end = state.tail.load(Ordering::Relaxed);
    let bytes = state.bytes(0, state.length as usize);
    let left = walk::left_behind(&store.sealer, state, bytes, end);
    if left.is_empty() {
        return Ok(());
    }
    let mut persister = store.pool.persister();
    for offset in left {
        // Version and seal.
        state.segment.store(offset as usize, &[0; 16]);
        persister.flush(&state.segment, offset as usize, 16);
    }
    persister.fence()
}

#[derive(Debug, Default)]
struct Outcome {
    report: RecoveryReport,
    newest: Version,
    candidates: Vec<Candidate>,
    empty: Vec<Arc<SegmentState>>,
    /// Segments with damage that nobody accepted: entries missing in all, and since then.
    damaged: Vec<(Arc<SegmentState>, u32, u32)>,
    /// Entries of services' namespaces.
    held: Vec<Recovered>,
    /// Runs of streams, by namespace.
    runs: BTreeMap<u32, FoundRuns>,
    /// Heads of rows: which of them have no field is known once all fields were counted.
    heads: Vec<RecoveredHead>,
}

struct Worker<'a> {
    store: &'a Arc<Store>,
    shards: &'a [Arc<Mutex<Shard>>],
    groups: Vec<Vec<Recovered>>,
    persister: Persister,
    copy: Vec<u8>,
    outcome: Outcome,
}

impl<'a> Worker<'a> {
    fn new(store: &'a Arc<Store>, shards: &'a [Arc<Mutex<Shard>>]) -> Self {
        Self {
            store,
            shards,
            groups: shards.iter().map(|_| Vec::with_capacity(GROUP)).collect(),
            persister: store.pool.persister(),
            copy: Vec::new(),
            outcome: Outcome::default(),
        }
    }

    fn take(&mut self, state: &Arc<SegmentState>) -> Result<(), PmemError> {
        let mut copy = std::mem::take(&mut self.copy);
        let bytes = walk::bytes_of(state, &mut copy);
        let store = self.store;
        // Where the last entry of all ended: no reader walks over what does not verify.
        let (mut end, mut hole) = (crate::entry::FIRST_ENTRY, false);
        let walked = walk::walk(&store.sealer, state, bytes, |found| {
            let whole = std::mem::replace(&mut end, found.offset + found.header.slot_bytes);
            let header = &found.header;
            hole |= found.offset != whole;
            // The header of one that was spoilt may say anything.
            if header.is_appended() && !found.spoilt {
                if std::mem::take(&mut hole) {
                    close_runs(&mut self.outcome.runs, state.id);
                }
                self.outcome.report.entries += 1;
                self.outcome.report.bytes += u64::from(header.slot_bytes);
                // What a snapshot replaced may have had the same generations.
                if header.version >= store.barrier(crate::SYSTEM_NAMESPACE) {
                    let start = (found.offset + crate::entry::HEADER_BYTES) as usize;
                    let key = &bytes[start..start + usize::from(header.key_length)];
                    let runs = self.outcome.runs.entry(header.namespace).or_default();
                    let place = (state.id, found.offset, header.slot_bytes);
                    find_entry(runs, key, place);
                }
                return;
            }

            self.outcome.report.entries += 1;
            self.outcome.report.bytes += u64::from(found.header.slot_bytes);
            let known = (found.header.namespace as usize) < crate::INDEXES;
            if !known || found.header.version >= store.barrier(found.header.namespace) {
                self.hand_over(state, bytes, &found);
            }
        });
        self.copy = copy;
        self.outcome.newest = self.outcome.newest.max(walked.newest);
        self.settle(state, &walked);
        Ok(())
    }

    fn hand_over(&mut self, state: &SegmentState, bytes: &[u8], found: &Found) {
        let header = &found.header;
        let start = found.offset as usize + crate::entry::HEADER_BYTES as usize;
        let key = &bytes[start..start + usize::from(header.key_length)];
        let hash = self.store.place(header.namespace, key);
        let shard = self.store.owner_of(hash);
        // One that was spoilt is found, and its reading fails: nothing older shows instead.
        let flags = location_flags(state, if found.spoilt { 0 } else { header.flags });
        let recovered = Recovered {
            hash,
            version: header.version,
            location: Location::new(state.id, found.offset, flags),
            slot_bytes: header.slot_bytes,
            key_length: header.key_length,
            namespace: header.namespace,
        };
        if header.namespace as usize >= crate::INDEXES {
            // What it is worth, the catalog knows, which may lie in any segment.
            self.outcome.held.push(recovered);
            return;
        }
        if !found.spoilt
            && header.namespace < u32::from(crate::DATABASES)
            && crate::is_row_kind(header.kind)
        {
            let (database, location) = (header.namespace, recovered.location);
            self.outcome.heads.push(RecoveredHead { database, hash, location });
        }
        self.groups[shard].push(recovered);
        if self.groups[shard].len() == GROUP {
            self.deliver(shard);
        }
    }

    fn deliver(&mut self, shard: usize) {
        let mut target = self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner);
        for entry in self.groups[shard].drain(..) {
            target.install_recovered(&entry);
        }
    }

    /// Leaves the segment as later appends and walks rely on it.
    fn settle(&mut self, state: &Arc<SegmentState>, walked: &Walked) {
        let client = state.is(UNTRUSTED);
        let report = &mut self.outcome.report;
        let known = state.accepted();
        if client {
            report.torn += u64::from(walked.missing);
        } else {
            let fresh = walked.missing.saturating_sub(known);
            report.damaged += u64::from(fresh);
            if fresh > 0 {
                self.outcome.damaged.push((Arc::clone(state), walked.missing, fresh));
            }
        }
        report.damaged += u64::from(walked.spoilt);
        report.torn += u64::from(walked.cut_batch);
        if walked.is_torn() && walked.cut_batch == 0 {
            report.torn += 1;
        }
        state.tail.store(walked.end, Ordering::Release);
        state.count.store(walked.entries, Ordering::Relaxed);
        if walked.missing > 0 && !client {
            if walked.missing > known {
                state.set(QUARANTINED);
            }
            return;
        }
        if walked.dirty_end != 0 && !client && !fault::is_on(KnownBug::KeepTail) {
            let zeros = [0; 4096];
            let (start, end) = (walked.end as usize, walked.dirty_end as usize);
            for at in (start..end).step_by(zeros.len()) {
                state.segment.store(at, &zeros[..zeros.len().min(end - at)]);
            }
            self.persister.flush(&state.segment, start, end - start);
        }
        if walked.missing == 0 && state.promised() != walked.entries {
            state.promise(walked.entries);
            self.persister.flush_words(&state.segment);
        }
        if walked.entries == 0 && walked.missing == 0 {
            self.outcome.empty.push(Arc::clone(state));
        } else if !client && state.length - walked.end >= state.length / 8 {
            let (state, newest) = (Arc::clone(state), walked.newest);
            self.outcome.candidates.push(Candidate { state, newest });
        }
    }

    fn finish(mut self) -> Result<Outcome, KvError> {
        for shard in 0..self.shards.len() {
            self.deliver(shard);
        }
        self.persister.fence()?;
        Ok(self.outcome)
    }
}

/// Nothing joins the runs found in a segment so far.
fn close_runs(runs: &mut BTreeMap<u32, FoundRuns>, segment: u32) {
    let found = runs.values_mut().flat_map(BTreeMap::values_mut).flatten();
    found.filter(|run| run.segment == segment).for_each(Run::close);
}

/// Location flags of an entry with these header flags in this segment.
pub(crate) fn location_flags(state: &SegmentState, flags: u8) -> u64 {
    let mut location = 0;
    if flags & TOMBSTONE != 0 {
        location |= Location::TOMBSTONE;
    }
    if flags & EXPIRES != 0 {
        location |= Location::EXPIRES;
    }
    if state.is(UNTRUSTED) {
        location |= Location::UNTRUSTED;
    }
    location
}

impl Shard {
    /// Version of the entry a slot points at; 0 when a client spoilt it since it was verified.
    fn version_in(&mut self, slot: &Slot) -> Version {
        let offset = slot.location.offset();
        let state = self.cache.get(&self.store.table, slot.location.segment());
        if !slot.location.has(Location::UNTRUSTED) {
            return crate::shard::read_header(state, offset).version;
        }
        // A client that outlived the server may still write: a version it made up must not hide
        // what others wrote.
        let header = crate::shard::read_header(state, offset);
        let seal = self.store.sealer.seal(state.id, state.generation, offset, &header);
        if seal == header.seal { header.version } else { 0 }
    }

    /// Takes in an entry found on media: the largest version of a key wins, the others count as
    /// stale.
    fn install_recovered(&mut self, entry: &Recovered) {
        let mut key = std::mem::take(&mut self.scratch);
        let state = self.cache.get(&self.store.table, entry.location.segment());
        key.clear();
        key.resize(usize::from(entry.key_length), 0);
        let start = entry.location.offset() + crate::entry::HEADER_BYTES;
        state.segment.read(start as usize, &mut key);
        let found = self.find(entry.namespace, entry.hash, &key);
        self.scratch = key;
        let appended = Appended {
            version: entry.version,
            location: entry.location,
            slot_bytes: entry.slot_bytes,
        };
        let Some(id) = found else {
            self.install_at(entry.namespace, entry.hash, None, &appended, true);
            return;
        };
        let Some(index) = self.spaces.get(entry.namespace) else { return };
        let slot = *index.slot(id);
        let newest = self.version_in(&slot);
        if entry.version > newest {
            self.install_at(entry.namespace, entry.hash, found, &appended, true);
        } else {
            self.change_slot(entry.namespace, id, crate::index::Slot::add_stale);
        }
    }
}
