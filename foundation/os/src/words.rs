//! Copies whose aligned words appear whole.
//!
//! Whoever watches shared memory reads 8-byte words and expects each as it was or as it will be.
//! `memcpy` divides them where a range begins or ends inside a word, and where the bytes of a word
//! come from two places. Here every aligned word that a copy covers is stored at once; bytes of
//! words that it covers in part are stored one by one.

use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = 8;

/// Stores one aligned word.
///
/// # Safety
///
/// `target` is valid for writes of eight bytes and aligned to eight.
#[inline(always)]
unsafe fn store_word(target: *mut u8, word: [u8; WORD]) {
    // SAFETY: the caller's contract; every party reaches shared words through atomics or copies.
    let target = unsafe { AtomicU64::from_ptr(target.cast()) };
    // Relaxed: what orders words is the caller's business.
    target.store(u64::from_ne_bytes(word), Ordering::Relaxed);
}

/// # Safety
///
/// Valid for reads and writes of `length` bytes.
#[inline(always)]
unsafe fn copy_bytes(source: *const u8, target: *mut u8, length: usize) {
    for index in 0..length {
        // SAFETY: inside the range (caller).
        let byte = unsafe { source.wrapping_add(index).read() };
        let to = target.wrapping_add(index);
        // SAFETY: as above. Volatile: bytes of a word that others may be storing into are not
        // merged into wider stores that begin elsewhere.
        unsafe { to.write_volatile(byte) };
    }
}

/// Copies between memory that others may write or read meanwhile; each aligned word of the target
/// appears at once.
///
/// # Safety
///
/// `source` is valid for reads and `target` for writes of `length` bytes, and they do not overlap.
#[inline(always)]
pub unsafe fn copy_words(source: *const u8, target: *mut u8, length: usize) {
    if length == WORD && target.addr().is_multiple_of(WORD) {
        // SAFETY: eight readable bytes (caller).
        let word = unsafe { source.cast::<[u8; WORD]>().read() };
        // SAFETY: eight writable bytes (caller), aligned (just checked).
        unsafe { store_word(target, word) };
    } else {
        // SAFETY: the caller's contract.
        unsafe { copy_many(source, target, length) };
    }
}

/// # Safety
///
/// As [`copy_words`].
unsafe fn copy_many(source: *const u8, target: *mut u8, length: usize) {
    let head = (target.addr().wrapping_neg() % WORD).min(length);
    let whole = (length - head) & !(WORD - 1);
    // SAFETY: the head, the words and the tail lie one behind the other in both ranges.
    unsafe { copy_bytes(source, target, head) };
    let (from, to) = (source.wrapping_add(head), target.wrapping_add(head));
    // SAFETY: as above. Target and length are multiples of a word, so that `memcpy`, which moves
    // eight bytes or multiples of them at places that are then multiples of eight, divides none.
    unsafe { std::ptr::copy_nonoverlapping(from, to, whole) };
    let (from, to) = (from.wrapping_add(whole), to.wrapping_add(whole));
    // SAFETY: as above.
    unsafe { copy_bytes(from, to, length - head - whole) };
}

/// Places bytes that come in pieces in one range; a word whose bytes come in several is stored when
/// its last one is here.
#[derive(Debug)]
pub struct WordPlacer {
    /// Where the next word, or byte, goes.
    target: *mut u8,
    /// The first bytes of an aligned word.
    held: [u8; WORD],
    count: usize,
}

impl WordPlacer {
    /// Begins at `target`.
    #[must_use]
    pub fn new(target: *mut u8) -> Self {
        Self { target, held: [0; WORD], count: 0 }
    }

    /// Places `length` bytes more.
    ///
    /// # Safety
    ///
    /// `source` is valid for reads of `length` bytes, and the target for writes of all that was
    /// put so far and of these.
    pub unsafe fn put(&mut self, mut source: *const u8, mut length: usize) {
        while length > 0 {
            if self.count == 0 {
                // Up to the first aligned word, and then all whole ones.
                let head = (self.target.addr().wrapping_neg() % WORD).min(length);
                let whole = head + ((length - head) & !(WORD - 1));
                if whole > 0 {
                    // SAFETY: the caller's contract.
                    unsafe { copy_words(source, self.target, whole) };
                    self.target = self.target.wrapping_add(whole);
                    source = source.wrapping_add(whole);
                    length -= whole;
                    continue;
                }
            }
            // SAFETY: a readable byte (caller).
            self.held[self.count] = unsafe { source.read() };
            source = source.wrapping_add(1);
            self.count += 1;
            length -= 1;
            if self.count == WORD {
                // SAFETY: aligned, as bytes are held from a word's beginning on; the caller vouches
                // for the eight bytes put.
                unsafe { store_word(self.target, self.held) };
                self.target = self.target.wrapping_add(WORD);
                self.count = 0;
            }
        }
    }

    /// Places what is held of a word that nothing more will come for.
    ///
    /// # Safety
    ///
    /// As for the puts before.
    pub unsafe fn finish(self) {
        // SAFETY: the bytes held were put, so the target has room for them (caller).
        unsafe { copy_bytes(self.held.as_ptr(), self.target, self.count) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[repr(align(64))]
    struct Aligned([u8; 128]);

    proptest! {
        #[test]
        fn pieces_come_out_as_one_copy(
            at in 0..16_usize, cuts in proptest::collection::vec(0..20_usize, 1..6),
        ) {
            let source: Vec<u8> = (1..=100).collect();
            let mut target = Aligned([0; 128]);
            let start = target.0.as_mut_ptr().wrapping_add(at);
            let mut placer = WordPlacer::new(start);
            let mut done = 0;
            for cut in cuts {
                // SAFETY: at most 100 bytes of 100, to at most 116 of 128.
                unsafe { placer.put(source.as_ptr().wrapping_add(done), cut) };
                done += cut;
            }
            // SAFETY: as above.
            unsafe { placer.finish() };
            let mut expected = [0; 128];
            expected[at..at + done].copy_from_slice(&source[..done]);
            prop_assert_eq!(target.0, expected);
        }

        #[test]
        fn a_copy_of_words_is_a_copy(at in 0..16_usize, from in 0..16_usize, length in 0..90_usize) {
            let source: Vec<u8> = (1..=120).collect();
            let mut target = Aligned([0; 128]);
            let to = target.0.as_mut_ptr().wrapping_add(at);
            // SAFETY: at most 106 bytes of 120, to at most 106 of 128.
            unsafe { copy_words(source.as_ptr().wrapping_add(from), to, length) };
            let mut expected = [0; 128];
            expected[at..at + length].copy_from_slice(&source[from..from + length]);
            prop_assert_eq!(target.0, expected);
        }
    }

    /// No word is stored before all of it is there.
    #[test]
    fn a_word_in_two_pieces_appears_with_the_second() {
        for cut in 1..8 {
            let mut target = Aligned([0; 128]);
            let start = target.0.as_mut_ptr();
            let mut placer = WordPlacer::new(start);
            // SAFETY: eight bytes of each in all.
            unsafe { placer.put([0xFF_u8; 8].as_ptr(), cut) };
            // SAFETY: a byte of the array, which the placer alone writes.
            assert_eq!(unsafe { start.read() }, 0, "cut at {cut}");
            // SAFETY: as above.
            unsafe { placer.put([0xFF_u8; 8].as_ptr(), 8 - cut) };
            assert_eq!(target.0[..9], [255, 255, 255, 255, 255, 255, 255, 255, 0]);
        }
    }
}
