//! A ring in the other host's window, and the one in this host's that the other one writes.
//!
//! The sender's position lives at the sender alone, the receiver's at the receiver; the sender knows
//! a *shadow* of the latter, which the receiver posts into the sender's window when a packet asked
//! for it, and every so many packets (NTSocks 3.3). The shadow lags, so that a sender only ever
//! thinks that there is less room than there is.
//!
//! A batch is posted as payloads, a fence, headers, a fence: the header is one aligned word, and no
//! reader sees it before the payload.

use std::sync::atomic::Ordering;

use beeline_ntb::{Inbound, Outbound};
use beeline_sockets::packets::header::{BadHeader, HEADER_BYTES, Header};

/// Part of a ring, in percent, beyond which packets ask for the shadow.
pub const PENDING_PERCENT: u64 = 50;

/// The other host wrote what it cannot have meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingFault {
    /// A header that is none.
    #[error(transparent)]
    Header(#[from] BadHeader),
    /// A position that cannot be.
    #[error("the other host says that it has read {shadow} of {written} packets")]
    Shadow {
        /// As it stands in the window.
        shadow: u64,
        /// Packets so far.
        written: u64,
    },
}

/// The sending end.
#[derive(Debug)]
pub struct RingSender {
    ring: Outbound,
    /// Where the other host posts how far it has read.
    shadow: Inbound,
    slot_bytes: usize,
    capacity: u64,
    write: u64,
    /// Headers of payloads that were posted: not yet behind a fence.
    staged: Vec<(usize, u64)>,
    /// Packets that asked for the shadow.
    pub sync_requests: u64,
}

impl RingSender {
    /// Over `ring` at the other host and the word at the beginning of `shadow` at this one.
    #[must_use]
    pub fn new(ring: Outbound, shadow: Inbound, slot_bytes: usize) -> Self {
        let capacity = (ring.length_bytes() / slot_bytes) as u64;
        assert!(capacity.is_power_of_two(), "a ring's length is a power of two");
        Self { ring, shadow, slot_bytes, capacity, write: 0, staged: Vec::new(), sync_requests: 0 }
    }

    /// Slots that the receiver is known to be done with.
    ///
    /// Errors: [`RingFault::Shadow`].
    pub fn room(&self) -> Result<usize, RingFault> {
        // Acquire: the receiver cleared the slots before it said so.
        let shadow = self.shadow.word(0).load(Ordering::Acquire);
        let pending = self.write.wrapping_sub(shadow);
        if pending > self.capacity {
            return Err(RingFault::Shadow { shadow, written: self.write });
        }
        Ok(usize::try_from(self.capacity - pending).unwrap_or(0))
    }

    /// Posts a payload; its header follows with [`RingSender::publish`]. The caller knows that there
    /// is room.
    ///
    /// # Safety
    ///
    /// `payload` is readable for as many bytes as the header says.
    #[expect(clippy::cast_possible_truncation, reason = "below the capacity")]
    pub unsafe fn stage(&mut self, header: Header, payload: *const u8) {
        let at = (self.write & (self.capacity - 1)) as usize * self.slot_bytes;
        let pending = self.write + 1 - self.shadow.word(0).load(Ordering::Relaxed).min(self.write);
        let sync = pending * 100 > PENDING_PERCENT * self.capacity;
        self.sync_requests += u64::from(sync);
        let length = header.payload_bytes();
        if length > 0 {
            // SAFETY: the caller's contract.
            unsafe { self.ring.post(at + HEADER_BYTES, payload, length) };
        }
        self.staged.push((at, Header { sync, ..header }.encode()));
        self.write += 1;
    }

    /// Packets that are staged.
    #[must_use]
    pub fn staged(&self) -> usize {
        self.staged.len()
    }

    /// Publishes what was staged, and sends it on its way. How many packets.
    #[inline]
    pub fn publish(&mut self) -> usize {
        if self.staged.is_empty() { 0 } else { self.publish_all() }
    }

    fn publish_all(&mut self) -> usize {
        let count = self.staged.len();
        self.ring.fence();
        for (at, word) in self.staged.drain(..) {
            self.ring.post_word(at, word);
        }
        self.ring.fence();
        count
    }
}

/// The receiving end.
#[derive(Debug)]
pub struct RingReceiver {
    ring: Inbound,
    /// Where the other host reads how far this one has read.
    shadow: Outbound,
    slot_bytes: usize,
    capacity: u64,
    read: u64,
    /// As posted last.
    posted: u64,
    wanted: bool,
}

