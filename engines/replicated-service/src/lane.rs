//! One way to the log: writes collect while a unit is under way, and the next one takes them all;
//! reads that wait for a barrier share the next one.
//!
//! A request that is longer than an entry travels alone, in pieces, one after another, where the service
//! keeps pieces ([`Lane::push_or_cut`]).
//!
//! A lane says nothing of threads: its service's thread owns it, tells it the time
//! ([`Lane::note_time`]), proposes what [`Lane::next_unit`] gives, and tells it what
//! [`Lane::landed`]. An asker that waits for longer than a request may is given back by [`Lane::late`],
//! whatever the log does: a unit that is under way stays so, and its lane waits for it.

use std::collections::VecDeque;

use crate::failure::Failure;
use crate::unit::{self, HEAD_BYTES, LaneName, PIECE_HEAD_BYTES, Piece, Turn};

/// An asker or a reader, and when it came, nanoseconds.
type Since<T> = (u64, T);

/// Requests that go into one unit.
#[derive(Debug)]
struct Batch<A> {
    /// With room for the head.
    unit: Vec<u8>,
    /// Whose, in order; `None`: told already that the outcome is not known.
    askers: Vec<Since<Option<A>>>,
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

impl<A> Batch<A> {
    /// Takes out the requests of those that came before `since_ns`, and gives their askers to `gone`.
    fn drop_older(&mut self, since_ns: u64, gone: &mut Vec<A>) {
        let count = self.askers.iter().take_while(|(came_ns, _)| *came_ns < since_ns).count();
        let parts = unit::parts(&self.unit[HEAD_BYTES..]).take(count);
        let bytes: usize = parts.map(|part| 4 + part.len()).sum();
        self.unit.drain(HEAD_BYTES..HEAD_BYTES + bytes);
        gone.extend(self.askers.drain(..count).filter_map(|(_, asker)| asker));
    }
}

/// Askers and readers that have waited for too long.
#[derive(Debug, PartialEq, Eq)]
pub struct Late<A, R> {
    /// Their requests were not proposed, and will not be.
    pub undone: Vec<A>,
    /// Their requests may take effect, or have.
    pub unknown: Vec<A>,
    /// They wait for a barrier.
    pub readers: Vec<R>,
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
    in_flight: Option<(u64, Vec<Since<Option<A>>>)>,
    /// Wait for a barrier that is to be asked for.
    readers: Vec<Since<R>>,
    /// Wait for the barrier that was asked for, under this name.
    asked: Option<(u64, Vec<Since<R>>)>,
    tickets: u64,
    now_ns: u64,
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
            now_ns: 0,
        }
    }

    /// What comes from now on came at `now_ns`, of any clock that does not go back.
    pub fn note_time(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
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
            batch.askers.push((self.now_ns, Some(asker)));
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
        next.askers.push((self.now_ns, Some(asker)));
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

    /// Whose requests the unit under way carries, in their order; it is no longer. `None` for those that
    /// were [`Lane::late`]; none, where further pieces of their unit follow.
    pub fn landed(&mut self, number: u64) -> Vec<Option<A>> {
        let landed = self.in_flight.take_if(|(under_way, _)| *under_way == number);
        landed.map(|(_, askers)| only(askers)).unwrap_or_default()
    }

    /// As [`Lane::landed`], where the unit under way will not take effect, or nobody knows: pieces that
    /// were to follow it are given up.
    pub fn failed(&mut self, number: u64) -> Vec<Option<A>> {
        let under_way = self.in_flight.as_ref().is_some_and(|(name, _)| *name == number);
        let mut askers = self.landed(number);
        if under_way && let Some(cut) = self.cut.take() {
            askers.extend(only(cut.batch.askers));
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
        let cut = self.cut.take();
        cut.map(|cut| only(cut.batch.askers).into_iter().flatten().collect()).unwrap_or_default()
    }

    /// Gives back those that have waited for more than `limit_ns`, once each. Their requests are taken
    /// out of what was not proposed. For a unit or a barrier under way there is `grace_ns` more: the
    /// courier that carries one gives up after the same time, and knows better what became of it.
    pub fn late(&mut self, limit_ns: u64, grace_ns: u64) -> Late<A, R> {
        let since_ns = |waits_ns: u64| self.now_ns.saturating_sub(waits_ns);
        let (waiting_ns, under_way_ns) = (since_ns(limit_ns), since_ns(limit_ns + grace_ns));
        let mut late = Late { undone: Vec::new(), unknown: Vec::new(), readers: Vec::new() };
        // Of a unit whose last piece is not proposed nothing takes effect.
        let is_late = |cut: &mut Cut<A>| cut.batch.askers.iter().any(|(ns, _)| *ns < waiting_ns);
        if let Some(cut) = self.cut.take_if(is_late) {
            late.undone.extend(only(cut.batch.askers).into_iter().flatten());
        }
        for batch in &mut self.batches {
            batch.drop_older(waiting_ns, &mut late.undone);
        }
        self.batches.retain(|batch| !batch.askers.is_empty());
        if let Some((_, askers)) = &mut self.in_flight {
            let older = askers.iter_mut().take_while(|(came_ns, _)| *came_ns < under_way_ns);
            late.unknown.extend(older.filter_map(|(_, asker)| asker.take()));
        }
        let mut older = |readers: &mut Vec<Since<R>>, since_ns: u64| {
            let count = readers.iter().take_while(|(came_ns, _)| *came_ns < since_ns).count();
            late.readers.extend(readers.drain(..count).map(|(_, reader)| reader));
        };
        if let Some((_, readers)) = &mut self.asked {
            older(readers, under_way_ns);
        }
        older(&mut self.readers, waiting_ns);
        late
    }

    /// Whether an asker or a reader waits.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.in_flight.is_some()
            || self.asked.is_some()
            || self.cut.is_some()
            || !self.batches.is_empty()
            || !self.readers.is_empty()
    }

    /// `reader` waits for the next barrier.
    pub fn await_barrier(&mut self, reader: R) {
        self.readers.push((self.now_ns, reader));
    }

    /// No reader of these waits any more for a barrier that was not asked for yet.
    pub fn withdraw(&mut self, gone: impl Fn(&R) -> bool) {
        self.readers.retain(|(_, reader)| !gone(reader));
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

    /// The readers that waited for this barrier, and still do.
    pub fn passed(&mut self, ticket: u64) -> Vec<R> {
        let passed = self.asked.take_if(|(asked, _)| *asked == ticket);
        let readers = passed.map(|(_, readers)| readers).unwrap_or_default();
        readers.into_iter().map(|(_, reader)| reader).collect()
    }
}

fn only<A>(askers: Vec<Since<Option<A>>>) -> Vec<Option<A>> {
    askers.into_iter().map(|(_, asker)| asker).collect()
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
        assert_eq!(lane.landed(first), [Some(0)]);
        let (second, unit) = lane.next_unit(7).unwrap();
        assert_eq!(Unit::decode(&unit).unwrap().requests().count(), 3);
        assert_eq!(lane.landed(second), [Some(1), Some(2), Some(3)]);
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
        let expected = [
            (vec![Some(0)], 0),
            (vec![], 0),
            (vec![], 1),
            (vec![], 2),
            (vec![Some(1)], 3),
            (vec![Some(2)], 0),
        ];
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
        assert_eq!(lane.failed(second), [Some(1)]);
        let (third, unit) = lane.next_unit(7).unwrap();
        assert_eq!(Unit::decode(&unit).unwrap().piece, None);
        assert_eq!(lane.failed(third), [Some(2)]);
        // Or between two of them.
        lane.push_or_cut(3, false, limit, || 1000, |out| out.resize(out.len() + 35, 0)).unwrap();
        let (fourth, _) = lane.next_unit(7).unwrap();
        assert!(lane.give_up().is_empty(), "one is under way");
        assert!(lane.landed(fourth).is_empty());
        assert_eq!(lane.give_up(), [3]);
        assert!(lane.next_unit(7).is_none() && lane.give_up().is_empty());
    }

    /// A log that does not answer: no request waits for it for longer than its time, and what each is
    /// told is what became of it.
    #[test]
    fn requests_and_readers_are_given_back_when_their_time_is_over() {
        let mut lane: Lane<u64, u64> =
            Lane::new(LaneName { service: Tag::KEYS, node: 1, lane: 0 }, 1);
        let push = |lane: &mut Lane<u64, u64>, asker: u64| {
            lane.note_time(asker);
            lane.push(asker, false, 1000, |out| out.push(asker as u8)).unwrap();
            lane.await_barrier(asker);
        };
        push(&mut lane, 10);
        push(&mut lane, 11);
        let (under_way, _) = lane.next_unit(7).unwrap();
        let ticket = lane.next_barrier().unwrap();
        push(&mut lane, 20);
        push(&mut lane, 30);
        let late = |undone: &[u64], unknown: &[u64], readers: &[u64]| Late {
            undone: undone.to_vec(),
            unknown: unknown.to_vec(),
            readers: readers.to_vec(),
        };
        lane.note_time(110);
        assert_eq!(lane.late(100, 5), late(&[], &[], &[]));
        lane.note_time(116);
        assert_eq!(lane.late(100, 5), late(&[], &[10], &[10]), "under way, and once each");
        assert_eq!(lane.late(100, 5), late(&[], &[], &[]));
        lane.note_time(121);
        assert_eq!(lane.late(100, 5), late(&[20], &[11], &[11, 20]));
        assert!(lane.next_unit(7).is_none(), "one unit at a time");
        // What is left of the batch is proposed, and nothing else of it.
        assert_eq!(lane.landed(under_way), [None, None]);
        assert!(lane.passed(ticket).is_empty());
        let (next, unit) = lane.next_unit(7).unwrap();
        assert_eq!(Unit::decode(&unit).unwrap().requests().collect::<Vec<_>>(), [[30]]);
        assert_eq!(lane.landed(next), [Some(30)]);
        assert_eq!(lane.next_barrier().map(|ticket| lane.passed(ticket)), Some(vec![30]));
        // One in pieces, the first of which is under way.
        let limit = PIECE_HEAD_BYTES + 10;
        lane.note_time(200);
        lane.push_or_cut(40, false, limit, || 1000, |out| out.resize(out.len() + 35, 0)).unwrap();
        let (piece, _) = lane.next_unit(7).unwrap();
        lane.note_time(301);
        assert_eq!(lane.late(100, 5), late(&[40], &[], &[]));
        assert!(lane.landed(piece).is_empty() && lane.next_unit(7).is_none());
        assert!(!lane.is_awaited());
    }
}
