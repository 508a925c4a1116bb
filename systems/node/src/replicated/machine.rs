//! The keys as a replicated service: units, applied to the shards.
//!
//! Units that follow each other are applied at the same time, in parts: [`super::wave`]. A part is one batch of the
//! store: the effects of its requests, and a mark of how far its shard has come ([`super::marks`]). `flush`, behind the
//! parts, records the position, the lanes' latest turns and the log's time as of it, in one batch. So after a crash
//! the log brings again what lies behind the recorded position, and what lies before the marks is skipped; a unit
//! that was proposed twice is skipped by its lane's turn ([`beeline_replicated_service::Machine`]).
//!
//! Replicas must not differ in what a unit does. Its requests see the time stamped on it, and the
//! keyspace; limits that depend on how entries lie are never met ([`BATCH_SHARE`]). What else may
//! refuse an entry, a broken medium, says nothing about the request: this replica then stops, with the
//! unit undone, and the others go on. For want of room none stops: a unit that stores something is
//! held until there is some.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_kv::{Keyspace, KvError, check_replacement, replace_by_snapshot};
use beeline_replicated_log::{Position, SnapshotWriter};
use beeline_replicated_service::{
    CannotApply, LaneName, Replicated, Replies, Settled, Tag, Take, Turn, Unit,
};
use beeline_resp::{Executor, Logged, Output};

use super::courier::lane_name;
use super::marks::{Left, Marks, Place};
use super::wave::Wave;
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
/// The key of the log's time among them, for members of earlier builds that get it in a snapshot: they wrote it with
/// every unit.
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

/// The node's keys, as a service of the log. Lives on the log's thread, and elsewhere while a snapshot is restored.
#[derive(Debug)]
pub struct ReplicatedKeys {
    shared: Arc<Shared>,
    executor: Executor,
    out: Output,
    lanes: HashMap<LaneName, Turn>,
    /// Lanes with a turn that is not recorded.
    ahead: BTreeSet<LaneName>,
    wave: Wave,
    marks: Marks,
    /// What earlier runs left beyond the recorded position, until the log has come so far.
    left: Option<Left>,
    /// The unit that is looked at.
    place: Place,
    /// Some of the unit applied last had taken effect before.
    begun: bool,
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
        let shards = shared.shards.len();
        let figures = shared.figures.of(shards).unwrap_or_default();
        let mut keys = Self {
            wave: Wave::new(&shared, shards + 1),
            shared,
            executor: Executor::with_figures(figures),
            out: Output::default(),
            lanes: HashMap::new(),
            ahead: BTreeSet::new(),
            marks: Marks::default(),
            left: None,
            place: Place::default(),
            begun: false,
            now_ms: 0,
            recorded: 0,
            upkeep_asked: Instant::now(),
            room_asked: Cell::new(None),
            effects: 0,
            examined: None,
        };
        keys.reload()?;
        keys.choose_incarnation()?;
        if let Some(replication) = &keys.shared.replication {
            // Where earlier runs left something, some shards are ahead of others: a reader of several would see
            // a part.
            replication.set_loading(keys.left.is_some());
            let left = keys.reached().since(keys.applied());
            replication.left_at_start.store(left, Ordering::Relaxed);
        }
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
        // Of an earlier build, whose units brought it: they are skipped, and do not bring it again.
        let now_ms = flushed_ms.max(applied_ms.unwrap_or_default());
        (self.recorded, self.now_ms) = (position, now_ms);
        self.lanes.clear();
        self.ahead.clear();
        (self.marks, self.left) = with_keyspace(&shared, |keyspace| {
            let opened = Marks::open(keyspace, position)?;
            keyspace.commit()?;
            Ok::<_, KvError>(opened)
        })?;
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

    /// This is the latest turn of its lane from now on.
    fn note_turn(&mut self, unit: &Unit<'_>) {
        self.lanes.insert(unit.lane, unit.turn);
        self.ahead.insert(unit.lane);
    }

    /// A leader's clock may lie behind that of the one before.
    fn note_time(&mut self, unit: &Unit<'_>) {
        self.now_ms = self.now_ms.max(unit.unix_ms);
    }

