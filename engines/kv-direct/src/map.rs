//! The map of servers: which of them holds a key, also while a server joins or leaves.
//!
//! A map has a *state*, a number that grows with each change. Even states are quiet: a key belongs to the
//! server that the ring names. In an odd state keys move from the ring that was to the ring that will be:
//!
//! ```text
//!  state 4: ring A ──begin──► state 5: A, moving to B ──all have moved──► state 6: ring B
//! ```
//!
//! While keys move, a client asks the server of the ring that was. It executes the operation where it
//! still has the pair, and says [`Status::Moved`](crate::packet::Status::Moved) where it has not: the pair
//! went, or never was, and then the client asks the server of the ring that will be. A server never gains
//! a key that it is to give away, so a key that was absent there once stays absent there.
//!
//! ```text
//! map:     version u16 | state u32 | name of the receiver | names that were | names that will be
//! report:  map | pairs u64 | moved u64 | adopted u64 | finished u8 | note
//! name:    length u8 | bytes            names: count u16 | name ...      note: length u8 | UTF-8
//! adopt:   sequence u64 | state u32 | (key length u8 | value length u16 | key | value) ...
//! ```
//!
//! The key of an ADOPT is the sender's number, 8 bytes. Its sequence grows with each packet of a sender;
//! a packet that was executed already is answered as it was then, an older one not at all executed.
//!
//! Source: spec/kv-direct.md 2 (many-to-one virtualisation); it says nothing of moves: the decision is ours.

use crate::ring::HashRing;
use crate::wire::VERSION;

/// The state in a packet of one operation whose client goes by no map: it asks this server, whatever the
/// map is.
pub const ANY_STATE: u32 = u32::MAX;
/// Most servers of a map.
pub const SERVER_LIMIT: usize = 256;
/// Longest encoded map, bytes.
pub const MAP_LIMIT: usize = 24 << 10;
/// Longest report, bytes.
pub const REPORT_LIMIT: usize = MAP_LIMIT + 512;
/// Longest note in a report, bytes.
const NOTE_LIMIT: usize = 250;

/// What a server, or a client, knows of the servers of a map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerMap {
    /// Grows with each change; odd while keys move; 0: no map was ever said.
    pub state: u32,
    /// The receiver's own name in it; empty for a client.
    pub me: String,
    /// The ring that was; of no meaning in an even state.
    pub old: HashRing,
    /// The ring that is, or that will be.
    pub ring: HashRing,
}

/// What a processor may do with an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The key is this server's.
    Serve,
    /// It is this server's as long as the pair is there.
    ServeIfHeld,
    /// It is another's.
    Moved,
    /// This processor was told of no map, and the client was: it may be told in a moment.
    Unknown,
}

impl ServerMap {
    /// Whether keys move.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        !self.state.is_multiple_of(2)
    }

    fn is_mine(&self, ring: &HashRing, key: &[u8]) -> bool {
        let server = ring.server_of(key).map(|server| ring.servers()[server].as_str());
        server.is_some_and(|server| crate::ring::address(server) == crate::ring::address(&self.me))
    }

    /// What becomes of an operation on `key` of a client that knows the map in `state`.
    #[must_use]
    pub fn verdict(&self, key: &[u8], state: u32) -> Verdict {
        if self.state == 0 {
            // To refuse for good would send the client on, away from a pair that is still here.
            let same = state == 0 || state == ANY_STATE;
            return if same { Verdict::Serve } else { Verdict::Unknown };
        }
        // A client of a much older map may have packets under way since a change before the last: a key
        // that left this server and came back would be refused first and then executed.
        let known = if self.is_moving() { 1 } else { 2 };
        if state.saturating_add(known) < self.state {
            return Verdict::Moved;
        }
        let will_be = self.is_mine(&self.ring, key);
        if !self.is_moving() {
            return if will_be { Verdict::Serve } else { Verdict::Moved };
        }
        match (self.is_mine(&self.old, key), will_be) {
            (true, true) => Verdict::Serve,
            // A client of an older map may have many packets under way: what is refused now and
            // executed a moment later would change places.
            (true, false) if state == self.state || state == ANY_STATE => Verdict::ServeIfHeld,
            // The client has asked the server that was, or knows that all have moved.
            (false, true) if state == self.state || state == self.state + 1 => Verdict::Serve,
            _ => Verdict::Moved,
        }
    }

    /// Whether the key is this server's by the ring that was.
    #[must_use]
    pub fn was_mine(&self, key: &[u8]) -> bool {
        self.is_moving() && self.is_mine(&self.old, key)
    }

    /// Whether the pair of `key` is to be given to another server; that server's name. With the first map of
    /// all, that goes for strays too: pairs that were stored here by a client that named this server alone.
    #[must_use]
    pub fn goes_to(&self, key: &[u8]) -> Option<&str> {
        let held = self.state == 1 || self.was_mine(key);
        if !self.is_moving() || !held || self.is_mine(&self.ring, key) {
            return None;
        }
        self.ring.server_of(key).map(|server| self.ring.servers()[server].as_str())
    }

    /// The same for another receiver.
    #[must_use]
    pub fn for_server(&self, name: &str) -> Self {
        Self { me: name.to_owned(), ..self.clone() }
    }

    /// For a packet.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend(self.state.to_le_bytes());
        push_name(&mut bytes, self.me.as_bytes());
        for ring in [&self.old, &self.ring] {
            bytes.extend((ring.servers().len() as u16).to_le_bytes());
            ring.servers().iter().for_each(|name| push_name(&mut bytes, name.as_bytes()));
        }
        bytes
    }

    /// Of what came; `None` where it is no map of this version, or a server's name is not 1 to 255 bytes
    /// of text.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let map = Self::take(&mut rest)?;
        rest.is_empty().then_some(map)
    }

    fn take(rest: &mut &[u8]) -> Option<Self> {
        if rest.len() > REPORT_LIMIT || take_number::<2>(rest)? != u64::from(VERSION) {
            return None;
        }
        let state = take_number::<4>(rest)? as u32;
        let me = take_name(rest)?;
        let mut rings = [HashRing::default(), HashRing::default()];
        for ring in &mut rings {
            let count = take_number::<2>(rest)? as usize;
            if count > SERVER_LIMIT {
                return None;
            }
            let names = (0..count).map(|_| take_name(rest).filter(|name| !name.is_empty()));
            *ring = HashRing::new(names.collect::<Option<Vec<_>>>()?);
        }
        let [old, ring] = rings;
        Some(Self { state, me, old, ring })
    }
}

