//! The thread of one processor: it polls its clients, and sleeps when there is nothing to do.
//!
//! Figures for other threads are copied to [`Figures`] now and then; nothing on the data path is
//! shared.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use beeline_kv_direct::datagram::{Datagram, Tokens};
use beeline_kv_direct::memory::HostMemory;
use beeline_kv_direct::processor::moves::MoveStep;
use beeline_kv_direct::slab::{SlabDaemon, SlabPools};
use beeline_kv_direct::{DirectServer, DirectServerOptions, Processor};
use beeline_observe::CommandTimes;
use beeline_os::poller::{Interest, Poller, Waker};

use crate::carrier::Carrier;
use crate::service::{Delivery, FabricWelcome, LocalPacket};

const WAKER: u64 = 0;
const UDP: u64 = 1;
const FIRST_SERVER: u64 = 2;
/// Turns that only poll between two looks at everything else.
const TURNS_PER_LOOK: u32 = 64;
/// Operations after which the next look is due whatever the turns were: what 64 turns with full polls of
/// packets of 32 operations execute. One packet may have tens of thousands.
const OPERATIONS_PER_LOOK: u64 = 1 << 16;
/// Datagrams taken at once.
const DATAGRAMS: usize = 64;
/// The longest reply in a datagram.
const UDP_REPLY_BYTES: usize = 60_000;
const LONGEST_DATAGRAM: usize = 65_536;
/// Buckets looked at between two looks at clients, for pairs that belong to others.
const MOVE_BUCKETS: u32 = 256;
/// Bytes of pairs that travel at once.
const MOVE_BYTES: usize = 32 << 10;
/// Between two offers of pairs that another server did not take.
const OFFER_AGAIN: Duration = Duration::from_millis(100);

/// Figures of one processor, written by its thread, read by others.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub pairs: AtomicU64,
    pub pair_bytes: AtomicU64,
    pub allocated_bytes: AtomicU64,
    pub chained_buckets: AtomicU64,
    pub clients: AtomicU64,
    pub packets: AtomicU64,
    pub operations: AtomicU64,
    pub forwarded: AtomicU64,
    pub write_backs: AtomicU64,
    pub failed: AtomicU64,
    pub slab_transfers: AtomicU64,
    pub slab_waits: AtomicU64,
    pub slab_merges: AtomicU64,
    pub refused: AtomicU64,
    pub ended: AtomicU64,
    pub sleeps: AtomicU64,
    pub moved: AtomicU64,
    pub adopted: AtomicU64,
}

/// What other threads share with a processor's.
#[derive(Debug)]
pub(crate) struct Shared {
    pub waker: Waker,
    pub stopping: AtomicBool,
    /// The thread panicked or could not go on.
    pub failed: AtomicBool,
    /// State of the map that the processor knows.
    pub map_state: AtomicU32,
    pub figures: Figures,
    pub times: Arc<PacketTimes>,
}

/// How long packets took, of all processors.
#[derive(Debug)]
pub(crate) struct PacketTimes {
    /// Those that came over fabric. One turn of [`TURNS_PER_LOOK`] is timed, and its time shared out
    /// among its packets.
    pub fabric: Arc<CommandTimes>,
    /// Those of the Redis door. Each is timed.
    pub local: Arc<CommandTimes>,
}

impl Default for PacketTimes {
    fn default() -> Self {
        let of = |names| CommandTimes::new("direct", names);
        Self {
            fabric: Arc::new(of(&["packet"]).sampled(TURNS_PER_LOOK.into())),
            local: Arc::new(of(&["local-packet"])),
        }
    }
}

/// What the thread is made of.
pub(crate) struct Parts {
    pub shared: Arc<Shared>,
    pub deliveries: Receiver<Delivery>,
    pub processor: Processor<HostMemory>,
    pub pools: Arc<SlabPools>,
    /// Ends with the thread.
    pub _daemon: SlabDaemon,
    pub server: DirectServerOptions,
    pub udp: Option<UdpSocket>,
    pub spin: Duration,
    pub carrier: Carrier,
}

