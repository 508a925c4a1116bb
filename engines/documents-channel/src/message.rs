//! The control message, byte by byte, and the codes of immediates.
//!
//! All numbers are little-endian; the layout is packed.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 1 | type |
//! | 1 | 2 | used bytes of the name |
//! | 3 | 512 | name: database and collection, or the node that asks for the log |
//! | 515 | 8 | step: a round of synchronisation |
//! | 523 | 8 | request index, below 0xFFFFFFFE |
//! | 531 | 8 | address the answer is written to |
//! | 539 | 4 | remote key of that address: 1 names the region announced in the greeting |
//! | 543 | 4 | data type |
//! | 547 | 8 | shape of a batch of the log: entries u32, 0 u32 |
//! | 555 | 8 | bytes: capacity at the address, or length of what is sent |
//! | 563 | 16 | optimes from, to |
//! | 579 | 4 | bytes of the body; in an answer, the error's |
//! | 583 | up to 440 | body |
//!
//! Source: spec/rmongo.md 3.5. The key is 4 bytes there and 8 in fabric, so it names a region of the
//! greeting instead of being the key itself. A checksum stands in front of each part of a reply ([`Part`]) and not in
//! the place of the address: replies are no messages. Step and shape are read and kept, and nothing here sets them: an
//! answer holds its entries as a list.

use beeline_os::memory::{MemoryObject, copy_out};

/// Most bytes of a message.
pub const LONGEST: usize = BODY + LONGEST_BODY;
/// Bytes from one slot of a ring to the next.
pub const SLOT_BYTES: usize = 1024;
/// Most bytes of a name.
pub const LONGEST_NAME: usize = 512;
/// Most bytes of a body that travels inside the message.
pub const LONGEST_BODY: usize = 440;
/// Where the body begins; no message is shorter.
pub const BODY: usize = 583;
/// The remote key that names the region of the greeting.
pub const REGION_KEY: u32 = 1;

/// Bytes of a message's first cache line.
const FIRST: usize = 64;
const NAME_SIZE: usize = 1;
const NAME: usize = 3;
const STEP: usize = 515;
const INDEX: usize = 523;
const ADDRESS: usize = 531;
const KEY: usize = 539;
const DATA_TYPE: usize = 543;
const SHAPE: usize = 547;
const BYTES: usize = 555;
const FROM: usize = 563;
const TO: usize = 571;
const BODY_SIZE: usize = 579;

const _: () = assert!(LONGEST < SLOT_BYTES, "a message is less than 1 KB");
const _: () = assert!(NAME + LONGEST_NAME == STEP && BODY_SIZE + 4 == BODY, "fields are packed");

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MessageType {
    /// Which is the newest entry of the log?
    OptimeRequest = 0,
    /// It is `to`.
    OptimeResponse = 1,
    /// The log from its start up to `to`.
    OplogInitSynRequest = 2,
    /// The log behind `from` up to `to`.
    OplogSynRequest = 3,
    /// Insert documents.
    Insert = 4,
    /// Change documents.
    Update = 5,
    /// Delete documents.
    Delete = 6,
    /// Read documents.
    Query = 7,
    /// Any other command.
    Command = 8,
    /// An area for bodies that do not fit into messages.
    GrantRequest = 9,
    /// It is at the address, `bytes` long.
    Grant = 10,
    /// The next part of a reply that was longer than its destination.
    Continue = 11,
    /// The request failed.
    ErrorStatus = 12,
}

impl MessageType {
    /// Every type, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::OptimeRequest,
        Self::OptimeResponse,
        Self::OplogInitSynRequest,
        Self::OplogSynRequest,
        Self::Insert,
        Self::Update,
        Self::Delete,
        Self::Query,
        Self::Command,
        Self::GrantRequest,
        Self::Grant,
        Self::Continue,
        Self::ErrorStatus,
    ];

    /// A request that carries a command's body.
    #[must_use]
    pub fn is_command(self) -> bool {
        matches!(self, Self::Insert | Self::Update | Self::Delete | Self::Query | Self::Command)
    }

    /// A request for the log.
    #[must_use]
    pub fn is_log(self) -> bool {
        matches!(self, Self::OptimeRequest | Self::OplogInitSynRequest | Self::OplogSynRequest)
    }
}

/// How a request's body comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DataType {
    /// There is none.
    None = 0,
    /// BSON inside the message.
    Bson = 1,
    /// BSON in the granted area; the body is its place there and its length, u64 each.
    Granted = 2,
    /// As `Granted`; a part of it, and more follow.
    GrantedPart = 3,
}

