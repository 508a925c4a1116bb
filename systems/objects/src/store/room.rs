//! Where memory comes from: segments, eviction, spilling to disk and reading back.
//!
//! Decisions: an object is evicted in the order of last use, but only where that helps the writer
//! that asks (its own segments, or a segment that can go as a whole), because memory of one writer
//! cannot be written by another. With a spilling limit an object is never lost: it goes to disk,
//! and a create waits for that.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use super::core::{Core, Effect, Hungry, Shortage, Timer};
use super::memory::{Found, GONE, Place, STORE};
use super::planted::{Planted, planted};
use super::spill::{Done, Job, Piece};
use super::table::State;
use crate::heap::rounded;
use crate::wire::{ENTRY_BYTES, Entry, Record, RecordKind, Status};

/// Least bytes of a spill, so that small objects share files.
const SPILL_BYTES: u64 = 8 << 20;
/// How long nothing is spilled after a disk refused.
const SPILL_AGAIN_NS: u64 = 1_000_000_000;

/// What came of making room.
enum Room {
    /// Something came free.
    Freed,
    /// Something will, and tells.
    Coming,
    /// Nothing can go.
    Nothing,
}

impl Core {
    /// Memory for `bytes` that `writer` may write.
    pub(super) fn allocate(&mut self, writer: u32, bytes: u64) -> Result<Place, Shortage> {
        loop {
            // Anew in each turn: what was evicted has no entry any more.
            self.charge_entries();
            match self.memory.find(writer, bytes) {
                Found::Place(place) => return Ok(place),
                Found::Offered { new } => {
                    if let Some(number) = new {
                        self.offer(writer, number);
                    }
                    return Err(Shortage::Offered);
                }
                Found::Nothing => {}
            }
            match self.make_room(writer, bytes) {
                Room::Freed => {}
                Room::Coming | Room::Nothing => return Err(Shortage::Now),
            }
        }
    }

    pub(super) fn offer(&mut self, writer: u32, number: u32) {
        let Some(held) = self.memory.get_mut(number) else { return };
        held.mapped_by.insert(writer);
        let record = Record::new(RecordKind::Segment, number.into(), held.segment.bytes(), 1);
        let segment = Some(Arc::clone(&held.segment));
        self.effects.push(Effect::Send { client: writer, record, segment });
    }

    pub(super) fn tell_to_unmap(&mut self, number: u32, clients: Vec<u32>) {
        for client in clients {
            let record = Record::new(RecordKind::Retire, number.into(), 0, 0);
            self.effects.push(Effect::Send { client, record, segment: None });
        }
    }

    fn make_room(&mut self, writer: u32, bytes: u64) -> Room {
        self.call_in();
        let slow = self.memory.slow(self.now_ns);
        if let Some(number) = self.memory.empty_one(&slow) {
            let total = self.memory.total();
            let clients = self.memory.retire(number, self.now_ns);
            self.tell_to_unmap(number, clients);
            if self.memory.total() < total {
                return Room::Freed;
            }
            self.await_unmapping();
            return Room::Coming;
        }
        if self.memory.coming(self.now_ns).0 >= bytes {
            self.await_unmapping();
            return Room::Coming;
        }
        if !self.spilling.is_empty() {
            return Room::Coming;
        }
        // Mostly few segments help or none; the queue may be long.
        let helpful = self.memory.helpful(writer, &slow);
        if helpful.is_empty() {
            return Room::Nothing;
        }
        let victim = self.table.oldest().find_map(|slot| {
            let place = self.table.get(slot)?.place?;
            helpful.contains(&place.segment).then_some((slot, place.segment))
        });
        let Some((slot, segment)) = victim else { return Room::Nothing };
        let own = self.memory.get(segment).is_some_and(|held| held.writer == writer);
        if self.spill_limit == 0 {
            if own {
                self.evict(slot);
            } else {
                self.in_segment(segment, u64::MAX).into_iter().for_each(|slot| self.evict(slot));
            }
            return Room::Freed;
        }
        if self.now_ns < self.no_spill_before_ns {
            return Room::Nothing;
        }
        let wanted = rounded(bytes).unwrap_or(bytes).max(SPILL_BYTES.min(self.memory.limit() / 8));
        let victims = if own {
            let own = |slot: &u32| {
                let place = self.table.get(*slot).and_then(|object| object.place);
                let held = place.and_then(|place| self.memory.get(place.segment));
                held.is_some_and(|held| held.writer == writer)
            };
            let slots: Vec<u32> = self.table.oldest().filter(own).collect();
            self.up_to(slots, wanted)
        } else {
            self.in_segment(segment, u64::MAX)
        };
        if self.spill(victims) { Room::Coming } else { Room::Nothing }
    }

