//! The card's services, and the host's library for them (the specification's 6.3).
//!
//! Kernel control: start, stop, set an element back, read and change its variables, by slot 0; copies
//! between the window of host memory and board memory by slot 1, ordered by their completions;
//! signals by slot 33. A stopped card answers all of these: none depends on the data path. Raw DMA is
//! the card's reading and writing of the window without a message; passive registers are a range of
//! the host's address space that the card's logic answers.

use std::sync::atomic::Ordering;
use std::time::Duration;

use beeline_ir::interpreter::Frame;
use beeline_ir::run::{BATCH, Machine, Run, RunError, SIGNAL_WORDS, Signal};
use beeline_ir::tree::{Element, mask, words};

use super::bus::Direction;
use super::slot::{Mode, SlotError};
use super::{Link, MAILBOX_AT, SIGNALS, WINDOW, WINDOW_AT};

/// The slot of kernel control.
const CONTROL: usize = 0;
/// The slot of copies.
const COPIES: usize = 1;

/// First words of a control message.
const START: u64 = 1;
const STOP: u64 = 2;
const RESET: u64 = 3;
const READ: u64 = 4;
const WRITE: u64 = 5;
/// First words of a copy.
const INWARD: u64 = 1;
const OUTWARD: u64 = 2;
/// First word of an answer.
const DONE: u64 = 1;
const REFUSED: u64 = 2;

/// Words of the window of host memory that one copy moves at most.
pub const COPY_WORDS: usize = WINDOW;

/// What the card's logic answers when the host reads or writes its range.
pub trait Registers {
    /// The host reads.
    fn read(&mut self, address: u64) -> u64;
    /// The host writes.
    fn write(&mut self, address: u64, value: u64);
}

impl Link {
    /// Host: a word of the window of its memory that the card may reach.
    ///
    /// # Panics
    /// Past the window.
    pub fn window(&self, at: usize) -> &std::sync::atomic::AtomicU64 {
        assert!(at < WINDOW, "word {at} lies inside the window of {WINDOW}");
        self.bus.word(WINDOW_AT + at)
    }

    /// Card: reads words of the window: raw DMA. False, and nothing read, past its end.
    pub fn dma_read(&self, at: usize, to: &mut [u64]) -> bool {
        if at.checked_add(to.len()).is_none_or(|end| end > WINDOW) {
            return false;
        }
        self.bus.count_dma(true);
        self.bus.stand_until(self.bus.round_trip(Direction::Down, to.len() * 8));
        for (word, place) in to.iter_mut().zip(at..) {
            *word = self.window(place).load(Ordering::Acquire);
        }
        true
    }

    /// Card: writes words of the window: raw DMA. False, and nothing written, past its end.
    pub fn dma_write(&self, at: usize, from: &[u64]) -> bool {
        if at.checked_add(from.len()).is_none_or(|end| end > WINDOW) {
            return false;
        }
        self.bus.count_dma(false);
        self.bus.stand_until(self.bus.arrival(Direction::Up, from.len() * 8));
        for (word, place) in from.iter().zip(at..) {
            self.window(place).store(*word, Ordering::Release);
        }
        true
    }

    /// Host: reads a register that the card's logic answers. The processor stands until it has.
    ///
    /// Errors: no answer within `limit`.
    pub fn mmio_read(&self, address: u64, limit: Duration) -> Result<u64, SlotError> {
        self.mailbox(1, address, 0, limit)
    }

    /// Host: writes a register of the card's logic.
    ///
    /// Errors: the card has not taken it within `limit`.
    pub fn mmio_write(&self, address: u64, value: u64, limit: Duration) -> Result<(), SlotError> {
        self.mailbox(2, address, value, limit).map(drop)
    }

    /// One access at a time: the host's processor has one outstanding.
    fn mailbox(
        &self,
        kind: u64,
        address: u64,
        value: u64,
        limit: Duration,
    ) -> Result<u64, SlotError> {
        let word = |at| self.bus.word(MAILBOX_AT + at);
        word(1).store(address, Ordering::Relaxed);
        word(2).store(value, Ordering::Relaxed);
        word(3).store(self.bus.arrival(Direction::Down, 16), Ordering::Relaxed);
        // Release: pairs with the card's look, for the address and the value.
        word(0).store(kind, Ordering::Release);
        self.bus.count_register(kind == 1);
        self.bus.wake_card();
        let start = std::time::Instant::now();
        while word(0).load(Ordering::Acquire) != 0 {
            let waited = start.elapsed();
            if waited >= limit {
                word(0).store(0, Ordering::Relaxed);
                return Err(SlotError::Late { slot: CONTROL, waited });
            }
            std::thread::yield_now();
        }
        self.bus.stand_until(word(3).load(Ordering::Relaxed));
        Ok(word(2).load(Ordering::Relaxed))
    }

