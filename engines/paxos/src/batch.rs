//! Several clients' commands in one entry.
//!
//! The payload of a [`crate::Kind::Commands`] entry is commands one after another, each beginning
//! at a multiple of eight bytes, little endian:
//!
//! ```text
//!  0  session u64      0: opens one
//!  8  sequence u64     of the command in its session, from 1; 0 when opening
//! 16  length u32, four zeroes
//! 24  bytes, then zeroes to a multiple of eight
//! ```

const HEADER_BYTES: usize = 24;

/// One command of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientCommand<'a> {
    /// The session; 0 opens one.
    pub session: u64,
    /// Its number in the session, from 1.
    pub sequence: u64,
    /// What the state machine is given.
    pub bytes: &'a [u8],
}

/// Bytes a command takes in a batch.
#[must_use]
pub fn encoded_bytes(command: &ClientCommand<'_>) -> usize {
    HEADER_BYTES + command.bytes.len().next_multiple_of(8)
}

/// Collects commands up to a number of bytes. Made once, used again and again.
#[derive(Debug)]
pub struct Batch {
    bytes: Vec<u8>,
    limit: usize,
    commands: usize,
}

impl Batch {
    /// Room for `limit` bytes: a layout's `max_payload_bytes`, or less.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { bytes: Vec::with_capacity(limit), limit, commands: 0 }
    }

    /// Adds a command; false when it does not fit.
    pub fn push(&mut self, command: &ClientCommand<'_>) -> bool {
        let Ok(length) = u32::try_from(command.bytes.len()) else { return false };
        if self.bytes.len() + encoded_bytes(command) > self.limit {
            return false;
        }
        self.bytes.extend_from_slice(&command.session.to_le_bytes());
        self.bytes.extend_from_slice(&command.sequence.to_le_bytes());
        self.bytes.extend_from_slice(&length.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(command.bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        self.commands += 1;
        true
    }

    /// Commands collected.
    #[must_use]
    pub fn commands(&self) -> usize {
        self.commands
    }

    /// The entry's payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.bytes
    }

    /// Empties it, keeping its memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.commands = 0;
    }
}

/// The commands of a payload. Ends at the first that is cut short: the entry's checks make that
/// impossible for what [`Batch`] wrote.
pub fn commands(payload: &[u8]) -> impl Iterator<Item = ClientCommand<'_>> {
    let mut rest = payload;
    std::iter::from_fn(move || {
        let header = rest.get(..HEADER_BYTES)?;
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let length = (long(16) & u64::from(u32::MAX)) as usize;
        let bytes = rest.get(HEADER_BYTES..HEADER_BYTES + length)?;
        let command = ClientCommand { session: long(0), sequence: long(8), bytes };
        rest = rest.get(encoded_bytes(&command)..).unwrap_or_default();
        Some(command)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn commands_come_back_in_order(
            sent in proptest::collection::vec(
                (any::<u64>(), any::<u64>(), proptest::collection::vec(any::<u8>(), 0..40)), 0..12),
        ) {
            let mut batch = Batch::new(4096);
            for (session, sequence, bytes) in &sent {
                let command = ClientCommand { session: *session, sequence: *sequence, bytes };
                prop_assert!(batch.push(&command));
            }
            let found: Vec<_> = commands(batch.payload())
                .map(|command| (command.session, command.sequence, command.bytes.to_vec()))
                .collect();
            prop_assert_eq!(batch.commands(), sent.len());
            prop_assert_eq!(found, sent);
        }

        #[test]
        fn any_payload_is_read_without_harm(
            payload in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            prop_assert!(commands(&payload).count() <= payload.len() / HEADER_BYTES);
        }
    }

    #[test]
    fn a_full_batch_refuses_and_stays_as_it_was() {
        let mut batch = Batch::new(64);
        let command = ClientCommand { session: 1, sequence: 1, bytes: b"twelve bytes" };
        assert!(batch.push(&command));
        assert!(!batch.push(&command));
        assert_eq!(commands(batch.payload()).collect::<Vec<_>>(), [command]);
        batch.clear();
        assert_eq!((batch.commands(), batch.payload().len()), (0, 0));
    }
}
