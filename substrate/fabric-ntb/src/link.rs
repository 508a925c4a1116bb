//! One link in one life: coming up, partitions, signs of life, going down.
//!
//! *Coming up.* Each side clears its lines at the peer, writes node, geometry and a random epoch
//! into the peer's scratchpads, the magic last, and then, once it has read the peer's epoch, that
//! epoch as seen. A side is up when the peer has seen its epoch. So a side that is up knows that
//! the peer's lines were cleared for this life. What is written while the link is down, or before
//! the peer's memory is there, is lost: so all of it is written again now and then, and when the
//! peer shows a new epoch.
//!
//! *Going down.* The cable is cut, the peer shows another epoch (it began anew), or its heartbeat
//! stands still while both ends use a partition. The life is then over: every channel of it is
//! closed, and nothing of it writes to the window any more ([`Link::enter`]). Over the same window
//! a new life may begin.
//!
//! *Partitions.* Each side opens every other one. A use is numbered; the opener takes a partition
//! when both ends have closed its last use, and the peer follows when it sees the next number.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use beeline_fabric::FabricError;
use beeline_fabric_engine::{now_ns, random_u64};
use beeline_ntb::{Inbound, Side};

use crate::channel::{Channel, Place};
use crate::heap::Heap;
use crate::layout::{
    Geometry, LINE_BYTES, MAGIC, PAD_EPOCH, PAD_GEOMETRY, PAD_HEARTBEAT, PAD_MAGIC, PAD_NODE,
    PAD_SEEN, Phase, STATE, State,
};
use crate::window::{Window, scratchpad};

/// Names a device among all: random.
pub type NodeName = [u8; 16];

/// Time between two announcements.
const ANNOUNCE_NS: u64 = 250_000_000;

/// A partition as the link keeps it.
#[derive(Debug, Default)]
struct Slot {
    /// Of its last use.
    generation: u64,
    /// In use, until closed here.
    channel: Option<Arc<Channel>>,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Slot>,
    /// Dialled, without a partition yet.
    waiting: Vec<Arc<Channel>>,
}

#[derive(Debug)]
struct Pulse {
    /// The peer's epoch, once read.
    peer_epoch: Option<u32>,
    /// Its heartbeat as last read, and when that changed.
    peer_beat: u32,
    changed_ns: u64,
    /// Both ends used a partition when last looked.
    was_shared: bool,
    /// The peer's window is of another shape; said once.
    warned: bool,
    /// When this side last announced itself.
    announced_ns: u64,
}

#[derive(Debug)]
pub(crate) struct Link {
    window: Arc<Window>,
    geometry: Geometry,
    side: Side,
    /// This side's memory that the peer writes by itself.
    heap: Option<Arc<Heap>>,
    /// This side's name.
    node: NodeName,
    epoch: u32,
    up: AtomicBool,
    down: AtomicBool,
    /// Threads that are writing to the window.
    users: AtomicU32,
    beat: AtomicU32,
    peer_node: OnceLock<NodeName>,
    table: Mutex<Table>,
    pulse: Mutex<Pulse>,
    /// Uses promised to dialled channels or taken by them.
    dialled: AtomicU64,
}

/// Leave to write to the window; the life of the link does not end meanwhile.
#[derive(Debug)]
pub(crate) struct Use<'a>(&'a Link);

