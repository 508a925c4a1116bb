//! The processor's side of persistence: write-back of lines, fences, non-temporal copies.
//!
//! Invariants: the best instruction is found once per process from what the processor reports;
//! written-back bytes count as persisted only after a store fence of the same thread. `clwb` keeps
//! the line in the cache, `clflushopt` evicts it, `clflush` evicts it and is ordered with its
//! neighbours, so it is slower.

use std::fmt;
use std::sync::OnceLock;

/// Bytes of one cache line.
pub const CACHE_LINE_BYTES: usize = 64;

/// Which instruction writes a line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteBack {
    /// x86: writes back, keeps the line.
    Clwb,
    /// x86: writes back and evicts, weakly ordered.
    Clflushopt,
    /// x86: writes back and evicts, one after the other.
    Clflush,
    /// Arm: cleans to the point of persistence.
    DcCvap,
    /// Arm: cleans to the point of coherency, where no point of persistence is reported.
    DcCvac,
    /// The processor has none we know.
    None,
}

impl WriteBack {
    /// What this processor offers, best first.
    #[must_use]
    pub fn detect() -> Self {
        static FOUND: OnceLock<WriteBack> = OnceLock::new();
        *FOUND.get_or_init(|| Self::available().first().copied().unwrap_or(Self::None))
    }

    /// Every instruction this processor has, best first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        if cfg!(miri) { Vec::new() } else { arch::available() }
    }

    /// Instruction name, for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::Clflushopt => "clflushopt",
            Self::Clflush => "clflush",
            Self::DcCvap => "dc cvap",
            Self::DcCvac => "dc cvac",
            Self::None => "none",
        }
    }
}

impl fmt::Display for WriteBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The lines that `length` bytes at address `start` touch, as addresses.
fn lines(start: usize, length: usize) -> impl Iterator<Item = usize> {
    let first = start & !(CACHE_LINE_BYTES - 1);
    let end = if length == 0 { first } else { start + length };
    (first..end).step_by(CACHE_LINE_BYTES)
}

/// How many lines `length` bytes at `start` touch.
#[must_use]
pub fn line_count(start: usize, length: usize) -> usize {
    lines(start, length).count()
}

/// Starts write-back of every line that `start..start+length` touches, with an instruction the
/// processor has. Done after the calling thread's next [`store_fence`].
///
/// # Safety
///
/// The range is mapped, and `instruction` came from [`WriteBack::detect`] or
/// [`WriteBack::available`].
pub unsafe fn write_back(instruction: WriteBack, start: *const u8, length: usize) {
    for line in lines(start.addr(), length) {
        // SAFETY: the line overlaps the caller's mapped range, so it is mapped; the processor has
        // the instruction (caller).
        unsafe { arch::write_back_line(instruction, line) };
    }
}

/// Writes back every line that `start..start+length` touches, then fences. False when the
/// processor has no write-back instruction; nothing was made persistent then.
///
/// # Safety
///
/// The range is mapped.
#[must_use]
pub unsafe fn persist_range(start: *const u8, length: usize) -> bool {
    let instruction = WriteBack::detect();
    if instruction == WriteBack::None {
        return false;
    }
    // SAFETY: the caller's range; the instruction was just detected.
    unsafe { write_back(instruction, start, length) };
    store_fence();
    true
}

/// Orders earlier stores and write-backs of this thread before everything after.
pub fn store_fence() {
    arch::store_fence();
}

/// Copies past the cache as far as alignment allows, and ends with a store fence (the language's
/// memory model needs one after non-temporal stores). Edges that are not aligned to 16 bytes are
/// stored normally and written back, so that the whole range needs no flush any more.
///
/// # Safety
///
/// `target..target+source.len()` is mapped writable and does not overlap `source`; `instruction`
/// is one the processor has.
pub unsafe fn copy_nontemporal(instruction: WriteBack, target: *mut u8, source: &[u8]) {
    if cfg!(miri) {
        // SAFETY: the caller's contract. The interpreter has no non-temporal stores.
        unsafe { copy_and_write_back(instruction, target, source) };
    } else {
        // SAFETY: the caller's contract.
        unsafe { arch::copy_nontemporal(instruction, target, source) };
    }
}