    /// Looks again when a segment that should be unmapped by then is not.
    fn await_unmapping(&mut self) {
        let (_, due_ns) = self.memory.coming(self.now_ns);
        if due_ns < u64::MAX && self.unmapping_due_ns.is_none_or(|due| due > due_ns) {
            self.unmapping_due_ns = Some(due_ns);
            let _ = self.timer(due_ns, Timer::Unmapping);
        }
    }

    /// The first of `slots` that have `bytes` together.
    fn up_to(&self, slots: Vec<u32>, bytes: u64) -> Vec<u32> {
        let mut sum = 0_u64;
        let mut taken = Vec::new();
        for slot in slots {
            if sum >= bytes {
                break;
            }
            sum += self.table.get(slot).map_or(0, |object| object.bytes().max(64));
            taken.push(slot);
        }
        taken
    }

    /// Objects of a segment that may go, oldest first.
    fn in_segment(&self, segment: u32, bytes: u64) -> Vec<u32> {
        let inside = |slot: &u32| {
            let place = self.table.get(*slot).and_then(|object| object.place);
            place.is_some_and(|place| place.segment == segment)
        };
        self.up_to(self.table.oldest().filter(inside).collect(), bytes)
    }

    pub(super) fn evict(&mut self, slot: u32) {
        self.counters.evictions += 1;
        self.destroy(slot);
    }

    /// Starts to write objects to disk. `false`: the limit on disk is reached.
    fn spill(&mut self, slots: Vec<u32>) -> bool {
        let bytes = |slot: &u32| self.table.get(*slot).map_or(0, |object| object.bytes());
        let sum: u64 = slots.iter().map(bytes).sum();
        if slots.is_empty() || self.spilled_bytes.saturating_add(sum) > self.spill_limit {
            self.pause_spilling(SPILL_AGAIN_NS);
            return false;
        }
        let file = self.next_file;
        self.next_file += 1;
        let mut pieces = Vec::new();
        let mut at = 0;
        for slot in &slots {
            let Some(object) = self.table.get_mut(*slot) else { continue };
            let Some(place) = object.place else { continue };
            object.state = State::Spilling { file, offset: at };
            let length = object.bytes();
            let Some(held) = self.memory.get(place.segment) else { continue };
            let segment = Arc::clone(&held.segment);
            pieces.push(Piece { segment, offset: place.offset, length, file_offset: at });
            at += length;
        }
        for slot in &slots {
            self.settle(*slot);
        }
        self.spilling = slots;
        self.effects.push(Effect::Spill(Job::Spill { file, pieces }));
        true
    }

    /// The spilling thread did something.
    pub(crate) fn spill_done(&mut self, done: Done, now_ns: u64) {
        self.now_ns = now_ns;
        match done {
            Done::Spilled { file, outcome } => self.spilled(file, outcome),
            Done::Restored { slot, outcome } => self.restored(slot, outcome),
        }
        self.memory_changed = true;
        self.feed();
    }

