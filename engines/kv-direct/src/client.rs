//! The client library: one logical map over several servers and their processors.
//!
//! A key's server is found by consistent hashing, its processor by another hash. Operations are packed
//! into as few packets as their order allows, all links work at once, and results are handed out with
//! the index of their request.
//!
//! Invariant: operations on one key are executed in the order in which they were given.
//!
//! Source: spec/kv-direct.md 2, 5.5, 6.1.

use std::fmt;
use std::time::Duration;

use crate::function::{Width, number};
use crate::link::{Link, LinkError};
use crate::packet::{Kind, PacketWriter, Request, Status};
use crate::ring::{HashRing, processor_of};

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
        Status::Moved => "the key is being moved to another server; ask again",
    }
}

/// See the module's documentation. Stays on its thread.
pub struct DirectClient {
    ring: HashRing,
    connect: Box<dyn Connect>,
    /// By server, in the ring's order.
    servers: Vec<Vec<Lane>>,
    spin: Duration,
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
    fn new(link: Link) -> Self {
        Self { packet: link.packet(), link, filling: Vec::new(), awaited: Vec::new() }
    }
}

impl fmt::Debug for DirectClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectClient").field("ring", &self.ring).finish_non_exhaustive()
    }
}

/// Receives one result: index of the request, status, bytes.
pub type OnResult<'a> = &'a mut dyn FnMut(usize, Status, Option<&[u8]>);

impl DirectClient {
    /// Connects to every server.
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
        let spin = Duration::from_micros(50);
        let mut client = Self { ring, connect, servers: Vec::new(), spin };
        for server in 0..client.ring.servers().len() {
            let lanes = client.lanes(server)?;
            client.servers.push(lanes);
        }
        Ok(client)
    }

    /// How long a call polls before it sleeps. Default 50 us.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// The servers.
    #[must_use]
    pub fn ring(&self) -> &HashRing {
        &self.ring
    }

    fn failed(&self, server: usize, source: LinkError) -> DirectClientError {
        DirectClientError::Link { server: self.ring.servers()[server].clone(), source }
    }

    fn lanes(&mut self, server: usize) -> Result<Vec<Lane>, DirectClientError> {
        let name = self.ring.servers()[server].clone();
        let (first, processors) =
            self.connect.connect(&name, 0).map_err(|source| self.failed(server, source))?;
        let mut lanes = vec![Lane::new(first)];
        for processor in 1..processors {
            let (link, _) = self
                .connect
                .connect(&name, processor)
                .map_err(|source| self.failed(server, source))?;
            lanes.push(Lane::new(link));
        }
        Ok(lanes)
    }

    /// Executes the requests and hands out their results; not in order across keys.
    ///
    /// Errors: [`DirectClientError::Link`]: results not handed out by then are not known; the next
    /// call connects anew. [`DirectClientError::TooLong`]: nothing was sent.
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
        }
        for server in 0..self.servers.len() {
            if self.servers[server].iter().any(|lane| lane.link.is_broken()) {
                self.servers[server] = self.lanes(server)?;
            }
        }
        let outcome = self.run(requests, on_result);
        if outcome.is_err() {
            // What the lanes had under way belongs to this call: none of it may be taken for a result
            // of the next, which connects anew.
            for lane in self.servers.iter_mut().flatten() {
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
            let server = self.ring.server_of(request.key).ok_or(DirectClientError::NoServer)?;
            let processors = self.servers[server].len() as u32;
            let processor = processor_of(request.key, processors) as usize;
            if !self.servers[server][processor].packet.push(request) {
                self.flush(server, processor, on_result)?;
                let pushed = self.servers[server][processor].packet.push(request);
                assert!(pushed, "an empty packet holds any request");
            }
            self.servers[server][processor].filling.push(index as u32);
        }
        for server in 0..self.servers.len() {
            for processor in 0..self.servers[server].len() {
                self.flush(server, processor, on_result)?;
            }
        }
        for server in 0..self.servers.len() {
            for processor in 0..self.servers[server].len() {
                while self.servers[server][processor].link.outstanding() > 0 {
                    self.wait(server, processor, on_result)?;
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
        if self.servers[server][processor].filling.is_empty() {
            return Ok(());
        }
        while self.servers[server][processor].link.room() == 0 {
            self.wait(server, processor, on_result)?;
        }
        let lane = &mut self.servers[server][processor];
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
        let Lane { link, awaited, .. } = &mut self.servers[server][processor];
        let waited = link.wait(spin, |slot, results| {
            let requests = awaited.get(usize::from(slot)).map_or(&[][..], Vec::as_slice);
            for (index, (status, bytes)) in requests.iter().zip(results) {
                on_result(*index as usize, status, bytes);
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
