//! Packets in datagrams: a token in front shows that the sender receives at the address it names.
//!
//! ```text
//! datagram:  token u64 | packet              client to server
//! answer:    token u64 | reply               to a datagram with the server's token for its sender
//! challenge: token u64 | id u32 | 0 u16      to any other: nothing of it was executed
//! ```
//!
//! A client begins with the token 0, receives a challenge, and sends its packet again with the token of
//! that. A challenge has the length of the shortest datagram that is answered at all, so a sender that
//! names another's address sends that address no more bytes than its own datagram had, and changes no
//! pair.
//!
//! A token is a keyed hash of the address and of the time, in steps of [`STEP`]; the server keeps
//! nothing for it. It holds for one step at least and for two at most.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::time::Duration;

use crate::packet::HEADER_BYTES;

/// Bytes of a token.
pub const TOKEN_BYTES: usize = 8;
/// How long the server's tokens stay the same.
pub const STEP: Duration = Duration::from_secs(60);

/// Gives and checks tokens: the server's secret.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    keys: RandomState,
}

/// What a datagram is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Datagram<'a> {
    /// Its sender receives at its address: execute this packet, and answer with this token in front.
    Packet {
        /// To be given back.
        token: u64,
        /// The packet.
        packet: &'a [u8],
    },
    /// Its sender has not shown that: send this challenge.
    Challenge([u8; TOKEN_BYTES + HEADER_BYTES]),
    /// Too short to be answered.
    Garbage,
}

impl Tokens {
    fn token(&self, from: SocketAddr, step: u64) -> u64 {
        // 0 is what a client has that knows none.
        self.keys.hash_one((from, step)).max(1)
    }

    /// Looks at a datagram that came from `from` at `now`, a time since any fixed moment.
    #[must_use]
    pub fn look<'a>(&self, bytes: &'a [u8], from: SocketAddr, now: Duration) -> Datagram<'a> {
        let Some((token, packet)) = bytes.split_first_chunk::<TOKEN_BYTES>() else {
            return Datagram::Garbage;
        };
        let Some(id) = packet.first_chunk::<4>().filter(|_| packet.len() >= HEADER_BYTES) else {
            return Datagram::Garbage;
        };
        let step = now.as_secs() / STEP.as_secs();
        let shown = u64::from_le_bytes(*token);
        let current = self.token(from, step);
        let known = shown == current
            || step.checked_sub(1).is_some_and(|step| shown == self.token(from, step));
        if known {
            return Datagram::Packet { token: current, packet };
        }
        let mut challenge = [0; TOKEN_BYTES + HEADER_BYTES];
        challenge[..TOKEN_BYTES].copy_from_slice(&current.to_le_bytes());
        challenge[TOKEN_BYTES..TOKEN_BYTES + 4].copy_from_slice(id);
        Datagram::Challenge(challenge)
    }
}

/// Token and reply of an answer; the reply is empty in a challenge. `None` where it is neither.
#[must_use]
pub fn answer(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (token, reply) = bytes.split_first_chunk::<TOKEN_BYTES>()?;
    let count = reply.get(4..HEADER_BYTES)?;
    let reply = if count == [0, 0] { &[][..] } else { reply };
    Some((u64::from_le_bytes(*token), reply))
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(token: u64, packet: &[u8]) -> Vec<u8> {
        [&token.to_le_bytes(), packet].concat()
    }

    #[test]
    fn a_sender_without_a_token_gets_no_more_bytes_than_it_sent() {
        let tokens = Tokens::default();
        let from: SocketAddr = "10.1.1.1:5".parse().unwrap();
        for length in 0..200 {
            for token in [0, 1, u64::MAX] {
                let bytes = datagram(token, &vec![7; length]);
                match tokens.look(&bytes, from, Duration::ZERO) {
                    Datagram::Garbage => assert!(length < HEADER_BYTES),
                    Datagram::Challenge(challenge) => assert!(challenge.len() <= bytes.len()),
                    Datagram::Packet { .. } => panic!("nothing shows that it receives there"),
                }
            }
        }
        assert_eq!(tokens.look(b"short", from, Duration::ZERO), Datagram::Garbage);
    }

    #[test]
    fn a_token_holds_for_its_address_and_for_two_steps_at_most() {
        let tokens = Tokens::default();
        let from: SocketAddr = "10.1.1.1:5".parse().unwrap();
        let packet = [9, 0, 0, 0, 1, 0, 1];
        let at = |step: u32| STEP * step + Duration::from_secs(59);
        let Datagram::Challenge(challenge) = tokens.look(&datagram(0, &packet), from, at(4)) else {
            panic!("a challenge comes first");
        };
        let (token, reply) = answer(&challenge).unwrap();
        assert!(reply.is_empty());
        let again = datagram(token, &packet);
        for step in [4, 5] {
            let Datagram::Packet { packet: seen, .. } = tokens.look(&again, from, at(step)) else {
                panic!("the token holds");
            };
            assert_eq!(seen, packet);
        }
        assert!(matches!(tokens.look(&again, from, at(6)), Datagram::Challenge(_)));
        for other in ["10.1.1.1:6", "10.1.1.2:5"] {
            let other = other.parse().unwrap();
            assert!(matches!(tokens.look(&again, other, at(4)), Datagram::Challenge(_)));
        }
        let stranger = Tokens::default();
        assert!(matches!(stranger.look(&again, from, at(4)), Datagram::Challenge(_)));
    }
}
