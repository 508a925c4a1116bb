//! The wire format: one fixed header per frame, then its payload. Pure; no stream, no memory.
//!
//! ```text
//!  0 magic u16 = 0xBEE1   2 version u8 = 1   3 opcode u8
//!  4 flags u8             5 status u8        6 zero u16
//!  8 sequence u32        12 request u32
//! 16 acknowledged u32    20 immediate u32
//! 24 word a: key         32 word b: offset
//! 40 word c: length      48 word d: operand
//! 56 zero u32            60 crc32c u32 of bytes 0..60
//! 64 payload
//! ```
//!
//! All little endian. Every byte may come from a hostile peer: decoding accepts exactly what
//! [`Frame::encode`] produces. A field that an opcode does not use must be zero, so that a frame
//! has one spelling; a damaged header fails its checksum; a replayed, lost or reordered one fails
//! the sequence check of [`Decoder`], which numbers the frames of one direction from zero.

use beeline_fabric::fields::array;
use beeline_fabric::{FlushKind, RemoteAddress, RemoteKey, Status};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
/// Largest one-sided operation, bytes.
pub const MAX_MESSAGE_BYTES: u64 = 1 << 34;
/// Largest send, bytes.
pub const MAX_SEND_BYTES: u64 = 1 << 30;

const MAGIC: u16 = 0xBEE1;
const VERSION: u8 = 1;

/// The initiator waits for an acknowledgement of this request.
const FLAG_ACKNOWLEDGE: u8 = 1;
/// The send carries an immediate.
const FLAG_IMMEDIATE: u8 = 2;
/// The flush is a persistent one.
const FLAG_PERSISTENT: u8 = 4;

const WRITE: u8 = 1;
const WRITE_WITH_IMMEDIATE: u8 = 2;
const READ: u8 = 3;
const SEND: u8 = 4;
const COMPARE_AND_SWAP: u8 = 5;
const FETCH_AND_ADD: u8 = 6;
const FLUSH: u8 = 7;
const PLACED: u8 = 8;
const READ_RESPONSE: u8 = 16;
const ATOMIC_RESPONSE: u8 = 17;
const ACKNOWLEDGE: u8 = 18;
const REFUSE: u8 = 19;
const WAIT: u8 = 20;
const RESUME: u8 = 21;
const GRANT: u8 = 22;

/// Why the bytes are not a frame. Always the peer's fault; the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Not this protocol.
    #[error("magic {0:#06x} is not a frame's")]
    Magic(u16),
    /// Another version.
    #[error("version {0} is unknown")]
    Version(u8),
    /// The checksum differs.
    #[error("the header's checksum is {found:#010x}, not {computed:#010x}")]
    Checksum {
        /// In the header.
        found: u32,
        /// Over the header.
        computed: u32,
    },
    /// Unknown opcode.
    #[error("opcode {0} is unknown")]
    Opcode(u8),
    /// Unknown status.
    #[error("status {0} is unknown or not allowed here")]
    Status(u8),
    /// Flags, or fields that must be zero, are not as the opcode demands.
    #[error("opcode {opcode} carries a field it does not use")]
    StrayField {
        /// Of the frame.
        opcode: u8,
    },
    /// Longer than any message may be.
    #[error("a length of {length} bytes is beyond the limit of {limit}")]
    TooLong {
        /// Announced.
        length: u64,
        /// Allowed.
        limit: u64,
    },
    /// Lost, replayed or reordered.
    #[error("frame {found} came where frame {expected} was due")]
    Sequence {
        /// In the header.
        found: u32,
        /// Due.
        expected: u32,
    },
}

impl FrameError {
    /// Never: the stream is out of step, or its sender is.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }
}

