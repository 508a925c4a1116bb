//! Pieces of units that are longer than an entry of the log, until the last one makes them whole.
//!
//! ```text
//! system's entry  "piece:" the lane's key, index u32 (big-endian)  →  series u64 | bytes
//! ```
//!
//! They lie among the system's entries, so that they survive a crash with the turn of their lane and
//! travel in snapshots. A series that was given up stays until the next one of its lane takes its place.

use beeline_kv::{Keyspace, KvError};
use beeline_replicated_service::{LaneName, Unit, unit::Piece};

fn key_of(lane: LaneName, index: u32) -> Vec<u8> {
    [b"piece:", lane.key().as_slice(), &index.to_be_bytes()].concat()
}

/// Stores a piece in the open batch. The first one removes what the lane had left.
///
/// Errors: the store's.
pub(crate) fn keep(
    keyspace: &mut Keyspace<'_>,
    unit: &Unit<'_>,
    piece: Piece,
) -> Result<(), KvError> {
    if piece.index == 0 {
        remove(keyspace, unit.lane)?;
    }
    let stored = [&piece.series.to_le_bytes(), unit.bytes()].concat();
    keyspace.put_system(&key_of(unit.lane, piece.index), &stored)
}

/// The bytes of the pieces before the last one; `None` unless all of its series are there.
///
/// Errors: the store's.
pub(crate) fn before(
    keyspace: &mut Keyspace<'_>,
    lane: LaneName,
    last: Piece,
) -> Result<Option<Vec<u8>>, KvError> {
    let (mut all, mut found) = (Vec::new(), Vec::new());
    for index in 0..last.index {
        if !keyspace.system(&key_of(lane, index), &mut found)? {
            return Ok(None);
        }
        match found.split_first_chunk::<8>() {
            Some((series, bytes)) if u64::from_le_bytes(*series) == last.series => {
                all.extend_from_slice(bytes);
            }
            _ => return Ok(None),
        }
    }
    Ok(Some(all))
}

/// Removes every piece of a lane.
///
/// Errors: the store's.
pub(crate) fn remove(keyspace: &mut Keyspace<'_>, lane: LaneName) -> Result<(), KvError> {
    for index in 0.. {
        if !keyspace.delete_system(&key_of(lane, index))? {
            break;
        }
    }
    Ok(())
}
