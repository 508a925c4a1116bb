//! The keys as a replicated service: units, applied to the shards.
//!
//! A unit is one batch of the store: the effects of its requests, its lane's latest turn, and the
//! log's time. So after a crash the lane's turn tells whether the unit's effects are there, and a unit
//! that is applied again, because the position recorded is older or because it was proposed twice, is
//! skipped ([`beeline_replicated_service::Machine`]); what comes behind it runs no earlier than it did.
//! The position is recorded by `flush`, behind the effects.
//!
//! Replicas must not differ in what a unit does. Its requests see the time stamped on it, and the
//! keyspace; limits that depend on how entries lie are never met ([`BATCH_SHARE`]). What else may
//! refuse an entry, a broken medium, says nothing about the request: this replica then stops, with the
//! unit undone, and the others go on. For want of room none stops: a unit that stores something is
//! held until there is some.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_kv::{Keyspace, KvError, check_replacement, replace_by_snapshot};
use beeline_replicated_log::{Position, SnapshotWriter};
use beeline_replicated_service::{CannotApply, LaneName, Replicated, Replies, Tag, Turn, Unit};
use beeline_resp::{Executor, Logged, Output};

use super::courier::lane_name;
use super::{clock, pair, pieces};
use crate::redis::bound;
use crate::shared::{Shared, lock};

/// A unit's entries take at most one such part of a segment; the rest is for deletions, whose
/// number is bounded by the unit's length.
pub(crate) const BATCH_SHARE: u64 = 2;
/// The format of the keys' requests: [`beeline_resp::logged`] and [`pair`].
pub(crate) const FORMAT: u8 = 1;
/// A copy of the state of a snapshot, in the node's directory.
const INCOMING: &str = "incoming.bee";
/// The key of position and time among the system's entries.
const PROGRESS: &[u8] = b"progress";
/// The key of the log's time among them, written with every unit: units that are skipped after a crash,
/// because they have had their effects, do not bring it again.
const TIME: &[u8] = b"time";
/// A pool without room is waited for so long.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);
/// A pool takes no new data when no more than so much is left before it is short, or an eighth of it:
/// some tens of milliseconds of writes at full speed.
const MARGIN_BYTES: u64 = 256 << 20;
/// One step of making room for a unit that is held for want of it takes no longer: the log goes on.
const HELD_PATIENCE: Duration = Duration::from_millis(20);
/// Between two looks whether a snapshot that was given up has ended.
const SNAPSHOT_PAUSE: Duration = Duration::from_millis(2);
/// Upkeep between two looks for room, bytes copied.
const UPKEEP_BYTES: u64 = 4 << 20;
/// Longest reply to one request of a unit.
const REPLY_LIMIT_BYTES: usize = 256 << 20;
/// The store's own threads are told to look after it so often.
const UPKEEP_PAUSE: Duration = Duration::from_millis(50);
/// A store that stays short of room is looked after so often at least, however long it does.
const SHORT_PAUSE: Duration = Duration::from_secs(1);

/// The node's keys, as a service of the log. Lives on the log's thread.
#[derive(Debug)]
pub struct ReplicatedKeys {
    shared: Arc<Shared>,
    executor: Executor,
    out: Output,
    lanes: HashMap<LaneName, Turn>,
    /// The log's time, Unix milliseconds.
    now_ms: u64,
    /// As recorded at the start.
    recorded: u64,
    upkeep_asked: Instant,
    /// While the store is short: when its threads were asked for room, and when they are next.
    room_asked: Cell<Option<(Instant, Duration)>>,
    /// Of the unit applied last.
    effects: u64,
    /// The snapshot of this position was found to fit; its copy is there.
    examined: Option<Position>,
}

impl ReplicatedKeys {
    /// Errors: [`KvError`] of reading what was recorded.
    pub(crate) fn open(shared: Arc<Shared>) -> Result<Self, KvError> {
        let figures = shared.figures.of(shared.shards.len()).unwrap_or_default();
        let mut keys = Self {
            shared,
            executor: Executor::with_figures(figures),
            out: Output::default(),
            lanes: HashMap::new(),
            now_ms: 0,
            recorded: 0,
            upkeep_asked: Instant::now(),
            room_asked: Cell::new(None),
            effects: 0,
            examined: None,
        };
        keys.reload()?;
        keys.choose_incarnation()?;
        Ok(keys)
    }

