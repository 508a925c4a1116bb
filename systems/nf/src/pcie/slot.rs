//! Slots: one message at a time in each direction, four operations or more a message (3.13).
//!
//! Down: the host writes the control register (the doorbell); the card reads the words from host
//! memory; when it has processed them it writes the completion register in host memory and
//! interrupts. Up: the card looks at its uplink register, writes the words to host memory, sets the
//! register and interrupts; the host reads the register, takes the words, and writes the register to
//! release the slot. The next message of the slot and direction waits for that.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::bus::{Direction, sleep_on};
use super::{Link, SLOT_WORDS, SLOTS};

/// How the host learns that the card has done something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It looks again and again.
    Poll,
    /// It sleeps until an interrupt.
    #[default]
    Interrupt,
}

/// A message was not passed on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The last one of this direction is still there.
    #[error("slot {0} still holds a message that was not taken")]
    Busy(usize),
    /// More words than a slot's buffer has.
    #[error("a message of {0} words: a slot holds 1 to {SLOT_WORDS}")]
    Length(usize),
    /// No such slot.
    #[error("there is no slot {0}: the link has {SLOTS}")]
    NoSuchSlot(usize),
    /// The other side does not answer.
    #[error("slot {slot}: no answer within {waited:?}")]
    Late {
        /// Which.
        slot: usize,
        /// How long.
        waited: Duration,
    },
    /// Sleeping.
    #[error("waiting for the card: {0}")]
    Wait(#[from] io::Error),
}

/// Registers of a slot, in words from its place: a value, and when the other side sees it.
const DOWN_CONTROL: usize = 0;
const DOWN_COMPLETION: usize = 8;
const UP_CONTROL: usize = 16;
/// The buffers follow the registers.
pub(super) const DOWN_BUFFER: usize = 24;
pub(super) const UP_BUFFER: usize = DOWN_BUFFER + SLOT_WORDS;
/// Words of a slot.
pub(super) const SLOT_SIZE: usize = UP_BUFFER + SLOT_WORDS;
/// How long a host that polls keeps its processor to itself: some answers' time.
const PATIENCE: Duration = Duration::from_micros(50);

impl Link {
    fn register(&self, slot: usize, register: usize) -> usize {
        Self::slot_at(slot) + register
    }

    /// Sets a register; 0 clears it. The other side sees it at `time`.
    fn set(&self, slot: usize, register: usize, value: u64, time: u64) {
        let at = self.register(slot, register);
        self.bus.word(at + 1).store(time, Ordering::Relaxed);
        // Release: pairs with `see`, for the time beside it and the words of the buffer.
        self.bus.word(at).store(value, Ordering::Release);
    }

    /// A register as the other side sees it.
    fn see(&self, slot: usize, register: usize) -> u64 {
        let at = self.register(slot, register);
        let value = self.bus.word(at).load(Ordering::Acquire);
        if value == 0 || self.bus.reached(self.bus.word(at + 1).load(Ordering::Relaxed)) {
            value
        } else {
            0
        }
    }

    /// A register as its own side sees it.
    fn own(&self, slot: usize, register: usize) -> u64 {
        self.bus.word(self.register(slot, register)).load(Ordering::Acquire)
    }

    fn fill(&self, slot: usize, buffer: usize, words: &[u64]) -> Result<(), SlotError> {
        if words.is_empty() || words.len() > SLOT_WORDS {
            return Err(SlotError::Length(words.len()));
        }
        for (at, word) in words.iter().enumerate() {
            self.bus.word(Self::slot_at(slot) + buffer + at).store(*word, Ordering::Relaxed);
        }
        Ok(())
    }

    fn take(&self, slot: usize, buffer: usize, count: u64) -> Vec<u64> {
        let count = usize::try_from(count).unwrap_or(0).min(SLOT_WORDS);
        let word = |at| self.bus.word(Self::slot_at(slot) + buffer + at).load(Ordering::Relaxed);
        (0..count).map(word).collect()
    }

    /// Host: sends a message.
    ///
    /// Errors: the last one was not completed; no such slot; its length.
    pub fn host_send(&self, slot: usize, words: &[u64]) -> Result<(), SlotError> {
        if slot >= SLOTS {
            return Err(SlotError::NoSuchSlot(slot));
        }
        if self.own(slot, DOWN_CONTROL) != 0 || self.own(slot, DOWN_COMPLETION) != 0 {
            return Err(SlotError::Busy(slot));
        }
        self.fill(slot, DOWN_BUFFER, words)?;
        let time = self.bus.arrival(Direction::Down, 8);
        self.set(slot, DOWN_CONTROL, words.len() as u64, time);
        self.bus.ring_card();
        Ok(())
    }

