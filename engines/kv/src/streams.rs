//! What a shard knows of the streams in one namespace: where their entries lie, and nothing for each entry.
//!
//! ```text
//! stream: generation, first position … next position
//!   run (segment 4): positions 0 … 811   marks every 16 KiB
//!   run (segment 9): positions 812 … 1300
//! ```
//!
//! A *run* is a row of positions that lie in one segment in ascending order, with other entries between
//! them. A reader walks from the mark before the position it wants. A run counts whole, also where the
//! stream was cut off within it: it goes when the stream begins behind its end.
//!
//! Invariant: every run is counted in its segment ([`crate::segments::SegmentState::add_run`]), with its bytes, as
//! long as it is here. `docs/kv-namespaces.md` has the formats and the argument for crashes.

use std::collections::{BTreeMap, VecDeque};

use crate::Version;
use crate::entry::STREAM_KEY_BYTES;

/// A mark lies at least this far behind the one before, in bytes of the segment …
const MARK_BYTES: u32 = 16 << 10;
/// … and in entries of the stream.
const MARK_ENTRIES: u64 = 64;
/// Positions lie below: no stream grows so far, and a position after any of them is a number.
const POSITIONS: u64 = 1 << 63;
/// Bytes of the value of a stream's head.
pub(crate) const HEAD_BYTES: usize = 16;

/// A place in a run from which a reader can walk on.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// Positions since the run's first.
    ahead: u32,
    offset: u32,
}

/// Positions of a stream in one segment.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub segment: u32,
    pub first: u64,
    /// Behind its last position.
    pub next: u64,
    /// Where its first entry begins.
    start: u32,
    /// Bytes of its entries' slots.
    pub bytes: u64,
    /// Entries may join it at its end.
    open: bool,
    marks: Vec<Mark>,
}

impl Run {
    pub fn new(segment: u32, position: u64, offset: u32, slot_bytes: u32) -> Self {
        let bytes = u64::from(slot_bytes);
        let (first, next) = (position, position + 1);
        Self { segment, first, next, start: offset, bytes, open: true, marks: Vec::new() }
    }

    /// Takes in the entry at `offset` of `segment`, which is behind its others; false where it is none of
    /// this run.
    fn join(&mut self, segment: u32, position: u64, offset: u32, slot_bytes: u32) -> bool {
        let ahead = u32::try_from(position.wrapping_sub(self.first));
        let (true, Ok(ahead)) =
            (self.open && (self.segment, self.next) == (segment, position), ahead)
        else {
            return false;
        };
        let last = self.marks.last().copied().unwrap_or(Mark { ahead: 0, offset: self.start });
        let far = offset - last.offset >= MARK_BYTES;
        if far && u64::from(ahead - last.ahead) >= MARK_ENTRIES {
            self.marks.push(Mark { ahead, offset });
        }
        self.next += 1;
        self.bytes += u64::from(slot_bytes);
        true
    }

    /// Nothing joins it any more.
    pub fn close(&mut self) {
        self.open = false;
    }

    /// A position up to `position`, and where its entry begins.
    pub fn mark_before(&self, position: u64) -> (u64, u32) {
        let after =
            self.marks.partition_point(|mark| self.first + u64::from(mark.ahead) <= position);
        match after.checked_sub(1).and_then(|at| self.marks.get(at)) {
            Some(mark) => (self.first + u64::from(mark.ahead), mark.offset),
            None => (self.first, self.start),
        }
    }

    /// The entry of this position, or a later one, moved away.
    fn leave(&mut self, position: u64, slot_bytes: u64) {
        self.next = self.next.min(position);
        self.bytes -= slot_bytes;
        self.marks.retain(|mark| self.first + u64::from(mark.ahead) < self.next);
    }

    /// About what it takes; a vector that grows has room to spare.
    fn memory_bytes(&self) -> u64 {
        (size_of::<Self>() + self.marks.len() * size_of::<Mark>() * 3 / 2) as u64
    }
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub generation: u64,
    /// Least position that is there.
    pub first: u64,
    /// Position of the next entry.
    pub next: u64,
    /// Bytes of the runs.
    pub bytes: u64,
    /// Version of the last change.
    pub changed: Version,
    /// In order of position.
    runs: VecDeque<Run>,
}

impl Stream {
    pub fn new(generation: u64, first: u64, changed: Version) -> Self {
        Self { generation, first, next: first, bytes: 0, changed, runs: VecDeque::new() }
    }

    /// Adds the entry of the next position; true when a run begins with it.
    fn push(&mut self, segment: u32, offset: u32, slot_bytes: u32) -> bool {
        let position = self.next;
        self.next += 1;
        self.place(segment, position, offset, slot_bytes)
    }

