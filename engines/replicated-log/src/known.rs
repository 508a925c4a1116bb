//! Which instance of each member this one has met, kept in its directory.
//!
//! A member whose disk was replaced and that was set up anew has forgotten what it promised and what
//! it acknowledged. It comes under its old name, and looks like any founder. The others know its
//! directory by the *instance* that was drawn when the directory was made ([`crate::hello`]), and
//! refuse another one under the same name, also after they themselves were started again, until an
//! entry of the log has removed that member. It is then met anew.
//!
//! File `known`, little endian: magic `BEELKNW\0`, version u32, count u32; per member id u16 and six
//! zeroes, instance u64, since u64 (the membership's position when it was met); CRC-32C of all
//! before u32. Written whole beside the old one, synchronised, and renamed over it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use beeline_paxos::{Configuration, MAX_MEMBERS, NodeId, Position};
use beeline_wire::checksum::crc32c;

use crate::home::HomeError;
use crate::snapshot::sync_directory_of;

const MAGIC: [u8; 8] = *b"BEELKNW\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 24;

/// One member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Met {
    instance: u64,
    /// Position of the membership under which it was met.
    since: Position,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Known {
    path: PathBuf,
    met: BTreeMap<NodeId, Met>,
    unsaved: bool,
    /// The file names a member.
    names_some: bool,
}

impl Known {
    /// What the file says; nothing where there is none.
    ///
    /// Errors: [`HomeError`].
    pub(crate) fn load(path: PathBuf) -> Result<Self, HomeError> {
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let met = BTreeMap::new();
                return Ok(Self { path, met, unsaved: false, names_some: false });
            }
            Err(source) => return Err(HomeError::File { path, source }),
        };
        let Some(met) = decode(&bytes) else { return Err(HomeError::Damaged { path }) };
        let names_some = !met.is_empty();
        Ok(Self { path, met, unsaved: false, names_some })
    }

    /// Whether the file says that there are others.
    pub(crate) fn names_some(&self) -> bool {
        self.names_some
    }

    /// Whether this member was met.
    pub(crate) fn contains(&self, id: NodeId) -> bool {
        self.met.contains_key(&id)
    }

    /// The members that were met, and their instances.
    pub(crate) fn instances(&self) -> impl Iterator<Item = (NodeId, u64)> {
        self.met.iter().map(|(id, met)| (*id, met.instance))
    }

    /// Takes note of members that have been met since.
    pub(crate) fn learn(
        &mut self,
        configuration: &Configuration,
        instance_of: impl Fn(NodeId) -> u64,
    ) {
        for id in configuration.members() {
            let instance = instance_of(*id);
            if instance != 0 && !self.met.contains_key(id) {
                self.met.insert(*id, Met { instance, since: configuration.position() });
                self.unsaved = true;
            }
        }
    }

    /// The members that `configuration`, which an entry of the log just made, has no more. They
    /// are forgotten; a member of that name may come from another disk.
    pub(crate) fn forget_removed(&mut self, configuration: &Configuration) -> Vec<NodeId> {
        let removed = |id: &NodeId, met: &Met| {
            !configuration.contains(*id) && met.since < configuration.position()
        };
        self.forget(removed)
    }

    /// A snapshot brought a later membership: members may have been removed and added again in
    /// between, so those met before it are met anew. The members that saw the entries know better.
    pub(crate) fn forget_before(&mut self, configuration: &Configuration) -> Vec<NodeId> {
        self.forget(|_, met| met.since < configuration.position())
    }

    fn forget(&mut self, which: impl Fn(&NodeId, &Met) -> bool) -> Vec<NodeId> {
        let gone = self.met.iter().filter(|(id, met)| which(id, met)).map(|(id, _)| *id);
        let gone: Vec<_> = gone.collect();
        for id in &gone {
            self.met.remove(id);
            self.unsaved = true;
        }
        gone
    }

    /// Writes what changed, durably.
    ///
    /// Errors: [`HomeError::File`]; it is tried again by the next call.
    pub(crate) fn save(&mut self) -> Result<(), HomeError> {
        if !self.unsaved {
            return Ok(());
        }
        let new = self.path.with_extension("new");
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| HomeError::File { path, source }
        };
        let written = File::create(&new).and_then(|mut to| {
            to.write_all(&encode(&self.met))?;
            to.sync_all()
        });
        written.map_err(file(&new))?;
        let renamed = std::fs::rename(&new, &self.path);
        renamed.and_then(|()| sync_directory_of(&self.path)).map_err(file(&self.path))?;
        (self.unsaved, self.names_some) = (false, !self.met.is_empty());
        Ok(())
    }
}

