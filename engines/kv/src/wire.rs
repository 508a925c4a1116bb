//! Messages of the one-sided protocols: BOOM and its two baselines.
//!
//! Place: shared by `kv-server` and `kv-client`, so that one file says what crosses the wire. Pure
//! codecs: no I/O, no allocation. Every decoder treats its input as hostile: it reads a copy,
//! checks every length against what arrived, and answers `None` rather than guess.
//!
//! ```text
//! Hello    (connect)          client → server   32 B        protocol, window, sizes wanted
//! Welcome  (connect)          server → client   64 B        what was granted
//! Request  (SEND)             client → server   48 B + key
//! Reply    (SEND)             server → client   24 B or 48 B
//! entry    (WRITE_WITH_IMM)   client → server   PUT and DELETE; immediate = Announcement
//! entry    (WRITE_WITH_IMM)   server → client   GET; immediate = the request's tag
//! ```
//!
//! All integers are little-endian. Requests of one connection are answered in order, one reply
//! each; the tag is an echo that lets the client check that. Source: BOOM §3.1.

mod handshake;

pub use handshake::{
    HELLO_BYTES, Hello, MAGIC, Protocol, Refusal, VERSION, WELCOME_BYTES, Welcome,
};

/// Length of a [`Request`] before its key, bytes.
pub const REQUEST_HEADER_BYTES: usize = 48;

/// Length of a [`Reply`] without an address, bytes.
pub const REPLY_BYTES: usize = 24;

/// Length of a [`Reply`] that carries an address, bytes; the longest there is.
pub const LONG_REPLY_BYTES: usize = 48;

/// Length of the [`ScanHeader`] at the start of a scan result, bytes.
pub const SCAN_HEADER_BYTES: usize = 16;

/// [`Reply::minimum_reading`] when no get of the key is in flight.
pub const NOTHING_READING: u64 = u64::MAX;

/// A place in the peer's memory: region key and bytes from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Which region.
    pub key: u64,
    /// Bytes from its start.
    pub offset: u64,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at + 2)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at + 8)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

fn set<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&field);
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// Nothing; answered as soon as everything before it is.
    Ping,
    /// A log segment (the paper's metadata request).
    Grant,
    /// The entry of a key, into the result buffer.
    Get,
    /// As `Get`, after the server checked the entry on a private copy; asked for when the entry
    /// that arrived does not carry its checksum.
    VerifiedGet,
    /// Keys from a cursor on, into the result buffer.
    Scan,
    /// Statistics as text, into the result buffer.
    Stats,
    /// Two-phase baseline, phase 1 of a put: space for an entry.
    Allocate,
    /// Two-phase baseline, phase 1 of a get: where the entry lies.
    Locate,
    /// NVM-oblivious baseline: a put whose value follows the key in the request slot.
    Put,
    /// NVM-oblivious baseline: a deletion.
    Delete,
}

impl RequestKind {
    /// All of them, in the order of their wire numbers.
    pub const ALL: [Self; 10] = [
        Self::Ping,
        Self::Grant,
        Self::Get,
        Self::VerifiedGet,
        Self::Scan,
        Self::Stats,
        Self::Allocate,
        Self::Locate,
        Self::Put,
        Self::Delete,
    ];

    fn decode(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte).checked_sub(1)?).copied()
    }

    fn encode(self) -> u8 {
        self as u8 + 1
    }
}

/// A request, before its key.
///
/// | bytes | field |
/// |---|---|
/// | 0 | kind |
/// | 1 | flags, 0 |
/// | 2..4 | tag |
/// | 4 | database |
/// | 5 | 0 |
/// | 6..8 | leases released |
/// | 8..24 | result place: key, offset |
/// | 24..28 | result length |
/// | 28..32 | key length |
/// | 32..40 | argument |
/// | 40..48 | expiry |
/// | 48.. | key, then (Put) value |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is asked for.
    pub kind: RequestKind,
    /// Echoed in the answer.
    pub tag: u16,
    /// Database, 0..16.
    pub database: u8,
    /// Two-phase baseline: how many located entries the client has finished reading, counted from
    /// the start of the connection, modulo 2^16.
    pub released: u16,
    /// Where the answer goes.
    pub result: Place,
    /// Room there, bytes.
    pub result_bytes: u32,
    /// Bytes of the key that follows.
    pub key_bytes: u32,
    /// Scan: cursor. Put: bytes of the value. Allocate: bytes of the entry.
    pub argument: u64,
    /// Put: when it expires, ms since the epoch, 0 never. Scan: how many keys at most.
    pub extra: u64,
}

