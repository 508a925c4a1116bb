//! Records on the control socket: little endian, fixed length per kind, read as hostile.
//!
//! ```text
//! hello   1  target qp u32, target nonce 16, sender qp u32, sender nonce 16   + object, doorbell
//! welcome 2  nonce of the active end 16
//! open    3  key u64, epoch u64
//! opened  4  key u64, epoch u64, object's length u64, offset in it u64, length u64, access u8,
//!            persistence u8, retired mark u8                                  + descriptor
//! refused 5  key u64, epoch u64
//! ```
//! Closing the socket says the rest.

use beeline_fabric::Access;
use beeline_os::Persistence;

use crate::connect_info::Nonce;

/// No record is longer.
pub(crate) const MAX_RECORD_BYTES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello {
        target_qp: u32,
        target_nonce: Nonce,
        sender_qp: u32,
        sender_nonce: Nonce,
    },
    Welcome {
        nonce: Nonce,
    },
    Open {
        key: u64,
        epoch: u64,
    },
    Opened {
        key: u64,
        epoch: u64,
        object_bytes: u64,
        offset: u64,
        length: u64,
        access: Access,
        persistence: Persistence,
        marked: bool,
    },
    Refused {
        key: u64,
        epoch: u64,
    },
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(MAX_RECORD_BYTES);
        match *self {
            Self::Hello { target_qp, target_nonce, sender_qp, sender_nonce } => {
                out.push(1);
                out.extend_from_slice(&target_qp.to_le_bytes());
                out.extend_from_slice(&target_nonce);
                out.extend_from_slice(&sender_qp.to_le_bytes());
                out.extend_from_slice(&sender_nonce);
            }
            Self::Welcome { nonce } => {
                out.push(2);
                out.extend_from_slice(&nonce);
            }
            Self::Open { key, epoch } => push_words(&mut out, 3, &[key, epoch]),
            Self::Opened {
                key,
                epoch,
                object_bytes,
                offset,
                length,
                access,
                persistence,
                marked,
            } => {
                push_words(&mut out, 4, &[key, epoch, object_bytes, offset, length]);
                out.push(access.bits());
                out.push(match persistence {
                    Persistence::Volatile => 0,
                    Persistence::CacheLine => 1,
                    Persistence::File => 2,
                });
                out.push(u8::from(marked));
            }
            Self::Refused { key, epoch } => push_words(&mut out, 5, &[key, epoch]),
        }
        out
    }

    /// Nothing when the record is not one an honest peer sends.
    pub(crate) fn decode(record: &[u8]) -> Option<Self> {
        let (&kind, mut rest) = record.split_first()?;
        let rest = &mut rest;
        let message = match kind {
            1 => Self::Hello {
                target_qp: u32::from_le_bytes(take(rest)?),
                target_nonce: take(rest)?,
                sender_qp: u32::from_le_bytes(take(rest)?),
                sender_nonce: take(rest)?,
            },
            2 => Self::Welcome { nonce: take(rest)? },
            3 => Self::Open { key: word(rest)?, epoch: word(rest)? },
            4 => Self::Opened {
                key: word(rest)?,
                epoch: word(rest)?,
                object_bytes: word(rest)?,
                offset: word(rest)?,
                length: word(rest)?,
                access: Access::from_bits(u8::from_le_bytes(take(rest)?))?,
                persistence: match take(rest)? {
                    [0] => Persistence::Volatile,
                    [1] => Persistence::CacheLine,
                    [2] => Persistence::File,
                    _ => return None,
                },
                marked: match take(rest)? {
                    [0] => false,
                    [1] => true,
                    _ => return None,
                },
            },
            5 => Self::Refused { key: word(rest)?, epoch: word(rest)? },
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

fn push_words(out: &mut Vec<u8>, kind: u8, words: &[u64]) {
    out.push(kind);
    for word in words {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

fn word(rest: &mut &[u8]) -> Option<u64> {
    take(rest).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kind_survives_the_wire() {
        let (nonce, other) = ([1; 16], [2; 16]);
        for message in [
            Message::Hello { target_qp: 1, target_nonce: nonce, sender_qp: 2, sender_nonce: other },
            Message::Welcome { nonce },
            Message::Open { key: 5, epoch: 6 },
            Message::Opened {
                key: 5,
                epoch: 6,
                object_bytes: 8192,
                offset: 64,
                length: 4096,
                access: Access::REMOTE_READ,
                persistence: Persistence::File,
                marked: true,
            },
            Message::Refused { key: 5, epoch: 6 },
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_RECORD_BYTES);
            assert_eq!(Message::decode(&bytes), Some(message));
            assert_eq!(Message::decode(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Message::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }

    proptest! {
        #[test]
        fn random_records_never_break_the_decoder(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
