//! The relay's state and its turn: completions, what is hot, what is due.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use beeline_fabric::{CompletionQueue, Device, FabricError, WorkCompletion};
use beeline_os::barrier;
use beeline_sockets::segment::{STATE_MATCHING, STATE_OPEN, Segment};

use crate::carry::Look;
use crate::connection::{Connection, Phase, Table};
use crate::guard;
use crate::holders::Watched;
use crate::link::{COMPLETIONS, Link, Stage, Ticket};
use crate::message::Record;
use crate::mirror::Mirror;
use crate::network::Network;
use crate::recall::Returned;
use crate::settings::{Counters, Refusal, Settings};
use crate::sleepy::Sleepy;

/// Completions taken at a time.
const COMPLETIONS_AT_A_TIME: usize = 64;

/// A device in use and its completion queue.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) queue: Rc<dyn CompletionQueue>,
}

/// What is known of a host's relay.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostState {
    /// It is being found or joined.
    pub(crate) is_dialling: bool,
    /// Not before then.
    pub(crate) retry_at: Duration,
    /// Until then its connections are the kernel's: a link would be the kernel's, too.
    pub(crate) over_tcp_until: Duration,
}

/// A relay, without its doors: one thread turns it.
#[derive(Debug)]
pub struct Core {
    pub(crate) settings: Settings,
    pub(crate) network: Box<dyn Network>,
    pub(crate) now: Duration,
    pub(crate) desks: Vec<Desk>,
    /// Links by place, with the generation of the place.
    pub(crate) links: Vec<(u16, Option<Box<Link>>)>,
    pub(crate) hosts: Vec<HostState>,
    pub(crate) table: Table,
    pub(crate) cookies: HashMap<u64, u32>,
    /// Ends that wait, by own and peer's address.
    pub(crate) waiting: HashMap<(SocketAddr, SocketAddr), u32>,
    pub(crate) watched: Watched,
    hot: Vec<u32>,
    /// Of the hot ones, those that wait for a completion.
    blocked: usize,
    /// Connections with something stored for the program since the last fence.
    pub(crate) touched: Vec<u32>,
    /// Connections that are called back.
    pub(crate) recalls: Vec<u32>,
    pub(crate) returned: VecDeque<Returned>,
    /// Connections that wait, or end: what time can change.
    pub(crate) passing: usize,
    pub(crate) swept_at: Duration,
    message: Vec<u8>,
    pub(crate) counters: Counters,
    completions: Vec<WorkCompletion>,
}

impl Core {
    /// A relay that carries nothing yet.
    #[must_use]
    pub fn new(settings: Settings, network: Box<dyn Network>) -> Self {
        let hosts = vec![HostState::default(); settings.hosts.len()];
        Self {
            settings,
            network,
            now: Duration::ZERO,
            desks: Vec::new(),
            links: Vec::new(),
            hosts,
            table: Table::default(),
            cookies: HashMap::new(),
            waiting: HashMap::new(),
            watched: Watched::default(),
            hot: Vec::new(),
            blocked: 0,
            touched: Vec::new(),
            recalls: Vec::new(),
            returned: VecDeque::new(),
            passing: 0,
            swept_at: Duration::ZERO,
            message: Vec::with_capacity(crate::message::MESSAGE_BYTES),
            counters: Counters::default(),
            completions: vec![WorkCompletion::EMPTY; COMPLETIONS_AT_A_TIME],
        }
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Its connections.
    pub fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.table.iter().map(|(_, connection)| connection)
    }

    /// Links to other relays that messages pass on.
    #[must_use]
    pub fn links_up(&self) -> usize {
        self.links().filter(|(_, link)| link.stage == Stage::Up).count()
    }

    pub(crate) fn links(&self) -> impl Iterator<Item = (usize, &Link)> {
        self.links.iter().enumerate().filter_map(|(at, (_, link))| Some((at, link.as_deref()?)))
    }

    pub(crate) fn link(&mut self, at: usize) -> Option<&mut Link> {
        self.links.get_mut(at)?.1.as_deref_mut()
    }

    /// The place of the link with this generation.
    pub(crate) fn link_name(&self, at: usize) -> u64 {
        let generation = self.links.get(at).map_or(0, |place| place.0);
        u64::from(generation) << 32 | at as u64
    }

    /// The link that [`Core::link_name`] named, if it is still there.
    pub(crate) fn link_named(&self, name: u64) -> Option<usize> {
        let at = (name & 0xffff_ffff) as usize;
        let place = self.links.get(at)?;
        (u64::from(place.0) == name >> 32 && place.1.is_some()).then_some(at)
    }

    /// Place of the host that has `address`.
    pub(crate) fn host_of(&self, address: IpAddr) -> Option<usize> {
        self.settings.hosts.iter().position(|host| host.addresses.contains(&address))
    }

