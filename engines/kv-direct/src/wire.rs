//! What client and server say to each other before the first packet.
//!
//! Both go through the bootstrap exchange. All numbers are little-endian; the first two bytes are the
//! version of all formats of this part.
//!
//! ```text
//! hello:   version u16 | window u16 | packet bytes u32 | reply bytes u32 | key of the reply area u64
//! welcome: version u16 | window u16 | packet bytes u32 | reply bytes u32 | key of the packet area u64
//! refusal: version u16 | 0 u16 | reason, UTF-8
//! ```
//!
//! The server's answer bounds what the client asked for. Slot i of the packet area is written by the
//! client, with the immediate i; its reply goes to slot i of the reply area, with the immediate i. A
//! client writes a slot again only after the reply to what it wrote there before.

/// The version of all formats.
pub const VERSION: u16 = 3;
/// Bytes of a hello and of a welcome.
pub const HELLO_BYTES: usize = 20;

/// One side's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Packets outstanding at once.
    pub window: u16,
    /// Bytes of a packet slot.
    pub packet_bytes: u32,
    /// Bytes of a reply slot.
    pub reply_bytes: u32,
    /// Remote key of the sender's area.
    pub area_key: u64,
}

/// Why two sides do not understand each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes are no message of this part.
    #[error("{length} bytes where a message of {HELLO_BYTES} is expected")]
    Length {
        /// Bytes that came.
        length: usize,
    },
    /// The other side is of another build.
    #[error("version {theirs} of the format, where this side speaks {VERSION}; use one build")]
    Version {
        /// Theirs.
        theirs: u16,
    },
    /// The server does not take this client.
    #[error("the server refuses: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
}

impl Hello {
    /// For the exchange.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HELLO_BYTES);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.window.to_le_bytes());
        bytes.extend(self.packet_bytes.to_le_bytes());
        bytes.extend(self.reply_bytes.to_le_bytes());
        bytes.extend(self.area_key.to_le_bytes());
        bytes
    }

    /// Of what came; a refusal is an error.
    ///
    /// Errors: [`WireError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let short = WireError::Length { length: bytes.len() };
        let number = |at: usize, length: usize| {
            bytes.get(at..at + length).map(|part| {
                part.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
            })
        };
        let theirs = number(0, 2).ok_or_else(|| short.clone())? as u16;
        if theirs != VERSION {
            return Err(WireError::Version { theirs });
        }
        let window = number(2, 2).ok_or_else(|| short.clone())? as u16;
        if window == 0 {
            let reason = String::from_utf8_lossy(&bytes[4..]).into_owned();
            return Err(WireError::Refused { reason });
        }
        if bytes.len() != HELLO_BYTES {
            return Err(short);
        }
        Ok(Self {
            window,
            packet_bytes: number(4, 4).ok_or_else(|| short.clone())? as u32,
            reply_bytes: number(8, 4).ok_or_else(|| short.clone())? as u32,
            area_key: number(12, 8).ok_or(short)?,
        })
    }

    /// A refusal with its reason.
    #[must_use]
    pub fn refuse(reason: &str) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(reason.as_bytes());
        bytes
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        let hello = Hello { window: 8, packet_bytes: 4096, reply_bytes: 65536, area_key: u64::MAX };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        for cut in 0..HELLO_BYTES {
            assert!(Hello::decode(&hello.encode()[..cut]).is_err());
        }
    }

    #[test]
    fn a_refusal_and_another_version_say_so() {
        let refused = Hello::decode(&Hello::refuse("too many clients")).unwrap_err();
        assert_eq!(refused, WireError::Refused { reason: "too many clients".to_owned() });
        let other = Hello::decode(&[9, 0, 1, 0]).unwrap_err();
        assert_eq!(other, WireError::Version { theirs: 9 });
    }
}
