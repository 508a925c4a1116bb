//! One shard's way to the log: writes collect while a unit is under way, and the next one takes
//! them all; reads that wait for a barrier share the next one.

use std::collections::VecDeque;

use beeline_kv_server::Ticket;

use super::unit::{self, HEAD_BYTES, LaneName, Turn};
use crate::parcel::Origin;

/// Why a request got no answer from the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Nobody leads.
    NoLeader,
    /// No answer in time; a write may take effect all the same.
    TimedOut,
    /// It took effect, and what it answered is not known here.
    ReplyLost,
    /// Longer than an entry.
    TooLarge { bytes: usize, limit: usize },
    /// A snapshot is replacing the keys.
    Loading,
    /// This replica stopped.
    Failed,
    /// The log's words.
    Refused(String),
}

impl Failure {
    /// The error reply.
    pub(crate) fn reply(&self) -> Vec<u8> {
        let line = match self {
            Self::NoLeader => "CLUSTERDOWN no leader: nothing was done; try again".to_owned(),
            Self::TimedOut => "TRYAGAIN the log did not answer in time: a write may take effect \
                               all the same"
                .to_owned(),
            Self::ReplyLost => "TRYAGAIN the write took effect; its reply was lost".to_owned(),
            Self::TooLarge { bytes, limit } => format!(
                "ERR this command takes {bytes} bytes and an entry of the log holds {limit}: \
                 log-slot-size, decided when the cluster is founded, bounds it"
            ),
            Self::Loading => "LOADING this member is installing a snapshot".to_owned(),
            Self::Failed => {
                "MISCONF this member cannot apply the log any more; see its log".to_owned()
            }
            Self::Refused(reason) => format!("TRYAGAIN {reason}"),
        };
        format!("-{line}\r\n").into_bytes()
    }
}

/// A request of a one-sided client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OneSided {
    /// The server among the shard's ([`crate::fabric_servers`]).
    pub server: u64,
    /// The server's name for it.
    pub ticket: Ticket,
}

/// Whose request went into a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// A Redis connection's.
    Redis(Origin),
    /// A one-sided client's.
    OneSided(OneSided),
}

/// Who waits for a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A Redis connection: slot and generation.
    Redis(u32, u32),
    /// A one-sided client.
    OneSided(OneSided),
}

/// Requests that go into one unit.
#[derive(Debug)]
pub(crate) struct Batch {
    /// With room for the head.
    pub unit: Vec<u8>,
    /// Whose, in order.
    pub askers: Vec<Asker>,
    /// Takes no further request.
    closed: bool,
}

