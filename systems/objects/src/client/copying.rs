//! Long copies, shared among a few threads.
//!
//! One core moves a long object at a part of what the memory can do, and makes the pages of fresh
//! memory one after the other. The threads live for one copy: starting one takes some tens of
//! microseconds, a copy that is shared a millisecond and more.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A copy of fewer bytes is made by its caller alone.
const LEAST: usize = 8 << 20;
/// Bytes for each thread, at least.
const SHARE: usize = 4 << 20;
/// Threads of one copy, its caller included: with more the memory is the limit, not the cores.
const MOST_THREADS: usize = 4;
/// Bytes that a thread takes at a time: whole huge pages of the target, so that no two threads wait for
/// the kernel to make the same one.
const CHUNK: usize = 2 << 20;

/// Processors this process may use, as of the first long copy: asking reads several files.
fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Threads for a copy of `length` bytes where `processors` may be used.
fn threads(length: usize, processors: usize) -> usize {
    if length < LEAST { 1 } else { (length / SHARE).min(processors).clamp(1, MOST_THREADS) }
}

/// A copy that threads share.
struct Copy {
    /// Addresses: no thread reaches more than the chunks it took.
    source: usize,
    target: usize,
    length: usize,
    /// Chunks taken so far.
    taken: AtomicUsize,
}

impl Copy {
    /// The bytes of chunk `number`, of which the first ends where a huge page of the target does.
    fn chunk(&self, number: usize) -> Option<(usize, usize)> {
        let first = CHUNK - self.target % CHUNK;
        let start = if number == 0 { 0 } else { first + (number - 1) * CHUNK };
        let end = (first + number * CHUNK).min(self.length);
        (start < end).then_some((start, end))
    }

    /// Copies chunks until none is left.
    fn work(&self) {
        // The threads' end publishes the bytes; the count alone need not order anything.
        while let Some((start, end)) = self.chunk(self.taken.fetch_add(1, Ordering::Relaxed)) {
            let from: *const u8 = std::ptr::with_exposed_provenance(self.source + start);
            let to: *mut u8 = std::ptr::with_exposed_provenance_mut(self.target + start);
            // SAFETY: inside the ranges that the caller of `copy_long` vouched for; no other thread
            // took this chunk.
            unsafe { std::ptr::copy_nonoverlapping(from, to, end - start) };
        }
    }
}

/// Copies `length` bytes, by several threads where that is faster; all bytes are there on return.
///
/// # Safety
///
/// `source` is readable and `target` writable for `length` bytes until the call returns, from any
/// thread of this process; the ranges do not overlap, and no other code writes the target.
pub(super) unsafe fn copy_long(source: *const u8, target: *mut u8, length: usize) {
    let threads = if length < LEAST { 1 } else { threads(length, processors()) };
    // SAFETY: as the caller vouches; the threads end before the call returns.
    unsafe { copy_by(source, target, length, threads) };
}

/// # Safety
///
/// As [`copy_long`].
unsafe fn copy_by(source: *const u8, target: *mut u8, length: usize, threads: usize) {
    if threads < 2 {
        // SAFETY: as the caller vouches.
        unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
        return;
    }
    let copy = Copy {
        source: source.expose_provenance(),
        target: target.expose_provenance(),
        length,
        taken: AtomicUsize::new(0),
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without a thread the others do its part.
            let thread = std::thread::Builder::new().name("objects-copy".to_owned());
            let _ = thread.spawn_scoped(scope, || copy.work());
        }
        copy.work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_once_whatever_the_alignment_and_the_threads() {
        let source: Vec<u8> = (0..5 * CHUNK + 77).map(|at| (at % 251) as u8).collect();
        for (threads, skip) in [(1, 0), (2, 0), (2, 63), (3, 4096), (4, 1), (9, 640)] {
            let length = source.len() - skip - 5;
            let mut target = vec![255; source.len()];
            let to = target[skip..skip + length].as_mut_ptr();
            // SAFETY: both ranges lie inside their vectors, which live on and are not touched meanwhile.
            unsafe { copy_by(source.as_ptr(), to, length, threads) };
            assert!(target[skip..skip + length] == source[..length], "{threads} threads, {skip}");
            let untouched = target[..skip].iter().chain(&target[skip + length..]);
            assert!(untouched.into_iter().all(|byte| *byte == 255), "{threads} threads, {skip}");
        }
    }

    #[test]
    fn chunks_end_where_huge_pages_of_the_target_do() {
        for target in [0, 1, CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 4096] {
            for length in [1, CHUNK, CHUNK + 1, 5 * CHUNK - 3] {
                let copy = Copy { source: 0, target, length, taken: AtomicUsize::new(0) };
                let chunks: Vec<_> = (0..).map_while(|number| copy.chunk(number)).collect();
                let mut at = 0;
                for (start, end) in chunks {
                    assert!(start == at && end > start && end - start <= CHUNK);
                    assert!(end == length || (target + end).is_multiple_of(CHUNK));
                    at = end;
                }
                assert_eq!(at, length, "target {target}");
            }
        }
    }

    #[test]
    fn short_copies_and_single_processors_take_one_thread() {
        assert_eq!(threads(LEAST - 1, 16), 1);
        assert_eq!(threads(LEAST, 16), 2);
        assert_eq!(threads(LEAST, 1), 1);
        assert_eq!(threads(1 << 30, 2), 2);
        assert_eq!(threads(1 << 30, 64), MOST_THREADS);
    }
}
