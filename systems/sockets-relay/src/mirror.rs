//! One segment, seen by the relay: it stands for the end that is on the other host.
//!
//! The program is side 0 and the relay side 1. What the program sends lies in ring 0 and is copied
//! from there into ring 1 of the other host's segment, at the same positions; what the other host
//! sends arrives in ring 1 here.
//!
//! Everything the program can write (headers, credits, signs) is copied, checked, then used, and so
//! is everything that the other relay says. Bytes of the rings are nobody's business here.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_os::MemoryObject;
use beeline_sockets::ring::{DATA, FILLER, HEADER_BYTES};
use beeline_sockets::segment::{
    CLOSED_UNREAD, End, RINGS_AT, STATE_GIVEN_UP, STATE_OPEN, Segment, Signs,
};
use beeline_sockets::wake;

/// The program or the other relay said what it cannot have meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nonsense in {what}")]
pub struct Nonsense {
    /// Where.
    pub what: &'static str,
}

const HEADER: u64 = HEADER_BYTES as u64;

/// Ring 0 or ring 1 of a segment as memory to register: all a peer can reach of it.
#[derive(Debug)]
pub struct RingMemory {
    segment: Arc<Segment>,
    ring: usize,
}

// SAFETY: the ring lies inside the segment's mapping, which lives as long as the value, at a base
// that is a multiple of 4096 from a page; its bytes are reached through raw copies and atomics.
unsafe impl MemoryObject for RingMemory {
    fn base(&self) -> NonNull<u8> {
        let at = RINGS_AT + self.ring * self.segment.ring_bytes();
        // SAFETY: a segment holds two rings from `RINGS_AT` on (`Segment::take`).
        unsafe { self.segment.mapping().base().add(at) }
    }

    fn length_bytes(&self) -> usize {
        self.segment.ring_bytes()
    }
}

/// All of a segment as memory to register, where a provider needs the descriptor of a whole object
/// (shared memory: a relay of the same user on the same host).
#[derive(Debug)]
pub struct WholeMemory(Arc<Segment>);

// SAFETY: the segment's mapping lives as long as the value at a fixed, page-aligned base; its bytes
// are reached through raw copies and atomics.
unsafe impl MemoryObject for WholeMemory {
    fn base(&self) -> NonNull<u8> {
        self.0.mapping().base()
    }

    fn length_bytes(&self) -> usize {
        self.0.mapping().length_bytes()
    }

    fn descriptor(&self) -> Option<Arc<std::os::fd::OwnedFd>> {
        self.0.mapping().descriptor()
    }
}

/// Which ring.
const OUTGOING: usize = 0;
const INCOMING: usize = 1;

/// The signs of an end, as carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignsCopy {
    /// As in the segment.
    pub switched_at: u64,
    /// As in the segment.
    pub finished: u32,
    /// As in the segment.
    pub closed: u32,
    /// As in the segment.
    pub mute: u32,
}

impl SignsCopy {
    fn load(signs: &Signs) -> Self {
        // Acquire with the library's Release: what it did before (bytes in the ring) is there.
        Self {
            closed: signs.closed.load(Ordering::Acquire),
            finished: signs.finished.load(Ordering::Acquire),
            switched_at: signs.switched_at.load(Ordering::Acquire),
            mute: signs.mute.load(Ordering::Acquire),
        }
    }

    /// True when an end can go from `before` to this.
    fn follows(&self, before: &Self) -> bool {
        (before.switched_at == 0 || before.switched_at == self.switched_at)
            && self.finished <= 1
            && self.finished >= before.finished
            && self.closed <= CLOSED_UNREAD
            && (before.closed == 0 || before.closed == self.closed)
            && self.mute <= 1
            && self.mute >= before.mute
    }

    /// Nothing follows these.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.closed != 0
    }

    /// What must not overtake bytes differs.
    #[must_use]
    pub fn ends_differ(&self, other: &Self) -> bool {
        (self.finished, self.closed) != (other.finished, other.closed)
    }
}

