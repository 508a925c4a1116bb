//! Cache lines asked for ahead of their use. Hints only: nothing is read or written, and an address
//! that is not mapped does no harm.

/// Bytes of a line.
const LINE: usize = 64;
/// Most lines asked for at once; the processor goes on by itself from there.
const LINES: usize = 8;

/// Asks for the lines of `length` bytes from `start` on, to read them.
#[inline(always)]
pub fn for_reading(start: *const u8, length: usize) {
    each_line(start, length, |line| {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch is a hint: it reads nothing architecturally and cannot fault.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
        }
        #[cfg(any(not(target_arch = "x86_64"), miri))]
        let _ = line;
    });
}

/// Asks for the lines of `length` bytes from `start` on as their only holder, to write them: where
/// another processor has them, they are on their way by the time of the first store.
#[inline(always)]
pub fn for_writing(start: *const u8, length: usize) {
    each_line(start, length, |line| {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: as for reading; a processor that does not know the instruction ignores it.
        unsafe {
            std::arch::asm!(
                "prefetchw [{}]",
                in(reg) line,
                options(nostack, preserves_flags, readonly)
            );
        }
        #[cfg(any(not(target_arch = "x86_64"), miri))]
        let _ = line;
    });
}

#[inline(always)]
fn each_line(start: *const u8, length: usize, ask: impl Fn(*const u8)) {
    if length == 0 {
        return;
    }
    let skew = start.addr() % LINE;
    let first = start.wrapping_sub(skew);
    for line in 0..(skew + length).div_ceil(LINE).min(LINES) {
        ask(first.wrapping_add(line * LINE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn lines(start: usize, length: usize) -> Vec<usize> {
        let asked = RefCell::new(Vec::new());
        let start = std::ptr::without_provenance(start);
        each_line(start, length, |line| asked.borrow_mut().push(line.addr()));
        asked.into_inner()
    }

    #[test]
    fn every_line_of_a_range_is_asked_for_once() {
        assert_eq!(lines(640, 64), [640]);
        assert_eq!(lines(650, 64), [640, 704]);
        assert_eq!(lines(640, 65), [640, 704]);
        assert_eq!(lines(640, 0), [0; 0]);
        assert_eq!(lines(640, 1 << 20).len(), LINES);
    }

    #[test]
    fn an_address_that_is_not_mapped_does_no_harm() {
        for_reading(std::ptr::without_provenance(8), 512);
        for_writing(std::ptr::without_provenance(8), 512);
    }
}
