//! Walks the entries of one segment: for recovery, collection, snapshots and checks.
//!
//! ```text
//! [entry ok][entry ok] … count … [entry ok] [anything that does not verify]
//!  persisted, must verify         beyond count: valid as long as seals verify, then torn
//! ```
//!
//! Source: BOOM-KV §3.6.

use crate::entry::{self, ALIGNMENT, BATCH_MORE, FIRST_ENTRY, HEADER_BYTES, Header, Sealer};
use crate::segments::{SETTLED, SegmentState, UNTRUSTED, word};

/// A valid entry found by a walk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub header: Header,
    pub offset: u32,
    /// In a client's segment of a pool that was closed in good order: the seal proves that an entry of this version and length was accepted
    /// here, and its bytes are no longer those that were. The rest of the header may be wrong.
    pub spoilt: bool,
}

/// What a walk saw besides valid entries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Walked {
    /// Valid entries.
    pub entries: u32,
    /// Entries that `count` promises and that do not verify.
    pub missing: u32,
    /// Where the first of them begin.
    pub holes: Vec<u32>,
    /// Entries of a client that are no longer what was accepted.
    pub spoilt: u32,
    /// Valid entries dropped because their batch has no end.
    pub cut_batch: u32,
    /// First byte after the last accepted entry.
    pub end: u32,
    /// Last non-zero byte after `end`, plus one; 0 when all is zero, and where former lives left
    /// their bytes behind.
    pub dirty_end: u32,
    /// What follows the last entry looks like one of this life that did not reach media as a whole.
    pub cut_entry: bool,
    /// Newest version among the entries.
    pub newest: u64,
}

impl Walked {
    /// True when a crash cut something short.
    pub fn is_torn(&self) -> bool {
        self.dirty_end != 0 || self.cut_batch != 0 || self.cut_entry
    }
}

/// The bytes of a segment to walk over: in place where no client can write, else a copy.
pub(crate) fn bytes_of<'a>(state: &'a SegmentState, copy: &'a mut Vec<u8>) -> &'a [u8] {
    state.segment.read_ahead(0, state.length as usize);
    if !state.is(UNTRUSTED) {
        return state.bytes(0, state.length as usize);
    }
    copy.clear();
    copy.resize(state.length as usize, 0);
    state.segment.read(0, copy);
    copy
}

/// Places of damage that are remembered of a segment.
const HOLES: usize = 16;

/// The header at `offset`, where its seal verifies: version, checksum and length are what the store
/// gave out; the rest, and the entry's bytes, may be anything that fits.
#[inline]
pub(crate) fn sealed_at(
    sealer: &Sealer,
    state: &SegmentState,
    bytes: &[u8],
    offset: usize,
) -> Option<Header> {
    let head = bytes.get(offset..)?.first_chunk::<{ HEADER_BYTES as usize }>()?;
    let header = Header::decode(head);
    let sealed = header.slot_bytes >= HEADER_BYTES
        && header.is_plausible((bytes.len() - offset) as u64)
        && sealer.seal(state.id, state.generation, offset as u32, &header) == header.seal;
    sealed.then_some(header)
}

/// The valid entry at `offset`, if there is one.
#[inline]
pub(crate) fn entry_at(
    sealer: &Sealer,
    id: u32,
    generation: u64,
    bytes: &[u8],
    offset: usize,
) -> Option<Header> {
    let raw = bytes.get(offset..offset + HEADER_BYTES as usize)?;
    let mut head = [0; HEADER_BYTES as usize];
    head.copy_from_slice(raw);
    let header = Header::decode(&head);
    if header.slot_bytes < HEADER_BYTES
        || !header.is_plausible((bytes.len() - offset) as u64)
        || sealer.seal(id, generation, offset as u32, &header) != header.seal
    {
        return None;
    }
    let rest = &bytes[offset + HEADER_BYTES as usize..offset + header.used_bytes() as usize];
    (entry::checksum(&head, rest, &[]) == header.checksum).then_some(header)
}

/// The entry at `offset` that counts, if there is one. A client can write its segments at any time, and
/// give an entry that was accepted another header under the same seal: one that it could not have
/// announced is none, so that it reaches neither streams nor what services and the store keep.
#[inline]
fn counting_at(
    sealer: &Sealer,
    state: &SegmentState,
    bytes: &[u8],
    offset: usize,
) -> Option<Header> {
    entry_at(sealer, state.id, state.generation, bytes, offset)
        .filter(|header| !state.is(UNTRUSTED) || header.is_for_clients())
}