impl Request {
    /// A request for `kind` with everything else zero.
    #[must_use]
    pub fn new(kind: RequestKind, tag: u16) -> Self {
        Self {
            kind,
            tag,
            database: 0,
            released: 0,
            result: Place::default(),
            result_bytes: 0,
            key_bytes: 0,
            argument: 0,
            extra: 0,
        }
    }

    /// The bytes before the key.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_HEADER_BYTES] {
        let mut bytes = [0; REQUEST_HEADER_BYTES];
        bytes[0] = self.kind.encode();
        set(&mut bytes, 2, self.tag.to_le_bytes());
        bytes[4] = self.database;
        set(&mut bytes, 6, self.released.to_le_bytes());
        set(&mut bytes, 8, self.result.key.to_le_bytes());
        set(&mut bytes, 16, self.result.offset.to_le_bytes());
        set(&mut bytes, 24, self.result_bytes.to_le_bytes());
        set(&mut bytes, 28, self.key_bytes.to_le_bytes());
        set(&mut bytes, 32, self.argument.to_le_bytes());
        set(&mut bytes, 40, self.extra.to_le_bytes());
        bytes
    }

    /// From a private copy of a message. The caller checks `key_bytes` against what arrived.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < REQUEST_HEADER_BYTES || bytes[1] != 0 || bytes[5] != 0 {
            return None;
        }
        Some(Self {
            kind: RequestKind::decode(bytes[0])?,
            tag: u16_at(bytes, 2)?,
            database: bytes[4],
            released: u16_at(bytes, 6)?,
            result: Place { key: u64_at(bytes, 8)?, offset: u64_at(bytes, 16)? },
            result_bytes: u32_at(bytes, 24)?,
            key_bytes: u32_at(bytes, 28)?,
            argument: u64_at(bytes, 32)?,
            extra: u64_at(bytes, 40)?,
        })
    }

    /// The key inside the message this request was decoded from, when it is all there and, unless
    /// the kind is [`RequestKind::Put`], nothing follows it.
    #[must_use]
    pub fn key<'a>(&self, message: &'a [u8]) -> Option<&'a [u8]> {
        let end = REQUEST_HEADER_BYTES.checked_add(usize::try_from(self.key_bytes).ok()?)?;
        let key = message.get(REQUEST_HEADER_BYTES..end)?;
        (self.kind == RequestKind::Put || end == message.len()).then_some(key)
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplyStatus {
    /// Done.
    Ok,
    /// No such key. To an entry: it was taken in; the key was not there before.
    NotFound,
    /// The result buffer is too small; [`Reply::version`] holds the bytes needed.
    BufferTooSmall,
    /// The key belongs to another shard.
    WrongShard,
    /// The stored entry does not carry its checksum or seal.
    Damaged,
    /// No memory for another segment or entry.
    PoolFull,
    /// The announced entry is not acceptable: wrong offset, checksum, length or database. Nothing
    /// changed; the client asks for a new segment.
    Rejected,
    /// The announced grant is not the current one (it was reclaimed, or never existed).
    StaleGrant,
    /// The request makes no sense here.
    Malformed,
    /// Key or value longer than the store takes; [`Reply::version`] holds the limit.
    TooLarge,
    /// The store cannot write (medium error, read-only), or its cluster has no leader: nothing was
    /// done.
    Unavailable,
    /// The cluster's log did not answer in time: a write may take effect all the same.
    Undecided,
    /// The entry's kind is one of the store's own: those of hashes and other rows.
    ReservedKind,
}

impl ReplyStatus {
    /// All of them, in the order of their wire numbers.
    pub const ALL: [Self; 13] = [
        Self::Ok,
        Self::NotFound,
        Self::BufferTooSmall,
        Self::WrongShard,
        Self::Damaged,
        Self::PoolFull,
        Self::Rejected,
        Self::StaleGrant,
        Self::Malformed,
        Self::TooLarge,
        Self::Unavailable,
        Self::Undecided,
        Self::ReservedKind,
    ];