    fn spilled(&mut self, file: u64, outcome: io::Result<()>) {
        if let Err(error) = &outcome {
            tracing::warn!(%error, "objects cannot be spilled; creates wait");
            self.counters.failed_spills += 1;
            self.pause_spilling(SPILL_AGAIN_NS);
        }
        let failed = outcome.is_err() && !planted(Planted::LoseFailedSpill);
        let (mut objects, mut bytes) = (0, 0);
        for slot in std::mem::take(&mut self.spilling) {
            let Some(object) = self.table.get_mut(slot) else { continue };
            let State::Spilling { file, offset } = object.state else { continue };
            let forgotten = planted(Planted::LeakDeletedSpill) && failed;
            if object.doomed && object.references == 0 && !forgotten {
                // Deleted meanwhile: gone, whatever became of the file.
                object.state = State::Sealed;
                self.destroy(slot);
                continue;
            }
            let wanted = object.references > 0 || object.pinned;
            if failed || wanted {
                // A client took a reference meanwhile: the object stays where it is.
                object.state = State::Sealed;
                self.settle(slot);
                continue;
            }
            object.state = State::Spilled { file, offset };
            let place = object.place.take();
            let length = object.bytes();
            if let Some(place) = place {
                self.memory.free(place, length);
            }
            objects += 1;
            bytes += length;
            self.counters.spills += 1;
            self.counters.spilled_bytes += length;
        }
        if objects > 0 {
            self.files.insert(file, (objects, bytes));
            self.spilled_bytes += bytes;
        } else {
            self.effects.push(Effect::Spill(Job::Forget { file }));
        }
    }

    pub(super) fn forget_in_file(&mut self, file: u64, bytes: u64) {
        let Some((objects, left)) = self.files.get_mut(&file) else { return };
        *objects -= 1;
        *left -= bytes.min(*left);
        self.spilled_bytes -= bytes.min(self.spilled_bytes);
        if *objects == 0 {
            self.files.remove(&file);
            self.effects.push(Effect::Spill(Job::Forget { file }));
        }
    }

    /// Begins to read an object back.
    pub(super) fn restore(&mut self, slot: u32) {
        let Some(object) = self.table.get_mut(slot) else { return };
        let State::Spilled { file, offset } = object.state else { return };
        object.state = State::Restoring { file, offset };
        let handle = self.table.handle(slot);
        self.hungry.push_back(Hungry::Restore { slot, handle });
        self.memory_changed = true;
    }

    fn try_restore(&mut self, slot: u32, handle: u64) -> bool {
        if self.table.of_handle(handle) != Some(slot) {
            return true;
        }
        let Some(object) = self.table.get(slot) else { return true };
        let State::Restoring { file, offset } = object.state else { return true };
        let length = object.bytes();
        if object.place.is_some() {
            return true;
        }
        if object.doomed {
            // Deleted while it waited for memory: it needs none.
            self.destroy(slot);
            return true;
        }
        let Ok(place) = self.allocate(STORE, length) else { return false };
        let Some(held) = self.memory.get(place.segment) else { return true };
        let segment = Arc::clone(&held.segment);
        let piece = Piece { segment, offset: place.offset, length, file_offset: offset };
        if let Some(object) = self.table.get_mut(slot) {
            object.place = Some(place);
        }
        self.effects.push(Effect::Spill(Job::Restore { file, slot, piece }));
        true
    }

    fn restored(&mut self, slot: u32, outcome: io::Result<()>) {
        let Some(object) = self.table.get_mut(slot) else { return };
        let State::Restoring { file, .. } = object.state else { return };
        let (id, length, doomed) = (object.id, object.bytes(), object.doomed);
        object.state = State::Sealed;
        self.forget_in_file(file, length);
        if let Err(error) = outcome {
            // The file is the only copy: the object is lost, and who waits for it is told.
            tracing::error!(%error, %id, "a spilled object cannot be read back");
            self.counters.lost_objects += 1;
            self.tell_damaged(id);
            self.destroy(slot);
            return;
        }
        self.counters.restores += 1;
        if doomed {
            self.destroy(slot);
            return;
        }
        self.settle(slot);
        self.serve_waiters(id);
    }

    // ── segments ───────────────────────────────────────────────────────────────────────────────

