//! One way to the log: writes collect while a unit is under way, and the next one takes them all;
//! reads that wait for a barrier share the next one.
//!
//! A request that is longer than an entry travels alone, in pieces, one after another, where the service
//! keeps pieces ([`Lane::push_or_cut`]).
//!
//! A lane says nothing of threads: its service's thread owns it, proposes what
//! [`Lane::next_unit`] gives, and tells it what [`Lane::landed`].

use std::collections::VecDeque;

use crate::failure::Failure;
use crate::unit::{self, HEAD_BYTES, LaneName, PIECE_HEAD_BYTES, Piece, Turn};

/// Requests that go into one unit.
#[derive(Debug)]
struct Batch<A> {
    /// With room for the head.
    unit: Vec<u8>,
    /// Whose, in order.
    askers: Vec<A>,
    /// Takes no further request.
    closed: bool,
    /// Longest piece that it is to travel in, head included; 0: whole.
    piece_bytes: usize,
}

impl<A> Default for Batch<A> {
    fn default() -> Self {
        Self { unit: vec![0; HEAD_BYTES], askers: Vec::new(), closed: false, piece_bytes: 0 }
    }
}

/// A unit that is travelling in pieces.
#[derive(Debug)]
struct Cut<A> {
    batch: Batch<A>,
    /// Of the first piece's turn.
    series: u64,
    /// The next piece, and where in the unit it begins.
    index: u32,
    at: usize,
}

impl<A> Cut<A> {
    /// Bytes of the unit in one piece.
    fn length(&self) -> usize {
        self.batch.piece_bytes - PIECE_HEAD_BYTES
    }

    fn count(&self) -> u32 {
        (self.batch.unit.len() - HEAD_BYTES).div_ceil(self.length()) as u32
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
    /// Of which pieces are left to propose.
    cut: Option<Cut<A>>,
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
            cut: None,
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
        self.push_or_cut(asker, alone, limit, || 0, write)
    }

    /// As [`Lane::push`]; what is longer than `limit` travels in pieces, up to as many bytes as `most`
    /// says, which is asked then alone. The service keeps pieces at every member.
    ///
    /// Errors: longer than both; nothing was added, and `asker` comes back.
    pub fn push_or_cut(
        &mut self,
        asker: A,
        alone: bool,
        limit: usize,
        most: impl FnOnce() -> usize,
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
        let in_pieces = bytes > limit;
        if in_pieces {
            let most_bytes = most();
            if bytes > most_bytes || limit <= PIECE_HEAD_BYTES {
                let limit = limit.max(most_bytes);
                return Err((asker, Failure::TooLarge { bytes, limit }));
            }
        }
        let piece_bytes = if in_pieces { limit } else { 0 };
        let mut next = Batch { closed: alone || in_pieces, piece_bytes, ..Batch::default() };
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
        if self.cut.is_none() {
            let batch = self.batches.pop_front()?;
            if batch.piece_bytes == 0 {
                return Some(self.whole_unit(incarnation, batch));
            }
            self.cut = Some(Cut { batch, series: self.number + 1, index: 0, at: HEAD_BYTES });
        }
        self.next_piece(incarnation)
    }

    fn next_piece(&mut self, incarnation: u64) -> Option<(u64, Vec<u8>)> {
        let mut cut = self.cut.take()?;
        self.number += 1;
        let turn = Turn { incarnation, number: self.number };
        let piece = Piece { series: cut.series, index: cut.index, count: cut.count() };
        let end = cut.batch.unit.len().min(cut.at + cut.length());
        let mut bytes = vec![0; PIECE_HEAD_BYTES];
        unit::put_piece_head(&mut bytes, self.name, self.format, turn, piece);
        bytes.extend_from_slice(&cut.batch.unit[cut.at..end]);
        (cut.at, cut.index) = (end, cut.index + 1);
        if piece.is_last() {
            self.in_flight = Some((self.number, cut.batch.askers));
        } else {
            self.in_flight = Some((self.number, Vec::new()));
            self.cut = Some(cut);
        }
        Some((self.number, bytes))
    }

    fn whole_unit(&mut self, incarnation: u64, batch: Batch<A>) -> (u64, Vec<u8>) {
        let Batch { mut unit, askers, .. } = batch;
        self.number += 1;
        let turn = Turn { incarnation, number: self.number };
        unit::put_head(&mut unit, self.name, self.format, turn);
        self.in_flight = Some((self.number, askers));
        (self.number, unit)
    }

