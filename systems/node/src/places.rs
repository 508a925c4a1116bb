//! Replies in request order, although some are made at other shards.
//!
//! Invariants: places are filled in any order and leave in the order they were kept; while none is
//! kept, replies go straight to the output.

use std::collections::VecDeque;

use beeline_resp::Output;

/// Emptied places kept for reuse.
const SPARE: usize = 64;
/// Largest one kept, bytes.
const SPARE_BYTES: usize = 4096;

/// The replies of one connection that cannot leave yet.
#[derive(Debug, Default)]
pub(crate) struct Places {
    waiting: VecDeque<Option<Vec<u8>>>,
    /// Sequence of the front of `waiting`.
    first: u64,
    /// Places not filled yet.
    unfilled: usize,
    /// Bytes of replies that wait for earlier ones.
    bytes: usize,
    spare: Vec<Vec<u8>>,
}

impl Places {
    /// Forwarded requests and the replies behind them.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// True when replies go straight to the output.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Replies awaited.
    pub(crate) fn unfilled(&self) -> usize {
        self.unfilled
    }

    /// Bytes of replies that wait for earlier ones.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps a place; returns the sequence to [`Places::fill`] it by.
    pub(crate) fn keep(&mut self) -> u64 {
        self.waiting.push_back(None);
        self.unfilled += 1;
        self.first + self.waiting.len() as u64 - 1
    }

    /// Puts a reply behind those still awaited.
    pub(crate) fn append(&mut self, reply: &[u8], output: &mut Output) {
        if self.waiting.is_empty() {
            output.raw(reply);
        } else {
            let filled = self.filled(reply);
            self.waiting.push_back(Some(filled));
            self.bytes += reply.len();
        }
    }

    /// Fills a place and moves what is now in order to `output`.
    pub(crate) fn fill(&mut self, sequence: u64, reply: &[u8], output: &mut Output) {
        let index = usize::try_from(sequence.wrapping_sub(self.first)).unwrap_or(usize::MAX);
        let kept = self.waiting.get(index).is_some_and(Option::is_none);
        assert!(kept, "a reply answers a place that was kept, once");
        self.unfilled -= 1;
        if index > 0 {
            self.waiting[index] = Some(self.filled(reply));
            self.bytes += reply.len();
            return;
        }
        output.raw(reply);
        self.pop();
        while let Some(Some(front)) = self.waiting.front_mut() {
            let mut front = std::mem::take(front);
            self.pop();
            self.bytes -= front.len();
            output.raw(&front);
            front.clear();
            if self.spare.len() < SPARE && front.capacity() <= SPARE_BYTES {
                self.spare.push(front);
            }
        }
    }

    /// Gives memory back that is not in use.
    pub(crate) fn trim(&mut self) {
        self.spare = Vec::new();
        self.waiting.shrink_to_fit();
    }

    fn pop(&mut self) {
        self.waiting.pop_front();
        self.first += 1;
    }

    fn filled(&mut self, reply: &[u8]) -> Vec<u8> {
        let mut filled = self.spare.pop().unwrap_or_default();
        filled.extend_from_slice(reply);
        filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_leave_in_request_order_whatever_order_they_come_in() {
        let (mut places, mut output) = (Places::default(), Output::default());
        places.append(b"a", &mut output);
        let first = places.keep();
        places.append(b"c", &mut output);
        let second = places.keep();
        places.append(b"e", &mut output);
        assert_eq!(output.as_bytes(), b"a");
        places.fill(second, b"d", &mut output);
        assert_eq!(output.as_bytes(), b"a");
        assert_eq!((places.unfilled(), places.bytes()), (1, 3));
        places.fill(first, b"b", &mut output);
        assert_eq!(output.as_bytes(), b"abcde");
        assert!(places.is_empty());
        assert_eq!((places.unfilled(), places.bytes()), (0, 0));
        places.append(b"f", &mut output);
        assert_eq!(output.as_bytes(), b"abcdef");
        assert_eq!(places.keep(), second + 2);
    }
}