/// Plain copy and write-back, for edges and for processors without non-temporal stores.
///
/// # Safety
///
/// As for [`copy_nontemporal`].
unsafe fn copy_and_write_back(instruction: WriteBack, target: *mut u8, source: &[u8]) {
    if source.is_empty() {
        return;
    }
    // SAFETY: the caller keeps the target mapped writable and apart from the source.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
    // SAFETY: the same range.
    unsafe { write_back(instruction, target, source.len()) };
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::asm;
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    use super::{WriteBack, copy_and_write_back};

    pub(super) fn available() -> Vec<WriteBack> {
        let highest = std::arch::x86_64::__cpuid(0).eax;
        let extended = if highest >= 7 { std::arch::x86_64::__cpuid_count(7, 0).ebx } else { 0 };
        let mut found = Vec::new();
        if extended & (1 << 24) != 0 {
            found.push(WriteBack::Clwb);
        }
        if extended & (1 << 23) != 0 {
            found.push(WriteBack::Clflushopt);
        }
        // SSE2, part of x86-64, brings clflush.
        found.push(WriteBack::Clflush);
        found
    }

    pub(super) unsafe fn write_back_line(instruction: WriteBack, line: usize) {
        match instruction {
            WriteBack::Clwb => {
                // SAFETY: the line is mapped (caller) and the processor reports clwb.
                unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) };
            }
            WriteBack::Clflushopt => {
                // SAFETY: the line is mapped (caller) and the processor reports clflushopt.
                unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) };
            }
            WriteBack::Clflush => {
                // SAFETY: the line is mapped (caller); every x86-64 processor has clflush.
                unsafe { asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)) };
            }
            _ => {}
        }
    }

    pub(super) fn store_fence() {
        if cfg!(miri) {
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        } else {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { _mm_sfence() };
        }
    }

    pub(super) unsafe fn copy_nontemporal(instruction: WriteBack, target: *mut u8, source: &[u8]) {
        let head = target.align_offset(16).min(source.len());
        let (edge, rest) = source.split_at(head);
        let (blocks, tail) = rest.as_chunks::<16>();
        // SAFETY: the first `head` bytes of the caller's range.
        unsafe { copy_and_write_back(instruction, target, edge) };
        // SAFETY: `head` is within the range.
        let mut at = unsafe { target.add(head) };
        for block in blocks {
            // SAFETY: `block` is 16 readable bytes; the load needs no alignment.
            let value = unsafe { _mm_loadu_si128(block.as_ptr().cast::<__m128i>()) };
            // SAFETY: `at` is aligned to 16 (head) and 16 bytes of the caller's range follow it.
            unsafe { _mm_stream_si128(at.cast::<__m128i>(), value) };
            // SAFETY: at most one past the range's end.
            at = unsafe { at.add(16) };
        }
        // SAFETY: the last bytes of the caller's range.
        unsafe { copy_and_write_back(instruction, at, tail) };
        store_fence();
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use std::arch::asm;

    use super::{WriteBack, copy_and_write_back};

    pub(super) fn available() -> Vec<WriteBack> {
        let mut found = Vec::new();
        if std::arch::is_aarch64_feature_detected!("dpb") {
            found.push(WriteBack::DcCvap);
        }
        found.push(WriteBack::DcCvac);
        found
    }

    pub(super) unsafe fn write_back_line(instruction: WriteBack, line: usize) {
        match instruction {
            WriteBack::DcCvap => {
                // SAFETY: the line is mapped (caller); the processor reports dpb. The encoding of
                // `dc cvap`, spelled so that assemblers for the base architecture accept it.
                unsafe { asm!("sys #3, c7, c12, #1, {}", in(reg) line, options(nostack)) };
            }
            WriteBack::DcCvac => {
                // SAFETY: the line is mapped (caller); Linux lets user programs run dc cvac.
                unsafe { asm!("dc cvac, {}", in(reg) line, options(nostack)) };
            }
            _ => {}
        }
    }

    pub(super) fn store_fence() {
        // SAFETY: a barrier touches no memory.
        unsafe { asm!("dsb sy", options(nostack)) };
    }

    pub(super) unsafe fn copy_nontemporal(instruction: WriteBack, target: *mut u8, source: &[u8]) {
        // SAFETY: the caller's contract.
        unsafe { copy_and_write_back(instruction, target, source) };
        store_fence();
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    use super::{WriteBack, copy_and_write_back};

    pub(super) fn available() -> Vec<WriteBack> {
        Vec::new()
    }

    pub(super) unsafe fn write_back_line(_instruction: WriteBack, _line: usize) {}

    pub(super) fn store_fence() {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    pub(super) unsafe fn copy_nontemporal(instruction: WriteBack, target: *mut u8, source: &[u8]) {
        // SAFETY: the caller's contract.
        unsafe { copy_and_write_back(instruction, target, source) };
        store_fence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_touches_the_lines_it_overlaps() {
        assert_eq!(line_count(0, 0), 0);
        assert_eq!(line_count(63, 1), 1);
        assert_eq!(line_count(63, 2), 2);
        assert_eq!(line_count(64, 64), 1);
        assert_eq!(line_count(1, 64), 2);
    }

    #[test]
    fn nontemporal_copies_equal_plain_ones_at_every_alignment() {
        let source: Vec<u8> = (0..=255).collect();
        for offset in 0..20 {
            for length in [0, 1, 7, 15, 16, 17, 31, 64, 100, 200] {
                let mut target = vec![0xee_u8; 300];
                let at = &mut target[offset..offset + length];
                // SAFETY: `at` is a live, exclusive slice of `length` bytes.
                unsafe {
                    copy_nontemporal(WriteBack::detect(), at.as_mut_ptr(), &source[..length]);
                }
                assert_eq!(&target[offset..offset + length], &source[..length]);
                assert!(target[..offset].iter().all(|&b| b == 0xee));
                assert!(target[offset + length..].iter().all(|&b| b == 0xee));
            }
        }
    }

    #[test]
    fn contents_survive_a_write_back_of_unaligned_ranges() {
        let bytes: Vec<u8> = (0..=255).collect();
        for (start, length) in [(0, 256), (1, 1), (63, 2), (100, 0)] {
            // SAFETY: the range lies inside `bytes`.
            let done = unsafe { persist_range(bytes[start..].as_ptr(), length) };
            assert_eq!(done, WriteBack::detect() != WriteBack::None);
        }
        assert!(bytes.iter().copied().eq(0..=255));
    }

    #[test]
    fn every_instruction_the_processor_reports_can_run() {
        let bytes = [7_u8; 256];
        for instruction in WriteBack::available() {
            // SAFETY: `bytes` is live.
            unsafe { write_back(instruction, bytes.as_ptr(), bytes.len()) };
            store_fence();
        }
        assert_eq!(bytes, [7; 256]);
    }
}
