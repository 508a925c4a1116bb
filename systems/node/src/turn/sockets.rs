//! Connections: adopting them, reading and executing their requests, sending their replies.
//!
//! ```text
//!   adopt ─► serve_ready ─► execute_ready ─► execute_one ─┬─► here: settle
//!                 ▲               ▲                       ├─► forward (one foreign shard)
//!                 │             resume                    └─► defer   (several shards, the node)
//!               poller ◄────────── flush ◄── touched ◄────────┘
//! ```
//!
//! Invariants: a connection is out of the table while it is worked on, and in `touched` once it was;
//! `flush` alone writes to sockets and changes what the poller watches for, without the shard's
//! lock; of what a client sends or leaves unread no more is kept than the limits say.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use beeline_kv::{Keyspace, Shard};
use beeline_os::poller::{Interest, Readiness};

use super::ShardThread;
use crate::config::PipelineOrder;
use crate::connection::{Connection, ELSEWHERE, Hold, Life, ReadOutcome};
use crate::stats::count;
use crate::wire::{
    After, Answer, Opened, Output, Refusal, Route, Scope, Step, WirePlan, WireSession,
};

/// Requests of one connection executed a turn; the next connection is due then.
pub(super) const REQUESTS_PER_TURN: usize = 256;
/// Received bytes that may wait while complete requests are still due.
const READ_AHEAD_BYTES: usize = 16 << 10;

/// What every client's socket needs. A peer that vanished without a word is noticed after some
/// ten minutes, as with Redis.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(300))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(100))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

/// Replaces a reply that begins at `start` and passed the limit by an error.
pub(super) fn bound(session: &mut dyn WireSession, output: &mut Output, start: usize) {
    if output.is_over_limit() {
        output.truncate(start);
        session.refuse(&Refusal::ReplyTooLarge, output);
    }
}

/// Where requests run: what is locked now.
pub(super) enum Reach<'r, 'k> {
    /// The own shard, for the turn.
    Own(&'r mut Shard),
    /// These shards, the own one among them, for commands over several.
    Several {
        keyspace: &'r mut Keyspace<'k>,
        /// Ascending.
        shards: &'r [usize],
        /// All of the store's.
        whole: bool,
        /// Something that may change data was executed.
        wrote: &'r mut bool,
    },
}

impl Reach<'_, '_> {
    /// Whether a request of this route can run.
    fn covers(&self, route: &Route, own: usize) -> bool {
        match (self, route) {
            (_, Route::Here) => true,
            (Self::Own(_), Route::Shard(owner)) => *owner == own,
            (Self::Own(_), Route::Shards(_) | Route::All) => false,
            (Self::Several { shards, .. }, Route::Shard(owner)) => shards.contains(owner),
            (Self::Several { shards, .. }, Route::Shards(set)) => {
                set.iter().all(|shard| shards.contains(&shard))
            }
            (Self::Several { whole, .. }, Route::All) => *whole,
        }
    }

    /// Tells the shards what the current request of a pipeline and the next ones will ask for;
    /// returns how many they heard of.
    fn expect(&mut self, session: &mut dyn WireSession) -> usize {
        match self {
            Self::Own(shard) => session.expect(&mut Keyspace::single(shard)),
            Self::Several { keyspace, .. } => session.expect(keyspace),
        }
    }
}

impl ShardThread {
    pub(super) fn connection(&mut self, slot: u32) -> Option<&mut Box<Connection>> {
        self.connections.get_mut(slot as usize)?.as_mut()
    }

    /// Takes a connection out of the table for the time of `with`.
    pub(super) fn with_connection(
        &mut self,
        slot: u32,
        with: impl FnOnce(&mut Self, &mut Connection),
    ) {
        let taken = self.connections.get_mut(slot as usize).and_then(Option::take);
        if let Some(mut connection) = taken {
            with(self, &mut connection);
            self.connections[slot as usize] = Some(connection);
            self.touched.push(slot);
        }
    }

