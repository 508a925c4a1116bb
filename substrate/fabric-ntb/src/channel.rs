//! One partition in use: a ring in each window, as an ordered byte stream.
//!
//! ```text
//!   this side                                  the peer
//!   bytes ─▶ ring in the peer's window ─▶ fence ─▶ tail in the peer's window ─▶ fence ─▶ doorbell
//!   head in this window (a shadow) ◀─ fence ◀─ a quarter of the ring taken
//! ```
//!
//! The producer keeps the tail, the consumer the head; each tells the other by one posted word and
//! reads only its own memory. The shadow lags, so the producer sees a ring fuller than it is and
//! overwrites nothing. The consumer tells at the latest when a quarter of the ring is untold, so a
//! producer that waits for room always gets it.
//!
//! The indices are the peer's claims: one that says more than a ring holds ends the channel.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use beeline_fabric_engine::stream::{Moved, Part, Stream, Watch};
use beeline_os::memory::MemoryObject;
use rustix::event::{EventfdFlags, eventfd};

use crate::layout::{HEAD, Phase, TAIL};
use crate::link::{Link, NodeName};

/// Most bytes placed at once.
const PIECE_BYTES: usize = 1 << 20;

/// A channel's life at this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Life {
    /// Dialled; the link is not up, or its partition is not free yet.
    Waiting = 0,
    /// Opened here, not at the peer yet.
    Opening = 1,
    /// In use.
    Open = 2,
    /// Closed here.
    Closed = 3,
}

impl Life {
    fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Waiting,
            1 => Self::Opening,
            2 => Self::Open,
            _ => Self::Closed,
        }
    }
}

/// Which use of which partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) partition: usize,
    pub(crate) generation: u64,
}

/// The part of a channel that the link and pollers reach.
#[derive(Debug)]
pub(crate) struct Channel {
    link: Arc<Link>,
    /// The node dialled; `None` for an accepted channel.
    wanted: Option<NodeName>,
    place: OnceLock<Place>,
    life: AtomicU8,
    /// Mirror of the stream's reading position.
    taken: AtomicU64,
    /// Bytes wait for room, which there was not when the shadow stood at `room_seen`.
    wants_room: AtomicBool,
    room_seen: AtomicU64,
    /// Readable while `raised`.
    ready: OwnedFd,
    raised: Mutex<bool>,
    /// Mirror of `raised`, without the lock.
    is_raised: AtomicBool,
}

impl Channel {
    fn new(link: Arc<Link>, wanted: Option<NodeName>, life: Life) -> io::Result<Self> {
        Ok(Self {
            link,
            wanted,
            place: OnceLock::new(),
            life: AtomicU8::new(life as u8),
            taken: AtomicU64::new(0),
            wants_room: AtomicBool::new(false),
            room_seen: AtomicU64::new(0),
            ready: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            raised: Mutex::new(false),
            is_raised: AtomicBool::new(false),
        })
    }

    /// A channel to `wanted`, whose partition the link assigns when it is up.
    pub(crate) fn dialled(link: &Arc<Link>, wanted: NodeName) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self::new(Arc::clone(link), Some(wanted), Life::Waiting)?))
    }

    /// A channel the peer opened.
    pub(crate) fn accepted(link: &Arc<Link>, place: Place) -> io::Result<Arc<Self>> {
        let channel = Self::new(Arc::clone(link), None, Life::Open)?;
        let _ = channel.place.set(place);
        Ok(Arc::new(channel))
    }

    fn life(&self) -> Life {
        Life::from_code(self.life.load(Ordering::Acquire))
    }

    fn set_life(&self, life: Life) {
        self.life.store(life as u8, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.life() == Life::Closed
    }

    /// True when both ends use the channel, so that a living peer shows signs of life.
    pub(crate) fn is_shared(&self) -> bool {
        self.life() == Life::Open && self.peer_phase() == Phase::Open
    }

    /// The link gives the channel its partition; it is opened here.
    pub(crate) fn assign(&self, place: Place) {
        if self.place.set(place).is_ok() {
            self.set_life(Life::Opening);
        }
    }

    /// The peer's word on this use of the partition. Another generation, or nonsense, is closed.
    fn peer_phase(&self) -> Phase {
        let Some(place) = self.place.get() else { return Phase::Closed };
        match self.link.peer_state(place.partition) {
            Some(state) if state.generation == place.generation => state.phase,
            _ => Phase::Closed,
        }
    }

    fn inbound(&self, place: Place, word: usize) -> u64 {
        let at = self.link.geometry().line(place.partition) + word;
        // Acquire: pairs with the fence the peer puts before the word it posts.
        self.link.window().inbound().word(at).load(Ordering::Acquire)
    }

    /// Makes the stream readable for who sleeps on it, if it has news, and says whether it has.
    pub(crate) fn announce(&self) -> bool {
        let news = self.has_news();
        if news && !self.is_raised.load(Ordering::Acquire) {
            let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
            if !std::mem::replace(&mut raised, true) {
                let _ = rustix::io::write(&self.ready, &1_u64.to_ne_bytes());
                self.is_raised.store(true, Ordering::Release);
            }
        }
        news
    }

    /// Before looking: what comes after may be announced again.
    fn lower(&self) {
        if self.is_raised.load(Ordering::Acquire) {
            let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
            if std::mem::replace(&mut raised, false) {
                let _ = rustix::io::read(&self.ready, &mut [0_u8; 8]);
            }
            self.is_raised.store(false, Ordering::Release);
        }
    }

    /// Opens the partition at the peer, its words at the beginning.
    pub(crate) fn open_at_peer(&self) {
        let Some(_use) = self.link.enter() else { return };
        let Some(place) = self.place.get() else { return };
        let line = self.link.geometry().line(place.partition);
        for word in [TAIL, HEAD] {
            self.link.window().post_word(line + word, 0);
        }
        self.link.post_state(*place, Phase::Open);
    }

    fn close(&self) {
        let life = self.life();
        if life == Life::Closed {
            return;
        }
        if let Some(place) = self.place.get() {
            self.link.post_state(*place, Phase::Closed);
        }
        self.set_life(Life::Closed);
    }
}

