//! Lists and rows over a real store, as a replicated service: each unit one batch with its lane's turn.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use beeline_kv::{Keyspace, PutOptions, Shard, Store, replace_by_snapshot};
use beeline_replicated_log::{Position, SnapshotWriter};
use beeline_replicated_service::{
    CannotApply, Group, LaneName, Replicated, Replies, Tag, Turn, Unit,
};
use beeline_verify_log::lists::items;

use crate::Bug;

const PROGRESS: &[u8] = b"progress";
/// The kind of a row's head.
const ROW: u8 = 1;
/// Every so many items a list's row ends, and another of its name begins.
const ROW_ITEMS: u32 = 16;

/// What one site's machine and its readers share.
pub struct Bank {
    pub store: Arc<Store>,
    pub shards: Vec<Arc<Mutex<Shard>>>,
    pub directory: PathBuf,
}

impl Bank {
    pub fn with<R>(&self, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
        let mut guards: Vec<MutexGuard<'_, Shard>> =
            self.shards.iter().map(|shard| shard.lock().unwrap()).collect();
        body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 0))
    }

    pub fn upkeep(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap();
            shard.maintain(16 << 10).unwrap();
            shard.commit().unwrap();
        }
    }

    pub fn list(&self, key: u8) -> Vec<u32> {
        self.with(|keys| read_list(keys, key))
    }

    /// The fields of a list's row, in order of name; and how many there are by its head.
    pub fn row(&self, key: u8) -> (u64, Vec<Vec<u8>>) {
        self.with(|keys| {
            let name = [b'r', key];
            let Some(row) = keys.row(0, &name).unwrap() else { return (0, Vec::new()) };
            let mut fields = Vec::new();
            let all = (0, usize::MAX);
            keys.visit_row(0, &name, &row, all, |field, _| fields.push(field.to_vec())).unwrap();
            fields.sort();
            (row.length, fields)
        })
    }
}

fn read_list(keys: &mut Keyspace<'_>, key: u8) -> Vec<u32> {
    let Some(entry) = keys.lookup(0, &[b'l', key]).unwrap() else { return Vec::new() };
    let mut value = Vec::new();
    keys.read_value(&entry, &mut value).unwrap();
    items(&value)
}

/// The service.
pub struct Keys {
    pub bank: Arc<Bank>,
    pub group: Arc<Group>,
    pub bug: Option<Bug>,
    pub effects: u64,
}

impl Keys {
    fn turn_of(&self, name: &[u8]) -> Turn {
        let mut found = Vec::new();
        let known = self.bank.with(|keys| keys.system(name, &mut found)).unwrap();
        if known { Turn::decode(&found).unwrap() } else { Turn::default() }
    }

    fn record(&self, position: Position) {
        let progress = Turn { incarnation: position.0, number: 0 }.encode();
        self.bank.with(|keys| {
            keys.put_system(PROGRESS, &progress).unwrap();
            keys.commit().unwrap();
        });
    }
}

fn append(keys: &mut Keyspace<'_>, key: u8, item: u32) -> u64 {
    let mut list = read_list(keys, key);
    list.push(item);
    let bytes: Vec<u8> = list.iter().flat_map(|item| item.to_le_bytes()).collect();
    keys.put(0, &[b'l', key], &[&bytes], PutOptions::default()).unwrap();
    let name = [b'r', key];
    if (list.len() as u32).is_multiple_of(ROW_ITEMS) {
        keys.delete(0, &name).unwrap();
    } else {
        let row = keys.row(0, &name).unwrap();
        let mut row = row.unwrap_or_else(|| keys.new_row(ROW, 0).unwrap());
        keys.put_field(0, &name, &mut row, &item.to_be_bytes(), &[b"value"]).unwrap();
        keys.put_head(0, &name, &row).unwrap();
    }
    list.len() as u64
}

impl Replicated for Keys {
    fn tag(&self) -> Tag {
        Tag::KEYS
    }

    fn format(&self) -> u8 {
        1
    }

    fn applied(&self) -> Position {
        Position(self.turn_of(PROGRESS).incarnation)
    }

    fn is_durable(&self) -> bool {
        true
    }

    fn last_turn(&mut self, lane: LaneName) -> Result<Turn, CannotApply> {
        match self.bug {
            Some(Bug::ApplyTwice) => Ok(Turn::default()),
            _ => Ok(self.turn_of(&lane.key())),
        }
    }

    fn apply(
        &mut self,
        _position: Position,
        unit: &Unit<'_>,
        replies: &mut Replies<'_>,
    ) -> Result<(), CannotApply> {
        let bank = Arc::clone(&self.bank);
        self.effects = bank.with(|keys| {
            keys.watch_effects();
            keys.begin_batch();
            for request in unit.requests() {
                let item = u32::from_le_bytes(*request[1..].first_chunk().unwrap());
                let length = append(keys, request[0], item);
                replies.put(|reply| reply.extend_from_slice(&length.to_le_bytes()));
            }
            keys.put_system(&unit.lane.key(), &unit.turn.encode()).unwrap();
            keys.end_batch();
            keys.commit().unwrap();
            keys.effects()
        });
        Ok(())
    }

    fn effects(&mut self) -> Option<u64> {
        Some(self.effects)
    }

    fn flush(&mut self, position: Position) -> io::Result<()> {
        self.record(position);
        Ok(())
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        self.record(Position(self.group.applied()));
        let snapshot = self.bank.with(|keys| keys.begin_snapshot()).map_err(io::Error::other)?;
        Ok(Box::new(move |out| snapshot.write_to(out).map(|_| ())))
    }

    fn restore(&mut self, position: Position, state: &mut dyn Read) -> io::Result<()> {
        let path = self.bank.directory.join("incoming.bee");
        io::copy(state, &mut File::create(&path)?)?;
        self.group.set_loading(true);
        if self.bug != Some(Bug::SkipInstall) {
            replace_by_snapshot(&path, &self.bank.store, &self.bank.shards)
                .map_err(io::Error::other)?;
        }
        self.record(position);
        Ok(())
    }
}