    pub(super) fn adopt(&mut self, wire: usize, stream: TcpStream) {
        count(&self.counters().connections_received, 1);
        if let Err(error) = prepare(&stream) {
            tracing::warn!(%error, "cannot prepare a client's socket");
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let address = |address: std::io::Result<std::net::SocketAddr>| {
            address.map(|address| address.to_string()).unwrap_or_default()
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            u32::try_from(self.connections.len() - 1).unwrap_or(u32::MAX)
        });
        self.generation = self.generation.wrapping_add(1);
        let opened = Opened {
            id: self.shared.next_client.fetch_add(1, Ordering::Relaxed),
            address: address(stream.peer_addr()),
            local_address: address(stream.local_addr()),
            descriptor: stream.as_raw_fd(),
            connected_us: self.now_ms * 1000,
        };
        if let Err(error) = self.poller.add(&stream, u64::from(slot), Interest::READ) {
            tracing::warn!(%error, "cannot watch a client's socket; see fs.epoll.max_user_watches");
            self.free.push(slot);
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let about = (opened.id, opened.address.clone());
        let session = (wire, self.workers[wire].open(opened));
        let connection =
            Connection::new(stream, slot, self.generation, about, session, self.now_ns);
        self.connections[slot as usize] = Some(Box::new(connection));
    }

    pub(super) fn serve_ready(&mut self, slot: u32, readiness: &Readiness, shard: &mut Shard) {
        self.with_connection(slot, |thread, connection| {
            let waiting =
                connection.needs_several || connection.hold != Hold::No || connection.again;
            // What was read and not executed stays bounded: the socket can wait.
            let ahead = connection.resume && connection.session.pending_bytes() >= READ_AHEAD_BYTES;
            let wanted = connection.life == Life::Open && !thread.is_winding_down();
            if readiness.readable && wanted && !waiting && !ahead {
                let before = connection.session.pending_bytes();
                match connection.read() {
                    ReadOutcome::Bytes => {
                        let read = connection.session.pending_bytes().saturating_sub(before);
                        count(&thread.counters().input_bytes, read as u64);
                        connection.last_active_ns = thread.now_ns;
                        connection.fresh = false;
                        connection.unpublished = true;
                        thread.unpublished = true;
                        thread.untidy = true;
                        let reach = &mut Reach::Own(shard);
                        thread.execute_ready(connection, reach, REQUESTS_PER_TURN);
                    }
                    ReadOutcome::Empty => {}
                    ReadOutcome::End => connection.life = Life::HalfClosed,
                }
            }
            if readiness.hung_up {
                connection.life = Life::Dead;
            }
        });
    }

    /// Executes the complete requests of a connection, up to `share` of them; returns how many
    /// are left of the share.
    pub(super) fn execute_ready(
        &mut self,
        connection: &mut Connection,
        reach: &mut Reach<'_, '_>,
        share: usize,
    ) -> usize {
        let pause_bytes = self.output_pause_bytes();
        let mut expected = 0;
        for left in (0..share).rev() {
            if !matches!(connection.life, Life::Open | Life::HalfClosed)
                || connection.needs_several
                || connection.hold != Hold::No
            {
                return left + 1;
            }
            if connection.is_full(pause_bytes) {
                // Goes on when a reply arrives, or when the peer has read enough.
                connection.backed_up = true;
                return left + 1;
            }
            if std::mem::take(&mut connection.again) {
                self.execute_one(connection, reach);
                continue;
            }
            match connection.session.advance(&mut self.scratch) {
                Step::Request => {
                    if expected == 0 && connection.session.pending_bytes() > 0 {
                        expected = reach.expect(connection.session.as_mut());
                    }
                    expected = expected.saturating_sub(1);
                    self.execute_one(connection, reach);
                }
                Step::Incomplete => return left + 1,
                Step::Broken => {
                    count(&self.counters().protocol_errors, 1);
                    connection.append(self.scratch.as_bytes());
                    self.scratch.clear();
                    connection.life = Life::Draining;
                    return left;
                }
            }
        }
        self.resume_later(connection);
        0
    }

    fn execute_one(&mut self, connection: &mut Connection, reach: &mut Reach<'_, '_>) {
        let in_order = connection.is_in_order();
        let plan = connection.session.plan(self.shared.store.as_ref());
        if self.is_paused(&plan) {
            connection.hold = Hold::Paused;
            self.held_back.push(connection.slot);
            return;
        }
        if self.lane.is_some() && self.consult_log(connection, &plan) {
            return;
        }
        let way = connection.way();
        let strict = self.shared.settings.pipeline_order == PipelineOrder::Strict;
        if plan.scope == Scope::Elsewhere {
            // Each place elsewhere has a queue of its own: what is under way may be overtaken, and so may
            // what waits for its commit.
            if strict && (!in_order || connection.is_resting()) {
                connection.hold = Hold::Order;
                return;
            }
            count(&self.counters().commands, 1);
            let origin = connection.keep_place_at(ELSEWHERE);
            let answer = Answer::new(Arc::clone(&self.shared), self.index, origin);
            connection.session.submit(answer);
            return;
        }
        let Connection { session, output, .. } = &mut *connection;
        let route = &plan.route;
        let waits = match route {
            Route::Here => false,
            _ if in_order || !strict => false,
            // Behind the others, on their way.
            Route::Shard(owner) => way != Some(*owner) || !plan.portable,
            Route::Shards(_) | Route::All => true,
        };
        if waits {
            // Runs when the last reply has come: what came before took effect and is durable then.
            connection.hold = Hold::Order;
            return;
        }
        if let &Route::Shard(owner) = route
            && strict
            && !in_order
        {
            self.forward(connection, owner);
            return;
        }
        // The node's answers may take a while.
        let of_node = plan.scope != Scope::Keys;
        if of_node || !reach.covers(route, self.index) {
            // With more behind it a request goes to its shard's lock rather than to its thread:
            // what follows, whichever of the two shards it needs, runs there in order.
            let pipelined = strict && session.pending_bytes() > 0;
            match route {
                &Route::Shard(owner) if plan.portable && !pipelined => {
                    if strict && connection.is_resting() {
                        // What came before is to be durable before this takes effect elsewhere.
                        connection.hold = Hold::Order;
                    } else {
                        self.forward(connection, owner);
                    }
                }
                _ => self.defer(connection),
            }
            return;
        }
        count(&self.counters().commands, 1);
        let output = if in_order { output } else { &mut self.scratch };
        let before = output.len();
        output.set_limit(self.output_limit_bytes);
        let shared = self.shared.as_ref();
        let mut commit = 0;
        let after = match reach {
            Reach::Own(shard) => {
                shard.take_rests();
                let after = session.execute(&mut Keyspace::single(shard), output);
                commit = shard.take_rests();
                after
            }
            Reach::Several { keyspace, wrote, .. } => {
                let counters = &shared.counters[self.index];
                let elsewhere = !matches!(route, Route::Here);
                count(&counters.several_shard_commands, u64::from(elsewhere));
                **wrote |= plan.writes;
                session.execute(keyspace, output)
            }
        };
        bound(session.as_mut(), output, before);
        // The turn of a cluster's member waits for its commit.
        if commit != 0 && self.lane.is_none() {
            self.rest(connection, commit, before);
        }
        self.settle(connection, after, in_order);
    }

    /// Leaves the connection's current request for later, without the own lock.
    pub(super) fn defer(&mut self, connection: &mut Connection) {
        connection.needs_several = true;
        if connection.is_in_order() {
            self.deferred.push_back(connection.slot);
        }
    }

    /// What follows an executed request; its reply is in `scratch` unless it was `in_order`.
    pub(super) fn settle(&mut self, connection: &mut Connection, after: After, in_order: bool) {
        if !in_order {
            connection.append(self.scratch.as_bytes());
            self.scratch.clear();
        }
        match after {
            After::Continue => {}
            After::Close => connection.life = Life::Draining,
            After::Hangup => connection.life = Life::Dead,
        }
    }

    /// Whether CLIENT PAUSE asks to hold a request back.
    pub(super) fn is_paused(&self, plan: &WirePlan) -> bool {
        let paused = self.shared.pause.active(|| self.now_ns);
        paused.is_some_and(|(_, all)| all || plan.writes)
    }

    pub(super) fn resume_later(&mut self, connection: &mut Connection) {
        if !connection.resume {
            connection.resume = true;
            self.resume.push_back(connection.slot);
        }
    }

    /// Unread replies at which a client's requests wait.
    pub(super) fn output_pause_bytes(&self) -> usize {
        self.output_limit_bytes / 8
    }

    pub(super) fn flush_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        for slot in touched.drain(..) {
            self.flush(slot);
        }
        self.touched = touched;
    }

