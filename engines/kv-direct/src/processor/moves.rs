//! What a processor does about the map of servers: it refuses keys of others, gives pairs away while
//! keys move, and takes pairs over.
//!
//! ```text
//!  scan a few buckets ─► batch of pairs, frozen ─► mover's thread ─► the other server adopts them
//!        ▲                                                               │
//!        └────────── delete what was adopted, thaw the rest ◄────────────┘
//! ```
//!
//! An operation on a frozen pair is answered [`Status::Busy`]. The pair leaves the table when the other
//! server has it: at every moment one server at least has each pair, and one at most executes operations
//! on it.
//!
//! Invariant: at most one batch is under way; while keys move, operations are executed one at a time,
//! each after its verdict.

use std::collections::{HashMap, HashSet};

use super::{Operation, Processor};
use crate::map::{MAP_LIMIT, MapReport, ServerMap, Verdict, adopted};
use crate::memory::Memory;
use crate::packet::{Kind, PacketReader, Request, Status, push_bytes, push_status};

/// Pairs of a batch at most.
const BATCH_PAIRS: usize = 512;
/// Senders whose last packet is remembered.
const SENDERS: usize = 4096;

/// A pair: key and value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// Pairs on their way, by the name of the server they go to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MoveBatch {
    /// The map's state.
    pub state: u32,
    /// Servers and their pairs.
    pub parts: Vec<(String, Vec<Pair>)>,
}

/// What [`Processor::next_batch`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveStep {
    /// Nothing moves from here, or a batch is under way.
    Nothing,
    /// Some buckets were looked at; there are more.
    Scanned,
    /// Pairs to bring to other servers, frozen until [`Processor::batch_done`].
    Batch(MoveBatch),
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Part {
    map: ServerMap,
    /// The next bucket to look at; `None` where all were.
    cursor: Option<u32>,
    /// Where the batch under way began.
    began: u32,
    frozen: HashSet<Vec<u8>>,
    batch: Option<MoveBatch>,
    /// Last sequence of each sender, and how many pairs of it were adopted.
    senders: HashMap<u64, (u64, u32)>,
    moved: u64,
    adopted: u64,
    note: String,
}

impl Part {
    /// Whether a client in `state` knows the map as this processor does, and nothing moves.
    #[inline]
    pub(super) fn agrees(&self, state: u32) -> bool {
        state == self.map.state && state.is_multiple_of(2)
    }

    fn finished(&self) -> bool {
        self.cursor.is_none() && self.batch.is_none()
    }

    /// How the last packet of a sender ended. Any client can name senders: those that were refused make room
    /// first, then all do.
    fn remember(&mut self, sender: u64, sequence: u64, count: u32) {
        if self.senders.len() >= SENDERS && !self.senders.contains_key(&sender) {
            self.senders.retain(|_, (_, count)| *count > 0);
        }
        if self.senders.len() >= SENDERS && !self.senders.contains_key(&sender) {
            self.senders.clear();
        }
        self.senders.insert(sender, (sequence, count));
    }
}

impl<M: Memory> Processor<M> {
    /// The map this processor knows.
    #[must_use]
    pub fn map(&self) -> &ServerMap {
        &self.part.map
    }

    /// Pairs given to other servers, and taken over from them, since the start.
    #[must_use]
    pub fn moves(&self) -> (u64, u64) {
        (self.counters.moved, self.counters.adopted)
    }

