//! What the two ends say before the first frame. Pure.
//!
//! [`Greeting`] opens the connection (64 bytes): the dialling end names the queue pair it wants by
//! number and nonce and shows its own; the other end answers with the mirror image. The nonces are
//! random and travel only in the bootstrap exchange, so that whoever can show the right one took
//! part in it.
//!
//! ```text
//!  0 "BEELHELO"   8 version u8 = 1   9 role u8 (1 hello, 2 welcome)   10 zero u16
//! 12 target qp_num u32   16 target nonce [16]
//! 32 source qp_num u32   36 source nonce [16]
//! 52 zero [8]            60 crc32c u32 of bytes 0..60
//! ```

use beeline_fabric::fields::array;

/// Proof of having taken part in the bootstrap exchange.
pub type Nonce = [u8; 16];

/// A queue pair's number at its device, and its nonce.
pub type Identity = (u32, Nonce);

/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 64;
const VERSION: u8 = 1;

/// Which way a greeting goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GreetingRole {
    /// From the dialling end.
    Hello,
    /// The answer.
    Welcome,
}

/// First bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Which way.
    pub role: GreetingRole,
    /// The queue pair spoken to.
    pub target: Identity,
    /// The queue pair speaking.
    pub source: Identity,
}

impl Greeting {
    /// The bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(b"BEELHELO");
        bytes[8] = VERSION;
        bytes[9] = match self.role {
            GreetingRole::Hello => 1,
            GreetingRole::Welcome => 2,
        };
        bytes[12..16].copy_from_slice(&self.target.0.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.target.1);
        bytes[32..36].copy_from_slice(&self.source.0.to_le_bytes());
        bytes[36..52].copy_from_slice(&self.source.1);
        let checksum = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads a peer's bytes; `None` when they are not exactly a greeting.
    #[must_use]
    pub fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Self> {
        let role = match bytes[9] {
            1 => GreetingRole::Hello,
            2 => GreetingRole::Welcome,
            _ => return None,
        };
        let greeting = Self {
            role,
            target: (u32::from_le_bytes(array(bytes, 12)), array(bytes, 16)),
            source: (u32::from_le_bytes(array(bytes, 32)), array(bytes, 36)),
        };
        (greeting.encode() == *bytes).then_some(greeting)
    }
}

/// Compares without telling, by its running time, how far two nonces agree.
#[must_use]
pub fn same_nonce(left: &Nonce, right: &Nonce) -> bool {
    left.iter().zip(right).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_changed_greeting_is_refused(
            target in any::<(u32, Nonce)>(),
            source in any::<(u32, Nonce)>(),
            at in 0..GREETING_BYTES,
            change in 1..=u8::MAX,
        ) {
            let greeting = Greeting { role: GreetingRole::Hello, target, source };
            let mut bytes = greeting.encode();
            prop_assert_eq!(Greeting::decode(&bytes), Some(greeting));
            bytes[at] ^= change;
            prop_assert_eq!(Greeting::decode(&bytes), None);
        }
    }
}