/// Why the target asks its peer to stop and send again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// No receive is posted; the initiator's receiver-not-ready bound runs.
    NotReady,
    /// Answers to earlier requests have yet to leave.
    Busy,
    /// The memory is not where the peer placed its bytes; no grant of it holds any more.
    Moved,
}

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Payload goes to `remote`; with an immediate, a receive is consumed after.
    Write {
        /// Destination.
        remote: RemoteAddress,
        /// Payload bytes.
        length: u64,
        /// Delivered with a receive.
        immediate: Option<u32>,
    },
    /// Asks for bytes.
    Read {
        /// Source.
        remote: RemoteAddress,
        /// Bytes.
        length: u64,
    },
    /// Payload goes to a posted receive.
    Send {
        /// Payload bytes.
        length: u64,
        /// Delivered with it.
        immediate: Option<u32>,
    },
    /// Compare-and-swap.
    CompareAndSwap {
        /// The word.
        remote: RemoteAddress,
        /// Compared.
        expected: u64,
        /// Stored on equality.
        desired: u64,
    },
    /// Fetch-and-add.
    FetchAndAdd {
        /// The word.
        remote: RemoteAddress,
        /// Added.
        addend: u64,
    },
    /// Flush.
    Flush {
        /// Start.
        remote: RemoteAddress,
        /// Bytes.
        length: u64,
        /// Guarantee.
        kind: FlushKind,
    },
    /// A write whose bytes the initiator has placed itself, in memory it was granted.
    Placed {
        /// Destination.
        remote: RemoteAddress,
        /// Bytes.
        length: u64,
        /// Where the grant said that the region begins.
        at: u64,
    },
    /// The peer may place the bytes of its writes to this region itself.
    Grant {
        /// The region.
        key: RemoteKey,
        /// Where it begins in what the peer can reach.
        at: u64,
        /// Its bytes.
        length: u64,
    },
    /// Payload answers a read.
    ReadResponse {
        /// Payload bytes.
        length: u64,
    },
    /// Answers an atomic.
    AtomicResponse {
        /// The word before.
        old: u64,
    },
    /// Only carries `acknowledged`.
    Acknowledge,
    /// The request failed; the connection ends.
    Refuse {
        /// Why.
        status: Status,
    },
    /// This request and what followed were dropped; send again after `Resume`.
    Wait {
        /// Why.
        reason: WaitReason,
    },
    /// Send again from this request on.
    Resume,
}

impl Message {
    /// Bytes that follow the header.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        match self {
            Self::Write { length, .. }
            | Self::Send { length, .. }
            | Self::ReadResponse { length } => *length,
            _ => 0,
        }
    }

    /// True for what an initiator asks; such frames carry their own request number.
    #[must_use]
    pub fn is_request(&self) -> bool {
        matches!(
            self,
            Self::Write { .. }
                | Self::Read { .. }
                | Self::Send { .. }
                | Self::CompareAndSwap { .. }
                | Self::FetchAndAdd { .. }
                | Self::Flush { .. }
                | Self::Placed { .. }
        )
    }
}

/// One header, typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Place in this direction of the connection, from 0, wrapping.
    pub sequence: u32,
    /// Number of the request made or answered (the first request is 0, wrapping).
    pub request: u32,
    /// Every request of the receiver numbered below this is done.
    pub acknowledged: u32,
    /// The initiator waits for an acknowledgement. Requests only.
    pub acknowledge: bool,
    /// What it says.
    pub message: Message,
}

fn status_code(status: Status) -> u8 {
    match status {
        Status::RemoteAccessError => 1,
        Status::RemoteInvalidRequest => 2,
        Status::ReceiverNotReady => 3,
        Status::LengthError => 4,
        Status::PersistenceError => 5,
        _ => 6,
    }
}

fn status_from(code: u8) -> Result<Status, FrameError> {
    Ok(match code {
        1 => Status::RemoteAccessError,
        2 => Status::RemoteInvalidRequest,
        3 => Status::ReceiverNotReady,
        4 => Status::LengthError,
        5 => Status::PersistenceError,
        6 => Status::TransportError,
        _ => return Err(FrameError::Status(code)),
    })
}

/// The fields as they lie in the header.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Fields {
    opcode: u8,
    flags: u8,
    status: u8,
    immediate: u32,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
}

