//! The links of a device, and who is woken for what arrives over them.
//!
//! A doorbell is latched: it rings once, then not again until the latch is opened. While everybody
//! concerned polls, the latch stays closed and a busy peer costs no interrupt. Who is about to
//! sleep opens it, then looks for what came before ([`NtbTransport::before_sleep`]); the library
//! does the same when it serves a ring and somebody may sleep. A window without a doorbell, or
//! whose peer cannot ring, is looked at by a timer, less and less often while nothing happens.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beeline_fabric::error::system;
use beeline_fabric::{ConnectInfo, DeviceAttributes, FabricError};
use beeline_fabric_engine::handshake::{Identity, Nonce};
use beeline_fabric_engine::now_ns;
use beeline_fabric_engine::stream::{Attention, Served, Stream, Transport};
use beeline_ntb::Side;
use beeline_ntb::handed::{Handed, Offered, Socket};
use beeline_ntb::shim::Disorder;
use beeline_os::SharedMemory;
use beeline_os::control_socket::ControlSocket;
use beeline_os::memory::MemoryObject;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::channel::{Channel, ChannelStream};
use crate::endpoint::Endpoint;
use crate::heap::Heap;
use crate::layout::Geometry;
use crate::link::{Link, NodeName};
use crate::window::Window;

const TOKEN_NUDGE: u64 = 0;
const TOKEN_TIMER: u64 = 1;
const TOKEN_SOCKET: u64 = 2;
const TOKEN_CALLER: u64 = 3;
const FIRST_LINK: u64 = 16;

/// Time between two signs of life.
const BEAT_NS: u64 = 250_000_000;
/// Time between two looks at a window without a doorbell: while something happens, in the end
/// while there are connections, and in the end while there are none.
const LOOK_NS: (u64, u64, u64) = (50_000, 5_000_000, 20_000_000);
/// Between two looks while the library is called every millisecond anyway.
const SPARED_LOOK_NS: u64 = 1_000_000;
/// Cables offered and not heard yet.
const MAX_CALLERS: usize = 64;
/// How long an offered cable may take to say what it is.
const CALLER_NS: u64 = 5_000_000_000;

/// A link among those of the device.
#[derive(Debug)]
struct Entry {
    token: u64,
    link: Arc<Link>,
    /// Who is expected at the other end; `None` for a fixed window.
    node: Option<NodeName>,
}

/// A cable that was offered and not answered yet.
#[derive(Debug)]
struct Offer {
    socket: ControlSocket,
    cable: Arc<Handed>,
    until_ns: u64,
}

#[derive(Debug)]
struct Links {
    entries: Vec<Entry>,
    callers: Vec<(ControlSocket, u64)>,
    offers: Vec<Offer>,
    next_token: u64,
    next_beat_ns: u64,
    /// When the timer fires; `u64::MAX` when it does not.
    timer_ns: u64,
    /// Time to the next look at windows without a doorbell.
    look_ns: u64,
}

/// The provider's half of the device.
#[derive(Debug)]
pub(crate) struct NtbTransport {
    attributes: DeviceAttributes,
    node: NodeName,
    /// Zero without a socket.
    key: Nonce,
    geometry: Geometry,
    silence: Duration,
    disorder: Option<Disorder>,
    heap: Option<Arc<Heap>>,
    socket: Option<Socket>,
    set: OwnedFd,
    nudge: OwnedFd,
    timer: OwnedFd,
    links: Mutex<Links>,
}

/// What a transport is made from.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) attributes: DeviceAttributes,
    pub(crate) node: NodeName,
    pub(crate) geometry: Geometry,
    pub(crate) silence: Duration,
    pub(crate) disorder: Option<Disorder>,
    /// Memory that peers write by themselves.
    pub(crate) heap: Option<Arc<Heap>>,
    /// Where cables are plugged in.
    pub(crate) socket: Option<Socket>,
    /// A fixed window, and which end this is.
    pub(crate) fixed: Option<(Arc<Window>, Side)>,
}

