//! Threads that bring objects: locate, dial, pull, try the next holder.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_fabric::Role;

use super::directory::Lookup;
use super::shelf::StoreShelf;
use super::socket::Wire;
use super::{Holder, Move, Shared, Wanted, lock, patience};
use crate::id::ObjectId;
use crate::transfer::{Context, Line, Outcome, Plan, Protocol, Pulling};

/// Patience with a peer's connection.
const CONNECT: Duration = Duration::from_secs(5);
const NAP: Duration = Duration::from_millis(250);
/// Bytes of a piece where a socket stands in for fabric.
const LARGE_PIECES: u32 = 1 << 20;

/// How long a peer's socket may take to answer where it is only a way that may be faster.
const TRY_SOCKET: Duration = Duration::from_millis(250);

/// A connection to one peer.
struct Peer {
    context: Arc<Context>,
    pulling: Pulling,
    /// Its socket may be tried too: it did not fail yet.
    sockets: bool,
}

/// One thread's work.
struct Fetcher<'a> {
    shared: &'a Shared,
    lookup: Lookup,
    peers: HashMap<String, Peer>,
    /// Where peers' sockets are, as they said.
    sockets: HashMap<String, String>,
    /// Connections to these sockets.
    wires: HashMap<String, Wire>,
}

pub(super) fn run(shared: &Shared, jobs: &Mutex<Receiver<Wanted>>) {
    shared.settle_thread();
    let mut fetcher = Fetcher {
        shared,
        lookup: Lookup::new(),
        peers: HashMap::new(),
        sockets: HashMap::new(),
        wires: HashMap::new(),
    };
    let mut seen = shared.disconnects.load(Ordering::Acquire);
    while !shared.stops() {
        let job = lock(jobs).recv_timeout(NAP);
        shared.sweep();
        let disconnects = shared.disconnects.load(Ordering::Acquire);
        if std::mem::replace(&mut seen, disconnects) != disconnects {
            fetcher.peers.clear();
            fetcher.wires.clear();
        }
        match job {
            Ok((id, from)) => {
                let found = fetcher.fetch(id, from);
                shared.handle.fetched(id, found);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// The socket of the node at a fabric address, which may name a provider.
fn socket_at(fabric: &str, port: [u8; 2]) -> String {
    let plain = fabric.split_once("://").map_or(fabric, |(_, rest)| rest);
    let host = plain.rsplit_once(':').map_or(plain, |(host, _)| host);
    format!("{host}:{}", u16::from_le_bytes(port))
}

impl Fetcher<'_> {
    /// Tries every node that may have the object, or the one that was named.
    fn fetch(&mut self, id: ObjectId, from: Option<SocketAddr>) -> bool {
        let holders = match from {
            Some(node) => vec![Holder { fabric: node.to_string(), socket: None }],
            None => self.lookup.holders(self.shared, id),
        };
        for holder in holders {
            match self.pull(&holder, id) {
                Ok(Outcome::Came { bytes, .. }) => {
                    self.shared.figures.fetched.fetch_add(1, Ordering::Relaxed);
                    self.shared.figures.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
                    return true;
                }
                Ok(Outcome::Here) => return true,
                // A fabric transfer that was to go on over a socket ended there.
                Ok(Outcome::Gone | Outcome::OverSocket) => {}
                Ok(Outcome::Failed(reason)) | Err(reason) => {
                    self.shared.figures.failed.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(%id, node = holder.fabric, reason, "a fetch failed");
                }
            }
        }
        false
    }

    fn pull(&mut self, holder: &Holder, id: ObjectId) -> Result<Outcome, String> {
        if let Move::Socket { piece_bytes } = self.shared.moves() {
            return self.over_socket(holder, id, piece_bytes, CONNECT);
        }
        // A connection kept from before may have ended meanwhile: then once more over a new one,
        // and once more without the provider that failed.
        let mut reason = String::new();
        let begun = Instant::now();
        for attempt in 0..3 {
            let fresh = !self.peers.contains_key(&holder.fabric);
            match self.over_fabric(holder, id, attempt > 1) {
                Ok(outcome) => return Ok(outcome),
                Err(error) => {
                    self.peers.remove(&holder.fabric);
                    reason = error;
                    // A way that took its time to fail would again.
                    let slow = begun.elapsed() >= self.shared.options.patience;
                    if slow || (fresh && attempt > 0) {
                        break;
                    }
                }
            }
        }
        self.over_socket(holder, id, LARGE_PIECES, CONNECT)
            .map_err(|error| format!("{reason}; over a socket: {error}"))
    }

    fn over_fabric(
        &mut self,
        holder: &Holder,
        id: ObjectId,
        avoid: bool,
    ) -> Result<Outcome, String> {
        let address = &holder.fabric;
        if !self.peers.contains_key(address) {
            let peer = self.connect(address, avoid)?;
            self.peers.insert(address.clone(), peer);
        }
        let plan = self.plan(address);
        if plan.socket_first
            && let Some(outcome) = self.beside_fabric(holder, id)
        {
            return Ok(outcome);
        }
        match self.pull_planned(address, id, plan)? {
            Outcome::OverSocket => {}
            outcome => return Ok(outcome),
        }
        match self.beside_fabric(holder, id) {
            Some(outcome) => Ok(outcome),
            None => self.pull_planned(address, id, self.plan(address)),
        }
    }

    /// How the next object of this peer is to come.
    fn plan(&self, address: &str) -> Plan {
        match (self.shared.moves(), self.peers.get(address)) {
            (Move::Read, _) => Plan::READ,
            (Move::Auto, Some(peer)) => lock(&peer.context.learner).plan(peer.sockets),
            _ => Plan::SENT,
        }
    }

    /// Takes an object over a socket because that is likely faster; nothing where it did not work,
    /// which is not tried again.
    fn beside_fabric(&mut self, holder: &Holder, id: ObjectId) -> Option<Outcome> {
        let start = Instant::now();
        let outcome = self.over_socket(holder, id, LARGE_PIECES, TRY_SOCKET);
        let peer = self.peers.get_mut(&holder.fabric);
        match outcome {
            Ok(outcome) => {
                if let (Outcome::Came { bytes, .. }, Some(peer)) = (&outcome, peer) {
                    learn(self.shared, &peer.context, *bytes, Protocol::Socket, start.elapsed());
                }
                Some(outcome)
            }
            Err(reason) => {
                tracing::info!(node = holder.fabric, reason, "its socket is not tried again");
                if let Some(peer) = peer {
                    peer.sockets = false;
                }
                None
            }
        }
    }

    fn pull_planned(&mut self, address: &str, id: ObjectId, plan: Plan) -> Result<Outcome, String> {
        let shared = self.shared;
        let Some(peer) = self.peers.get_mut(address) else {
            return Err("no connection".to_owned());
        };
        let mut shelf =
            StoreShelf::new(shared, &peer.context).map_err(|error| error.to_string())?;
        let start = Instant::now();
        peer.pulling.start(id, plan, 0).map_err(|error| error.to_string())?;
        let mut last = start;
        let patience = shared.options.patience;
        // The server's time for the object is as long, and begins later: when it is asked.
        let in_time = |bytes| start.elapsed() <= patience::whole(patience, bytes);
        loop {
            // One that always says something, and never ends, ends here.
            let most = patience::whole(patience, peer.pulling.expected());
            if start.elapsed() > most {
                return Err(format!("it did not end within {most:?}"));
            }
            let (outcome, came) = peer
                .pulling
                .progress(&mut shelf, NAP, &in_time)
                .map_err(|error| error.to_string())?;
            if let Some(outcome) = outcome {
                if let Outcome::Came { bytes, read } = outcome {
                    let (protocol, figure) = if read {
                        (Protocol::Read, &shared.figures.read)
                    } else {
                        (Protocol::Sent, &shared.figures.sent)
                    };
                    figure.fetch_add(1, Ordering::Relaxed);
                    learn(shared, &peer.context, bytes, protocol, start.elapsed());
                }
                return Ok(outcome);
            }
            if came {
                last = Instant::now();
            } else if last.elapsed() > patience || shared.stops() {
                return Err(format!("it said nothing for {:?}", last.elapsed()));
            }
        }
    }

    fn connect(&mut self, address: &str, avoid: bool) -> Result<Peer, String> {
        let shared = self.shared;
        let agreed = shared.dial.dial(address, avoid)?;
        if let Ok(port) = <[u8; 2]>::try_from(agreed.payload()) {
            self.sockets.insert(address.to_owned(), socket_at(address, port));
        }
        let context = shared.context(&agreed.device())?;
        let line = Line::new(&context).map_err(|error| error.to_string())?;
        let peer = agreed.exchange(&line.info())?;
        let channel =
            line.connect(&peer, Role::Active, Some(CONNECT)).map_err(|error| error.to_string())?;
        shared.figures.connections.fetch_add(1, Ordering::Relaxed);
        Ok(Peer { context, pulling: Pulling::new(channel), sockets: true })
    }

    /// Takes an object from the socket of its holder, over the connection that is kept where there is one.
    fn over_socket(
        &mut self,
        holder: &Holder,
        id: ObjectId,
        piece_bytes: u32,
        connect: Duration,
    ) -> Result<Outcome, String> {
        let known = holder.socket.clone().or_else(|| self.sockets.get(&holder.fabric).cloned());
        let address = match known {
            Some(address) => address,
            None => {
                let agreed = self.shared.dial.dial(&holder.fabric, false)?;
                let port = <[u8; 2]>::try_from(agreed.payload()).map_err(|_| "it has no socket")?;
                let socket = socket_at(&holder.fabric, port);
                self.sockets.insert(holder.fabric.clone(), socket.clone());
                socket
            }
        };
        let client = self.shared.client().map_err(|error| error.to_string())?;
        let patience = self.shared.options.patience;
        loop {
            let mut wire = match self.wires.remove(&address) {
                Some(wire) => wire,
                None => Wire::dial(&address, connect, patience)
                    .map_err(|error| format!("{address}: {error}"))?,
            };
            let again = wire.is_used();
            match wire.pull(&client, id, piece_bytes, patience) {
                Ok((outcome, goes_on)) => {
                    if goes_on {
                        self.wires.insert(address, wire);
                    }
                    if matches!(outcome, Outcome::Came { .. }) {
                        self.shared.figures.socket.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(outcome);
                }
                // The peer may have let it go in the meantime: once more over a new one.
                Err(error) if again => tracing::debug!(%error, "a connection that was kept ended"),
                Err(error) => return Err(format!("{address}: {error}")),
            }
        }
    }
}

/// A transfer over the device of `context` took so long.
fn learn(shared: &Shared, context: &Context, bytes: u64, way: Protocol, took: Duration) {
    if shared.moves() != Move::Auto {
        return;
    }
    let mut learner = lock(&context.learner);
    learner.learn(bytes, way, took);
    shared.crossing.store(learner.crossing(), Ordering::Relaxed);
}