impl Fields {
    fn of(message: &Message) -> Self {
        let mut fields = Self::default();
        let place = |fields: &mut Self, remote: &RemoteAddress| {
            fields.a = remote.key.0;
            fields.b = remote.offset;
        };
        match message {
            Message::Write { remote, length, immediate } => {
                fields.opcode = if immediate.is_some() { WRITE_WITH_IMMEDIATE } else { WRITE };
                place(&mut fields, remote);
                fields.c = *length;
                fields.immediate = immediate.unwrap_or(0);
            }
            Message::Read { remote, length } => {
                fields.opcode = READ;
                place(&mut fields, remote);
                fields.c = *length;
            }
            Message::Send { length, immediate } => {
                fields.opcode = SEND;
                fields.c = *length;
                fields.immediate = immediate.unwrap_or(0);
                fields.flags = if immediate.is_some() { FLAG_IMMEDIATE } else { 0 };
            }
            Message::CompareAndSwap { remote, expected, desired } => {
                fields.opcode = COMPARE_AND_SWAP;
                place(&mut fields, remote);
                fields.c = *expected;
                fields.d = *desired;
            }
            Message::FetchAndAdd { remote, addend } => {
                fields.opcode = FETCH_AND_ADD;
                place(&mut fields, remote);
                fields.d = *addend;
            }
            Message::Flush { remote, length, kind } => {
                fields.opcode = FLUSH;
                place(&mut fields, remote);
                fields.c = *length;
                fields.flags = if *kind == FlushKind::Persistent { FLAG_PERSISTENT } else { 0 };
            }
            Message::Placed { remote, length, at } => {
                fields.opcode = PLACED;
                place(&mut fields, remote);
                fields.c = *length;
                fields.d = *at;
            }
            Message::Grant { key, at, length } => {
                fields.opcode = GRANT;
                (fields.a, fields.b, fields.c) = (key.0, *at, *length);
            }
            Message::ReadResponse { length } => {
                fields.opcode = READ_RESPONSE;
                fields.c = *length;
            }
            Message::AtomicResponse { old } => {
                fields.opcode = ATOMIC_RESPONSE;
                fields.d = *old;
            }
            Message::Acknowledge => fields.opcode = ACKNOWLEDGE,
            Message::Refuse { status } => {
                fields.opcode = REFUSE;
                fields.status = status_code(*status);
            }
            Message::Wait { reason } => {
                fields.opcode = WAIT;
                fields.status = match reason {
                    WaitReason::NotReady => status_code(Status::ReceiverNotReady),
                    WaitReason::Busy => 0,
                    WaitReason::Moved => status_code(Status::RemoteAccessError),
                };
            }
            Message::Resume => fields.opcode = RESUME,
        }
        fields
    }

    fn message(&self) -> Result<Message, FrameError> {
        let remote = RemoteAddress { key: RemoteKey(self.a), offset: self.b };
        let immediate = (self.flags & FLAG_IMMEDIATE != 0).then_some(self.immediate);
        let message = match self.opcode {
            WRITE => Message::Write { remote, length: self.c, immediate: None },
            WRITE_WITH_IMMEDIATE => {
                Message::Write { remote, length: self.c, immediate: Some(self.immediate) }
            }
            READ => Message::Read { remote, length: self.c },
            SEND => Message::Send { length: self.c, immediate },
            COMPARE_AND_SWAP => {
                Message::CompareAndSwap { remote, expected: self.c, desired: self.d }
            }
            FETCH_AND_ADD => Message::FetchAndAdd { remote, addend: self.d },
            FLUSH => {
                let persistent = self.flags & FLAG_PERSISTENT != 0;
                let kind = if persistent { FlushKind::Persistent } else { FlushKind::Visible };
                Message::Flush { remote, length: self.c, kind }
            }
            READ_RESPONSE => Message::ReadResponse { length: self.c },
            ATOMIC_RESPONSE => Message::AtomicResponse { old: self.d },
            ACKNOWLEDGE => Message::Acknowledge,
            REFUSE => Message::Refuse { status: status_from(self.status)? },
            WAIT => {
                let reason = match self.status {
                    0 => WaitReason::Busy,
                    code if status_from(code) == Ok(Status::ReceiverNotReady) => {
                        WaitReason::NotReady
                    }
                    code if status_from(code) == Ok(Status::RemoteAccessError) => WaitReason::Moved,
                    code => return Err(FrameError::Status(code)),
                };
                Message::Wait { reason }
            }
            RESUME => Message::Resume,
            PLACED => Message::Placed { remote, length: self.c, at: self.d },
            GRANT => Message::Grant { key: RemoteKey(self.a), at: self.b, length: self.c },
            other => return Err(FrameError::Opcode(other)),
        };
        let limit = if self.opcode == SEND { MAX_SEND_BYTES } else { MAX_MESSAGE_BYTES };
        // A flush moves nothing, so its range is only checked against the region.
        let has_length = matches!(
            self.opcode,
            WRITE | WRITE_WITH_IMMEDIATE | READ | SEND | READ_RESPONSE | PLACED
        );
        if has_length && self.c > limit {
            return Err(FrameError::TooLong { length: self.c, limit });
        }
        Ok(message)
    }
}