    fn decode(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

/// The small answer.
///
/// | bytes | field |
/// |---|---|
/// | 0 | status |
/// | 1 | grant number |
/// | 2..4 | tag: the request's, or the low 16 bits of the announced entry's place |
/// | 4..8 | length |
/// | 8..16 | version, or the number a status documents |
/// | 16..24 | smallest version being read |
/// | 24..40 | place: key, offset (long form only) |
/// | 40..48 | 0 (long form only) |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// How it ended.
    pub status: ReplyStatus,
    /// Grant: its number, 0..32. Allocate: the grant the place lies in.
    pub grant: u8,
    /// Echo.
    pub tag: u16,
    /// Grant: bytes of the segment. Locate: bytes of the entry. Allocate: bytes of the slot.
    pub length: u32,
    /// Put, delete: version assigned; see also the statuses that use it otherwise.
    pub version: u64,
    /// Put, delete: smallest version of the key that a get in flight reads (BOOM §3.1 step 4), or
    /// [`NOTHING_READING`].
    pub minimum_reading: u64,
    /// Grant, allocate, locate: where.
    pub place: Option<Place>,
}

impl Reply {
    /// A short reply with neither version nor readers.
    #[must_use]
    pub fn new(status: ReplyStatus, tag: u16) -> Self {
        Self {
            status,
            grant: 0,
            tag,
            length: 0,
            version: 0,
            minimum_reading: NOTHING_READING,
            place: None,
        }
    }

    /// Bytes it takes on the wire.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        if self.place.is_some() { LONG_REPLY_BYTES } else { REPLY_BYTES }
    }

    /// As sent; the first [`Reply::encoded_bytes`] count.
    #[must_use]
    pub fn encode(&self) -> [u8; LONG_REPLY_BYTES] {
        let mut bytes = [0; LONG_REPLY_BYTES];
        bytes[0] = self.status as u8;
        bytes[1] = self.grant;
        set(&mut bytes, 2, self.tag.to_le_bytes());
        set(&mut bytes, 4, self.length.to_le_bytes());
        set(&mut bytes, 8, self.version.to_le_bytes());
        set(&mut bytes, 16, self.minimum_reading.to_le_bytes());
        if let Some(place) = self.place {
            set(&mut bytes, 24, place.key.to_le_bytes());
            set(&mut bytes, 32, place.offset.to_le_bytes());
        }
        bytes
    }

    /// From a private copy of a message.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let place = match bytes.len() {
            REPLY_BYTES => None,
            LONG_REPLY_BYTES => Some(Place { key: u64_at(bytes, 24)?, offset: u64_at(bytes, 32)? }),
            _ => return None,
        };
        Some(Self {
            status: ReplyStatus::decode(bytes[0])?,
            grant: bytes[1],
            tag: u16_at(bytes, 2)?,
            length: u32_at(bytes, 4)?,
            version: u64_at(bytes, 8)?,
            minimum_reading: u64_at(bytes, 16)?,
            place,
        })
    }
}

/// The immediate of a client's write: which entry was placed, and how.
///
/// ```text
///  31        30..26        25..0
///  in place  grant number  offset / 16
/// ```
///
/// 26 bits of 16-byte units reach the 1 GiB a segment may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Overwrites an earlier entry; else appended at the tail.
    pub in_place: bool,
    /// Number of the grant it lies in, 0..32.
    pub grant: u8,
    /// Offset of the entry in its segment, bytes, a multiple of 16 below 1 GiB.
    pub offset: u32,
}

impl Announcement {
    /// Grant numbers run modulo this.
    pub const GRANTS: u8 = 32;

    /// As an immediate.
    ///
    /// Invariant: the fields are in range.
    #[must_use]
    pub fn encode(self) -> u32 {
        assert!(self.offset.is_multiple_of(16), "entries are aligned to 16 bytes");
        assert!(self.offset < 1 << 30, "segments have at most 1 GiB");
        assert!(self.grant < Self::GRANTS, "grant numbers run modulo 32");
        u32::from(self.in_place) << 31 | u32::from(self.grant) << 26 | self.offset >> 4
    }

    /// From an immediate; every value has a meaning.
    #[must_use]
    pub fn decode(immediate: u32) -> Self {
        Self {
            in_place: immediate >> 31 != 0,
            grant: (immediate >> 26) as u8 & (Self::GRANTS - 1),
            offset: (immediate & ((1 << 26) - 1)) << 4,
        }
    }

    /// The tag of its reply.
    #[must_use]
    pub fn tag(immediate: u32) -> u16 {
        immediate as u16
    }
}

/// First bytes of a scan result; `count` records follow, each key length (2 B), value encoding
/// (1 B), 0 (1 B), key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanHeader {
    /// Cursor of the next scan; 0 when the keys are through.
    pub next: u64,
    /// Records that follow.
    pub count: u32,
    /// Their bytes.
    pub length: u32,
}