impl RingReceiver {
    /// Over `ring` at this host and the word at the beginning of `shadow` at the other one.
    #[must_use]
    pub fn new(ring: Inbound, shadow: Outbound, slot_bytes: usize) -> Self {
        let capacity = (ring.length_bytes() / slot_bytes) as u64;
        assert!(capacity.is_power_of_two(), "a ring's length is a power of two");
        Self { ring, shadow, slot_bytes, capacity, read: 0, posted: 0, wanted: false }
    }

    #[expect(clippy::cast_possible_truncation, reason = "below the capacity")]
    fn at(&self) -> usize {
        (self.read & (self.capacity - 1)) as usize * self.slot_bytes
    }

    /// The packet at the head, if there is one.
    ///
    /// Errors: [`RingFault::Header`].
    #[inline]
    pub fn head(&self) -> Result<Option<Header>, RingFault> {
        // Acquire: the payload was posted behind a fence before the header.
        let word = self.ring.word(self.at()).load(Ordering::Acquire);
        if word == 0 {
            return Ok(None);
        }
        Ok(Header::decode(word, self.slot_bytes)?)
    }

    /// Copies the payload of the packet at the head.
    ///
    /// # Safety
    ///
    /// `target` is writable for `length` bytes, which are at most a slot's less its header.
    pub unsafe fn copy(&self, target: *mut u8, length: usize) {
        // SAFETY: the caller's contract; the range lies in the slot.
        unsafe { self.ring.copy_to(self.at() + HEADER_BYTES, target, length) };
    }

