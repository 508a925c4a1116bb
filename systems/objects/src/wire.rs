//! What a client and its store say to each other.
//!
//! ```text
//! ring, client to store    tag: number of the request, 1..2^24, chosen by the client
//!   words 0..3  id (20 bytes), then operation (8 bits), flags (8 bits), 0 (16 bits)
//!   word 3      data bytes, or handle    word 4  metadata bytes    word 5  time-out, us
//!   word 6      checksum of a seal
//!   reserve: word 3 bytes       put: word 5 offset in the segment of the reserve, word 6 checksum
//!   fetch of one node's (FLAG_FROM): words 3 and 4 its IPv6 address, word 6 its port
//! ring, store to client    tag: number of the request, or 0 for news
//!   word 0      status (8 bits), 0 (24 bits), segment (32 bits)
//!   word 1      offset in the segment    word 2  data bytes    word 3  metadata bytes
//!   word 4      handle                   word 5  checksum of the object, or 2^63 for none
//!   news: words 0..3 id, then which news (8 bits)
//! ```
//!
//! Invariants: every word from a client is a claim that the store checks; a record of the socket
//! has [`RECORD_BYTES`] bytes.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use beeline_ring::slots::SlotMessage;

use crate::id::ObjectId;

/// What both ends speak; another version is refused at the start.
///
/// - 2: a client says that it took a listing.
/// - 3: a client reserves memory and puts small objects there by one request each; a fetch may name
///   its node.
/// - 4: no bell: a client rings over the socket, and sleeps on its word of the control object.
pub const VERSION: u32 = 4;

/// Largest number of a request.
pub const LAST_TAG: u32 = (1 << 24) - 1;

/// Word 5 of a reply about an object without a checksum.
pub const NO_CHECKSUM: u64 = 1 << 63;

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident { $($(#[$note:meta])* $variant:ident = $code:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$note])* $variant = $code,)*
        }

        impl $name {
            /// From its code; nothing for a code that is not known.
            #[must_use]
            pub fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// What a client asks for through the ring.
    Operation {
        /// Is the object here, sealed.
        Contains = 1,
        /// Allocate.
        Create = 2,
        /// Make immutable and visible.
        Seal = 3,
        /// Give a reference up; an unsealed object goes with the reference of its creator. No reply.
        Release = 4,
        /// Take a reference, once the object is sealed.
        Get = 5,
        /// Remove.
        Delete = 6,
        /// Tell when the object is sealed here.
        Subscribe = 7,
        /// Bring the object here from another node.
        Fetch = 8,
        /// Keep the object whether it is referenced or not.
        Pin = 9,
        /// End a pin.
        Unpin = 10,
        /// Nothing: a round trip.
        Ping = 11,
        /// Memory that the client writes before it says which objects lie there; what was left of
        /// an earlier reserve is given back.
        Reserve = 12,
        /// Create, seal and release of an object that was written at the start of the reserve.
        Put = 13,
        /// What is left of the reserve is the store's again. No reply.
        GiveBack = 14,
    }
}

codes! {
    /// How a request ended.
    Status {
        /// Done.
        Done = 0,
        /// No such object here.
        Absent = 1,
        /// There is an object of this id.
        Exists = 2,
        /// More bytes than the store's limit.
        TooLarge = 3,
        /// No room within the time-out.
        Full = 4,
        /// Not sealed, or not here, within the time-out.
        TimedOut = 5,
        /// Not this client's to do: seal what another creates, release what it does not hold.
        NotYours = 6,
        /// The object is not sealed yet.
        Unsealed = 7,
        /// The object's contents differ from its checksum, or its spilled copy cannot be read.
        Damaged = 8,
        /// A request that no honest client makes.
        Malformed = 9,
        /// No other node has the object, or none of those that have it gave it.
        Unreachable = 10,
        /// A limit on references, subscriptions or objects.
        Limit = 11,
        /// The store is stopping.
        Stopping = 12,
    }
}

/// Flag of [`Operation::Get`]: fetch the object from another node when it is not here.
pub const FLAG_FETCH: u8 = 1;
/// Flag of [`Operation::Seal`]: release the creator's reference too.
pub const FLAG_RELEASE: u8 = 2;
/// Flag of [`Operation::Seal`] and [`Operation::Put`]: word 6 is the checksum of the contents.
pub const FLAG_CHECKSUM: u8 = 4;
/// Flag of [`Operation::Fetch`]: from the node at this address and no other.
pub const FLAG_FROM: u8 = 8;
/// Flag of [`Operation::Get`]: an object on disk is not waited for.
pub const FLAG_IN_MEMORY: u8 = 16;

/// Most bytes of a client's reserve.
pub const MOST_RESERVED: u64 = 1 << 20;

/// A client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which.
    pub operation: Operation,
    /// `FLAG_` bits.
    pub flags: u8,
    /// Which object.
    pub id: ObjectId,
    /// Data bytes of a create; the handle of a release or seal.
    pub size: u64,
    /// Metadata bytes of a create.
    pub metadata_size: u64,
    /// How long to wait, in microseconds; 0 does not wait.
    pub timeout_us: u64,
    /// Checksum of a seal.
    pub checksum: u64,
}

impl Request {
    /// A request about `id` alone.
    #[must_use]
    pub fn new(operation: Operation, id: ObjectId) -> Self {
        Self { operation, flags: 0, id, size: 0, metadata_size: 0, timeout_us: 0, checksum: 0 }
    }

    /// Names the node that a fetch asks.
    #[must_use]
    pub fn with_node(mut self, node: SocketAddr) -> Self {
        let ip = match node.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let address = u128::from(ip);
        self.flags |= FLAG_FROM;
        self.size = address as u64;
        self.metadata_size = (address >> 64) as u64;
        self.checksum = node.port().into();
        self
    }

    /// The node that a fetch asks, if it names one.
    #[must_use]
    pub fn node(&self) -> Option<SocketAddr> {
        if self.operation != Operation::Fetch || self.flags & FLAG_FROM == 0 {
            return None;
        }
        let address = u128::from(self.size) | u128::from(self.metadata_size) << 64;
        let port = (self.checksum & u64::from(u16::MAX)) as u16;
        Some(SocketAddr::new(Ipv6Addr::from(address).to_canonical(), port))
    }

    /// As words of a slot.
    #[must_use]
    pub fn encode(&self) -> [u64; 7] {
        let mut id = self.id.words();
        id[2] |= (self.operation as u64) << 32 | u64::from(self.flags) << 40;
        [id[0], id[1], id[2], self.size, self.metadata_size, self.timeout_us, self.checksum]
    }

    /// From a slot; nothing when the operation is not known.
    #[must_use]
    pub fn decode(message: &SlotMessage) -> Option<Self> {
        let body = &message.body;
        let [.., operation, flags, _, _] = body[2].to_le_bytes();
        Some(Self {
            operation: Operation::from_code(operation)?,
            flags,
            id: ObjectId::from_words([body[0], body[1], body[2]]),
            size: body[3],
            metadata_size: body[4],
            timeout_us: body[5],
            checksum: body[6],
        })
    }
}

/// Where an object lies, as a reply tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// Number of the segment.
    pub segment: u32,
    /// Bytes from its start.
    pub offset: u64,
    /// Data bytes.
    pub size: u64,
    /// Metadata bytes, right behind the data.
    pub metadata_size: u64,
    /// Names the reference in a release.
    pub handle: u64,
    /// CRC-32C of data and metadata, if the creator gave it.
    pub checksum: Option<u32>,
}

