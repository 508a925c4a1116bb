//! The link between card and host (the specification's 3.13), emulated over shared memory.
//!
//! Place: below `sides`, which runs a graph's `host` elements behind it. [`bus`] is the memory, the
//! doorbells and the pace; [`slot`] the protocol of a single message; [`queue`] the rings of the data
//! slots; [`card`] the card's side of kernel control, signals, board memory and registers, and the
//! host's library for them. Each operation that crosses the link is counted, so that tests and
//! measurements speak of operations and not of this machine's memory.
//!
//! ```text
//! slots   0 .. 32   kernel control and board memory   (33)
//!         33        signals                           (1)
//!         34 .. 63  data, each with two rings of 128  (30)
//! ```

pub mod bus;
pub mod card;
pub mod queue;
pub mod slot;

use bus::{Bus, BusError, Counts, HEADER, Pace};

/// Slots of the link.
pub const SLOTS: usize = 64;
/// Slots for kernel control and board memory.
pub const CONTROL_SLOTS: usize = 33;
/// The slot for signals.
pub const SIGNALS: usize = 33;
/// The first slot for data.
pub const FIRST_DATA: usize = 34;
/// Slots for data.
pub const DATA_SLOTS: usize = 30;
/// Entries of a work queue's ring.
pub const RING: usize = 128;
/// Words of a slot's buffer: 64 flits.
pub const SLOT_WORDS: usize = 512;

const _: () = assert!(CONTROL_SLOTS + 1 + DATA_SLOTS == SLOTS && SIGNALS == CONTROL_SLOTS);

/// First word of the rings.
const QUEUES_AT: usize = HEADER + SLOTS * slot::SLOT_SIZE;

/// Words of host memory that the card reaches without a message.
pub const WINDOW: usize = 4_096;
/// First word of the window.
const WINDOW_AT: usize = QUEUES_AT + DATA_SLOTS * 2 * queue::RING_SIZE;
/// The access to registers that is under way.
const MAILBOX_AT: usize = WINDOW_AT + WINDOW;

/// The link, lent to both sides.
#[derive(Debug)]
pub struct Link {
    pub(crate) bus: Bus,
}

impl Link {
    /// A link of 64 slots with nothing in it.
    ///
    /// Errors: the system gives no memory or no doorbells.
    pub fn new(pace: Pace) -> Result<Self, BusError> {
        let words = MAILBOX_AT + 8 - HEADER;
        Ok(Self { bus: Bus::new(words, SLOTS, pace)? })
    }

    /// Memory, doorbells, pace.
    #[must_use]
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Operations so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.bus.counts()
    }

    /// First word of a slot.
    fn slot_at(slot: usize) -> usize {
        HEADER + slot * slot::SLOT_SIZE
    }
}