    /// Reads what the store says of itself.
    fn reload(&mut self) -> Result<(), KvError> {
        let shared = Arc::clone(&self.shared);
        let mut found = Vec::new();
        let known = with_keyspace(&shared, |keyspace| keyspace.system(PROGRESS, &mut found))?;
        let turn = if known { Turn::decode(&found) } else { None };
        let Turn { incarnation: position, number: flushed_ms } = turn.unwrap_or_default();
        found.clear();
        let known = with_keyspace(&shared, |keyspace| keyspace.system(TIME, &mut found))?;
        let applied_ms = found.first_chunk().filter(|_| known).map(|ms| u64::from_le_bytes(*ms));
        // An earlier build recorded none with its units.
        let now_ms = flushed_ms.max(applied_ms.unwrap_or_default());
        (self.recorded, self.now_ms) = (position, now_ms);
        self.lanes.clear();
        if let Some(replication) = &shared.replication {
            replication.agreed_ms.store(now_ms, Ordering::Relaxed);
        }
        Ok(())
    }

    /// A clock that was set back must not bring an incarnation that was used.
    fn choose_incarnation(&mut self) -> Result<(), KvError> {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return Ok(()) };
        for shard in 0..shared.doors.len() {
            let last = self.recorded_turn(lane_name(replication.options.node, shard))?;
            replication.raise_incarnation(last.incarnation + 1);
        }
        Ok(())
    }

    fn recorded_turn(&mut self, lane: LaneName) -> Result<Turn, KvError> {
        if let Some(turn) = self.lanes.get(&lane) {
            return Ok(*turn);
        }
        let mut found = Vec::new();
        let shared = Arc::clone(&self.shared);
        let known = with_keyspace(&shared, |keyspace| keyspace.system(&lane.key(), &mut found))?;
        let turn = if known { Turn::decode(&found).unwrap_or_default() } else { Turn::default() };
        self.lanes.insert(lane, turn);
        Ok(turn)
    }

    fn apply_unit(
        &mut self,
        position: u64,
        unit: &Unit<'_>,
        replies: &mut Replies<'_>,
    ) -> Result<(), String> {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return Err("no replication".into()) };
        // A leader's clock may lie behind that of the one before.
        self.now_ms = self.now_ms.max(unit.unix_ms);
        replication.agreed_ms.store(self.now_ms, Ordering::Relaxed);
        Self::await_room(&shared, ROOM_PATIENCE)?;
        let (executor, out, now_ms) = (&mut self.executor, &mut self.out, self.now_ms);
        self.effects = clock::at(now_ms, || {
            with_keyspace(&shared, |keyspace| {
                keyspace.watch_effects();
                keyspace.begin_batch();
                run(executor, out, &shared, position, unit, keyspace, replies)
                    .and_then(|()| conclude(unit, now_ms, keyspace))
                    .and_then(|()| {
                        if replication.options.ordered_commits {
                            keyspace.commit().map_err(|error| error.to_string())?;
                        }
                        Ok(keyspace.effects())
                    })
                    .inspect_err(|_| {
                        // While the shards are locked: their threads refuse everything from the
                        // moment they can see what the batch left.
                        keyspace.abandon_batch();
                        replication.fail();
                    })
            })
        })?;
        out.clear();
        self.lanes.insert(unit.lane, unit.turn);
        Ok(())
    }

    /// A step beside units, as one batch.
    fn in_batch(
        &self,
        step: impl FnOnce(&mut Keyspace<'_>) -> Result<(), KvError>,
    ) -> Result<(), CannotApply> {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else {
            return Err(CannotApply::new("no replication"));
        };
        let done = with_keyspace(&shared, |keyspace| {
            keyspace.begin_batch();
            let done = step(keyspace);
            if done.is_err() {
                // As a unit that cannot be applied.
                keyspace.abandon_batch();
                replication.fail();
            }
            keyspace.end_batch();
            done?;
            if replication.options.ordered_commits { keyspace.commit() } else { Ok(()) }
        });
        done.map_err(CannotApply::new)
    }

    /// Waits for the collector where the pool has no room for another batch. Without any in the
    /// end, deletions may still find some.
    fn await_room(shared: &Shared, patience: Duration) -> Result<(), String> {
        let started = Instant::now();
        while shared.store.is_short() && started.elapsed() < patience {
            // One shard after another: with all of them locked, none could ask another about what it
            // supersedes, and nothing that two shards share would be freed.
            let upkeep = shared.shards.iter().try_fold(false, |worked, shard| {
                let mut shard = lock(shard);
                let upkeep = shard.maintain(UPKEEP_BYTES)?;
                shard.commit()?;
                Ok::<_, KvError>(worked | upkeep.did_work)
            });
            match upkeep {
                Ok(true) => {}
                // What is there is needed: perhaps by a snapshot alone. The log takes another later;
                // a member that stopped for one would help its receiver no more.
                Ok(false) if shared.store.give_up_snapshot() => {
                    std::thread::sleep(SNAPSHOT_PAUSE);
                }
                Ok(false) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Has the store's threads look for room. The last deletions of many wake no thread, and the
    /// clients of a cluster that is short of room may wait for a member without clients. So the log
    /// asks, less and less often: a store full of what is needed should cost no time.
    fn ask_for_room(&self) {
        let now = Instant::now();
        let pause = match self.room_asked.get() {
            Some((asked, pause)) if now.duration_since(asked) < pause => return,
            Some((_, pause)) => (2 * pause).min(SHORT_PAUSE),
            None => UPKEEP_PAUSE,
        };
        self.room_asked.set(Some((now, pause)));
        self.shared.store.ask_for_room();
    }

    fn record(&mut self, shared: &Shared, position: u64) -> io::Result<()> {
        let progress = Turn { incarnation: position, number: self.now_ms }.encode();
        let recorded = with_keyspace(shared, |keyspace| {
            keyspace.put_system(PROGRESS, &progress)?;
            keyspace.commit()
        });
        recorded.map_err(io::Error::other)
    }
}

impl Replicated for ReplicatedKeys {
    fn tag(&self) -> Tag {
        Tag::KEYS
    }

    fn format(&self) -> u8 {
        FORMAT
    }

    fn applied(&self) -> Position {
        Position(self.recorded)
    }

    fn is_durable(&self) -> bool {
        self.shared.store.pool().report().durability != beeline_pmem::Durability::None
    }

    fn last_turn(&mut self, lane: LaneName) -> Result<Turn, CannotApply> {
        self.recorded_turn(lane).map_err(CannotApply::new)
    }

    fn apply(
        &mut self,
        position: Position,
        unit: &Unit<'_>,
        replies: &mut Replies<'_>,
    ) -> Result<(), CannotApply> {
        self.apply_unit(position.0, unit, replies).map_err(CannotApply::new)
    }

    fn keep_piece(&mut self, _position: Position, unit: &Unit<'_>) -> Result<(), CannotApply> {
        let Some(piece) = unit.piece else { return Err(CannotApply::new("this is no piece")) };
        Self::await_room(&self.shared, ROOM_PATIENCE).map_err(CannotApply::new)?;
        self.in_batch(|keyspace| {
            pieces::keep(keyspace, unit, piece)?;
            keyspace.put_system(&unit.lane.key(), &unit.turn.encode())
        })?;
        self.lanes.insert(unit.lane, unit.turn);
        Ok(())
    }

    fn pieces(&mut self, unit: &Unit<'_>) -> Result<Option<Vec<u8>>, CannotApply> {
        let Some(piece) = unit.piece else { return Ok(None) };
        let found = with_keyspace(&self.shared, |keys| pieces::before(keys, unit.lane, piece));
        found.map_err(CannotApply::new)
    }

    fn drop_pieces(&mut self, unit: &Unit<'_>) -> Result<(), CannotApply> {
        self.in_batch(|keyspace| pieces::remove(keyspace, unit.lane))
    }

    /// Before [`beeline_kv::Store::is_short`], after which a unit waits for room:
    /// what other members have proposed by then has to fit as well.
    fn is_short(&self) -> bool {
        let short = self.shared.store.is_short_with(MARGIN_BYTES);
        if short {
            self.ask_for_room();
        } else {
            self.room_asked.set(None);
        }
        short
    }

    /// A unit begins with room for all of it, or is held. Deletions always go on: there is room set
    /// aside for them.
    fn has_room_for(&mut self, unit: &Unit<'_>) -> bool {
        let shared = Arc::clone(&self.shared);
        let needs_room = unit.piece.is_some() || unit.requests().any(needs_room);
        if !shared.store.is_short() || !needs_room {
            return true;
        }
        // What goes wrong here is told when the unit is applied.
        Self::await_room(&shared, HELD_PATIENCE).is_err() || !shared.store.is_short()
    }

    /// Replies would differ where members agree: a hash's fields come in an order of each member's.
    fn effects(&mut self) -> Option<u64> {
        Some(self.effects)
    }

    fn flush(&mut self, position: Position) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        self.record(&shared, position.0)?;
        if self.upkeep_asked.elapsed() >= UPKEEP_PAUSE {
            self.upkeep_asked = Instant::now();
            for door in &shared.doors {
                door.changed.store(true, Ordering::Relaxed);
                door.nudge();
            }
        }
        Ok(())
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        let shared = Arc::clone(&self.shared);
        let position = shared.replication.as_ref().map_or(0, |replication| replication.applied());
        self.record(&shared, position)?;
        let snapshot = with_keyspace(&shared, |keyspace| keyspace.begin_snapshot())
            .map_err(io::Error::other)?;
        Ok(Box::new(move |out| snapshot.write_to(out).map(|_| ())))
    }

    /// Keeps the copy for [`Replicated::restore`].
    fn examine(&mut self, position: Position, state: &mut dyn Read) -> io::Result<()> {
        let path = self.shared.data_directory.join(INCOMING);
        self.examined = None;
        let copied = File::create(&path).and_then(|mut file| io::copy(state, &mut file));
        let fits = copied
            .and_then(|_| check_replacement(&path, &self.shared.store).map_err(io::Error::other));
        if fits.is_err() {
            let _ = std::fs::remove_file(&path);
        }
        fits?;
        self.examined = Some(position);
        Ok(())
    }

    /// The store is empty when it is opened next, if this fails.
    fn restore(&mut self, position: Position, state: &mut dyn Read) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let path = shared.data_directory.join(INCOMING);
        if self.examined.take() != Some(position) {
            let mut file = File::create(&path)?;
            io::copy(state, &mut file)?;
            drop(file);
            check_replacement(&path, &shared.store).map_err(io::Error::other)?;
        }
        if let Some(replication) = &shared.replication {
            replication.set_loading(true);
        }
        // One that is being written would keep the old state's room from the new one.
        let started = Instant::now();
        while shared.store.give_up_snapshot() && started.elapsed() < ROOM_PATIENCE {
            std::thread::sleep(SNAPSHOT_PAUSE);
        }
        let replaced = replace_by_snapshot(&path, &shared.store, &shared.shards);
        let _ = std::fs::remove_file(&path);
        let report = replaced.map_err(io::Error::other)?;
        self.reload().map_err(io::Error::other)?;
        self.record(&shared, position.0)?;
        tracing::info!(%position, records = report.records, "a snapshot was installed");
        Ok(())
    }
}

/// Whether a request of a unit may store something.
fn needs_room(request: &[u8]) -> bool {
    if pair::is_pair(request) {
        return pair::decode(request).is_some_and(|write| write.value.is_some());
    }
    Logged::decode(request).is_some_and(|request| request.needs_room())
}

/// Runs a unit's requests as one batch, which is open and stays so.
fn run(
    executor: &mut Executor,
    out: &mut Output,
    shared: &Shared,
    position: u64,
    unit: &Unit<'_>,
    keyspace: &mut Keyspace<'_>,
    replies: &mut Replies<'_>,
) -> Result<(), String> {
    for request in unit.requests() {
        if pair::is_pair(request) {
            let mut applied = Ok(());
            replies.put(|reply| applied = pair::apply(request, position, keyspace, reply));
            applied.map_err(|error| error.to_string())?;
            continue;
        }
        out.clear();
        out.set_limit(REPLY_LIMIT_BYTES);
        if let Some(request) = Logged::decode(request) {
            if !executor.execute_logged(&request, keyspace, out, shared) {
                let error = String::from_utf8_lossy(out.as_bytes()).into_owned();
                return Err(format!("the store refused an entry: {error}"));
            }
            bound(out, 0);
        } else {
            out.error(b"ERR a damaged request in the log");
        }
        replies.put(|reply| reply.extend_from_slice(out.as_bytes()));
    }
    Ok(())
}

/// Ends a unit's batch with what a member that skips it after a crash has to know of it.
fn conclude(unit: &Unit<'_>, now_ms: u64, keyspace: &mut Keyspace<'_>) -> Result<(), String> {
    let turn = keyspace.put_system(&unit.lane.key(), &unit.turn.encode());
    let recorded = turn.and_then(|()| keyspace.put_system(TIME, &now_ms.to_le_bytes()));
    recorded.map_err(|error| error.to_string())?;
    keyspace.end_batch();
    Ok(())
}

/// Runs `body` with every shard locked; writes go to the first one's log.
fn with_keyspace<R>(shared: &Shared, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let all: Vec<usize> = (0..shared.shards.len()).collect();
    let mut guards = shared.lock_shards(&all);
    let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
    body(&mut Keyspace::many(shards, 0))
}
