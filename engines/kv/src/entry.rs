//! The log entry: one key-value pair with its metadata, byte by byte.
//!
//! ```text
//!  0 version       u64  server: from the store's counter; larger is newer
//!  8 seal          u64  server: keyed hash over place, version, checksum and slot length
//! 16 checksum      u32  writer: crc32c over bytes 20 .. 48 + key + value
//! 20 slot_bytes    u32  distance to the next entry; set once at append
//! 24 key_length    u16
//! 26 kind          u8   encoding of the value: 0 string
//! 27 flags         u8   TOMBSTONE 1, EXPIRES 2, BATCH_MORE 4, APPENDED 8
//! 28 value_length  u32
//! 32 expires_at_ms u64  0 = never
//! 40 namespace     u32  0 to 15 are the databases; then four zero bytes
//! 48 key, value, zeros up to a multiple of 16
//! ```
//!
//! Source: BOOM-KV §2.1. Deviation: the seal makes an entry its own commit mark. It is a SipHash
//! keyed with the pool's secret, so a client that can write a segment can neither forge a version
//! nor plant an entry, and recovery needs no second fence to know which entries were committed.

use crate::siphash::SipHash;

/// Bytes before the key.
pub const HEADER_BYTES: u32 = 48;
/// Entries start at multiples of this.
pub const ALIGNMENT: u32 = 16;
/// Offset of the first entry in a segment; offset 0 stays free so that a location is never 0.
pub const FIRST_ENTRY: u32 = 64;
/// Longest key in bytes.
pub const KEY_LIMIT: usize = u16::MAX as usize;
/// Longest value in bytes, where the segment is large enough.
pub const VALUE_LIMIT: usize = 512 << 20;

/// The entry marks its key as deleted.
pub const TOMBSTONE: u8 = 1;
/// `expires_at_ms` is not 0.
pub const EXPIRES: u8 = 2;
/// More entries of the same atomic batch follow directly.
pub const BATCH_MORE: u8 = 4;

/// The entry belongs to a stream: the last [`STREAM_KEY_BYTES`] of its key are the stream's generation and
/// its position.
pub const APPENDED: u8 = 8;

const KNOWN_FLAGS: u8 = TOMBSTONE | EXPIRES | BATCH_MORE | APPENDED;

/// Bytes at the end of the key of a stream's entry.
pub const STREAM_KEY_BYTES: usize = 16;

/// The first 48 bytes of an entry, decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Larger is newer, across the whole store.
    pub version: u64,
    /// Keyed commit mark; see [`Sealer`].
    pub seal: u64,
    /// crc32c over bytes 20 .. end of value.
    pub checksum: u32,
    /// Distance to the next entry in bytes.
    pub slot_bytes: u32,
    /// Key length in bytes.
    pub key_length: u16,
    /// Encoding of the value.
    pub kind: u8,
    /// [`TOMBSTONE`], [`EXPIRES`], [`BATCH_MORE`], [`APPENDED`].
    pub flags: u8,
    /// Value length in bytes.
    pub value_length: u32,
    /// Wall-clock time of expiry in milliseconds, 0 = never.
    pub expires_at_ms: u64,
    /// Namespace of the key; the sixteen databases are 0 to 15.
    pub namespace: u32,
}

