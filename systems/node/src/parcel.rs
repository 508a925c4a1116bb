//! What shards send each other: batches of commands, batches of replies.
//!
//! A shard collects all commands of one loop turn for another shard in one value, so that a hop
//! costs one mailbox slot per turn, not per command. The same value brings the replies back and is
//! filled again: it returns to whoever made it, so one-sided traffic neither allocates nor hoards.

use std::net::TcpStream;

use crate::wire::{Args, ArgsBuffer, Head, Refusal};

use crate::fabric_door::FabricIncoming;
use crate::replicated::lane::Failure;

/// One value in a mailbox between shards.
#[derive(Debug)]
pub(crate) enum Parcel {
    /// To execute.
    Commands(Box<Hop>),
    /// What came of earlier ones.
    Replies(Box<Hop>),
}

/// Commands on their way there, replies on their way back.
#[derive(Debug, Default)]
pub(crate) struct Hop {
    pub commands: Commands,
    pub replies: Replies,
}

/// One value from the doors' threads to a shard.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// A new connection of the wire with this index.
    Connection(usize, TcpStream),
    /// A new one-sided client.
    Fabric(Box<FabricIncoming>),
    /// Close the connection with this number.
    Kill(u64),
    /// The log answers.
    Log(LogNews),
    /// Another service answers.
    Answer {
        /// To whose request.
        origin: Origin,
        /// The reply.
        reply: Vec<u8>,
    },
}

/// What the log answers to a shard of a replicated node.
#[derive(Debug)]
pub(crate) enum LogNews {
    /// About a unit of its lane.
    Unit {
        /// Its number.
        number: u64,
        /// The replies.
        outcome: Result<Vec<u8>, Failure>,
    },
    /// About a barrier it asked for.
    Barrier {
        /// Its name.
        ticket: u64,
        /// Whether reads may run.
        outcome: Result<(), Failure>,
    },
    /// To another member's request.
    Answer {
        /// Whose.
        origin: Origin,
        /// The reply.
        reply: Vec<u8>,
    },
}

/// Whose command a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Index in the sender's connection table.
    pub slot: u32,
    /// Guards against a reused slot.
    pub generation: u32,
    /// Place among the connection's forwarded commands.
    pub sequence: u64,
    /// CLIENT REPLY dropped the reply when the command was forwarded.
    pub silent: bool,
}

/// What a command needs to run away from its session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heading {
    pub origin: Origin,
    /// The wire it belongs to, by index.
    pub wire: usize,
    pub head: Head,
}

/// Commands for one shard.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    headings: Vec<Heading>,
    requests: ArgsBuffer,
}

impl Commands {
    /// Appends a command; `false` when the parcel cannot take it any more.
    pub(crate) fn push(&mut self, heading: Heading, args: Args<'_>) -> bool {
        let taken = self.requests.push(args);
        if taken {
            self.headings.push(heading);
        }
        taken
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.headings.is_empty()
    }

    /// Command `index`; `None` past the end.
    pub(crate) fn get(&self, index: usize) -> Option<(Heading, Args<'_>)> {
        Some((*self.headings.get(index)?, self.requests.get(index)))
    }

    pub(crate) fn clear(&mut self) {
        self.headings.clear();
        self.requests.clear();
    }
}

/// Replies for one shard.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    /// Whose, where the reply ends in `bytes`, and what stands in its place.
    ends: Vec<(Origin, usize, Option<Refusal<'static>>)>,
    /// Where the replies are written.
    pub bytes: Vec<u8>,
    /// What was executed is not durable: none of them may be sent.
    failed: bool,
}

/// Buffers above this are given back instead of kept.
const KEPT_BYTES: usize = 1 << 20;

impl Replies {
    /// What was written to `bytes` since the last call is the reply to `origin`.
    pub(crate) fn finish(&mut self, origin: Origin) {
        self.ends.push((origin, self.bytes.len(), None));
    }

    /// No reply to `origin` was written: its wire words why.
    pub(crate) fn refuse(&mut self, origin: Origin, refusal: Refusal<'static>) {
        self.ends.push((origin, self.bytes.len(), Some(refusal)));
    }

    /// Each reply, or what stands in its place.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Origin, Result<&[u8], Refusal<'static>>)> {
        let mut start = 0;
        self.ends.iter().map(move |&(origin, end, refusal)| {
            let reply = &self.bytes[start..end];
            start = end;
            let reply = match (self.failed, refusal) {
                (true, _) => Err(Refusal::NotDurable),
                (_, Some(refusal)) => Err(refusal),
                _ => Ok(reply),
            };
            (origin, reply)
        })
    }

    /// What was executed is not durable: none of the replies may be sent.
    pub(crate) fn fail(&mut self) {
        self.failed = true;
    }

    pub(crate) fn clear(&mut self) {
        self.ends.clear();
        self.bytes.clear();
        self.failed = false;
        self.bytes.shrink_to(KEPT_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_come_out_as_they_went_in() {
        let origin = |sequence| Origin { slot: 7, generation: 3, sequence, silent: false };
        let mut replies = Replies::default();
        for (sequence, reply) in [(1, &b"+OK\r\n"[..]), (2, b""), (3, b":1\r\n")] {
            replies.bytes.extend_from_slice(reply);
            replies.finish(origin(sequence));
        }
        let collected: Vec<_> = replies.iter().collect();
        assert_eq!(
            collected,
            [
                (origin(1), Ok(&b"+OK\r\n"[..])),
                (origin(2), Ok(&b""[..])),
                (origin(3), Ok(&b":1\r\n"[..])),
            ]
        );
        replies.refuse(origin(4), Refusal::Loading);
        assert_eq!(replies.iter().last(), Some((origin(4), Err(Refusal::Loading))));
        replies.fail();
        assert!(replies.iter().all(|(_, reply)| reply == Err(Refusal::NotDurable)));
        replies.clear();
        assert_eq!(replies.iter().count(), 0);
    }
}