struct Served {
    server: DirectServer,
    token: u64,
    failed: bool,
}

struct Thread {
    parts: Parts,
    poller: Poller,
    served: Vec<Served>,
    next_token: u64,
    armed: bool,
    /// When a client must be connected that is not yet, at the earliest.
    expires: Option<Instant>,
    /// What the steps of the tokens count from.
    started: Instant,
    tokens: Tokens,
    /// Counters of servers that are gone.
    refused: u64,
    ended: u64,
    sleeps: u64,
    /// Not before then are pairs offered again that another server did not take.
    offers: Option<Instant>,
    packet: Vec<u8>,
    reply: Vec<u8>,
    /// A reply behind its token.
    answer: Vec<u8>,
}

/// Says so when the thread ends in a panic.
struct Watch(Arc<Shared>);

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Release);
            tracing::error!("a processor of the direct store panicked; its pairs are lost");
        }
    }
}

/// Runs until the service stops.
pub(crate) fn run(parts: Parts) {
    let shared = Arc::clone(&parts.shared);
    let _watch = Watch(Arc::clone(&shared));
    match Thread::new(parts) {
        Ok(mut thread) => thread.run(),
        Err(error) => {
            tracing::error!(%error, "a processor of the direct store cannot run");
            shared.failed.store(true, Ordering::Release);
        }
    }
}

impl Thread {
    fn new(parts: Parts) -> std::io::Result<Self> {
        let poller = Poller::new(64)?;
        poller.add(&parts.shared.waker, WAKER, Interest::READ)?;
        if let Some(udp) = &parts.udp {
            poller.add(udp, UDP, Interest::READ)?;
        }
        Ok(Self {
            parts,
            poller,
            served: Vec::new(),
            next_token: FIRST_SERVER,
            armed: false,
            expires: None,
            started: Instant::now(),
            tokens: Tokens::default(),
            refused: 0,
            ended: 0,
            sleeps: 0,
            offers: None,
            packet: Vec::new(),
            reply: Vec::new(),
            answer: Vec::new(),
        })
    }

    fn run(&mut self) {
        let shared = Arc::clone(&self.parts.shared);
        let mut last_work = Instant::now();
        let mut turns = 0_u32;
        // Whether there was a packet since the last look outside, and the operations until then.
        let (mut worked, mut looked_at) = (false, 0);
        loop {
            let began = turns.is_multiple_of(TURNS_PER_LOOK).then(Instant::now);
            let packets = self.poll();
            if let (Some(began), Ok(count @ 1..)) = (began, u32::try_from(packets)) {
                shared.times.fabric.record_at(0, began.elapsed() / count);
            }
            turns = turns.wrapping_add(1);
            if packets > 0 {
                self.armed = false;
                worked = true;
            }
            let executed = self.parts.processor.counters().operations - looked_at;
            if !turns.is_multiple_of(TURNS_PER_LOOK) && executed < OPERATIONS_PER_LOOK {
                if packets == 0 {
                    std::hint::spin_loop();
                }
                continue;
            }
            if shared.stopping.load(Ordering::Acquire) {
                break;
            }
            looked_at = self.parts.processor.counters().operations;
            let now = Instant::now();
            let outside = self.look_outside();
            self.expire(now);
            let moving = self.move_on(now);
            if std::mem::take(&mut worked) || outside || moving {
                last_work = now;
                self.publish();
                continue;
            }
            if now.duration_since(last_work) < self.parts.spin {
                // Where more threads want to run than there are cores, one that only polls is last.
                std::thread::yield_now();
                continue;
            }
            if !self.arm() {
                // Freshly armed: what came before produces no event, so one more look.
                turns = TURNS_PER_LOOK - 1;
                continue;
            }
            self.publish();
            self.sleep(now);
            last_work = Instant::now();
        }
        for served in &mut self.served {
            served.server.shut_down();
        }
        self.parts.carrier.stop();
        self.publish();
    }

