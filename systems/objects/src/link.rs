//! The control object: one sealed memfd that a client and its store map, with a ring each way.
//!
//! ```text
//! 0     magic "beeline-objects\0", for a person with a debugger; never read
//! 64    requests consumed    u64  store writes     192  replies consumed  u64  client writes
//! 128   store sleeps         u32  1: ring          256  client sleeps     u32  1: wake it here
//! 320   copies               u32  client writes: threads that copy into an object and ask soon
//! 4096  request slots, 64 bytes each     8192  reply slots
//! ```
//!
//! A sleeper stores 1 and looks once more; a producer publishes and then looks at the word: the
//! two fences order these, so that either the sleeper sees the message or the producer the word. The
//! store sleeps for all clients at once and is rung over the socket; a client's thread sleeps on its
//! word (`futex`), so that a connection needs no descriptor but its socket. The count of copies is a
//! hint, which lets the store poll on while a seal comes soon; an end that ignores it loses time only.
//!
//! Invariants: the client can write every byte of this object, so the store copies a slot once and
//! uses the copy, believes no index, and keeps nothing here that it relies on.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use beeline_os::mapping::{Protection, create_memfd};
use beeline_os::{Mapping, one_writer};
use beeline_ring::slots::{ImplausibleIndex, SlotConsumer, SlotMessage, SlotProducer};
use rustix::thread::futex;

/// Slots of each ring.
pub const SLOTS: u32 = 64;
/// Bytes of the object.
pub const LENGTH_BYTES: usize = 12288;

const REQUESTS_CONSUMED: usize = 64;
const STORE_SLEEPS: usize = 128;
const REPLIES_CONSUMED: usize = 192;
const CLIENT_SLEEPS: usize = 256;
const COPIES: usize = 320;
const REQUESTS: usize = 4096;
const REPLIES: usize = 8192;

const _: () = assert!(REPLIES + SLOTS as usize * 64 <= LENGTH_BYTES, "the rings fit the object");
const _: () = assert!(REQUESTS + SLOTS as usize * 64 <= REPLIES, "the rings do not overlap");

/// One end of the two rings.
#[derive(Debug)]
pub struct Link {
    producer: SlotProducer,
    consumer: SlotConsumer,
    /// Where the peer tells how much of ours it took, and we of its.
    taken_by_peer: usize,
    taken_by_us: usize,
    peer_sleeps: usize,
    we_sleep: usize,
    /// Messages taken since the count was last published.
    unpublished: u32,
    /// Last, so that the rings above go first.
    mapping: Arc<Mapping>,
}

/// The words a client's threads sleep on and copy under, apart from the rings.
#[derive(Clone, Debug)]
pub struct Sleeper(Arc<Mapping>);

impl Sleeper {
    /// Sleeps until the store wakes this end, at most for `timeout`; not at all where that happened
    /// since [`Link::sleep`].
    pub fn wait(&self, timeout: Duration) {
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // Woken, late, or a word that changed before: the caller looks again in each case.
        let _ = futex::wait(word(&self.0, CLIENT_SLEEPS), futex::Flags::empty(), 1, Some(&timeout));
    }

    /// Wakes the thread that sleeps.
    pub fn wake(&self) {
        let asleep = word(&self.0, CLIENT_SLEEPS);
        asleep.store(0, Ordering::Relaxed);
        let _ = futex::wake(asleep, futex::Flags::empty(), u32::MAX >> 1);
    }

    /// Counts a short copy of the calling thread until the value is dropped: the store expects a
    /// request behind it.
    pub fn copy(&self) -> Copying {
        word(&self.0, COPIES).fetch_add(1, Ordering::Relaxed);
        Copying(self.clone())
    }

    /// Whether a thread of the client says that it copies.
    #[must_use]
    pub fn copies(&self) -> bool {
        word(&self.0, COPIES).load(Ordering::Relaxed) != 0
    }
}

/// A copy under way; see [`Sleeper::copy`].
#[derive(Debug)]
pub struct Copying(Sleeper);

impl Drop for Copying {
    fn drop(&mut self) {
        word(&self.0.0, COPIES).fetch_sub(1, Ordering::Relaxed);
    }
}