fn put<const N: usize>(bytes: &mut [u8; HEADER_BYTES], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

impl Frame {
    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut fields = Fields::of(&self.message);
        if self.acknowledge {
            fields.flags |= FLAG_ACKNOWLEDGE;
        }
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, MAGIC.to_le_bytes());
        put(&mut bytes, 2, [VERSION, fields.opcode, fields.flags, fields.status]);
        put(&mut bytes, 8, self.sequence.to_le_bytes());
        put(&mut bytes, 12, self.request.to_le_bytes());
        put(&mut bytes, 16, self.acknowledged.to_le_bytes());
        put(&mut bytes, 20, fields.immediate.to_le_bytes());
        put(&mut bytes, 24, fields.a.to_le_bytes());
        put(&mut bytes, 32, fields.b.to_le_bytes());
        put(&mut bytes, 40, fields.c.to_le_bytes());
        put(&mut bytes, 48, fields.d.to_le_bytes());
        let checksum = crc32c::crc32c(&bytes[..60]);
        put(&mut bytes, 60, checksum.to_le_bytes());
        bytes
    }

    /// Reads a header back. Accepts exactly the images of [`Frame::encode`].
    ///
    /// Errors: [`FrameError`], except its sequence variant.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let magic = u16::from_le_bytes(array(bytes, 0));
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let [version, opcode, all_flags, status] = array(bytes, 2);
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let found = u32::from_le_bytes(array(bytes, 60));
        let computed = crc32c::crc32c(&bytes[..60]);
        if found != computed {
            return Err(FrameError::Checksum { found, computed });
        }
        let fields = Fields {
            opcode,
            flags: all_flags & !FLAG_ACKNOWLEDGE,
            status,
            immediate: u32::from_le_bytes(array(bytes, 20)),
            a: u64::from_le_bytes(array(bytes, 24)),
            b: u64::from_le_bytes(array(bytes, 32)),
            c: u64::from_le_bytes(array(bytes, 40)),
            d: u64::from_le_bytes(array(bytes, 48)),
        };
        let message = fields.message()?;
        let acknowledge = all_flags & FLAG_ACKNOWLEDGE != 0;
        let request = u32::from_le_bytes(array(bytes, 12));
        let stray = Fields::of(&message) != fields
            || (acknowledge && !message.is_request())
            || (matches!(message, Message::Acknowledge) && request != 0)
            || array::<2>(bytes, 6) != [0; 2]
            || array::<4>(bytes, 56) != [0; 4];
        if stray {
            return Err(FrameError::StrayField { opcode });
        }
        Ok(Self {
            sequence: u32::from_le_bytes(array(bytes, 8)),
            request,
            acknowledged: u32::from_le_bytes(array(bytes, 16)),
            acknowledge,
            message,
        })
    }
}

/// Decodes the frames of one direction, in order.
#[derive(Debug, Default)]
pub struct Decoder {
    next_sequence: u32,
}