impl Default for Batch {
    fn default() -> Self {
        Self { unit: vec![0; HEAD_BYTES], askers: Vec::new(), closed: false }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Lane {
    name: LaneName,
    number: u64,
    /// The last one is open.
    batches: VecDeque<Batch>,
    /// The unit under way, and whose requests are in it.
    in_flight: Option<(u64, Vec<Asker>)>,
    /// Wait for a barrier that is to be asked for.
    pub readers: Vec<Reader>,
    /// Wait for the barrier that was asked for, under this name.
    pub asked: Option<(u64, Vec<Reader>)>,
    tickets: u64,
}

impl Lane {
    pub(crate) fn new(name: LaneName) -> Self {
        Self {
            name,
            number: 0,
            batches: VecDeque::new(),
            in_flight: None,
            readers: Vec::new(),
            asked: None,
            tickets: 0,
        }
    }

    /// Adds the request that `write` encodes, to travel by itself if `alone`.
    ///
    /// Errors: longer than `limit` even so; nothing was added.
    pub(crate) fn push(
        &mut self,
        asker: Asker,
        alone: bool,
        limit: usize,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Failure> {
        let open = self.batches.back().is_some_and(|batch| !batch.closed && !alone);
        if !open {
            self.batches.push_back(Batch::default());
        }
        let Some(batch) = self.batches.back_mut() else { return Err(Failure::Failed) };
        let before = batch.unit.len();
        unit::put_part(&mut batch.unit, write);
        if batch.unit.len() <= limit {
            batch.askers.push(asker);
            batch.closed = alone;
            return Ok(());
        }
        let request = batch.unit.split_off(before);
        let bytes = HEAD_BYTES + request.len();
        if batch.askers.is_empty() {
            self.batches.pop_back();
        }
        if bytes > limit {
            return Err(Failure::TooLarge { bytes, limit });
        }
        let mut next = Batch { closed: alone, ..Batch::default() };
        next.unit.extend_from_slice(&request);
        next.askers.push(asker);
        self.batches.push_back(next);
        Ok(())
    }

    /// The next unit to propose, and its number, if none is under way.
    pub(crate) fn next_unit(&mut self, incarnation: u64) -> Option<(u64, Vec<u8>)> {
        if self.in_flight.is_some() {
            return None;
        }
        let Batch { mut unit, askers, .. } = self.batches.pop_front()?;
        self.number += 1;
        let turn = Turn { incarnation, number: self.number };
        unit::put_head(&mut unit, self.name, turn);
        self.in_flight = Some((self.number, askers));
        Some((self.number, unit))
    }

    /// Whose requests the unit under way carries; it is no longer.
    pub(crate) fn landed(&mut self, number: u64) -> Vec<Asker> {
        match self.in_flight.take() {
            Some((under_way, askers)) if under_way == number => askers,
            other => {
                self.in_flight = other;
                Vec::new()
            }
        }
    }

    /// The name of a barrier to ask for now, for all that wait.
    pub(crate) fn next_barrier(&mut self) -> Option<u64> {
        if self.asked.is_some() || self.readers.is_empty() {
            return None;
        }
        self.tickets += 1;
        self.asked = Some((self.tickets, std::mem::take(&mut self.readers)));
        Some(self.tickets)
    }

    /// Who waited for this barrier.
    pub(crate) fn passed(&mut self, ticket: u64) -> Vec<Reader> {
        match self.asked.take() {
            Some((asked, readers)) if asked == ticket => readers,
            other => {
                self.asked = other;
                Vec::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(sequence: u64) -> Asker {
        Asker::Redis(Origin { slot: 0, generation: 0, sequence, silent: false })
    }

    fn lane() -> Lane {
        Lane::new(LaneName { node: 1, lane: 0 })
    }

    #[test]
    fn what_comes_while_a_unit_is_under_way_shares_the_next_one() {
        let mut lane = lane();
        lane.push(origin(0), false, 1000, |out| out.push(1)).unwrap();
        let (first, _) = lane.next_unit(7).unwrap();
        for sequence in 1..4 {
            lane.push(origin(sequence), false, 1000, |out| out.push(1)).unwrap();
        }
        assert!(lane.next_unit(7).is_none());
        assert!(lane.landed(first + 1).is_empty());
        assert_eq!(lane.landed(first).len(), 1);
        let (second, unit) = lane.next_unit(7).unwrap();
        assert_eq!(unit::Unit::decode(&unit).unwrap().requests().count(), 3);
        assert_eq!(lane.landed(second).len(), 3);
    }

    #[test]
    fn requests_beyond_an_entry_begin_another_and_larger_ones_are_refused() {
        let mut lane = lane();
        let limit = HEAD_BYTES + 100;
        let large = |out: &mut Vec<u8>| out.resize(out.len() + 60, 0);
        lane.push(origin(0), false, limit, large).unwrap();
        lane.push(origin(1), false, limit, large).unwrap();
        let refused = lane.push(origin(2), false, limit, |out| out.resize(out.len() + 97, 0));
        assert_eq!(refused, Err(Failure::TooLarge { bytes: limit + 1, limit }));
        lane.push(origin(3), true, limit, |out| out.push(1)).unwrap();
        lane.push(origin(4), false, limit, |out| out.push(1)).unwrap();
        let mut sizes = Vec::new();
        while let Some((number, _)) = lane.next_unit(1) {
            sizes.push(lane.landed(number).len());
        }
        assert_eq!(sizes, [1, 1, 1, 1]);
    }
}