    /// A writer says that it mapped a segment.
    pub(crate) fn mapped(&mut self, client: u32, number: u32, now_ns: u64) {
        self.now_ns = now_ns;
        let Some(held) = self.memory.get_mut(number) else { return };
        if held.writer != client || held.ready {
            return;
        }
        match held.segment.refuse_writers() {
            Ok(()) => held.ready = true,
            Err(error) => {
                tracing::error!(%error, "a segment cannot be sealed against further writers");
                let reason = "its segment cannot be sealed";
                self.effects.push(Effect::Expel { client, reason });
            }
        }
        self.memory_changed = true;
        self.feed();
    }

    /// A client says that it unmapped a segment.
    pub(crate) fn unmapped(&mut self, client: u32, number: u32, now_ns: u64) {
        self.now_ns = now_ns;
        if let Some(held) = self.memory.get_mut(number)
            && held.writer == client
            && held.ready
        {
            held.writer = GONE;
        }
        self.memory_changed |= self.memory.unmapped(number, client);
        self.feed();
    }

    /// Forgets creates that are over, where they are most of those that wait.
    pub(super) fn forget_fed_up(&mut self) {
        if self.fed_up > 32 && self.fed_up > self.hungry.len() / 2 {
            let mut hungry = std::mem::take(&mut self.hungry);
            hungry.retain(|next| match *next {
                Hungry::Create { client, tag, serial } => self.is_waiting(client, tag, serial),
                Hungry::Restore { .. } => true,
            });
            self.hungry = hungry;
            self.fed_up = 0;
        }
    }

    /// The client of a create that waits for memory, and the bytes; nothing where it is over.
    fn asked(&self, hungry: &Hungry) -> Option<(u32, u64)> {
        let Hungry::Create { client, tag, serial } = *hungry else { return None };
        if !self.is_waiting(client, tag, serial) {
            return None;
        }
        let request = &self.waits.get(&(client, tag))?.request;
        Some((client, request.size.saturating_add(request.metadata_size)))
    }

    /// Gives memory to those that wait, oldest first, while anything changes.
    pub(super) fn feed(&mut self) {
        while std::mem::take(&mut self.memory_changed) && !self.hungry.is_empty() {
            // What a client was refused a moment ago it is not given in a larger piece.
            let mut refused: HashMap<u32, u64> = HashMap::new();
            for _ in 0..self.hungry.len() {
                let Some(next) = self.hungry.pop_front() else { break };
                let asked = self.asked(&next);
                let hopeless = asked
                    .and_then(|(client, bytes)| Some(bytes >= *refused.get(&client)?))
                    .unwrap_or(false);
                let fed = !hopeless
                    && match next {
                        Hungry::Create { client, tag, serial } => {
                            self.try_create(client, tag, serial)
                        }
                        Hungry::Restore { slot, handle } => self.try_restore(slot, handle),
                    };
                if !fed {
                    if let Some((client, bytes)) = asked {
                        let least = refused.entry(client).or_insert(bytes);
                        *least = bytes.min(*least);
                    }
                    self.hungry.push_back(next);
                }
            }
        }
    }

    /// Every object, as a listing.
    pub(crate) fn listing(&self, now_ns: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.table.count() * ENTRY_BYTES);
        for object in self.table.iter() {
            let entry = Entry {
                id: object.id,
                sealed: object.is_sealed(),
                spilled: object.place.is_none(),
                pinned: object.pinned,
                references: object.references,
                size: object.size,
                metadata_size: object.metadata_size,
                age_ms: now_ns.saturating_sub(object.created_ns) / 1_000_000,
            };
            bytes.extend_from_slice(&entry.encode());
        }
        bytes
    }

    /// Tells those that wait for an object that it is lost.
    fn tell_damaged(&mut self, id: crate::id::ObjectId) {
        for (client, tag) in self.waiters(id) {
            self.end_wait(client, tag);
            self.forget_waiter(id, client, tag);
            self.answer(client, tag, Status::Damaged);
        }
    }
}
