//! Buffers that a thread uses for one write after the other.
//!
//! A document of 1 KB and its log entry are too long for the allocator's lists of short pieces, so each of them
//! would be cut out of the heap, and its neighbours joined again, with every insertion.
//!
//! Invariant: a thread keeps at most [`KEPT`] of them, of at most [`LONGEST`] bytes each.

use std::cell::RefCell;

/// Buffers that a thread keeps.
const KEPT: usize = 4;
/// A longer one is not kept.
const LONGEST: usize = 64 << 10;
/// The shortest that is made.
const SHORTEST: usize = 2 << 10;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer with room for so many bytes.
pub(crate) fn take(bytes: usize) -> Vec<u8> {
    let kept = SPARE.with_borrow_mut(|spare| {
        let at = spare.iter().rposition(|one| one.capacity() >= bytes)?;
        Some(spare.swap_remove(at))
    });
    kept.unwrap_or_else(|| Vec::with_capacity(bytes.max(SHORTEST)))
}

/// Keeps a buffer for [`take`], where there is room for it.
pub(crate) fn give(mut buffer: Vec<u8>) {
    if !(SHORTEST..=LONGEST).contains(&buffer.capacity()) {
        return;
    }
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < KEPT {
            buffer.clear();
            spare.push(buffer);
        }
    });
}

/// Buffers that this thread keeps.
#[cfg(test)]
pub(crate) fn kept() -> usize {
    SPARE.with_borrow(Vec::len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_empty_and_what_is_kept_is_bounded() {
        std::thread::spawn(|| {
            let mut first = take(1000);
            first.extend_from_slice(b"of another document");
            let place = first.as_ptr();
            give(first);
            let again = take(SHORTEST);
            assert_eq!((again.as_ptr(), again.len()), (place, 0));
            give(again);
            assert!(take(SHORTEST + 1).capacity() > SHORTEST, "one that is too short stays");
            give(Vec::with_capacity(LONGEST + 1));
            give(Vec::with_capacity(SHORTEST - 1));
            assert_eq!(kept(), 1);
            for _ in 0..2 * KEPT {
                give(Vec::with_capacity(LONGEST));
            }
            assert_eq!(kept(), KEPT);
        })
        .join()
        .unwrap();
    }
}