    /// Whose requests the unit under way carries; it is no longer. Nobody's, where further pieces of
    /// their unit follow.
    pub fn landed(&mut self, number: u64) -> Vec<A> {
        match self.in_flight.take() {
            Some((under_way, askers)) if under_way == number => askers,
            other => {
                self.in_flight = other;
                Vec::new()
            }
        }
    }

    /// As [`Lane::landed`], where the unit under way will not take effect, or nobody knows: pieces that
    /// were to follow it are given up.
    pub fn failed(&mut self, number: u64) -> Vec<A> {
        let under_way = self.in_flight.as_ref().is_some_and(|(name, _)| *name == number);
        let mut askers = self.landed(number);
        if under_way && let Some(cut) = self.cut.take() {
            askers.extend(cut.batch.askers);
        }
        askers
    }

    /// Whether pieces of a unit are left to propose.
    #[must_use]
    pub fn is_cutting(&self) -> bool {
        self.cut.is_some()
    }

    /// Gives up a unit of which some pieces were applied and others are left to propose: whose requests
    /// it carries. Nothing of it takes effect.
    pub fn give_up(&mut self) -> Vec<A> {
        if self.in_flight.is_some() {
            return Vec::new();
        }
        self.cut.take().map(|cut| cut.batch.askers).unwrap_or_default()
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

    #[test]
    fn a_request_beyond_an_entry_travels_in_pieces_and_alone() {
        let limit = PIECE_HEAD_BYTES + 10;
        let mut lane = lane();
        let long: Vec<u8> = (0..35).collect();
        lane.push_or_cut(0, false, limit, || 1000, |out| out.push(9)).unwrap();
        lane.push_or_cut(1, false, limit, || 1000, |out| out.extend_from_slice(&long)).unwrap();
        lane.push_or_cut(2, false, limit, || 1000, |out| out.push(9)).unwrap();
        let refused =
            lane.push_or_cut(3, false, limit, || 1000, |out| out.resize(out.len() + 1000, 0));
        let bytes = HEAD_BYTES + 1004;
        assert_eq!(refused, Err((3, Failure::TooLarge { bytes, limit: 1000 })));
        let (mut told, mut whole) = (Vec::new(), Vec::new());
        while let Some((number, bytes)) = lane.next_unit(7) {
            assert!(bytes.len() <= limit && lane.next_unit(7).is_none());
            let unit = Unit::decode(&bytes).unwrap();
            assert_eq!(unit.turn, Turn { incarnation: 7, number });
            let Some(piece) = unit.piece else {
                told.push((lane.landed(number), 0));
                continue;
            };
            assert_eq!((piece.series, piece.count), (2, 4));
            whole.extend_from_slice(unit.bytes());
            told.push((lane.landed(number), piece.index));
            if piece.is_last() {
                assert_eq!(unit.whole(&whole).requests().collect::<Vec<_>>(), [&long[..]]);
            }
        }
        let expected =
            [(vec![0], 0), (vec![], 0), (vec![], 1), (vec![], 2), (vec![1], 3), (vec![2], 0)];
        assert_eq!(told, expected);
    }

    #[test]
    fn pieces_behind_one_that_failed_are_given_up() {
        let limit = PIECE_HEAD_BYTES + 10;
        let mut lane = lane();
        lane.push_or_cut(1, false, limit, || 1000, |out| out.resize(out.len() + 35, 0)).unwrap();
        lane.push_or_cut(2, false, limit, || 1000, |out| out.push(9)).unwrap();
        let (first, _) = lane.next_unit(7).unwrap();
        assert!(lane.landed(first).is_empty());
        let (second, _) = lane.next_unit(7).unwrap();
        assert!(lane.failed(first).is_empty(), "an answer that comes twice");
        assert_eq!(lane.failed(second), [1]);
        let (third, unit) = lane.next_unit(7).unwrap();
        assert_eq!(Unit::decode(&unit).unwrap().piece, None);
        assert_eq!(lane.failed(third), [2]);
        // Or between two of them.
        lane.push_or_cut(3, false, limit, || 1000, |out| out.resize(out.len() + 35, 0)).unwrap();
        let (fourth, _) = lane.next_unit(7).unwrap();
        assert!(lane.give_up().is_empty(), "one is under way");
        assert!(lane.landed(fourth).is_empty());
        assert_eq!(lane.give_up(), [3]);
        assert!(lane.next_unit(7).is_none() && lane.give_up().is_empty());
    }
}
