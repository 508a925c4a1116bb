//! Where a replicated node's loop asks the log: which requests go through it, which wait for it.
//!
//! ```text
//!  execute_one ── consult_log ─┬─ nothing to ask, or a barrier has passed: as in any node
//!                              ├─ write: into the lane, its reply has a place
//!                              └─ read: held back until a barrier has passed
//!  end of the turn ── talk_to_log ── unit, barrier ──► log, or courier ──► Delivery::Log
//! ```
//!
//! Invariants: writes of one connection go into its shard's lane in the order of its requests, and
//! a lane keeps that order; a read waits until the writes before it in its pipeline were applied; a
//! barrier is asked for when the reads it serves have arrived; each request is answered within the
//! time it may take, whether the log answers or not.

use std::sync::Arc;

use beeline_kv::Shard;
use beeline_kv::wire::ReplyStatus;
use beeline_replicated_service::lane::Late;
use beeline_replicated_service::unit;

use super::{HOUSEKEEPING_NS, ShardThread, one_sided};
use crate::connection::{Connection, Hold};
use crate::parcel::{Delivery, LogNews, Origin};
use crate::replicated::Replication;
use crate::replicated::courier::Errand;
use crate::replicated::lane::{Asker, Failure, Reader, line_of};
use crate::replicated::log::{Done, Log, Order, Refused};
use crate::replicated::machine::BATCH_SHARE;
use crate::shared::Shared;
use crate::stats::count;
use crate::wire::{Args, Effect, Logging, Refusal, WirePlan};

/// What a write is told that comes through a wire which the log does not carry.
const MEMBER_SHORT: &str = "OOM a member of this cluster is about to have no room: INFO replication at \
                            the leader names it; delete keys, give it more capacity, or remove it";
/// A unit or a barrier that is under way has so much longer: its courier knows better what became of it.
const GRACE_NS: u64 = 250_000_000;
const NOT_LOGGED: &str =
    "ERR this door takes no writes in a replicated node yet: use a node by itself";

/// Whether a deferred request waits for the log's sake.
pub(super) fn asks(connection: &Connection, plan: &WirePlan) -> bool {
    match plan.effect {
        Effect::None => false,
        Effect::Write => true,
        Effect::Read => !connection.fresh && !connection.session.reads_stale(),
    }
}

impl ShardThread {
    /// Whether the connection's current request was taken over: by the log, or to wait.
    pub(super) fn consult_log(&mut self, connection: &mut Connection, plan: &WirePlan) -> bool {
        let shared = Arc::clone(&self.shared);
        let (Some(replication), Some(_)) = (&shared.replication, &self.lane) else { return false };
        let logging = connection.session.logging();
        if let Some(trusted) = logging.and_then(|logging| logging.member) {
            self.serve_member(&shared, replication, connection, trusted);
            return true;
        }
        if let Some(name) = logging.and_then(|logging| logging.unlogged) {
            self.refuse(connection, &Refusal::Unlogged(name));
            return true;
        }
        let effect = plan.effect;
        if effect == Effect::None {
            return false;
        }
        let stale = effect == Effect::Read && connection.session.reads_stale();
        if let Some(obstacle) = replication.obstacle(stale) {
            match obstacle {
                Failure::Loading => self.refuse(connection, &Refusal::Loading),
                obstacle => self.refuse(connection, &Refusal::Line(&line_of(&obstacle))),
            }
            return true;
        }
        match (effect, logging) {
            (Effect::Write, None) => {
                self.refuse(connection, &Refusal::Line(NOT_LOGGED));
                true
            }
            (Effect::Write, Some(logging)) => {
                self.write_to_log(&shared, replication, connection, logging)
            }
            _ => self.await_barrier(connection),
        }
    }

    /// Refuses the current request here.
    fn refuse(&mut self, connection: &mut Connection, refusal: &Refusal<'_>) {
        count(&self.counters().commands, 1);
        connection.session.abandon_current();
        connection.refuse(refusal, &mut self.scratch);
    }

    /// A read waits for the connection's writes, then for a barrier. `false`: it can run.
    fn await_barrier(&mut self, connection: &mut Connection) -> bool {
        if connection.only_writes && !connection.is_in_order() {
            self.defer(connection);
            return true;
        }
        // A snapshot that began to replace the keys since the barrier passed: what is there now is a
        // part. It takes this shard's lock, which is held here, only after it said so.
        connection.fresh &= !self.shared.is_loading();
        if connection.fresh || connection.session.reads_stale() {
            connection.only_writes = false;
            return false;
        }
        connection.hold = Hold::Log;
        if let Some(lane) = &mut self.lane {
            lane.await_barrier(Reader::Redis(connection.slot, connection.generation));
        }
        true
    }