impl Watch for Channel {
    fn has_news(&self) -> bool {
        match self.life() {
            Life::Closed => false,
            Life::Waiting => self.link.is_up() || self.link.is_down(),
            Life::Opening => self.link.is_down() || self.peer_phase() != Phase::Closed,
            Life::Open => {
                let Some(&place) = self.place.get() else { return false };
                self.inbound(place, TAIL) != self.taken.load(Ordering::Relaxed)
                    || self.peer_phase() != Phase::Open
                    || self.link.is_down()
                    || (self.wants_room.load(Ordering::Relaxed)
                        && self.inbound(place, HEAD) != self.room_seen.load(Ordering::Relaxed))
            }
        }
    }
}

/// The stream of a channel; one per channel.
#[derive(Debug)]
pub(crate) struct ChannelStream {
    channel: Arc<Channel>,
    /// Bytes put into the peer's ring, ever.
    tail: u64,
    /// Bytes taken from this side's ring, ever.
    head: u64,
    /// The head as last told to the peer.
    told: u64,
}

impl ChannelStream {
    pub(crate) fn new(channel: Arc<Channel>) -> Self {
        Self { channel, tail: 0, head: 0, told: 0 }
    }

    /// The place, once both ends have opened it and while the link lives.
    fn opened(&self) -> Option<Place> {
        (self.channel.life() == Life::Open).then(|| self.channel.place.get().copied()).flatten()
    }

    /// Tells the peer how far its bytes have been taken.
    fn tell(&mut self, place: Place) {
        let link = &self.channel.link;
        let Some(_use) = link.enter() else { return };
        let (window, at) = (link.window(), link.geometry().line(place.partition) + HEAD);
        // The bytes have been read before the peer may write over them.
        window.fence();
        window.post_word(at, self.head);
        window.fence();
        window.ring();
        self.told = self.head;
    }
}

/// The two pieces of `length` bytes at stream position `position` of a ring of `ring` bytes.
fn pieces(position: u64, length: usize, ring: usize) -> [(usize, usize); 2] {
    let start = (position % ring as u64) as usize;
    let first = length.min(ring - start);
    [(start, first), (0, length - first)]
}

