//! Looking at entries where they lie: headers, keys, and whole entries that a client can write.
//!
//! Invariant: what a client can write is copied before it is looked at, and never more of it than
//! its slot holds.

use crate::entry::{self, HEADER_BYTES, Header};
use crate::field::FieldName;
use crate::index::{Location, Slot};
use crate::same::same;
use crate::segments::SegmentState;

/// The header at `offset`, copied.
#[inline]
pub(crate) fn read_header(state: &SegmentState, offset: u32) -> Header {
    let mut bytes = [0; HEADER_BYTES as usize];
    state.segment.read(offset as usize, &mut bytes);
    Header::decode(&bytes)
}

/// True when the entry of `slot` is one of `key`.
#[inline]
pub(super) fn holds_key(state: &SegmentState, slot: &Slot, key: &[u8]) -> bool {
    let needed = HEADER_BYTES as usize + key.len();
    if slot.slot_bytes() < needed as u64 {
        return false;
    }
    let offset = slot.location.offset();
    if !slot.location.has(Location::UNTRUSTED) {
        let bytes = state.bytes(offset, needed);
        return bytes[24..26] == (key.len() as u16).to_le_bytes() && same(&bytes[48..], key);
    }
    // Header and key in one copy, where the key is of usual length.
    let mut copy = [0; 96];
    if let Some(copy) = copy.get_mut(..needed) {
        state.segment.read(offset as usize, copy);
        return copy[24..26] == (key.len() as u16).to_le_bytes() && copy[48..] == *key;
    }
    holds_long_key(state, offset, key)
}

/// True when the entry of `slot` is one of `field`, whatever its position.
#[inline]
pub(super) fn holds_field(state: &SegmentState, slot: &Slot, field: &FieldName<'_>) -> bool {
    let length = field.stored_bytes();
    let needed = HEADER_BYTES as usize + length;
    if slot.slot_bytes() < needed as u64 {
        return false;
    }
    if !slot.location.is_trusted() {
        return holds_field_of_client(state, slot, field);
    }
    let bytes = state.bytes(slot.location.offset(), needed);
    bytes[24..26] == (length as u16).to_le_bytes() && field.is(&bytes[HEADER_BYTES as usize..])
}

#[cold]
fn holds_field_of_client(state: &SegmentState, slot: &Slot, field: &FieldName<'_>) -> bool {
    let mut key = Vec::new();
    read_key(state, slot, &mut key);
    field.is(&key)
}

fn holds_long_key(state: &SegmentState, offset: u32, key: &[u8]) -> bool {
    if usize::from(read_header(state, offset).key_length) != key.len() {
        return false;
    }
    let mut at = offset as usize + HEADER_BYTES as usize;
    let mut buffer = [0; 256];
    key.chunks(buffer.len()).all(|part| {
        let copy = &mut buffer[..part.len()];
        state.segment.read(at, copy);
        at += part.len();
        copy == part
    })
}

/// Copies the key of `slot` into `key`; never more than the slot holds.
pub(crate) fn read_key(state: &SegmentState, slot: &Slot, key: &mut Vec<u8>) -> Header {
    let header = read_header(state, slot.location.offset());
    let room = slot.slot_bytes() as usize - HEADER_BYTES as usize;
    key.clear();
    key.resize(usize::from(header.key_length).min(room), 0);
    state.segment.read((slot.location.offset() + HEADER_BYTES) as usize, key);
    header
}

/// Copies the whole entry into `out` and checks copy, checksum and seal; `None` when it is not an
/// entry the store sealed at this place.
pub(crate) fn copy_verified(
    sealer: &entry::Sealer,
    state: &SegmentState,
    offset: u32,
    slot_bytes: u32,
    out: &mut Vec<u8>,
) -> Option<Header> {
    let mut head = [0; HEADER_BYTES as usize];
    state.segment.read(offset as usize, &mut head);
    let header = Header::decode(&head);
    if header.slot_bytes != slot_bytes
        || !header.is_plausible(u64::from(slot_bytes))
        || sealer.seal(state.id, state.generation, offset, &header) != header.seal
    {
        return None;
    }
    out.clear();
    out.resize(header.used_bytes() as usize, 0);
    state.segment.read(offset as usize, out);
    out[..HEADER_BYTES as usize].copy_from_slice(&head);
    let (key, value) = out[HEADER_BYTES as usize..].split_at(usize::from(header.key_length));
    (entry::checksum(&head, key, &[value]) == header.checksum).then_some(header)
}