    fn write_to_log(
        &mut self,
        shared: &Shared,
        replication: &Replication,
        connection: &mut Connection,
        logging: Logging,
    ) -> bool {
        if !connection.only_writes && !connection.is_in_order() {
            // Reads of other shards are still under way.
            self.defer(connection);
            return true;
        }
        if logging.needs_room && shared.store.is_short() {
            self.refuse(connection, &Refusal::NoRoom);
            return true;
        }
        if logging.needs_room && replication.is_short() {
            self.refuse(connection, &Refusal::Line(MEMBER_SHORT));
            return true;
        }
        let limit = self.command_limit(replication);
        count(&self.counters().commands, 1);
        let origin = connection.keep_place();
        connection.only_writes = true;
        // The leader may answer before the write is applied here.
        connection.fresh = false;
        let Some(lane) = &mut self.lane else { return false };
        let asker = Asker::Redis(origin);
        let session = &mut connection.session;
        let known = self.command_limit;
        let most = || most_in_pieces(known, shared, replication);
        let pushed = lane.push_or_cut(asker, logging.alone, limit, most, |out| session.log(out));
        if let Err((_, failure)) = pushed {
            let line = line_of(&failure);
            let refusal = match failure {
                // What the log takes is not known yet: it may take this.
                Failure::TooLarge { .. } if self.command_limit == 0 => Refusal::NotReady,
                _ => Refusal::Line(&line),
            };
            connection.session.refuse(&refusal, &mut self.scratch);
            let pause_bytes = self.output_pause_bytes();
            connection.fill(origin, self.scratch.as_bytes(), pause_bytes);
            self.scratch.clear();
        }
        true
    }

    /// A command whose pieces would fill what little room is left is given up between two of them.
    fn give_up_pieces(&mut self, shared: &Shared, replication: &Replication) {
        let is_cutting = self.lane.as_ref().is_some_and(|lane| lane.is_cutting());
        if !is_cutting || !(shared.store.is_short() || replication.is_short()) {
            return;
        }
        let askers = self.lane.as_mut().map(|lane| lane.give_up()).unwrap_or_default();
        for asker in askers {
            match asker {
                Asker::Redis(origin) => {
                    self.deliver_refusal(origin, &Refusal::Line(MEMBER_SHORT));
                }
                Asker::OneSided(asker) => self.fabric.wrote(asker, Err(ReplyStatus::PoolFull)),
            }
        }
    }

    pub(super) fn command_limit(&mut self, replication: &Replication) -> usize {
        if self.command_limit == 0 {
            self.command_limit = replication.state().map_or(0, |state| state.command_limit_bytes);
        }
        // Before the log is there: what any log takes.
        if self.command_limit == 0 { 4096 } else { self.command_limit }
    }

    /// Lets deferred requests run that wait for the log's sake.
    pub(super) fn release(&mut self, slot: u32) {
        self.with_connection(slot, |thread, connection| {
            connection.needs_several = false;
            connection.again = true;
            thread.resume_later(connection);
        });
    }