/// What a processor says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapReport {
    /// The map it knows.
    pub map: ServerMap,
    /// Pairs it holds.
    pub pairs: u64,
    /// Pairs it gave to others in the last change of the map.
    pub moved: u64,
    /// Pairs it took over in the last change of the map.
    pub adopted: u64,
    /// It has nothing left to give.
    pub finished: bool,
    /// What holds it up, for people; empty where nothing does.
    pub note: String,
}

impl MapReport {
    /// For a reply.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.map.encode();
        for number in [self.pairs, self.moved, self.adopted] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.push(u8::from(self.finished));
        let end = self.note.floor_char_boundary(NOTE_LIMIT);
        push_name(&mut bytes, &self.note.as_bytes()[..end]);
        bytes
    }

    /// Of what came; `None` where it is no report of this version.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = &mut &*bytes;
        let report = Self {
            map: ServerMap::take(rest)?,
            pairs: take_number::<8>(rest)?,
            moved: take_number::<8>(rest)?,
            adopted: take_number::<8>(rest)?,
            finished: take_number::<1>(rest)? != 0,
            note: take_name(rest)?,
        };
        rest.is_empty().then_some(report)
    }
}

fn push_name(bytes: &mut Vec<u8>, name: &[u8]) {
    debug_assert!(name.len() <= 255, "names are checked where they are given");
    bytes.push(name.len() as u8);
    bytes.extend(name);
}

