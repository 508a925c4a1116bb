//! What two members say when they connect.
//!
//! ```text
//!  0  magic u32 "BLH" and version        32  incarnation u64     64  status key u64
//!  4  cluster u64                        40  attempt u64         72  length of contact u16
//! 12  from u16, to u16                   48  slots u64
//! 16  expects u64                          56  bytes per slot u64
//! 24  instance u64                      74  host u64, key of its beat u64
//!                                       90  line u64                100  contact
//!                                       98  threads u16
//! ```
//!
//! Little endian. The *instance* was drawn when the member's directory was made; what the sender
//! *expects* is the receiver's, or 0. The *incarnation* counts how often the directory was opened,
//! the *attempt* the connections since. So a second server under one name shows, and so does a
//! hello that was recorded and is played again. A member that shares its thread with others tells which
//! *host* that is ([`crate::host`]), and how many *threads* that has; 0: it has a thread of its own. The *line*
//! is that which the control connection goes through; 0: it has a queue pair of its own. A greeting
//! that names a line both know comes without connection data.

use beeline_fabric::RemoteKey;
use beeline_paxos::{ClusterId, Layout, MAX_CONTACT_BYTES, NodeId};

use crate::shared::Beat;

/// The first three bytes; the fourth is the version of everything members exchange.
const MAGIC: [u8; 3] = *b"BLH";
/// Of hellos, frames, formats in memory that peers read, and what services put into entries. 2: units
/// name their service. 3: what members compare covers effects instead of replies. 4: members forward over
/// fabric. 5: leaders rest, and hosts have beats. 6: hosts share control connections.
pub const VERSION: u8 = 6;
const HEADER_BYTES: usize = 100;

/// Why a greeting over a line is refused: the dialler makes another.
pub(crate) const NO_LINE: &str = "the line that the greeting names is not known here";

/// One hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) cluster: ClusterId,
    pub(crate) from: NodeId,
    pub(crate) to: NodeId,
    pub(crate) expects: u64,
    pub(crate) instance: u64,
    pub(crate) incarnation: u64,
    pub(crate) attempt: u64,
    pub(crate) slots: u64,
    pub(crate) slot_bytes: u64,
    pub(crate) status: u64,
    pub(crate) beat: Option<Beat>,
    pub(crate) line: u64,
    pub(crate) threads: u16,
    pub(crate) contact: Vec<u8>,
}