    /// Executes a packet one operation at a time, each after its verdict. False as
    /// [`Processor::process`] says; nothing was executed then.
    pub(super) fn process_checked(
        &mut self,
        packet: &[u8],
        reader: PacketReader<'_>,
        reply: &mut Vec<u8>,
        reply_limit: usize,
    ) -> bool {
        let (state, count) = (reader.state(), reader.left());
        let longest = |request: Option<Request<'_>>| {
            request.map_or(1, |request| request.kind.longest_result(request.no_return))
        };
        let bound: usize = reader.clone().map(longest).sum();
        if reply.len() + bound > reply_limit {
            return false;
        }
        self.counters.operations += u64::from(count);
        for request in reader {
            let Some(request) = request else {
                self.counters.failed += 1;
                push_status(reply, Status::Malformed);
                continue;
            };
            if request.kind.is_control() {
                // The decoder lets it through alone only.
                if let Some(status) = self.control(&request, reply) {
                    self.counters.failed += u64::from(status != Status::Ok);
                    push_status(reply, status);
                }
                continue;
            }
            let refused = match self.part.map.verdict(request.key, state) {
                Verdict::Serve => None,
                Verdict::ServeIfHeld => self.held_up(&request),
                Verdict::Moved => Some(Status::Moved),
                Verdict::Unknown => Some(Status::Busy),
            };
            let status = match refused {
                Some(status) => status,
                None if !self.knows(&request) => Status::UnknownFunction,
                None => {
                    self.begin(1);
                    let place = self.table.place(request.key);
                    self.operations.push(Operation::of(packet, &request, place));
                    self.execute_all(packet);
                    reply.extend_from_slice(&self.results);
                    continue;
                }
            };
            self.counters.failed += u64::from(status != Status::Ok);
            push_status(reply, status);
        }
        true
    }

    /// Why an operation on a key that is to be given away is not executed here.
    fn held_up(&mut self, request: &Request<'_>) -> Option<Status> {
        let place = self.table.place(request.key);
        if self.table.get(place, request.key, |_| ()).is_none() {
            return Some(Status::Moved);
        }
        // Reads too: one that overtakes a refused write of its own client would see the past.
        self.part.frozen.contains(request.key).then_some(Status::Busy)
    }

    /// The status to answer with; `None` where the reply has its result already.
    fn control(&mut self, request: &Request<'_>, reply: &mut Vec<u8>) -> Option<Status> {
        match request.kind {
            Kind::Map => {
                push_bytes(reply, Status::Ok, &self.report().encode());
                None
            }
            Kind::SetMap => {
                let map = Some(request.value).filter(|bytes| bytes.len() <= MAP_LIMIT);
                Some(
                    map.and_then(ServerMap::decode)
                        .map_or(Status::Malformed, |map| self.set_map(map, request.key == FORCED)),
                )
            }
            _ => {
                let Ok(sender) = <[u8; 8]>::try_from(request.key) else {
                    return Some(Status::Malformed);
                };
                let sender = u64::from_le_bytes(sender);
                match self.adopt(sender, request.value) {
                    Ok(count) => push_bytes(reply, Status::Ok, &count.to_le_bytes()),
                    Err(status) => return Some(status),
                }
                None
            }
        }
    }

    fn report(&self) -> MapReport {
        MapReport {
            map: self.part.map.clone(),
            pairs: self.table.counters().pairs,
            moved: self.part.moved,
            adopted: self.part.adopted,
            finished: self.part.finished(),
            note: self.part.note.clone(),
        }
    }

    fn set_map(&mut self, new: ServerMap, forced: bool) -> Status {
        let part = &mut self.part;
        if new == part.map {
            return Status::Ok;
        }
        let empty = self.table.counters().pairs == 0;
        let known = &part.map;
        let named = new.ring.position(&new.me).is_some();
        if new.ring.servers().is_empty() || new.me.is_empty() || new.state <= known.state {
            return Status::Conflict;
        }
        let fits = if forced {
            named || new.old.position(&new.me).is_some()
        } else if new.is_moving() {
            let was_named = new.old.position(&new.me).is_some();
            let follows = new.state == known.state + 1 && !known.is_moving();
            let known_ring = follows && (known.state == 0 || new.old == known.ring);
            // A server that joins knows nothing, or left long ago; what it holds is no part of the map.
            (was_named && known_ring) || (!was_named && named && !known.is_moving() && empty)
        } else if known.is_moving() {
            if new.state == known.state + 1 && new.ring == known.ring && !part.finished() {
                return Status::Busy;
            }
            new.state == known.state + 1 && new.ring == known.ring
        } else {
            // A server that was started anew, without what it held, takes its old place.
            known.state == 0 && named && empty
        };
        if !fits {
            return Status::Conflict;
        }
        part.map = new;
        part.frozen.clear();
        part.batch = None;
        part.cursor = part.map.is_moving().then_some(0);
        part.note.clear();
        if part.map.is_moving() {
            (part.moved, part.adopted) = (0, 0);
        }
        Status::Ok
    }

    /// How many of the pairs, from the first on, are here now.
    fn adopt(&mut self, sender: u64, value: &[u8]) -> Result<u32, Status> {
        let (sequence, state, pairs) = adopted(value).ok_or(Status::Malformed)?;
        if let Some(&(last, count)) = self.part.senders.get(&sender)
            && sequence <= last
        {
            return if sequence == last { Ok(count) } else { Err(Status::Conflict) };
        }
        let map = &self.part.map;
        let mine = |key: &[u8]| map.verdict(key, state) == Verdict::Serve;
        if state != map.state || !map.is_moving() || !pairs.iter().all(|(key, _)| mine(key)) {
            // Once refused, refused for good: a copy that comes late finds other pairs than it was made of.
            self.part.remember(sender, sequence, 0);
            return Err(Status::Conflict);
        }
        let mut count = 0;
        for (key, value) in &pairs {
            let place = self.table.place(key);
            // A stray: this server has the map's own pair, or none.
            let stray = self.part.map.was_mine(key);
            let kept = stray && self.table.get(place, key, |_| ()).is_some();
            if !kept && self.table.put(place, key, value).is_err() {
                break;
            }
            count += 1;
        }
        self.part.remember(sender, sequence, count);
        self.part.adopted += u64::from(count);
        self.counters.adopted += u64::from(count);
        Ok(count)
    }

    /// Looks at `buckets` more buckets for pairs to give away; at most `bytes` of pairs go into a batch,
    /// or one bucket's.
    pub fn next_batch(&mut self, buckets: u32, bytes: usize) -> MoveStep {
        let Some(from) = self.part.cursor.filter(|_| self.part.batch.is_none()) else {
            return MoveStep::Nothing;
        };
        let mut parts: HashMap<String, Vec<Pair>> = HashMap::new();
        let (mut taken, mut count, mut at) = (0, 0, from);
        let mut next = Some(from);
        for _ in 0..buckets {
            next = self.table.scan(at, 1, |key, value| {
                if let Some(server) = self.part.map.goes_to(key) {
                    (taken, count) = (taken + key.len() + value.len(), count + 1);
                    let pair = (key.to_vec(), value.to_vec());
                    match parts.get_mut(server) {
                        Some(pairs) => pairs.push(pair),
                        None => drop(parts.insert(server.to_owned(), vec![pair])),
                    }
                }
            });
            let Some(bucket) = next else { break };
            at = bucket;
            if taken >= bytes || count >= BATCH_PAIRS {
                break;
            }
        }
        self.part.cursor = next;
        if parts.is_empty() {
            return if next.is_some() { MoveStep::Scanned } else { MoveStep::Nothing };
        }
        let keys = parts.values().flatten().map(|(key, _)| key.clone());
        self.part.frozen = keys.collect();
        let mut parts: Vec<_> = parts.into_iter().collect();
        parts.sort_unstable();
        let batch = MoveBatch { state: self.part.map.state, parts };
        self.part.began = from;
        self.part.batch = Some(batch.clone());
        MoveStep::Batch(batch)
    }

    /// The batch of `state` came to its end: `adopted` says of each pair of each part whether it is at
    /// its server now. What is not stays here and is offered again. `note` is for people.
    pub fn batch_done(&mut self, state: u32, adopted: &[Vec<bool>], note: &str) {
        note.clone_into(&mut self.part.note);
        let Some(batch) = self.part.batch.take_if(|batch| batch.state == state) else { return };
        self.part.frozen.clear();
        let mut left = adopted.len() < batch.parts.len();
        for ((_, pairs), adopted) in batch.parts.iter().zip(adopted) {
            for ((key, _), adopted) in pairs.iter().zip(adopted) {
                if !adopted {
                    left = true;
                    continue;
                }
                let place = self.table.place(key);
                let held = self.table.delete(place, key);
                assert!(held, "a frozen pair stays until it was adopted");
                self.part.moved += 1;
                self.counters.moved += 1;
            }
        }
        if left {
            self.part.cursor = Some(self.part.began);
        }
    }

    /// What holds the batch under way up, for people.
    pub fn batch_held_up(&mut self, note: &str) {
        note.clone_into(&mut self.part.note);
    }
}

