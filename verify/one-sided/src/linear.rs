//! Linearizability of the operations on one key of the direct store.
//!
//! The search of Wing and Gong (1993) with the memory of Lowe (2017): of the operations that began before any
//! other ended, choose one, execute it on a plain value, go on; where the results do not agree, go back.
//! What was looked at once, the operations executed and the value they leave, is not looked at again.
//!
//! Stronger than linearizability in one point: operations of one client come in the order in which it gave
//! them, also inside a batch. An operation whose result is not known may have been executed at any time
//! after it began, or never.

use std::collections::HashSet;

/// What an operation does to a value that is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads.
    Get,
    /// Stores.
    Put(u64),
    /// Deletes.
    Delete,
    /// Adds, wrapping.
    Add(u64),
    /// Stores the second where the first is.
    Swap(u64, u64),
}

/// What it gave: the value before, for all but PUT.
pub type Before = Option<u64>;

/// One operation of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The client; its calls are in the history in its order.
    pub client: u32,
    /// When it began, by a clock that all clients share.
    pub begin: u64,
    /// When its result was there; of no meaning without one.
    pub end: u64,
    /// What it does.
    pub action: Action,
    /// The value before; of a DELETE only whether there was one. `None`: the result is not known.
    pub result: Option<Before>,
}

fn execute(value: Option<u64>, action: Action) -> (Option<u64>, Before) {
    match action {
        Action::Get => (value, value),
        Action::Put(new) => (Some(new), None),
        Action::Delete => (None, value.map(|_| 0)),
        Action::Add(by) => (value.map(|value| value.wrapping_add(by)), value),
        Action::Swap(expected, new) => {
            (value.map(|value| if value == expected { new } else { value }), value)
        }
    }
}

/// Calls executed: all before `first`, and those of `beyond`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Reached {
    first: usize,
    beyond: Vec<usize>,
    value: Option<u64>,
}

/// Whether one order of the calls explains all results, from the value `initial` on.
#[must_use]
pub fn is_linearizable(initial: Option<u64>, history: &[Call]) -> bool {
    // By their beginning; each client's stay in its order.
    let mut calls = history.to_vec();
    calls.sort_by_key(|call| call.begin);
    let mut seen = HashSet::new();
    let mut stack = vec![Reached { first: 0, beyond: Vec::new(), value: initial }];
    while let Some(reached) = stack.pop() {
        let left = |index: &usize| !reached.beyond.contains(index);
        let known_left =
            (reached.first..calls.len()).filter(left).any(|index| calls[index].result.is_some());
        if !known_left {
            return true;
        }
        let ends = (reached.first..calls.len()).filter(left).scan(u64::MAX, |soonest, index| {
            // Calls that begin after this one's end come later.
            if calls[index].begin > *soonest {
                return None;
            }
            if calls[index].result.is_some() {
                *soonest = calls[index].end.min(*soonest);
            }
            Some((index, *soonest))
        });
        let candidates: Vec<(usize, u64)> = ends.collect();
        let soonest = candidates.last().map_or(u64::MAX, |(_, soonest)| *soonest);
        let mut waiting = HashSet::new();
        for (index, _) in candidates {
            let call = &calls[index];
            // The first of each client's calls that are left: the others wait for it.
            if call.begin > soonest || !waiting.insert(call.client) {
                continue;
            }
            let (value, before) = execute(reached.value, call.action);
            if call.result.is_some_and(|result| result != before) {
                continue;
            }
            let mut next = Reached { value, ..reached.clone() };
            next.beyond.push(index);
            next.beyond.sort_unstable();
            while next.beyond.first() == Some(&next.first) {
                next.beyond.remove(0);
                next.first += 1;
            }
            if seen.insert(next.clone()) {
                stack.push(next);
            }
        }
        // A call without a result may never have been executed; its client gave up with it.
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(client: u32, begin: u64, end: u64, action: Action, result: Before) -> Call {
        Call { client, begin, end, action, result: Some(result) }
    }

    #[test]
    fn calls_that_overlap_may_come_in_either_order() {
        let history = [
            call(1, 0, 10, Action::Put(5), None),
            call(2, 2, 8, Action::Get, None),
            call(2, 9, 12, Action::Get, Some(5)),
            call(3, 1, 20, Action::Add(2), Some(5)),
        ];
        assert!(is_linearizable(None, &history));
        assert!(!is_linearizable(Some(1), &history));
    }

    #[test]
    fn a_value_of_the_past_is_found() {
        let stale = [
            call(1, 0, 1, Action::Put(5), None),
            call(1, 2, 3, Action::Put(6), None),
            call(2, 4, 5, Action::Get, Some(5)),
        ];
        assert!(!is_linearizable(None, &stale));
        let lost = [call(1, 0, 9, Action::Add(1), Some(0)), call(2, 0, 9, Action::Add(1), Some(0))];
        assert!(!is_linearizable(Some(0), &lost));
        let back = [
            call(1, 0, 9, Action::Put(5), None),
            call(2, 1, 2, Action::Get, Some(5)),
            call(3, 3, 4, Action::Get, None),
        ];
        assert!(!is_linearizable(None, &back));
    }

    #[test]
    fn a_client_keeps_its_own_order_inside_a_batch() {
        let batch = [call(1, 0, 9, Action::Put(5), None), call(1, 0, 9, Action::Get, None)];
        assert!(!is_linearizable(None, &batch));
    }

    #[test]
    fn two_winners_of_one_swap_are_found() {
        let both = [
            call(1, 0, 9, Action::Swap(0, 1), Some(0)),
            call(2, 0, 9, Action::Swap(0, 2), Some(0)),
        ];
        assert!(!is_linearizable(Some(0), &both));
        let one = [both[0], call(2, 0, 9, Action::Swap(0, 2), Some(1))];
        assert!(is_linearizable(Some(0), &one));
    }

    #[test]
    fn what_a_killed_client_did_may_have_happened_or_not() {
        let unknown = Call { client: 9, begin: 3, end: 0, action: Action::Put(7), result: None };
        for seen in [Some(5), Some(7)] {
            let history =
                [call(1, 0, 1, Action::Put(5), None), unknown, call(2, 8, 9, Action::Get, seen)];
            assert!(is_linearizable(None, &history));
        }
        let early = [unknown, call(1, 0, 1, Action::Get, Some(7))];
        assert!(!is_linearizable(None, &early), "not before it began");
    }

    #[test]
    fn a_long_history_is_searched_in_time() {
        // 6 clients, 3000 additions each, every interval overlapping its neighbours.
        let mut history = Vec::new();
        for turn in 0..3000_u64 {
            for client in 0..6_u32 {
                let number = turn * 6 + u64::from(client);
                let (begin, end) = (number * 10, number * 10 + 70);
                history.push(call(client, begin, end, Action::Add(1), Some(number)));
            }
        }
        assert!(is_linearizable(Some(0), &history));
    }
}
