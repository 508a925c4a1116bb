//! Requests while they are executed, and while they wait.
//!
//! A request that can run at once borrows what the caller passed. One that must wait (for a key,
//! for credit, for a flush, or behind another) moves into a [`Deferred`] entry, which owns a copy
//! of inline bytes and handles on its regions.

use beeline_fabric::{
    FlushKind, LocalData, MemoryRegion, Opcode, Operation, PostError, RemoteAddress, RemoteKey,
    ScatterGatherEntry, WorkRequest,
};

use beeline_os::words::{WordPlacer, copy_words};

use crate::receives::check_writable;
use crate::{MAX_INLINE_BYTES, MAX_SCATTER_GATHER_ENTRIES, MAX_SEND_BYTES};

/// A local range with its own handle.
#[derive(Debug)]
pub(crate) struct Kept {
    region: MemoryRegion,
    offset: u64,
    length: u64,
}

/// Local ranges of a request, borrowed from the caller or from a [`Deferred`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Local<'a> {
    Inline(&'a [u8]),
    One(ScatterGatherEntry<'a>),
    Borrowed(&'a [ScatterGatherEntry<'a>]),
    Kept(&'a [Kept]),
}

impl<'a> Local<'a> {
    /// Copies all bytes to `target`.
    ///
    /// # Safety
    ///
    /// `target` is valid for writes of the request's length, and every range was checked against
    /// its region when the request was posted.
    #[inline(always)]
    pub(crate) unsafe fn copy_to(self, target: *mut u8) {
        match self {
            Local::Inline(bytes) => {
                // SAFETY: the caller's contract; a slice cannot overlap a mapping that nobody
                // holds references into.
                unsafe { copy(bytes.as_ptr(), target, bytes.len()) };
            }
            Local::One(entry) => {
                let (source, length) = local_range(&entry);
                // SAFETY: the caller's contract.
                unsafe { copy(source, target, length) };
            }
            // SAFETY: the caller's contract.
            Local::Borrowed(entries) => unsafe { copy_entries(entries.iter().copied(), target) },
            // SAFETY: the caller's contract.
            Local::Kept(kept) => unsafe { copy_entries(kept.iter().map(Kept::entry), target) },
        }
    }

    /// The one range that receives a result.
    pub(crate) fn result(self) -> Option<ScatterGatherEntry<'a>> {
        match self {
            Local::One(entry) => Some(entry),
            Local::Kept([kept]) => Some(kept.entry()),
            _ => None,
        }
    }
}

impl Kept {
    fn entry(&self) -> ScatterGatherEntry<'_> {
        ScatterGatherEntry { region: &self.region, offset: self.offset, length: self.length }
    }

    fn new(entry: &ScatterGatherEntry<'_>) -> Self {
        Self { region: entry.region.clone(), offset: entry.offset, length: entry.length }
    }
}

/// Where an entry's bytes are, and how many.
#[inline(always)]
pub(crate) fn local_range(entry: &ScatterGatherEntry<'_>) -> (*const u8, usize) {
    #[expect(clippy::cast_possible_truncation, reason = "ranges lie inside mapped regions")]
    let (offset, length) = (entry.offset as usize, entry.length as usize);
    // SAFETY: the range lies inside the region (checked when posted).
    (unsafe { entry.region.base().add(offset) }, length)
}

/// Gathers; a word of the target whose bytes come from several entries appears at once too.
///
/// # Safety
///
/// As [`Local::copy_to`].
unsafe fn copy_entries<'a>(entries: impl Iterator<Item = ScatterGatherEntry<'a>>, target: *mut u8) {
    let mut placer = WordPlacer::new(target);
    for entry in entries {
        let (source, length) = local_range(&entry);
        // SAFETY: the source lies inside its region; the target has room for all entries (caller).
        unsafe { placer.put(source, length) };
    }
    // SAFETY: as above.
    unsafe { placer.finish() };
}