/// A store's reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// How the request ended.
    pub status: Status,
    /// For a create and a get that are done.
    pub location: Location,
}

impl Reply {
    /// A reply without a location.
    #[must_use]
    pub fn of(status: Status) -> Self {
        Self { status, location: Location::default() }
    }

    /// As words of a slot.
    #[must_use]
    pub fn encode(&self) -> [u64; 6] {
        let place = &self.location;
        let checksum = place.checksum.map_or(NO_CHECKSUM, u64::from);
        let first = self.status as u64 | u64::from(place.segment) << 32;
        [first, place.offset, place.size, place.metadata_size, place.handle, checksum]
    }

    /// From a slot; nothing when the status is not known.
    #[must_use]
    pub fn decode(message: &SlotMessage) -> Option<Self> {
        let body = &message.body;
        let [status, _, _, _, a, b, c, d] = body[0].to_le_bytes();
        let checksum = (body[5] != NO_CHECKSUM).then(|| u32::try_from(body[5]).ok()).flatten();
        Some(Self {
            status: Status::from_code(status)?,
            location: Location {
                segment: u32::from_le_bytes([a, b, c, d]),
                offset: body[1],
                size: body[2],
                metadata_size: body[3],
                handle: body[4],
                checksum,
            },
        })
    }
}

/// News a subscriber gets: the object was sealed here. As words of a slot.
#[must_use]
pub fn encode_news(id: ObjectId) -> [u64; 3] {
    id.words()
}

/// Back from [`encode_news`].
#[must_use]
pub fn decode_news(message: &SlotMessage) -> ObjectId {
    ObjectId::from_words([message.body[0], message.body[1], message.body[2]])
}

/// Bytes of a record of the socket.
pub const RECORD_BYTES: usize = 32;