/// A word of the first page that both ends see.
fn word(mapping: &Mapping, offset: usize) -> &AtomicU32 {
    // SAFETY: `offset` is one of this module's constants, inside the first page.
    let word: NonNull<u8> = unsafe { mapping.base().add(offset) };
    // SAFETY: mapped while the mapping is borrowed, aligned, and only reached through atomics of
    // this width.
    unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
}

// SAFETY: the rings point into `mapping`, which the value owns and which does not move; all access
// goes through atomics, and one end of a ring is used by the value's holder alone.
unsafe impl Send for Link {}

impl Link {
    /// A new object and the store's end of it.
    ///
    /// Errors: the kernel's.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let descriptor = create_memfd("beeline-objects-link", LENGTH_BYTES)?;
        let copy = descriptor.try_clone()?;
        let mapping = Mapping::shared(copy, LENGTH_BYTES, Protection::ReadWrite)?;
        mapping.forget_descriptor();
        let magic = b"beeline-objects\0";
        // SAFETY: the mapping is longer than the magic, writable, and not yet shared.
        unsafe { mapping.base().as_ptr().copy_from_nonoverlapping(magic.as_ptr(), magic.len()) };
        Ok((Self::new(mapping, true), descriptor))
    }

    /// The client's end of an object that its store sent.
    ///
    /// Errors: the kernel's; `InvalidData` for an object of another shape.
    pub fn open(descriptor: OwnedFd) -> io::Result<Self> {
        let length = rustix::fs::fstat(&descriptor)?.st_size;
        if usize::try_from(length) != Ok(LENGTH_BYTES)
            || !one_writer::keeps_its_length(&descriptor)?
        {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mapping = Mapping::shared(descriptor, LENGTH_BYTES, Protection::ReadWrite)?;
        mapping.forget_descriptor();
        Ok(Self::new(mapping, false))
    }

    fn new(mapping: Mapping, store: bool) -> Self {
        let (outbound, inbound) = if store { (REPLIES, REQUESTS) } else { (REQUESTS, REPLIES) };
        // SAFETY: both offsets lie inside the mapping (asserted above).
        let outbound = unsafe { mapping.base().add(outbound) };
        // SAFETY: as above.
        let inbound = unsafe { mapping.base().add(inbound) };
        // SAFETY: the slots lie inside the mapping, which the value keeps; this end is the only
        // producer of this process.
        let producer = unsafe { SlotProducer::new(outbound.cast(), SLOTS) };
        // SAFETY: as above, for consuming.
        let consumer = unsafe { SlotConsumer::new(inbound.cast(), SLOTS) };
        let (taken_by_peer, taken_by_us) = if store {
            (REPLIES_CONSUMED, REQUESTS_CONSUMED)
        } else {
            (REQUESTS_CONSUMED, REPLIES_CONSUMED)
        };
        let (peer_sleeps, we_sleep) =
            if store { (CLIENT_SLEEPS, STORE_SLEEPS) } else { (STORE_SLEEPS, CLIENT_SLEEPS) };
        let mapping = Arc::new(mapping);
        Self {
            producer,
            consumer,
            taken_by_peer,
            taken_by_us,
            peer_sleeps,
            we_sleep,
            unpublished: 0,
            mapping,
        }
    }

    fn count(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `offset` is one of this module's constants, inside the first page.
        let word: NonNull<u8> = unsafe { self.mapping.base().add(offset) };
        // SAFETY: mapped while the value lives, aligned, and only reached through atomics.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    /// Where this client's threads sleep.
    #[must_use]
    pub fn sleeper(&self) -> Sleeper {
        Sleeper(Arc::clone(&self.mapping))
    }

    /// Whether a message fits.
    ///
    /// Errors: [`ImplausibleIndex`]: the peer claims what it cannot have taken.
    pub fn has_room(&mut self) -> Result<bool, ImplausibleIndex> {
        if !self.producer.has_room() {
            // Pairs with the release in `publish_taken` at the peer: the slots are free then.
            let claimed = self.count(self.taken_by_peer).load(Ordering::Acquire);
            self.producer.consumed(claimed)?;
        }
        Ok(self.producer.has_room())
    }

    /// Publishes a message. True when the peer sleeps and has to be rung.
    ///
    /// Invariant: [`Link::has_room`] said so.
    #[must_use]
    pub fn push(&mut self, tag: u32, body: &[u64]) -> bool {
        self.producer.push(tag, body);
        // Pairs with the fence in `sleep` at the peer.
        fence(Ordering::SeqCst);
        self.rouse()
    }

    /// True when the peer sleeps and has to be rung, with or without a message.
    #[must_use]
    pub fn rouse(&self) -> bool {
        let asleep = word(&self.mapping, self.peer_sleeps);
        asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::Relaxed) != 0
    }

    /// Takes the next message.
    pub fn take(&mut self) -> Option<SlotMessage> {
        let message = self.consumer.peek()?;
        self.consumer.advance();
        self.unpublished += 1;
        if self.unpublished >= SLOTS / 4 {
            self.publish_taken();
        }
        Some(message)
    }

    /// Tells the peer how much was taken.
    pub fn publish_taken(&mut self) {
        if self.unpublished > 0 {
            self.unpublished = 0;
            // Pairs with the acquire in `has_room` at the peer.
            self.count(self.taken_by_us).store(self.consumer.next_index(), Ordering::Release);
        }
    }

    /// Says that this end sleeps from now on; true when nothing waits, so that it may.
    #[must_use]
    pub fn sleep(&mut self) -> bool {
        self.publish_taken();
        word(&self.mapping, self.we_sleep).store(1, Ordering::Relaxed);
        // Pairs with the fence in `push` at the peer.
        fence(Ordering::SeqCst);
        if self.consumer.ready() {
            self.wake();
            return false;
        }
        true
    }

    /// Ends [`Link::sleep`].
    pub fn wake(&mut self) {
        word(&self.mapping, self.we_sleep).store(0, Ordering::Relaxed);
    }

    /// All words of the object, for tests that play a client which scribbles over them.
    #[cfg(test)]
    pub(crate) fn scribble(&self, at: usize, value: u64) {
        let offset = at % (LENGTH_BYTES / 8) * 8;
        // SAFETY: the offset lies inside the mapping.
        let word = unsafe { self.mapping.base().add(offset) };
        // SAFETY: mapped, aligned, reached through atomics by everybody.
        let word = unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) };
        word.store(value, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_is_roused_once_without_a_message() {
        let (mut store, descriptor) = Link::create().unwrap();
        let mut client = Link::open(descriptor).unwrap();
        assert!(!client.rouse(), "it is awake");
        assert!(store.sleep());
        assert!(client.rouse());
        assert!(!client.rouse() && !client.push(1, &[0]), "it was rung already");
        assert!(!store.sleep(), "a message waits");
    }

    #[test]
    fn copies_are_counted_until_the_last_ends() {
        let (store, descriptor) = Link::create().unwrap();
        let (store, client) = (store.sleeper(), Link::open(descriptor).unwrap().sleeper());
        assert!(!store.copies());
        let (first, second) = (client.copy(), client.copy());
        drop(first);
        assert!(store.copies(), "one goes on");
        drop(second);
        assert!(!store.copies());
    }

    #[test]
    fn messages_cross_both_ways_and_a_full_ring_waits_for_the_consumer() {
        let (mut store, descriptor) = Link::create().unwrap();
        let mut client = Link::open(descriptor).unwrap();
        for round in 0..3_u64 {
            let mut sent = 0;
            while client.has_room().unwrap() {
                let _ = client.push(7, &[round, sent]);
                sent += 1;
            }
            assert!(sent >= u64::from(SLOTS) - 16, "{sent}");
            for expected in 0..sent {
                let message = store.take().unwrap();
                assert_eq!((message.tag, &message.body[..2]), (7, &[round, expected][..]));
            }
            assert!(store.take().is_none());
            store.publish_taken();
        }
        assert!(!store.push(9, &[1]));
        assert_eq!(client.take().unwrap().tag, 9);
    }

    #[test]
    fn a_sleeper_is_rung_once_and_one_with_messages_does_not_sleep() {
        let (mut store, descriptor) = Link::create().unwrap();
        let mut client = Link::open(descriptor).unwrap();
        assert!(store.sleep());
        assert!(client.push(1, &[]));
        assert!(!client.push(2, &[]));
        assert!(!store.sleep());
        assert!(store.take().is_some() && store.take().is_some());
        assert!(store.sleep());
    }

    #[test]
    fn an_object_of_another_length_is_refused() {
        let other = create_memfd("other", 4096).unwrap();
        assert!(Link::open(other).is_err());
    }
}