fn encode(met: &BTreeMap<NodeId, Met>) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&u32::try_from(met.len()).unwrap_or(u32::MAX).to_le_bytes());
    for (id, met) in met {
        bytes.extend_from_slice(&u64::from(id.0).to_le_bytes());
        bytes.extend_from_slice(&met.instance.to_le_bytes());
        bytes.extend_from_slice(&met.since.0.to_le_bytes());
    }
    let check = crc32c(&bytes);
    bytes.extend_from_slice(&check.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<BTreeMap<NodeId, Met>> {
    let (body, check) = bytes.split_last_chunk::<4>()?;
    if u32::from_le_bytes(*check) != crc32c(body) || body.len() < HEADER_BYTES {
        return None;
    }
    let word = |at: usize| u32::from_le_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]);
    let count = word(12) as usize;
    let entries = &body[HEADER_BYTES..];
    let sound = body[..8] == MAGIC
        && word(8) == VERSION
        && count < MAX_MEMBERS
        && entries.len() == count * ENTRY_BYTES;
    if !sound {
        return None;
    }
    let entry = |entry: &[u8]| {
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&entry[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let id = NodeId(u16::try_from(long(0)).ok()?);
        Some((id, Met { instance: long(8), since: Position(long(16)) }))
    };
    entries.chunks_exact(ENTRY_BYTES).map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(position: u64, ids: &[u16]) -> Configuration {
        let members = ids.iter().map(|id| (NodeId(*id), Vec::new())).collect();
        Configuration::at(Position(position), members)
    }

    #[test]
    fn a_member_is_known_across_restarts_until_an_entry_removes_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("known");
        let mut known = Known::load(path.clone()).unwrap();
        let instance = |id: NodeId| [0, 0, 70, 80][usize::from(id.0)];
        known.learn(&members(0, &[1, 2, 3]), instance);
        known.save().unwrap();
        let mut known = Known::load(path.clone()).unwrap();
        assert_eq!(known.instances().collect::<Vec<_>>(), [(NodeId(2), 70), (NodeId(3), 80)]);
        // What is met later does not replace it, and an older membership removes nobody.
        known.learn(&members(0, &[1, 2, 3]), |_| 99);
        assert_eq!(known.forget_removed(&members(0, &[1, 2])), []);
        assert_eq!(known.forget_removed(&members(9, &[1, 2])), [NodeId(3)]);
        known.learn(&members(12, &[1, 2, 3]), |id| 100 + u64::from(id.0));
        known.save().unwrap();
        let mut known = Known::load(path).unwrap();
        let now: BTreeMap<_, _> = known.instances().collect();
        assert_eq!((now[&NodeId(2)], now[&NodeId(3)]), (70, 103));
        assert_eq!(known.forget_before(&members(12, &[1, 2, 3])).len(), 2, "all but the newest");
    }

    #[test]
    fn a_damaged_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("known");
        let mut known = Known::load(path.clone()).unwrap();
        known.learn(&members(0, &[1, 2]), |_| 7);
        known.save().unwrap();
        let sound = std::fs::read(&path).unwrap();
        for at in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            assert!(decode(&bytes).is_none(), "byte {at}");
            assert!(decode(&sound[..at]).is_none(), "cut at {at}");
        }
    }
}