fn take_number<const N: usize>(rest: &mut &[u8]) -> Option<u64> {
    let (number, behind) = rest.split_first_chunk::<N>()?;
    *rest = behind;
    Some(number.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

fn take_name(rest: &mut &[u8]) -> Option<String> {
    let length = take_number::<1>(rest)? as usize;
    let (name, behind) = rest.split_at_checked(length)?;
    *rest = behind;
    String::from_utf8(name.to_vec()).ok()
}

/// Writes the pairs of an ADOPT.
#[derive(Debug)]
pub struct AdoptWriter {
    bytes: Vec<u8>,
    count: u32,
}

impl AdoptWriter {
    /// Without pairs yet.
    #[must_use]
    pub fn new(sequence: u64, state: u32) -> Self {
        let mut bytes = sequence.to_le_bytes().to_vec();
        bytes.extend(state.to_le_bytes());
        Self { bytes, count: 0 }
    }

    /// Adds a pair of the table's; false where the value would pass `limit` bytes.
    pub fn push(&mut self, key: &[u8], value: &[u8], limit: usize) -> bool {
        if self.count > 0 && self.bytes.len() + 3 + key.len() + value.len() > limit {
            return false;
        }
        self.bytes.push(key.len() as u8);
        self.bytes.extend((value.len() as u16).to_le_bytes());
        self.bytes.extend(key);
        self.bytes.extend(value);
        self.count += 1;
        true
    }

    /// Pairs in it.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The value of the operation.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A key and its value, as they lie in a packet.
pub type Pair<'p> = (&'p [u8], &'p [u8]);

/// Sequence, state and pairs of an ADOPT's value; `None` where it is none.
#[must_use]
pub fn adopted(mut bytes: &[u8]) -> Option<(u64, u32, Vec<Pair<'_>>)> {
    let rest = &mut bytes;
    let (sequence, state) = (take_number::<8>(rest)?, take_number::<4>(rest)? as u32);
    let mut pairs = Vec::new();
    while !rest.is_empty() {
        let (key, value) = (take_number::<1>(rest)? as usize, take_number::<2>(rest)? as usize);
        let (key, behind) = rest.split_at_checked(key)?;
        let (value, behind) = behind.split_at_checked(value)?;
        *rest = behind;
        pairs.push((key, value));
    }
    Some((sequence, state, pairs))
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(count: usize) -> HashRing {
        HashRing::new((0..count).map(|server| format!("auto://10.0.0.{server}:4790")))
    }

    fn moving(me: usize) -> ServerMap {
        let me = format!("shm://10.0.0.{me}:4790");
        ServerMap { state: 5, me, old: names(3), ring: names(4) }
    }

    #[test]
    fn while_keys_move_each_key_has_one_server_that_executes_it() {
        let servers: Vec<ServerMap> = (0..4).map(moving).collect();
        let mut moved = 0;
        for key in 0..4000_u32 {
            let key = key.to_le_bytes();
            let verdicts: Vec<Verdict> =
                servers.iter().map(|server| server.verdict(&key, 5)).collect();
            let held = verdicts.iter().filter(|verdict| **verdict == Verdict::ServeIfHeld).count();
            let served = verdicts.iter().filter(|verdict| **verdict == Verdict::Serve).count();
            assert_eq!(served, 1, "{verdicts:?}");
            if held == 1 {
                moved += 1;
                assert_eq!(verdicts[3], Verdict::Serve, "keys move to the server that joins");
                // A client of the map that was has not asked the server that was.
                assert_eq!(servers[3].verdict(&key, 4), Verdict::Moved);
                assert_eq!(servers[3].verdict(&key, ANY_STATE), Verdict::Moved);
                let from = verdicts.iter().position(|v| *v == Verdict::ServeIfHeld).unwrap();
                assert_eq!(servers[from].verdict(&key, 4), Verdict::Moved);
                assert_eq!(servers[from].verdict(&key, ANY_STATE), Verdict::ServeIfHeld);
                assert_eq!(servers[from].goes_to(&key), Some("auto://10.0.0.3:4790"));
            }
            assert_eq!(servers.iter().filter(|s| s.goes_to(&key).is_some()).count(), held);
        }
        assert!((700..1300).contains(&moved), "{moved} of 4000 keys move");
        let quiet = ServerMap { state: 6, ..moving(3) };
        let none = ServerMap::default();
        for key in 0..100_u32 {
            let key = key.to_le_bytes();
            let mine = names(4).server_of(&key) == Some(3);
            let verdict = if mine { Verdict::Serve } else { Verdict::Moved };
            assert_eq!(quiet.verdict(&key, 4), verdict);
            assert_eq!(quiet.verdict(&key, ANY_STATE), verdict);
            assert_eq!(quiet.verdict(&key, 3), Verdict::Moved, "of a change before the last");
            assert_eq!(
                (none.verdict(&key, 0), none.verdict(&key, 6)),
                (Verdict::Serve, Verdict::Unknown)
            );
        }
    }

    #[test]
    fn maps_and_reports_are_read_as_they_were_written() {
        let map = moving(2);
        assert_eq!(ServerMap::decode(&map.encode()), Some(map.clone()));
        let report = MapReport {
            map,
            pairs: 1,
            moved: u64::MAX,
            adopted: 3,
            finished: true,
            note: "ö".repeat(200),
        };
        let encoded = report.encode();
        let read = MapReport::decode(&encoded).unwrap();
        assert_eq!(read.note, "ö".repeat(125));
        assert_eq!(MapReport { note: report.note.clone(), ..read }, report);
        for cut in 0..encoded.len() {
            assert_eq!(MapReport::decode(&encoded[..cut]), None, "cut at {cut}");
        }
        let mut other = report.map.encode();
        other[0] += 1;
        assert_eq!(ServerMap::decode(&other), None, "of another version");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let bytes = [&VERSION.to_le_bytes()[..], &bytes].concat();
            let _ = (ServerMap::decode(&bytes), MapReport::decode(&bytes), adopted(&bytes));
        }
    }

    #[test]
    fn pairs_to_adopt_are_read_as_they_were_written() {
        let mut writer = AdoptWriter::new(7, 5);
        assert!(writer.push(b"key", &[9; 2000], 100) && !writer.push(b"k", b"", 100));
        assert!(writer.push(b"k", b"", 4000));
        let value = [9; 2000];
        let pairs = vec![(&b"key"[..], &value[..]), (b"k", b"")];
        assert_eq!(adopted(writer.bytes()), Some((7, 5, pairs)));
        assert_eq!(writer.count(), 2);
    }
}