/// A message, read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'m> {
    /// What it is.
    pub kind: MessageType,
    /// Database and collection.
    pub name: &'m [u8],
    /// Round of synchronisation.
    pub step: u64,
    /// The request.
    pub index: u32,
    /// Destination of the answer.
    pub address: u64,
    /// Its region.
    pub key: u32,
    /// How the body comes.
    pub data_type: DataType,
    /// Entries of a batch of the log.
    pub entries: u32,
    /// Capacity of the destination, or a length.
    pub bytes: u64,
    /// Optime.
    pub from: u64,
    /// Optime.
    pub to: u64,
    /// The command, or the text of an error behind its code.
    pub body: &'m [u8],
}

/// Why some bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Too short, too long, or cut.
    #[error(
        "{length} bytes are no control message: it has {BODY} to {LONGEST} bytes, as its fields say"
    )]
    Length {
        /// Bytes that came.
        length: usize,
    },
    /// A field out of its range.
    #[error("the field {field} of a control message is {value}, which is out of its range")]
    Field {
        /// Which.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

impl Message<'_> {
    /// A message of this type whose other fields are empty.
    #[must_use]
    pub fn new(kind: MessageType, index: u32) -> Self {
        Message {
            kind,
            name: &[],
            step: 0,
            index,
            address: 0,
            key: 0,
            data_type: DataType::None,
            entries: 0,
            bytes: 0,
            from: 0,
            to: 0,
            body: &[],
        }
    }

    /// Writes it; returns its bytes.
    ///
    /// Errors: a name or a body that is too long.
    pub fn write<'o>(&self, out: &'o mut [u8; SLOT_BYTES]) -> Result<&'o [u8], MessageError> {
        let too_long = |field, length: usize| MessageError::Field { field, value: length as u64 };
        if self.name.len() > LONGEST_NAME {
            return Err(too_long("name", self.name.len()));
        }
        if self.body.len() > LONGEST_BODY {
            return Err(too_long("body", self.body.len()));
        }
        let length = BODY + self.body.len();
        out[0] = self.kind as u8;
        put(out, NAME_SIZE, &(self.name.len() as u16).to_le_bytes());
        put(out, NAME, self.name);
        out[NAME + self.name.len()..STEP].fill(0);
        put(out, STEP, &self.step.to_le_bytes());
        put(out, INDEX, &u64::from(self.index).to_le_bytes());
        put(out, ADDRESS, &self.address.to_le_bytes());
        put(out, KEY, &self.key.to_le_bytes());
        put(out, DATA_TYPE, &(self.data_type as u32).to_le_bytes());
        put(out, SHAPE, &u64::from(self.entries).to_le_bytes());
        put(out, BYTES, &self.bytes.to_le_bytes());
        put(out, FROM, &self.from.to_le_bytes());
        put(out, TO, &self.to.to_le_bytes());
        put(out, BODY_SIZE, &(self.body.len() as u32).to_le_bytes());
        put(out, BODY, self.body);
        Ok(&out[..length])
    }

    /// Reads one.
    ///
    /// Errors: [`MessageError`].
    pub fn read(bytes: &[u8]) -> Result<Message<'_>, MessageError> {
        let length = bytes.len();
        if !(BODY..=LONGEST).contains(&length) {
            return Err(MessageError::Length { length });
        }
        let out_of_range = |field, value| MessageError::Field { field, value };
        let kind = usize::from(bytes[0]);
        let kind = *MessageType::ALL.get(kind).ok_or_else(|| out_of_range("type", kind as u64))?;
        let name_size = u16::from_le_bytes(take(bytes, NAME_SIZE)) as usize;
        if name_size > LONGEST_NAME {
            return Err(out_of_range("name_size", name_size as u64));
        }
        let index = u64::from_le_bytes(take(bytes, INDEX));
        let index = match u32::try_from(index) {
            Ok(index) if index <= Immediate::LAST_INDEX => index,
            _ => return Err(out_of_range("request_index", index)),
        };
        let data_type = match u32::from_le_bytes(take(bytes, DATA_TYPE)) {
            0 => DataType::None,
            1 => DataType::Bson,
            2 => DataType::Granted,
            3 => DataType::GrantedPart,
            other => return Err(out_of_range("data_type", other.into())),
        };
        let shape = u64::from_le_bytes(take(bytes, SHAPE));
        let entries = u32::try_from(shape).map_err(|_| out_of_range("oplogs_shape", shape))?;
        let body = u32::from_le_bytes(take(bytes, BODY_SIZE)) as usize;
        if BODY + body != length {
            return Err(MessageError::Length { length });
        }
        Ok(Message {
            kind,
            name: &bytes[NAME..NAME + name_size],
            step: u64::from_le_bytes(take(bytes, STEP)),
            index,
            address: u64::from_le_bytes(take(bytes, ADDRESS)),
            key: u32::from_le_bytes(take(bytes, KEY)),
            data_type,
            entries,
            bytes: u64::from_le_bytes(take(bytes, BYTES)),
            from: u64::from_le_bytes(take(bytes, FROM)),
            to: u64::from_le_bytes(take(bytes, TO)),
            body: &bytes[BODY..],
        })
    }
}

