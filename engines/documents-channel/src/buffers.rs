//! Which registered buffers are idle and which are busy: `freeBuffer` and `busyBuffer`.
//!
//! ```text
//! idle ──reserve──▶ reserved ──post──▶ busy ──consume──▶ consumed ──release──▶ idle
//!                                       │                                      ▲
//!                                       └─quarantine─▶ quarantined ──release───┘
//! ```
//!
//! Invariant: a buffer that is not idle is never handed out; a step that the picture does not have is a
//! bug and is asserted.

use std::collections::VecDeque;

/// Where a buffer is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferState {
    /// In the free queue.
    Idle,
    /// Taken, and not named to the peer yet.
    Reserved,
    /// The peer may write it.
    Busy,
    /// The peer wrote it; its bytes are being read.
    Consumed,
    /// The peer may still write it, and nobody waits for that any more.
    Quarantined,
}

/// The buffers of one size.
#[derive(Clone, Debug)]
pub struct Buffers {
    free: VecDeque<u16>,
    busy: VecDeque<u16>,
    states: Vec<BufferState>,
}

impl Buffers {
    /// So many, all idle.
    #[must_use]
    pub fn new(count: u16) -> Self {
        Self {
            free: (0..count).collect(),
            busy: VecDeque::with_capacity(usize::from(count)),
            states: vec![BufferState::Idle; usize::from(count)],
        }
    }

    /// Takes the buffer that was idle longest; `None`: wait, none is.
    pub fn reserve(&mut self) -> Option<u16> {
        let buffer = self.free.pop_front()?;
        self.step(buffer, BufferState::Idle, BufferState::Reserved);
        Some(buffer)
    }

    /// The peer is told of it.
    pub fn post(&mut self, buffer: u16) {
        self.step(buffer, BufferState::Reserved, BufferState::Busy);
        self.busy.push_back(buffer);
    }

    /// The peer wrote it.
    pub fn consume(&mut self, buffer: u16) {
        self.step(buffer, BufferState::Busy, BufferState::Consumed);
    }

    /// The peer is told of it once more, for the rest of a reply.
    pub fn post_again(&mut self, buffer: u16) {
        self.step(buffer, BufferState::Consumed, BufferState::Busy);
    }

    /// Nobody waits for the peer's write any more.
    pub fn quarantine(&mut self, buffer: u16) {
        self.step(buffer, BufferState::Busy, BufferState::Quarantined);
    }

    /// Its bytes were read, or will never come.
    pub fn release(&mut self, buffer: u16) {
        let state = self.state(buffer);
        assert!(state != BufferState::Idle, "buffer {buffer} is released once");
        self.states[usize::from(buffer)] = BufferState::Idle;
        self.busy.retain(|busy| *busy != buffer);
        self.free.push_back(buffer);
    }

    /// Where a buffer is.
    #[must_use]
    pub fn state(&self, buffer: u16) -> BufferState {
        self.states[usize::from(buffer)]
    }

    /// Buffers that can be taken now.
    #[must_use]
    pub fn idle(&self) -> usize {
        self.free.len()
    }

    /// All buffers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.states.len()
    }

    /// Buffers in quarantine.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.states.iter().filter(|state| **state == BufferState::Quarantined).count()
    }

    fn step(&mut self, buffer: u16, from: BufferState, to: BufferState) {
        let state = &mut self.states[usize::from(buffer)];
        assert!(*state == from, "buffer {buffer} is {state:?}, and only {from:?} becomes {to:?}");
        *state = to;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Every walk of `depth` steps over `count` buffers, against a plain set of those out of use.
    fn walk(buffers: &Buffers, out: &HashSet<u16>, depth: u32, seen: &mut u64) {
        *seen += 1;
        let count = buffers.count();
        assert_eq!(buffers.idle() + out.len(), count);
        for buffer in 0..count as u16 {
            assert_eq!(buffers.state(buffer) != BufferState::Idle, out.contains(&buffer));
        }
        if depth == 0 {
            return;
        }
        let mut next = buffers.clone();
        if let Some(taken) = next.reserve() {
            let mut out = out.clone();
            assert!(out.insert(taken), "a buffer in use is never handed out");
            next.post(taken);
            walk(&next, &out, depth - 1, seen);
        } else {
            assert_eq!(out.len(), count, "one that waits waits for a reason");
        }
        for &buffer in out {
            let mut next = buffers.clone();
            match next.state(buffer) {
                BufferState::Busy => {
                    next.quarantine(buffer);
                    walk(&next, out, depth - 1, seen);
                    let mut next = buffers.clone();
                    next.consume(buffer);
                    walk(&next, out, depth - 1, seen);
                }
                _ => {
                    next.release(buffer);
                    let mut out = out.clone();
                    out.remove(&buffer);
                    walk(&next, &out, depth - 1, seen);
                }
            }
        }
    }

    #[test]
    fn no_walk_over_one_to_four_buffers_hands_out_one_in_use() {
        let mut seen = 0;
        for (count, depth) in [(1, 14), (2, 10), (3, 8), (4, 7)] {
            walk(&Buffers::new(count), &HashSet::new(), depth, &mut seen);
        }
        assert!(seen > 10_000, "{seen} states were looked at");
    }

    #[test]
    #[should_panic(expected = "only Busy becomes Consumed")]
    fn a_step_that_is_not_in_the_picture_is_a_bug() {
        let mut buffers = Buffers::new(1);
        buffers.reserve();
        buffers.consume(0);
    }

    proptest! {
        #[test]
        fn buffers_are_handed_out_in_the_order_they_became_idle(count in 1_u16..8) {
            let mut buffers = Buffers::new(count);
            for turn in 0..u32::from(count) * 3 {
                let taken = buffers.reserve().unwrap();
                prop_assert_eq!(u32::from(taken), turn % u32::from(count));
                buffers.post(taken);
                buffers.release(taken);
            }
        }
    }
}