impl Header {
    /// The bytes as they lie in memory.
    #[must_use]
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[0..8].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.seal.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.slot_bytes.to_le_bytes());
        bytes[24..26].copy_from_slice(&self.key_length.to_le_bytes());
        bytes[26] = self.kind;
        bytes[27] = self.flags;
        bytes[28..32].copy_from_slice(&self.value_length.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.expires_at_ms.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.namespace.to_le_bytes());
        bytes
    }

    /// Writes checksum and seal into bytes that [`Header::encode`] made without them.
    #[inline]
    pub fn encode_marks(&self, bytes: &mut [u8; HEADER_BYTES as usize]) {
        bytes[8..16].copy_from_slice(&self.seal.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.checksum.to_le_bytes());
    }

    /// Reads the fields; says nothing about their sense, see [`Header::is_plausible`].
    #[must_use]
    #[inline]
    pub fn decode(bytes: &[u8; HEADER_BYTES as usize]) -> Self {
        let u64_at = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let u32_at = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(word)
        };
        Self {
            version: u64_at(0),
            seal: u64_at(8),
            checksum: u32_at(16),
            slot_bytes: u32_at(20),
            key_length: u16::from_le_bytes([bytes[24], bytes[25]]),
            kind: bytes[26],
            flags: bytes[27],
            value_length: u32_at(28),
            expires_at_ms: u64_at(32),
            namespace: u32_at(40),
        }
    }

    /// Bytes from the start of the entry to the end of its value.
    #[must_use]
    #[inline]
    pub fn used_bytes(&self) -> u64 {
        u64::from(HEADER_BYTES) + u64::from(self.key_length) + u64::from(self.value_length)
    }

    /// True when lengths and flags agree with each other and with `room_bytes`, the
    /// distance from the entry to the end of what may hold it.
    #[must_use]
    #[inline]
    pub fn is_plausible(&self, room_bytes: u64) -> bool {
        let slot = u64::from(self.slot_bytes);
        slot.is_multiple_of(u64::from(ALIGNMENT))
            && slot <= room_bytes
            && self.used_bytes() <= slot
            && self.flags & !KNOWN_FLAGS == 0
            && (self.flags & EXPIRES != 0) == (self.expires_at_ms != 0)
            && (self.flags & TOMBSTONE == 0 || self.value_length == 0)
            && (!self.is_appended()
                || (self.flags & (TOMBSTONE | EXPIRES) == 0
                    && usize::from(self.key_length) >= STREAM_KEY_BYTES))
    }

    /// True for an entry of a stream.
    #[must_use]
    #[inline]
    pub fn is_appended(&self) -> bool {
        self.flags & APPENDED != 0
    }

    /// True for an entry that a one-sided client may write: on its own, in a database, of no stream.
    #[must_use]
    #[inline]
    pub(crate) fn is_for_clients(&self) -> bool {
        self.flags & (BATCH_MORE | APPENDED) == 0 && self.namespace < u32::from(crate::DATABASES)
    }

    /// The part of the entry's key that says where it belongs: of a stream's entry the stream's.
    #[must_use]
    #[inline]
    pub fn place_of<'k>(&self, key: &'k [u8]) -> &'k [u8] {
        if self.is_appended() { &key[..key.len().saturating_sub(STREAM_KEY_BYTES)] } else { key }
    }

    /// True for a deletion.
    #[must_use]
    #[inline]
    pub fn is_tombstone(&self) -> bool {
        self.flags & TOMBSTONE != 0
    }
}

/// Where an encoded header holds the checksum.
pub const CHECKSUM_AT: std::ops::Range<usize> = 16..20;

/// Length of the slot that an entry with these lengths needs, in bytes.
#[must_use]
#[inline]
pub fn slot_bytes_for(key_length: usize, value_length: usize) -> u64 {
    (u64::from(HEADER_BYTES) + key_length as u64 + value_length as u64)
        .next_multiple_of(u64::from(ALIGNMENT))
}

/// Where the bytes that the checksum covers begin; they end with the value.
pub const CHECKED_FROM: usize = 20;

/// crc32c over the writer's part of an entry: bytes 20..48 of `header`, then `key`, then `value`.
#[must_use]
#[inline]
pub fn checksum(header: &[u8; HEADER_BYTES as usize], key: &[u8], value: &[&[u8]]) -> u32 {
    const CHECKED: usize = HEADER_BYTES as usize - CHECKED_FROM;
    let Some(checked) = header.last_chunk::<CHECKED>() else {
        unreachable!("of a header's length")
    };
    beeline_wire::crc32c_joined(checked, key, value)
}

/// As [`checksum`], of an entry that lies in one piece: header, key and value.
///
/// Invariant: the piece is as long as a header at least.
#[must_use]
#[inline]
pub fn checksum_whole(entry: &[u8]) -> u32 {
    assert!(entry.len() >= HEADER_BYTES as usize, "an entry begins with its header");
    beeline_wire::crc32c(&entry[CHECKED_FROM..])
}

/// What a one-sided client writes: everything but version and seal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Draft<'a> {
    /// Database of the key.
    pub database: u8,
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// Encoding of the value.
    pub kind: u8,
    /// Wall-clock time of expiry in milliseconds, 0 = never.
    pub expires_at_ms: u64,
    /// Marks the key as deleted; the value must be empty.
    pub tombstone: bool,
    /// Length of the slot: 0 for an append (the smallest slot is taken), the original slot's
    /// length for an overwrite in place.
    pub slot_bytes: u32,
}

impl Draft<'_> {
    /// Appends the entry, without version and seal, to `buffer` and returns its slot length.
    ///
    /// Errors: [`crate::KvError::KeyTooLong`], [`crate::KvError::ValueTooLong`] (against the slot
    /// given, or the general limit).
    pub fn form(&self, buffer: &mut Vec<u8>) -> Result<u32, crate::KvError> {
        if self.key.len() > KEY_LIMIT {
            return Err(crate::KvError::KeyTooLong { length: self.key.len(), limit: KEY_LIMIT });
        }
        let needed = slot_bytes_for(self.key.len(), self.value.len());
        let slot = if self.slot_bytes == 0 { needed } else { u64::from(self.slot_bytes) };
        if self.value.len() > VALUE_LIMIT || needed > slot {
            let limit = VALUE_LIMIT.min(slot.saturating_sub(48 + self.key.len() as u64) as usize);
            return Err(crate::KvError::ValueTooLong { length: self.value.len(), limit });
        }
        let mut header = Header {
            slot_bytes: slot as u32,
            key_length: self.key.len() as u16,
            kind: self.kind,
            flags: if self.tombstone { TOMBSTONE } else { 0 }
                | if self.expires_at_ms != 0 { EXPIRES } else { 0 },
            value_length: self.value.len() as u32,
            expires_at_ms: self.expires_at_ms,
            namespace: u32::from(self.database),
            ..Header::default()
        };
        header.checksum = checksum(&header.encode(), self.key, &[self.value]);
        let start = buffer.len();
        buffer.extend_from_slice(&header.encode());
        buffer.extend_from_slice(self.key);
        buffer.extend_from_slice(self.value);
        buffer.resize(start + needed as usize, 0);
        Ok(slot as u32)
    }
}

