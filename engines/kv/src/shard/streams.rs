//! A shard's part in streams: entries appended, runs counted in their segments, read and cut off.

use std::ops::ControlFlow;

use crate::append::StreamEntry;
use crate::entry::{APPENDED, HEADER_BYTES, STREAM_KEY_BYTES, slot_bytes_for};
use crate::fault::{self, KnownBug};
use crate::feed::EventKind;
use crate::shard::batch::Move;
use crate::shard::log::{Appended, Chain, Draft};
use crate::shard::{Shard, read_header, read_key};
use crate::snapshot::Record;
use crate::space::IN_ROWS;
use crate::stats;
use crate::streams::{self, Found, Run, Stream, Streams, decode_head, entry_key, split_stream};
use crate::{KvError, Version};

/// The head of a stream, as it lies on media.
struct Head {
    key: Box<[u8]>,
    version: Version,
    generation: u64,
    first: u64,
}

impl Shard {
    /// The streams of a namespace whose keys this shard holds.
    pub(crate) fn streams(&self, namespace: u32) -> Option<&Streams> {
        self.look_at_all();
        self.spaces.extra(namespace)?.streams.as_deref()
    }

    fn streams_mut(&mut self, namespace: u32) -> Option<&mut Streams> {
        self.spaces.extra_mut(namespace)?.streams.as_deref_mut()
    }

    /// Stores the entry of one position, in this shard's log.
    pub(crate) fn append_entry(
        &mut self,
        namespace: u32,
        hash: u64,
        (stream, generation, position): (&[u8], u64, u64),
        value: &[&[u8]],
    ) -> Result<Appended, KvError> {
        let length: usize = value.iter().map(|part| part.len()).sum();
        let key = entry_key(stream, generation, position);
        if self.in_batch() {
            self.admit_to_batch(slot_bytes_for(key.len(), length))?;
        }
        let version = self.version_for_feed()?;
        let draft = Draft {
            version,
            hash,
            namespace,
            kind: 0,
            flags: APPENDED,
            expires_at_ms: 0,
            key: &key,
            value,
        };
        let appended = self.append(Chain::Data, &draft).inspect_err(|_| self.feed_refused())?;
        let value_length = length as u32;
        self.feed_note(version, namespace, stream, EventKind::Append { position, value_length });
        Ok(appended)
    }

    /// Takes an entry in at the end of its stream, which this shard holds.
    pub(crate) fn push_entry(&mut self, namespace: u32, stream: &[u8], appended: &Appended) {
        let place = (appended.location.segment(), appended.location.offset(), appended.slot_bytes);
        let streams = self.streams_mut(namespace);
        let began = streams.is_some_and(|streams| streams.push(stream, place, appended.version));
        self.count_entry(namespace, place.0, place.2, began);
        stats::add(&self.store.counters[self.index].stream_entries_appended, 1);
    }

    /// Adds an entry to the sums it takes part in.
    fn count_entry(&mut self, namespace: u32, segment: u32, slot_bytes: u32, began: bool) {
        self.count_bytes(namespace, segment, u64::from(slot_bytes));
        if began {
            self.cache.get(&self.store.table, segment).add_run();
        }
    }

    fn count_bytes(&mut self, namespace: u32, segment: u32, bytes: u64) {
        self.cache.get(&self.store.table, segment).add_live(bytes);
        let counters = &self.store.counters[self.index];
        stats::add(&counters.live_bytes, bytes);
        stats::add(&counters.stream_bytes, bytes);
        if let Some(account) = self.spaces.account(namespace) {
            account.add(self.index, bytes);
        }
    }

    /// Takes runs that no stream has any more out of the sums. `log`: the shard whose log says so; none where
    /// that is persisted.
    pub(crate) fn uncount_runs(&mut self, namespace: u32, runs: &[Run], log: Option<usize>) {
        for run in runs {
            let state = self.cache.get(&self.store.table, run.segment);
            if let Some(log) = log
                && !fault::is_on(KnownBug::ForgetTruncator)
            {
                // Before the bytes: a segment found dead is asked for the logs then.
                state.supersede(log as u32);
            }
            state.remove_run();
            let dead = state.remove_live(run.bytes);
            self.recycler.look |= dead && state.owner as usize == self.index;
            self.collector.garbage_made += run.bytes;
            let counters = &self.store.counters[self.index];
            stats::add(&counters.live_bytes, run.bytes.wrapping_neg());
            stats::add(&counters.stream_bytes, run.bytes.wrapping_neg());
            if let Some(account) = self.spaces.account(namespace) {
                account.add(self.index, run.bytes.wrapping_neg());
            }
        }
    }

