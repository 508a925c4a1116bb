//! What the offline check sees of streams: which there are, and whether a position is missing.

use std::collections::BTreeMap;

use crate::catalog::{self, Known};
use crate::check_rows::Rows;
use crate::entry::{HEADER_BYTES, Sealer};
use crate::row_ends::is_about_rows;
use crate::segments::SegmentState;
use crate::space::{IN_ROWS, row_of};
use crate::streams::{Found as Runs, decode_head, entry_key, find_entry};
use crate::walk::{self, Found};
use crate::{SYSTEM_NAMESPACE, Version};

/// A stream as it lies on media.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamSeen {
    /// Number of its namespace.
    pub namespace: u32,
    /// Its row; empty in a namespace that has one stream.
    pub row: Vec<u8>,
    /// Least position that is there.
    pub first: u64,
    /// Position of the next entry.
    pub next: u64,
    /// Bytes of its entries.
    pub bytes: u64,
    /// Positions between the first and the next one that are not there.
    pub missing: u64,
}

/// Newest version of a key, and what it holds.
pub(crate) type Newest<T> = (Version, Option<T>);
/// Newest heads, generation and first position, by namespace and key.
type Heads = BTreeMap<(u32, Vec<u8>), Newest<(u64, u64)>>;

/// What a walk over all segments found.
pub(crate) struct Gathered {
    /// What has a smaller version was replaced by a snapshot.
    barrier: Version,
    runs: BTreeMap<u32, Runs>,
    catalog: BTreeMap<Vec<u8>, Newest<(u32, Known)>>,
    heads: Heads,
    pub rows: Rows,
}

/// Keeps what has the largest version.
pub(crate) fn newest<K: Ord, T>(
    all: &mut BTreeMap<K, Newest<T>>,
    key: K,
    version: Version,
    value: Option<T>,
) {
    let known = all.entry(key).or_insert((0, None));
    if version >= known.0 {
        *known = (version, value);
    }
}

/// Key and value of an entry.
pub(crate) fn parts<'b>(found: &Found, bytes: &'b [u8]) -> (&'b [u8], &'b [u8]) {
    let start = (found.offset + HEADER_BYTES) as usize;
    let end = (u64::from(found.offset) + found.header.used_bytes()) as usize;
    bytes[start..end].split_at(usize::from(found.header.key_length))
}

impl Gathered {
    pub fn new(barrier: Version) -> Self {
        let (runs, catalog, heads, rows) = Default::default();
        Self { barrier, runs, catalog, heads, rows }
    }

    /// Takes in an entry of a stream, of the catalog, or about a service's row.
    pub fn take(&mut self, segment: u32, found: &Found, bytes: &[u8]) {
        let header = &found.header;
        if header.version < self.barrier {
            return;
        }
        let (key, value) = parts(found, bytes);
        if header.is_appended() {
            let runs = self.runs.entry(header.namespace).or_default();
            find_entry(runs, key, (segment, found.offset, header.slot_bytes));
        } else if header.namespace == SYSTEM_NAMESPACE {
            let known = catalog::decode(key, value).ok().flatten();
            newest(&mut self.catalog, key.to_vec(), header.version, known);
        } else if is_about_rows(header.namespace) {
            self.rows.take(found, bytes);
        }
    }

    /// The version at which a namespace, as entries name it, was created or cleared; `None`: it is not there.
    pub fn since(&self, tagged: u32) -> Option<Version> {
        let known = self.catalog.values().filter_map(|newest| newest.1);
        let mut here = known.filter(|(_, known)| known.tagged == tagged);
        here.next().map(|(_, known)| known.since.max(self.barrier))
    }

    /// Looks for the heads of streams, where there are any entries of streams or namespaces of them.
    pub fn find_heads(&mut self, sealer: &Sealer, states: &[SegmentState]) {
        let known = self.catalog.values().filter_map(|newest| newest.1);
        let wanted: BTreeMap<u32, Version> = known
            .filter(|(_, known)| known.options.stream)
            .map(|(_, known)| (known.tagged, known.since.max(self.barrier)))
            .collect();
        if wanted.is_empty() {
            return;
        }
        let mut copy = Vec::new();
        for state in states {
            let bytes = walk::bytes_of(state, &mut copy);
            walk::walk(sealer, state, bytes, |found| {
                let header = &found.header;
                let since = wanted.get(&header.namespace);
                if header.is_appended() || since.is_none_or(|since| header.version < *since) {
                    return;
                }
                let (key, value) = parts(&found, bytes);
                let head = if header.is_tombstone() { None } else { decode_head(value) };
                newest(&mut self.heads, (header.namespace, key.to_vec()), header.version, head);
            });
        }
    }

    /// The streams there are.
    pub fn streams(&self) -> Vec<StreamSeen> {
        let mut seen = Vec::new();
        for ((tagged, key), (_, head)) in &self.heads {
            let Some((generation, first)) = *head else { continue };
            let entry = entry_key(key, generation, 0);
            let found = self.runs.get(tagged).and_then(|runs| runs.get(&entry[..entry.len() - 8]));
            let mut runs: Vec<_> = found.into_iter().flatten().collect();
            runs.retain(|run| run.next > first);
            runs.sort_by_key(|run| run.first);
            let (mut next, mut missing, mut bytes) = (first, 0, 0);
            for run in runs {
                missing += run.first.saturating_sub(next);
                next = next.max(run.next);
                bytes += run.bytes;
            }
            let (namespace, row) = (tagged & !IN_ROWS, row_of(key).to_vec());
            seen.push(StreamSeen { namespace, row, first, next, bytes, missing });
        }
        seen.sort_by(|one, other| (one.namespace, &one.row).cmp(&(other.namespace, &other.row)));
        seen
    }
}
