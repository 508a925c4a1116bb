//! What two ends say to each other before the first request: protocol, window, sizes.

use super::{set, u16_at, u32_at, u64_at};

/// First four bytes of [`Hello`] and [`Welcome`].
pub const MAGIC: [u8; 4] = *b"BKV1";

/// Version of everything in this file. A server refuses any other.
pub const VERSION: u16 = 1;

/// Length of [`Hello`], bytes.
pub const HELLO_BYTES: usize = 32;

/// Length of [`Welcome`], bytes.
pub const WELCOME_BYTES: usize = 64;

/// Which protocol a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// One round trip, no copy (BOOM §3.1).
    Boom,
    /// The NVM-oblivious baseline: requests land in a DRAM buffer and are copied ("RDMA-KV").
    Oblivious,
    /// The two-phase baseline: ask for an address, then write or read there ("RDMP-KV").
    TwoPhase,
    /// What a member of a cluster answers to [`Protocol::Boom`]: requests land in slots as for
    /// [`Protocol::Oblivious`], puts and deletes go through the cluster's log, gets wait until
    /// what was agreed on before them is applied.
    Replicated,
}

impl Protocol {
    /// Those of a store by itself, in the order of their wire numbers.
    pub const ALL: [Self; 3] = [Self::Boom, Self::Oblivious, Self::TwoPhase];

    /// Whether requests land in slots of the server's memory, [`Welcome::area_key`].
    #[must_use]
    pub fn uses_slots(self) -> bool {
        matches!(self, Self::Oblivious | Self::Replicated)
    }

    /// As benchmarks print it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Boom => "BOOM",
            Self::Oblivious => "RDMA-KV",
            Self::TwoPhase => "RDMP-KV",
            Self::Replicated => "replicated",
        }
    }

    fn encode(self) -> u8 {
        match self {
            Self::Boom => 1,
            Self::Oblivious => 2,
            Self::TwoPhase => 3,
            Self::Replicated => 4,
        }
    }

    fn decode(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Boom),
            2 => Some(Self::Oblivious),
            3 => Some(Self::TwoPhase),
            4 => Some(Self::Replicated),
            _ => None,
        }
    }
}

/// What a client says when it connects to one shard. Travels in the connection payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Protocol wanted.
    pub protocol: Protocol,
    /// Requests the client wants outstanding.
    pub window: u16,
    /// Shard this connection is for.
    pub shard: u16,
    /// Longest request the client will SEND, bytes: 48 + its longest key.
    pub request_bytes: u32,
    /// [`Protocol::Oblivious`]: bytes of one slot of the request area; else 0.
    pub slot_bytes: u32,
}

impl Hello {
    /// As sent.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        set(&mut bytes, 0, MAGIC);
        set(&mut bytes, 4, VERSION.to_le_bytes());
        bytes[6] = self.protocol.encode();
        set(&mut bytes, 8, self.window.to_le_bytes());
        set(&mut bytes, 10, self.shard.to_le_bytes());
        set(&mut bytes, 12, self.request_bytes.to_le_bytes());
        set(&mut bytes, 16, self.slot_bytes.to_le_bytes());
        bytes
    }

    /// From the peer's payload. Longer payloads are accepted and their tail ignored, so that a
    /// later version can add fields.
    ///
    /// Errors: why a server refuses it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.get(..4) != Some(&MAGIC[..]) || bytes.len() < HELLO_BYTES {
            return Err(Refusal::Malformed);
        }
        if u16_at(bytes, 4) != Some(VERSION) {
            return Err(Refusal::Version);
        }
        let protocol = Protocol::decode(bytes[6]).ok_or(Refusal::Protocol)?;
        let fields = || {
            Some(Self {
                protocol,
                window: u16_at(bytes, 8)?,
                shard: u16_at(bytes, 10)?,
                request_bytes: u32_at(bytes, 12)?,
                slot_bytes: u32_at(bytes, 16)?,
            })
        };
        fields().ok_or(Refusal::Malformed)
    }
}

/// Why a server does not take a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The payload is not a [`Hello`].
    Malformed,
    /// Another protocol version.
    Version,
    /// The protocol is not offered here.
    Protocol,
    /// The shard does not exist, or not at this server.
    Shard,
    /// As many clients as are allowed are connected.
    TooManyClients,
    /// The server could not make the connection (memory, descriptors); details in its log.
    Resources,
}

impl Refusal {
    fn encode(this: Option<Self>) -> u8 {
        match this {
            None => 0,
            Some(Self::Malformed) => 1,
            Some(Self::Version) => 2,
            Some(Self::Protocol) => 3,
            Some(Self::Shard) => 4,
            Some(Self::TooManyClients) => 5,
            Some(Self::Resources) => 6,
        }
    }