    /// Gives pairs away that belong to others now; whether there was any to look at.
    fn move_on(&mut self, now: Instant) -> bool {
        let state = self.parts.processor.map().state;
        self.parts.shared.map_state.store(state, Ordering::Release);
        if state.is_multiple_of(2) || self.offers.is_some_and(|at| now < at) {
            return false;
        }
        self.offers = None;
        match self.parts.processor.next_batch(MOVE_BUCKETS, MOVE_BYTES) {
            MoveStep::Nothing => false,
            MoveStep::Scanned => true,
            MoveStep::Batch(batch) => {
                self.parts.carrier.carry(batch);
                true
            }
        }
    }

    /// Ends clients that did not connect in time.
    fn expire(&mut self, now: Instant) {
        if self.expires.is_some_and(|at| now >= at) {
            self.expires =
                self.served.iter_mut().filter_map(|served| served.server.expire(now)).min();
        }
    }

    /// Executes what arrived over fabric.
    fn poll(&mut self) -> usize {
        let mut packets = 0;
        for served in &mut self.served {
            match served.server.poll(&mut self.parts.processor) {
                Ok(count) => packets += count,
                Err(error) => {
                    tracing::error!(%error, "a completion queue of the direct store failed");
                    served.failed = true;
                }
            }
        }
        packets
    }

    /// Local packets, datagrams, new clients, servers that failed; whether there was any.
    fn look_outside(&mut self) -> bool {
        let mut any = self.datagrams();
        while let Ok(delivery) = self.parts.deliveries.try_recv() {
            any = true;
            self.take(delivery);
        }
        for served in &mut self.served {
            // A device that is gone is let go with its last client.
            served.failed |= served.server.device().is_lost() && served.server.clients() == 0;
        }
        if self.served.iter().any(|served| served.failed) {
            for served in self.served.iter_mut().filter(|served| served.failed) {
                served.server.shut_down();
                let counters = served.server.counters();
                self.refused += counters.refused;
                self.ended += counters.ended;
                // Closing would not do: a peer may hold the descriptor open.
                let _ = self.poller.remove(served.server.event_descriptor());
            }
            self.served.retain(|served| !served.failed);
        }
        any
    }

