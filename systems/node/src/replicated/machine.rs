//! What the log applies: units, to the shards.
//!
//! A unit is one batch of the store: the effects of its requests, and its lane's latest turn. So
//! after a crash the lane's turn tells whether the unit's effects are there, and a unit that is
//! applied again, because the position recorded is older or because it was proposed twice, is
//! skipped. The position is recorded at [`ReplicaMachine::flush`], behind the effects.
//!
//! Replicas must not differ in what a unit does. Its requests see the time stamped on it, and the
//! keyspace; limits that depend on how entries lie are never met ([`BATCH_SHARE`]). What else may
//! refuse an entry, a full pool or a broken medium, says nothing about the request: this replica
//! then stops, with the unit undone, and the others go on.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_kv::{Keyspace, KvError, replace_by_snapshot};
use beeline_resp::{Executor, Logged, Output};

use super::unit::{self, LaneName, REPEATED, Turn, Unit};
use super::{Replication, clock, pair};
use crate::shared::Shared;
use crate::turn::bound;

/// A unit's entries take at most one such part of a segment; the rest is for deletions, whose
/// number is bounded by the unit's length.
pub(crate) const BATCH_SHARE: u64 = 2;
/// The key of position and time among the system's entries.
const PROGRESS: &[u8] = b"progress";
/// A pool without room is waited for so long.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);
/// Upkeep between two looks for room, bytes copied.
const UPKEEP_BYTES: u64 = 4 << 20;
/// Longest reply to one request of a unit.
const REPLY_LIMIT_BYTES: usize = 256 << 20;
/// The store's own threads are told to look after it so often.
const UPKEEP_PAUSE: Duration = Duration::from_millis(50);

/// Captures a state; writes it later, on any thread.
pub type StateWriter = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;

/// The node's keys, as the log's state machine. Lives on the log's thread.
#[derive(Debug)]
pub struct ReplicaMachine {
    shared: Arc<Shared>,
    executor: Executor,
    out: Output,
    lanes: HashMap<LaneName, Turn>,
    /// The log's time, Unix milliseconds.
    now_ms: u64,
    /// As recorded at the start.
    recorded: u64,
    upkeep_asked: Instant,
    failure: Option<String>,
}

impl ReplicaMachine {
    /// Errors: [`KvError`] of reading what was recorded.
    pub(crate) fn open(shared: Arc<Shared>) -> Result<Self, KvError> {
        let mut machine = Self {
            shared,
            executor: Executor::new(),
            out: Output::default(),
            lanes: HashMap::new(),
            now_ms: 0,
            recorded: 0,
            upkeep_asked: Instant::now(),
            failure: None,
        };
        machine.reload()?;
        machine.choose_incarnation()?;
        Ok(machine)
    }

    /// Reads what the store says of itself.
    fn reload(&mut self) -> Result<(), KvError> {
        let shared = Arc::clone(&self.shared);
        let mut found = Vec::new();
        let known = with_keyspace(&shared, |keyspace| keyspace.system(PROGRESS, &mut found))?;
        let turn = if known { Turn::decode(&found) } else { None };
        let Turn { incarnation: position, number: now_ms } = turn.unwrap_or_default();
        (self.recorded, self.now_ms) = (position, now_ms);
        self.lanes.clear();
        let Some(replication) = &shared.replication else { return Ok(()) };
        replication.agreed_ms.store(now_ms, Ordering::Relaxed);
        replication.set_applied(position);
        Ok(())
    }