impl Drop for Use<'_> {
    fn drop(&mut self) {
        // Release: the writes are done before `end` (sequentially consistent load) sees zero.
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn node_words(node: NodeName) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(node.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// The name the peer gives itself.
pub(crate) fn announced_node(inbound: &Inbound) -> NodeName {
    let mut node = [0; 16];
    for (index, bytes) in node.chunks_exact_mut(4).enumerate() {
        bytes.copy_from_slice(&scratchpad(inbound, PAD_NODE + index).to_le_bytes());
    }
    node
}

impl Link {
    /// Begins a life over `window`: clears this side's lines at the peer and announces itself.
    ///
    /// Errors: [`FabricError::System`] without randomness.
    pub(crate) fn begin(
        window: Arc<Window>,
        geometry: Geometry,
        side: Side,
        node: NodeName,
        heap: Option<Arc<Heap>>,
    ) -> Result<Self, FabricError> {
        let epoch = loop {
            let epoch = (random_u64()? >> 32) as u32;
            if epoch != 0 {
                break epoch;
            }
        };
        let beat = window.scratchpad(PAD_HEARTBEAT);
        let slots = (0..geometry.partitions()).map(|_| Slot::default()).collect();
        let link = Self {
            window,
            geometry,
            side,
            heap,
            node,
            epoch,
            up: AtomicBool::new(false),
            down: AtomicBool::new(false),
            users: AtomicU32::new(0),
            beat: AtomicU32::new(0),
            peer_node: OnceLock::new(),
            table: Mutex::new(Table { slots, waiting: Vec::new() }),
            pulse: Mutex::new(Pulse {
                peer_epoch: None,
                peer_beat: beat,
                changed_ns: now_ns(),
                was_shared: false,
                warned: false,
                announced_ns: now_ns(),
            }),
            dialled: AtomicU64::new(0),
        };
        link.window.post_scratchpad(PAD_MAGIC, 0);
        link.window.fence();
        link.introduce(None);
        link.window.ring();
        Ok(link)
    }

    /// Writes this side's words into the peer's window. Until this side is up, its lines there are
    /// clear, so that clearing them again changes nothing.
    fn introduce(&self, seen: Option<u32>) {
        let window = &self.window;
        if !self.up.load(Ordering::Acquire) {
            for partition in 0..self.geometry.partitions() {
                for word in (0..LINE_BYTES).step_by(8) {
                    window.post_word(self.geometry.line(partition) + word, 0);
                }
            }
            window.fence();
        }
        window.post_scratchpad(PAD_SEEN, seen.unwrap_or(0));
        window.post_scratchpad(PAD_GEOMETRY, self.geometry.code());
        for (index, word) in node_words(self.node).into_iter().enumerate() {
            window.post_scratchpad(PAD_NODE + index, word);
        }
        window.fence();
        window.post_scratchpad(PAD_EPOCH, self.epoch);
        window.fence();
        window.post_scratchpad(PAD_MAGIC, MAGIC);
        window.fence();
        window.announce();
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// The window, for another life.
    pub(crate) fn window_handle(&self) -> &Arc<Window> {
        &self.window
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(crate) fn heap(&self) -> Option<&Heap> {
        self.heap.as_deref()
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire) && !self.is_down()
    }

    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::SeqCst)
    }

    /// The peer's name, once the link has been up.
    pub(crate) fn peer_node(&self) -> Option<NodeName> {
        self.peer_node.get().copied()
    }

    /// Leave to write; `None` once this life is over.
    pub(crate) fn enter(&self) -> Option<Use<'_>> {
        self.users.fetch_add(1, Ordering::SeqCst);
        let leave = Use(self);
        (!self.is_down()).then_some(leave)
    }

    /// Ends this life; after it returns nothing of it writes to the window.
    pub(crate) fn end(&self, why: &str) {
        if !self.down.swap(true, Ordering::SeqCst) {
            tracing::debug!(why, "link down");
        }
        while self.users.load(Ordering::SeqCst) != 0 {
            // Each use is a bounded copy.
            std::thread::yield_now();
        }
        let mut table = lock(&self.table);
        for channel in table.channels() {
            let _ = channel.announce();
        }
        table.waiting.clear();
        for slot in &mut table.slots {
            slot.channel = None;
        }
    }

    /// The peer's word on a partition; `None` for nonsense.
    pub(crate) fn peer_state(&self, partition: usize) -> Option<State> {
        let at = self.geometry.line(partition) + STATE;
        // Acquire: pairs with the fence the peer puts before the state it posts.
        State::decode(self.window.inbound().word(at).load(Ordering::Acquire))
    }

    /// Tells the peer how this side's use of a partition stands.
    pub(crate) fn post_state(&self, place: Place, phase: Phase) {
        let Some(_use) = self.enter() else { return };
        let at = self.geometry.line(place.partition) + STATE;
        self.window.fence();
        self.window.post_word(at, State { generation: place.generation, phase }.encode());
        self.window.fence();
        self.window.ring();
    }

    // ---- partitions ----

    /// Promises a partition to a channel about to be dialled; false when all are in use.
    pub(crate) fn reserve(&self) -> bool {
        let most = self.geometry.partitions() as u64 / 2;
        let taken = self.dialled.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
            (taken < most).then_some(taken + 1)
        });
        taken.is_ok() && !self.is_down()
    }

    /// Takes a promise back that no channel came of.
    pub(crate) fn withdraw(&self) {
        self.dialled.fetch_sub(1, Ordering::Relaxed);
    }

    /// A channel with a promise begins to wait for its partition.
    pub(crate) fn wait_for_partition(&self, channel: &Arc<Channel>) {
        lock(&self.table).waiting.push(Arc::clone(channel));
    }

    /// Gives `channel` a partition whose last use both ends have closed; false when the peer has
    /// yet to close one.
    pub(crate) fn assign(&self, channel: &Arc<Channel>) -> bool {
        let mut table = lock(&self.table);
        let own = (self.side.index()..self.geometry.partitions()).step_by(2);
        for partition in own {
            let slot = &mut table.slots[partition];
            let last = State { generation: slot.generation, phase: Phase::Closed };
            let free = slot.channel.is_none() && self.peer_state(partition) == Some(last);
            if free {
                slot.generation += 1;
                channel.assign(Place { partition, generation: slot.generation });
                slot.channel = Some(Arc::clone(channel));
                table.waiting.retain(|waiting| !Arc::ptr_eq(waiting, channel));
                return true;
            }
        }
        false
    }

    /// Channels closed here give their partitions, and promises, back.
    pub(crate) fn release(&self) {
        let mut table = lock(&self.table);
        let before = table.waiting.len();
        table.waiting.retain(|channel| !channel.is_closed());
        let mut freed = before - table.waiting.len();
        for (partition, slot) in table.slots.iter_mut().enumerate() {
            if slot.channel.as_ref().is_some_and(|channel| channel.is_closed()) {
                slot.channel = None;
                freed += usize::from(partition % 2 == self.side.index());
            }
        }
        self.dialled.fetch_sub(freed as u64, Ordering::Relaxed);
    }

    /// Partitions the peer opened since the last look become channels, added to `accepted`; those
    /// closed here are free again.
    pub(crate) fn sweep(self: &Arc<Self>, accepted: &mut Vec<Arc<Channel>>) {
        if !self.is_up() {
            return;
        }
        self.release();
        let mut table = lock(&self.table);
        for (partition, slot) in table.slots.iter_mut().enumerate() {
            let own = partition % 2 == self.side.index();
            let generation = slot.generation + 1;
            let Some(phase) = self.peer_state(partition).and_then(|state| state.opens(generation))
            else {
                continue;
            };
            if own || slot.channel.is_some() {
                continue;
            }
            let place = Place { partition, generation };
            if phase == Phase::Closed {
                // Given up before it was seen: closed here too, so that it can be used again.
                slot.generation = generation;
                self.post_state(place, Phase::Closed);
                continue;
            }
            match Channel::accepted(self, place) {
                Ok(channel) => {
                    slot.generation = generation;
                    channel.open_at_peer();
                    slot.channel = Some(Arc::clone(&channel));
                    accepted.push(channel);
                }
                // Tried again at the next look.
                Err(error) => tracing::warn!(%error, "no descriptor for a peer's partition"),
            }
        }
    }

    /// Makes every channel with news readable; true when there is one.
    pub(crate) fn announce(&self) -> bool {
        let table = lock(&self.table);
        table.channels().fold(false, |any, channel| any | channel.announce())
    }

    /// True when a look or a sweep may find something.
    pub(crate) fn wants_service(&self) -> bool {
        let table = lock(&self.table);
        let opened = |(partition, slot): (usize, &Slot)| {
            let generation = slot.generation + 1;
            let state = self.peer_state(partition);
            partition % 2 != self.side.index()
                && state.is_some_and(|state| state.opens(generation).is_some())
        };
        !self.is_up() || table.slots.iter().enumerate().any(opened)
    }

    /// True while what the peer does makes the doorbell readable; else somebody has to look.
    pub(crate) fn is_rung(&self) -> bool {
        self.window.is_rung() && (self.is_up() || !self.window.is_announced())
    }

    /// True when there are channels.
    pub(crate) fn is_used(&self) -> bool {
        lock(&self.table).channels().next().is_some()
    }

    // ---- signs of life ----

    /// Looks at the peer's scratchpads: comes up, or finds that this life is over (`Some`, why).
    pub(crate) fn look(&self) -> Option<&'static str> {
        if !self.window.is_plugged() {
            return Some("the cable is cut");
        }
        let _use = self.enter()?;
        let mut pulse = lock(&self.pulse);
        let now = now_ns();
        if now.saturating_sub(pulse.announced_ns) >= ANNOUNCE_NS {
            pulse.announced_ns = now;
            self.introduce(pulse.peer_epoch);
        }
        if !self.is_up()
            && let Some(refusal) = self.window.refusal()
        {
            if !std::mem::replace(&mut pulse.warned, true) {
                tracing::warn!(%refusal, "the window is used otherwise at the other end");
            }
            return None;
        }
        if self.window.scratchpad(PAD_MAGIC) != MAGIC {
            return None;
        }
        let code = self.window.scratchpad(PAD_GEOMETRY);
        if code != self.geometry.code() {
            if !std::mem::replace(&mut pulse.warned, true) {
                let peer = Geometry::from_code(code);
                tracing::warn!(?peer, own = ?self.geometry, "the peer divides its window otherwise");
            }
            return None;
        }
        let epoch = self.window.scratchpad(PAD_EPOCH);
        if epoch == 0 {
            return None;
        }
        if pulse.peer_epoch != Some(epoch) {
            if self.is_up() {
                return Some("the peer began anew");
            }
            pulse.peer_epoch = Some(epoch);
            pulse.announced_ns = now;
            self.introduce(Some(epoch));
            self.window.ring();
        }
        if !self.is_up() && self.window.scratchpad(PAD_SEEN) == self.epoch {
            let _ = self.peer_node.set(announced_node(self.window.inbound()));
            self.up.store(true, Ordering::Release);
        }
        None
    }

    /// Shows this side's sign of life, and looks for the peer's; why the life is over, if it is.
    pub(crate) fn beat(&self, timeout: Duration) -> Option<&'static str> {
        let _use = self.enter()?;
        let beat = self.beat.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        self.window.post_scratchpad(PAD_HEARTBEAT, beat);
        self.window.fence();
        let shared = lock(&self.table).channels().any(Channel::is_shared);
        let peer_beat = self.window.scratchpad(PAD_HEARTBEAT);
        let (mut pulse, now) = (lock(&self.pulse), now_ns());
        if peer_beat != pulse.peer_beat || !shared || !pulse.was_shared {
            pulse.peer_beat = peer_beat;
            pulse.changed_ns = now;
        }
        pulse.was_shared = shared;
        let silent = u128::from(now.saturating_sub(pulse.changed_ns));
        (silent > timeout.as_nanos()).then_some("the peer's heartbeat stands still")
    }
}

impl Table {
    fn channels(&self) -> impl Iterator<Item = &Channel> {
        let placed = self.slots.iter().filter_map(|slot| slot.channel.as_deref());
        placed.chain(self.waiting.iter().map(AsRef::as_ref))
    }
}
