//! Posted writes as hardware may treat them: a window behind emulated write-combining buffers and
//! a wire with delay.
//!
//! ```text
//!  a thread's stores ─▶ its write-combining buffers ── fence, or no buffer left ──▶ wire ─▶ window
//!                       (lines of 64 bytes, merged,      (lines in any order)      (in order,
//!                        in no order, for ever)                                     each delayed)
//! ```
//!
//! What is not fenced may stay behind for good, or overtake what was written before it: code that
//! forgets a fence works on coherent memory and fails here. What has reached the wire stays in
//! order, as PCIe keeps posted writes. Every choice comes from the seed.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::window::{Inbound, Window};

/// Bytes of one buffer.
const LINE: usize = 64;

/// When what is on the wire becomes visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// As soon as it is there.
    AtOnce,
    /// So much later, by a thread of the emulation.
    After(Duration),
    /// One write at each [`PostedWindow::deliver`]: for tests.
    OnRequest,
}

/// How writes are reordered and delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disorder {
    /// Of every choice.
    pub seed: u64,
    /// Write-combining buffers of one thread. When all are in use, a random one is sent.
    pub buffers: usize,
    /// The wire's delay.
    pub pace: Pace,
}

impl Default for Disorder {
    fn default() -> Self {
        Self { seed: 1, buffers: 10, pace: Pace::AtOnce }
    }
}

/// Bytes of one line that were written.
#[derive(Clone, Debug)]
struct Line {
    at: usize,
    bytes: [u8; LINE],
    /// Bit per byte.
    written: u64,
}

#[derive(Debug)]
enum Posted {
    Line(Line),
    Scratchpad(usize, u32),
    Ring,
}

#[derive(Debug)]
struct State {
    random: SmallRng,
    buffers: HashMap<ThreadId, Vec<Line>>,
    wire: VecDeque<(Instant, Posted)>,
    stop: bool,
}

#[derive(Debug)]
struct Wire {
    window: Arc<dyn Window>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A window whose writes are posted.
#[derive(Debug)]
pub struct PostedWindow {
    wire: Arc<Wire>,
    disorder: Disorder,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, posted: Posted) {
        match posted {
            Posted::Scratchpad(index, value) => self.window.post_scratchpad(index, value),
            Posted::Ring => self.window.ring(),
            Posted::Line(Line { at, bytes, written }) => {
                for (index, word) in bytes.chunks_exact(8).enumerate() {
                    let start = index * 8;
                    let mask = written >> start & 0xff;
                    if mask == 0xff {
                        let mut value = [0; 8];
                        value.copy_from_slice(word);
                        self.window.post_word(at + start, u64::from_le_bytes(value));
                        continue;
                    }
                    for (byte, value) in word.iter().enumerate() {
                        if mask >> byte & 1 != 0 {
                            // SAFETY: one byte of a local array.
                            unsafe { self.window.post(at + start + byte, value, 1) };
                        }
                    }
                }
            }
        }
    }

    /// Delivers until told to stop.
    fn run(&self) {
        let mut state = self.lock();
        while !state.stop {
            let now = Instant::now();
            match state.wire.front() {
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some((due, _)) if *due > now => {
                    let left = *due - now;
                    let woken = self.changed.wait_timeout(state, left);
                    state = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
                Some(_) => {
                    if let Some((_, posted)) = state.wire.pop_front() {
                        self.place(posted);
                    }
                }
            }
        }
    }
}

impl PostedWindow {
    /// Puts the emulation before `window`.
    ///
    /// Errors: the system's, where a delay needs a thread and there is none.
    pub fn new(window: Arc<dyn Window>, disorder: Disorder) -> std::io::Result<Self> {
        let random = SmallRng::seed_from_u64(disorder.seed);
        let wire = Arc::new(Wire {
            window,
            state: Mutex::new(State {
                random,
                buffers: HashMap::new(),
                wire: VecDeque::new(),
                stop: false,
            }),
            changed: Condvar::new(),
        });
        let thread = match disorder.pace {
            Pace::After(_) => {
                let wire = Arc::clone(&wire);
                let thread = std::thread::Builder::new().name("ntb-wire".to_owned());
                Some(thread.spawn(move || wire.run())?)
            }
            Pace::AtOnce | Pace::OnRequest => None,
        };
        Ok(Self { wire, disorder, thread })
    }

    /// Makes the oldest write on the wire visible; false when there is none.
    pub fn deliver(&self) -> bool {
        let posted = self.wire.lock().wire.pop_front();
        let some = posted.is_some();
        if let Some((_, posted)) = posted {
            self.wire.place(posted);
        }
        some
    }

    fn send(&self, state: &mut State, posted: Posted) {
        match self.disorder.pace {
            Pace::AtOnce => self.wire.place(posted),
            Pace::OnRequest => state.wire.push_back((Instant::now(), posted)),
            Pace::After(delay) => {
                state.wire.push_back((Instant::now() + delay, posted));
                self.wire.changed.notify_one();
            }
        }
    }

    fn buffer(&self, at: usize, source: &[u8]) {
        let mut state = self.wire.lock();
        let mut done = 0;
        while done < source.len() {
            let here = at + done;
            let (line_at, start) = (here / LINE * LINE, here % LINE);
            let count = (LINE - start).min(source.len() - done);
            let lines = state.buffers.entry(std::thread::current().id()).or_default();
            let index = lines.iter().position(|line| line.at == line_at).unwrap_or_else(|| {
                lines.push(Line { at: line_at, bytes: [0; LINE], written: 0 });
                lines.len() - 1
            });
            let line = &mut lines[index];
            line.bytes[start..start + count].copy_from_slice(&source[done..done + count]);
            for byte in start..start + count {
                line.written |= 1 << byte;
            }
            let used = lines.len();
            done += count;
            if used > self.disorder.buffers {
                let evicted = state.random.random_range(0..used);
                let lines = state.buffers.entry(std::thread::current().id()).or_default();
                let line = lines.swap_remove(evicted);
                self.send(&mut state, Posted::Line(line));
            }
        }
    }
}

impl Window for PostedWindow {
    fn inbound(&self) -> &Inbound {
        self.wire.window.inbound()
    }

    fn outbound_bytes(&self) -> usize {
        self.wire.window.outbound_bytes()
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        let mut bytes = vec![0; length];
        // SAFETY: the caller vouches for the source; the target is a fresh vector of that length.
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), length) };
        self.buffer(offset, &bytes);
    }

    fn post_word(&self, offset: usize, value: u64) {
        self.buffer(offset, &value.to_le_bytes());
    }

    fn post_scratchpad(&self, index: usize, value: u32) {
        self.send(&mut self.wire.lock(), Posted::Scratchpad(index, value));
    }

    fn fence(&self) {
        let mut state = self.wire.lock();
        let lines = state.buffers.remove(&std::thread::current().id());
        let mut lines = lines.unwrap_or_default();
        lines.shuffle(&mut state.random);
        for line in lines {
            self.send(&mut state, Posted::Line(line));
        }
    }

    fn ring(&self) {
        self.send(&mut self.wire.lock(), Posted::Ring);
    }

    fn doorbell(&self) -> Option<BorrowedFd<'_>> {
        self.wire.window.doorbell()
    }

    fn hush(&self) {
        self.wire.window.hush();
    }

    fn rearm(&self) {
        self.wire.window.rearm();
    }

    fn is_plugged(&self) -> bool {
        self.wire.window.is_plugged()
    }
}

impl Drop for PostedWindow {
    fn drop(&mut self) {
        self.wire.lock().stop = true;
        self.wire.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
