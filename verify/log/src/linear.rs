//! Linearizability of a history of appends and reads on one list.
//!
//! The search of Wing and Gong (1993) with the memory of Lowe (2017), as Porcupine has it: choose,
//! again and again, an operation that began before any other had ended, run it on a model, and
//! never visit the same set of operations with the same state twice. Two that hash alike could make
//! a good history look bad, never a bad one good. An operation that was never
//! answered may take effect at any time after its call, or never.

use std::collections::HashSet;

use crate::machine::Item;

/// What was called, and what was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// An append; the length behind it, if it was answered.
    Append(Item, Option<u64>),
    /// A read that was answered.
    Read(Vec<Item>),
}

/// An operation with its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// When it was called.
    pub from_ns: u64,
    /// When it was answered; `u64::MAX` if never.
    pub to_ns: u64,
    /// What it was.
    pub operation: Operation,
}

/// A search, without recursion: a history has more operations than a stack has frames.
struct Search<'a> {
    calls: &'a [Call],
    /// Sets of operations and states that led nowhere, each told by its hash.
    seen: HashSet<(u64, u64)>,
    done: Vec<bool>,
    /// No operation before this one is left.
    base: usize,
    /// Hash of the set of operations that are done.
    of_done: u64,
    state: Vec<Item>,
    /// Hash of every prefix of the state, the empty one first.
    of_state: Vec<u64>,
}

/// SplitMix64's output function.
fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl<'a> Search<'a> {
    fn new(calls: &'a [Call]) -> Self {
        Self {
            calls,
            seen: HashSet::new(),
            done: vec![false; calls.len()],
            base: 0,
            of_done: 0,
            state: Vec::new(),
            of_state: vec![0],
        }
    }

    /// Runs an operation on the model.
    fn choose(&mut self, index: usize) {
        self.done[index] = true;
        self.of_done ^= mixed(index as u64);
        if let Operation::Append(item, _) = self.calls[index].operation {
            let before = self.of_state.last().copied().unwrap_or_default();
            self.of_state.push(mixed(before.rotate_left(17) ^ u64::from(item)));
            self.state.push(item);
        }
        while self.done.get(self.base) == Some(&true) {
            self.base += 1;
        }
    }

    /// Takes the operation chosen last back.
    fn take_back(&mut self, index: usize) {
        self.done[index] = false;
        self.of_done ^= mixed(index as u64);
        if let Operation::Append(..) = self.calls[index].operation {
            self.of_state.pop();
            self.state.pop();
        }
        self.base = self.base.min(index);
    }

    /// When the first of the operations that are left was answered; never, if none was.
    fn first_end(&self) -> u64 {
        let mut first = u64::MAX;
        for index in self.base..self.calls.len() {
            let call = &self.calls[index];
            if call.from_ns > first {
                break;
            }
            if !self.done[index] {
                first = first.min(call.to_ns);
            }
        }
        first
    }

    /// The first operation from `from` on that may be next.
    fn candidate(&self, from: usize) -> Option<usize> {
        let first_end = self.first_end();
        let began = |index: &usize| self.calls[*index].from_ns <= first_end;
        let fits = |index: &usize| match &self.calls[*index].operation {
            Operation::Read(list) => *list == self.state,
            Operation::Append(_, length) => {
                length.is_none_or(|length| length == self.state.len() as u64 + 1)
            }
        };
        (from..self.calls.len()).take_while(began).find(|at| !self.done[*at] && fits(at))
    }

    fn run(&mut self) -> bool {
        let mut path: Vec<usize> = Vec::new();
        loop {
            if self.first_end() == u64::MAX {
                return true;
            }
            let here = (self.of_done, self.of_state.last().copied().unwrap_or_default());
            let mut next = self.seen.insert(here).then(|| self.candidate(self.base)).flatten();
            while next.is_none() {
                let Some(last) = path.pop() else { return false };
                self.take_back(last);
                // A read that fitted might as well go first: nothing else would have helped.
                if let Operation::Append(..) = self.calls[last].operation {
                    next = self.candidate(last + 1);
                }
            }
            if let Some(index) = next {
                self.choose(index);
                path.push(index);
            }
        }
    }
}

/// Whether some order of `calls`, which respects that one ended before another began, explains
/// every answer.
#[must_use]
pub fn is_linearizable(calls: &[Call]) -> bool {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| call.from_ns);
    Search::new(&calls).run()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(from_ns: u64, to_ns: u64, item: Item, length: u64) -> Call {
        Call { from_ns, to_ns, operation: Operation::Append(item, Some(length)) }
    }

    fn read(from_ns: u64, to_ns: u64, list: &[Item]) -> Call {
        Call { from_ns, to_ns, operation: Operation::Read(list.to_vec()) }
    }

    #[test]
    fn overlapping_calls_may_take_effect_in_either_order() {
        assert!(is_linearizable(&[
            append(0, 10, 1, 2),
            append(5, 15, 2, 1),
            read(20, 30, &[2, 1])
        ]));
        assert!(is_linearizable(&[append(0, 10, 1, 1), read(5, 7, &[]), read(8, 9, &[1])]));
    }

    #[test]
    fn a_stale_read_is_refused() {
        assert!(!is_linearizable(&[append(0, 10, 1, 1), read(20, 30, &[])]));
        let back = [append(0, 100, 1, 1), read(10, 20, &[1]), read(30, 40, &[])];
        assert!(!is_linearizable(&back));
    }

    #[test]
    fn a_lost_and_a_doubled_append_are_refused() {
        assert!(!is_linearizable(&[append(0, 1, 1, 1), append(2, 3, 2, 1)]));
        assert!(!is_linearizable(&[append(0, 1, 1, 1), read(2, 3, &[1, 1])]));
        assert!(!is_linearizable(&[read(2, 3, &[7])]), "nobody appended it");
    }

    #[test]
    fn a_long_history_is_searched_whole() {
        let count = 200_000;
        let mut calls: Vec<Call> =
            (1..=count).map(|at| append(10 * at, 10 * at + 15, at as Item, at)).collect();
        assert!(is_linearizable(&calls));
        calls.push(read(10 * count + 100, 10 * count + 110, &[1]));
        assert!(!is_linearizable(&calls));
    }

    #[test]
    fn an_unanswered_append_may_take_effect_late_or_never() {
        let lost = Call { from_ns: 0, to_ns: u64::MAX, operation: Operation::Append(1, None) };
        assert!(is_linearizable(&[lost.clone(), read(10, 20, &[])]));
        assert!(is_linearizable(&[lost.clone(), read(10, 20, &[]), read(30, 40, &[1])]));
        assert!(!is_linearizable(&[lost, read(10, 20, &[1]), read(30, 40, &[])]));
    }
}