    /// An entry of a batch moved to another segment.
    pub(crate) fn move_appended(&mut self, moved: &Move) {
        let (segment, offset) = (moved.to.segment(), moved.to.offset());
        let state = self.cache.get(&self.store.table, segment);
        let header = read_header(state, offset);
        let key = state.bytes(offset + HEADER_BYTES, usize::from(header.key_length)).to_vec();
        let Some((stream, position)) = key.split_last_chunk::<8>() else { return };
        let Some(name) = split_stream(stream) else { return };
        let (position, from) = (u64::from_be_bytes(*position), moved.from.segment());
        let place = (segment, offset, header.slot_bytes);
        let streams = self.streams_mut(moved.namespace);
        let Some((began, ended)) =
            streams.and_then(|streams| streams.moved(name, position, from, place))
        else {
            return;
        };
        let state = self.cache.get(&self.store.table, segment);
        state.add_live(u64::from(header.slot_bytes));
        if began {
            state.add_run();
        }
        let state = self.cache.get(&self.store.table, from);
        if ended {
            state.remove_run();
        }
        let dead = state.remove_live(u64::from(header.slot_bytes));
        self.recycler.look |= dead && state.owner as usize == self.index;
    }

    /// A stream begins under `key`, with its head in the index.
    pub(crate) fn begin_stream(&mut self, namespace: u32, key: &[u8], stream: Stream) {
        let Some(streams) = self.streams_mut(namespace) else { return };
        let before = streams.begin(key, stream);
        self.uncount_runs(namespace, &before, None);
        stats::add(&self.store.counters[self.index].streams, 1);
    }

    /// Cuts a stream off in front, by a head in the log of shard `log`.
    pub(crate) fn cut_stream(
        &mut self,
        namespace: u32,
        key: &[u8],
        first: u64,
        head: &Appended,
        log: usize,
    ) {
        let Some(streams) = self.streams_mut(namespace) else { return };
        let runs = streams.cut(key, first, head.version);
        self.uncount_runs(namespace, &runs, Some(log));
        let counters = &self.store.counters[self.index];
        stats::add(&counters.stream_truncations, 1);
    }

    /// Forgets a stream, whose head was deleted in the log of shard `log`.
    pub(crate) fn end_stream(&mut self, namespace: u32, key: &[u8], log: Option<usize>) {
        let Some(streams) = self.streams_mut(namespace) else { return };
        if streams.get(key).is_none() {
            return;
        }
        let runs = streams.remove(key);
        self.uncount_runs(namespace, &runs, log);
        stats::add(&self.store.counters[self.index].streams, 1_u64.wrapping_neg());
    }

    /// Forgets all streams of a namespace: what ended them is persisted.
    pub(crate) fn forget_streams(&mut self, namespace: u32) {
        let Some(streams) = self.streams_mut(namespace) else { return };
        let count = streams.all().count() as u64;
        let runs = streams.take();
        self.uncount_runs(namespace, &runs, None);
        stats::add(&self.store.counters[self.index].streams, count.wrapping_neg());
    }