    /// Proposes what collected, and asks for a barrier if anybody waits for one.
    pub(super) fn talk_to_log(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return };
        self.give_up_pieces(&shared, replication);
        let index = self.index;
        let Some(lane) = &mut self.lane else { return };
        if let Some((number, unit)) = lane.next_unit(replication.incarnation()) {
            propose(&shared, replication, index, number, unit);
        }
        if let Some(ticket) = lane.next_barrier() {
            ask_barrier(&shared, replication, index, ticket);
        }
    }

    /// Applies what the log's thread offers to this shard.
    pub(super) fn apply_offered(&mut self, shard: &mut Shard) {
        let shared = Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return };
        self.upkeep_wanted |= replication.meeting.apply(&shared, shard);
    }

    /// Whether the log's thread offers something.
    pub(super) fn is_offered_work(&self) -> bool {
        let replication = self.shared.replication.as_ref();
        replication.is_some_and(|replication| replication.meeting.has_work(self.index))
    }

    /// Answers requests whose time is over, while the log is silent: a leader that cannot commit, or
    /// has no room to apply what is committed, would keep them for as long.
    pub(super) fn answer_late(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (Some(replication), Some(lane)) = (&shared.replication, &mut self.lane) else { return };
        lane.note_time(self.now_ns);
        if self.now_ns < self.late_ns {
            return;
        }
        self.late_ns = self.now_ns + HOUSEKEEPING_NS;
        let limit = replication.options.request_timeout.as_nanos();
        let late = lane.late(u64::try_from(limit).unwrap_or(u64::MAX), GRACE_NS);
        let Late { undone, unknown, readers } = late;
        for (askers, failure) in [(undone, Failure::NotTaken), (unknown, Failure::TimedOut)] {
            for asker in askers {
                self.refuse_asker(asker, &failure);
            }
        }
        for reader in readers {
            self.tell_reader(reader, &Err(Failure::TimedOut));
        }
    }

    fn refuse_asker(&mut self, asker: Asker, failure: &Failure) {
        match asker {
            Asker::Redis(origin) => self.deliver_refusal(origin, &Refusal::Line(&line_of(failure))),
            Asker::OneSided(asker) => self.fabric.wrote(asker, one_sided::outcome(Err(failure))),
        }
    }

    fn tell_reader(&mut self, reader: Reader, outcome: &Result<(), Failure>) {
        match reader {
            Reader::Redis(slot, generation) => self.let_through(slot, generation, outcome),
            Reader::OneSided(reader) => {
                let outcome = outcome.as_ref().copied().map_err(|_| ReplyStatus::Unavailable);
                self.fabric.passed(reader, outcome);
            }
        }
    }

    /// What came of a unit or a barrier.
    pub(super) fn on_log_news(&mut self, news: LogNews) {
        match news {
            LogNews::Unit { number, outcome } => {
                let Some(lane) = &mut self.lane else { return };
                let askers = match &outcome {
                    // A piece whose reply was lost took effect: the next one follows.
                    Ok(_) | Err(Failure::ReplyLost) => lane.landed(number),
                    Err(_) => lane.failed(number),
                };
                let (replies, failure) = match outcome {
                    Ok(replies) => (replies, None),
                    Err(failure) => (Vec::new(), Some(failure)),
                };
                let mut replies = unit::parts(&replies);
                let instead = failure.unwrap_or(Failure::ReplyLost);
                for asker in askers {
                    let reply = replies.next();
                    match (asker, reply) {
                        // Its time was over.
                        (None, _) => {}
                        (Some(Asker::Redis(origin)), Some(reply)) => {
                            self.deliver_reply(origin, reply);
                        }
                        (Some(Asker::OneSided(asker)), Some(reply)) => {
                            self.fabric.wrote(asker, one_sided::outcome(Ok(reply)));
                        }
                        (Some(asker), None) => self.refuse_asker(asker, &instead),
                    }
                }
            }
            LogNews::Barrier { ticket, outcome } => {
                let Some(lane) = &mut self.lane else { return };
                for reader in lane.passed(ticket) {
                    self.tell_reader(reader, &outcome);
                }
            }
            LogNews::Answer { origin, reply } => self.deliver_reply(origin, &reply),
        }
    }

    fn let_through(&mut self, slot: u32, generation: u32, outcome: &Result<(), Failure>) {
        self.with_connection(slot, |thread, connection| {
            if connection.generation != generation || connection.hold != Hold::Log {
                return;
            }
            connection.hold = Hold::No;
            match outcome {
                Ok(()) => {
                    connection.fresh = true;
                    connection.again = true;
                }
                Err(failure) => thread.refuse(connection, &Refusal::Line(&line_of(failure))),
            }
            thread.resume_later(connection);
        });
    }

    // ---- what an operator's program asks ----

    /// A request about the log of this member.
    fn serve_member(
        &mut self,
        shared: &Arc<Shared>,
        replication: &Replication,
        connection: &mut Connection,
        trusted: bool,
    ) {
        count(&self.counters().commands, 1);
        let origin = connection.keep_place();
        connection.only_writes = false;
        let answer = Answer { shared: Arc::clone(shared), shard: self.index, origin };
        let (_, args) = connection.session.carry();
        if !trusted {
            return answer.send(b"-NOAUTH Authentication required.\r\n".to_vec());
        }
        let cluster = format!("{:016x}", replication.options.cluster);
        if args.get(1) != cluster.as_bytes() {
            let found = String::from_utf8_lossy(args.get(1)).into_owned();
            let line = format!("-ERR wrong cluster: this member is of {cluster}, not {found}\r\n");
            return answer.send(line.into_bytes());
        }
        let Some(log) = replication.log() else {
            return answer.send(b"-NOTNOW the log is not open yet\r\n".to_vec());
        };
        if args.is(2, "status") && args.len() == 3 {
            return answer.send(bulk(shared.replication_lines().as_bytes()));
        }
        match order(args) {
            Some(order) => log.administer(order, answer.done(|()| b"+OK\r\n".to_vec())),
            None => answer.send(b"-ERR unknown request of a member\r\n".to_vec()),
        }
    }
}

