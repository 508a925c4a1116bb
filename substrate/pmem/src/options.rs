//! What a pool is asked to be, and what it turned out to be.

use std::fmt;
use std::path::PathBuf;

use crate::error::PmemError;
use beeline_os::write_back::WriteBack;

/// The kinds of durable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// Files on a file system that maps persistent memory directly (`MAP_SYNC`).
    Dax,
    /// Files on an ordinary file system, mapped shared.
    File,
    /// Anonymous shareable memory: gone with the process.
    Dram,
    /// Heap memory whose every store, flush and fence is recorded.
    Sim,
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dax => "dax",
            Self::File => "file",
            Self::Dram => "dram",
            Self::Sim => "sim",
        })
    }
}

/// What acknowledged bytes survive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// Nothing.
    None,
    /// The end of the process, kill -9 included.
    #[default]
    Process,
    /// A loss of power.
    Power,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Process => "process",
            Self::Power => "power",
        })
    }
}

/// Smallest segment in bytes.
pub const MIN_SEGMENT_BYTES: u32 = 64 << 10;
/// Largest segment in bytes.
pub const MAX_SEGMENT_BYTES: u32 = 1 << 30;
/// Most segments in one pool: the descriptor table stays below 256 MiB.
pub const MAX_SEGMENTS: u32 = 1 << 20;

/// Configuration of a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// The kind wanted; `None` takes DAX where `MAP_SYNC` works and files elsewhere.
    pub kind: Option<PoolKind>,
    /// What acknowledged bytes are to survive.
    pub durability: Durability,
    /// Length of every segment: a multiple of 4 KiB from 64 KiB to 1 GiB. Read from the pool when
    /// an existing one is opened.
    pub segment_bytes: u32,
    /// Most bytes of segments. Opening with more grows the pool; with less, allocation stops there
    /// and what is in use stays. Rounded down to whole segments.
    pub capacity_bytes: u64,
    /// `dram` only: extra nanoseconds per line at a fence, standing for slower persistent memory
    /// (150 is the customary figure). Needs `emulate_durability`.
    pub write_delay_ns: u32,
    /// The instruction that writes lines back, where the pool does so; `None` takes the best the
    /// processor has. One it lacks is refused.
    pub write_back: Option<WriteBack>,
    /// Segments kept allocated, zeroed and pre-faulted by a background thread that otherwise
    /// sleeps; 0 runs no thread. Ignored by `sim`.
    pub prepared_segments: u32,
    /// Lets a `dram` pool, or a file pool on tmpfs, accept a durability it cannot keep, for
    /// experiments: it does all the work of the level, and its report says `emulated`.
    pub emulate_durability: bool,
    /// `sim` only: words flushed with `flush_words` are *not* persisted by the next fence, as on a
    /// file pool at power level; only `flush_words_now` persists them.
    pub lazy_words: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            kind: None,
            durability: Durability::Process,
            segment_bytes: 64 << 20,
            capacity_bytes: 16 << 30,
            write_delay_ns: 0,
            write_back: None,
            prepared_segments: 0,
            emulate_durability: false,
            lazy_words: false,
        }
    }
}

impl PoolOptions {
    /// Options for a volatile pool of at most `capacity_bytes`: durability none.
    #[must_use]
    pub fn volatile(segment_bytes: u32, capacity_bytes: u64) -> Self {
        Self { durability: Durability::None, segment_bytes, capacity_bytes, ..Self::default() }
    }

    /// Whole segments the capacity allows.
    pub(crate) fn slots(&self, segment_bytes: u32) -> Result<u32, PmemError> {
        let slots = self.capacity_bytes / u64::from(segment_bytes);
        match u32::try_from(slots) {
            Ok(0) => Err(PmemError::Options {
                option: "capacity_bytes",
                advice: "has to hold at least one segment",
            }),
            Ok(slots) if slots <= MAX_SEGMENTS => Ok(slots),
            _ => Err(PmemError::Options {
                option: "capacity_bytes",
                advice: "allows at most 1,048,576 segments; take larger segments",
            }),
        }
    }

