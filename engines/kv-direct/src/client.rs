//! The client library: one logical map over several servers and their processors.
//!
//! A key's server is found by consistent hashing, its processor by another hash. Operations are packed
//! into as few packets as their order allows, all links work at once, and results are handed out with
//! the index of their request.
//!
//! The servers may be told of a map ([`crate::map`]), which changes when a server joins or leaves. A client
//! learns it from any of them, and again when one refuses a key. What was refused is asked again, in
//! waves: in a wave all operations of one key go to one server, one packet at a time for each link, and a
//! link that refused something sends no more in that wave. While keys move, or a server of the map does not
//! know it yet, all is done in waves.
//!
//! Invariant: operations on one key are executed in the order in which they were given. Outside of waves
//! many packets are under way; there all servers know a map, and one that refuses a key of an older map
//! refuses it from then on.
//!
//! Source: spec/kv-direct.md 2, 5.5, 6.1.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::{Duration, Instant};

use crate::function::{Width, number};
use crate::link::{Link, LinkError};
use crate::map::{MapReport, ServerMap};
use crate::membership;
use crate::packet::{Kind, PacketWriter, Request, Status};
use crate::ring::{HashRing, address, processor_of};

/// Opens links; the program's edge knows the fabric's providers.
pub trait Connect {
    /// A link to a processor of `server`, and how many processors it has.
    ///
    /// Errors: [`LinkError`].
    fn connect(&mut self, server: &str, processor: u32) -> Result<(Link, u32), LinkError>;
}

/// Why an operation has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectClientError {
    /// There is no server.
    #[error("the map has no server")]
    NoServer,
    /// A link failed.
    #[error("{server}: {source}")]
    Link {
        /// Which server's.
        server: String,
        /// Why.
        #[source]
        source: LinkError,
    },
    /// The server refused.
    #[error("{}", explain(*status))]
    Refused {
        /// How.
        status: Status,
    },
    /// Its key did not come to rest in the time given.
    #[error(
        "keys are being moved between servers, and {server} did not answer for one within {limit:?}: \
         ask again; `beeline direct servers` says what holds the move up"
    )]
    Moving {
        /// The server that was asked last.
        server: String,
        /// The time given.
        limit: Duration,
    },
    /// A server does not know the map that the others know.
    #[error(
        "{server} does not know the map it is a server of, as if it was started anew: its pairs are \
         lost; `beeline direct join` takes it in again"
    )]
    Forgot {
        /// Which.
        server: String,
    },
    /// An operation about the map.
    #[error("operations about the map go to servers, not to keys")]
    Control,
    /// Key or value is longer than a packet can say.
    #[error("a key has 1 to 255 bytes and a value at most 2044; this pair has {key} and {value}")]
    TooLong {
        /// Bytes of the key.
        key: usize,
        /// Bytes of the value.
        value: usize,
    },
}

fn explain(status: Status) -> &'static str {
    match status {
        Status::Ok => "done",
        Status::NotFound => "the key is not there",
        Status::OutOfMemory => "the store's memory is full; delete pairs or raise direct-memory",
        Status::TooLong => "the pair is too long: key 255 bytes, both together 2044",
        Status::Malformed => "the server did not understand the packet",
        Status::UnknownFunction => "the server has no such function for elements of this width",
        Status::LengthMismatch => "value and parameter have lengths that do not fit each other",
        Status::Moved => "the key belongs to another server of the map",
        Status::Busy => "the key is being moved to another server; ask again",
        Status::Conflict => "the map is another than was thought",
    }
}

/// How long an operation on a key that is being moved is asked again, where nothing else is said.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest pause between two waves.
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// See the module's documentation. Stays on its thread.
pub struct DirectClient {
    connect: Box<dyn Connect>,
    route: Route,
    /// Of both rings.
    servers: Vec<Server>,
    spin: Duration,
    patience: Duration,
    /// Operations refused in this call, by their indices.
    again: Vec<(u32, Status)>,
}

/// Which server a key's operations go to.
struct Route {
    map: ServerMap,
    /// By place in `map.old`, and in `map.ring`: the place in `servers`.
    old: Vec<u32>,
    ring: Vec<u32>,
}

impl Route {
    #[inline]
    fn first(&self, key: &[u8]) -> Option<usize> {
        if self.map.is_moving() {
            return Some(self.old[self.map.old.server_of(key)?] as usize);
        }
        self.next(key)
    }

    fn next(&self, key: &[u8]) -> Option<usize> {
        Some(self.ring[self.map.ring.server_of(key)?] as usize)
    }
}

