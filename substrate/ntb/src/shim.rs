//! Posted writes as hardware may treat them: write-combining buffers that keep and reorder lines
//! until a fence, and a bus with delay.
//!
//! ```text
//!  a thread's stores ─▶ its buffers ── fence, or no buffer left ──▶ bus ─▶ the window
//!                       (lines of 64 bytes, merged, for ever)   (lines in any order)   (in order, each delayed)
//! ```
//!
//! Code that forgets a fence works on coherent memory and fails here. Every choice comes from the
//! seed. A fence empties the buffers of its own thread, so that one without stores before it costs
//! nothing. What has reached the bus stays in order, as PCIe keeps posted writes, and so does a doorbell that is rung
//! [behind](Combining::bells) it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::window::{Bells, LINE_BYTES, Wire};

/// When what is on the bus becomes visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// As soon as it is there.
    AtOnce,
    /// So much later, by a thread of the emulation.
    After(Duration),
    /// One write at each [`Combining::deliver`]: for tests.
    OnRequest,
}

/// How writes are reordered and delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disorder {
    /// Of every choice.
    pub seed: u64,
    /// Write-combining buffers of one thread. When all are in use, a random one is sent.
    pub buffers: usize,
    /// The bus's delay.
    pub pace: Pace,
}

impl Default for Disorder {
    fn default() -> Self {
        Self { seed: 1, buffers: 10, pace: Pace::AtOnce }
    }
}

/// Bytes of one line that were written.
#[derive(Debug)]
struct Line {
    at: usize,
    bytes: [u8; LINE_BYTES],
    /// A bit for each byte.
    written: u64,
}

#[derive(Debug)]
enum Posted {
    Line(Line),
    Ring(Arc<dyn Bells>, usize),
}

#[derive(Debug)]
struct State {
    random: SmallRng,
    buffers: HashMap<ThreadId, Vec<Line>>,
    bus: VecDeque<(Instant, Posted)>,
    stop: bool,
}

#[derive(Debug)]
struct Bus {
    wire: Arc<dyn Wire>,
    disorder: Disorder,
    state: Mutex<State>,
    changed: Condvar,
}

/// A wire behind write-combining buffers.
#[derive(Debug)]
pub struct Combining {
    bus: Arc<Bus>,
    thread: Option<JoinHandle<()>>,
}

impl Bus {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, line: &Line) {
        for start in (0..LINE_BYTES).step_by(8) {
            let mask = line.written >> start & 0xff;
            if mask == 0xff {
                let mut word = [0; 8];
                word.copy_from_slice(&line.bytes[start..start + 8]);
                self.wire.post_word(line.at + start, u64::from_le_bytes(word));
                continue;
            }
            for byte in start..start + 8 {
                if line.written >> byte & 1 != 0 {
                    // SAFETY: one byte of the line's own.
                    unsafe { self.wire.post(line.at + byte, &raw const line.bytes[byte], 1) };
                }
            }
        }
    }

    fn arrive(&self, posted: &Posted) {
        match posted {
            Posted::Line(line) => self.place(line),
            Posted::Ring(bells, bit) => bells.ring(*bit),
        }
    }

    /// Puts something on the bus.
    fn send(&self, state: &mut State, posted: Posted) {
        match self.disorder.pace {
            Pace::AtOnce => self.arrive(&posted),
            Pace::OnRequest => state.bus.push_back((Instant::now(), posted)),
            Pace::After(delay) => {
                state.bus.push_back((Instant::now() + delay, posted));
                self.changed.notify_one();
            }
        }
    }

    /// Delivers until told to stop.
    fn run(&self) {
        let mut state = self.lock();
        while !state.stop {
            let now = Instant::now();
            match state.bus.front() {
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some((due, _)) if *due > now => {
                    let left = *due - now;
                    let woken = self.changed.wait_timeout(state, left);
                    state = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
                Some(_) => {
                    if let Some((_, posted)) = state.bus.pop_front() {
                        self.arrive(&posted);
                    }
                }
            }
        }
    }

    fn store(&self, offset: usize, source: &[u8]) {
        let mut state = self.lock();
        let (mut at, mut left) = (offset, source);
        while !left.is_empty() {
            let (line_at, start) = (at - at % LINE_BYTES, at % LINE_BYTES);
            let (part, rest) = left.split_at(left.len().min(LINE_BYTES - start));
            let State { random, buffers, .. } = &mut *state;
            let lines = buffers.entry(std::thread::current().id()).or_default();
            let known = lines.iter().position(|line| line.at == line_at);
            let mut evicted = None;
            let index = known.unwrap_or_else(|| {
                if lines.len() >= self.disorder.buffers {
                    evicted = Some(lines.swap_remove(random.random_range(0..lines.len())));
                }
                lines.push(Line { at: line_at, bytes: [0; LINE_BYTES], written: 0 });
                lines.len() - 1
            });
            let line = &mut lines[index];
            line.bytes[start..start + part.len()].copy_from_slice(part);
            line.written |= (u64::MAX >> (LINE_BYTES - part.len())) << start;
            if let Some(line) = evicted {
                self.send(&mut state, Posted::Line(line));
            }
            (at, left) = (at + part.len(), rest);
        }
    }
}

