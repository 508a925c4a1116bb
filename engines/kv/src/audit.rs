//! Recounts from the media what the indexes claim, for tests.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::entry::HEADER_BYTES;
use crate::index::{Location, STALE_UNKNOWN, Slot};
use crate::shard::Shard;
use crate::store::Store;
use crate::walk;

/// Versions of one key and where they lie.
type Entries = Vec<(u64, Location)>;

/// What `stale` has to be at least: older entries one by one, but for segments that count by run,
/// where the run that the newest entry goes on is none.
fn least_stale(store: &Store, entries: &Entries, newest: Location) -> usize {
    let mut segments: HashMap<u32, usize> = HashMap::new();
    for (_, place) in entries {
        *segments.entry(place.segment()).or_default() += 1;
    }
    let count = |(segment, entries): (u32, usize)| {
        let by_run = store.table.get(segment).is_some_and(|state| state.by_run);
        let entries = if by_run { 1 } else { entries };
        let here = newest.is_readable() && newest.segment() == segment;
        entries - usize::from(here)
    };
    let all: usize = segments.into_iter().map(count).sum();
    if newest.is_readable() { all } else { all.saturating_sub(1) }
}

/// An entry of a stream on media.
struct Entry {
    namespace: u32,
    key: Vec<u8>,
    segment: u32,
    slot_bytes: u32,
}

/// What the runs of streams say other than the entries on media. Adds those that runs hold to the live bytes.
fn stream_findings(
    store: &Store,
    shards: &[std::sync::Arc<Mutex<Shard>>],
    entries: &[Entry],
    live_bytes: &mut HashMap<u32, i64>,
) -> Vec<String> {
    let mut findings = Vec::new();
    // By segment, namespace, key with generation: position to bytes.
    let mut met: HashMap<(u32, u32, &[u8]), HashMap<u64, u64>> = HashMap::new();
    for entry in entries {
        let Some((stream, position)) = entry.key.split_last_chunk::<8>() else { continue };
        let place = (entry.segment, entry.namespace, stream);
        let bytes = u64::from(entry.slot_bytes);
        met.entry(place).or_default().insert(u64::from_be_bytes(*position), bytes);
    }
    let mut runs: HashMap<u32, u32> = HashMap::new();
    for shard in shards {
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        for namespace in shard.spaces.extra_numbers() {
            let Some(streams) = shard.streams(namespace) else { continue };
            let mut counted = 0;
            for (key, stream) in streams.all() {
                let name = format!("stream {} of {namespace}", String::from_utf8_lossy(key));
                let whole = crate::streams::entry_key(key, stream.generation, 0);
                let (mut next, mut bytes) = (None, 0);
                for run in stream.runs() {
                    if next.is_some_and(|next| next != run.first) || run.next <= stream.first {
                        findings.push(format!("{name}: run of {}..{}", run.first, run.next));
                    }
                    next = Some(run.next);
                    *runs.entry(run.segment).or_default() += 1;
                    let here = met.get(&(run.segment, namespace, &whole[..whole.len() - 8]));
                    let mut real = 0;
                    for position in run.first..run.next {
                        match here.and_then(|here| here.get(&position)) {
                            Some(bytes) => real += bytes,
                            None => findings.push(format!("{name}: {position} is not on media")),
                        }
                    }
                    if real != run.bytes {
                        findings.push(format!("{name}: {} bytes kept, {real} real", run.bytes));
                    }
                    bytes += real;
                    *live_bytes.entry(run.segment).or_default() += real as i64;
                }
                if next.is_some_and(|next| next != stream.next) || bytes != stream.bytes {
                    findings
                        .push(format!("{name}: ends at {}, {} bytes", stream.next, stream.bytes));
                }
                counted += bytes;
            }
            if counted != streams.bytes() {
                findings.push(format!("namespace {namespace}: runs that belong to no stream"));
            }
        }
    }
    for state in store.table.all() {
        let (kept, real) = (state.runs(), runs.get(&state.id).copied().unwrap_or_default());
        if kept != real {
            findings.push(format!("segment {}: {kept} runs kept, {real} real", state.id));
        }
    }
    findings
}

/// Compares every index with a walk over every segment; each finding is a sentence. The caller
/// has stopped all work.
#[doc(hidden)]
#[must_use]
pub fn audit(store: &Store, shards: &[std::sync::Arc<Mutex<Shard>>]) -> Vec<String> {
    let mut findings = Vec::new();
    let mut on_media: HashMap<(u32, Vec<u8>), Entries> = HashMap::new();
    let mut live_bytes: HashMap<u32, i64> = HashMap::new();
    let mut appended: Vec<Entry> = Vec::new();
    for state in store.table.all() {
        let mut copy = vec![0; state.length as usize];
        state.segment.read(0, &mut copy);
        live_bytes.insert(state.id, 0);
        walk::walk(&store.sealer, &state, &copy, |found| {
            let header = found.header;
            let start = (found.offset + HEADER_BYTES) as usize;
            let key = copy[start..start + usize::from(header.key_length)].to_vec();
            if header.is_appended() && !found.spoilt {
                let (segment, slot_bytes) = (state.id, header.slot_bytes);
                appended.push(Entry { namespace: header.namespace, key, segment, slot_bytes });
                return;
            }
            if header.version >= store.barrier(header.namespace) {
                let place = Location::new(state.id, found.offset, 0);
                let entries = on_media.entry((header.namespace, key)).or_default();
                entries.push((header.version, place));
            }
        });
    }
    for ((namespace, key), entries) in &on_media {
        let hash = store.place(*namespace, key);
        let owner = store.owner_of(hash);
        let mut shard = shards[owner].lock().unwrap_or_else(PoisonError::into_inner);
        let name = String::from_utf8_lossy(key).into_owned();
        let Some(id) = shard.find(*namespace, hash, key) else {
            findings.push(format!("key {name} has {} entries and no slot", entries.len()));
            continue;
        };
        let Some(index) = shard.spaces.get(*namespace) else { continue };
        let slot: Slot = *index.slot(id);
        let newest = entries.iter().map(|entry| entry.0).max().unwrap_or(0);
        if slot.location.is_readable()
            && !entries
                .iter()
                .any(|(version, place)| *version == newest && place.same_place(slot.location))
        {
            findings.push(format!("key {name}: the index does not point at version {newest}"));
        }
        let least = least_stale(store, entries, slot.location);
        if slot.stale != STALE_UNKNOWN && usize::from(slot.stale) < least {
            findings.push(format!(
                "key {name}: {} entries on media, {least} to be counted, {} stale counted",
                entries.len(),
                slot.stale
            ));
        }
        if slot.is_needed() {
            *live_bytes.entry(slot.location.segment()).or_default() += slot.slot_bytes() as i64;
        }
    }
    for shard in shards {
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        findings.extend(shard.disorder());
        findings.extend(shard.row_differences());
        findings.extend(shard.misplaced_expiries());
    }
    findings.extend(stream_findings(store, shards, &appended, &mut live_bytes));
    for state in store.table.all() {
        let (kept, real) = (state.live(), live_bytes.get(&state.id).copied().unwrap_or(0));
        if kept != real {
            findings.push(format!("segment {}: {kept} live bytes kept, {real} real", state.id));
        }
    }
    findings
}
