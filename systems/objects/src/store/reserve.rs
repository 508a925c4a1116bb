//! Reserves: memory a client writes before it says which objects lie there, so that a small object
//! is put by one request instead of two.
//!
//! Decisions: a client has one reserve, in a segment of its own, so that nobody is given rights it
//! had not; objects are taken from its start, in the order in which the client wrote them. None is
//! given out when more than half of the memory is used, and when memory is short all are called in.
//!
//! Invariants: what is reserved is no object: nothing finds it, lists it or evicts it; it is given
//! back when the client says so, reserves anew or is gone.

use super::core::{Core, Effect};
use super::memory::{Found, Place};
use super::planted::{Planted, planted};
use super::table::{Object, State};
use crate::heap::rounded;
use crate::wire::{
    FLAG_CHECKSUM, Location, MOST_RESERVED, Record, RecordKind, Reply, Request, Status,
};

/// Memory of one client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserve {
    /// Where the next object lies.
    place: Place,
    /// Bytes from there on, a multiple of the alignment.
    left: u64,
    called_in: bool,
}

impl Core {
    /// Gives `client` memory for small objects, if there is plenty.
    pub(super) fn reserve(&mut self, client: u32, tag: u32, request: &Request) {
        self.give_back(client);
        let Some(bytes) = rounded(request.size).filter(|bytes| *bytes <= MOST_RESERVED) else {
            let reason = "it reserves more than a client may";
            return self.effects.push(Effect::Expel { client, reason });
        };
        self.charge_entries();
        if self.memory.used() + bytes > self.memory.limit() / 2 || !self.has_many_entries() {
            return self.answer(client, tag, Status::Full);
        }
        match self.memory.find(client, bytes) {
            Found::Place(place) => {
                let reserve = Reserve { place, left: bytes, called_in: false };
                if let Some(known) = self.clients.get_mut(&client) {
                    known.reserve = Some(reserve);
                    self.reserves += 1;
                    self.reserved_bytes += bytes;
                }
                let location = Location {
                    segment: place.segment,
                    offset: place.offset,
                    size: bytes,
                    ..Location::default()
                };
                self.reply(client, tag, Reply { status: Status::Done, location });
            }
            Found::Offered { new } => {
                // Its creates go on without a reserve meanwhile.
                if let Some(number) = new {
                    self.offer(client, number);
                }
                self.answer(client, tag, Status::Full);
            }
            Found::Nothing => self.answer(client, tag, Status::Full),
        }
    }

    /// What lies at the start of the client's reserve is an object.
    pub(super) fn put(&mut self, client: u32, tag: u32, request: &Request) {
        let bytes = request.size.checked_add(request.metadata_size);
        let reserve = self.clients.get_mut(&client).and_then(|known| known.reserve.as_mut());
        let fits = |reserve: &&mut Reserve| {
            let taken = bytes.and_then(rounded).is_some_and(|bytes| bytes <= reserve.left);
            taken && reserve.place.offset == request.timeout_us
        };
        let (Some(bytes), Some(reserve)) = (bytes, reserve.filter(fits)) else {
            let reason = "it puts an object where it reserved nothing";
            return self.effects.push(Effect::Expel { client, reason });
        };
        let (place, called_in) = (reserve.place, reserve.called_in);
        let left = self.memory.split(place, reserve.left, bytes);
        reserve.place.offset += reserve.left - left;
        self.reserved_bytes -= reserve.left - left;
        reserve.left = left;
        if left == 0 {
            self.reserves -= usize::from(!called_in);
            if let Some(known) = self.clients.get_mut(&client) {
                known.reserve = None;
            }
        }
        if self.table.find(request.id).is_some() && !planted(Planted::PutOverAnother) {
            self.memory.free(place, bytes);
            self.memory_changed = true;
            return self.answer(client, tag, Status::Exists);
        }
        // Without room it is put all the same, and every reserve is called in.
        self.make_entry();
        let mut object =
            Object::new(request.id, client, place, request.size, request.metadata_size);
        object.state = State::Sealed;
        object.created_ns = self.now_ns;
        if request.flags & FLAG_CHECKSUM != 0 {
            object.checksum = u32::try_from(request.checksum).ok();
        }
        let slot = self.table.insert(object);
        self.settle(slot);
        // Creates of others may have waited for an object that may go.
        self.memory_changed = true;
        self.counters.creates += 1;
        self.counters.reserved_puts += 1;
        self.answer(client, tag, Status::Done);
        self.tell_sealed(request.id, bytes);
    }

    /// What is left of the client's reserve is free.
    pub(super) fn give_back(&mut self, client: u32) {
        let reserve = self.clients.get_mut(&client).and_then(|known| known.reserve.take());
        if let Some(reserve) = reserve {
            self.forget_reserve(reserve);
        }
    }

    pub(super) fn forget_reserve(&mut self, reserve: Reserve) {
        self.reserves -= usize::from(!reserve.called_in);
        self.reserved_bytes -= reserve.left;
        if !planted(Planted::KeepDeadReserves) {
            self.memory.free(reserve.place, reserve.left);
        }
        self.memory_changed = true;
    }

    /// Memory is short: asks for every reserve.
    pub(super) fn call_in(&mut self) {
        if self.reserves == 0 {
            return;
        }
        self.reserves = 0;
        let mut called: Vec<u32> = Vec::new();
        for (client, known) in &mut self.clients {
            if let Some(reserve) = known.reserve.as_mut().filter(|reserve| !reserve.called_in) {
                reserve.called_in = true;
                called.push(*client);
            }
        }
        called.sort_unstable();
        for client in called {
            let record = Record::new(RecordKind::CallIn, 0, 0, 0);
            self.effects.push(Effect::Send { client, record, segment: None });
        }
    }
}