/// The key of a SET MAP that is taken whatever the map was: a server is lost, and its pairs are.
pub const FORCED: &[u8] = b"forced";
/// The key of any other SET MAP, and of a MAP.
pub const PLAIN: &[u8] = b"plain";

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::function::Functions;
    use crate::map::AdoptWriter;
    use crate::packet::{PacketWriter, ReplyReader};
    use crate::processor::ProcessorOptions;
    use crate::ring::HashRing;

    #[test]
    fn senders_that_are_refused_take_bounded_memory_and_no_place_of_others() {
        let options = ProcessorOptions { memory_bytes: 1 << 23, ..ProcessorOptions::default() };
        let (mut processor, _) =
            Processor::new(&options, Arc::new(Functions::default()), false).unwrap();
        let ring = |names: &[&str]| HashRing::new(names.iter().map(|&name| name.to_owned()));
        let map = ServerMap { state: 1, me: "b".to_owned(), old: ring(&["a"]), ring: ring(&["b"]) };
        assert_eq!(processor.set_map(map, false), Status::Ok);
        let mut reply = Vec::new();
        let mut adopt = |processor: &mut Processor<_>, sender: u64, state, value: &[u8]| {
            let mut pairs = AdoptWriter::new(1, state);
            assert!(pairs.push(b"key", value, 100));
            let mut packet = PacketWriter::new(1 << 12, 1 << 12);
            let sender = sender.to_le_bytes();
            assert!(packet.push(&Request::control(Kind::Adopt, &sender, pairs.bytes())));
            assert!(processor.process(packet.finish(1), &mut reply, 1 << 12));
            let mut results = ReplyReader::new(&reply).unwrap().1;
            results.next().map(|(status, bytes)| (status, bytes.map(<[u8]>::to_vec))).unwrap()
        };
        let one = Some(1_u32.to_le_bytes().to_vec());
        assert_eq!(adopt(&mut processor, 0, 1, b"first"), (Status::Ok, one.clone()));
        for sender in 1..3 * SENDERS as u64 {
            assert_eq!(adopt(&mut processor, sender, 3, b"other"), (Status::Conflict, None));
            assert!(processor.part.senders.len() <= SENDERS, "{sender} senders");
        }
        // The one that was executed is remembered: its copy is answered, and not executed again.
        assert_eq!(adopt(&mut processor, 0, 1, b"again"), (Status::Ok, one));
        let place = processor.table.place(b"key");
        assert_eq!(processor.table.get(place, b"key", <[u8]>::to_vec).unwrap(), b"first");
    }
}
