//! Shared receive queues.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{MemoryRegion, PostError, ReceiveRequest, SharedReceiveQueue};

use crate::abi;
use crate::core::{Kind, Tag};
use crate::handle::{Domain, SharedReceives};
use crate::region::local_range;

#[derive(Debug, Default)]
struct Slot {
    wr_id: u64,
    held: Option<MemoryRegion>,
    range: Option<abi::Sge>,
}

#[derive(Debug)]
struct Slots {
    slots: Box<[Slot]>,
    free: Vec<u32>,
    requests: Vec<abi::RecvWr>,
    entries: Vec<abi::Sge>,
}

/// What its handle and the completion queues share.
#[derive(Debug)]
pub(crate) struct SharedCore {
    pub(crate) hardware: Arc<SharedReceives>,
    /// Names it in the device's numbers; 22 bits.
    pub(crate) number: u32,
    slots: RefCell<Slots>,
}

impl SharedCore {
    /// A receive was consumed: its number in the application's terms. `None` for a stale entry.
    pub(crate) fn consumed(&self, entry: u32) -> Option<u64> {
        let slots = &mut *self.slots.borrow_mut();
        let slot = slots.slots.get_mut(entry as usize)?;
        slot.held = None;
        let wr_id = slot.wr_id;
        slots.free.push(entry);
        Some(wr_id)
    }

    /// A receive was consumed for a queue pair that is gone: it is posted again, for the others.
    /// Nothing for a stale entry.
    pub(crate) fn give_back(&self, entry: u32) {
        let slots = &mut *self.slots.borrow_mut();
        let Some(slot) = slots.slots.get(entry as usize) else { return };
        let range = slot.range;
        slots.requests.clear();
        slots.entries.clear();
        let tag = Tag { kind: Kind::Shared, place: self.number, generation: 0, entry };
        slots.requests.push(abi::RecvWr {
            wr_id: tag.encode(),
            num_sge: i32::from(range.is_some()),
            ..abi::RecvWr::EMPTY
        });
        slots.entries.push(range.unwrap_or_default());
        chain_receives(&mut slots.requests, &mut slots.entries);
        if self.hardware.post(&mut slots.requests).is_err() {
            // The device takes none any more; nobody waits for this one.
            slots.slots[entry as usize].held = None;
            slots.free.push(entry);
        }
    }

    fn posted(&self) -> u32 {
        let slots = self.slots.borrow();
        // Both below the depth, a u32.
        (slots.slots.len() - slots.free.len()) as u32
    }
}

/// Checks one receive; its gather entry, `None` without a buffer.
pub(crate) fn check_receive(
    request: &ReceiveRequest<'_>,
    domain: &Arc<Domain>,
) -> Result<Option<abi::Sge>, PostError> {
    match &request.buffer {
        None => Ok(None),
        Some(buffer) => {
            let range = local_range(buffer, domain, true).ok_or(PostError::LocalProtection)?;
            Ok((range.length > 0).then_some(range))
        }
    }
}

/// Chains a list of receives whose gather entries, one each, are in `entries`.
pub(crate) fn chain_receives(requests: &mut [abi::RecvWr], entries: &mut [abi::Sge]) {
    let entries = entries.as_mut_ptr();
    let base = requests.as_mut_ptr();
    let count = requests.len();
    for (index, request) in requests.iter_mut().enumerate() {
        request.sg_list = entries.wrapping_add(index);
        request.next =
            if index + 1 < count { base.wrapping_add(index + 1) } else { std::ptr::null_mut() };
    }
}

/// The handle.
#[derive(Debug)]
pub(crate) struct VerbsSharedReceiveQueue {
    pub(crate) core: Rc<SharedCore>,
    pub(crate) domain: Arc<Domain>,
}

impl VerbsSharedReceiveQueue {
    pub(crate) fn new(hardware: SharedReceives, number: u32, depth: u32) -> Self {
        let domain = Arc::clone(&hardware.domain);
        let slots = Slots {
            slots: (0..depth).map(|_| Slot::default()).collect(),
            free: (0..depth).rev().collect(),
            requests: Vec::with_capacity(depth as usize),
            entries: Vec::with_capacity(depth as usize),
        };
        let slots = RefCell::new(slots);
        Self { core: Rc::new(SharedCore { hardware: Arc::new(hardware), number, slots }), domain }
    }
}

impl SharedReceiveQueue for VerbsSharedReceiveQueue {
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let mut borrowed = self.core.slots.borrow_mut();
        let slots = &mut *borrowed;
        if requests.len() > slots.free.len() {
            return Err(PostError::QueueFull);
        }
        if requests.is_empty() {
            return Ok(());
        }
        slots.requests.clear();
        slots.entries.clear();
        let first_free = slots.free.len() - requests.len();
        for (request, &entry) in requests.iter().zip(slots.free[first_free..].iter().rev()) {
            let range = check_receive(request, &self.domain)?;
            let (place, generation) = (self.core.number, 0);
            let tag = Tag { kind: Kind::Shared, place, generation, entry };
            slots.requests.push(abi::RecvWr {
                wr_id: tag.encode(),
                num_sge: i32::from(range.is_some()),
                ..abi::RecvWr::EMPTY
            });
            slots.entries.push(range.unwrap_or_default());
        }
        chain_receives(&mut slots.requests, &mut slots.entries);
        // A refusal in the middle leaves the first ones posted: they stay taken.
        let posted = match self.core.hardware.post(&mut slots.requests) {
            Ok(()) => requests.len(),
            Err(refused) => refused.taken,
        };
        for (index, request) in requests[..posted].iter().enumerate() {
            let Some(entry) = slots.free.pop() else { break };
            let slot = &mut slots.slots[entry as usize];
            slot.range = (slots.requests[index].num_sge > 0).then(|| slots.entries[index]);
            slot.wr_id = request.wr_id;
            slot.held = request.buffer.map(|buffer| buffer.region.clone());
        }
        if posted == requests.len() { Ok(()) } else { Err(PostError::QueueFull) }
    }

    fn posted(&self) -> u32 {
        self.core.posted()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
