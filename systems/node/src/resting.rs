//! Replies that wait for a commit under way.
//!
//! A reply that shows or acknowledges what is not persisted yet stays in the output, and so does what is
//! behind it: replies leave in order. Commits have the numbers of [`beeline_kv::Shard::take_rests`].

use std::collections::VecDeque;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Resting {
    /// A commit, and where the first reply begins that waits for it, in bytes of the connection's life.
    /// Both grow from one to the next.
    marks: VecDeque<(u64, u64)>,
    /// Bytes that left.
    sent_bytes: u64,
    /// The latest commit of a reply that waits for its turn behind those of other shards.
    in_line: u64,
}

impl Resting {
    /// True where no reply waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.marks.is_empty() && self.in_line == 0
    }

    /// Everything from `start` on in the output waits for `commit`.
    pub(crate) fn mark(&mut self, commit: u64, start: usize) {
        let start = self.sent_bytes + start as u64;
        match self.marks.back_mut() {
            Some((last, _)) if *last >= commit => {}
            // Replies without a byte: a client that wants none takes no memory while a disk hangs.
            Some((last, at)) if *at == start => *last = commit,
            _ => self.marks.push_back((commit, start)),
        }
    }

    /// A reply that waits for `commit` is in line behind those of other shards.
    pub(crate) fn line_up(&mut self, commit: u64) {
        self.in_line = self.in_line.max(commit);
    }

    /// What was in line came into the output from `start` on; `all`: nothing is left in line.
    pub(crate) fn come_out(&mut self, start: usize, all: bool) {
        if self.in_line > 0 {
            self.mark(self.in_line, start);
        }
        if all {
            self.in_line = 0;
        }
    }

    /// Every commit up to this one is persisted.
    pub(crate) fn settle(&mut self, commit: u64) {
        while self.marks.front().is_some_and(|(waits_for, _)| *waits_for <= commit) {
            self.marks.pop_front();
        }
        if self.in_line <= commit {
            self.in_line = 0;
        }
    }

    /// Bytes of an output of `length` bytes that may leave.
    pub(crate) fn free_bytes(&self, length: usize) -> usize {
        self.marks.front().map_or(length, |(_, start)| (start - self.sent_bytes) as usize)
    }

    /// So many bytes left.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
    }

    /// No reply waits any more: what waited was taken out of the output.
    pub(crate) fn clear(&mut self) {
        self.marks.clear();
        self.in_line = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_leave_up_to_the_first_whose_commit_is_not_settled() {
        let mut resting = Resting::default();
        assert_eq!((resting.free_bytes(7), resting.is_empty()), (7, true));
        resting.mark(3, 5);
        // Behind it, and no later commit.
        resting.mark(2, 9);
        resting.mark(4, 12);
        assert_eq!((resting.free_bytes(20), resting.is_empty()), (5, false));
        resting.sent(4);
        assert_eq!(resting.free_bytes(16), 1);
        resting.settle(2);
        assert_eq!(resting.free_bytes(16), 1);
        resting.settle(3);
        assert_eq!(resting.free_bytes(16), 8);
        resting.settle(9);
        assert_eq!((resting.free_bytes(16), resting.is_empty()), (16, true));
        for commit in 10..1000 {
            resting.mark(commit, 16);
        }
        assert_eq!((resting.free_bytes(16), resting.marks.len()), (16, 1), "nothing lies between");
        resting.settle(998);
        assert!(!resting.is_empty());
        resting.settle(999);
        assert!(resting.is_empty());
    }

    #[test]
    fn what_was_in_line_waits_where_it_comes_out() {
        let mut resting = Resting::default();
        resting.line_up(5);
        assert_eq!((resting.free_bytes(3), resting.is_empty()), (3, false));
        resting.come_out(3, false);
        assert_eq!(resting.free_bytes(8), 3);
        resting.settle(5);
        assert!(resting.is_empty(), "what is left in line waited for the same");
        resting.line_up(6);
        resting.settle(6);
        resting.come_out(0, true);
        assert_eq!((resting.free_bytes(8), resting.is_empty()), (8, true));
    }
}
