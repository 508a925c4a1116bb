//! A bounded queue of values from one thread to another.
//!
//! Invariants: `tail` is written by the sender only, `head` by the receiver only; slots
//! `head..tail` (modulo capacity) are initialised and belong to the receiver, the others to the
//! sender. Each side keeps a private copy of its own index and a cached copy of the other's, so
//! that a send or receive usually touches one shared cache line.

use std::mem::MaybeUninit;

use crate::sync::{Arc, AtomicUsize, Ordering, ProtocolCell};

#[repr(align(128))]
#[derive(Debug)]
struct Padded<T>(T);

#[derive(Debug)]
struct Shared<T> {
    slots: Box<[ProtocolCell<MaybeUninit<T>>]>,
    /// Next slot to send into. Release by the sender publishes the slot's value to the receiver's
    /// acquire in `Receiver::receive`.
    tail: Padded<AtomicUsize>,
    /// Next slot to receive from. Release by the receiver hands the empty slot back to the
    /// sender's acquire in `Sender::send`.
    head: Padded<AtomicUsize>,
}

// SAFETY: a slot is accessed by one side at a time (module invariants), and values only move
// across, so `T: Send` is all that is needed.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<T> {}

/// The sending half.
#[derive(Debug)]
pub struct Sender<T> {
    shared: Arc<Shared<T>>,
    tail: usize,
    head_seen: usize,
}

/// The receiving half.
#[derive(Debug)]
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    head: usize,
    tail_seen: usize,
}

/// A mailbox of `capacity` values; a power of two.
#[must_use]
pub fn mailbox<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    assert!(capacity.is_power_of_two(), "a mailbox's capacity is a power of two");
    let slots = (0..capacity).map(|_| ProtocolCell::new(MaybeUninit::uninit())).collect();
    let shared = Arc::new(Shared {
        slots,
        tail: Padded(AtomicUsize::new(0)),
        head: Padded(AtomicUsize::new(0)),
    });
    let sender = Sender { shared: Arc::clone(&shared), tail: 0, head_seen: 0 };
    (sender, Receiver { shared, head: 0, tail_seen: 0 })
}

impl<T> Sender<T> {
    /// Sends `value`.
    ///
    /// Errors: the value comes back when the mailbox is full.
    pub fn send(&mut self, value: T) -> Result<(), T> {
        let capacity = self.shared.slots.len();
        if self.tail.wrapping_sub(self.head_seen) == capacity {
            // Acquire: pairs with the receiver's release of `head`; the slot is empty by then.
            self.head_seen = self.shared.head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.head_seen) == capacity {
                return Err(value);
            }
        }
        let slot = &self.shared.slots[self.tail & (capacity - 1)];
        slot.with_mut(|slot| {
            // SAFETY: the slot lies outside `head..tail`, so it is the sender's; `Sender` is not
            // cloned and `send` takes `&mut self`.
            unsafe { (*slot).write(value) };
        });
        self.tail = self.tail.wrapping_add(1);
        self.shared.tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// True when the receiver was dropped.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

impl<T> Receiver<T> {
    /// The oldest value, if there is one.
    pub fn receive(&mut self) -> Option<T> {
        if self.head == self.tail_seen {
            // Acquire: pairs with the sender's release of `tail`; the value is in the slot.
            self.tail_seen = self.shared.tail.0.load(Ordering::Acquire);
            if self.head == self.tail_seen {
                return None;
            }
        }
        let slot = &self.shared.slots[self.head & (self.shared.slots.len() - 1)];
        // SAFETY: the slot lies in `head..tail`: initialised, and the receiver's alone.
        let value = slot.with_mut(|slot| unsafe { slot.cast::<T>().read() });
        self.head = self.head.wrapping_add(1);
        self.shared.head.0.store(self.head, Ordering::Release);
        Some(value)
    }

    /// True when nothing is waiting.
    pub fn is_empty(&mut self) -> bool {
        if self.head == self.tail_seen {
            self.tail_seen = self.shared.tail.0.load(Ordering::Acquire);
        }
        self.head == self.tail_seen
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Both halves are gone: what was sent and not received is nobody else's. Relaxed: their
        // last accesses happened before the count of handles fell to zero.
        let tail = self.tail.0.load(Ordering::Relaxed);
        let mut head = self.head.0.load(Ordering::Relaxed);
        while head != tail {
            let slot = &self.slots[head & (self.slots.len() - 1)];
            // SAFETY: the slot lies in `head..tail`: initialised, and this value's alone.
            slot.with_mut(|slot| unsafe { slot.cast::<T>().drop_in_place() });
            head = head.wrapping_add(1);
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        // What was sent later than this stays in the slots until the sender goes too; it learns of
        // the drop through `is_closed`.
        while self.receive().is_some() {}
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    use proptest::prelude::*;

    /// Steps of a property: fewer where Miri makes each of them.
    const MOST_STEPS: usize = if cfg!(miri) { 100 } else { 400 };

    proptest! {
        #[test]
        fn a_mailbox_behaves_like_a_bounded_deque(operations in proptest::collection::vec(any::<Option<u16>>(), 0..MOST_STEPS)) {
            let (mut sender, mut receiver) = mailbox(8);
            let mut model = VecDeque::new();
            for operation in operations {
                match operation {
                    Some(value) if model.len() == 8 => prop_assert_eq!(sender.send(value), Err(value)),
                    Some(value) => { prop_assert_eq!(sender.send(value), Ok(())); model.push_back(value); }
                    None => prop_assert_eq!(receiver.receive(), model.pop_front()),
                }
                prop_assert_eq!(receiver.is_empty(), model.is_empty());
            }
        }
    }

    #[test]
    fn values_cross_threads_in_order() {
        let (mut sender, mut receiver) = mailbox(16);
        let rounds: u64 = if cfg!(miri) { 200 } else { 200_000 };
        let producer = std::thread::spawn(move || {
            for value in 0..rounds {
                let mut boxed = Box::new(value);
                while let Err(back) = sender.send(boxed) {
                    boxed = back;
                    std::thread::yield_now();
                }
            }
        });
        for expected in 0..rounds {
            let value = loop {
                if let Some(value) = receiver.receive() {
                    break value;
                }
                std::thread::yield_now();
            };
            assert_eq!(*value, expected);
        }
        producer.join().unwrap();
    }

    #[test]
    fn a_dropped_receiver_drops_what_it_held() {
        let (mut sender, receiver) = mailbox(4);
        let value = std::sync::Arc::new(());
        sender.send(std::sync::Arc::clone(&value)).unwrap();
        drop(receiver);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
        assert!(sender.is_closed());
    }

    #[test]
    fn what_is_sent_to_a_receiver_that_is_gone_goes_with_the_sender() {
        let (mut sender, receiver) = mailbox(4);
        let value = std::sync::Arc::new(());
        drop(receiver);
        for _ in 0..3 {
            sender.send(std::sync::Arc::clone(&value)).unwrap();
        }
        drop(sender);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    #[test]
    fn a_value_is_seen_whole_and_in_order_under_every_interleaving() {
        crate::sync::explore("mailbox", || {
            let (mut sender, mut receiver) = mailbox(2);
            let producer = loom::thread::spawn(move || {
                let mut sent = 0;
                for value in 1..=3_u32 {
                    if sender.send(Box::new(value)).is_ok() {
                        sent += 1;
                    }
                }
                sent
            });
            let mut last = 0;
            for _ in 0..3 {
                if let Some(value) = receiver.receive() {
                    assert!(*value > last);
                    last = *value;
                }
            }
            producer.join().unwrap();
        });
    }
}
