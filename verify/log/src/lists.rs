//! The lists of the simulation as a state machine on the real log.
//!
//! A command is an append ([`append`]), its reply the list's length, u64. A query is a list's name,
//! its answer the items, u32 each. Little endian.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use beeline_paxos::Position;
use beeline_replicated_log::{SnapshotWriter, StateMachine};

use crate::machine::{Item, Key, append};

/// Lists to which clients append.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists(BTreeMap<Key, Vec<Item>>);

/// The bytes of an append, made longer by `padding` bytes that mean nothing. They are not zero: a
/// copy that stops before them leaves an entry that is not whole, in new memory too.
#[must_use]
pub fn padded_append(key: Key, item: Item, padding: usize) -> Vec<u8> {
    let mut bytes = append(key, item);
    bytes.resize(bytes.len() + padding, item as u8 | 1);
    bytes
}

/// The items of a query's answer.
#[must_use]
pub fn items(answer: &[u8]) -> Vec<Item> {
    let item = |bytes: &[u8]| Item::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    answer.chunks_exact(4).map(item).collect()
}

impl StateMachine for Lists {
    fn apply(&mut self, _position: Position, command: &[u8], reply: &mut Vec<u8>) {
        let Some((key, item)) = command.split_first() else { return };
        let Some(item) = item.first_chunk::<4>() else { return };
        let list = self.0.entry(*key).or_default();
        list.push(Item::from_le_bytes(*item));
        reply.extend_from_slice(&(list.len() as u64).to_le_bytes());
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        let lists = self.0.clone();
        Ok(Box::new(move |out: &mut dyn Write| {
            for (key, list) in lists {
                out.write_all(&[key])?;
                out.write_all(&(list.len() as u32).to_le_bytes())?;
                for item in list {
                    out.write_all(&item.to_le_bytes())?;
                }
            }
            Ok(())
        }))
    }

    fn restore(&mut self, _position: Position, reader: &mut dyn Read) -> io::Result<()> {
        self.0.clear();
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes)?;
        let mut rest = bytes.as_slice();
        let cut = || io::Error::from(io::ErrorKind::UnexpectedEof);
        while let Some((head, after)) = rest.split_first_chunk::<5>() {
            let count = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
            let (list, after) = after.split_at_checked(4 * count).ok_or_else(cut)?;
            self.0.insert(head[0], items(list));
            rest = after;
        }
        Ok(())
    }

    fn query(&mut self, query: &[u8], reply: &mut Vec<u8>) {
        let list = query.first().and_then(|key| self.0.get(key));
        for item in list.into_iter().flatten() {
            reply.extend_from_slice(&item.to_le_bytes());
        }
    }
}