    pub(crate) fn check(&self, kind: PoolKind) -> Result<(), PmemError> {
        let segment = self.segment_bytes;
        if !(MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&segment)
            || !segment.is_multiple_of(4096)
        {
            return Err(PmemError::Options {
                option: "segment_bytes",
                advice: "has to be a multiple of 4 KiB from 64 KiB to 1 GiB",
            });
        }
        if self.write_delay_ns != 0 && !(kind == PoolKind::Dram && self.emulate_durability) {
            return Err(PmemError::Options {
                option: "write_delay_ns",
                advice: "is for dram pools with emulate_durability; set it to 0",
            });
        }
        if self.write_back.is_some_and(|wanted| !WriteBack::available().contains(&wanted)) {
            return Err(PmemError::Options {
                option: "write_back",
                advice: "names an instruction this processor lacks; leave the choice to the pool",
            });
        }
        let durability = self.durability;
        if kind == PoolKind::Dram && durability > Durability::None && !self.emulate_durability {
            return Err(PmemError::CannotPromise { kind, durability });
        }
        self.slots(segment).map(drop)
    }
}

/// How flushed bytes become persisted at the pool's durability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// Nothing to do: bytes stored are as durable as the level asks.
    None,
    /// Write-back of cache lines and a store fence.
    CacheLine(WriteBack),
    /// The same on volatile memory, with a delay per line.
    CacheLineEmulated(WriteBack),
    /// `fdatasync` of the files written since the last fence.
    FileSync,
    /// Recorded by the simulated device.
    Recorded,
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none needed"),
            Self::CacheLine(write_back) => write!(f, "{write_back} + store fence"),
            Self::CacheLineEmulated(write_back) => {
                write!(f, "{write_back} + store fence on volatile memory")
            }
            Self::FileSync => f.write_str("fdatasync"),
            Self::Recorded => f.write_str("recorded"),
        }
    }
}

/// What opening found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The pool was made by this call.
    pub created: bool,
    /// The last user closed the pool in good order.
    pub clean: bool,
    /// Segment files that no descriptor refers to and that hold nothing (an allocation or a free
    /// was cut short), removed.
    pub orphans_removed: u32,
    /// Segment files that no descriptor refers to and that hold data: left as they are, and named
    /// in [`PoolReport::set_aside`]. The table may have lost them.
    pub orphans_set_aside: u32,
    /// Pages of the table that were overwritten (with zeros, most likely). What stood in them is
    /// lost: descriptors are set aside, root words may be zero.
    pub damaged_pages: u32,
    /// Descriptors, or marks of pages, of which one copy was damaged and the other good.
    pub healed_descriptors: u32,
    /// Descriptors with no good copy: their segments are neither opened nor reused, and their
    /// files are left for inspection.
    pub damaged_descriptors: u32,
    /// User or root words whose two copies differ. After an unclean end this is a store cut short
    /// (the newer value is used); after a clean one it is damage.
    pub unequal_words: u32,
}

impl Findings {
    /// True when something was found that no crash explains.
    #[must_use]
    pub fn damage(&self) -> bool {
        self.healed_descriptors > 0
            || self.damaged_descriptors > 0
            || self.damaged_pages > 0
            || self.orphans_set_aside > 0
            || (self.clean && self.unequal_words > 0)
    }
}

impl fmt::Display for PoolReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, durability {} ({})", self.kind, self.durability, self.mechanism)?;
        if self.emulated { f.write_str(", emulated") } else { Ok(()) }
    }
}

/// What a pool turned out to be.
#[derive(Clone, Debug)]
pub struct PoolReport {
    /// Its kind.
    pub kind: PoolKind,
    /// The level it promises.
    pub durability: Durability,
    /// How it keeps the promise.
    pub mechanism: Mechanism,
    /// The promise is for experiments only: the memory is volatile.
    pub emulated: bool,
    /// Extra nanoseconds per line at a fence.
    pub write_delay_ns: u32,
    /// Why this kind and mechanism, one sentence each.
    pub reasons: Vec<String>,
    /// What opening found.
    pub findings: Findings,
    /// Files that hold data and belong to no descriptor.
    pub set_aside: Vec<PathBuf>,
}