impl NtbTransport {
    pub(crate) fn new(setup: Setup) -> Result<Self, FabricError> {
        let set = epoll::create(CreateFlags::CLOEXEC).map_err(system("creating epoll"))?;
        let nudge = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(system("creating an eventfd"))?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )
        .map_err(system("creating a timer"))?;
        let key = setup.socket.as_ref().map_or([0; 16], Socket::key);
        let transport = Self {
            attributes: setup.attributes,
            node: setup.node,
            key,
            geometry: setup.geometry,
            silence: setup.silence,
            disorder: setup.disorder,
            heap: setup.heap,
            socket: setup.socket,
            set,
            nudge,
            timer,
            links: Mutex::new(Links {
                entries: Vec::new(),
                callers: Vec::new(),
                offers: Vec::new(),
                next_token: FIRST_LINK,
                next_beat_ns: 0,
                timer_ns: u64::MAX,
                look_ns: LOOK_NS.0,
            }),
        };
        transport.watch(transport.nudge.as_fd(), TOKEN_NUDGE)?;
        transport.watch(transport.timer.as_fd(), TOKEN_TIMER)?;
        if let Some(socket) = &transport.socket {
            transport.watch(socket.listener.as_fd(), TOKEN_SOCKET)?;
        }
        if let Some((window, side)) = setup.fixed {
            let mut links = transport.lock();
            transport.begin(&mut links, window, transport.geometry, side, None)?;
            transport.schedule(&mut links, Attention::Needed);
        }
        Ok(transport)
    }

    fn watch(&self, source: BorrowedFd<'_>, token: u64) -> Result<(), FabricError> {
        epoll::add(&self.set, source, EventData::new_u64(token), EventFlags::IN)
            .map_err(system("epoll_ctl"))
    }

    fn lock(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the library's thread from serving and from standing in, which begins with
    /// [`Transport::before_sleep`], for as long as the value lives.
    #[cfg(test)]
    pub(crate) fn hold_links(&self) -> impl Drop + '_ {
        self.lock()
    }

    /// Has the library serve.
    fn nudge(&self) {
        let _ = rustix::io::write(&self.nudge, &1_u64.to_ne_bytes());
    }

    /// Begins a life of a link over `window`.
    fn begin(
        &self,
        links: &mut Links,
        window: Arc<Window>,
        geometry: Geometry,
        side: Side,
        node: Option<NodeName>,
    ) -> Result<Arc<Link>, FabricError> {
        let token = links.next_token;
        links.next_token += 1;
        if let Some(doorbell) = window.doorbell() {
            self.watch(doorbell, token)?;
        }
        let link = Arc::new(Link::begin(window, geometry, side, self.node, self.heap.clone())?);
        links.entries.push(Entry { token, link: Arc::clone(&link), node });
        Ok(link)
    }

    /// What the emulation does to the next cable's posted writes.
    fn disorder(&self, links: &Links) -> Option<Disorder> {
        let disorder = self.disorder?;
        Some(Disorder { seed: disorder.seed.wrapping_add(links.next_token), ..disorder })
    }

    // ---- serving ----

    fn take_events(&self, links: &mut Links) {
        let nothing = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut events = [nothing; 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(&self.set, &mut events, Some(&now)).unwrap_or(0);
        for event in &events[..count] {
            match event.data.u64() {
                TOKEN_NUDGE => {
                    let _ = rustix::io::read(&self.nudge, &mut [0_u8; 8]);
                }
                TOKEN_TIMER => {
                    let _ = rustix::io::read(&self.timer, &mut [0_u8; 8]);
                    links.timer_ns = u64::MAX;
                }
                TOKEN_SOCKET => self.accept(links),
                TOKEN_CALLER => {}
                token => {
                    let entry = links.entries.iter().find(|entry| entry.token == token);
                    if let Some(entry) = entry {
                        entry.link.window().hush();
                    }
                }
            }
        }
    }

    fn accept(&self, links: &mut Links) {
        let Some(socket) = &self.socket else { return };
        for _ in 0..MAX_CALLERS {
            let Ok(Some(caller)) = socket.listener.accept() else { return };
            if links.callers.len() >= MAX_CALLERS {
                links.callers.remove(0);
            }
            if self.watch(caller.as_fd(), TOKEN_CALLER).is_ok() {
                links.callers.push((caller, now_ns() + CALLER_NS));
            }
        }
    }

    /// Cables offered by callers become links.
    fn hear(&self, links: &mut Links) {
        let Some(socket) = &self.socket else { return };
        let now = now_ns();
        links
            .offers
            .retain(|offer| now < offer.until_ns && !offer.cable.hear_welcome(&offer.socket));
        for (caller, until_ns) in std::mem::take(&mut links.callers) {
            let bytes = |note| Geometry::from_code(note).map(Geometry::window_bytes);
            match socket.hear(&caller, bytes, self.disorder(links)) {
                Ok(None) if now < until_ns => links.callers.push((caller, until_ns)),
                Ok(None) => {}
                Ok(Some(Offered { cable, note, name })) => {
                    Socket::welcome(&caller, self.heap.as_deref().map(Heap::descriptor));
                    let Some(geometry) = Geometry::from_code(note) else { continue };
                    let window = Arc::new(Window::from(Arc::new(cable)));
                    let begun = self.begin(links, window, geometry, Side::Second, Some(name));
                    if let Err(error) = begun {
                        tracing::warn!(%error, "a cable was not taken");
                    }
                }
                Err(error) => tracing::debug!(%error, "a caller without a cable"),
            }
        }
    }

    /// Drops links whose life is over; a fixed window begins another.
    fn bury(&self, links: &mut Links) {
        let (over, alive): (Vec<_>, Vec<_>) =
            links.entries.drain(..).partition(|entry| entry.link.is_down());
        links.entries = alive;
        for Entry { link, node, .. } in over {
            if let Some(doorbell) = link.window().doorbell() {
                let _ = epoll::delete(&self.set, doorbell);
            }
            if node.is_none() {
                let window = Arc::clone(link.window_handle());
                let (geometry, side) = (link.geometry(), link.side());
                if let Err(error) = self.begin(links, window, geometry, side, None) {
                    tracing::warn!(%error, "the link stays down");
                }
            }
        }
    }

    /// Sets the timer for the next sign of life and the next look.
    fn schedule(&self, links: &mut Links, attention: Attention) {
        let now = now_ns();
        let used = links.entries.iter().any(|entry| entry.link.is_used());
        let mute = links.entries.iter().any(|entry| !entry.link.is_rung());
        let fixed = links.entries.iter().any(|entry| entry.node.is_none());
        let mut next = u64::MAX;
        if used {
            next = links.next_beat_ns.max(now + 1);
        }
        if fixed {
            // However it rings: a peer that begins anew, or is told again what was lost.
            next = next.min(now + BEAT_NS);
        }
        if mute {
            let look = match attention {
                Attention::Needed => links.look_ns,
                Attention::Spared => SPARED_LOOK_NS,
            };
            next = next.min(now + look);
        }
        if !links.callers.is_empty() || !links.offers.is_empty() {
            next = next.min(now + CALLER_NS);
        }
        if next == u64::MAX || (links.timer_ns <= next && links.timer_ns > now) {
            return;
        }
        links.timer_ns = next;
        let it_value = Timespec {
            tv_sec: i64::try_from(next / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (next % 1_000_000_000) as _,
        };
        let spec = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &spec) {
            tracing::warn!(%error, "the timer could not be set");
        }
    }
}