/// Why two members do not connect. Each but [`HelloError::Busy`], [`HelloError::Replayed`] and
/// [`HelloError::NoLine`] needs a person.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// Not a hello.
    #[error("the greeting is not that of a replicated log")]
    Malformed,
    /// Of another version.
    #[error("the peer speaks version {found} of the log's formats, this server {VERSION}")]
    Version {
        /// The peer's.
        found: u8,
    },
    /// Of another cluster.
    #[error("the peer belongs to cluster {found:016x}, this server to {own:016x}")]
    Cluster {
        /// The peer's.
        found: u64,
        /// This server's.
        own: u64,
    },
    /// Meant for another member.
    #[error("the peer looks for {wanted}, this server is {own}")]
    OtherMember {
        /// Whom it wants.
        wanted: NodeId,
        /// Who this is.
        own: NodeId,
    },
    /// Another server has this name.
    #[error(
        "node id {id} is taken: two servers have it, or its disk was replaced: remove it, then let it join again"
    )]
    DuplicateId {
        /// The name.
        id: NodeId,
    },
    /// The logs differ in shape.
    #[error("the peer's log has {slots} slots of {slot_bytes} bytes, this server's another shape")]
    Geometry {
        /// The peer's.
        slots: u64,
        /// The peer's.
        slot_bytes: u64,
    },
    /// A greeting that came before.
    #[error("the greeting is an old one")]
    Replayed,
    /// This server is connecting to the peer at this moment.
    #[error("this server is connecting to {id} itself")]
    Busy {
        /// The peer.
        id: NodeId,
    },
    /// The line that the greeting names has ended here, or never was on this thread.
    #[error("{NO_LINE}")]
    NoLine,
    /// The fabric refused.
    #[error("the peer could not be connected: {reason}")]
    Fabric {
        /// In its words.
        reason: String,
    },
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        assert!(self.contact.len() <= MAX_CONTACT_BYTES, "contacts are bounded");
        let mut bytes = MAGIC.to_vec();
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.cluster.0.to_le_bytes());
        bytes.extend_from_slice(&self.from.0.to_le_bytes());
        bytes.extend_from_slice(&self.to.0.to_le_bytes());
        let words = [
            self.expects,
            self.instance,
            self.incarnation,
            self.attempt,
            self.slots,
            self.slot_bytes,
            self.status,
        ];
        for word in words {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let length = u16::try_from(self.contact.len()).unwrap_or(u16::MAX);
        bytes.extend_from_slice(&length.to_le_bytes());
        let (host, key) = self.beat.map_or((0, 0), |beat| (beat.host, beat.key.0));
        bytes.extend_from_slice(&host.to_le_bytes());
        bytes.extend_from_slice(&key.to_le_bytes());
        bytes.extend_from_slice(&self.line.to_le_bytes());
        bytes.extend_from_slice(&self.threads.to_le_bytes());
        bytes.extend_from_slice(&self.contact);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, HelloError> {
        if bytes.len() < 4 || bytes[..3] != MAGIC {
            return Err(HelloError::Malformed);
        }
        if bytes[3] != VERSION {
            return Err(HelloError::Version { found: bytes[3] });
        }
        let (header, contact) =
            bytes.split_at_checked(HEADER_BYTES).ok_or(HelloError::Malformed)?;
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let length = usize::from(short(72));
        // Node ids are below 65535.
        let nobody = [short(12), short(14)].contains(&u16::MAX);
        if nobody || contact.len() != length || length > MAX_CONTACT_BYTES {
            return Err(HelloError::Malformed);
        }
        Ok(Self {
            cluster: ClusterId(long(4)),
            from: NodeId(short(12)),
            to: NodeId(short(14)),
            expects: long(16),
            instance: long(24),
            incarnation: long(32),
            attempt: long(40),
            slots: long(48),
            slot_bytes: long(56),
            status: long(64),
            beat: Some(Beat { host: long(74), key: RemoteKey(long(82)) })
                .filter(|beat| beat.host != 0),
            line: long(90),
            threads: short(98),
            contact: contact.to_vec(),
        })
    }

    /// Which cluster a greeting is about, if it is one of this version: what a host needs to know.
    ///
    /// Errors: [`HelloError::Malformed`], [`HelloError::Version`].
    pub(crate) fn cluster_of(bytes: &[u8]) -> Result<ClusterId, HelloError> {
        Self::decode(bytes).map(|hello| hello.cluster)
    }

    /// Whether the server `own` of `cluster`, an `instance` of it, may talk with the sender.
    pub(crate) fn check(
        &self,
        (own, instance): (NodeId, u64),
        cluster: ClusterId,
        layout: &Layout,
    ) -> Result<(), HelloError> {
        if self.cluster != cluster {
            return Err(HelloError::Cluster { found: self.cluster.0, own: cluster.0 });
        }
        let is_another = self.expects != 0 && self.expects != instance && self.to == own;
        if self.from == own || is_another {
            return Err(HelloError::DuplicateId { id: own });
        }
        if self.to != own {
            return Err(HelloError::OtherMember { wanted: self.to, own });
        }
        if (self.slots, self.slot_bytes) != (layout.slots(), layout.slot_bytes()) {
            let (slots, slot_bytes) = (self.slots, self.slot_bytes);
            return Err(HelloError::Geometry { slots, slot_bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            cluster: ClusterId(7),
            from: NodeId(1),
            to: NodeId(2),
            expects: 0,
            instance: 3,
            incarnation: 4,
            attempt: 5,
            slots: 8,
            slot_bytes: 128,
            status: 6,
            beat: Some(Beat { host: 7, key: RemoteKey(8) }),
            line: 9,
            threads: 2,
            contact: b"here".to_vec(),
        }
    }

    #[test]
    fn a_hello_comes_back_and_anything_else_is_named() {
        let bytes = hello().encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello()));
        let alone = Hello { beat: None, ..hello() };
        assert_eq!(Hello::decode(&alone.encode()), Ok(alone));
        for length in 0..bytes.len() {
            assert_eq!(Hello::decode(&bytes[..length]), Err(HelloError::Malformed));
        }
        for at in [12, 14] {
            let mut nobody = bytes.clone();
            nobody[at..at + 2].fill(0xff);
            assert_eq!(Hello::decode(&nobody), Err(HelloError::Malformed), "no vote word has it");
        }
        let mut newer = bytes;
        newer[3] = 9;
        assert_eq!(Hello::decode(&newer), Err(HelloError::Version { found: 9 }));
    }

    #[test]
    fn strangers_are_told_why() {
        let layout = Layout::new(8, 128).unwrap();
        let check =
            |own, cluster, hello: Hello| hello.check((NodeId(own), 4), ClusterId(cluster), &layout);
        assert_eq!(check(2, 7, hello()), Ok(()));
        assert_eq!(check(2, 8, hello()), Err(HelloError::Cluster { found: 7, own: 8 }));
        assert_eq!(check(1, 7, hello()), Err(HelloError::DuplicateId { id: NodeId(1) }));
        let other = HelloError::OtherMember { wanted: NodeId(2), own: NodeId(3) };
        assert_eq!(check(3, 7, hello()), Err(other));
        assert_eq!(check(2, 7, Hello { expects: 4, ..hello() }), Ok(()));
        let second = check(2, 7, Hello { expects: 5, ..hello() });
        assert_eq!(second, Err(HelloError::DuplicateId { id: NodeId(2) }));
        let wider = Hello { slots: 16, ..hello() };
        let refused = Err(HelloError::Geometry { slots: 16, slot_bytes: 128 });
        assert_eq!(check(2, 7, wider), refused);
    }
}