    pub(super) fn flush(&mut self, slot: u32) {
        let pause_bytes = self.output_pause_bytes();
        let takes_in = !self.is_winding_down();
        let Some(connection) = self.connections.get_mut(slot as usize).and_then(Option::as_mut)
        else {
            return;
        };
        let before = connection.output.len();
        if connection.life != Life::Dead && before > 0 {
            match connection.write() {
                Ok(done) => {
                    if done && connection.life == Life::Draining && connection.is_in_order() {
                        connection.life = Life::Dead;
                    }
                }
                Err(_) => connection.life = Life::Dead,
            }
        } else if connection.life == Life::Draining && connection.is_in_order() {
            connection.life = Life::Dead;
        }
        let after = connection.output.len();
        let counters = &self.shared.counters[self.index];
        count(&counters.output_bytes, before.saturating_sub(after) as u64);
        if connection.passes(self.output_limit_bytes, pause_bytes) {
            count(&counters.output_limit_disconnections, 1);
            tracing::warn!(
                client = connection.id,
                address = connection.address,
                unread_bytes = connection.owed_bytes(),
                limit_bytes = self.output_limit_bytes,
                "closing a client that does not read its replies (client-output-buffer-limit)"
            );
            connection.life = Life::Dead;
        }
        if connection.backed_up && !connection.is_full(pause_bytes) {
            connection.backed_up = false;
            if !connection.resume {
                connection.resume = true;
                self.resume.push_back(slot);
            }
        }
        let answered = connection.is_in_order() && after == 0 && !connection.has_request();
        if connection.life == Life::HalfClosed && answered {
            connection.life = Life::Dead;
        }
        if connection.life == Life::Dead {
            self.remove(slot);
            return;
        }
        let mut interest = connection.wanted_interest(pause_bytes);
        interest.readable &= takes_in;
        if interest != connection.interest {
            connection.interest = interest;
            if self.poller.modify(&connection.stream, u64::from(slot), interest).is_err() {
                self.remove(slot);
            }
        }
    }

    pub(super) fn remove(&mut self, slot: u32) {
        if let Some(connection) = self.connections[slot as usize].take() {
            let _ = self.poller.remove(&connection.stream);
            // Not shown any more once it does not count any more.
            drop(connection);
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            self.free.push(slot);
        }
    }
}