    fn place(&mut self, segment: u32, position: u64, offset: u32, slot_bytes: u32) -> bool {
        self.bytes += u64::from(slot_bytes);
        let last = self.runs.back_mut();
        if last.is_some_and(|run| run.join(segment, position, offset, slot_bytes)) {
            return false;
        }
        self.runs.push_back(Run::new(segment, position, offset, slot_bytes));
        true
    }

    /// An entry in `segment` moved away; true when it was the last of its run.
    fn leave(&mut self, segment: u32, position: u64, slot_bytes: u32) -> bool {
        let mut runs = self.runs.iter_mut().enumerate().rev();
        let Some((at, run)) = runs.find(|(_, run)| run.segment == segment && run.first <= position)
        else {
            return false;
        };
        self.bytes -= u64::from(slot_bytes);
        run.leave(position, u64::from(slot_bytes));
        let empty = run.bytes == 0;
        if empty {
            self.runs.remove(at);
        }
        empty
    }

    /// The runs that end at `first` or before; they are no longer here.
    fn cut(&mut self, first: u64) -> Vec<Run> {
        self.first = self.first.max(first);
        self.next = self.next.max(self.first);
        let ended = self.runs.partition_point(|run| run.next <= self.first);
        let cut: Vec<Run> = self.runs.drain(..ended).collect();
        self.bytes -= cut.iter().map(|run| run.bytes).sum::<u64>();
        cut
    }

    /// Runs found on media, in any order.
    fn attach(&mut self, found: Vec<Run>) {
        self.bytes += found.iter().map(|run| run.bytes).sum::<u64>();
        self.runs.extend(found);
        self.runs.make_contiguous().sort_by_key(|run| run.first);
        self.runs.iter_mut().for_each(Run::close);
        self.next = self.runs.back().map_or(self.next, |run| self.next.max(run.next));
    }

    /// Where the stream would begin if it kept its last `keep_bytes` once `more` are added: runs are
    /// kept or given up whole, and the last one stays.
    pub fn cut_to_keep(&self, keep_bytes: u64, more: u64) -> u64 {
        let (mut first, mut kept) = (self.first, self.bytes + more);
        for run in self.runs.iter().take(self.runs.len().saturating_sub(1)) {
            if kept - run.bytes < keep_bytes {
                break;
            }
            kept -= run.bytes;
            first = first.max(run.next);
        }
        first
    }

    /// The run of the least position from `position` on.
    pub fn run_from(&self, position: u64) -> Option<&Run> {
        self.runs.get(self.runs.partition_point(|run| run.next <= position))
    }

    /// Runs in order of position.
    pub fn runs(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter()
    }

    fn memory_bytes(&self) -> u64 {
        self.runs.iter().map(Run::memory_bytes).sum()
    }
}

/// Runs by what the keys of their entries begin with: the stream's key and its generation.
pub(crate) type Found = BTreeMap<Box<[u8]>, Vec<Run>>;

/// The stream's part of the key of an entry, and its position; `None` where no stream has one like it.
pub(crate) fn split_entry_key(key: &[u8]) -> Option<(&[u8], u64)> {
    let (stream, position) = key.split_last_chunk::<8>()?;
    let position = u64::from_be_bytes(*position);
    (position < POSITIONS).then_some((stream, position))
}

/// Adds an entry met on media to the runs found so far; true when a run begins with it.
pub(crate) fn find_entry(
    found: &mut Found,
    key: &[u8],
    (segment, offset, slot_bytes): (u32, u32, u32),
) -> bool {
    let Some((stream, position)) = split_entry_key(key) else { return false };
    if let Some(runs) = found.get_mut(stream) {
        if let Some(last) = runs.last_mut()
            && last.join(segment, position, offset, slot_bytes)
        {
            return false;
        }
        runs.push(Run::new(segment, position, offset, slot_bytes));
    } else {
        let run = Run::new(segment, position, offset, slot_bytes);
        found.insert(stream.into(), vec![run]);
    }
    true
}

/// The streams of a namespace in one shard, by key without generation and position.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    named: BTreeMap<Box<[u8]>, Stream>,
    /// Found on media; the heads say what of it is worth something.
    pub unsettled: Found,
    memory_bytes: u64,
}

impl Streams {
    pub fn get(&self, key: &[u8]) -> Option<&Stream> {
        self.named.get(key)
    }

    /// Every stream, in order of key.
    pub fn all(&self) -> impl Iterator<Item = (&[u8], &Stream)> {
        self.named.iter().map(|(key, stream)| (key.as_ref(), stream))
    }

    /// Bytes of all runs.
    pub fn bytes(&self) -> u64 {
        let unsettled = self.unsettled.values().flatten();
        self.named.values().map(|stream| stream.bytes).sum::<u64>()
            + unsettled.map(|run| run.bytes).sum::<u64>()
    }

