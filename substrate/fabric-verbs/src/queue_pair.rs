//! Queue pairs: posting, connecting, revoking.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_fabric::error::system;
use beeline_fabric::{
    CompletionQueue, ConnectInfo, FabricError, FlushKind, LocalData, MemoryRegion, Opcode,
    Operation, PostError, QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest,
    RemoteAddress, Role, ScatterGatherEntry, WorkRequest,
};
use beeline_os::Persistence;

use crate::abi::{self, mask, qp_state, send_flag, wr};
use crate::completion_queue::{Parked, VerbsCompletionQueue};
use crate::core::{Core, Kind, SendSlot, Tag, Verdict};
use crate::device::{DeviceHandle, VerbsDomain};
use crate::endpoint::Endpoint;
use crate::handle::{Pair, PairShape, Poster, Refused};
use crate::key::{Key, target};
use crate::options::{NotReady, timeout_code};
use crate::receive_queue::{VerbsSharedReceiveQueue, chain_receives, check_receive};
use crate::region::{local_range, random, random_u32};
use crate::shared::{Cause, Command, PairShared};

/// How long the last completions of a queue pair that is being revoked are waited for; what has
/// not come by then is flushed by the library.
const DRAIN_BOUND: Duration = Duration::from_millis(200);
/// An end that no region has.
const BEYOND: u64 = u64::MAX;

/// Lists being built for the device; kept so that posting allocates nothing.
#[derive(Debug, Default)]
struct Scratch {
    sends: Vec<abi::SendWr>,
    receives: Vec<abi::RecvWr>,
    entries: Vec<abi::Sge>,
    /// Of each send, where its entries begin.
    starts: Vec<usize>,
}

#[derive(Debug)]
pub(crate) struct VerbsQueuePair {
    core: Rc<Core>,
    poster: Poster,
    domain: Arc<VerbsDomain>,
    send_queue: Rc<dyn CompletionQueue>,
    receive_queue: Rc<dyn CompletionQueue>,
    /// Where it sits in both queues: place, generation. The same where they are one.
    places: [(u32, u16); 2],
    device: Arc<DeviceHandle>,
    options: QueuePairOptions,
    not_ready: NotReady,
    packet_number: u32,
    peer_known: bool,
    /// The device's tag, what it is bound to, and what was asked for, to put it aside by.
    tag: usize,
    bound: (usize, usize, usize),
    asked: abi::QpCap,
    inline_limit: u32,
    scratch: RefCell<Scratch>,
}

fn concrete(queue: &Rc<dyn CompletionQueue>) -> Option<&VerbsCompletionQueue> {
    queue.as_any().downcast_ref()
}

fn too_large(what: &'static str, length: u64, limit: u64) -> Result<(), PostError> {
    if length > limit { Err(PostError::TooLarge { what, limit }) } else { Ok(()) }
}

/// What a queue pair is made of.
pub(crate) struct Parts<'a> {
    pub(crate) domain: Arc<VerbsDomain>,
    pub(crate) send_queue: &'a Rc<dyn CompletionQueue>,
    pub(crate) receive_queue: &'a Rc<dyn CompletionQueue>,
    pub(crate) shared_receives: Option<&'a VerbsSharedReceiveQueue>,
    pub(crate) options: QueuePairOptions,
}