    /// A clock that was set back must not bring an incarnation that was used.
    fn choose_incarnation(&mut self) -> Result<(), KvError> {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return Ok(()) };
        for lane in 0..shared.doors.len() {
            let lane = u16::try_from(lane).unwrap_or(u16::MAX);
            let last = self.last_turn(LaneName { node: replication.options.node, lane })?;
            replication.incarnation.fetch_max(last.incarnation + 1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The latest turn of a lane that took effect.
    fn last_turn(&mut self, lane: LaneName) -> Result<Turn, KvError> {
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

    /// Everything up to this position has taken effect here, durably; some of what lies behind it
    /// may have, and does no harm when it is applied again.
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.recorded
    }

    /// Applies the command of the log at `position` and writes its reply.
    pub fn apply(&mut self, position: u64, command: &[u8], reply: &mut Vec<u8>) {
        if self.failure.is_some() {
            return;
        }
        let Some(unit) = Unit::decode(command) else {
            tracing::error!(bytes = command.len(), "an entry of the log is no unit; skipped");
            return;
        };
        if let Err(reason) = self.apply_unit(position, &unit, reply) {
            tracing::error!(
                reason,
                "this replica cannot apply what the cluster agreed on, and stops"
            );
            if let Some(replication) = &self.shared.replication {
                replication.failed.store(true, Ordering::Relaxed);
            }
            self.failure = Some(reason);
            self.shared.shutdown_requested.wake();
        }
    }

    fn apply_unit(
        &mut self,
        position: u64,
        unit: &Unit<'_>,
        reply: &mut Vec<u8>,
    ) -> Result<(), String> {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return Err("no replication".into()) };
        // A leader's clock may lie behind that of the one before.
        self.now_ms = self.now_ms.max(unit.unix_ms);
        replication.agreed_ms.store(self.now_ms, Ordering::Relaxed);
        if unit.turn <= self.last_turn(unit.lane).map_err(|error| error.to_string())? {
            replication.counters.repeated.fetch_add(1, Ordering::Relaxed);
            reply.extend_from_slice(&REPEATED);
            return Ok(());
        }
        self.await_room(&shared)?;
        let (executor, out) = (&mut self.executor, &mut self.out);
        let mut requests = 0;
        let done = clock::at(self.now_ms, || {
            with_keyspace(&shared, |keyspace| {
                keyspace.begin_batch();
                for request in unit.requests() {
                    requests += 1;
                    if pair::is_pair(request) {
                        let mut applied = Ok(());
                        unit::put_part(reply, |reply| {
                            applied = pair::apply(request, position, keyspace, reply);
                        });
                        applied.map_err(|error| error.to_string())?;
                        continue;
                    }
                    out.clear();
                    out.set_limit(REPLY_LIMIT_BYTES);
                    if let Some(request) = Logged::decode(request) {
                        if !executor.execute_logged(&request, keyspace, out, shared.as_ref()) {
                            let error = String::from_utf8_lossy(out.as_bytes()).into_owned();
                            return Err(format!("the store refused an entry: {error}"));
                        }
                        bound(out, 0);
                    } else {
                        out.error(b"ERR a damaged request in the log");
                    }
                    unit::put_part(reply, |reply| reply.extend_from_slice(out.as_bytes()));
                }
                let recorded = keyspace.put_system(&unit.lane.key(), &unit.turn.encode());
                recorded.map_err(|error| error.to_string())?;
                keyspace.end_batch();
                if replication.options.ordered_commits {
                    keyspace.commit().map_err(|error| error.to_string())?;
                }
                Ok(())
            })
        });
        // With an error the batch stays open: no opening of the store will find its entries.
        done?;
        out.clear();
        self.lanes.insert(unit.lane, unit.turn);
        replication.counters.units.fetch_add(1, Ordering::Relaxed);
        replication.counters.requests.fetch_add(requests, Ordering::Relaxed);
        if unit.lane.node == replication.options.node
            && unit.turn.incarnation == replication.incarnation.load(Ordering::Relaxed)
        {
            replication.keep_reply(unit.lane.lane, unit.turn.number, reply);
        }
        Ok(())
    }

    /// Waits for the collector where the pool has no room for another batch. Without any in the
    /// end, deletions may still find some.
    fn await_room(&mut self, shared: &Shared) -> Result<(), String> {
        let started = Instant::now();
        while shared.store.is_short() && started.elapsed() < ROOM_PATIENCE {
            let upkeep = with_keyspace(shared, |keyspace| {
                let mut worked = false;
                for shard in keyspace.shards_mut() {
                    worked |= shard.maintain(UPKEEP_BYTES)?.did_work;
                }
                Ok::<_, KvError>(worked)
            });
            match upkeep {
                Ok(true) => {}
                // What is there is needed.
                Ok(false) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Persists what was applied, up to `position`.
    ///
    /// Errors: the replica stopped, or the store cannot persist.
    pub fn flush(&mut self, position: u64) -> io::Result<()> {
        if let Some(reason) = &self.failure {
            return Err(io::Error::other(reason.clone()));
        }
        let shared = Arc::clone(&self.shared);
        // Also behind entries without a unit: the log forgets what lies below a position that was
        // flushed, and a member that recorded an older one would miss it after a restart.
        self.record(&shared, position)?;
        if let Some(replication) = &shared.replication {
            replication.set_applied(position);
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

    fn record(&mut self, shared: &Shared, position: u64) -> io::Result<()> {
        let progress = Turn { incarnation: position, number: self.now_ms }.encode();
        let recorded = with_keyspace(shared, |keyspace| {
            keyspace.put_system(PROGRESS, &progress)?;
            keyspace.commit()
        });
        recorded.map_err(io::Error::other)
    }

    /// Whether what was flushed is there after a restart.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.shared.store.pool().report().durability != beeline_pmem::Durability::None
    }

    /// Captures the keys and what the machine knows, as of everything applied up to the latest
    /// flush; to be called behind one.
    ///
    /// Errors: another snapshot is being written; the store's.
    pub fn snapshot(&mut self) -> io::Result<StateWriter> {
        let shared = Arc::clone(&self.shared);
        let position = shared.replication.as_ref().map_or(0, Replication::applied);
        self.record(&shared, position)?;
        let snapshot = with_keyspace(&shared, |keyspace| keyspace.begin_snapshot())
            .map_err(io::Error::other)?;
        Ok(Box::new(move |out| snapshot.write_to(out).map(|_| ())))
    }

    /// Replaces the keys by those of a snapshot, which covers everything up to `position`.
    ///
    /// Errors: the snapshot's, the store's. The store is then empty when it is opened next.
    pub fn restore(&mut self, position: u64, state: &mut dyn Read) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let path = shared.data_directory.join("incoming.bee");
        let mut file = File::create(&path)?;
        io::copy(state, &mut file)?;
        drop(file);
        beeline_kv::check_snapshot(&path).map_err(io::Error::other)?;
        if let Some(replication) = &shared.replication {
            replication.loading.store(true, Ordering::Relaxed);
        }
        let replaced = replace_by_snapshot(&path, &shared.store, &shared.shards);
        let _ = std::fs::remove_file(&path);
        let report = replaced.map_err(io::Error::other)?;
        self.reload().map_err(io::Error::other)?;
        self.record(&shared, position)?;
        if let Some(replication) = &shared.replication {
            replication.set_applied(position);
            replication.loading.store(false, Ordering::Relaxed);
        }
        tracing::info!(position, records = report.records, "a snapshot was installed");
        Ok(())
    }
}

impl Drop for ReplicaMachine {
    /// The log has ended, perhaps by itself: nobody may wait for it any more, or be told by this
    /// member who leads.
    fn drop(&mut self) {
        if let Some(replication) = &self.shared.replication {
            replication.failed.store(true, Ordering::Relaxed);
        }
        self.shared.shutdown_requested.wake();
    }
}

/// Runs `body` with every shard locked; writes go to the first one's log.
fn with_keyspace<R>(shared: &Shared, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let all: Vec<usize> = (0..shared.shards.len()).collect();
    let mut guards = shared.lock_shards(&all);
    let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
    body(&mut Keyspace::many(shards, 0))
}