fn order(args: Args<'_>) -> Option<Order> {
    let text = |index: usize| String::from_utf8(args.get(index).to_vec()).ok();
    let id = || text(3)?.parse::<u16>().ok();
    if args.is(2, "join") && args.len() == 6 {
        Some(Order::Join { id: id()?, log_address: text(4)?, resp_address: text(5)? })
    } else if args.is(2, "leave") && args.len() == 4 {
        Some(Order::Leave { id: id()? })
    } else if args.is(2, "transfer") && args.len() == 4 {
        Some(Order::Transfer { id: id()? })
    } else if args.is(2, "snapshot") && args.len() == 3 {
        Some(Order::Snapshot)
    } else {
        None
    }
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    let mut reply = format!("${}\r\n", bytes.len()).into_bytes();
    reply.extend_from_slice(bytes);
    reply.extend_from_slice(b"\r\n");
    reply
}

/// Where the answer goes, from whatever thread.
struct Answer {
    shared: Arc<Shared>,
    shard: usize,
    origin: Origin,
}

impl Answer {
    fn send(self, reply: Vec<u8>) {
        let news = LogNews::Answer { origin: self.origin, reply };
        self.shared.doors[self.shard].deliver(Delivery::Log(news));
    }

    fn done<T: 'static>(self, write: impl FnOnce(T) -> Vec<u8> + Send + 'static) -> Done<T> {
        Box::new(move |outcome| {
            self.send(match outcome {
                Ok(value) => write(value),
                Err(refused) => {
                    let code = match &refused {
                        Refused::NotLeader => "NOTLEADER",
                        refused if refused.is_retryable() => "NOTNOW",
                        _ => "ERR",
                    };
                    format!("-{code} {refused}\r\n").into_bytes()
                }
            });
        })
    }
}

/// Longest command that may travel in pieces now; 0: none. What it stores has to fit one batch; and
/// pieces need room where they are kept, even those of a deletion.
fn most_in_pieces(command_limit: usize, shared: &Shared, replication: &Replication) -> usize {
    // Before the log is there no thread knows what an entry takes.
    if command_limit == 0 || shared.store.is_short() || replication.is_short() {
        return 0;
    }
    let most_bytes = u64::from(shared.store.pool().segment_bytes()) / BATCH_SHARE;
    usize::try_from(most_bytes).unwrap_or(usize::MAX)
}

/// Proposes a unit here, or leaves it to the courier.
fn propose(
    shared: &Arc<Shared>,
    replication: &Replication,
    lane: usize,
    number: u64,
    unit: Vec<u8>,
) {
    let leads = |log: &&Arc<dyn Log>| replication.is_settled() && log.leads();
    let Some(log) = replication.log().filter(leads) else {
        return replication.send(lane, Errand::Unit { number, unit, proposed: false });
    };
    let mut command = unit.clone();
    replication.stamp(&mut command);
    let back = Arc::clone(shared);
    log.propose(
        command,
        Box::new(move |outcome| {
            let Some(replication) = &back.replication else { return };
            let outcome = match outcome {
                Ok(reply) if reply != unit::REPEATED => Ok(reply),
                Err(Refused::TooLarge { bytes, limit }) => Err(Failure::TooLarge { bytes, limit }),
                // The courier finds out, or tries again.
                outcome => {
                    let proposed = matches!(outcome, Ok(_) | Err(Refused::Lost | Refused::Stopped));
                    return replication.send(lane, Errand::Unit { number, unit, proposed });
                }
            };
            back.doors[lane].deliver(Delivery::Log(LogNews::Unit { number, outcome }));
        }),
    );
}

/// Asks for a barrier here, or leaves it to the courier.
fn ask_barrier(shared: &Arc<Shared>, replication: &Replication, lane: usize, ticket: u64) {
    let Some(log) = replication.log().filter(|log| log.leads()) else {
        return replication.send(lane, Errand::Barrier { ticket });
    };
    let back = Arc::clone(shared);
    log.barrier(Box::new(move |outcome| {
        let Some(replication) = &back.replication else { return };
        if outcome.is_err() {
            return replication.send(lane, Errand::Barrier { ticket });
        }
        let news = LogNews::Barrier { ticket, outcome: Ok(()) };
        back.doors[lane].deliver(Delivery::Log(news));
    }));
}