impl Transport for NtbTransport {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    fn serve(
        &self,
        attention: &dyn Fn() -> Attention,
        accepted: &mut Vec<Box<dyn Stream>>,
    ) -> Served {
        let links = &mut *self.lock();
        self.take_events(links);
        self.hear(links);
        // After the rings were taken: who begins to sleep from here on opens the latch itself.
        let attention = attention();
        let now = now_ns();
        let beat = now >= links.next_beat_ns;
        if beat {
            links.next_beat_ns = now + BEAT_NS;
        }
        let (mut channels, mut busy, mut used) = (Vec::new(), false, false);
        for Entry { link, .. } in &links.entries {
            if attention == Attention::Needed {
                link.window().rearm();
            }
            let over = link.look().or_else(|| if beat { link.beat(self.silence) } else { None });
            if let Some(why) = over {
                link.end(why);
            }
            link.sweep(&mut channels);
            used |= link.is_used();
            if attention == Attention::Needed {
                busy |= link.announce();
            }
        }
        let slowest = if used { LOOK_NS.1 } else { LOOK_NS.2 };
        busy |= !channels.is_empty();
        links.look_ns =
            if busy { LOOK_NS.0 } else { (links.look_ns + links.look_ns / 4).min(slowest) };
        self.bury(links);
        self.schedule(links, attention);
        accepted.extend(
            channels
                .into_iter()
                .map(|channel| -> Box<dyn Stream> { Box::new(ChannelStream::new(channel)) }),
        );
        Served::Done
    }