/// Copies a message out of a slot that its sender can write, but for the unused bytes of its name, which
/// [`Message::read`] does not look at: so those lines stay in the sender's cache, and cost neither end a transfer.
///
/// Invariant: `out` is as long as a message may be.
pub fn copy_slot(memory: &dyn MemoryObject, slot: usize, out: &mut [u8]) {
    assert!((BODY..=LONGEST).contains(&out.len()), "a message has its fixed part and a body");
    copy_out(memory, slot, &mut out[..FIRST]);
    let name = NAME + usize::from(u16::from_le_bytes(take(out, NAME_SIZE))).min(LONGEST_NAME);
    if name > FIRST {
        copy_out(memory, slot + FIRST, &mut out[FIRST..name]);
    }
    copy_out(memory, slot + STEP, &mut out[STEP..]);
}

fn put(out: &mut [u8; SLOT_BYTES], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

/// `N` bytes at a place inside the fixed part, whose presence [`Message::read`] checked.
fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// Place and length of a body in the granted area, as a body.
#[must_use]
pub fn granted(offset: u64, length: u64) -> [u8; 16] {
    let mut body = [0; 16];
    body[..8].copy_from_slice(&offset.to_le_bytes());
    body[8..].copy_from_slice(&length.to_le_bytes());
    body
}

/// The reverse of [`granted`].
#[must_use]
pub fn read_granted(body: &[u8]) -> Option<(u64, u64)> {
    let (offset, length) = body.split_at_checked(8)?;
    Some((u64::from_le_bytes(offset.try_into().ok()?), u64::from_le_bytes(length.try_into().ok()?)))
}

/// What the 32 bits beside a write say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Immediate {
    /// A control message in the next slot of the ring.
    Message,
    /// The oldest message without an acknowledgement was taken.
    Acknowledge,
    /// The reply to this request.
    Data(u32),
}

impl Immediate {
    /// The last index a request can have.
    pub const LAST_INDEX: u32 = 0xFFFF_FFFD;

    /// As the write carries it.
    #[must_use]
    pub fn code(self) -> u32 {
        match self {
            Self::Message => 0xFFFF_FFFF,
            Self::Acknowledge => 0xFFFF_FFFE,
            Self::Data(index) => index,
        }
    }

    /// The reverse of [`Immediate::code`].
    #[must_use]
    pub fn of(code: u32) -> Self {
        match code {
            0xFFFF_FFFF => Self::Message,
            0xFFFF_FFFE => Self::Acknowledge,
            index => Self::Data(index),
        }
    }
}

/// What stands in front of each part of a reply at its destination.
///
/// ```text
/// total u32 | offset u32 | checksum u32 | flags u32 (bit 0: the checksum counts)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes of the whole reply.
    pub total: u32,
    /// Bytes of the reply before this part.
    pub offset: u32,
    /// CRC-32C of this part's bytes, in validation mode.
    pub checksum: Option<u32>,
}

impl Part {
    /// Its bytes.
    pub const BYTES: usize = 16;

    /// Writes it.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&self.total.to_le_bytes());
        out[4..8].copy_from_slice(&self.offset.to_le_bytes());
        out[8..12].copy_from_slice(&self.checksum.unwrap_or(0).to_le_bytes());
        out[12..].copy_from_slice(&u32::from(self.checksum.is_some()).to_le_bytes());
        out
    }

    /// Reads it; `None` where it says what cannot be.
    #[must_use]
    pub fn decode(bytes: [u8; Self::BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(take(&bytes, at));
        let checksum = match word(12) {
            0 if word(8) == 0 => None,
            1 => Some(word(8)),
            _ => return None,
        };
        let part = Self { total: word(0), offset: word(4), checksum };
        (part.offset <= part.total).then_some(part)
    }
}