impl Combining {
    fn over(wire: Arc<dyn Wire>, disorder: Disorder) -> Self {
        let random = SmallRng::seed_from_u64(disorder.seed);
        let (buffers, bus) = (HashMap::new(), VecDeque::new());
        let state = Mutex::new(State { random, buffers, bus, stop: false });
        let bus = Arc::new(Bus { wire, disorder, state, changed: Condvar::new() });
        Self { bus, thread: None }
    }

    /// Puts `buffers` lines for each thread before `wire`; choices come from `seed`.
    #[must_use]
    pub fn new(wire: Arc<dyn Wire>, buffers: usize, seed: u64) -> Self {
        Self::over(wire, Disorder { seed, buffers, pace: Pace::AtOnce })
    }

    /// As [`Combining::new`], with a bus behind the buffers.
    ///
    /// Errors: the system's, where a delay needs a thread and there is none.
    pub fn paced(wire: Arc<dyn Wire>, disorder: Disorder) -> std::io::Result<Self> {
        let mut combining = Self::over(wire, disorder);
        if let Pace::After(_) = disorder.pace {
            let bus = Arc::clone(&combining.bus);
            let thread = std::thread::Builder::new().name("ntb-wire".to_owned());
            combining.thread = Some(thread.spawn(move || bus.run())?);
        }
        Ok(combining)
    }

    /// Makes the oldest write on the bus visible; false when there is none.
    pub fn deliver(&self) -> bool {
        let posted = self.bus.lock().bus.pop_front();
        posted.map(|(_, posted)| self.bus.arrive(&posted)).is_some()
    }

    /// `bells` whose rings go over the bus, behind what was fenced.
    #[must_use]
    pub fn bells(&self, bells: Arc<dyn Bells>) -> Arc<dyn Bells> {
        Arc::new(Behind { bus: Arc::clone(&self.bus), bells })
    }
}

impl Drop for Combining {
    fn drop(&mut self) {
        self.bus.lock().stop = true;
        self.bus.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Doorbells behind a bus.
#[derive(Debug)]
struct Behind {
    bus: Arc<Bus>,
    bells: Arc<dyn Bells>,
}

impl Bells for Behind {
    fn ring(&self, bit: usize) {
        let posted = Posted::Ring(Arc::clone(&self.bells), bit);
        self.bus.send(&mut self.bus.lock(), posted);
    }

    fn descriptor(&self, bit: usize) -> Option<BorrowedFd<'_>> {
        self.bells.descriptor(bit)
    }

    fn clear(&self, bit: usize) {
        self.bells.clear(bit);
    }

    fn rearm(&self, bit: usize) {
        self.bells.rearm(bit);
    }

    fn is_rung(&self, bit: usize) -> bool {
        self.bells.is_rung(bit)
    }

    fn is_plugged(&self) -> bool {
        self.bells.is_plugged()
    }
}

impl Wire for Combining {
    fn length_bytes(&self) -> usize {
        self.bus.wire.length_bytes()
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        // SAFETY: the caller vouches for the source, which it does not change during the call.
        let bytes = unsafe { std::slice::from_raw_parts(source, length) };
        self.bus.store(offset, bytes);
    }

    fn post_word(&self, offset: usize, value: u64) {
        self.bus.store(offset, &value.to_le_bytes());
    }

    fn fence(&self) {
        let mut state = self.bus.lock();
        let State { random, buffers, .. } = &mut *state;
        if let Some(lines) = buffers.get_mut(&std::thread::current().id()) {
            lines.shuffle(random);
            for line in std::mem::take(lines) {
                self.bus.send(&mut state, Posted::Line(line));
            }
        }
        self.bus.wire.fence();
    }
}