impl Stream for ChannelStream {
    fn readiness(&self) -> BorrowedFd<'_> {
        self.channel.ready.as_fd()
    }

    fn watch(&self) -> Option<Arc<dyn Watch>> {
        Some(Arc::clone(&self.channel) as Arc<dyn Watch>)
    }

    fn connected(&mut self) -> Option<io::Result<()>> {
        let (channel, gone) = (&self.channel, || Some(Err(io::ErrorKind::ConnectionReset.into())));
        channel.lower();
        if channel.link.is_down() {
            return gone();
        }
        match channel.life() {
            Life::Waiting => {
                if !channel.link.is_up() {
                    return None;
                }
                if channel.link.peer_node() != channel.wanted {
                    return Some(Err(io::ErrorKind::HostUnreachable.into()));
                }
                if !channel.link.assign(channel) {
                    return None;
                }
                channel.open_at_peer();
                None
            }
            Life::Opening if channel.peer_phase() == Phase::Closed => None,
            Life::Opening => {
                channel.set_life(Life::Open);
                Some(Ok(()))
            }
            Life::Open => Some(Ok(())),
            Life::Closed => gone(),
        }
    }

    fn prepare(&mut self, _transport_timeout: Duration) -> io::Result<()> {
        Ok(())
    }

    fn wants_room(&mut self, wants: bool) -> bool {
        self.channel.wants_room.store(wants, Ordering::SeqCst);
        if wants {
            // Room that came before the word was out.
            let _ = self.channel.announce();
        }
        true
    }

    fn available(&mut self) -> usize {
        let Some(place) = self.opened() else { return 0 };
        let waiting = self.channel.inbound(place, TAIL).wrapping_sub(self.head);
        // An impossible tail ends the channel when it is received from.
        usize::try_from(waiting).unwrap_or(0).min(self.channel.link.geometry().ring_bytes())
    }

    unsafe fn receive(&mut self, parts: &mut [Part], _sleep: bool) -> Moved {
        self.channel.lower();
        let Some(place) = self.opened() else { return Moved::Closed };
        let link = &self.channel.link;
        // The order matters: bytes that came before the peer closed are seen.
        let peer_is_done = self.channel.peer_phase() != Phase::Open || link.is_down();
        let ring = link.geometry().ring_bytes();
        let waiting = self.channel.inbound(place, TAIL).wrapping_sub(self.head);
        if waiting > ring as u64 {
            tracing::debug!(partition = place.partition, "a tail beyond its ring");
            return Moved::Closed;
        }
        let mut left = waiting as usize;
        let ring_at = link.geometry().ring(place.partition);
        for part in parts.iter() {
            let length = part.iov_len.min(left);
            let mut target = part.iov_base.cast::<u8>();
            for (start, piece) in pieces(self.head, length, ring) {
                // SAFETY: the caller vouches for the part, of which this piece lies inside; it is
                // no memory of the window, which is never registered.
                unsafe { link.window().inbound().copy_to(ring_at + start, target, piece) };
                // SAFETY: at most the part's end.
                target = unsafe { target.add(piece) };
            }
            self.head += length as u64;
            left -= length;
        }
        let moved = waiting as usize - left;
        self.channel.taken.store(self.head, Ordering::Relaxed);
        if self.head - self.told >= ring as u64 / 4 {
            self.tell(place);
        }
        match moved {
            0 if peer_is_done => Moved::Closed,
            0 => Moved::Later,
            bytes => Moved::Bytes(bytes),
        }
    }

    unsafe fn send(&mut self, parts: &mut [Part]) -> Moved {
        let Some(place) = self.opened() else { return Moved::Closed };
        let link = Arc::clone(&self.channel.link);
        let Some(_use) = link.enter() else { return Moved::Closed };
        if self.channel.peer_phase() == Phase::Closed {
            return Moved::Closed;
        }
        let ring = link.geometry().ring_bytes();
        let head = self.channel.inbound(place, HEAD);
        self.channel.room_seen.store(head, Ordering::Relaxed);
        let untaken = self.tail.wrapping_sub(head);
        if untaken > ring as u64 {
            tracing::debug!(partition = place.partition, "a head beyond its tail");
            return Moved::Closed;
        }
        let mut room = ring - untaken as usize;
        let before = self.tail;
        let ring_at = link.geometry().ring(place.partition);
        let window = link.window();
        for part in parts.iter() {
            let length = part.iov_len.min(room);
            let mut source = part.iov_base.cast::<u8>().cast_const();
            for (start, piece) in pieces(self.tail, length, ring) {
                // SAFETY: the caller vouches for the part, of which this piece lies inside.
                unsafe { window.post(ring_at + start, source, piece) };
                // SAFETY: at most the part's end.
                source = unsafe { source.add(piece) };
            }
            self.tail += length as u64;
            room -= length;
        }
        if self.tail == before {
            return Moved::Later;
        }
        // The bytes, then the tail that announces them, then the doorbell.
        window.fence();
        window.post_word(link.geometry().line(place.partition) + TAIL, self.tail);
        window.fence();
        window.ring();
        Moved::Bytes((self.tail - before) as usize)
    }

    fn placement(&self, memory: &dyn MemoryObject) -> Option<u64> {
        self.channel.link.heap()?.placement(memory)
    }

    unsafe fn place(&mut self, at: u64, source: *const u8, length: usize) -> bool {
        let link = &self.channel.link;
        let Some(memory) = link.window().memory() else { return false };
        let reach = memory.length_bytes() as u64;
        if self.opened().is_none() || at.checked_add(length as u64).is_none_or(|end| end > reach) {
            return false;
        }
        let target = at as usize;
        if length == 8 && target.is_multiple_of(8) {
            let Some(_use) = link.enter() else { return false };
            let mut word = [0; 8];
            // SAFETY: the caller vouches for eight bytes.
            unsafe { std::ptr::copy_nonoverlapping(source, word.as_mut_ptr(), 8) };
            // One aligned word appears at once, as it does with hardware.
            memory.post_word(target, u64::from_le_bytes(word));
            memory.fence();
            return true;
        }
        for done in (0..length).step_by(PIECE_BYTES) {
            // Left between two pieces, so that ending the link waits for one at most.
            let Some(_use) = link.enter() else { return false };
            let piece = PIECE_BYTES.min(length - done);
            // SAFETY: inside the source, which the caller vouches for.
            let from = unsafe { source.add(done) };
            // SAFETY: as above, for the piece.
            unsafe { memory.post(target + done, from, piece) };
            // By the thread that wrote: another one may send the frame that announces this.
            memory.fence();
        }
        true
    }

    fn finish_sending(&mut self) {
        if let Some(place) = self.opened() {
            self.channel.link.post_state(place, Phase::Finished);
        }
    }

    fn shut_down(&mut self) {
        self.channel.close();
    }
}

impl Drop for ChannelStream {
    fn drop(&mut self) {
        self.channel.close();
    }
}