    fn apply_unit(
        &mut self,
        position: u64,
        unit: &Unit<'_>,
        replies: &mut Replies<'_>,
    ) -> Result<(), String> {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return Err("no replication".into()) };
        self.note_time(unit);
        Self::await_room(&shared, ROOM_PATIENCE)?;
        replication.cut.close();
        replication.agreed_ms.store(self.now_ms, Ordering::Relaxed);
        let (executor, out, now_ms) = (&mut self.executor, &mut self.out, self.now_ms);
        let (marks, left, place) = (&self.marks, &self.left, self.place);
        let mut logged = Logged::default();
        let mut begun = false;
        self.effects = clock::at(now_ms, || {
            with_keyspace(&shared, |keyspace| {
                keyspace.watch_effects();
                keyspace.begin_batch();
                let mut requests = unit.requests();
                let applied = requests.try_for_each(|request| {
                    let mut applied = Ok(());
                    replies.put(|reply| {
                        if left.as_ref().is_some_and(|left| left.has(place, request, &mut logged)) {
                            begun = true;
                            return;
                        }
                        applied =
                            run_request(executor, out, &shared, position, request, keyspace, reply);
                    });
                    applied
                });
                applied
                    .and_then(|()| {
                        marks.put_all(keyspace, place).map_err(|error| error.to_string())?;
                        keyspace.end_batch();
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
        replication.cut.pause();
        self.begun = begun;
        self.note_turn(unit);
        Ok(())
    }

    /// Once the log has come as far as earlier runs of the member had, shards are at one position again.
    fn end_what_was_left(&mut self, position: u64) -> Result<(), KvError> {
        if self.left.take_if(|left| left.end.position <= position).is_none() {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        if !self.marks.are_of(shared.shards.len()) {
            with_keyspace(&shared, |keyspace| {
                self.marks.begin_epoch(keyspace)?;
                keyspace.commit()
            })?;
        }
        if let Some(replication) = &shared.replication {
            replication.set_loading(false);
        }
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

    /// Whether a unit may store something that is not there yet.
    fn needs_room(&self, place: Place, unit: &Unit<'_>) -> bool {
        let Some(left) = &self.left else {
            return unit.piece.is_some() || unit.requests().any(needs_room);
        };
        if left.has_all_of(place) || unit.piece.is_some() {
            return !left.has_all_of(place);
        }
        let mut logged = Logged::default();
        let mut requests = unit.requests();
        requests.any(|request| needs_room(request) && !left.has(place, request, &mut logged))
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

    /// Position, lanes' turns and time, in one batch: what comes again after a crash finds all of them as they
    /// were at this position.
    fn record(&mut self, position: u64) -> Result<(), CannotApply> {
        let progress = Turn { incarnation: position, number: self.now_ms }.encode();
        self.in_batch(|keyspace| {
            keyspace.put_system(PROGRESS, &progress)?;
            self.ahead.iter().try_for_each(|lane| {
                let turn = self.lanes.get(lane).copied().unwrap_or_default();
                keyspace.put_system(&lane.key(), &turn.encode())
            })
        })?;
        let committed = with_keyspace(&self.shared, |keyspace| keyspace.commit());
        committed.map_err(CannotApply::new)?;
        self.ahead.clear();
        Ok(())
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

    fn reached(&self) -> Position {
        Position(self.left.as_ref().map_or(self.recorded, |left| left.end.position))
    }

    fn founded_upon(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let begun = with_keyspace(&shared, |keyspace| {
            self.marks.begin_epoch(keyspace)?;
            keyspace.commit()
        });
        begun.map_err(io::Error::other)?;
        if let (Some(_), Some(replication)) = (self.left.take(), &shared.replication) {
            replication.set_loading(false);
        }
        Ok(())
    }

    fn is_durable(&self) -> bool {
        self.shared.store.pool().report().durability != beeline_pmem::Durability::None
    }

    fn last_turn(&mut self, lane: LaneName) -> Result<Turn, CannotApply> {
        self.recorded_turn(lane).map_err(CannotApply::new)
    }

    fn took_effect(&mut self, position: Position, unit: &Unit<'_>) -> Result<bool, CannotApply> {
        let same = self.place.position == position.0;
        let index = if same { self.place.index + 1 } else { 0 };
        self.place = Place { position: position.0, index };
        let place = self.place;
        let took_effect = self.left.as_ref().is_some_and(|left| left.has_all_of(place));
        if took_effect {
            if unit.piece.is_none_or(|piece| piece.is_last()) {
                self.note_time(unit);
            }
            self.note_turn(unit);
        }
        Ok(took_effect)
    }

    fn had_begun(&self) -> bool {
        self.begun
    }

    fn take(&mut self, _position: Position, unit: &Unit<'_>) -> Result<Take, CannotApply> {
        if self.left.is_some() {
            return Ok(Take::Alone);
        }
        let unix_ms = self.now_ms.max(unit.unix_ms);
        let take = self.wave.place(&self.shared.store, unit, self.place, unix_ms);
        if take == Take::Later {
            self.note_time(unit);
            self.note_turn(unit);
        }
        Ok(take)
    }

    fn settle(&mut self, each: &mut dyn FnMut(Settled<'_>)) -> Result<(), CannotApply> {
        if self.wave.is_empty() {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else {
            return Err(CannotApply::new("no replication"));
        };
        replication.cut.close();
        let ran = self.wave.run(&shared, replication, &self.marks);
        ran.map_err(CannotApply::new)?;
        // No shard sees an earlier time any more.
        replication.agreed_ms.store(self.now_ms, Ordering::Relaxed);
        replication.cut.pause();
        self.wave.tell(each);
        Ok(())
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
        if let Some(replication) = &self.shared.replication {
            replication.cut.close();
        }
        self.in_batch(|keyspace| {
            pieces::keep(keyspace, unit, piece)?;
            self.marks.put_all(keyspace, self.place)
        })?;
        // As behind a unit: pieces of a long one may be a whole run.
        if let Some(replication) = &self.shared.replication {
            replication.cut.pause();
        }
        self.note_turn(unit);
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
    /// aside for them. So does what took effect in an earlier run: held, it would keep shards at different positions,
    /// and the member from all reads, until an operator made room.
    fn has_room_for(&mut self, position: Position, index: u32, unit: &Unit<'_>) -> bool {
        let shared = Arc::clone(&self.shared);
        let place = Place { position: position.0, index };
        if !shared.store.is_short() || !self.needs_room(place, unit) {
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
        self.record(position.0).map_err(io::Error::other)?;
        self.end_what_was_left(position.0).map_err(io::Error::other)?;
        if let Some(replication) = &shared.replication {
            replication.cut.open();
        }
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
        if let Some(left) = &self.left {
            let end = left.end.position;
            return Err(io::Error::other(format!(
                "shards of this member are at different positions until it has applied {end}"
            )));
        }
        let shared = Arc::clone(&self.shared);
        let position = shared.replication.as_ref().map_or(0, |replication| replication.applied());
        self.record(position).map_err(io::Error::other)?;
        let now_ms = self.now_ms.to_le_bytes();
        let snapshot = with_keyspace(&shared, |keyspace| {
            keyspace.put_system(TIME, &now_ms)?;
            keyspace.commit()?;
            keyspace.begin_snapshot()
        })
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
        if let Some(left) = &self.left {
            return Err(io::Error::other(format!(
                "the snapshot is of {position}, and some of what it has is of {}",
                left.end.position
            )));
        }
        self.record(position.0).map_err(io::Error::other)?;
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

impl Drop for ReplicatedKeys {
    /// No run goes on: requests that wait for its end are answered.
    fn drop(&mut self) {
        if let Some(replication) = &self.shared.replication {
            replication.cut.open();
        }
    }
}

/// Runs a request of a unit within the batch that is open, and appends its reply.
///
/// Errors: the store's, where they say nothing of the request: this replica cannot go on.
pub(super) fn run_request(
    executor: &mut Executor,
    out: &mut Output,
    shared: &Shared,
    position: u64,
    request: &[u8],
    keyspace: &mut Keyspace<'_>,
    reply: &mut Vec<u8>,
) -> Result<(), String> {
    if pair::is_pair(request) {
        return pair::apply(request, position, keyspace, reply).map_err(|error| error.to_string());
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
    reply.extend_from_slice(out.as_bytes());
    Ok(())
}

/// Runs `body` with every shard locked; writes go to the first one's log.
fn with_keyspace<R>(shared: &Shared, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let all: Vec<usize> = (0..shared.shards.len()).collect();
    let mut guards = shared.lock_shards(&all);
    let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
    body(&mut Keyspace::many(shards, 0))
}