impl VerbsQueuePair {
    pub(crate) fn new(parts: Parts<'_>) -> Result<Self, FabricError> {
        let Parts { domain, send_queue, receive_queue, shared_receives, options } = parts;
        let device = Arc::clone(&domain.device);
        let foreign = || FabricError::Unsupported {
            provider: "verbs",
            what: "completion queues of another device",
        };
        let own = |queue| {
            concrete(queue).filter(|queue| Arc::ptr_eq(&queue.device, &device)).ok_or_else(foreign)
        };
        let (send, receive) = (own(send_queue)?, own(receive_queue)?);
        let asked = abi::QpCap {
            max_send_wr: options.send_depth,
            max_recv_wr: if shared_receives.is_some() { 0 } else { options.receive_depth },
            max_send_sge: device.max_gather,
            max_recv_sge: 1,
            max_inline_data: device.max_inline_bytes,
        };
        // Each is held by a parked queue pair itself, so that no other comes to lie there.
        let bound = (
            Arc::as_ptr(&domain.hardware) as usize,
            Arc::as_ptr(&receive.shared.hardware) as usize,
            shared_receives.map_or(0, |queue| Arc::as_ptr(&queue.core.hardware) as usize),
        );
        let (hardware, tag) = match send.unpark(bound, asked) {
            Some(parked) => parked,
            None => {
                let tag = device.next_tag();
                let shape = PairShape {
                    send: Arc::clone(&send.shared.hardware),
                    receive: Arc::clone(&receive.shared.hardware),
                    shared: shared_receives.map(|queue| Arc::clone(&queue.core.hardware)),
                    cap: asked,
                    tag,
                };
                let made = Pair::new(Arc::clone(&domain.hardware), shape);
                (made.map_err(system("creating a queue pair"))?, tag)
            }
        };
        let poster = hardware.poster().map_err(system("finding the driver's post functions"))?;
        let attributes = abi::QpAttr {
            qp_state: qp_state::INIT,
            port_num: device.port.number,
            qp_access_flags: (abi::access::REMOTE_READ
                | abi::access::REMOTE_WRITE
                | abi::access::REMOTE_ATOMIC)
                .cast_unsigned(),
            ..abi::QpAttr::default()
        };
        let which = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS;
        hardware.modify(attributes, which).map_err(system("initialising a queue pair"))?;
        let mut nonce = [0; 16];
        random(&mut nonce)?;
        let packet_number = random_u32()? & 0xff_ffff;
        let (hardware_number, inline_limit) = (hardware.number(), hardware.cap.max_inline_data);
        let not_ready = NotReady::for_bound(options.receiver_not_ready_timeout);
        let watched = matches!(not_ready, NotReady::Watched { .. })
            .then_some(options.receiver_not_ready_timeout);
        let shared = Arc::new(PairShared::new(
            (device.next_number(), nonce),
            (options.transport_timeout, watched),
            hardware,
            [Arc::clone(&send.shared), Arc::clone(&receive.shared)],
            Arc::clone(&device.board),
        ));
        device.board.add_pair(tag, &shared);
        // As for a new completion queue: a loss of the device just before is seen here.
        if device.board.lost.load(Ordering::Acquire) {
            shared.fail(Cause::Device);
        }
        let send_place = send.reserve();
        let same = Rc::ptr_eq(send_queue, receive_queue);
        let receive_place = if same { send_place } else { receive.reserve() };
        let receive_depth = asked.max_recv_wr;
        let core = Rc::new(Core {
            shared,
            hardware_number,
            context: options.context,
            send: RefCell::new(crate::core::SendSide::new(
                options.send_depth,
                device.max_gather as usize,
            )),
            receive: RefCell::new(crate::core::ReceiveSide::new(receive_depth)),
            shared_receives: shared_receives.map(|queue| Rc::clone(&queue.core)),
            failed: std::cell::Cell::new(false),
        });
        send.add(send_place.0, &core);
        if !same {
            receive.add(receive_place.0, &core);
        }
        Ok(Self {
            core,
            poster,
            domain,
            send_queue: Rc::clone(send_queue),
            receive_queue: Rc::clone(receive_queue),
            places: [send_place, receive_place],
            device,
            options,
            not_ready,
            packet_number,
            peer_known: false,
            tag,
            bound,
            asked,
            inline_limit: inline_limit.min(asked.max_inline_data),
            scratch: RefCell::default(),
        })
    }

