//! One way to the log: writes collect while a unit is under way, and the next one takes them all;
//! reads that wait for a barrier share the next one.
//!
//! A lane says nothing of threads: its service's thread owns it, proposes what
//! [`Lane::next_unit`] gives, and tells it what [`Lane::landed`].

use std::collections::VecDeque;

use crate::failure::Failure;
use crate::unit::{self, HEAD_BYTES, LaneName, Turn};

/// Requests that go into one unit.
#[derive(Debug)]
struct Batch<A> {
    /// With room for the head.
    unit: Vec<u8>,
    /// Whose, in order.
    askers: Vec<A>,
    /// Takes no further request.
    closed: bool,
}

impl<A> Default for Batch<A> {
    fn default() -> Self {
        Self { unit: vec![0; HEAD_BYTES], askers: Vec::new(), closed: false }
    }
}

/// See the module's documentation. `A` names who asked for a request, `R` who waits for a barrier.
#[derive(Debug)]
pub struct Lane<A, R> {
    name: LaneName,
    format: u8,
    number: u64,
    /// The last one is open.
    batches: VecDeque<Batch<A>>,
    /// The unit under way, and whose requests are in it.
    in_flight: Option<(u64, Vec<A>)>,
    /// Wait for a barrier that is to be asked for.
    pub readers: Vec<R>,
    /// Wait for the barrier that was asked for, under this name.
    asked: Option<(u64, Vec<R>)>,
    tickets: u64,
}

impl<A, R> Lane<A, R> {
    /// An empty lane. `format` is that of the service's requests.
    #[must_use]
    pub fn new(name: LaneName, format: u8) -> Self {
        Self {
            name,
            format,
            number: 0,
            batches: VecDeque::new(),
            in_flight: None,
            readers: Vec::new(),
            asked: None,
            tickets: 0,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> LaneName {
        self.name
    }

    /// Adds the request that `write` encodes, to travel by itself if `alone`.
    ///
    /// Errors: longer than `limit` even so; nothing was added, and `asker` comes back.
    pub fn push(
        &mut self,
        asker: A,
        alone: bool,
        limit: usize,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), (A, Failure)> {
        let open = self.batches.back().is_some_and(|batch| !batch.closed && !alone);
        if !open {
            self.batches.push_back(Batch::default());
        }
        let Some(batch) = self.batches.back_mut() else { return Err((asker, Failure::Failed)) };
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
            return Err((asker, Failure::TooLarge { bytes, limit }));
        }
        let mut next = Batch { closed: alone, ..Batch::default() };
        next.unit.extend_from_slice(&request);
        next.askers.push(asker);
        self.batches.push_back(next);
        Ok(())
    }

    /// The next unit to propose, and its number, if none is under way.
    pub fn next_unit(&mut self, incarnation: u64) -> Option<(u64, Vec<u8>)> {
        if self.in_flight.is_some() {
            return None;
        }
        let Batch { mut unit, askers, .. } = self.batches.pop_front()?;
        self.number += 1;
        let turn = Turn { incarnation, number: self.number };
        unit::put_head(&mut unit, self.name, self.format, turn);
        self.in_flight = Some((self.number, askers));
        Some((self.number, unit))
    }

    /// Whose requests the unit under way carries; it is no longer.
    pub fn landed(&mut self, number: u64) -> Vec<A> {
        match self.in_flight.take() {
            Some((under_way, askers)) if under_way == number => askers,
            other => {
                self.in_flight = other;
                Vec::new()
            }
        }
    }

    /// The name of a barrier to ask for now, for all that wait.
    pub fn next_barrier(&mut self) -> Option<u64> {
        if self.asked.is_some() || self.readers.is_empty() {
            return None;
        }
        self.tickets += 1;
        self.asked = Some((self.tickets, std::mem::take(&mut self.readers)));
        Some(self.tickets)
    }

    /// Who waited for this barrier.
    pub fn passed(&mut self, ticket: u64) -> Vec<R> {
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
    use crate::machine::Tag;
    use crate::unit::Unit;

    fn lane() -> Lane<u64, ()> {
        Lane::new(LaneName { service: Tag::KEYS, node: 1, lane: 0 }, 1)
    }

    #[test]
    fn what_comes_while_a_unit_is_under_way_shares_the_next_one() {
        let mut lane = lane();
        lane.push(0, false, 1000, |out| out.push(1)).unwrap();
        let (first, _) = lane.next_unit(7).unwrap();
        for asker in 1..4 {
            lane.push(asker, false, 1000, |out| out.push(1)).unwrap();
        }
        assert!(lane.next_unit(7).is_none());
        assert!(lane.landed(first + 1).is_empty());
        assert_eq!(lane.landed(first), [0]);
        let (second, unit) = lane.next_unit(7).unwrap();
        assert_eq!(Unit::decode(&unit).unwrap().requests().count(), 3);
        assert_eq!(lane.landed(second), [1, 2, 3]);
    }

    #[test]
    fn requests_beyond_an_entry_begin_another_and_larger_ones_are_refused() {
        let mut lane = lane();
        let limit = HEAD_BYTES + 100;
        let large = |out: &mut Vec<u8>| out.resize(out.len() + 60, 0);
        lane.push(0, false, limit, large).unwrap();
        lane.push(1, false, limit, large).unwrap();
        let refused = lane.push(2, false, limit, |out| out.resize(out.len() + 97, 0));
        assert_eq!(refused, Err((2, Failure::TooLarge { bytes: limit + 1, limit })));
        lane.push(3, true, limit, |out| out.push(1)).unwrap();
        lane.push(4, false, limit, |out| out.push(1)).unwrap();
        let mut sizes = Vec::new();
        while let Some((number, _)) = lane.next_unit(1) {
            sizes.push(lane.landed(number).len());
        }
        assert_eq!(sizes, [1, 1, 1, 1]);
    }
}