/// Makes and checks seals with the pool's secret.
#[derive(Clone)]
pub struct Sealer {
    key: [u64; 2],
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Sealer(secret)")
    }
}

impl Sealer {
    /// A sealer for the pool with this secret.
    #[must_use]
    pub fn new(secret: &[u8; 16]) -> Self {
        let (halves, _) = secret.as_chunks::<8>();
        Self { key: [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])] }
    }

    /// The seal of an entry at `offset` of the segment `id` in its life `generation`.
    #[must_use]
    #[inline]
    pub fn seal(&self, id: u32, generation: u64, offset: u32, header: &Header) -> u64 {
        siphash_1_3(
            self.key,
            [
                u64::from(id) | u64::from(offset) << 32,
                generation,
                header.version,
                u64::from(header.checksum) | u64::from(header.slot_bytes) << 32,
            ],
        )
    }
}

/// SipHash-1-3 of the 32 bytes of `message`. One length only, so that nothing is buffered or
/// branched upon: each entry stored and each entry verified costs one.
#[inline]
fn siphash_1_3(key: [u64; 2], message: [u64; 4]) -> u64 {
    let mut hash = SipHash::new(key);
    message.into_iter().for_each(|word| hash.word(word));
    // The last block holds the length alone.
    hash.word(32 << 56);
    hash.finish()
}

const _: () = assert!(FIRST_ENTRY.is_multiple_of(ALIGNMENT) && FIRST_ENTRY > 0);
const _: () = assert!(HEADER_BYTES.is_multiple_of(ALIGNMENT));

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_header_survives_encoding(version: u64, seal: u64, checksum: u32, slot_bytes: u32,
            key_length: u16, kind: u8, flags: u8, value_length: u32, expires_at_ms: u64, namespace: u32)
        {
            let header = Header { version, seal, checksum, slot_bytes, key_length, kind, flags,
                value_length, expires_at_ms, namespace };
            prop_assert_eq!(Header::decode(&header.encode()), header);
        }
    }

    proptest! {
        #[test]
        fn the_hash_of_seals_is_siphash_1_3(secret: [u8; 16], message: [u64; 4]) {
            let mut bytes = Vec::new();
            message.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
            let reference = siphasher::sip::SipHasher13::new_with_key(&secret).hash(&bytes);
            prop_assert_eq!(siphash_1_3(Sealer::new(&secret).key, message), reference);
        }
    }

    #[test]
    fn a_seal_depends_on_place_version_and_contents() {
        let sealer = Sealer::new(b"0123456789abcdef");
        let header = Header { version: 7, checksum: 9, slot_bytes: 64, ..Header::default() };
        let seal = sealer.seal(1, 2, 64, &header);
        assert_ne!(seal, sealer.seal(2, 2, 64, &header), "another segment");
        assert_ne!(seal, sealer.seal(1, 3, 64, &header), "another life of the segment");
        assert_ne!(seal, sealer.seal(1, 2, 80, &header), "another offset");
        for other in [
            Header { version: 8, ..header },
            Header { checksum: 8, ..header },
            Header { slot_bytes: 80, ..header },
        ] {
            assert_ne!(seal, sealer.seal(1, 2, 64, &other));
        }
        assert_ne!(seal, Sealer::new(b"another secret!!").seal(1, 2, 64, &header));
    }

    #[test]
    fn a_draft_is_a_plausible_entry_with_a_right_checksum() {
        let mut bytes = Vec::new();
        let draft = Draft { database: 3, key: b"key", value: b"value", ..Draft::default() };
        let slot = draft.form(&mut bytes).unwrap();
        let mut head = [0; 48];
        head.copy_from_slice(&bytes[..48]);
        let header = Header::decode(&head);
        assert!(header.is_plausible(u64::from(slot)));
        assert!(!header.is_plausible(u64::from(slot) - 16));
        assert_eq!(header.checksum, checksum(&head, b"key", &[b"value"]));
        assert_eq!(bytes.len(), slot as usize);
    }
}