    /// The device's desk; made when it is new.
    ///
    /// Errors: fabric's.
    pub(crate) fn desk(&mut self, device: &Arc<dyn Device>) -> Result<usize, FabricError> {
        let known = self.desks.iter().position(|desk| Arc::ptr_eq(&desk.device, device));
        if let Some(known) = known {
            return Ok(known);
        }
        let deepest = device.attributes().max_completion_queue_depth;
        let wanted = COMPLETIONS.saturating_mul(self.settings.most_links as u32);
        let queue = device.create_completion_queue(wanted.min(deepest))?;
        self.desks.push(Desk { device: Arc::clone(device), queue });
        Ok(self.desks.len() - 1)
    }

    /// Descriptors that become readable once [`Core::arm`] was called and there is something to do.
    pub fn event_descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.desks.iter().map(|desk| desk.queue.event_descriptor())
    }

    /// Takes in a program's end: its addresses, a copy of its socket, and the segment, which has the
    /// kernel's number of the socket for a name.
    ///
    /// Errors: [`Refusal`]; the connection then stays with the kernel.
    pub fn adopt(
        &mut self,
        (own, peer): (SocketAddr, SocketAddr),
        socket: OwnedFd,
        segment: Segment,
    ) -> Result<(), Refusal> {
        let cookie = segment.relayed();
        let mirror = Mirror::new(segment);
        let host = self.host_of(peer.ip()).filter(|_| mirror.is_open());
        let over_tcp =
            |host: usize| self.hosts.get(host).is_some_and(|state| self.now < state.over_tcp_until);
        let refusal = if host.is_none() {
            Some(Refusal::UnknownHost)
        } else if host.is_some_and(over_tcp) {
            self.counters.over_tcp += 1;
            Some(Refusal::OverTcp)
        } else if self.table.len() >= self.settings.most_connections {
            Some(Refusal::Full)
        } else if cookie.is_none_or(|cookie| self.cookies.contains_key(&cookie)) {
            Some(Refusal::NotOpen)
        } else {
            None
        };
        let (Some(host), Some(cookie), None) = (host, cookie, refusal) else {
            let _ = mirror.give_up(STATE_OPEN);
            return Err(refusal.unwrap_or(Refusal::NotOpen));
        };
        let asymmetric = u32::from(barrier::is_asymmetric());
        mirror.segment().own().signs.asymmetric.store(asymmetric, Ordering::Relaxed);
        mirror.arm(false);
        let connection = Connection {
            own,
            peer,
            cookie,
            host,
            mirror,
            socket: Some(socket),
            phase: Phase::Waiting,
            since: self.now,
            link: usize::MAX,
            far: 0,
            ground: None,
            outgoing: None,
            incoming: None,
            in_flight: 0,
            is_hot: false,
            news_at: self.now,
            has_nudged: false,
            is_nudged: false,
            stored: false,
            gave_room: false,
            holders: Vec::new(),
            last_word: None,
            recalling: None,
            sleepy: Sleepy::default(),
            moved: [0; 2],
        };
        let index = self.table.insert(connection);
        self.returned.retain(|past| past.cookie != cookie);
        self.cookies.insert(cookie, index);
        self.waiting.insert((own, peer), index);
        self.passing += 1;
        self.counters.adopted += 1;
        self.look_at_holders(index);
        self.seek(index);
        Ok(())
    }

    /// The connection named `cookie`.
    #[must_use]
    pub fn find(&self, cookie: u64) -> Option<&Connection> {
        self.table.get(*self.cookies.get(&cookie)?)
    }

    /// The memory of the connection named `cookie`, also where it went back to the kernel while somebody who is to
    /// have it was on the way.
    #[must_use]
    pub fn memory(&self, cookie: u64) -> Option<Arc<OwnedFd>> {
        let past = || self.returned.iter().find(|past| past.cookie == cookie);
        match self.find(cookie) {
            Some(connection) => connection.mirror.segment().mapping().descriptor(),
            None => past().map(|past| Arc::clone(&past.memory)),
        }
    }

    /// Ends that wait for the other relay.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.table.select(|one| !matches!(one.phase, Phase::Paired | Phase::Ending)).len()
    }

    /// A program rang for the connection named `cookie`.
    pub fn bell(&mut self, cookie: u64) {
        self.counters.bells += 1;
        if let Some(index) = self.cookies.get(&cookie).copied() {
            self.look_in(index);
        }
    }

    /// Bells may have been lost: every connection may have rung.
    pub fn bells_for_all(&mut self) {
        for index in self.table.select(|_| true) {
            self.look_in(index);
        }
    }

    /// What a bell can mean.
    fn look_in(&mut self, index: u32) {
        self.look_at_holders(index);
        let Some(connection) = self.table.get(index) else { return };
        match connection.phase {
            Phase::Waiting | Phase::Offered if connection.mirror.is_given_up() => {
                self.forget(index);
            }
            Phase::Paired => self.heat(index),
            _ => {}
        }
    }

    /// Looks at a connection in every turn from now on.
    pub(crate) fn heat(&mut self, index: u32) {
        let now = self.now;
        let Some(connection) = self.table.get_mut(index) else { return };
        connection.news_at = now;
        if connection.phase == Phase::Paired && !connection.is_hot {
            connection.is_hot = true;
            if !connection.is_nudged {
                connection.mirror.disarm();
            }
            self.hot.push(index);
        }
    }

    /// Takes a connection out: the kernel's connection is let go.
    pub(crate) fn forget(&mut self, index: u32) {
        self.stop_recall(index);
        let Some(mut connection) = self.table.remove(index) else { return };
        self.forget_holders(index, &connection);
        self.cookies.remove(&connection.cookie);
        let ends = (connection.own, connection.peer);
        if self.waiting.get(&ends) == Some(&index) {
            self.waiting.remove(&ends);
        }
        self.passing -= usize::from(connection.phase != Phase::Paired);
        if connection.phase != Phase::Waiting
            && let Some(link) = self.link(connection.link)
        {
            link.connections -= 1;
        }
        match connection.phase {
            Phase::Waiting | Phase::Offered => _ = connection.mirror.give_up(STATE_OPEN),
            Phase::Promised => _ = connection.mirror.give_up(STATE_MATCHING),
            Phase::Paired | Phase::Ending => {}
        }
        connection.let_go();
    }

    /// Moves a connection to another phase.
    pub(crate) fn enter(&mut self, index: u32, phase: Phase) {
        let now = self.now;
        let Some(connection) = self.table.get_mut(index) else { return };
        let before = connection.phase;
        connection.phase = phase;
        connection.since = now;
        // Until then its bytes are the kernel's, which carries them without us.
        if let (Phase::Paired, Some(socket)) = (phase, &connection.socket) {
            guard::mark(socket);
        }
        self.passing -= usize::from(before != Phase::Paired);
        self.passing += usize::from(phase != Phase::Paired);
    }

    /// One turn. True when something happened; else the caller may let it sleep.
    pub fn turn(&mut self, now: Duration) -> bool {
        self.now = now;
        self.counters.turns += 1;
        let mut busy = self.take_completions();
        self.wake_programs();
        busy |= self.carry_hot();
        busy |= self.advance_recalls();
        self.wake_programs();
        busy |= self.flush();
        if self.has_unheld() {
            self.attend_unheld();
        }
        if self.is_timed() {
            self.attend();
        }
        busy
    }

    /// What time it is, for who calls between two turns.
    pub fn set_now(&mut self, now: Duration) {
        self.now = now;
    }

    /// It carries nothing.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.table.len() == 0
    }

    /// Nothing is looked at in every turn but what waits for a completion: once armed, the fabric
    /// says when there is something to do.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let stuck = |link: &Link| link.is_due() && link.under_way() == 0;
        self.recalls.is_empty()
            && self.hot.len() == self.blocked
            && !self.links().any(|(_, link)| link.stage == Stage::Up && stuck(link))
    }

    /// Asks for events of the fabric. The caller turns once more before it sleeps.
    ///
    /// Errors: fabric's.
    pub fn arm(&self) -> Result<(), FabricError> {
        self.desks.iter().try_for_each(|desk| desk.queue.arm())
    }

    /// Takes the events back after a sleep.
    ///
    /// Errors: fabric's.
    pub fn acknowledge(&self) -> Result<(), FabricError> {
        self.desks.iter().try_for_each(|desk| desk.queue.acknowledge())
    }

    fn take_completions(&mut self) -> bool {
        let mut busy = false;
        for at in 0..self.desks.len() {
            let mut completions = std::mem::take(&mut self.completions);
            let polled = self.desks[at].queue.poll(&mut completions);
            if let Err(error) = &polled {
                // An overrun queue has broken its queue pairs.
                tracing::warn!(%error, "a completion queue failed");
                let on_it: Vec<_> = self
                    .links()
                    .filter(|(_, link)| link.desk == at)
                    .map(|(link, _)| link)
                    .collect();
                on_it.into_iter().for_each(|link| self.break_link(link));
            }
            let count = polled.unwrap_or(0);
            for completion in &completions[..count] {
                self.completed(completion);
            }
            self.completions = completions;
            busy |= count > 0;
        }
        busy
    }

    fn completed(&mut self, completion: &WorkCompletion) {
        let ticket = Ticket::of(completion.wr_id);
        let Some((generation, Some(link))) = self.links.get_mut(ticket.link) else { return };
        if *generation & 0x7fff != ticket.generation {
            return;
        }
        if !completion.is_success() {
            self.break_link(ticket.link);
            return;
        }
        if !ticket.is_receive {
            let table = &mut self.table;
            // A number that was given to another connection meanwhile: its count is off by one
            // message for a while, in the harmless direction.
            link.completed(ticket, |index| {
                if let Some(connection) = table.get_mut(index) {
                    connection.in_flight = connection.in_flight.saturating_sub(1);
                }
            });
            return;
        }
        let mut message = std::mem::take(&mut self.message);
        link.take(ticket, completion.length, &mut message);
        self.counters.received += 1;
        self.hear(ticket.link, &message);
        self.message = message;
    }

    /// After everything was stored: one fence, then a look whether the programs sleep.
    pub(crate) fn wake_programs(&mut self) {
        if self.touched.is_empty() {
            return;
        }
        // With the sleeper's `arm` and heavy fence: one of the two sees the other.
        fence(Ordering::SeqCst);
        let mut touched = std::mem::take(&mut self.touched);
        let mut sleepy = Vec::new();
        for index in touched.drain(..) {
            let Some(connection) = self.table.get_mut(index) else { continue };
            let (stored, room) = (connection.stored, connection.gave_room);
            if !connection.mirror.sleeps(stored, room) {
                (connection.stored, connection.gave_room) = (false, false);
                continue;
            }
            let (link, far) = (connection.link, connection.far);
            let record = if connection.mirror.signs_stored().switched_at == 0 {
                // The other program's kernel stream carries its bytes: no doorbell may be sent
                // there. The arms stay up until it has switched.
                if std::mem::replace(&mut connection.has_nudged, true) {
                    continue;
                }
                Record::Nudge
            } else {
                (connection.stored, connection.gave_room) = (false, false);
                let [received, given] = connection.mirror.take_down(stored, room);
                if !received && !given {
                    continue;
                }
                if received && connection.sleepy.rung_for() {
                    sleepy.push(index);
                }
                Record::Ring
            };
            if let Some(link) = self.link(link) {
                link.owe(far, record);
            }
        }
        self.touched = touched;
        sleepy.into_iter().for_each(|index| self.is_sleepy(index));
    }

    /// Notes that something was stored for the program.
    pub(crate) fn touch(&mut self, index: u32, stored: bool, room: bool) {
        if let Some(connection) = self.table.get_mut(index) {
            connection.stored |= stored;
            connection.gave_room |= room;
            self.touched.push(index);
        }
    }

    fn flush(&mut self) -> bool {
        let mut posted = 0;
        for (_, link) in &mut self.links {
            if let Some(link) = link {
                posted += link.flush();
            }
        }
        self.counters.messages += u64::from(posted);
        for at in 0..self.links.len() {
            if self.link(at).is_some_and(|link| link.is_broken()) {
                self.break_link(at);
            }
        }
        posted > 0
    }

    fn carry_hot(&mut self) -> bool {
        let (mut busy, mut blocked, mut at) = (false, 0, 0);
        let mut cooling = Vec::new();
        while let Some(index) = self.hot.get(at).copied() {
            let live = self.table.get(index).is_some_and(|one| one.is_hot);
            if !live {
                self.hot.swap_remove(at);
                continue;
            }
            let look = self.carry(index);
            busy |= look == Look::Progress;
            blocked += usize::from(look == Look::Blocked);
            let now = self.now;
            match self.table.get_mut(index) {
                Some(connection) if connection.phase == Phase::Paired => {
                    if look != Look::Nothing {
                        connection.news_at = now;
                    } else if now.saturating_sub(connection.news_at) >= self.settings.cools_after {
                        cooling.push(index);
                    }
                }
                Some(connection) => connection.is_hot = false,
                None => {}
            }
            at += 1;
        }
        if !cooling.is_empty() {
            self.cool(&cooling);
        }
        self.blocked = blocked;
        busy
    }

    /// Lets go of connections without news: they are armed, and looked at once more behind one
    /// fence for all of them.
    fn cool(&mut self, cooling: &[u32]) {
        for index in cooling {
            if let Some(connection) = self.table.get(*index) {
                connection.mirror.arm(connection.mirror.owes_credits());
            }
        }
        // With the program's light fence between its store and its look at the arm.
        barrier::heavy();
        for index in cooling {
            let look = self.carry(*index);
            let Some(connection) = self.table.get_mut(*index) else { continue };
            if look != Look::Nothing {
                if !connection.is_nudged {
                    connection.mirror.disarm();
                }
                connection.news_at = self.now;
            } else {
                connection.is_hot = false;
                self.counters.cooled += 1;
            }
        }
        let table = &self.table;
        self.hot.retain(|index| table.get(*index).is_some_and(|one| one.is_hot));
    }
}