struct Server {
    name: String,
    /// One to each processor; none where it has yet to be connected to.
    lanes: Vec<Lane>,
    /// Every processor knew a map when it was asked last, after the lanes were connected. One that knows none
    /// refuses all keys, and may be told at any moment: then it executes what is still under way to it.
    told: bool,
}

/// A link with the packet that is being filled and the requests whose results are awaited.
struct Lane {
    link: Link,
    packet: PacketWriter,
    /// Indices of the requests in `packet`.
    filling: Vec<u32>,
    /// By slot: indices of the requests under way.
    awaited: Vec<Vec<u32>>,
}

impl Lane {
    fn new(link: Link, state: u32) -> Self {
        let mut packet = link.packet();
        packet.set_state(state);
        Self { packet, link, filling: Vec::new(), awaited: Vec::new() }
    }
}

impl fmt::Debug for DirectClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectClient").field("map", &self.route.map).finish_non_exhaustive()
    }
}

/// Receives one result: index of the request, status, bytes.
pub type OnResult<'a> = &'a mut dyn FnMut(usize, Status, Option<&[u8]>);

impl DirectClient {
    /// Connects to every server of the map that these servers belong to; where they were told of none,
    /// they are the map.
    ///
    /// Errors: [`DirectClientError`] of the first that cannot be reached.
    pub fn connect(
        servers: impl IntoIterator<Item = String>,
        connect: Box<dyn Connect>,
    ) -> Result<Self, DirectClientError> {
        let ring = HashRing::new(servers);
        if ring.servers().is_empty() {
            return Err(DirectClientError::NoServer);
        }
        let map = ServerMap { ring, ..ServerMap::default() };
        let mut client = Self {
            connect,
            route: Route { map: ServerMap::default(), old: Vec::new(), ring: Vec::new() },
            servers: Vec::new(),
            spin: Duration::from_micros(50),
            patience: PATIENCE,
            again: Vec::new(),
        };
        client.adopt(map);
        client.learn()?;
        client.complete()?;
        Ok(client)
    }

    /// How long a call polls before it sleeps. Default 50 us.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// How long an operation on a key that is being moved is asked again. Default 5 s.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The servers: those that keys belong to, or will belong to.
    #[must_use]
    pub fn ring(&self) -> &HashRing {
        &self.route.map.ring
    }

    /// The state of the map it knows; 0 where its servers were told of none.
    #[must_use]
    pub fn state(&self) -> u32 {
        self.route.map.state
    }

    fn failed(&self, server: usize, source: LinkError) -> DirectClientError {
        DirectClientError::Link { server: self.servers[server].name.clone(), source }
    }

    /// Takes a map; links to servers of it that are connected are kept.
    fn adopt(&mut self, map: ServerMap) {
        let mut kept = std::mem::take(&mut self.servers);
        let mut place = |name: &String| {
            let same = |server: &Server| address(&server.name) == address(name);
            if let Some(at) = self.servers.iter().position(same) {
                return at as u32;
            }
            let kept = kept.iter().position(same).map(|at| kept.swap_remove(at));
            let (lanes, told) = kept.map(|server| (server.lanes, server.told)).unwrap_or_default();
            self.servers.push(Server { name: name.clone(), lanes, told });
            self.servers.len() as u32 - 1
        };
        let old = if map.is_moving() { map.old.servers() } else { &[] };
        let (old, ring) =
            (old.iter().map(&mut place).collect(), map.ring.servers().iter().map(place).collect());
        for lane in self.servers.iter_mut().flat_map(|server| &mut server.lanes) {
            lane.packet.set_state(map.state);
        }
        self.route = Route { map, old, ring };
    }