/// Copies between memory that others may write or read meanwhile. Aligned words of the target
/// appear whole; one that is all there is pairs with whatever acquire its poller uses.
///
/// # Safety
///
/// `source` is valid for reads and `target` for writes of `length` bytes, at addresses that do not
/// overlap (they may be views of the same object, whose bytes are then mangled).
#[inline(always)]
pub(crate) unsafe fn copy(source: *const u8, target: *mut u8, length: usize) {
    if length == 8 && target.addr().is_multiple_of(8) {
        // SAFETY: eight readable bytes (caller).
        let word = unsafe { source.cast::<u64>().read_unaligned() };
        // SAFETY: eight writable bytes (caller), aligned (just checked).
        let target = unsafe { std::sync::atomic::AtomicU64::from_ptr(target.cast()) };
        target.store(word, std::sync::atomic::Ordering::Release);
    } else {
        // SAFETY: the caller's contract.
        unsafe { copy_words(source, target, length) };
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Write,
    WriteWithImmediate(u32),
    Read,
    Send(Option<u32>),
    CompareAndSwap { expected: u64, desired: u64 },
    FetchAndAdd { addend: u64 },
    Flush(FlushKind),
}

impl Kind {
    /// Whether it consumes a receive of the peer.
    #[inline(always)]
    pub(crate) fn uses_receive(self) -> bool {
        matches!(self, Self::Send(_) | Self::WriteWithImmediate(_))
    }

    pub(crate) fn opcode(self) -> Opcode {
        match self {
            Self::Write => Opcode::Write,
            Self::WriteWithImmediate(_) => Opcode::WriteWithImmediate,
            Self::Read => Opcode::Read,
            Self::Send(_) => Opcode::Send,
            Self::CompareAndSwap { .. } => Opcode::CompareAndSwap,
            Self::FetchAndAdd { .. } => Opcode::FetchAndAdd,
            Self::Flush(_) => Opcode::Flush,
        }
    }
}

/// A request in hand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub wr_id: u64,
    pub signalled: bool,
    pub kind: Kind,
    pub local: Local<'a>,
    pub remote: RemoteAddress,
    /// Bytes moved or flushed.
    pub length: u64,
}

const NOWHERE: RemoteAddress = RemoteAddress { key: RemoteKey(0), offset: 0 };

impl<'a> Request<'a> {
    /// Checks everything that is the caller's to get right.
    ///
    /// Errors: [`PostError::LocalProtection`], [`PostError::TooLarge`].
    #[inline(always)]
    pub(crate) fn check(request: &WorkRequest<'a>) -> Result<Self, PostError> {
        match request.operation {
            Operation::Write { local, .. } | Operation::WriteWithImmediate { local, .. } => {
                check_source(local)?;
            }
            Operation::Read { local, .. } => check_writable(&local)?,
            Operation::Send { local, .. } => {
                if local.length() > u64::from(MAX_SEND_BYTES) {
                    let limit = u64::from(MAX_SEND_BYTES);
                    return Err(PostError::TooLarge { what: "max_send_bytes", limit });
                }
                check_source(local)?;
            }
            Operation::CompareAndSwap { local, .. } | Operation::FetchAndAdd { local, .. } => {
                check_word(&local)?;
            }
            Operation::Flush { .. } => {}
        }
        Ok(Self::checked(request))
    }

    /// A request that [`Request::check`] accepted a moment ago.
    #[inline(always)]
    pub(crate) fn checked(request: &WorkRequest<'a>) -> Self {
        let source = |local| match local {
            LocalData::Inline(bytes) => Local::Inline(bytes),
            LocalData::Gather(entries) => Local::Borrowed(entries),
        };
        let (kind, local, remote, length) = match request.operation {
            Operation::Write { local, remote } => {
                (Kind::Write, source(local), remote, local.length())
            }
            Operation::WriteWithImmediate { local, remote, immediate } => {
                (Kind::WriteWithImmediate(immediate), source(local), remote, local.length())
            }
            Operation::Read { local, remote } => {
                (Kind::Read, Local::One(local), remote, local.length)
            }
            Operation::Send { local, immediate } => {
                (Kind::Send(immediate), source(local), NOWHERE, local.length())
            }
            Operation::CompareAndSwap { local, remote, expected, desired } => {
                (Kind::CompareAndSwap { expected, desired }, Local::One(local), remote, 8)
            }
            Operation::FetchAndAdd { local, remote, addend } => {
                (Kind::FetchAndAdd { addend }, Local::One(local), remote, 8)
            }
            Operation::Flush { remote, length, kind } => {
                (Kind::Flush(kind), Local::Inline(&[]), remote, length)
            }
        };
        let WorkRequest { wr_id, signalled, .. } = *request;
        Self { wr_id, signalled, kind, local, remote, length }
    }
}

