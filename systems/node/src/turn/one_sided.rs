//! One-sided clients of a replicated node: how their writes get into the shard's lane, and what
//! comes back.
//!
//! A put shares its unit with the Redis commands of its time, and a get its barrier.

use beeline_kv::DATABASES;
use beeline_kv::wire::ReplyStatus;
use beeline_kv_server::{AgreedWrite, Agreement, Ticket, Wrote};
use beeline_replicated_service::unit;

use super::ShardThread;
use crate::replicated::Replication;
use crate::replicated::lane::{Asker, Failure, Lane, OneSided, Reader};
use crate::replicated::pair::{self, Said};
use crate::shared::Shared;

/// What a put takes of a command of the log besides key and value.
const AROUND_BYTES: usize = unit::HEAD_BYTES + 4 + pair::HEAD_BYTES;
/// What the clients' protocol counts besides key and value.
const COUNTED_BYTES: usize = 48;

/// The way of one server's clients into the lane.
pub(crate) struct Way<'a> {
    lane: &'a mut Lane,
    replication: &'a Replication,
    shared: &'a Shared,
    limit: usize,
    /// The log is open, and said so.
    limit_known: bool,
    /// Whose clients.
    pub server: u64,
}

impl Agreement for Way<'_> {
    fn write(&mut self, ticket: Ticket, write: AgreedWrite<'_>) -> Result<(), ReplyStatus> {
        if self.replication.obstacle(false).is_some() {
            return Err(ReplyStatus::Unavailable);
        }
        if u16::from(write.database) >= DATABASES {
            return Err(ReplyStatus::Malformed);
        }
        let is_short = || self.shared.store.is_short() || self.replication.is_short();
        if write.value.is_some() && is_short() {
            return Err(ReplyStatus::PoolFull);
        }
        let asker = Asker::OneSided(OneSided { server: self.server, ticket });
        let too_large =
            if self.limit_known { ReplyStatus::TooLarge } else { ReplyStatus::Unavailable };
        self.lane
            .push(asker, false, self.limit, |out| pair::put(&write, out))
            .map_err(|_| too_large)
    }

    fn read(&mut self, ticket: Ticket) -> Result<(), ReplyStatus> {
        if self.replication.obstacle(false).is_some() {
            return Err(ReplyStatus::Unavailable);
        }
        self.lane.await_barrier(Reader::OneSided(OneSided { server: self.server, ticket }));
        Ok(())
    }
}

/// What a client whose write failed is told.
fn status_of(failure: &Failure) -> ReplyStatus {
    match failure {
        Failure::NoLeader | Failure::NotTaken | Failure::Loading => ReplyStatus::Unavailable,
        Failure::TooLarge { .. } => ReplyStatus::TooLarge,
        // It may have been proposed.
        _ => ReplyStatus::Undecided,
    }
}

/// The outcome of a write, from its part of a unit's reply.
pub(super) fn outcome(reply: Result<&[u8], &Failure>) -> Result<Wrote, ReplyStatus> {
    match reply {
        Err(failure) => Err(status_of(failure)),
        Ok(reply) => match pair::said(reply) {
            Said::Done(wrote) => Ok(wrote),
            Said::TooLong => Err(ReplyStatus::TooLarge),
            Said::Damaged => Err(ReplyStatus::Malformed),
        },
    }
}

impl ShardThread {
    /// Bytes of a put, as its client counts them, that go into a command of the log.
    ///
    /// Errors: the log is not open yet.
    pub(super) fn one_sided_limit(&mut self) -> Result<Option<u32>, String> {
        let shared = std::sync::Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return Ok(None) };
        if replication.log().is_none() {
            return Err("the node's log is not open yet; try again".to_owned());
        }
        let limit = self.command_limit(replication).saturating_sub(AROUND_BYTES) + COUNTED_BYTES;
        Ok(Some(u32::try_from(limit).unwrap_or(u32::MAX)))
    }

    /// Hands what one-sided clients asked for to the lane.
    pub(super) fn hand_over(&mut self) {
        let shared = std::sync::Arc::clone(&self.shared);
        let Some(replication) = &shared.replication else { return };
        let limit = self.command_limit(replication);
        let limit_known = self.command_limit != 0;
        let Some(lane) = &mut self.lane else { return };
        let shared = &*shared;
        let mut way = Way { lane, replication, shared, limit, limit_known, server: 0 };
        self.fabric.hand_over(&mut way);
    }
}