    /// Calls `visit` with the entries of a stream from `from` on, in order of position, until it breaks.
    /// Where one was lost to damage, the next one follows.
    pub(crate) fn visit_stream(
        &mut self,
        namespace: u32,
        key: &[u8],
        mut from: u64,
        mut visit: impl FnMut(StreamEntry<'_>) -> ControlFlow<()>,
    ) {
        let extra = self.spaces.extra(namespace);
        let streams = extra.and_then(|extra| extra.streams.as_deref());
        let Some(stream) = streams.and_then(|streams| streams.get(key)) else { return };
        let wanted = entry_key(key, stream.generation, 0);
        let prefix = &wanted[..wanted.len() - 8];
        while let Some(run) = stream.run_from(from) {
            from = from.max(run.first);
            let state = self.cache.get(&self.store.table, run.segment);
            let (mut position, mut offset) = run.mark_before(from);
            while position < run.next {
                let header = read_header(state, offset);
                let length = usize::from(header.key_length);
                let ours = header.is_appended()
                    && header.namespace == namespace
                    && length == wanted.len()
                    && state.bytes(offset + HEADER_BYTES, prefix.len()) == prefix;
                if ours {
                    if position >= from {
                        let at = offset + HEADER_BYTES + u32::from(header.key_length);
                        let value = state.bytes(at, header.value_length as usize);
                        let entry = StreamEntry { position, version: header.version, value };
                        if visit(entry).is_break() {
                            return;
                        }
                    }
                    position += 1;
                }
                offset += header.slot_bytes;
            }
            from = run.next;
        }
    }

    /// Runs found on media; what they are worth, the heads say: [`Shard::settle_streams`].
    pub(crate) fn hold_runs(&mut self, namespace: u32, key: Box<[u8]>, runs: Vec<Run>) {
        for run in &runs {
            self.count_bytes(namespace, run.segment, run.bytes);
            self.cache.get(&self.store.table, run.segment).add_run();
        }
        let streams = self.spaces.open(namespace).streams.get_or_insert_default();
        streams.unsettled.entry(key).or_default().extend(runs);
    }

    /// Makes the streams of a namespace what its heads say they are.
    pub(crate) fn settle_streams(&mut self, namespace: u32) {
        if self.streams(namespace).is_none() {
            return;
        }
        let known = self.store.catalog.get(namespace & !IN_ROWS);
        if known.is_none_or(|known| !known.options.stream) {
            self.forget_streams(namespace);
            return;
        }
        let heads = self.heads_of(namespace);
        let mut known: Vec<Box<[u8]>> = Vec::with_capacity(heads.len());
        for Head { key, version, generation, first } in heads {
            let here = self.streams(namespace).and_then(|streams| streams.get(&key));
            if here.is_none_or(|stream| stream.generation != generation) {
                self.end_stream(namespace, &key, None);
                self.begin_stream(namespace, &key, Stream::new(generation, first, version));
            }
            let stream = entry_key(&key, generation, 0);
            let Some(streams) = self.streams_mut(namespace) else { return };
            if let Some(runs) = streams.unsettled.remove(&stream[..stream.len() - 8]) {
                streams.attach(&key, runs);
            }
            // The last change is the last entry, or the head.
            let (mut changed, next) = (version, streams.get(&key).map_or(0, |stream| stream.next));
            if let Some(last) = next.checked_sub(1) {
                self.visit_stream(namespace, &key, last, |entry| {
                    changed = changed.max(entry.version);
                    ControlFlow::Continue(())
                });
            }
            let Some(streams) = self.streams_mut(namespace) else { return };
            let cut = streams.cut(&key, first, changed);
            self.uncount_runs(namespace, &cut, None);
            known.push(key);
        }
        let Some(streams) = self.streams_mut(namespace) else { return };
        let left: Found = std::mem::take(&mut streams.unsettled);
        known.sort_unstable();
        let gone: Vec<Box<[u8]>> = streams
            .all()
            .filter(|(key, _)| known.binary_search_by(|known| known.as_ref().cmp(key)).is_err())
            .map(|(key, _)| key.into())
            .collect();
        left.values().for_each(|runs| self.uncount_runs(namespace, runs, None));
        gone.iter().for_each(|key| self.end_stream(namespace, key, None));
    }

    /// The head of every stream.
    fn heads_of(&mut self, namespace: u32) -> Vec<Head> {
        let Some(index) = self.spaces.get(namespace) else { return Vec::new() };
        let slots = index.live_slots();
        let (mut heads, mut key) = (Vec::with_capacity(slots.len()), Vec::new());
        for slot in slots {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let header = read_key(state, &slot, &mut key);
            let at = slot.location.offset() + HEADER_BYTES + u32::from(header.key_length);
            let value = state.bytes(at, header.value_length as usize);
            if let Some((generation, first)) = decode_head(value) {
                let (key, version) = (key.as_slice().into(), header.version);
                heads.push(Head { key, version, generation, first });
            }
        }
        heads
    }

    /// Stores an entry of a stream from a snapshot.
    pub(crate) fn restore_appended(&mut self, record: &Record, body: &[u8]) -> Result<(), KvError> {
        let (key, value) = body.split_at(usize::from(record.key_length));
        let stream = &key[..key.len().saturating_sub(STREAM_KEY_BYTES)];
        self.store.raise_format_for_streams()?;
        let draft = Draft {
            version: record.version,
            hash: self.store.place(record.namespace, stream),
            namespace: record.namespace,
            kind: 0,
            flags: APPENDED,
            expires_at_ms: 0,
            key,
            value: &[value],
        };
        let appended = self.append(Chain::Appends, &draft)?;
        let place = (appended.location.segment(), appended.location.offset(), appended.slot_bytes);
        let streams = self.spaces.open(record.namespace).streams.get_or_insert_default();
        let began = streams::find_entry(&mut streams.unsettled, key, place);
        self.count_entry(record.namespace, place.0, place.2, began);
        Ok(())
    }
}