/// A piece of the outgoing ring, whole messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Position of its first header.
    pub from: u64,
    /// Position behind it.
    pub end: u64,
    /// Its first header.
    pub header: u64,
}

/// One segment and how far it is mirrored.
#[derive(Debug)]
pub struct Mirror {
    segment: Arc<Segment>,
    ring_bytes: u64,
    /// Everything before it is on its way to the other host or there.
    sent: u64,
    /// What the other program gave back.
    credited: u64,
    /// Everything before it is published to the program.
    received: u64,
    /// What the program gave back, as last carried.
    returned: u64,
    /// The program's signs as last carried.
    signs_sent: SignsCopy,
    /// The other end's signs as stored.
    signs_stored: SignsCopy,
}

impl Mirror {
    /// The relay's view of a fresh segment.
    #[must_use]
    pub fn new(segment: Segment) -> Self {
        let ring_bytes = segment.ring_bytes() as u64;
        let none = SignsCopy::default();
        Self {
            segment: Arc::new(segment),
            ring_bytes,
            sent: 0,
            credited: 0,
            received: 0,
            returned: 0,
            signs_sent: none,
            signs_stored: none,
        }
    }

    /// The segment.
    #[must_use]
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The program's words.
    #[must_use]
    pub fn program(&self) -> &End {
        self.segment.other()
    }