impl Decoder {
    /// Decodes the next header.
    ///
    /// Errors: [`FrameError`]; the connection is then to end.
    pub fn next(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<Frame, FrameError> {
        let frame = Frame::decode(bytes)?;
        if frame.sequence != self.next_sequence {
            return Err(FrameError::Sequence {
                found: frame.sequence,
                expected: self.next_sequence,
            });
        }
        self.next_sequence = self.next_sequence.wrapping_add(1);
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn status() -> impl Strategy<Value = Status> {
        prop_oneof![
            Just(Status::RemoteAccessError),
            Just(Status::RemoteInvalidRequest),
            Just(Status::ReceiverNotReady),
            Just(Status::LengthError),
            Just(Status::PersistenceError),
            Just(Status::TransportError),
        ]
    }

    fn message() -> impl Strategy<Value = Message> {
        let remote = (any::<u64>(), any::<u64>())
            .prop_map(|(key, offset)| RemoteAddress { key: RemoteKey(key), offset });
        let length = 0..=MAX_MESSAGE_BYTES;
        let kind = prop_oneof![Just(FlushKind::Visible), Just(FlushKind::Persistent)];
        let reason = prop_oneof![
            Just(WaitReason::NotReady),
            Just(WaitReason::Busy),
            Just(WaitReason::Moved)
        ];
        prop_oneof![
            (remote.clone(), length.clone(), any::<Option<u32>>()).prop_map(
                |(remote, length, immediate)| Message::Write { remote, length, immediate }
            ),
            (remote.clone(), length.clone())
                .prop_map(|(remote, length)| Message::Read { remote, length }),
            (0..=MAX_SEND_BYTES, any::<Option<u32>>())
                .prop_map(|(length, immediate)| Message::Send { length, immediate }),
            (remote.clone(), any::<u64>(), any::<u64>()).prop_map(|(remote, expected, desired)| {
                Message::CompareAndSwap { remote, expected, desired }
            }),
            (remote.clone(), any::<u64>())
                .prop_map(|(remote, addend)| Message::FetchAndAdd { remote, addend }),
            (remote.clone(), length.clone(), any::<u64>())
                .prop_map(|(remote, length, at)| Message::Placed { remote, length, at }),
            (any::<u64>(), any::<u64>(), any::<u64>())
                .prop_map(|(key, at, length)| Message::Grant { key: RemoteKey(key), at, length }),
            (remote, length.clone(), kind).prop_map(|(remote, length, kind)| Message::Flush {
                remote,
                length,
                kind
            }),
            length.prop_map(|length| Message::ReadResponse { length }),
            any::<u64>().prop_map(|old| Message::AtomicResponse { old }),
            Just(Message::Acknowledge),
            status().prop_map(|status| Message::Refuse { status }),
            reason.prop_map(|reason| Message::Wait { reason }),
            Just(Message::Resume),
        ]
    }

    fn frame() -> impl Strategy<Value = Frame> {
        (any::<u32>(), any::<u32>(), any::<u32>(), any::<bool>(), message()).prop_map(
            |(sequence, request, acknowledged, acknowledge, message)| Frame {
                sequence,
                request: if message == Message::Acknowledge { 0 } else { request },
                acknowledged,
                acknowledge: acknowledge && message.is_request(),
                message,
            },
        )
    }

    /// Replaces the checksum, as a peer that means harm does.
    fn seal(bytes: &mut [u8; HEADER_BYTES]) {
        let checksum = crc32c::crc32c(&bytes[..60]);
        put(bytes, 60, checksum.to_le_bytes());
    }

    proptest! {
        #[test]
        fn every_frame_survives_the_wire(frame in frame()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }

        #[test]
        fn a_flipped_bit_is_seen(frame in frame(), bit in 0..HEADER_BYTES * 8) {
            let mut bytes = frame.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Frame::decode(&bytes).is_err());
        }

        #[test]
        fn what_decodes_encodes_to_the_same_bytes(
            frame in frame(),
            changes in prop::collection::vec((0..60_usize, any::<u8>()), 0..6),
        ) {
            let mut bytes = frame.encode();
            for (at, value) in changes {
                bytes[at] = value;
            }
            seal(&mut bytes);
            if let Ok(decoded) = Frame::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }

        #[test]
        fn random_bytes_with_a_right_checksum_never_panic(bytes in any::<[u8; 32]>()) {
            let mut header = [0; HEADER_BYTES];
            header[..32].copy_from_slice(&bytes);
            put(&mut header, 0, MAGIC.to_le_bytes());
            header[2] = VERSION;
            seal(&mut header);
            if let Ok(decoded) = Frame::decode(&header) {
                prop_assert_eq!(decoded.encode(), header);
            }
        }
    }

    #[test]
    fn a_replayed_frame_is_out_of_sequence() {
        let frame = Frame {
            sequence: 0,
            request: 0,
            acknowledged: 0,
            acknowledge: false,
            message: Message::Acknowledge,
        };
        let mut decoder = Decoder::default();
        assert_eq!(decoder.next(&frame.encode()), Ok(frame));
        assert_eq!(
            decoder.next(&frame.encode()),
            Err(FrameError::Sequence { found: 0, expected: 1 })
        );
    }

    #[test]
    fn an_over_long_send_is_refused() {
        let message = Message::Send { length: MAX_SEND_BYTES + 1, immediate: None };
        let frame = Frame { sequence: 0, request: 0, acknowledged: 0, acknowledge: true, message };
        assert!(matches!(Frame::decode(&frame.encode()), Err(FrameError::TooLong { .. })));
    }
}