    /// Asks the servers for the latest map and takes it: all of them where none is told of one, else one
    /// that answers is enough.
    fn learn(&mut self) -> Result<(), DirectClientError> {
        let mut first = None;
        for server in 0..self.servers.len() {
            match self.ask(server) {
                Ok(report) if report.map.state > self.state() => {
                    self.adopt(ServerMap { me: String::new(), ..report.map });
                    return Ok(());
                }
                // It knows what this client knows.
                Ok(report) if report.map.state > 0 => return Ok(()),
                Ok(_) => {}
                Err(error) => first = first.or(Some(error)),
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// What the first processor of a server says of the map.
    fn ask(&mut self, server: usize) -> Result<MapReport, DirectClientError> {
        self.lanes(server)?;
        let asked = membership::report(&mut self.servers[server].lanes[0].link);
        asked.map_err(|source| self.failed(server, source))
    }

    /// Connects to all processors of a server, if that is to be done.
    fn lanes(&mut self, server: usize) -> Result<(), DirectClientError> {
        let known = &mut self.servers[server];
        if !known.lanes.is_empty() && !known.lanes.iter_mut().any(|lane| lane.link.broke()) {
            return Ok(());
        }
        let (name, state) = (known.name.clone(), self.state());
        self.servers[server].lanes.clear();
        self.servers[server].told = false;
        let (first, processors) =
            self.connect.connect(&name, 0).map_err(|source| self.failed(server, source))?;
        let mut lanes = vec![Lane::new(first, state)];
        for processor in 1..processors {
            let (link, _) = self
                .connect
                .connect(&name, processor)
                .map_err(|source| self.failed(server, source))?;
            lanes.push(Lane::new(link, state));
        }
        self.servers[server].lanes = lanes;
        Ok(())
    }

    /// Connects to every server of the map. One that cannot be reached may have left it.
    fn complete(&mut self) -> Result<(), DirectClientError> {
        let mut server = 0;
        while server < self.servers.len() {
            match self.lanes(server).and_then(|()| self.hear(server)) {
                Ok(()) => server += 1,
                Err(error) => {
                    let known = self.state();
                    if known == 0 || self.learn().is_err() || self.state() == known {
                        return Err(error);
                    }
                    server = 0;
                }
            }
        }
        Ok(())
    }

    /// Asks a server that may know no map whether it does by now.
    fn hear(&mut self, server: usize) -> Result<(), DirectClientError> {
        if self.state() == 0 || self.servers[server].told {
            return Ok(());
        }
        let mut told = true;
        for lane in 0..self.servers[server].lanes.len() {
            let asked = membership::report(&mut self.servers[server].lanes[lane].link);
            told &= asked.map_err(|source| self.failed(server, source))?.map.state > 0;
        }
        self.servers[server].told = told;
        Ok(())
    }

    /// Executes the requests and hands out their results; not in order across keys.
    ///
    /// Errors: [`DirectClientError::Link`]: results not handed out by then are not known; the next
    /// call connects anew. [`DirectClientError::Moving`], [`DirectClientError::Forgot`]: requests without a
    /// result were not executed. [`DirectClientError::TooLong`], [`DirectClientError::Control`]: nothing
    /// was sent.
    pub fn execute(
        &mut self,
        requests: &[Request<'_>],
        on_result: OnResult<'_>,
    ) -> Result<(), DirectClientError> {
        for request in requests {
            let (key, value) = (request.key.len(), request.value.len());
            if !(1..=255).contains(&key) || value > crate::table::PAIR_LIMIT {
                return Err(DirectClientError::TooLong { key, value });
            }
            if request.kind.is_control() {
                return Err(DirectClientError::Control);
            }
        }
        self.complete()?;
        self.again.clear();
        let untold = self.state() > 0 && self.servers.iter().any(|server| !server.told);
        let mut outcome = if self.route.map.is_moving() || untold {
            let all: Vec<_> =
                (0..requests.len() as u32).map(|index| (index, Status::Busy)).collect();
            self.wave(&all, requests, &HashSet::new(), on_result)
        } else {
            self.run(requests, on_result)
        };
        if outcome.is_ok() && !self.again.is_empty() {
            outcome = self.waves(requests, on_result);
        }
        if outcome.is_err() {
            // What the lanes had under way belongs to this call: none of it may be taken for a result
            // of the next, which connects anew.
            for lane in self.servers.iter_mut().flat_map(|server| &mut server.lanes) {
                lane.link.abandon();
                lane.packet.clear();
                lane.filling.clear();
                lane.awaited.clear();
            }
        }
        outcome
    }

    fn run(
        &mut self,
        requests: &[Request<'_>],
        on_result: OnResult<'_>,
    ) -> Result<(), DirectClientError> {
        for (index, request) in requests.iter().enumerate() {
            let server = self.route.first(request.key).ok_or(DirectClientError::NoServer)?;
            self.add(server, index, request, on_result)?;
        }
        for server in 0..self.servers.len() {
            for processor in 0..self.servers[server].lanes.len() {
                self.flush(server, processor, on_result)?;
            }
        }
        for server in 0..self.servers.len() {
            for processor in 0..self.servers[server].lanes.len() {
                while self.servers[server].lanes[processor].link.outstanding() > 0 {
                    self.wait(server, processor, on_result)?;
                }
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        server: usize,
        index: usize,
        request: &Request<'_>,
        on_result: OnResult<'_>,
    ) -> Result<(), DirectClientError> {
        let processors = self.servers[server].lanes.len() as u32;
        let processor = processor_of(request.key, processors) as usize;
        if !self.servers[server].lanes[processor].packet.push(request) {
            self.flush(server, processor, on_result)?;
            let pushed = self.servers[server].lanes[processor].packet.push(request);
            assert!(pushed, "an empty packet holds any request");
        }
        self.servers[server].lanes[processor].filling.push(index as u32);
        Ok(())
    }

    /// Asks again for what was refused, until all of it has its result.
    fn waves(
        &mut self,
        requests: &[Request<'_>],
        on_result: OnResult<'_>,
    ) -> Result<(), DirectClientError> {
        let until = Instant::now() + self.patience;
        let mut pause = Duration::from_micros(20);
        // Keys that the server of the ring that was does not have.
        let mut gone: HashSet<&[u8]> = HashSet::new();
        while !self.again.is_empty() {
            let mut refused = std::mem::take(&mut self.again);
            refused.sort_unstable_by_key(|(index, _)| *index);
            let server = self.refuser(&refused, requests, &gone)?;
            let known = self.state();
            let theirs = self.ask(server)?.map;
            if theirs.state > known {
                self.adopt(ServerMap { me: String::new(), ..theirs });
                self.complete()?;
                gone.clear();
            } else if theirs.state == 0 && known > 0 && !self.is_yet_to_be_told(server) {
                let server = self.servers[server].name.clone();
                return Err(DirectClientError::Forgot { server });
            } else if theirs.state == known && self.route.map.is_moving() {
                let moved = refused.iter().filter(|(_, status)| *status == Status::Moved);
                let before = gone.len();
                gone.extend(moved.map(|(index, _)| requests[*index as usize].key));
                if gone.len() > before {
                    pause = Duration::from_micros(20);
                }
            }
            if Instant::now() >= until {
                let server = self.servers[server].name.clone();
                return Err(DirectClientError::Moving { server, limit: self.patience });
            }
            if pause > Duration::from_micros(20) {
                std::thread::sleep(pause);
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            self.wave(&refused, requests, &gone, on_result)?;
        }
        Ok(())
    }

    /// Whether a server that knows no map may be about to be told of the one this client knows: the first
    /// ever, or the one with which it joins.
    fn is_yet_to_be_told(&self, server: usize) -> bool {
        let map = &self.route.map;
        let joins = map.old.position(&self.servers[server].name).is_none();
        map.is_moving() && (map.state == 1 || joins)
    }

    /// Where the operations of a key go in a wave.
    fn target(&self, key: &[u8], gone: &HashSet<&[u8]>) -> Result<usize, DirectClientError> {
        let server = if gone.contains(key) { self.route.next(key) } else { self.route.first(key) };
        server.ok_or(DirectClientError::NoServer)
    }

    /// The server that refused the first of these.
    fn refuser(
        &self,
        refused: &[(u32, Status)],
        requests: &[Request<'_>],
        gone: &HashSet<&[u8]>,
    ) -> Result<usize, DirectClientError> {
        let first = refused.iter().find(|(_, status)| *status == Status::Moved);
        let (index, _) = first.or(refused.first()).ok_or(DirectClientError::NoServer)?;
        self.target(requests[*index as usize].key, gone)
    }

    fn wave(
        &mut self,
        refused: &[(u32, Status)],
        requests: &[Request<'_>],
        gone: &HashSet<&[u8]>,
        on_result: OnResult<'_>,
    ) -> Result<(), DirectClientError> {
        // By lane: those of the wave, in their order.
        let mut queues: HashMap<(usize, usize), Vec<(u32, Status)>> = HashMap::new();
        for &(index, status) in refused {
            let key = requests[index as usize].key;
            let server = self.target(key, gone)?;
            let processors = self.servers[server].lanes.len() as u32;
            let lane = (server, processor_of(key, processors) as usize);
            queues.entry(lane).or_default().push((index, status));
        }
        for ((server, processor), queue) in queues {
            let mut left = queue.into_iter().peekable();
            while left.peek().is_some() {
                let before = self.again.len();
                let lane = &mut self.servers[server].lanes[processor];
                while let Some((index, _)) = left.peek()
                    && lane.packet.push(&requests[*index as usize])
                {
                    lane.filling.push(*index);
                    left.next();
                }
                self.flush(server, processor, on_result)?;
                while self.servers[server].lanes[processor].link.outstanding() > 0 {
                    self.wait(server, processor, on_result)?;
                }
                if self.again.len() > before {
                    // What was refused comes before the rest, which was not asked in this wave.
                    self.again.extend(left.by_ref().map(|(index, _)| (index, Status::Busy)));
                }
            }
        }
        Ok(())
    }

    /// Sends the packet that is being filled.
    fn flush(
        &mut self,
        server: usize,
        processor: usize,
        on_result: OnResult<'_>,
    ) -> Result<(), DirectClientError> {
        if self.servers[server].lanes[processor].filling.is_empty() {
            return Ok(());
        }
        while self.servers[server].lanes[processor].link.room() == 0 {
            self.wait(server, processor, on_result)?;
        }
        let lane = &mut self.servers[server].lanes[processor];
        let sent = lane.link.submit(&mut lane.packet);
        let slot = match sent {
            Ok(slot) => usize::from(slot),
            Err(source) => return Err(self.failed(server, source)),
        };
        if lane.awaited.len() <= slot {
            lane.awaited.resize_with(slot + 1, Vec::new);
        }
        lane.awaited[slot].clear();
        std::mem::swap(&mut lane.awaited[slot], &mut lane.filling);
        Ok(())
    }

    fn wait(
        &mut self,
        server: usize,
        processor: usize,
        on_result: OnResult<'_>,
    ) -> Result<(), DirectClientError> {
        let spin = self.spin;
        let again = &mut self.again;
        let Lane { link, awaited, .. } = &mut self.servers[server].lanes[processor];
        let waited = link.wait(spin, |slot, results| {
            let requests = awaited.get(usize::from(slot)).map_or(&[][..], Vec::as_slice);
            for (index, (status, bytes)) in requests.iter().zip(results) {
                if status.is_elsewhere() {
                    again.push((*index, status));
                } else {
                    on_result(*index as usize, status, bytes);
                }
            }
        });
        waited.map(drop).map_err(|source| self.failed(server, source))
    }

    /// One request; its bytes, where it has some.
    ///
    /// Errors: [`DirectClientError`]; a missing key is `Refused` with [`Status::NotFound`].
    pub fn one(&mut self, request: Request<'_>) -> Result<Option<Vec<u8>>, DirectClientError> {
        let mut result = (Status::Malformed, None);
        self.execute(&[request], &mut |_, status, bytes| {
            result = (status, bytes.map(<[u8]>::to_vec));
        })?;
        match result {
            (Status::Ok, bytes) => Ok(bytes),
            (status, _) => Err(DirectClientError::Refused { status }),
        }
    }

    fn maybe(
        outcome: Result<Option<Vec<u8>>, DirectClientError>,
    ) -> Result<Option<Vec<u8>>, DirectClientError> {
        match outcome {
            Err(DirectClientError::Refused { status: Status::NotFound }) => Ok(None),
            outcome => outcome,
        }
    }

    /// The value of a key; `None` where it is absent.
    ///
    /// Errors: [`DirectClientError`].
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, DirectClientError> {
        Self::maybe(self.one(Request::get(key)))
    }

    /// Stores a pair.
    ///
    /// Errors: [`DirectClientError`].
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), DirectClientError> {
        self.one(Request::put(key, value)).map(drop)
    }

    /// Deletes a key; whether it was there.
    ///
    /// Errors: [`DirectClientError`].
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, DirectClientError> {
        match self.one(Request::delete(key)) {
            Err(DirectClientError::Refused { status: Status::NotFound }) => Ok(false),
            outcome => outcome.map(|_| true),
        }
    }

    /// Adds to an 8-byte number, wrapping; the number before. `None` where the key is absent.
    ///
    /// Errors: [`DirectClientError`].
    pub fn fetch_and_add(&mut self, key: &[u8], by: u64) -> Result<Option<u64>, DirectClientError> {
        let by = by.to_le_bytes();
        let request =
            Request::with_function(Kind::UpdateScalar, key, number::ADD, Width::Eight, &by);
        Ok(Self::maybe(self.one(request))?.and_then(|bytes| as_number(&bytes)))
    }

    /// Stores `new` in an 8-byte number that is `expected`; the number before. `None` where the key
    /// is absent.
    ///
    /// Errors: [`DirectClientError`].
    pub fn compare_and_swap(
        &mut self,
        key: &[u8],
        expected: u64,
        new: u64,
    ) -> Result<Option<u64>, DirectClientError> {
        let mut both = [0; 16];
        both[..8].copy_from_slice(&expected.to_le_bytes());
        both[8..].copy_from_slice(&new.to_le_bytes());
        let number = number::COMPARE_AND_SWAP;
        let request = Request::with_function(Kind::UpdateScalar, key, number, Width::Eight, &both);
        Ok(Self::maybe(self.one(request))?.and_then(|bytes| as_number(&bytes)))
    }
}

fn as_number(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}
