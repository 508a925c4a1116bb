//! The DMA engine of one link: tags, credits, completions in any order.
//!
//! Source: spec/kv-direct.md 4, 5.7.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use beeline_env::Randomness;

use crate::platform::{
    FASTEST_READ_SECONDS, LINK_LINES, READ_CREDITS, READ_SECONDS, TAGS, WRITE_CREDITS,
};

/// What a link may have under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tags for reads.
    pub tags: usize,
    /// Credits for reads.
    pub read_credits: usize,
    /// Credits for writes.
    pub write_credits: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { tags: TAGS, read_credits: READ_CREDITS, write_credits: WRITE_CREDITS }
    }
}

/// What a run of a link gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    /// Accesses a second.
    pub rate: f64,
    /// Most reads under way at once.
    pub most_reads: usize,
    /// Mean time of a read, seconds.
    pub mean_read: f64,
}

const fn picoseconds(seconds: f64) -> u64 {
    (seconds * 1e12) as u64
}

/// `reads` random reads of 64 bytes, issued as soon as there is a tag, a credit and room on the link. Each
/// completion is handed to `done` with the number its read was issued under.
pub fn read(limits: Limits, reads: u64, seed: u64, mut done: impl FnMut(u64)) -> Run {
    let mut random = Randomness::new(seed);
    let mut free: Vec<usize> = (0..limits.tags.min(limits.read_credits)).collect();
    let most = free.len();
    let mut tags = vec![0_u64; most];
    // Completion time and tag.
    let mut under_way: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let fastest = picoseconds(FASTEST_READ_SECONDS);
    // What a read takes more than the fastest is spread evenly around its mean.
    let spread = 2 * (picoseconds(READ_SECONDS) - fastest);
    let per_line = picoseconds(1.0 / LINK_LINES);
    let (mut now, mut link_free, mut issued, mut completed) = (0_u64, 0_u64, 0_u64, 0_u64);
    let (mut most_reads, mut waited) = (0, 0_u64);
    while completed < reads {
        while issued < reads
            && now >= link_free
            && let Some(tag) = free.pop()
        {
            let takes = fastest + random.below(spread);
            under_way.push(Reverse((now + takes, tag)));
            tags[tag] = issued;
            waited += takes;
            issued += 1;
            link_free = now + per_line;
            most_reads = most_reads.max(under_way.len());
        }
        let can_issue = issued < reads && !free.is_empty();
        let next = under_way.peek().map_or(u64::MAX, |Reverse((at, _))| *at);
        if can_issue && link_free < next {
            now = link_free.max(now);
            continue;
        }
        let Some(Reverse((at, tag))) = under_way.pop() else { break };
        now = at.max(now);
        done(tags[tag]);
        free.push(tag);
        completed += 1;
    }
    Run {
        rate: reads as f64 / (now as f64 / 1e12),
        most_reads,
        mean_read: waited as f64 / reads as f64 / 1e12,
    }
}

/// Lines a second over all links, for operations of so many reads and writes each: reads wait for tags,
/// writes for the links alone.
#[must_use]
pub fn operations_a_second(reads: f64, writes: f64, links: usize) -> f64 {
    let tags = TAGS as f64 / READ_SECONDS * links as f64;
    let lines = LINK_LINES * links as f64;
    // Reads and writes go in opposite directions of a link.
    let by_tags = if reads > 0.0 { tags / reads } else { f64::INFINITY };
    let by_lines = if writes > 0.0 { lines / writes } else { f64::INFINITY };
    by_tags.min(by_lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_reads_sixty_million_lines_a_second_because_of_its_tags() {
        let run = read(Limits::default(), 200_000, 1, |_| {});
        assert!((58e6..62e6).contains(&run.rate), "{}", run.rate);
        assert_eq!(run.most_reads, TAGS);
        assert!((1.0e-6..1.1e-6).contains(&run.mean_read));
        let wide = Limits { tags: 256, ..Limits::default() };
        let run = read(wide, 200_000, 1, |_| {});
        assert_eq!(run.most_reads, READ_CREDITS, "then the credits bind");
        let wider = Limits { tags: 256, read_credits: 256, ..Limits::default() };
        let run = read(wider, 200_000, 1, |_| {});
        assert!((85e6..88e6).contains(&run.rate), "then the link does: {}", run.rate);
    }

    #[test]
    fn completions_come_in_any_order_and_each_once() {
        let mut seen = Vec::new();
        read(Limits::default(), 5_000, 2, |number| seen.push(number));
        assert!(!seen.is_sorted(), "they overtake each other");
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..5_000));
    }
}
