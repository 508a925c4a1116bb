//! The bootstrap exchange: its bytes, and the choice it makes. Pure.
//!
//! One connection carries one question and one answer, each framed as
//!
//! ```text
//!  0 "BLBS"   4 version u16 = 1   6 zero u16   8 length u32   12 JSON, `length` bytes
//! ```
//!
//! little endian, `length` at most [`MAX_BODY_BYTES`]. Unknown JSON fields are ignored, so that a
//! later minor version can add some; anything else that is not expected ends the exchange.

use std::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::host::HostIdentity;
use crate::window::WindowEnd;

/// Bytes before the body.
pub const PREFIX_BYTES: usize = 12;
/// Longest body.
pub const MAX_BODY_BYTES: usize = 64 << 10;
/// Longest service payload, either way.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 10;
/// Most providers a client may list.
const MAX_PROVIDERS: usize = 16;
/// Longest service or provider name.
const MAX_NAME_BYTES: usize = 64;
const MAGIC: &[u8; 4] = b"BLBS";
const VERSION: u16 = 1;

/// Why a provider was chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// Both ends run on one host: shared memory.
    SameHost,
    /// Different hosts: the network.
    DifferentHost,
    /// One host, but the two cannot see each other's sockets (containers).
    DifferentNamespace,
    /// Both ends have a memory window, and no other memory in common.
    CommonWindow,
    /// Both ends have an RDMA device, and no memory in common.
    CommonRdma,
    /// The client has no shared memory.
    ClientLacksSharedMemory,
    /// The server has no shared memory.
    ServerLacksSharedMemory,
    /// The address named the provider.
    Forced,
    /// The better provider failed; its error.
    FellBack(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SameHost => f.write_str("both ends run on this host"),
            Self::DifferentHost => f.write_str("the ends run on different hosts"),
            Self::DifferentNamespace => {
                f.write_str("both ends run on this host, in different network namespaces")
            }
            Self::CommonWindow => f.write_str("both ends have a memory window"),
            Self::CommonRdma => f.write_str("both ends have an RDMA device"),
            Self::ClientLacksSharedMemory => f.write_str("the client offers no shared memory"),
            Self::ServerLacksSharedMemory => f.write_str("the server offers no shared memory"),
            Self::Forced => f.write_str("the address names the provider"),
            Self::FellBack(why) => write!(f, "fell back, because {why}"),
        }
    }
}

/// A client's question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Question {
    /// Which provider, and what does the service say of itself?
    Negotiate {
        service: String,
        host: HostIdentity,
        /// Providers the client has, in any order; one when it insists.
        providers: Vec<String>,
        /// The address named the provider.
        forced: bool,
    },
    /// Here is my queue pair; where is yours?
    Join {
        service: String,
        provider: String,
        shard: u32,
        #[serde(with = "hex")]
        connect_info: Vec<u8>,
        #[serde(with = "hex")]
        payload: Vec<u8>,
    },
}

/// The server's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Chosen {
        provider: String,
        reason: Reason,
        shards: u32,
        #[serde(with = "hex")]
        payload: Vec<u8>,
        /// The service's end of a memory window, when that was chosen and is not emulated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        window: Option<WindowEnd>,
    },
    Joined {
        #[serde(with = "hex")]
        connect_info: Vec<u8>,
        #[serde(with = "hex")]
        payload: Vec<u8>,
    },
    Refused {
        reason: String,
    },
}

mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    const DIGITS: &[u8; 16] = b"0123456789abcdef";

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(bytes.len() * 2);
        for byte in bytes {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        to.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        if !text.len().is_multiple_of(2) {
            return Err(D::Error::custom("half a byte"));
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        text.as_bytes()
            .chunks_exact(2)
            .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
            .collect::<Option<_>>()
            .ok_or_else(|| D::Error::custom("not hexadecimal"))
    }
}

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Not this protocol.
    #[error("not a bootstrap message")]
    Magic,
    /// Another version.
    #[error("version {0} is unknown")]
    Version(u16),
    /// Longer than allowed.
    #[error("a body of {length} bytes is beyond the limit of {limit}")]
    TooLong {
        /// Announced.
        length: usize,
        /// Allowed.
        limit: usize,
    },
    /// The body is not what the protocol says.
    #[error("malformed: {0}")]
    Body(String),
}

impl MessageError {
    /// Never: the peer speaks something else.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }
}