codes! {
    /// What a record of the socket is.
    RecordKind {
        /// Client: I speak version `a`.
        Hello = 1,
        /// Store: welcome; descriptor: the control object. `a`: version, `b`: generation of the
        /// store, `c`: the client's number.
        Welcome = 2,
        /// Store: no. `a`: the version it speaks.
        Refused = 3,
        /// Store: segment `a` has `b` bytes; descriptor: its memory. `c` is 1 for the writer.
        Segment = 4,
        /// Client: I mapped segment `a` for writing.
        Mapped = 5,
        /// Store: segment `a` is gone; unmap it.
        Retire = 6,
        /// Client: I unmapped segment `a`.
        Unmapped = 7,
        /// Client: list the objects; `a` names the question.
        List = 8,
        /// Store: the answer to question `a`: `b` entries; descriptor: a listing of `c` bytes.
        Listing = 9,
        /// Client: I took the answer to question `a`.
        Listed = 10,
        /// Store: memory is short; give back what you reserved.
        CallIn = 11,
        /// Client: the store sleeps, and a request waits in the ring.
        Ring = 12,
    }
}

/// A record of the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What it is.
    pub kind: RecordKind,
    /// By kind.
    pub a: u64,
    /// By kind.
    pub b: u64,
    /// By kind.
    pub c: u64,
}

impl Record {
    /// A record.
    #[must_use]
    pub fn new(kind: RecordKind, a: u64, b: u64, c: u64) -> Self {
        Self { kind, a, b, c }
    }

    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[0] = self.kind as u8;
        for (place, word) in bytes[8..].chunks_mut(8).zip([self.a, self.b, self.c]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From bytes; nothing for another length or kind.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; RECORD_BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let kind = RecordKind::from_code(bytes[0])?;
        Some(Self { kind, a: word(8), b: word(16), c: word(24) })
    }
}

/// Bytes of an entry of a listing.
pub const ENTRY_BYTES: usize = 64;

/// One object of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which.
    pub id: ObjectId,
    /// Sealed; else still being written.
    pub sealed: bool,
    /// On disk only.
    pub spilled: bool,
    /// Kept though unreferenced.
    pub pinned: bool,
    /// References held.
    pub references: u32,
    /// Data bytes.
    pub size: u64,
    /// Metadata bytes.
    pub metadata_size: u64,
    /// Milliseconds since the object was created.
    pub age_ms: u64,
}

impl Entry {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..20].copy_from_slice(&self.id.0);
        bytes[20] =
            u8::from(self.sealed) | u8::from(self.spilled) << 1 | u8::from(self.pinned) << 2;
        bytes[24..28].copy_from_slice(&self.references.to_le_bytes());
        let words = [self.size, self.metadata_size, self.age_ms];
        for (place, word) in bytes[32..].chunks_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From bytes.
    #[must_use]
    pub fn decode(bytes: &[u8; ENTRY_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let mut id = [0; 20];
        id.copy_from_slice(&bytes[..20]);
        let mut references = [0; 4];
        references.copy_from_slice(&bytes[24..28]);
        Self {
            id: ObjectId(id),
            sealed: bytes[20] & 1 != 0,
            spilled: bytes[20] & 2 != 0,
            pinned: bytes[20] & 4 != 0,
            references: u32::from_le_bytes(references),
            size: word(32),
            metadata_size: word(40),
            age_ms: word(48),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slot(tag: u32, words: &[u64]) -> SlotMessage {
        let mut body = [0; 7];
        body[..words.len()].copy_from_slice(words);
        SlotMessage { tag, behind: 0, body }
    }

    proptest! {
        #[test]
        fn any_words_decode_to_what_encodes_again(words in proptest::array::uniform7(any::<u64>())) {
            let message = slot(1, &words);
            if let Some(request) = Request::decode(&message) {
                prop_assert_eq!(Request::decode(&slot(1, &request.encode())), Some(request));
            }
            if let Some(reply) = Reply::decode(&message) {
                prop_assert_eq!(Reply::decode(&slot(1, &reply.encode())), Some(reply));
            }
        }

        #[test]
        fn any_bytes_decode_to_a_record_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Some(record) = Record::decode(&bytes) {
                prop_assert_eq!(Record::decode(&record.encode()), Some(record));
            }
        }
    }

    #[test]
    fn an_entry_of_a_listing_comes_back() {
        let entry = Entry {
            id: ObjectId([9; 20]),
            sealed: true,
            spilled: false,
            pinned: true,
            references: 3,
            size: 1 << 40,
            metadata_size: 5,
            age_ms: 77,
        };
        assert_eq!(Entry::decode(&entry.encode()), entry);
    }
}