fn check_word(entry: &ScatterGatherEntry<'_>) -> Result<(), PostError> {
    if entry.length != 8 {
        return Err(PostError::LocalProtection);
    }
    check_writable(entry)
}

#[inline(always)]
fn check_source(local: LocalData<'_>) -> Result<(), PostError> {
    match local {
        LocalData::Inline(bytes) => {
            if bytes.len() > MAX_INLINE_BYTES as usize {
                let limit = u64::from(MAX_INLINE_BYTES);
                return Err(PostError::TooLarge { what: "max_inline_bytes", limit });
            }
            Ok(())
        }
        LocalData::Gather(entries) => {
            if entries.len() > MAX_SCATTER_GATHER_ENTRIES as usize {
                let limit = u64::from(MAX_SCATTER_GATHER_ENTRIES);
                return Err(PostError::TooLarge { what: "max_scatter_gather_entries", limit });
            }
            for entry in entries {
                if !entry.region.contains(entry.offset, entry.length) {
                    return Err(PostError::LocalProtection);
                }
            }
            Ok(())
        }
    }
}

/// A request that waits. Reused, so that its buffers are allocated once.
#[derive(Debug)]
pub(crate) struct Deferred {
    wr_id: u64,
    signalled: bool,
    kind: Kind,
    remote: RemoteAddress,
    length: u64,
    is_inline: bool,
    inline: Vec<u8>,
    kept: Vec<Kept>,
}

impl Default for Deferred {
    fn default() -> Self {
        Self {
            wr_id: 0,
            signalled: false,
            kind: Kind::Write,
            remote: NOWHERE,
            length: 0,
            is_inline: true,
            inline: Vec::new(),
            kept: Vec::new(),
        }
    }
}

impl Deferred {
    /// Takes the request in.
    pub(crate) fn keep(&mut self, request: &Request<'_>) {
        let Request { wr_id, signalled, kind, remote, length, local } = *request;
        (self.wr_id, self.signalled, self.kind) = (wr_id, signalled, kind);
        (self.remote, self.length) = (remote, length);
        self.release();
        self.is_inline = matches!(local, Local::Inline(_));
        match local {
            Local::Inline(bytes) => self.inline.extend_from_slice(bytes),
            Local::One(entry) => self.kept.push(Kept::new(&entry)),
            Local::Borrowed(entries) => self.kept.extend(entries.iter().map(Kept::new)),
            Local::Kept(kept) => self.kept.extend(kept.iter().map(|kept| Kept::new(&kept.entry()))),
        }
    }

    /// The request, borrowing from here.
    pub(crate) fn request(&self) -> Request<'_> {
        let local =
            if self.is_inline { Local::Inline(&self.inline) } else { Local::Kept(&self.kept) };
        let Self { wr_id, signalled, kind, remote, length, .. } = *self;
        Request { wr_id, signalled, kind, local, remote, length }
    }

    /// Lets go of regions and bytes; keeps the buffers.
    pub(crate) fn release(&mut self) {
        self.inline.clear();
        self.kept.clear();
    }
}

/// Requests that wait, in post order. Bounded by the send depth.
#[derive(Debug, Default)]
pub(crate) struct DeferredQueue {
    entries: std::collections::VecDeque<Deferred>,
    spare: Vec<Deferred>,
}

impl DeferredQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn push(&mut self, request: &Request<'_>) {
        let mut entry = self.spare.pop().unwrap_or_default();
        entry.keep(request);
        self.entries.push_back(entry);
    }

    pub(crate) fn take_front(&mut self) -> Option<Deferred> {
        self.entries.pop_front()
    }

    pub(crate) fn put_back(&mut self, entry: Deferred) {
        self.entries.push_front(entry);
    }

    pub(crate) fn recycle(&mut self, mut entry: Deferred) {
        entry.release();
        self.spare.push(entry);
    }
}