    fn before_sleep(&self) {
        let mut links = self.lock();
        let mut serve = false;
        for Entry { link, .. } in &links.entries {
            link.window().rearm();
            serve |= link.wants_service();
            link.announce();
        }
        if links.entries.iter().any(|entry| !entry.link.is_rung()) {
            links.look_ns = LOOK_NS.0;
            self.schedule(&mut links, Attention::Needed);
        }
        drop(links);
        if serve {
            self.nudge();
        }
    }

    fn connect_info(&self, &(qp_num, nonce): &Identity) -> ConnectInfo {
        Endpoint { node: self.node, key: self.key, qp_num, nonce }.encode()
    }

    fn peer(&self, info: &ConnectInfo) -> Result<Identity, FabricError> {
        let endpoint = Endpoint::decode(info)?;
        Ok((endpoint.qp_num, endpoint.nonce))
    }

    fn dial(&self, info: &ConnectInfo) -> Result<Box<dyn Stream>, FabricError> {
        let peer = Endpoint::decode(info)?;
        let links = &mut *self.lock();
        // The peer may have begun anew since the last look, and mean its new life.
        for Entry { link, .. } in &links.entries {
            if let Some(why) = link.look() {
                link.end(why);
            }
        }
        self.bury(links);
        let reaches = |entry: &&Entry| {
            entry.link.release();
            entry.node.is_none_or(|node| node == peer.node) && entry.link.reserve()
        };
        let link = match links.entries.iter().find(reaches) {
            Some(entry) => Arc::clone(&entry.link),
            None if self.socket.is_some() => {
                let memory = self.heap.as_deref().map(Heap::descriptor);
                let size = (self.geometry.code(), self.geometry.window_bytes());
                let key = (&peer.node, &peer.key);
                let (cable, socket) =
                    Handed::offer(key, size, &self.node, memory, self.disorder(links))
                        .map_err(system("plugging in a cable"))?;
                let cable = Arc::new(cable);
                if let Some(socket) = socket {
                    self.watch(socket.as_fd(), TOKEN_CALLER)?;
                    let until_ns = now_ns() + CALLER_NS;
                    links.offers.push(Offer { socket, cable: Arc::clone(&cable), until_ns });
                }
                let window = Arc::new(Window::from(cable));
                let link =
                    self.begin(links, window, self.geometry, Side::First, Some(peer.node))?;
                let promised = link.reserve();
                assert!(promised, "a fresh link has partitions");
                link
            }
            None => {
                let limit = self.geometry.partitions() as u64 / 2;
                let (what, requested) = ("connections over one window", limit + 1);
                return Err(FabricError::Limit { what, requested, limit });
            }
        };
        let channel = Channel::dialled(&link, peer.node).map_err(|error| {
            link.withdraw();
            system("creating an eventfd")(error)
        })?;
        link.wait_for_partition(&channel);
        self.nudge();
        Ok(Box::new(ChannelStream::new(channel)))
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let in_window = self.heap.as_ref().and_then(|heap| heap.allocate(length_bytes));
        if let Some(memory) = in_window {
            return Ok(Arc::new(memory));
        }
        let memory = SharedMemory::allocate("beeline-ntb", length_bytes).map_err(|error| {
            FabricError::System { action: "allocating memory", source: error.into() }
        })?;
        Ok(Arc::new(memory))
    }
}

impl Drop for NtbTransport {
    fn drop(&mut self) {
        for Entry { link, .. } in &self.lock().entries {
            link.end("the device is closed");
        }
    }
}