    fn decode(byte: u8) -> Option<Option<Self>> {
        Some(match byte {
            0 => None,
            1 => Some(Self::Malformed),
            2 => Some(Self::Version),
            3 => Some(Self::Protocol),
            4 => Some(Self::Shard),
            5 => Some(Self::TooManyClients),
            6 => Some(Self::Resources),
            _ => return None,
        })
    }

    /// True when connecting again later may succeed.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::TooManyClients | Self::Resources)
    }
}

/// What a server answers to [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Protocol spoken from here on: the one asked for, or [`Protocol::Replicated`] in the place
    /// of [`Protocol::Boom`].
    pub protocol: Protocol,
    /// Requests that may be outstanding; the server has that many receives posted.
    pub window: u16,
    /// Shard at the other end.
    pub shard: u16,
    /// Shards of the store; each has its own connection.
    pub shards: u16,
    /// Longest request the server receives, bytes.
    pub request_bytes: u32,
    /// [`Protocol::uses_slots`]: bytes of one slot of the request area.
    pub slot_bytes: u32,
    /// [`Protocol::uses_slots`]: key of the request area; slot `i` begins at `i * slot_bytes`.
    pub area_key: u64,
    /// Bytes of a log segment.
    pub segment_bytes: u32,
    /// Longest value, bytes.
    pub max_value_bytes: u32,
    /// Seed of the hash that places keys in shards.
    pub hash_seed: u64,
}

impl Welcome {
    /// As sent.
    #[must_use]
    pub fn encode(&self) -> [u8; WELCOME_BYTES] {
        let mut bytes = Self::header(None);
        bytes[6] = self.protocol.encode();
        set(&mut bytes, 8, self.window.to_le_bytes());
        set(&mut bytes, 10, self.shard.to_le_bytes());
        set(&mut bytes, 12, self.shards.to_le_bytes());
        set(&mut bytes, 16, self.request_bytes.to_le_bytes());
        set(&mut bytes, 20, self.slot_bytes.to_le_bytes());
        set(&mut bytes, 24, self.area_key.to_le_bytes());
        set(&mut bytes, 32, self.segment_bytes.to_le_bytes());
        set(&mut bytes, 36, self.max_value_bytes.to_le_bytes());
        set(&mut bytes, 40, self.hash_seed.to_le_bytes());
        bytes
    }

    /// A refusal, as sent.
    #[must_use]
    pub fn refuse(refusal: Refusal) -> [u8; WELCOME_BYTES] {
        Self::header(Some(refusal))
    }

    fn header(refusal: Option<Refusal>) -> [u8; WELCOME_BYTES] {
        let mut bytes = [0; WELCOME_BYTES];
        set(&mut bytes, 0, MAGIC);
        set(&mut bytes, 4, VERSION.to_le_bytes());
        bytes[7] = Refusal::encode(refusal);
        bytes
    }

    /// From the server's payload.
    ///
    /// Errors: the server's refusal; [`Refusal::Malformed`] when it is no [`Welcome`],
    /// [`Refusal::Version`] when it is one of another version.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.get(..4) != Some(&MAGIC[..]) || bytes.len() < WELCOME_BYTES {
            return Err(Refusal::Malformed);
        }
        if let Some(refusal) = Refusal::decode(bytes[7]).ok_or(Refusal::Malformed)? {
            return Err(refusal);
        }
        if u16_at(bytes, 4) != Some(VERSION) {
            return Err(Refusal::Version);
        }
        let fields = || {
            Some(Self {
                protocol: Protocol::decode(bytes[6])?,
                window: u16_at(bytes, 8)?,
                shard: u16_at(bytes, 10)?,
                shards: u16_at(bytes, 12)?,
                request_bytes: u32_at(bytes, 16)?,
                slot_bytes: u32_at(bytes, 20)?,
                area_key: u64_at(bytes, 24)?,
                segment_bytes: u32_at(bytes, 32)?,
                max_value_bytes: u32_at(bytes, 36)?,
                hash_seed: u64_at(bytes, 40)?,
            })
        };
        fields()
            .filter(|welcome| welcome.window > 0 && welcome.shards > 0)
            .ok_or(Refusal::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoders_survive_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            let _ = Hello::decode(&bytes);
            let _ = Welcome::decode(&bytes);
        }
    }

    #[test]
    fn a_hello_of_another_version_is_refused_as_such() {
        let hello = Hello {
            protocol: Protocol::Boom,
            window: 16,
            shard: 1,
            request_bytes: 256,
            slot_bytes: 0,
        };
        let mut bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello));
        bytes[4] = 9;
        assert_eq!(Hello::decode(&bytes), Err(Refusal::Version));
        bytes[0] = 0;
        assert_eq!(Hello::decode(&bytes), Err(Refusal::Malformed));
    }

    #[test]
    fn a_refusal_reaches_the_client() {
        for refusal in
            [Refusal::Version, Refusal::Protocol, Refusal::Shard, Refusal::TooManyClients]
        {
            assert_eq!(Welcome::decode(&Welcome::refuse(refusal)), Err(refusal));
        }
    }
}