    /// Bytes of each ring.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.ring_bytes
    }

    /// The outgoing ring, to be registered for reading by this process.
    #[must_use]
    pub fn outgoing_memory(&self) -> Arc<dyn MemoryObject> {
        Arc::new(RingMemory { segment: Arc::clone(&self.segment), ring: OUTGOING })
    }

    /// The incoming ring, to be registered for writing by the peer.
    #[must_use]
    pub fn incoming_memory(&self) -> Arc<dyn MemoryObject> {
        Arc::new(RingMemory { segment: Arc::clone(&self.segment), ring: INCOMING })
    }

    /// The whole segment, and where in it the incoming ring begins.
    #[must_use]
    pub fn whole_memory(&self) -> (Arc<dyn MemoryObject>, u64) {
        let at = RINGS_AT as u64 + self.ring_bytes;
        (Arc::new(WholeMemory(Arc::clone(&self.segment))), at)
    }

    fn place(&self, position: u64) -> u64 {
        position & (self.ring_bytes - 1)
    }

    /// The address of `position` in a ring, and bytes from there to the ring's end.
    fn at(&self, ring: usize, position: u64) -> (NonNull<u8>, usize) {
        let place = self.place(position) as usize;
        let at = RINGS_AT + ring * self.ring_bytes as usize + place;
        // SAFETY: a place is below the ring's length, and the segment holds both rings.
        let address = unsafe { self.segment.mapping().base().add(at) };
        (address, self.ring_bytes as usize - place)
    }

    fn header(&self, ring: usize, position: u64) -> &AtomicU64 {
        debug_assert!(position.is_multiple_of(8), "headers lie at multiples of 8");
        let (address, _) = self.at(ring, position & !7);
        // SAFETY: eight bytes of a ring, aligned to 8, mapped as long as `self`; an atomic claims
        // nothing about who else writes.
        unsafe { address.cast().as_ref() }
    }

    /// Bytes a message with this header takes in the ring at `position`, header included; `None`
    /// when no message can have it there.
    fn length_of(&self, header: u64, position: u64) -> Option<u64> {
        let (kind, length) = ((header >> 32) as u32, header & u64::from(u32::MAX));
        let to_end = self.ring_bytes - self.place(position);
        match kind {
            DATA if length > 0 && length <= to_end - HEADER => {
                Some(HEADER + length.next_multiple_of(8))
            }
            FILLER if length == 0 && to_end == HEADER => Some(HEADER),
            _ => None,
        }
    }

    /// The program has put something in its ring that was not sent.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        self.header(OUTGOING, self.sent).load(Ordering::Relaxed) != 0
    }

    /// Whole messages that were not sent, up to about `most` bytes of them.
    ///
    /// Errors: [`Nonsense`] in the program's ring.
    pub fn batch(&self, most: u64) -> Result<Option<Batch>, Nonsense> {
        let wrong = Nonsense { what: "the program's ring" };
        let mut end = self.sent;
        let mut first = 0;
        while end - self.sent < most {
            // Acquire with the Release in `Producer::push`: the payload is there.
            let header = self.header(OUTGOING, end).load(Ordering::Acquire);
            if header == 0 {
                break;
            }
            if end == self.sent {
                first = header;
            }
            end += self.length_of(header, end).ok_or(wrong)?;
            // The program goes by the credits that we stored, and leaves a place for a zero header.
            if end - self.credited > self.ring_bytes - HEADER {
                return Err(wrong);
            }
        }
        let batch = Batch { from: self.sent, end, header: first };
        Ok((end > self.sent).then_some(batch))
    }

    /// Copies a batch, headers and all, into `target`, which is as long.
    pub fn copy_out(&self, batch: Batch, target: &mut [u8]) {
        assert_eq!(batch.end - batch.from, target.len() as u64, "a batch is copied whole");
        let (source, to_end) = self.at(OUTGOING, batch.from);
        let first = to_end.min(target.len());
        let (one, other) = target.split_at_mut(first);
        // SAFETY: `first` bytes lie between the place and the ring's end. The program may write
        // them meanwhile: it sends some bytes then, as it may.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr().cast_const(), one.as_mut_ptr(), first);
        }
        let (source, whole) = self.at(OUTGOING, 0);
        let rest = other.len();
        assert!(rest <= whole, "a batch is shorter than its ring");
        // SAFETY: the rest lies at the ring's start, as above.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr().cast_const(), other.as_mut_ptr(), rest);
        }
        // The header as it was checked, whatever stands there by now.
        if let Some(header) = target.first_chunk_mut::<8>() {
            *header = batch.header.to_le_bytes();
        }
    }

    /// What of a batch a one-sided write places: all behind its first header, as up to two ranges
    /// (offset in the ring, length).
    #[must_use]
    pub fn ranges(&self, batch: Batch) -> [(u64, u64); 2] {
        let from = self.place(batch.from + HEADER);
        let length = batch.end - batch.from - HEADER;
        let first = length.min(self.ring_bytes - from);
        [(from, first), (0, length - first)]
    }

    /// A batch is on its way.
    pub fn sent(&mut self, batch: Batch) {
        self.sent = batch.end;
    }

    /// Room in the incoming ring, checked: a batch from `from` to `end` with `header` first.
    fn check_incoming(&self, from: u64, end: u64, header: u64) -> Result<(), Nonsense> {
        let wrong = Nonsense { what: "the positions of a batch" };
        let length = end.checked_sub(from).ok_or(wrong)?;
        let first = self.length_of(header, from).ok_or(wrong)?;
        let fits = from == self.received
            && length.is_multiple_of(8)
            && first <= length
            && end - self.returned <= self.ring_bytes - HEADER;
        fits.then_some(()).ok_or(wrong)
    }

    /// Publishes a batch that came in a message, headers and all.
    ///
    /// Errors: [`Nonsense`]; the ring is untouched then.
    pub fn publish(&mut self, from: u64, bytes: &[u8]) -> Result<(), Nonsense> {
        let wrong = Nonsense { what: "the positions of a batch" };
        let (header, payload) = bytes.split_first_chunk::<8>().ok_or(wrong)?;
        let header = u64::from_le_bytes(*header);
        let end = from.checked_add(bytes.len() as u64).ok_or(wrong)?;
        self.check_incoming(from, end, header)?;
        let (target, to_end) = self.at(INCOMING, from + HEADER);
        let (one, other) = payload.split_at(to_end.min(payload.len()));
        // SAFETY: `one` fits between the place and the ring's end. The program may look at these
        // bytes only after the header below; one that does not wait gets some bytes.
        unsafe { std::ptr::copy_nonoverlapping(one.as_ptr(), target.as_ptr(), one.len()) };
        let (target, _) = self.at(INCOMING, 0);
        // SAFETY: a batch is shorter than its ring (checked), so the rest lies at its start.
        unsafe { std::ptr::copy_nonoverlapping(other.as_ptr(), target.as_ptr(), other.len()) };
        self.publish_header(from, end, header);
        Ok(())
    }

    /// Publishes a batch that a one-sided write has placed behind its first header.
    ///
    /// Errors: [`Nonsense`]; nothing is published then.
    pub fn publish_placed(&mut self, from: u64, end: u64, header: u64) -> Result<(), Nonsense> {
        self.check_incoming(from, end, header)?;
        self.publish_header(from, end, header);
        Ok(())
    }

    fn publish_header(&mut self, from: u64, end: u64, header: u64) {
        self.header(INCOMING, end).store(0, Ordering::Relaxed);
        // Release with the Acquire in `Consumer::next_message`: payload and the zero header behind
        // it are there before the header is.
        self.header(INCOMING, from).store(header, Ordering::Release);
        // What edge-triggered sets, and who looks on, take for the count of what came.
        self.segment.own().sending.tail.store(end, Ordering::Release);
        self.received = end;
    }

    /// Position behind everything published to the program.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received
    }

    /// What the program gave back since it was last carried.
    ///
    /// Errors: [`Nonsense`] in the program's credits.
    pub fn credits(&self) -> Result<Option<u64>, Nonsense> {
        // Acquire with the Release in `Consumer::give_back`: its copies out are over.
        let consumed = self.segment.other().credits.consumed.load(Ordering::Acquire);
        if consumed == self.returned {
            return Ok(None);
        }
        let sane =
            consumed > self.returned && consumed <= self.received && consumed.is_multiple_of(8);
        if sane { Ok(Some(consumed)) } else { Err(Nonsense { what: "the program's credits" }) }
    }

    /// The credits were carried.
    pub fn returned(&mut self, position: u64) {
        self.returned = position;
    }

    /// The other program gave back room up to `position`.
    ///
    /// Errors: [`Nonsense`].
    pub fn credit(&mut self, position: u64) -> Result<(), Nonsense> {
        let sane = position >= self.credited && position <= self.sent && position.is_multiple_of(8);
        if !sane {
            return Err(Nonsense { what: "credits from the other host" });
        }
        self.credited = position;
        // Release with the Acquire in `Producer::free`.
        self.segment.own().credits.consumed.store(position, Ordering::Release);
        Ok(())
    }

    /// The program has much that it did not give back: the sender may soon be without room.
    #[must_use]
    pub fn owes_credits(&self) -> bool {
        self.received - self.returned >= self.ring_bytes / 4
    }

    /// The program's signs as they are. Loaded before the ring is looked at.
    #[must_use]
    pub fn signs(&self) -> SignsCopy {
        SignsCopy::load(&self.segment.other().signs)
    }

    /// The program's signs as they were carried.
    #[must_use]
    pub fn signs_sent(&self) -> SignsCopy {
        self.signs_sent
    }

    /// Checks what the program says of itself, before it is carried.
    ///
    /// Errors: [`Nonsense`].
    pub fn check_signs(&self, signs: &SignsCopy) -> Result<(), Nonsense> {
        signs
            .follows(&self.signs_sent)
            .then_some(())
            .ok_or(Nonsense { what: "the program's signs" })
    }

    /// The signs were carried.
    pub fn carried(&mut self, signs: SignsCopy) {
        self.signs_sent = signs;
    }

    /// The other end's signs as stored.
    #[must_use]
    pub fn signs_stored(&self) -> SignsCopy {
        self.signs_stored
    }

    /// Stores the other end's signs.
    ///
    /// Errors: [`Nonsense`]; nothing is stored then.
    pub fn store_signs(&mut self, signs: SignsCopy) -> Result<(), Nonsense> {
        if !signs.follows(&self.signs_stored) {
            return Err(Nonsense { what: "signs from the other host" });
        }
        self.signs_stored = signs;
        let own = &self.segment.own().signs;
        // Release with the library's Acquire loads, in the order in which an end says them.
        own.switched_at.store(signs.switched_at, Ordering::Release);
        own.mute.store(signs.mute, Ordering::Release);
        own.finished.store(signs.finished, Ordering::Release);
        own.closed.store(signs.closed, Ordering::Release);
        Ok(())
    }

    /// The connection ends here as if reset, whatever was said before.
    pub fn store_reset(&mut self) {
        self.signs_stored.closed = CLOSED_UNREAD;
        self.segment.own().signs.closed.store(CLOSED_UNREAD, Ordering::Release);
    }

    /// The program has received bytes that it did not read.
    #[must_use]
    pub fn has_unread(&self) -> bool {
        let head = self.segment.other().receiving.head.load(Ordering::Acquire);
        head != self.received
    }

    /// Leaves the connection to the kernel, if it is not beyond that. `from` is the state it is in.
    /// True when it is the kernel's.
    pub fn give_up(&self, from: u32) -> bool {
        let state = self.segment.state();
        let swap =
            state.compare_exchange(from, STATE_GIVEN_UP, Ordering::AcqRel, Ordering::Acquire);
        swap.is_ok() || swap == Err(STATE_GIVEN_UP)
    }

    /// Moves the state from `from` to `to`; false when it is another.
    pub fn advance(&self, from: u32, to: u32) -> bool {
        // AcqRel: our words are there before the state says so.
        self.segment.state().compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The program gave the connection up.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.segment.state().load(Ordering::Acquire) == STATE_GIVEN_UP
    }

    /// Nobody has promised anything yet.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.segment.state().load(Ordering::Acquire) == STATE_OPEN
    }

    /// The program is to ring when it sends, and if `credits`, when it gives room back. The caller
    /// fences and looks again.
    pub fn arm(&self, credits: bool) {
        let own = &self.segment.own().signs;
        own.receive_armed.store(1, Ordering::SeqCst);
        if credits {
            own.send_armed.store(1, Ordering::SeqCst);
        }
    }

    /// The program need not ring: it is looked at.
    pub fn disarm(&self) {
        let own = &self.segment.own().signs;
        own.receive_armed.store(0, Ordering::Relaxed);
        own.send_armed.store(0, Ordering::Relaxed);
    }

    /// Takes down what the program sleeps for, if it sleeps for what there is news of: bytes or an
    /// end (`receive`), room (`send`). Which it slept for: then it is to be woken. The caller stored, then fenced.
    ///
    /// Each arm for its own reason only: a sleeper of the other kind would sleep on, unarmed.
    #[must_use]
    pub fn take_down(&self, receive: bool, send: bool) -> [bool; 2] {
        let signs = &self.segment.other().signs;
        let down = |armed| wake::sleeps(armed, || ()) != 0 && wake::take_down(armed);
        [receive && down(&signs.receive_armed), send && down(&signs.send_armed)]
    }

    /// The program sleeps for something of which there is news. The caller stored, then fenced.
    #[must_use]
    pub fn sleeps(&self, receive: bool, send: bool) -> bool {
        let signs = &self.segment.other().signs;
        receive && signs.receive_armed.load(Ordering::Relaxed) != 0
            || send && signs.send_armed.load(Ordering::Relaxed) != 0
    }
}