/// Calls `visit` for every accepted entry, in order of offset.
pub(crate) fn walk(
    sealer: &Sealer,
    state: &SegmentState,
    bytes: &[u8],
    mut visit: impl FnMut(Found),
) -> Walked {
    let promised = state.promised();
    let mut walked = Walked { end: FIRST_ENTRY, ..Walked::default() };
    let mut batch: Vec<Found> = Vec::new();
    let mut at = FIRST_ENTRY as usize;
    let mut seen = 0_u32;
    loop {
        if let Some(header) = counting_at(sealer, state, bytes, at) {
            seen += 1;
            batch.push(Found { header, offset: at as u32, spoilt: false });
            at += header.slot_bytes as usize;
            if header.flags & BATCH_MORE == 0 {
                for found in batch.drain(..) {
                    walked.newest = walked.newest.max(found.header.version);
                    walked.entries += 1;
                    visit(found);
                }
                walked.end = at as u32;
            }
            continue;
        }
        // After a crash it may be one that was on its way, and older ones count.
        if state.is(UNTRUSTED)
            && state.is(SETTLED)
            && let Some(header) = sealed_at(sealer, state, bytes, at)
            && header.namespace < u32::from(crate::DATABASES)
        {
            seen += 1;
            walked.spoilt += 1;
            walked.entries += 1;
            walked.newest = walked.newest.max(header.version);
            visit(Found { header, offset: at as u32, spoilt: true });
            at += header.slot_bytes as usize;
            walked.end = at as u32;
            continue;
        }
        // In a client's log every sealed entry was accepted, and a hole beyond `count` is an
        // overwrite in place that was cut short. In the store's own logs nothing follows a hole
        // beyond `count` but entries of the group that was never acknowledged.
        if seen >= promised && !state.is(UNTRUSTED) {
            break;
        }
        // Damage, or an overwrite in place cut short: go on with the next entry that verifies.
        if seen < promised && walked.holes.len() < HOLES {
            walked.holes.push(at as u32);
        }
        let Some(next) = resume_after(sealer, state, bytes, at) else { break };
        // What was read of a batch before the damage was promised; the rest may follow.
        for found in batch.drain(..) {
            walked.newest = walked.newest.max(found.header.version);
            walked.entries += 1;
            visit(found);
        }
        walked.missing += 1;
        seen += 1;
        at = next;
        walked.end = at as u32;
    }
    walked.missing += promised.saturating_sub(seen);
    walked.cut_batch = batch.len() as u32;
    let rest = &bytes[walked.end as usize..];
    if state.began_zeroed() || state.is(UNTRUSTED) {
        let used = used_length(rest);
        walked.dirty_end = if used == 0 { 0 } else { walked.end + used as u32 };
    } else if batch.is_empty()
        && let Some(head) = rest.first_chunk::<{ HEADER_BYTES as usize }>()
    {
        // A guess, for the report: versions only grow, so a former life's are smaller.
        let former = state.segment.word(word::SINCE);
        let header = Header::decode(head);
        walked.cut_entry = header.version > walked.newest.max(former)
            && header.slot_bytes >= HEADER_BYTES
            && header.is_plausible(rest.len() as u64);
    }
    walked
}

/// Offsets beyond `end` of entries of this life that were not accepted: of the group that a crash
/// cut. They verify, so nothing may be appended that would connect to them.
pub(crate) fn left_behind(
    sealer: &Sealer,
    state: &SegmentState,
    bytes: &[u8],
    end: u32,
) -> Vec<u32> {
    (end as usize..bytes.len().saturating_sub(HEADER_BYTES as usize))
        .step_by(ALIGNMENT as usize)
        .filter(|at| entry_at(sealer, state.id, state.generation, bytes, *at).is_some())
        .map(|at| at as u32)
        .collect()
}

/// Length of `bytes` without the zeros at their end. Whole pages are compared at a time: the empty
/// rest of large segments is most of what the recovery of a small store reads.
fn used_length(bytes: &[u8]) -> usize {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut end = bytes.len();
    while end > 0 {
        let start = end.saturating_sub(ZEROS.len());
        let page = &bytes[start..end];
        if page != &ZEROS[..page.len()] {
            return page.iter().rposition(|byte| *byte != 0).map_or(start, |last| start + last + 1);
        }
        end = start;
    }
    0
}

/// Offset of the next valid entry after a bad one at `at`.
fn resume_after(sealer: &Sealer, state: &SegmentState, bytes: &[u8], at: usize) -> Option<usize> {
    let valid = |at: usize| counting_at(sealer, state, bytes, at).is_some();
    // The slot length survives an overwrite in place, and most damage elsewhere in the entry.
    let slot = bytes.get(at + 20..at + 24)?;
    let slot = u32::from_le_bytes([slot[0], slot[1], slot[2], slot[3]]) as usize;
    if slot >= HEADER_BYTES as usize
        && slot.is_multiple_of(ALIGNMENT as usize)
        && slot < bytes.len() - at
        && valid(at + slot)
    {
        return Some(at + slot);
    }
    (at + ALIGNMENT as usize..bytes.len().saturating_sub(HEADER_BYTES as usize))
        .step_by(ALIGNMENT as usize)
        .find(|at| valid(*at))
}

/// True when `copy`, taken after `header` was checked against its seal, is the entry it describes.
pub(crate) fn copy_is_valid(header: &Header, copy: &[u8]) -> bool {
    let Some((head, rest)) = copy.split_first_chunk::<{ HEADER_BYTES as usize }>() else {
        return false;
    };
    Header::decode(head) == *header && entry::checksum(head, rest, &[]) == header.checksum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_used_length_ends_at_the_last_byte_that_is_not_zero() {
        for length in [0, 1, 4095, 4096, 4097, 20_000] {
            let mut bytes = vec![0; length];
            assert_eq!(used_length(&bytes), 0);
            for last in [0, 1, 4095, 4096, 8191, 8192, 19_999] {
                if last < length {
                    bytes.fill(0);
                    bytes[last] = 1;
                    bytes[0] = 1;
                    assert_eq!(used_length(&bytes), last + 1, "{length} bytes");
                }
            }
        }
    }
}
