//! Posted writes as hardware may treat them: write-combining buffers that keep and reorder lines
//! until a fence.
//!
//! ```text
//!  a thread's stores ─▶ its buffers ── fence, or no buffer left ──▶ the window
//!                       (lines of 64 bytes, merged, for ever)   (lines in any order)
//! ```
//!
//! Code that forgets a fence works on coherent memory and fails here. Every choice comes from the
//! seed. A fence empties the buffers of its own thread, so that one without stores before it costs
//! nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::window::{LINE_BYTES, Wire};

/// Bytes of one line that were written.
#[derive(Debug)]
struct Line {
    at: usize,
    bytes: [u8; LINE_BYTES],
    /// A bit for each byte.
    written: u64,
}

#[derive(Debug)]
struct State {
    random: SmallRng,
    buffers: HashMap<ThreadId, Vec<Line>>,
}

/// A wire behind write-combining buffers.
#[derive(Debug)]
pub struct Combining {
    wire: Arc<dyn Wire>,
    buffers: usize,
    state: Mutex<State>,
}

impl Combining {
    /// Puts `buffers` lines for each thread before `wire`; choices come from `seed`.
    #[must_use]
    pub fn new(wire: Arc<dyn Wire>, buffers: usize, seed: u64) -> Self {
        let random = SmallRng::seed_from_u64(seed);
        Self { wire, buffers, state: Mutex::new(State { random, buffers: HashMap::new() }) }
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

    fn store(&self, offset: usize, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { random, buffers } = &mut *state;
        let lines = buffers.entry(std::thread::current().id()).or_default();
        for (at, &byte) in (offset..).zip(bytes) {
            let start = at - at % LINE_BYTES;
            let known = lines.iter().position(|line| line.at == start);
            let index = known.unwrap_or_else(|| {
                if lines.len() >= self.buffers {
                    let evicted = lines.swap_remove(random.random_range(0..lines.len()));
                    self.place(&evicted);
                }
                lines.push(Line { at: start, bytes: [0; LINE_BYTES], written: 0 });
                lines.len() - 1
            });
            lines[index].bytes[at - start] = byte;
            lines[index].written |= 1 << (at - start);
        }
    }
}

impl Wire for Combining {
    fn length_bytes(&self) -> usize {
        self.wire.length_bytes()
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        // SAFETY: the caller vouches for the source, which it does not change during the call.
        let bytes = unsafe { std::slice::from_raw_parts(source, length) };
        self.store(offset, bytes);
    }

    fn post_word(&self, offset: usize, value: u64) {
        self.store(offset, &value.to_le_bytes());
    }

    fn fence(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { random, buffers } = &mut *state;
        if let Some(lines) = buffers.get_mut(&std::thread::current().id()) {
            lines.shuffle(random);
            lines.drain(..).for_each(|line| self.place(&line));
        }
        self.wire.fence();
    }
}