    fn endpoint(&self) -> Endpoint {
        let device = &self.device;
        Endpoint {
            link_layer: device.link_layer_code(),
            lid: device.port.lid,
            gid: abi::Gid(device.gid.raw),
            mtu: device.mtu,
            reads_taken: device.reads_taken,
            reads_made: device.reads_made,
            rnr_timer: self.not_ready.timer(),
            hardware_number: self.core.hardware_number,
            number: self.core.shared.number,
            packet_number: self.packet_number,
            link: device.link_address,
            nonce: self.core.shared.nonce,
        }
    }

    /// The transitions to ready-to-receive and ready-to-send.
    fn turn_to(&self, peer: &Endpoint) -> Result<(), FabricError> {
        let device = &self.device;
        let hardware = self.core.shared.hardware();
        let Some(pair) = &*hardware else { return Err(FabricError::PeerGone) };
        let global = device.is_ethernet() || peer.lid == 0;
        let ah_attr = abi::AhAttr {
            grh: abi::GlobalRoute {
                dgid: peer.gid,
                flow_label: 0,
                sgid_index: device.gid.index,
                hop_limit: 64,
                traffic_class: device.config.traffic_class,
            },
            dlid: peer.lid,
            is_global: u8::from(global),
            port_num: device.port.number,
            ..abi::AhAttr::default()
        };
        let receive = abi::QpAttr {
            qp_state: qp_state::READY_TO_RECEIVE,
            path_mtu: i32::from(device.mtu.min(peer.mtu)),
            dest_qp_num: peer.hardware_number,
            rq_psn: peer.packet_number,
            max_dest_rd_atomic: device.reads_taken.min(peer.reads_made),
            min_rnr_timer: peer.rnr_timer,
            ah_attr,
            ..abi::QpAttr::default()
        };
        let which = mask::STATE
            | mask::AV
            | mask::PATH_MTU
            | mask::DEST_QPN
            | mask::RQ_PSN
            | mask::MAX_DEST_RD_ATOMIC
            | mask::MIN_RNR_TIMER;
        pair.modify(receive, which).map_err(system("making a queue pair ready to receive"))?;
        let retries = device.config.retry_count.min(7);
        let send = abi::QpAttr {
            qp_state: qp_state::READY_TO_SEND,
            timeout: timeout_code(self.options.transport_timeout, retries),
            retry_cnt: retries,
            rnr_retry: self.not_ready.retries(),
            sq_psn: self.packet_number,
            max_rd_atomic: device.reads_made.min(peer.reads_taken),
            ..abi::QpAttr::default()
        };
        let which = mask::STATE
            | mask::TIMEOUT
            | mask::RETRY_CNT
            | mask::RNR_RETRY
            | mask::SQ_PSN
            | mask::MAX_QP_RD_ATOMIC;
        pair.modify(send, which).map_err(system("making a queue pair ready to send"))
    }

    /// Fills in where a request's bytes come from; returns their number.
    fn source(
        &self,
        data: &LocalData<'_>,
        limit: u64,
        slot: &mut SendSlot,
        wr: &mut abi::SendWr,
        entries: &mut Vec<abi::Sge>,
    ) -> Result<u64, PostError> {
        match data {
            LocalData::Inline(bytes) => {
                let length = bytes.len() as u64;
                too_large("inline data", length, u64::from(self.inline_limit))?;
                too_large("message", length, limit)?;
                if !bytes.is_empty() {
                    wr.send_flags |= send_flag::INLINE;
                    // Below the limit of a few hundred, just checked.
                    let length = bytes.len() as u32;
                    entries.push(abi::Sge { addr: bytes.as_ptr() as u64, length, lkey: 0 });
                }
                Ok(length)
            }
            LocalData::Gather(list) => {
                let most = u64::from(self.device.max_gather);
                too_large("gather list", list.len() as u64, most)?;
                let mut length = 0_u64;
                for entry in *list {
                    let range = local_range(entry, &self.domain.hardware, false)
                        .ok_or(PostError::LocalProtection)?;
                    length = length.saturating_add(entry.length);
                    // Some devices read an entry of no bytes as one of 2 GiB.
                    if range.length > 0 {
                        entries.push(range);
                        slot.held.push(entry.region.clone());
                    }
                }
                too_large("message", length, limit)?;
                Ok(length)
            }
        }
    }