    /// Card: answers an access of the host's; true where there was one.
    pub fn serve_registers(&self, logic: &mut dyn Registers) -> bool {
        let word = |at| self.bus.word(MAILBOX_AT + at);
        let kind = word(0).load(Ordering::Acquire);
        if kind == 0 || !self.bus.reached(word(3).load(Ordering::Relaxed)) {
            return false;
        }
        let address = word(1).load(Ordering::Relaxed);
        if kind == 1 {
            word(2).store(logic.read(address), Ordering::Relaxed);
        } else {
            logic.write(address, word(2).load(Ordering::Relaxed));
        }
        word(3).store(self.bus.arrival(Direction::Up, 8), Ordering::Relaxed);
        // Release: pairs with the host's look, for the value.
        word(0).store(0, Ordering::Release);
        true
    }
}

/// A card: a graph at work, and board memory.
#[derive(Debug)]
pub struct Card<'g, M> {
    run: Run<'g, M>,
    ids: Vec<u16>,
    /// The bits that each word of each node's frame may have: machine code relies on a variable's
    /// width.
    masks: Vec<Vec<u64>>,
    running: bool,
    board: Vec<u64>,
}

impl<'g, M: Machine> Card<'g, M> {
    /// A card that has loaded a graph and waits to be started, with `board` words of its own memory.
    #[must_use]
    pub fn new(graph: &'g beeline_ir::graph::Graph, run: Run<'g, M>, board: usize) -> Self {
        let ids = graph.nodes.iter().map(|node| node.id).collect();
        let masks = graph.nodes.iter().map(|node| masks(&node.element)).collect();
        Self { run, ids, masks, running: false, board: vec![0; board] }
    }

    /// The graph at work.
    pub fn run(&mut self) -> &mut Run<'g, M> {
        &mut self.run
    }

    /// True between start and stop.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    fn node(&self, id: u64) -> Option<usize> {
        self.ids.iter().position(|other| u64::from(*other) == id)
    }

    /// Answers what the host asked, and runs the graph if it was started; true where something
    /// happened.
    ///
    /// Errors: a handler that does not end.
    pub fn turn(&mut self, link: &Link) -> Result<bool, RunError> {
        let mut moved = false;
        if let Some(message) = asked(link, CONTROL) {
            let answer = self.control(&message)?;
            moved |= reply(link, CONTROL, &answer);
        }
        if let Some(message) = asked(link, COPIES) {
            let done = self.copy(link, &message);
            moved |= reply(link, COPIES, &[if done { DONE } else { REFUSED }]);
        }
        if let Some(message) = asked(link, SIGNALS) {
            let mut signal: Signal = [0; SIGNAL_WORDS];
            for (to, from) in signal.iter_mut().zip(&message) {
                *to = *from;
            }
            let mut answer = vec![REFUSED];
            if let Some(node) = self.node(signal[0] & 0xffff) {
                answer = vec![DONE];
                answer.extend(self.run.signal_now(node, signal)?);
            }
            moved |= reply(link, SIGNALS, &answer);
        }
        if self.running {
            let (_, round) = self.run.rounds(BATCH)?;
            moved |= round.fetched || round.wrote;
        }
        Ok(moved)
    }

    fn control(&mut self, message: &[u64]) -> Result<Vec<u64>, RunError> {
        let refused = Ok(vec![REFUSED]);
        match *message {
            [START] => self.running = true,
            [STOP] => self.running = false,
            [RESET, id] => match self.node(id) {
                Some(node) => self.run.reset(node)?,
                None => return refused,
            },
            [READ, id, first, count] => {
                let Some(node) = self.node(id) else { return refused };
                let Ok(first) = usize::try_from(first) else { return refused };
                let count = usize::try_from(count).unwrap_or(usize::MAX).min(super::SLOT_WORDS - 1);
                let all = &self.run.frame(node).words;
                let Some(part) = all.get(first..first.saturating_add(count)) else {
                    return refused;
                };
                return Ok([&[DONE], part].concat());
            }
            [WRITE, id, at, value] => {
                let (Some(node), Ok(at)) = (self.node(id), usize::try_from(at)) else {
                    return refused;
                };
                let mask = self.masks[node].get(at).copied().unwrap_or(0);
                match self.run.frame_mut(node).words.get_mut(at) {
                    Some(word) if mask != 0 => *word = value & mask,
                    _ => return refused,
                }
            }
            _ => return refused,
        }
        Ok(vec![DONE])
    }

    /// `[direction, first word of the board, first word of the window, words]`.
    fn copy(&mut self, link: &Link, message: &[u64]) -> bool {
        let [direction, board, window, count] = *message else { return false };
        let part = |at: u64| usize::try_from(at).ok();
        let (Some(board), Some(window), Some(count)) = (part(board), part(window), part(count))
        else {
            return false;
        };
        let Some(end) = board.checked_add(count) else { return false };
        let Some(place) = self.board.get_mut(board..end) else { return false };
        match direction {
            INWARD => link.dma_read(window, place),
            OUTWARD => link.dma_write(window, place),
            _ => false,
        }
    }
}