    /// About what all of it takes in memory.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// A stream that begins; the runs of one that stood under its key.
    pub fn begin(&mut self, key: &[u8], stream: Stream) -> Vec<Run> {
        let before = self.remove(key);
        self.memory_bytes += Self::each(key);
        self.named.insert(key.into(), stream);
        before
    }

    fn each(key: &[u8]) -> u64 {
        (size_of::<Stream>() + 2 * size_of::<Box<[u8]>>() + key.len()) as u64
    }

    /// Forgets a stream; its runs.
    pub fn remove(&mut self, key: &[u8]) -> Vec<Run> {
        let Some(stream) = self.named.remove(key) else { return Vec::new() };
        self.memory_bytes -= Self::each(key);
        let runs: Vec<Run> = stream.runs.into();
        self.forget(&runs);
        runs
    }

    fn forget(&mut self, runs: &[Run]) {
        let bytes: u64 = runs.iter().map(Run::memory_bytes).sum();
        self.memory_bytes = self.memory_bytes.saturating_sub(bytes);
    }

    /// Cuts a stream off in front; the runs that go.
    pub fn cut(&mut self, key: &[u8], first: u64, version: Version) -> Vec<Run> {
        let Some(stream) = self.named.get_mut(key) else { return Vec::new() };
        stream.changed = stream.changed.max(version);
        let runs = stream.cut(first);
        self.forget(&runs);
        runs
    }

    /// The entry of a stream's next position; true when a run begins with it.
    pub fn push(
        &mut self,
        key: &[u8],
        (segment, offset, slot_bytes): (u32, u32, u32),
        version: Version,
    ) -> bool {
        let Some(stream) = self.named.get_mut(key) else { return false };
        let before = stream.runs.back().map_or(0, Run::memory_bytes);
        let began = stream.push(segment, offset, slot_bytes);
        stream.changed = stream.changed.max(version);
        let after = stream.runs.back().map_or(0, Run::memory_bytes);
        self.memory_bytes += if began { after } else { after - before };
        began
    }

    /// An entry moved from one segment to another; whether a run begins there, and whether one ended
    /// here. `None`: it is none of the stream's any more.
    pub fn moved(
        &mut self,
        (key, generation): (&[u8], u64),
        position: u64,
        from: u32,
        (segment, offset, slot_bytes): (u32, u32, u32),
    ) -> Option<(bool, bool)> {
        let stream = self.named.get_mut(key)?;
        let here = |run: &Run| run.segment == from && run.first <= position;
        if stream.generation != generation || !stream.runs.iter().any(here) {
            // The same batch cut it off, or deleted its stream.
            return None;
        }
        let before = stream.memory_bytes();
        let began = stream.place(segment, position, offset, slot_bytes);
        let ended = stream.leave(from, position, slot_bytes);
        self.memory_bytes = self.memory_bytes.saturating_sub(before) + stream.memory_bytes();
        Some((began, ended))
    }

    /// Runs found on media for a stream that is there.
    pub fn attach(&mut self, key: &[u8], runs: Vec<Run>) {
        let Some(stream) = self.named.get_mut(key) else { return };
        self.memory_bytes += runs.iter().map(Run::memory_bytes).sum::<u64>();
        stream.attach(runs);
    }

    /// Takes all of it away: the runs, settled or not.
    pub fn take(&mut self) -> Vec<Run> {
        let taken = std::mem::take(self);
        let named = taken.named.into_values().flat_map(|stream| stream.runs);
        named.chain(taken.unsettled.into_values().flatten()).collect()
    }
}

/// Splits what a stream's entries' keys begin with into the stream's key and its generation.
pub(crate) fn split_stream(stream: &[u8]) -> Option<(&[u8], u64)> {
    let (key, generation) = stream.split_last_chunk::<8>()?;
    Some((key, u64::from_be_bytes(*generation)))
}

/// The key of a stream's entry.
pub(crate) fn entry_key(stream: &[u8], generation: u64, position: u64) -> Vec<u8> {
    let mut key = Vec::with_capacity(stream.len() + STREAM_KEY_BYTES);
    key.extend_from_slice(stream);
    key.extend_from_slice(&generation.to_be_bytes());
    key.extend_from_slice(&position.to_be_bytes());
    key
}

/// The value of a stream's head.
pub(crate) fn head(generation: u64, first: u64) -> [u8; HEAD_BYTES] {
    let mut value = [0; HEAD_BYTES];
    value[..8].copy_from_slice(&generation.to_le_bytes());
    value[8..].copy_from_slice(&first.to_le_bytes());
    value
}

/// Generation and first position in a head; `None` where no stream has one like it.
pub(crate) fn decode_head(value: &[u8]) -> Option<(u64, u64)> {
    let (generation, first) = value.split_first_chunk::<8>()?;
    let first = first.try_into().ok().map(u64::from_le_bytes).filter(|first| *first < POSITIONS)?;
    Some((u64::from_le_bytes(*generation), first))
}
