//! A put or a deletion of a one-sided client, as a request of a `beeline_replicated_service::unit`.
//!
//! ```text
//!  0  kind u8 = 3 ([`beeline_resp::logged`] has 1 and 2) | database u8 | encoding u8 | deletes u8
//!  4  key length u32
//!  8  expires at u64      Unix milliseconds; 0: never
//! 16  key, then value
//! reply  1: done; 2: there was no such key; 3: longer than the store takes; 4: damaged
//!        | position u64   of the entry in the log: the version
//! ```

use beeline_kv::{DATABASES, Keyspace, KvError, PutOptions};
use beeline_kv_server::{AgreedWrite, Wrote};

const KIND: u8 = 3;
/// Bytes before the key.
pub(crate) const HEAD_BYTES: usize = 16;
/// The only replies there are.
const DONE: u8 = 1;
const MISSING: u8 = 2;
const TOO_LONG: u8 = 3;
const DAMAGED: u8 = 4;

/// Appends the request.
pub(crate) fn put(write: &AgreedWrite<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(&[KIND, write.database, write.options.kind]);
    out.push(u8::from(write.value.is_none()));
    // The server's slots are shorter than 4 GiB.
    out.extend_from_slice(&(write.key.len() as u32).to_le_bytes());
    out.extend_from_slice(&write.options.expires_at_ms.to_le_bytes());
    out.extend_from_slice(write.key);
    out.extend_from_slice(write.value.unwrap_or_default());
}

/// Reads a request; `None`: it is of another kind, or damaged.
pub(crate) fn decode(bytes: &[u8]) -> Option<AgreedWrite<'_>> {
    let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>()?;
    let [KIND, database, kind, deletes @ 0..=1, ..] = *head else { return None };
    if u16::from(database) >= DATABASES {
        return None;
    }
    let length = u32::from_le_bytes(*head[4..].first_chunk()?) as usize;
    let expires_at_ms = u64::from_le_bytes(*head[8..].first_chunk()?);
    let (key, value) = rest.split_at_checked(length)?;
    let value = (deletes == 0).then_some(value);
    Some(AgreedWrite { database, key, value, options: PutOptions { kind, expires_at_ms } })
}

/// Whether a request is of this kind, if it is whole.
pub(crate) fn is_pair(bytes: &[u8]) -> bool {
    bytes.first() == Some(&KIND)
}

/// Runs a request of the entry at `position` and appends its reply.
///
/// Errors: the store's, where they say nothing of the request: this replica cannot go on.
pub(crate) fn apply(
    bytes: &[u8],
    position: u64,
    keyspace: &mut Keyspace<'_>,
    reply: &mut Vec<u8>,
) -> Result<(), KvError> {
    let outcome = match decode(bytes) {
        None => Ok(DAMAGED),
        Some(AgreedWrite { database, key, value: Some(value), options }) => {
            keyspace.put(database, key, &[value], options).map(|_| DONE)
        }
        Some(AgreedWrite { database, key, value: None, .. }) => {
            keyspace.delete(database, key).map(|existed| if existed { DONE } else { MISSING })
        }
    };
    let outcome = match outcome {
        // Decided by lengths alone, so alike at every member.
        Err(
            KvError::KeyTooLong { .. }
            | KvError::ValueTooLong { .. }
            | KvError::BatchTooLarge { .. },
        ) => TOO_LONG,
        outcome => outcome?,
    };
    reply.push(outcome);
    reply.extend_from_slice(&position.to_le_bytes());
    Ok(())
}

/// What a reply says.
pub(crate) enum Said {
    Done(Wrote),
    TooLong,
    Damaged,
}

pub(crate) fn said(reply: &[u8]) -> Said {
    let Some((&outcome, version)) = reply.split_first() else { return Said::Damaged };
    let version = version.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    match outcome {
        DONE | MISSING => Said::Done(Wrote { version, existed: outcome == DONE }),
        TOO_LONG => Said::TooLong,
        _ => Said::Damaged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_comes_back_and_no_part_of_one_is_taken_for_one() {
        for value in [Some(&b"value"[..]), Some(b""), None] {
            let options = PutOptions { kind: 7, expires_at_ms: 1 << 40 };
            let write = AgreedWrite { database: 15, key: b"the key", value, options };
            let mut bytes = Vec::new();
            put(&write, &mut bytes);
            assert!(is_pair(&bytes));
            assert_eq!(decode(&bytes), Some(write));
            for length in 0..HEAD_BYTES + 7 {
                assert_eq!(decode(&bytes[..length]), None);
            }
            bytes[1] = 16;
            assert_eq!(decode(&bytes), None, "a database that there is not");
        }
    }
}