/// Prefix and body.
pub(crate) fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let body =
        serde_json::to_vec(message).map_err(|error| MessageError::Body(error.to_string()))?;
    if body.len() > MAX_BODY_BYTES {
        return Err(MessageError::TooLong { length: body.len(), limit: MAX_BODY_BYTES });
    }
    let mut bytes = Vec::with_capacity(PREFIX_BYTES + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// Length of the body that follows this prefix.
pub(crate) fn body_length(prefix: &[u8; PREFIX_BYTES]) -> Result<usize, MessageError> {
    let [m0, m1, m2, m3, v0, v1, z0, z1, l0, l1, l2, l3] = *prefix;
    if [m0, m1, m2, m3] != *MAGIC || [z0, z1] != [0, 0] {
        return Err(MessageError::Magic);
    }
    let version = u16::from_le_bytes([v0, v1]);
    if version != VERSION {
        return Err(MessageError::Version(version));
    }
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > MAX_BODY_BYTES {
        return Err(MessageError::TooLong { length, limit: MAX_BODY_BYTES });
    }
    Ok(length)
}

/// A body as a message.
pub(crate) fn decode<T: DeserializeOwned + Bounded>(body: &[u8]) -> Result<T, MessageError> {
    let message: T =
        serde_json::from_slice(body).map_err(|error| MessageError::Body(error.to_string()))?;
    if message.is_bounded() {
        Ok(message)
    } else {
        Err(MessageError::Body("a field is too long".to_owned()))
    }
}

/// Reads `bytes` as a message from either end and checks what must hold for every input: it ends,
/// never panics, and what was taken is taken again as encoded. True when it was a message. The
/// entry for fuzzers.
///
/// # Panics
///
/// When something that must hold does not.
pub fn fuzz(bytes: &[u8]) -> bool {
    fn body<T: Serialize + DeserializeOwned + Bounded + PartialEq>(bytes: &[u8]) -> bool {
        let Ok(message) = decode::<T>(bytes) else { return false };
        let again = encode(&message).ok().and_then(|framed| decode(&framed[PREFIX_BYTES..]).ok());
        assert!(again.is_none_or(|again: T| again == message), "a message means one thing");
        true
    }
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() else { return false };
    let Ok(length) = body_length(prefix) else { return false };
    assert!(length <= MAX_BODY_BYTES, "a body is bounded");
    let rest = &rest[..rest.len().min(length)];
    body::<Question>(rest) | body::<Answer>(rest)
}

/// Limits beyond the body's length.
pub(crate) trait Bounded {
    fn is_bounded(&self) -> bool;
}

fn name(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_NAME_BYTES
}

fn blobs(connect_info: &[u8], payload: &[u8]) -> bool {
    connect_info.len() <= beeline_fabric::ConnectInfo::MAX_BYTES
        && payload.len() <= MAX_PAYLOAD_BYTES
}

impl Bounded for Question {
    fn is_bounded(&self) -> bool {
        match self {
            Self::Negotiate { service, host, providers, .. } => {
                name(service)
                    && host.boot_id.len() <= MAX_NAME_BYTES
                    && providers.len() <= MAX_PROVIDERS
                    && providers.iter().all(|provider| name(provider))
            }
            Self::Join { service, provider, connect_info, payload, .. } => {
                name(service) && name(provider) && blobs(connect_info, payload)
            }
        }
    }
}

impl Bounded for Answer {
    fn is_bounded(&self) -> bool {
        match self {
            Self::Chosen { provider, payload, .. } => name(provider) && blobs(&[], payload),
            Self::Joined { connect_info, payload } => blobs(connect_info, payload),
            Self::Refused { reason } => reason.len() <= 4096,
        }
    }
}

/// Chooses among the providers both ends have; `None` when there is none in common.
///
/// Shared memory where both ends can map it, else a memory window between them, else RDMA, else
/// TCP, else whatever else they share. An emulated window is for those who ask for it.
pub(crate) fn choose(
    client: (&HostIdentity, &[String], bool),
    server: (&HostIdentity, &[&str], Option<&WindowEnd>),
) -> Option<(String, Reason)> {
    let (client_host, client_has, forced) = client;
    let (server_host, server_has, window) = server;
    let common = |provider: &str| {
        client_has.iter().any(|has| has == provider) && server_has.contains(&provider)
    };
    if forced {
        let provider = client_has.iter().find(|provider| common(provider))?;
        return Some((provider.clone(), Reason::Forced));
    }
    let reason = if !client_host.same_host(server_host) {
        Reason::DifferentHost
    } else if !client_host.same_namespace(server_host) {
        Reason::DifferentNamespace
    } else if common("shm") {
        return Some(("shm".to_owned(), Reason::SameHost));
    } else if server_has.contains(&"shm") {
        Reason::ClientLacksSharedMemory
    } else {
        Reason::ServerLacksSharedMemory
    };
    let better =
        [("ntb", window.is_some(), Reason::CommonWindow), ("verbs", true, Reason::CommonRdma)];
    for (provider, usable, why) in better {
        if usable && common(provider) {
            // A client that keeps back the memory it could share knows why, and says so.
            let reason = match reason {
                Reason::ClientLacksSharedMemory => reason,
                _ => why,
            };
            return Some((provider.to_owned(), reason));
        }
    }
    let network = if common("tcp") {
        "tcp"
    } else {
        // Memory is out; anything else both have is a network of some kind.
        let memory = ["shm", "ntb"];
        client_has.iter().find(|name| !memory.contains(&name.as_str()) && common(name))?
    };
    Some((network.to_owned(), reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(boot: &str, namespace: u64) -> HostIdentity {
        HostIdentity { boot_id: boot.to_owned(), network_namespace: namespace, uid: 0 }
    }

    fn chosen(client: &HostIdentity, has: &[&str], server: &[&str]) -> Option<(String, Reason)> {
        let has: Vec<String> = has.iter().map(|name| (*name).to_owned()).collect();
        choose((client, &has, false), (&host("a", 1), server, None))
    }

    #[test]
    fn a_window_between_hosts_comes_before_the_network_and_an_emulated_one_must_be_asked_for() {
        let end = WindowEnd { node: [7; 16], side: 0, part: (1, 2) };
        let has = ["shm", "ntb", "verbs", "tcp"];
        let owned = has.map(str::to_owned);
        let pick = |boot: &str, window, forced: bool| {
            let client = if forced { &owned[1..2] } else { &owned[..] };
            choose((&host(boot, 1), client, forced), (&host("a", 1), &has, window))
        };
        let chosen = |provider: &str, reason| Some((provider.to_owned(), reason));
        assert_eq!(pick("a", Some(&end), false), chosen("shm", Reason::SameHost));
        assert_eq!(pick("b", Some(&end), false), chosen("ntb", Reason::CommonWindow));
        assert_eq!(pick("b", None, false), chosen("verbs", Reason::CommonRdma));
        assert_eq!(pick("b", None, true), chosen("ntb", Reason::Forced));
        let kept_back =
            choose((&host("a", 1), &owned[1..], false), (&host("a", 1), &has, Some(&end)));
        assert_eq!(kept_back, chosen("ntb", Reason::ClientLacksSharedMemory));
        let emulated = choose((&host("a", 1), &owned[1..2], false), (&host("a", 1), &has, None));
        assert_eq!(emulated, None);
    }

    #[test]
    fn one_host_shares_memory_and_two_use_the_network() {
        let both = ["shm", "tcp"];
        let pick = |provider: &str, reason| Some((provider.to_owned(), reason));
        assert_eq!(chosen(&host("a", 1), &both, &both), pick("shm", Reason::SameHost));
        assert_eq!(chosen(&host("b", 1), &both, &both), pick("tcp", Reason::DifferentHost));
        assert_eq!(chosen(&host("", 1), &both, &both), pick("tcp", Reason::DifferentHost));
        assert_eq!(chosen(&host("a", 2), &both, &both), pick("tcp", Reason::DifferentNamespace));
        assert_eq!(
            chosen(&host("a", 1), &["tcp"], &both),
            pick("tcp", Reason::ClientLacksSharedMemory)
        );
        assert_eq!(
            chosen(&host("a", 1), &both, &["tcp"]),
            pick("tcp", Reason::ServerLacksSharedMemory)
        );
        assert_eq!(chosen(&host("b", 1), &["shm"], &both), None);
        let rdma = ["shm", "verbs", "tcp"];
        assert_eq!(chosen(&host("a", 1), &rdma, &rdma), pick("shm", Reason::SameHost));
        assert_eq!(chosen(&host("b", 1), &rdma, &rdma), pick("verbs", Reason::CommonRdma));
        assert_eq!(chosen(&host("a", 2), &rdma, &rdma), pick("verbs", Reason::CommonRdma));
        assert_eq!(chosen(&host("b", 1), &rdma, &both), pick("tcp", Reason::DifferentHost));
        assert_eq!(chosen(&host("b", 1), &both, &rdma), pick("tcp", Reason::DifferentHost));
    }

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<Question>(&bytes);
            let _ = decode::<Answer>(&bytes);
        }

        #[test]
        fn damaged_questions_never_panic(
            shard in any::<u32>(),
            blob in prop::collection::vec(any::<u8>(), 0..64),
            at in any::<prop::sample::Index>(),
            value in any::<u8>(),
        ) {
            let question = Question::Join {
                service: "kv".to_owned(),
                provider: "tcp".to_owned(),
                shard,
                connect_info: blob.clone(),
                payload: blob,
            };
            let mut bytes = encode(&question).unwrap();
            prop_assert_eq!(&decode::<Question>(&bytes[PREFIX_BYTES..]).unwrap(), &question);
            let index = at.index(bytes.len());
            bytes[index] = value;
            let mut prefix = [0; PREFIX_BYTES];
            prefix.copy_from_slice(&bytes[..PREFIX_BYTES]);
            let _ = body_length(&prefix);
            let _ = decode::<Question>(&bytes[PREFIX_BYTES..]);
        }
    }

    #[test]
    fn an_over_long_body_is_refused_by_its_prefix() {
        let mut prefix = *b"BLBS\x01\0\0\0\0\0\0\0";
        prefix[8..].copy_from_slice(&(MAX_BODY_BYTES as u32 + 1).to_le_bytes());
        assert!(matches!(body_length(&prefix), Err(MessageError::TooLong { .. })));
    }
}