/// Reads `bytes` as a message and checks what must hold for every input: it ends, never panics, and
/// what was read is written again as it was. True when it was a message. The entry for fuzzers.
///
/// # Panics
///
/// When something that must hold does not.
pub fn fuzz(bytes: &[u8]) -> bool {
    let Ok(message) = Message::read(bytes) else { return false };
    let mut out = [0xEE; SLOT_BYTES];
    let again = message.write(&mut out).map(<[u8]>::to_vec);
    let again = again.as_deref().map(Message::read);
    assert_eq!(again, Ok(Ok(message)), "a message means one thing");
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn full() -> Message<'static> {
        Message {
            kind: MessageType::Query,
            name: b"shop.items",
            step: 0x0102_0304_0506_0708,
            index: 0x1122_3344,
            address: 0xA1A2_A3A4_A5A6_A7A8,
            key: 0xB1B2_B3B4,
            data_type: DataType::Bson,
            entries: 0xC1C2_C3C4,
            bytes: 0xD1D2_D3D4_D5D6_D7D8,
            from: 0xE1E2_E3E4_E5E6_E7E8,
            to: 0xF1F2_F3F4_F5F6_F7F8,
            body: b"\x05\0\0\0\0",
        }
    }

    #[test]
    fn every_field_lies_where_the_table_says() {
        let mut out = [0xEE; SLOT_BYTES];
        let bytes = full().write(&mut out).unwrap().to_vec();
        assert_eq!(bytes.len(), 588);
        let mut golden = vec![0_u8; 588];
        let mut lay = |at: usize, part: &[u8]| golden[at..at + part.len()].copy_from_slice(part);
        lay(0, &[7, 10, 0]);
        lay(3, b"shop.items");
        lay(515, &[8, 7, 6, 5, 4, 3, 2, 1]);
        lay(523, &[0x44, 0x33, 0x22, 0x11, 0, 0, 0, 0]);
        lay(531, &[0xA8, 0xA7, 0xA6, 0xA5, 0xA4, 0xA3, 0xA2, 0xA1]);
        lay(539, &[0xB4, 0xB3, 0xB2, 0xB1]);
        lay(543, &[1, 0, 0, 0]);
        lay(547, &[0xC4, 0xC3, 0xC2, 0xC1, 0, 0, 0, 0]);
        lay(555, &[0xD8, 0xD7, 0xD6, 0xD5, 0xD4, 0xD3, 0xD2, 0xD1]);
        lay(563, &[0xE8, 0xE7, 0xE6, 0xE5, 0xE4, 0xE3, 0xE2, 0xE1]);
        lay(571, &[0xF8, 0xF7, 0xF6, 0xF5, 0xF4, 0xF3, 0xF2, 0xF1]);
        lay(579, &[5, 0, 0, 0, 5, 0, 0, 0, 0]);
        assert_eq!(bytes, golden);
        assert_eq!(Message::read(&golden), Ok(full()));
    }

    #[test]
    fn the_types_have_the_numbers_of_the_table() {
        for (number, kind) in MessageType::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
        }
        assert_eq!(MessageType::ErrorStatus as u8, 12);
    }

    #[test]
    fn a_message_is_less_than_a_kilobyte_and_longer_bodies_are_refused() {
        let body = [7; LONGEST_BODY + 1];
        let name = [b'n'; LONGEST_NAME + 1];
        let mut out = [0; SLOT_BYTES];
        let message = Message::new(MessageType::Insert, 1);
        let most = Message { body: &body[1..], name: &name[1..], ..message };
        assert_eq!(most.write(&mut out).unwrap().len(), 1023);
        assert!(Message { body: &body, ..message }.write(&mut out).is_err());
        assert!(Message { name: &name, ..message }.write(&mut out).is_err());
    }

    #[test]
    fn immediates_are_the_codes_of_the_table() {
        assert_eq!(Immediate::Message.code(), 0xFFFF_FFFF);
        assert_eq!(Immediate::Acknowledge.code(), 0xFFFF_FFFE);
        for code in [0, 1, 0xFFFF_FFFD, 0xFFFF_FFFE, 0xFFFF_FFFF] {
            assert_eq!(Immediate::of(code).code(), code);
        }
        assert_eq!(Immediate::of(0xFFFF_FFFD), Immediate::Data(Immediate::LAST_INDEX));
    }

    #[test]
    fn a_part_is_read_as_written_and_nonsense_is_not() {
        for checksum in [None, Some(0), Some(u32::MAX)] {
            let part = Part { total: 9, offset: 9, checksum };
            assert_eq!(Part::decode(part.encode()), Some(part));
        }
        assert_eq!(Part::decode(Part { total: 8, offset: 9, checksum: None }.encode()), None);
        let mut flags = Part { total: 9, offset: 0, checksum: None }.encode();
        flags[12] = 2;
        assert_eq!(Part::decode(flags), None);
    }

    #[test]
    fn every_cut_is_refused() {
        let mut out = [0; SLOT_BYTES];
        let bytes = full().write(&mut out).unwrap();
        for cut in 0..bytes.len() {
            assert!(Message::read(&bytes[..cut]).is_err(), "{cut}");
        }
    }

    proptest! {
        #[test]
        fn a_damaged_message_is_refused_or_means_one_thing(
            at in 0_usize..588,
            value: u8,
            bytes in prop::collection::vec(any::<u8>(), 0..1100),
        ) {
            let mut out = [0; SLOT_BYTES];
            let mut damaged = full().write(&mut out).unwrap().to_vec();
            damaged[at] = value;
            fuzz(&damaged);
            fuzz(&bytes);
        }
    }
}
