//! The queue pair's handle: control calls, and the door to [`Core`] for data calls.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    ConnectInfo, FabricError, Hold, PostError, QueuePair, QueuePairOptions, QueuePairState,
    ReceiveRequest, RemoteAddress, Role, WorkRequest,
};
use beeline_os::barrier;

use crate::completion_queue::Queue;
use crate::connect_info::{PeerInfo, random};
use crate::control::Command;
use crate::core::{Core, Heat, Inner};
use crate::device::ShmProtectionDomain;
use crate::exposure;
use crate::link::Link;
use crate::object::Geometry;
use crate::shared_receive_queue::SharedReceives;

/// The handle; dropping it disconnects.
#[derive(Debug)]
pub(crate) struct ShmQueuePair(pub(crate) Rc<Core>);

impl ShmQueuePair {
    pub(crate) fn new(
        domain: &ShmProtectionDomain,
        send_queue: &Rc<Queue>,
        receive_queue: &Rc<Queue>,
        shared_receives: Option<Rc<SharedReceives>>,
        options: QueuePairOptions,
    ) -> Result<Self, FabricError> {
        send_queue.check()?;
        receive_queue.check()?;
        let config = &domain.device.shared.config;
        let nonce = random()?;
        let geometry = match &shared_receives {
            Some(_) => Geometry {
                slots: config.ring_slots,
                lengths: 0,
                payload_bytes: config.payload_bytes,
            },
            // Twice the receives, so that credit runs out before slots do.
            None => Geometry {
                slots: (options.receive_depth * 2).next_power_of_two().max(64),
                lengths: options.receive_depth.next_power_of_two(),
                payload_bytes: config.payload_bytes,
            },
        };
        let receive_member = receive_queue.reserve();
        let send_member = if Rc::ptr_eq(send_queue, receive_queue) {
            receive_member
        } else {
            send_queue.reserve()
        };
        let signals = [
            (Arc::clone(&send_queue.signal), send_member),
            (Arc::clone(&receive_queue.signal), receive_member),
        ];
        let qp_num = domain.device.next_qp_num();
        let link = Arc::new(Link::new(qp_num, nonce, geometry, domain.id, signals));
        if let Some(shared) = &shared_receives {
            shared.listen(receive_queue);
        }
        let receive_depth = if shared_receives.is_some() { 0 } else { options.receive_depth };
        let core = Rc::new(Core {
            link: Arc::clone(&link),
            device: Arc::clone(&domain.device),
            options,
            send_queue: Rc::clone(send_queue),
            receive_queue: Rc::clone(receive_queue),
            send_member,
            receive_member,
            shared_receives,
            outstanding: Cell::new(0),
            quiet_polls: Cell::new(0),
            send_heat: Cell::new(Heat::Out),
            receive_heat: Cell::new(Heat::Out),
            inner: RefCell::new(Inner::new(receive_depth)),
        });
        receive_queue.join(receive_member, &core);
        if send_member != receive_member || !Rc::ptr_eq(send_queue, receive_queue) {
            send_queue.join(send_member, &core);
        }
        domain.device.shared.ask(Command::Add(link));
        Ok(Self(core))
    }
}

impl QueuePair for ShmQueuePair {
    fn qp_num(&self) -> u32 {
        self.0.link.qp_num
    }

    fn state(&self) -> QueuePairState {
        self.0.state()
    }

    fn connect_info(&self) -> ConnectInfo {
        let shared = &self.0.device.shared;
        PeerInfo {
            host: shared.host,
            socket: shared.socket,
            qp_num: self.0.link.qp_num,
            geometry: self.0.link.geometry,
            nonce: self.0.link.nonce,
            asymmetric: barrier::is_asymmetric(),
            in_process: shared.is_in_process(),
        }
        .encode()
    }

    fn connect(&mut self, peer: &ConnectInfo, role: Role) -> Result<(), FabricError> {
        let peer = PeerInfo::decode(peer)?;
        if peer.in_process != self.0.device.shared.is_in_process() {
            let reason =
                "one of the two devices serves its own process only, and the other does not";
            return Err(FabricError::BadConnectInfo { reason });
        }
        if peer.host != self.0.device.shared.host {
            let reason = "the peer is on another host, or in another network namespace";
            return Err(FabricError::BadConnectInfo { reason });
        }
        let mut inner = self.0.inner.borrow_mut();
        if inner.state != QueuePairState::Init || inner.connecting {
            let needed = "a queue pair is connected once, from its initial state";
            return Err(FabricError::WrongState { state: inner.state, needed });
        }
        inner.connecting = true;
        drop(inner);
        let (qp_num, peer) = (self.qp_num(), Box::new(peer));
        self.0.device.shared.ask(Command::Connect { qp_num, peer, role });
        Ok(())
    }

    fn wait_connected(&mut self, timeout: Duration) -> Result<(), FabricError> {
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(1 << 30));
        loop {
            self.0.attend();
            match self.0.state() {
                QueuePairState::ReadyToSend => return Ok(()),
                QueuePairState::Error => return Err(FabricError::PeerGone),
                QueuePairState::Init => {}
            }
            if !self.0.link.wait_for_event(deadline) {
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(FabricError::ConnectTimeout { timeout_ms });
            }
        }
    }

    fn post_send(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        self.0.post_send(requests)
    }

    fn expect_write(&mut self, remote: RemoteAddress, length: u64) {
        self.0.expect_write(remote, length);
    }

    fn hold(&mut self) -> Hold {
        self.0.hold();
        // A name of the core for the guard alone: one count, and no allocation.
        let core: Rc<Core> = Rc::clone(&self.0);
        Hold::new(core)
    }

    fn post_receive(&mut self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        self.0.post_receive(requests)
    }

    fn revoke(&mut self) -> Result<(), FabricError> {
        self.0.disconnect();
        exposure::take_back_from(&self.0.link)
    }
}

impl Drop for ShmQueuePair {
    fn drop(&mut self) {
        self.0.disconnect();
        let core = &self.0;
        core.receive_queue.leave(core.receive_member);
        if !Rc::ptr_eq(&core.send_queue, &core.receive_queue) {
            core.send_queue.leave(core.send_member);
        }
    }
}
