//! Processor write-back of cache lines: `clwb`, `clflushopt` or `clflush`, then `sfence`.
//!
//! Invariants: the kind is found once per process by `cpuid`; [`persist_range`] returns after the
//! fence that orders the write-backs before anything the caller stores next.

use std::sync::OnceLock;

/// Bytes of one cache line.
pub const CACHE_LINE_BYTES: usize = 64;

/// Which instruction writes a line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteBack {
    /// Writes back, keeps the line.
    Clwb,
    /// Writes back and evicts, weakly ordered.
    Clflushopt,
    /// Writes back and evicts, serialised per line.
    Clflush,
    /// The processor has none we know.
    None,
}

impl WriteBack {
    /// What this processor offers, best first.
    #[must_use]
    pub fn detect() -> Self {
        static FOUND: OnceLock<WriteBack> = OnceLock::new();
        *FOUND.get_or_init(detect)
    }

    /// Instruction name, for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::Clflushopt => "clflushopt",
            Self::Clflush => "clflush",
            Self::None => "none",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> WriteBack {
    // Leaf 7, sub-leaf 0, ebx: bit 24 is clwb, bit 23 clflushopt. Leaf 1, edx: bit 19 is clflush.
    let (leaf_1, leaf_7) = (std::arch::x86_64::__cpuid(1), std::arch::x86_64::__cpuid_count(7, 0));
    if leaf_7.ebx & (1 << 24) != 0 {
        WriteBack::Clwb
    } else if leaf_7.ebx & (1 << 23) != 0 {
        WriteBack::Clflushopt
    } else if leaf_1.edx & (1 << 19) != 0 {
        WriteBack::Clflush
    } else {
        WriteBack::None
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> WriteBack {
    WriteBack::None
}

/// Writes back every line that `start..start+length` touches, then fences. False when the
/// processor has no write-back instruction; nothing was made persistent then.
///
/// # Safety
///
/// The range is mapped.
#[must_use]
pub unsafe fn persist_range(start: *const u8, length: usize) -> bool {
    let kind = WriteBack::detect();
    if kind == WriteBack::None {
        return false;
    }
    let mut line = start.map_addr(|address| address & !(CACHE_LINE_BYTES - 1));
    let end = start.addr() + length;
    while line.addr() < end {
        // SAFETY: the line overlaps the caller's mapped range, so it is mapped; the instruction
        // was found by `detect`.
        unsafe { write_back_line(line, kind) };
        line = line.wrapping_add(CACHE_LINE_BYTES);
    }
    store_fence();
    true
}

#[cfg(target_arch = "x86_64")]
unsafe fn write_back_line(line: *const u8, kind: WriteBack) {
    match kind {
        WriteBack::Clwb => {
            // SAFETY: mapped line, instruction present (caller).
            unsafe {
                std::arch::asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags))
            };
        }
        WriteBack::Clflushopt => {
            // SAFETY: mapped line, instruction present (caller).
            unsafe {
                std::arch::asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
            };
        }
        WriteBack::Clflush => {
            // SAFETY: mapped line, instruction present (caller).
            unsafe {
                std::arch::asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags));
            };
        }
        WriteBack::None => {}
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn write_back_line(_line: *const u8, _kind: WriteBack) {}

/// Orders earlier stores and write-backs before later stores.
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has sfence.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