/// The bits of each word of an element's frame; none for words that are no variable's.
fn masks(element: &Element) -> Vec<u64> {
    let frame = Frame::new(element);
    let mut masks = vec![0; frame.words.len()];
    for (var, at) in element.vars.iter().zip(&frame.var_at) {
        for word in 0..words(var.bits) {
            let before = u32::try_from(word * 64).unwrap_or(u32::MAX);
            masks[at + word] = mask(var.bits.saturating_sub(before).min(64));
        }
    }
    masks
}

/// The message of a slot, once there is room for its answer.
fn asked(link: &Link, slot: usize) -> Option<Vec<u64>> {
    if link.uplink_is_free(slot) { link.card_receive(slot) } else { None }
}

/// The message of a slot is processed: its answer goes up, then its completion.
fn reply(link: &Link, slot: usize, answer: &[u64]) -> bool {
    let sent = link.card_send(slot, answer).unwrap_or(false);
    if sent {
        link.card_complete(slot);
    }
    sent
}

/// The host's library for a card behind a link.
#[derive(Clone, Copy, Debug)]
pub struct Library<'l> {
    /// The link.
    pub link: &'l Link,
    /// How it waits.
    pub mode: Mode,
    /// How long it waits for an answer.
    pub limit: Duration,
}

/// The card did not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CardError {
    /// The link.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The card.
    #[error("the card refused {0}: no such element, variable or range of memory")]
    Refused(&'static str),
}

impl Library<'_> {
    /// Sends a message and takes its answer and its completion.
    fn call(&self, slot: usize, what: &'static str, words: &[u64]) -> Result<Vec<u64>, CardError> {
        let (link, mode) = (self.link, self.mode);
        link.host_send(slot, words)?;
        let answer = link.host_wait(slot, mode, self.limit, || link.host_receive(slot))?;
        link.host_wait(slot, mode, self.limit, || link.host_completed(slot).then_some(()))?;
        match answer.split_first() {
            Some((&DONE, rest)) => Ok(rest.to_vec()),
            _ => Err(CardError::Refused(what)),
        }
    }

    /// Lets every element run.
    ///
    /// Errors: the card does not answer.
    pub fn start(&self) -> Result<(), CardError> {
        self.call(CONTROL, "a start", &[START]).map(drop)
    }

    /// Stops every element between two iterations; state and channels stay.
    ///
    /// Errors: the card does not answer.
    pub fn stop(&self) -> Result<(), CardError> {
        self.call(CONTROL, "a stop", &[STOP]).map(drop)
    }

    /// Sets an element back to how it began.
    ///
    /// Errors: no such element; the card does not answer.
    pub fn reset(&self, id: u16) -> Result<(), CardError> {
        self.call(CONTROL, "a reset", &[RESET, u64::from(id)]).map(drop)
    }

    /// Sends a signal to an element; its answer.
    ///
    /// Errors: no such element; the card does not answer.
    pub fn signal(&self, id: u16, signal: Signal) -> Result<Signal, CardError> {
        let mut words = signal;
        words[0] = words[0] & !0xffff | u64::from(id);
        let answer = self.call(SIGNALS, "a signal", &words)?;
        let mut signal: Signal = [0; SIGNAL_WORDS];
        for (to, from) in signal.iter_mut().zip(answer) {
            *to = from;
        }
        Ok(signal)
    }

    /// Words of an element's frame, at most 511.
    ///
    /// Errors: no such element or words; the card does not answer.
    pub fn variables(&self, id: u16, first: usize, count: usize) -> Result<Vec<u64>, CardError> {
        let words = [READ, u64::from(id), first as u64, count as u64];
        self.call(CONTROL, "a look at variables", &words)
    }

    /// Sets a word of an element's frame.
    ///
    /// Errors: no such element or word; the card does not answer.
    pub fn set_variable(&self, id: u16, at: usize, value: u64) -> Result<(), CardError> {
        let words = [WRITE, u64::from(id), at as u64, value];
        self.call(CONTROL, "a change of a variable", &words).map(drop)
    }

    /// Copies words of the window of host memory into board memory, or back.
    ///
    /// Errors: a range outside either; the card does not answer.
    pub fn copy(
        &self,
        inward: bool,
        board: usize,
        window: usize,
        words: usize,
    ) -> Result<(), CardError> {
        let direction = if inward { INWARD } else { OUTWARD };
        let message = [direction, board as u64, window as u64, words as u64];
        self.call(COPIES, "a copy", &message).map(drop)
    }
}