    /// Card: the message of a slot that has come whole. It stays there until [`Link::card_complete`].
    /// The read of host memory that this is takes the card's time.
    #[must_use]
    pub fn card_receive(&self, slot: usize) -> Option<Vec<u64>> {
        let count = self.see(slot, DOWN_CONTROL);
        // A message that is processed already waits for its completion to be seen.
        if count == 0 || self.own(slot, DOWN_COMPLETION) != 0 {
            return None;
        }
        self.bus.count_dma(true);
        let bytes = usize::try_from(count).unwrap_or(0) * 8;
        self.bus.stand_until(self.bus.round_trip(Direction::Down, bytes));
        Some(self.take(slot, DOWN_BUFFER, count))
    }

    /// Card: the slot's message is processed.
    pub fn card_complete(&self, slot: usize) {
        // The register goes first: a host that sees the completion may send the next message.
        self.set(slot, DOWN_CONTROL, 0, 0);
        self.bus.count_dma(false);
        let time = self.bus.arrival(Direction::Up, 8);
        self.set(slot, DOWN_COMPLETION, 1, time);
        self.bus.interrupt(slot);
    }

    /// Host: takes the completion of its last message; false while there is none.
    #[must_use]
    pub fn host_completed(&self, slot: usize) -> bool {
        let done = self.see(slot, DOWN_COMPLETION) != 0;
        if done {
            self.set(slot, DOWN_COMPLETION, 0, 0);
        }
        done
    }

    /// Card: true where the host has taken the slot's last message, and its release has arrived.
    #[must_use]
    pub fn uplink_is_free(&self, slot: usize) -> bool {
        let at = self.register(slot, UP_CONTROL);
        self.own(slot, UP_CONTROL) == 0
            && self.bus.reached(self.bus.word(at + 1).load(Ordering::Relaxed))
    }

    /// Card: sends a message; false while the last one was not taken.
    ///
    /// Errors: its length; no such slot.
    pub fn card_send(&self, slot: usize, words: &[u64]) -> Result<bool, SlotError> {
        if slot >= SLOTS {
            return Err(SlotError::NoSuchSlot(slot));
        }
        if !self.uplink_is_free(slot) {
            return Ok(false);
        }
        self.fill(slot, UP_BUFFER, words)?;
        self.bus.count_dma(false);
        let time = self.bus.arrival(Direction::Up, words.len() * 8);
        self.set(slot, UP_CONTROL, words.len() as u64, time);
        self.bus.interrupt(slot);
        Ok(true)
    }

    /// Host: takes the message of a slot and releases it.
    #[must_use]
    pub fn host_receive(&self, slot: usize) -> Option<Vec<u64>> {
        if self.see(slot, UP_CONTROL) == 0 {
            return None;
        }
        // The register is on the card: reading it is a round trip, writing it is not waited for.
        self.bus.count_register(true);
        self.bus.stand_until(self.bus.round_trip(Direction::Up, 8));
        let words = self.take(slot, UP_BUFFER, self.own(slot, UP_CONTROL));
        let time = self.bus.arrival(Direction::Down, 8);
        self.set(slot, UP_CONTROL, 0, time);
        // The write of the register that this is, and the card's look at it.
        self.bus.ring_card();
        Some(words)
    }

    /// Host: waits until `look` finds something, by looking or by interrupts of the slot.
    ///
    /// Errors: nothing was found within `limit`.
    pub fn host_wait<T>(
        &self,
        slot: usize,
        mode: Mode,
        limit: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T, SlotError> {
        let start = Instant::now();
        loop {
            if mode == Mode::Interrupt {
                // Cleared before the look: an interrupt after it ends the sleep.
                self.bus.clear_host(slot);
            }
            if let Some(found) = look() {
                return Ok(found);
            }
            let waited = start.elapsed();
            if waited >= limit {
                return Err(SlotError::Late { slot, waited });
            }
            match mode {
                // The card may wait for this very processor.
                Mode::Poll if waited > PATIENCE => std::thread::yield_now(),
                Mode::Poll => std::hint::spin_loop(),
                // What is on its way has interrupted already: it is there after the delay.
                Mode::Interrupt if self.on_its_way(slot) => std::hint::spin_loop(),
                Mode::Interrupt => sleep_on(&[self.bus.host_bell(slot)], limit - waited)?,
            }
        }
    }

    /// True where the card has written something that is not visible yet.
    fn on_its_way(&self, slot: usize) -> bool {
        [DOWN_COMPLETION, UP_CONTROL].iter().any(|r| self.own(slot, *r) != 0)
    }
}