    fn take(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Packet(local) => {
                let LocalPacket { packet, reply_limit, reply } = local;
                let began = Instant::now();
                let done = self.parts.processor.process(&packet, &mut self.reply, reply_limit);
                self.parts.shared.times.local.record_at(0, began.elapsed());
                reply(done.then(|| self.reply.clone()));
            }
            Delivery::Carried(state, carried) => {
                if !carried.note.is_empty() {
                    self.offers = Some(Instant::now() + OFFER_AGAIN);
                }
                self.parts.processor.batch_done(state, &carried.adopted, &carried.note);
            }
            Delivery::HeldUp(note) => self.parts.processor.batch_held_up(&note),
            Delivery::Fabric(client) => {
                let client = *client;
                let served = self
                    .served
                    .iter()
                    .position(|served| Arc::ptr_eq(served.server.device(), &client.device));
                let index = match served.map_or_else(|| self.serve(&client.device), Ok) {
                    Ok(index) => index,
                    Err(reason) => return (client.reply)(Err(reason)),
                };
                let (info, payload) =
                    self.served[index].server.accept(&client.peer, &client.payload);
                self.armed = false;
                let by = Instant::now() + self.parts.server.connect_timeout;
                self.expires = Some(self.expires.map_or(by, |at| at.min(by)));
                (client.reply)(Ok(FabricWelcome { info, payload }));
            }
        }
    }

    fn serve(&mut self, device: &Arc<dyn beeline_fabric::Device>) -> Result<usize, String> {
        let server = DirectServer::new(Arc::clone(device), self.parts.server)
            .map_err(|error| error.to_string())?;
        let token = self.next_token;
        self.poller
            .add(server.event_descriptor(), token, Interest::READ)
            .map_err(|error| error.to_string())?;
        self.next_token += 1;
        self.served.push(Served { server, token, failed: false });
        Ok(self.served.len() - 1)
    }

    fn datagrams(&mut self) -> bool {
        let Some(udp) = &self.parts.udp else { return false };
        self.packet.resize(LONGEST_DATAGRAM, 0);
        for taken in 0..DATAGRAMS {
            let Ok((length, from)) = udp.recv_from(&mut self.packet) else { return taken > 0 };
            let now = self.started.elapsed();
            // An answer that cannot be sent is one that was lost: the client asks again.
            match self.tokens.look(&self.packet[..length], from, now) {
                Datagram::Garbage => {}
                Datagram::Challenge(challenge) => {
                    let _ = udp.send_to(&challenge, from);
                }
                Datagram::Packet { token, packet } => {
                    if self.parts.processor.process(packet, &mut self.reply, UDP_REPLY_BYTES) {
                        self.answer.clear();
                        self.answer.extend(token.to_le_bytes());
                        self.answer.extend(&self.reply);
                        let _ = udp.send_to(&self.answer, from);
                    }
                }
            }
        }
        true
    }

    /// Asks for events; true when they had been asked for before and nothing came since.
    fn arm(&mut self) -> bool {
        if self.armed || self.served.is_empty() {
            return true;
        }
        for served in &mut self.served {
            if let Err(error) = served.server.arm() {
                tracing::error!(%error, "a completion queue of the direct store cannot be armed");
                served.failed = true;
            }
        }
        self.armed = true;
        false
    }

    fn sleep(&mut self, now: Instant) {
        self.sleeps += 1;
        let next = [self.expires, self.offers].into_iter().flatten().min();
        let limit = next.map(|at| at.saturating_duration_since(now));
        let events = match self.poller.wait(limit) {
            Ok(events) => events,
            Err(error) => {
                tracing::error!(%error, "epoll_wait failed in the direct store");
                std::thread::sleep(Duration::from_millis(100));
                return;
            }
        };
        self.armed = false;
        for index in 0..events {
            let token = self.poller.readiness(index).token;
            if token == WAKER {
                // Before the deliveries are taken: one that comes later wakes this thread again.
                self.parts.shared.waker.clear();
            }
            let served = self.served.iter_mut().find(|served| served.token == token);
            if let Some(served) = served
                && let Err(error) = served.server.acknowledge()
            {
                tracing::error!(%error, "cannot clear a fabric event of the direct store");
                served.failed = true;
            }
        }
        self.look_outside();
    }

    fn publish(&mut self) {
        let figures = &self.parts.shared.figures;
        let set = |figure: &AtomicU64, value: u64| figure.store(value, Ordering::Relaxed);
        let counters = self.parts.processor.counters();
        let table = self.parts.processor.table();
        let slabs = table.slabs().counters();
        let held = table.counters();
        set(&figures.pairs, held.pairs);
        set(&figures.pair_bytes, held.pair_bytes);
        set(&figures.chained_buckets, held.chained_buckets);
        set(&figures.allocated_bytes, slabs.allocated_bytes);
        set(&figures.slab_transfers, slabs.transfers);
        set(&figures.slab_waits, slabs.waits);
        set(&figures.slab_merges, self.parts.pools.merges());
        set(&figures.packets, counters.packets);
        set(&figures.operations, counters.operations);
        set(&figures.forwarded, counters.forwarded);
        set(&figures.write_backs, counters.write_backs);
        set(&figures.failed, counters.failed);
        let servers = || self.served.iter().map(|served| &served.server);
        set(&figures.clients, servers().map(|server| server.clients() as u64).sum());
        let refused: u64 = servers().map(|server| server.counters().refused).sum();
        let ended: u64 = servers().map(|server| server.counters().ended).sum();
        set(&figures.refused, self.refused + refused);
        set(&figures.ended, self.ended + ended);
        set(&figures.sleeps, self.sleeps);
        set(&figures.moved, counters.moved);
        set(&figures.adopted, counters.adopted);
    }
}