    /// The word at `index` of the head's payload.
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.ring.word(self.at() + HEADER_BYTES + index * 8).load(Ordering::Relaxed)
    }

    /// Clears the slot at the head and goes on.
    pub fn pass(&mut self, header: Header) {
        self.ring.word(self.at()).store(0, Ordering::Release);
        self.read += 1;
        self.wanted |= header.sync;
    }

    /// Posts how far this end has read, where a packet asked for it or many were read since. True if so.
    pub fn tell(&mut self) -> bool {
        let many = self.read - self.posted >= (self.capacity / 4).clamp(1, 512);
        if self.read == self.posted || !many && !self.wanted {
            return false;
        }
        self.posted = self.read;
        self.wanted = false;
        // The slots were cleared before: behind a fence, since they lie in other memory.
        self.shadow.fence();
        self.shadow.post_word(0, self.read);
        self.shadow.fence();
        true
    }

    /// True when nothing is at the head.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self.head(), Ok(None))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use beeline_ntb::shim::Combining;
    use beeline_ntb::window::{Mapped, Wire};
    use beeline_os::Mapping;
    use beeline_sockets::packets::header::PacketKind;
    use proptest::prelude::*;

    use super::*;

    const SLOT: usize = 128;
    const SLOTS: usize = 8;

    /// A wire that leaves fences out.
    #[derive(Debug)]
    struct Unfenced(Arc<dyn Wire>);

    impl Wire for Unfenced {
        fn length_bytes(&self) -> usize {
            self.0.length_bytes()
        }

        unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
            // SAFETY: the caller's contract.
            unsafe { self.0.post(offset, source, length) };
        }

        fn post_word(&self, offset: usize, value: u64) {
            self.0.post_word(offset, value);
        }

        fn fence(&self) {}
    }

    /// Both ends of a ring, whose packets go through combining buffers of `seed`.
    fn ends(seed: Option<u64>, fenced: bool) -> (RingSender, RingReceiver) {
        let ring = SLOT * SLOTS;
        let mapping = Arc::new(Mapping::anonymous(ring + 4096).unwrap());
        let mut wire: Arc<dyn Wire> = Arc::new(Mapped::new(Arc::clone(&mapping), 0, ring));
        if let Some(seed) = seed {
            wire = Arc::new(Combining::new(wire, 6, seed));
            if !fenced {
                wire = Arc::new(Unfenced(wire));
            }
        }
        let shadow = Inbound::new(Arc::clone(&mapping), ring, 64);
        let back = Outbound::new(Arc::new(Mapped::new(Arc::clone(&mapping), ring, 64)));
        let sender = RingSender::new(Outbound::new(wire), shadow, SLOT);
        (sender, RingReceiver::new(Inbound::new(mapping, 0, ring), back, SLOT))
    }

    fn header(length: usize) -> Header {
        let length = u16::try_from(length + HEADER_BYTES).unwrap();
        Header { source: 1, destination: 2, length, sync: false, kind: PacketKind::Data }
    }

    /// Payload of the `number`th packet.
    fn payload(number: u64) -> [u8; SLOT - HEADER_BYTES] {
        std::array::from_fn(|index| (number * 31 + index as u64) as u8)
    }

    /// Sends and receives by `steps`; false when a packet was torn, or some never came.
    fn stream(sender: &mut RingSender, receiver: &mut RingReceiver, steps: &[(bool, u8)]) -> bool {
        let (mut sent, mut received) = (0, 0);
        for &(sends, count) in steps {
            for _ in 0..count {
                if sends {
                    if sender.room().unwrap() == 0 {
                        break;
                    }
                    let bytes = payload(sent);
                    // SAFETY: as long as told.
                    unsafe {
                        sender.stage(header(1 + sent as usize * 37 % bytes.len()), bytes.as_ptr())
                    };
                    sent += 1;
                } else {
                    match receiver.head() {
                        Ok(None) => break,
                        Ok(Some(head)) => {
                            let mut bytes = [0; SLOT - HEADER_BYTES];
                            let length = head.payload_bytes();
                            // SAFETY: room for a whole slot's payload.
                            unsafe { receiver.copy(bytes.as_mut_ptr(), length) };
                            let whole = length == 1 + received as usize * 37 % bytes.len();
                            if !whole || bytes[..length] != payload(received)[..length] {
                                return false;
                            }
                            receiver.pass(head);
                            received += 1;
                        }
                        Err(_) => return false,
                    }
                }
            }
            sender.publish();
            receiver.tell();
            assert!(sent - received <= SLOTS as u64);
        }
        while let Ok(Some(head)) = receiver.head() {
            receiver.pass(head);
            received += 1;
        }
        sent == received
    }

    fn steps() -> impl Strategy<Value = Vec<(bool, u8)>> {
        proptest::collection::vec((any::<bool>(), 0_u8..10), 1..200)
    }

    proptest! {
        #[test]
        fn packets_come_whole_and_in_order_through_a_window_that_reorders(
            seed in any::<u64>(), steps in steps(),
        ) {
            let (mut sender, mut receiver) = ends(Some(seed), true);
            prop_assert!(stream(&mut sender, &mut receiver, &steps));
        }

        #[test]
        fn any_words_in_the_window_are_refused_or_are_packets(words in proptest::collection::vec(any::<u64>(), SLOTS), shadow in any::<u64>()) {
            let (sender, mut receiver) = ends(None, true);
            sender.shadow.word(0).store(shadow, Ordering::Relaxed);
            prop_assert_eq!(sender.room().is_ok(), shadow == 0 || shadow.wrapping_neg() <= SLOTS as u64);
            for (index, word) in words.iter().enumerate() {
                receiver.ring.word(index * SLOT).store(*word, Ordering::Relaxed);
            }
            while let Ok(Some(head)) = receiver.head() {
                prop_assert!(head.payload_bytes() <= SLOT - HEADER_BYTES);
                receiver.pass(head);
            }
        }
    }

    #[test]
    fn a_sender_without_its_fences_is_caught() {
        let steps: Vec<_> = (0..400).map(|step| (step % 2 == 0, 5)).collect();
        let caught = (0..20).filter(|&seed| {
            let (mut sender, mut receiver) = ends(Some(seed), false);
            !stream(&mut sender, &mut receiver, &steps)
        });
        assert!(caught.count() >= 15, "the shim reorders what is not fenced");
    }

    #[test]
    fn a_full_ring_asks_for_the_shadow_and_an_empty_one_does_not() {
        let (mut sender, mut receiver) = ends(None, true);
        let one = payload(0);
        for _ in 0..40 {
            // SAFETY: as long as told.
            unsafe { sender.stage(header(8), one.as_ptr()) };
            sender.publish();
            let head = receiver.head().unwrap().unwrap();
            receiver.pass(head);
            receiver.tell();
        }
        assert_eq!(sender.sync_requests, 0);
        while sender.room().unwrap() > 0 {
            // SAFETY: as long as told.
            unsafe { sender.stage(header(8), one.as_ptr()) };
        }
        sender.publish();
        assert!(sender.sync_requests > 0);
        // The reader that stood still goes on: the sender hears of room without sending anything, after a quarter of the
        // ring, and at once behind each packet that asked, of which the fifth is the first.
        let mut told = Vec::new();
        while let Some(head) = receiver.head().unwrap() {
            receiver.pass(head);
            told.push(receiver.tell());
        }
        assert_eq!(told, [false, true, false, true, true, true, true, true]);
        assert_eq!(sender.room().unwrap(), SLOTS);
    }
}
