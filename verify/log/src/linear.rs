//! Linearizability of a history of appends and reads on one list.
//!
//! The search of Wing and Gong (1993) with the memory of Lowe (2017), as Porcupine has it: choose,
//! again and again, an operation that began before any other had ended, run it on a model, and
//! never visit the same set of operations with the same state twice. An operation that was never
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

struct Search<'a> {
    calls: &'a [Call],
    seen: HashSet<(Vec<u64>, Vec<Item>)>,
    done: Vec<u64>,
}

impl Search<'_> {
    fn is_done(&self, index: usize) -> bool {
        self.done[index / 64] >> (index % 64) & 1 == 1
    }

    fn flip(&mut self, index: usize) {
        self.done[index / 64] ^= 1 << (index % 64);
    }

    fn run(&mut self, state: &mut Vec<Item>) -> bool {
        let open = (0..self.calls.len()).filter(|index| !self.is_done(*index));
        let first_end = open.map(|index| self.calls[index].to_ns).min().unwrap_or(u64::MAX);
        if first_end == u64::MAX {
            return true;
        }
        if !self.seen.insert((self.done.clone(), state.clone())) {
            return false;
        }
        for index in 0..self.calls.len() {
            let call = &self.calls[index];
            if call.from_ns > first_end {
                break;
            }
            if self.is_done(index) {
                continue;
            }
            match &call.operation {
                Operation::Read(list) => {
                    if list == state {
                        // A read that fits now may as well go first.
                        self.flip(index);
                        let found = self.run(state);
                        self.flip(index);
                        return found;
                    }
                }
                Operation::Append(item, length) => {
                    let length_fits = length.is_none_or(|length| length == state.len() as u64 + 1);
                    if length_fits {
                        state.push(*item);
                        self.flip(index);
                        let found = self.run(state);
                        self.flip(index);
                        state.pop();
                        if found {
                            return true;
                        }
                    }
                }
            }
        }
        false
    }
}

/// Whether some order of `calls`, which respects that one ended before another began, explains
/// every answer.
#[must_use]
pub fn is_linearizable(calls: &[Call]) -> bool {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| call.from_ns);
    let done = vec![0; calls.len().div_ceil(64)];
    Search { calls: &calls, seen: HashSet::new(), done }.run(&mut Vec::new())
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
    fn an_unanswered_append_may_take_effect_late_or_never() {
        let lost = Call { from_ns: 0, to_ns: u64::MAX, operation: Operation::Append(1, None) };
        assert!(is_linearizable(&[lost.clone(), read(10, 20, &[])]));
        assert!(is_linearizable(&[lost.clone(), read(10, 20, &[]), read(30, 40, &[1])]));
        assert!(!is_linearizable(&[lost, read(10, 20, &[1]), read(30, 40, &[])]));
    }
}