impl ScanHeader {
    /// As written.
    #[must_use]
    pub fn encode(&self) -> [u8; SCAN_HEADER_BYTES] {
        let mut bytes = [0; SCAN_HEADER_BYTES];
        set(&mut bytes, 0, self.next.to_le_bytes());
        set(&mut bytes, 8, self.count.to_le_bytes());
        set(&mut bytes, 12, self.length.to_le_bytes());
        bytes
    }

    /// From a private copy.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self { next: u64_at(bytes, 0)?, count: u32_at(bytes, 8)?, length: u32_at(bytes, 12)? })
    }
}

/// Appends one record of a scan result.
pub fn push_scan_record(result: &mut Vec<u8>, key: &[u8], kind: u8) {
    let length = u16::try_from(key.len()).unwrap_or(u16::MAX);
    result.extend_from_slice(&length.to_le_bytes());
    result.extend_from_slice(&[kind, 0]);
    result.extend_from_slice(&key[..usize::from(length)]);
}

/// Takes the first record off `records`.
#[must_use]
pub fn pop_scan_record<'a>(records: &mut &'a [u8]) -> Option<(&'a [u8], u8)> {
    let length = usize::from(u16_at(records, 0)?);
    let kind = *records.get(2)?;
    let key = records.get(4..4 + length)?;
    *records = &records[4 + length..];
    Some((key, kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoders_survive_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            let _ = Reply::decode(&bytes);
            let _ = ScanHeader::decode(&bytes);
            if let Some(request) = Request::decode(&bytes)
                && let Some(key) = request.key(&bytes)
            {
                prop_assert_eq!(key.len(), request.key_bytes as usize);
            }
            let mut rest = bytes.as_slice();
            while pop_scan_record(&mut rest).is_some() {}
        }

        #[test]
        fn an_announcement_survives_the_round_trip(in_place in any::<bool>(), grant in 0_u8..32, unit in 0_u32..1 << 26) {
            let announcement = Announcement { in_place, grant, offset: unit << 4 };
            prop_assert_eq!(Announcement::decode(announcement.encode()), announcement);
        }

        #[test]
        fn a_request_survives_the_round_trip(
            kind in prop::sample::select(RequestKind::ALL.to_vec()),
            (tag, database, released) in any::<(u16, u8, u16)>(),
            (key, offset, result_bytes, argument, extra) in any::<(u64, u64, u32, u64, u64)>(),
            name in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let request = Request {
                kind, tag, database, released, result: Place { key, offset }, result_bytes,
                key_bytes: name.len() as u32, argument, extra,
            };
            let mut message = request.encode().to_vec();
            message.extend_from_slice(&name);
            prop_assert_eq!(Request::decode(&message), Some(request));
            prop_assert_eq!(request.key(&message), Some(name.as_slice()));
        }

        #[test]
        fn a_reply_survives_the_round_trip(
            status in prop::sample::select(ReplyStatus::ALL.to_vec()),
            (grant, tag, length, version, minimum_reading) in any::<(u8, u16, u32, u64, u64)>(),
            place in prop::option::of((any::<u64>(), any::<u64>())),
        ) {
            let place = place.map(|(key, offset)| Place { key, offset });
            let reply = Reply { status, grant, tag, length, version, minimum_reading, place };
            prop_assert_eq!(Reply::decode(&reply.encode()[..reply.encoded_bytes()]), Some(reply));
        }
    }

    #[test]
    fn a_key_longer_than_the_message_is_no_key() {
        let mut request = Request::new(RequestKind::Get, 1);
        request.key_bytes = 5;
        let mut message = request.encode().to_vec();
        message.extend_from_slice(b"four");
        assert_eq!(request.key(&message), None);
        message.extend_from_slice(b"!!");
        assert_eq!(request.key(&message), None, "bytes after the key are refused");
    }

    #[test]
    fn scan_records_come_back_in_order() {
        let mut records = Vec::new();
        push_scan_record(&mut records, b"alpha", 0);
        push_scan_record(&mut records, b"", 3);
        let mut rest = records.as_slice();
        assert_eq!(pop_scan_record(&mut rest), Some((&b"alpha"[..], 0)));
        assert_eq!(pop_scan_record(&mut rest), Some((&b""[..], 3)));
        assert_eq!(pop_scan_record(&mut rest), None);
    }
}