    /// Fills in where a result goes.
    fn result(
        &self,
        entry: &ScatterGatherEntry<'_>,
        slot: &mut SendSlot,
        entries: &mut Vec<abi::Sge>,
    ) -> Result<(), PostError> {
        let range =
            local_range(entry, &self.domain.hardware, true).ok_or(PostError::LocalProtection)?;
        if range.length > 0 {
            entries.push(range);
            slot.held.push(entry.region.clone());
        }
        Ok(())
    }

    fn atomic(
        &self,
        (entry, remote): (&ScatterGatherEntry<'_>, RemoteAddress),
        (compare_add, swap): (u64, u64),
        slot: &mut SendSlot,
        wr: &mut abi::SendWr,
        entries: &mut Vec<abi::Sge>,
    ) -> Result<(), PostError> {
        if entry.length != 8 {
            return Err(PostError::LocalProtection);
        }
        self.result(entry, slot, entries)?;
        let mut to = target(remote, 8);
        if !remote.offset.is_multiple_of(8) {
            // Drivers refuse to post it, so that the peer would never hear of it: it goes where no
            // region is, and is refused there.
            slot.verdict = Verdict::Unaligned;
            to.address = 0;
        }
        slot.length = 8;
        let (remote_addr, rkey) = (to.address, to.rkey);
        wr.remote.atomic = abi::AtomicPart { remote_addr, compare_add, swap, rkey };
        Ok(())
    }

    /// Builds one request.
    fn build(
        &self,
        operation: &Operation<'_>,
        slot: &mut SendSlot,
        wr: &mut abi::SendWr,
        entries: &mut Vec<abi::Sge>,
    ) -> Result<(), PostError> {
        let most = self.device.max_message_bytes;
        let at = |remote, length| {
            let to = target(remote, length);
            abi::RemotePart { rdma: abi::RdmaPart { remote_addr: to.address, rkey: to.rkey } }
        };
        match operation {
            Operation::Write { local, remote } => {
                (slot.opcode, wr.opcode) = (Opcode::Write, wr::RDMA_WRITE);
                slot.length = self.source(local, most, slot, wr, entries)?;
                wr.remote = at(*remote, slot.length);
            }
            Operation::WriteWithImmediate { local, remote, immediate } => {
                (slot.opcode, wr.opcode) = (Opcode::WriteWithImmediate, wr::RDMA_WRITE_WITH_IMM);
                slot.length = self.source(local, most, slot, wr, entries)?;
                wr.remote = at(*remote, slot.length);
                wr.imm_data = immediate.to_be();
            }
            Operation::Send { local, immediate } => {
                (slot.opcode, wr.opcode) = (Opcode::Send, wr::SEND);
                slot.length = self.source(local, most, slot, wr, entries)?;
                if let Some(immediate) = immediate {
                    wr.opcode = wr::SEND_WITH_IMM;
                    wr.imm_data = immediate.to_be();
                }
            }
            Operation::Read { local, remote } => {
                (slot.opcode, wr.opcode) = (Opcode::Read, wr::RDMA_READ);
                too_large("message", local.length, most)?;
                self.result(local, slot, entries)?;
                slot.length = local.length;
                wr.remote = at(*remote, local.length);
            }
            Operation::CompareAndSwap { local, remote, expected, desired } => {
                (slot.opcode, wr.opcode) = (Opcode::CompareAndSwap, wr::ATOMIC_CMP_AND_SWP);
                self.atomic((local, *remote), (*expected, *desired), slot, wr, entries)?;
            }
            Operation::FetchAndAdd { local, remote, addend } => {
                (slot.opcode, wr.opcode) = (Opcode::FetchAndAdd, wr::ATOMIC_FETCH_AND_ADD);
                self.atomic((local, *remote), (*addend, 0), slot, wr, entries)?;
            }
            Operation::Flush { remote, length, kind } => {
                (slot.opcode, wr.opcode) = (Opcode::Flush, wr::RDMA_READ);
                slot.length = 0;
                let key = Key::decode(remote.key);
                // A read of the range's last byte makes the peer's device check key and range, and
                // pushes the writes before it out of the network card and its bus. Where peers may
                // not read, a read of nothing pushes as well and checks nothing.
                if *length > 0 && key.readable {
                    let last = remote.offset.checked_add(*length - 1).unwrap_or(BEYOND);
                    wr.remote = at(RemoteAddress { key: remote.key, offset: last }, 1);
                    entries.push(self.domain.scratch);
                } else {
                    wr.remote = at(*remote, 0);
                }
                if *kind == FlushKind::Persistent && key.persistence != Persistence::CacheLine {
                    slot.verdict = Verdict::NotPersistent;
                }
            }
        }
        Ok(())
    }

    /// Builds a list into `scratch` and the slots from the tail on.
    fn build_all(
        &self,
        requests: &[WorkRequest<'_>],
        side: &mut crate::core::SendSide,
        scratch: &mut Scratch,
    ) -> Result<(), PostError> {
        let (place, generation) = self.places[0];
        let quarter = (self.options.send_depth / 4).max(1);
        let (mut silent_run, mut after_last_read) = (side.silent_run, side.after_last_read);
        for (request, position) in requests.iter().zip(side.tail..) {
            // The entry is the low 24 bits of the position.
            let entry = position as u32 & 0xff_ffff;
            let tag = Tag { kind: Kind::Send, place, generation, entry };
            let mut wr = abi::SendWr { wr_id: tag.encode(), ..abi::SendWr::EMPTY };
            let start = scratch.entries.len();
            let head = side.head;
            let slot = side.slot(position);
            slot.wr_id = request.wr_id;
            slot.signalled = request.signalled;
            slot.verdict = Verdict::Device;
            slot.held.clear();
            self.build(&request.operation, slot, &mut wr, &mut scratch.entries)?;
            silent_run += 1;
            // What the library watches has to be seen to be done.
            let waits = matches!(slot.opcode, Opcode::Send | Opcode::WriteWithImmediate);
            slot.reported = slot.signalled
                || slot.verdict != Verdict::Device
                || silent_run >= quarter
                || (waits && self.core.shared.watched.is_some());
            if slot.reported {
                wr.send_flags |= send_flag::SIGNALED;
                silent_run = 0;
            }
            match slot.opcode {
                Opcode::Read | Opcode::Flush => after_last_read = position + 1,
                // What follows a read must not overtake it: fabric's requests start in order.
                other => {
                    if after_last_read > head {
                        wr.send_flags |= send_flag::FENCE;
                    }
                    if matches!(other, Opcode::CompareAndSwap | Opcode::FetchAndAdd) {
                        after_last_read = position + 1;
                    }
                }
            }
            wr.num_sge = (scratch.entries.len() - start) as i32;
            scratch.starts.push(start);
            scratch.sends.push(wr);
        }
        (side.silent_run, side.after_last_read) = (silent_run, after_last_read);
        Ok(())
    }

    /// Ends everything outstanding without the device.
    fn abandon(&self) {
        let (send, receive) = (concrete(&self.send_queue), concrete(&self.receive_queue));
        self.core.abandon(&mut |is_send, completion| {
            let queue = if is_send { send } else { receive };
            if let Some(queue) = queue {
                queue.push(completion);
            }
        });
    }

    /// Breaks the connection and has the device let go of it; all outstanding work is flushed.
    ///
    /// Errors: the kernel's, when the device did not let go; it is asked again at the next call.
    fn take_down(&self, cause: Cause) -> io::Result<()> {
        self.core.shared.fail(cause);
        // What the device still reports is worth more than what the library makes up.
        let begun = Instant::now();
        loop {
            self.gather();
            if self.core.is_idle() || begun.elapsed() > DRAIN_BOUND {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        // Destroying it returns when the device has let go of it: a packet of the old peer finds
        // nothing any more.
        let pair = self.core.shared.hardware().take();
        let outcome = pair.map_or(Ok(()), |pair| {
            pair.destroy().map_err(|(pair, error)| {
                *self.core.shared.hardware() = Some(pair);
                error
            })
        });
        self.gather();
        if outcome.is_ok() {
            // The device touches none of it any more.
            self.abandon();
        }
        outcome
    }

    /// The driver took nothing of a list.
    fn nothing_posted(&self, refused: Refused) -> PostError {
        if refused.is_full {
            // The device's queue is full although ours is not.
            return PostError::QueueFull;
        }
        // The list was checked: a driver that refuses it is of no use any more.
        let _ = self.take_down(Cause::Device);
        PostError::NotReady(QueuePairState::Error)
    }

    fn gather(&self) {
        for queue in [&self.send_queue, &self.receive_queue] {
            if let Some(queue) = concrete(queue) {
                queue.gather();
            }
        }
    }
}

impl QueuePair for VerbsQueuePair {
    fn qp_num(&self) -> u32 {
        self.core.shared.number
    }

    fn state(&self) -> QueuePairState {
        self.core.state()
    }

    fn connect_info(&self) -> ConnectInfo {
        self.endpoint().encode()
    }

    fn connect(&mut self, peer: &ConnectInfo, role: Role) -> Result<(), FabricError> {
        let peer = Endpoint::decode(peer)?;
        let state = self.state();
        if self.peer_known || state != QueuePairState::Init {
            let needed = "a queue pair connects once";
            return Err(FabricError::WrongState { state, needed });
        }
        if peer.link_layer != self.device.link_layer_code() {
            let reason = "the peer's device is on another kind of network";
            return Err(FabricError::BadConnectInfo { reason });
        }
        self.peer_known = true;
        self.turn_to(&peer)?;
        let pair = Arc::clone(&self.core.shared);
        self.device.board.command(match role {
            Role::Active => Command::Dial(pair, peer),
            Role::Passive => Command::Expect(pair, peer),
        });
        Ok(())
    }

    fn wait_connected(&mut self, timeout: Duration) -> Result<(), FabricError> {
        match self.core.shared.wait_decided(timeout) {
            QueuePairState::ReadyToSend => Ok(()),
            QueuePairState::Error => Err(FabricError::PeerGone),
            QueuePairState::Init => {
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                Err(FabricError::ConnectTimeout { timeout_ms })
            }
        }
    }

    fn post_send(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        let state = self.state();
        if state != QueuePairState::ReadyToSend {
            return Err(PostError::NotReady(state));
        }
        let mut guard = self.core.send.borrow_mut();
        let side = &mut *guard;
        if side.outstanding() + requests.len() > side.slots.len() {
            return Err(PostError::QueueFull);
        }
        if requests.is_empty() {
            return Ok(());
        }
        let scratch = &mut *self.scratch.borrow_mut();
        scratch.sends.clear();
        scratch.entries.clear();
        scratch.starts.clear();
        if let Err(refused) = self.build_all(requests, side, scratch) {
            side.let_go(requests.len());
            return Err(refused);
        }
        let count = scratch.sends.len();
        let base = scratch.sends.as_mut_ptr();
        let entries = scratch.entries.as_mut_ptr();
        for (index, (wr, start)) in scratch.sends.iter_mut().zip(&scratch.starts).enumerate() {
            wr.sg_list = entries.wrapping_add(*start);
            if index + 1 < count {
                wr.next = base.wrapping_add(index + 1);
            }
        }
        // SAFETY: the queue pair lives until `revoke` or `drop`, after which the state is Error;
        // the list was chained above over buffers that outlive the call; ranges were checked to
        // lie in regions, which the slots hold until their completions.
        let posted = unsafe { self.poster.send(&mut scratch.sends) };
        if let Err(refused) = posted
            && refused.taken == 0
        {
            side.let_go(requests.len());
            drop(guard);
            return Err(self.nothing_posted(refused));
        }
        side.tail += requests.len() as u64;
        if self.core.shared.watched.is_some() {
            self.core.note_progress(side);
        }
        drop(guard);
        if posted.is_err() {
            // Some were posted and cannot be taken back, so the list fails as a whole.
            let _ = self.take_down(Cause::Device);
        }
        Ok(())
    }

    fn post_receive(&mut self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        if self.core.shared_receives.is_some() {
            return Err(PostError::TooLarge { what: "receives beside a shared queue", limit: 0 });
        }
        if self.state() == QueuePairState::Error {
            return Err(PostError::NotReady(QueuePairState::Error));
        }
        let mut guard = self.core.receive.borrow_mut();
        let side = &mut *guard;
        if side.outstanding() + requests.len() > side.slots.len() {
            return Err(PostError::QueueFull);
        }
        if requests.is_empty() {
            return Ok(());
        }
        let scratch = &mut *self.scratch.borrow_mut();
        scratch.receives.clear();
        scratch.entries.clear();
        let (place, generation) = self.places[1];
        for (request, position) in requests.iter().zip(side.tail..) {
            let range = check_receive(request, &self.domain.hardware)?;
            let entry = position as u32 & 0xff_ffff;
            let tag = Tag { kind: Kind::Receive, place, generation, entry };
            scratch.receives.push(abi::RecvWr {
                wr_id: tag.encode(),
                num_sge: i32::from(range.is_some()),
                ..abi::RecvWr::EMPTY
            });
            scratch.entries.push(range.unwrap_or_default());
        }
        chain_receives(&mut scratch.receives, &mut scratch.entries);
        // SAFETY: as in `post_send`.
        let posted = unsafe { self.poster.receive(&mut scratch.receives) };
        if let Err(refused) = posted
            && refused.taken == 0
        {
            drop(guard);
            return Err(self.nothing_posted(refused));
        }
        for (request, position) in requests.iter().zip(side.tail..) {
            let slot = side.slot(position);
            slot.wr_id = request.wr_id;
            slot.held = request
                .buffer
                .map(|buffer: ScatterGatherEntry<'_>| -> MemoryRegion { buffer.region.clone() });
        }
        side.tail += requests.len() as u64;
        drop(guard);
        if posted.is_err() {
            let _ = self.take_down(Cause::Device);
        }
        Ok(())
    }

    fn revoke(&mut self) -> Result<(), FabricError> {
        self.take_down(Cause::Own)
            .map_err(|source| FabricError::System { action: "destroying a queue pair", source })
    }
}
impl Drop for VerbsQueuePair {
    fn drop(&mut self) {
        self.core.shared.fail(Cause::Own);
        self.device.board.remove_pair(self.tag, self.core.shared.number);
        let (send, receive) = (concrete(&self.send_queue), concrete(&self.receive_queue));
        if let Some(send) = send {
            send.remove(self.places[0].0);
        }
        if let Some(receive) =
            receive.filter(|_| !Rc::ptr_eq(&self.send_queue, &self.receive_queue))
        {
            receive.remove(self.places[1].0);
        }
        let Some(pair) = self.core.shared.hardware().take() else { return };
        // A reset queue pair has forgotten its peer; the next owner gives it another packet
        // number. The device touches none of its memory any more.
        if let Some(send) = send
            && self.device.config.reused_queue_pairs > 0
            && pair.to_reset().is_ok()
        {
            // What its old peer made it report finds nobody now, and must not find the next owner,
            // which has the same number at the device.
            self.gather();
            send.park(Parked { pair, tag: self.tag, bound: self.bound, asked: self.asked });
        } else {
            drop(pair);
        }
        // Only now may the memory of what was outstanding go.
        self.core.abandon(&mut |_, _| {});
    }
}
