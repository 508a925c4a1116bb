//! What one member has another one do: a queue pair for each direction of asking.
//!
//! ```text
//!  asker ── command, barrier ──▶ answerer       each in messages of up to 16 KiB,
//!        ◀─ answer ────────────                 one after another
//!
//!  message   0  magic u32 "BLF" and version     12  length u32 of the whole body
//!            4  kind u8, outcome u8, zero u16   16  number u64 of what is asked
//!            8  freed u32                       24  its part of the body
//! ```
//!
//! Little endian. A command's body is the command; a barrier's is empty; an answer's is the reply to a
//! command, or a position u64, or what belongs to its outcome ([`refusal_of`]).
//!
//! *Freed* counts the messages with a body that the sender has taken and given a receive back for, so a
//! member has no more of them on their way than the other one has receives ([`CREDITS`]). Where nothing
//! is to be said, a message without a body ([`CREDIT`]) says it after every half of them; those have
//! receives of their own: no more than two can be on their way.
//!
//! Whatever is wrong in a message ends the connection: what was asked through it is told as lost.

use std::collections::VecDeque;

use beeline_fabric::{
    LocalData, MemoryRegion, Operation, PostError, QueuePair, QueuePairState, ReceiveRequest,
    ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out};
use beeline_paxos::NodeId;

use crate::handle::Refusal;
use crate::link::SENT;

/// The fourth byte is the version of these messages.
const MAGIC: u32 = u32::from_le_bytes([b'B', b'L', b'F', 1]);
const HEADER_BYTES: usize = 24;
/// One message, header included.
const MESSAGE_BYTES: u64 = 16 << 10;
/// Messages with a body on their way.
const CREDITS: u32 = 16;
/// Receives for messages without one.
const SPARE: u32 = 4;
/// Receives, and buffers to send from.
pub(crate) const BUFFERS: u64 = (CREDITS + SPARE) as u64;
/// Memory of one end.
pub(crate) const CHANNEL_BYTES: usize = (2 * BUFFERS * MESSAGE_BYTES) as usize;
/// Asked and not answered, through one connection.
pub(crate) const MOST_ASKED: usize = 1024;
/// What waits to be sent through one connection, bytes: more is refused as [`Refusal::Full`].
pub(crate) const MOST_WAITING_BYTES: usize = 16 << 20;
/// Longest answer.
pub(crate) const MOST_ANSWER_BYTES: usize = 1 << 30;

/// What a message is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To be proposed.
    Command,
    /// To be passed.
    Barrier,
    /// What became of either.
    Answer,
}

const COMMAND: u8 = 1;
const BARRIER: u8 = 2;
const ANSWER: u8 = 3;
/// Says what was freed, and nothing else.
const CREDIT: u8 = 4;

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Command => COMMAND,
            Self::Barrier => BARRIER,
            Self::Answer => ANSWER,
        }
    }

    fn of(code: u8) -> Option<Self> {
        match code {
            COMMAND => Some(Self::Command),
            BARRIER => Some(Self::Barrier),
            ANSWER => Some(Self::Answer),
            _ => None,
        }
    }
}

/// A question or an answer, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) kind: Kind,
    /// Of an answer: [`DONE`], or why not. Else 0.
    pub(crate) outcome: u8,
    pub(crate) number: u64,
    pub(crate) body: Vec<u8>,
}

/// The body is what was asked for.
pub(crate) const DONE: u8 = 0;
const NOT_LEADER: u8 = 1;
const LOST: u8 = 2;
pub(crate) const FULL: u8 = 3;
const LOG_FULL: u8 = 4;
const TOO_LARGE: u8 = 5;
const REFUSED: u8 = 6;

/// A refusal as an answer's outcome and body.
pub(crate) fn outcome_of(refusal: &Refusal) -> (u8, Vec<u8>) {
    match refusal {
        Refusal::NotLeader { .. } => (NOT_LEADER, Vec::new()),
        // A member that stops may have proposed it.
        Refusal::Lost | Refusal::Stopped | Refusal::TimedOut => (LOST, Vec::new()),
        Refusal::Full => (FULL, Vec::new()),
        Refusal::LogFull { reason } => (LOG_FULL, reason.clone().into_bytes()),
        Refusal::TooLarge { bytes, limit } => {
            let both = [*bytes as u64, *limit as u64];
            (TOO_LARGE, both.iter().flat_map(|word| word.to_le_bytes()).collect())
        }
        refusal => (REFUSED, refusal.to_string().into_bytes()),
    }
}

/// What [`outcome_of`] wrote.
pub(crate) fn refusal_of(outcome: u8, body: &[u8]) -> Refusal {
    let text = || String::from_utf8_lossy(body).into_owned();
    match (outcome, body) {
        (NOT_LEADER, _) => Refusal::NotLeader { leader: None },
        (LOST, _) => Refusal::Lost,
        (FULL, _) => Refusal::Full,
        (LOG_FULL, _) => Refusal::LogFull { reason: text() },
        (TOO_LARGE, _) if body.len() == 16 => {
            let word = |at: usize| {
                let bytes = body[at..at + 8].first_chunk().copied().unwrap_or_default();
                usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
            };
            Refusal::TooLarge { bytes: word(0), limit: word(8) }
        }
        _ => Refusal::Refused { reason: text() },
    }
}

/// The head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    kind: u8,
    outcome: u8,
    freed: u32,
    length: u32,
    number: u64,
}

impl Head {
    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        (bytes[4], bytes[5]) = (self.kind, self.outcome);
        bytes[8..12].copy_from_slice(&self.freed.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.length.to_le_bytes());
        bytes[16..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// The head of `message`, and its part of the body; `None` unless spelled as [`Head::encode`] does.
    fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        let (bytes, part) = message.split_first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let number = u64::from(word(16)) | u64::from(word(20)) << 32;
        let (kind, outcome) = (bytes[4], bytes[5]);
        let head = Self { kind, outcome, freed: word(8), length: word(12), number };
        (head.encode() == *bytes).then_some((head, part))
    }
}

/// The messages of a connection without the connection: what is sent, what has come, and whether more may be sent.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    waiting: VecDeque<Item>,
    waiting_bytes: usize,
    /// Bytes of the first one's body that were sent; `None`: nothing of it was.
    begun: Option<usize>,
    coming: Option<Item>,
    coming_length: usize,
    /// Longest body taken.
    most_bytes: usize,
    /// Messages with a body: sent, and given back by the other end.
    sent: u32,
    returned: u32,
    /// Messages with a body: taken, and told the other end.
    freed: u32,
    told: u32,
}

/// The other end does not keep to the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl Flow {
    /// Takes bodies of up to `most_bytes`.
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self { most_bytes, ..Self::default() }
    }

    pub(crate) fn push(&mut self, item: Item) {
        self.waiting_bytes += item.body.len();
        self.waiting.push_back(item);
    }

    pub(crate) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// Takes back what waits and was not begun. False if there is no such.
    pub(crate) fn take_back(&mut self, number: u64) -> bool {
        let from = usize::from(self.begun.is_some());
        let waiting = self.waiting.iter().skip(from);
        let Some(at) = waiting.map(|item| item.number).position(|known| known == number) else {
            return false;
        };
        let item = self.waiting.remove(from + at);
        self.waiting_bytes -= item.map_or(0, |item| item.body.len());
        true
    }

    /// The numbers of what waits, of which nothing was sent.
    pub(crate) fn unsent(&self) -> impl Iterator<Item = u64> {
        let from = usize::from(self.begun.is_some());
        self.waiting.iter().skip(from).map(|item| item.number)
    }

    /// The next message of at most `room` bytes; `None`: nothing to say, or no leave to.
    pub(crate) fn next(&mut self, room: usize, message: &mut Vec<u8>) -> bool {
        message.clear();
        let may = self.sent.wrapping_sub(self.returned) < CREDITS;
        if let Some(item) = self.waiting.front().filter(|_| may) {
            let from = self.begun.unwrap_or_default();
            let to = item.body.len().min(from + room.saturating_sub(HEADER_BYTES).max(1));
            let head = Head {
                kind: item.kind.code(),
                outcome: item.outcome,
                freed: self.freed,
                length: item.body.len() as u32,
                number: item.number,
            };
            message.extend_from_slice(&head.encode());
            message.extend_from_slice(&item.body[from..to]);
            self.begun = Some(to);
            if to == item.body.len() {
                self.waiting_bytes -= item.body.len();
                self.begun = None;
                self.waiting.pop_front();
            }
            self.sent = self.sent.wrapping_add(1);
        } else if self.freed.wrapping_sub(self.told) >= CREDITS / 2 {
            let head = Head { kind: CREDIT, outcome: 0, freed: self.freed, length: 0, number: 0 };
            message.extend_from_slice(&head.encode());
        } else {
            return false;
        }
        self.told = self.freed;
        true
    }

    /// Takes a message; what it makes whole.
    ///
    /// Errors: [`Broken`].
    pub(crate) fn take(&mut self, message: &[u8]) -> Result<Option<Item>, Broken> {
        let (head, part) = Head::decode(message).ok_or(Broken)?;
        let on_their_way = self.sent.wrapping_sub(self.returned);
        if head.freed.wrapping_sub(self.returned) > on_their_way {
            return Err(Broken);
        }
        self.returned = head.freed;
        if head.kind == CREDIT {
            let nothing = part.is_empty() && (head.outcome, head.length, head.number) == (0, 0, 0);
            return if nothing { Ok(None) } else { Err(Broken) };
        }
        let kind = Kind::of(head.kind).ok_or(Broken)?;
        self.freed = self.freed.wrapping_add(1);
        let length = head.length as usize;
        if length > self.most_bytes || (part.is_empty() && length > 0) {
            return Err(Broken);
        }
        let item = match &mut self.coming {
            Some(item) => {
                let same = (item.kind, item.outcome, item.number);
                if same != (kind, head.outcome, head.number) || self.coming_length != length {
                    return Err(Broken);
                }
                item
            }
            coming => {
                let (outcome, number) = (head.outcome, head.number);
                self.coming_length = length;
                coming.insert(Item { kind, outcome, number, body: Vec::new() })
            }
        };
        // What was announced is not allocated before it comes.
        item.body.extend_from_slice(part);
        match item.body.len().cmp(&length) {
            std::cmp::Ordering::Less => Ok(None),
            std::cmp::Ordering::Equal => Ok(self.coming.take()),
            std::cmp::Ordering::Greater => Err(Broken),
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) qp: Box<dyn QueuePair>,
    region: MemoryRegion,
    pub(crate) flow: Flow,
    /// Messages posted, and completed.
    posted: u64,
    completed: u64,
    room: usize,
    message: Vec<u8>,
}

impl Channel {
    /// Over `qp`, with [`CHANNEL_BYTES`] of `region`; a message takes no more than `most_send_bytes`.
    ///
    /// Errors: the receives could not be posted.
    pub(crate) fn new(
        qp: Box<dyn QueuePair>,
        region: MemoryRegion,
        most_send_bytes: u64,
        most_bytes: usize,
    ) -> Result<Self, PostError> {
        let room = most_send_bytes.min(MESSAGE_BYTES) as usize;
        let (flow, message) = (Flow::new(most_bytes), Vec::new());
        let mut channel = Self { qp, region, flow, posted: 0, completed: 0, room, message };
        for index in 0..BUFFERS {
            channel.post_receive(index)?;
        }
        Ok(channel)
    }

    fn post_receive(&mut self, index: u64) -> Result<(), PostError> {
        let offset = index * MESSAGE_BYTES;
        let buffer = ScatterGatherEntry { region: &self.region, offset, length: MESSAGE_BYTES };
        self.qp.post_receive(&[ReceiveRequest { wr_id: index, buffer: Some(buffer) }])
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.qp.state() == QueuePairState::Error
    }

    /// Takes a completion; what it makes whole.
    ///
    /// Errors: [`Broken`]: the connection is of no more use.
    pub(crate) fn on_completion(&mut self, done: &WorkCompletion) -> Result<Option<Item>, Broken> {
        if !done.is_success() {
            return Err(Broken);
        }
        if done.wr_id == SENT {
            self.completed += 1;
            return Ok(None);
        }
        if done.wr_id >= BUFFERS || done.length > MESSAGE_BYTES {
            return Err(Broken);
        }
        let mut message = std::mem::take(&mut self.message);
        message.resize(done.length as usize, 0);
        copy_out(
            self.region.memory().as_ref(),
            (done.wr_id * MESSAGE_BYTES) as usize,
            &mut message,
        );
        // Before its sender is told that there is room again.
        let posted = self.post_receive(done.wr_id);
        let taken = self.flow.take(&message);
        self.message = message;
        posted.map_err(|_| Broken)?;
        taken
    }

    /// Sends what may be sent.
    ///
    /// Errors: [`Broken`].
    pub(crate) fn pump(&mut self) -> Result<(), Broken> {
        match self.qp.state() {
            QueuePairState::Init => return Ok(()),
            QueuePairState::ReadyToSend => {}
            QueuePairState::Error => return Err(Broken),
        }
        let mut message = std::mem::take(&mut self.message);
        while self.posted - self.completed < BUFFERS && self.flow.next(self.room, &mut message) {
            // Completions come in order, so a buffer whose turn is here again is free.
            let offset = (BUFFERS + self.posted % BUFFERS) * MESSAGE_BYTES;
            copy_in(self.region.memory().as_ref(), offset as usize, &message);
            let length = message.len() as u64;
            let entries = [ScatterGatherEntry { region: &self.region, offset, length }];
            let operation = Operation::Send { local: LocalData::Gather(&entries), immediate: None };
            if self.qp.post_send(&[WorkRequest::new(SENT, operation)]).is_err() {
                return Err(Broken);
            }
            self.posted += 1;
        }
        self.message = message;
        Ok(())
    }
}

/// The end that asks.
#[derive(Debug)]
pub(crate) struct Asking {
    /// Of the frame that offered it.
    pub(crate) attempt: u32,
    /// Tells this connection from those before.
    pub(crate) epoch: u64,
    pub(crate) channel: Channel,
    pub(crate) connected: bool,
    /// When it was made, or something was last asked or answered.
    pub(crate) used_ns: u64,
    pub(crate) unanswered: usize,
}

/// The end that answers.
#[derive(Debug)]
pub(crate) struct Answering {
    pub(crate) epoch: u64,
    pub(crate) channel: Channel,
    pub(crate) unanswered: usize,
}

/// What came of forwarding, for the member's owner.
#[derive(Debug)]
pub(crate) enum News {
    /// A peer asks for something: an answer goes back by [`crate::Member::answer`].
    Asked { from: NodeId, epoch: u64, item: Item },
    /// A peer answered.
    Answered { item: Item },
    /// A connection that asked is gone. Of what waited nothing was sent.
    Broken { epoch: u64, unsent: Vec<u64> },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn command(number: u64, length: usize) -> Item {
        let body = (0..length).map(|at| (at as u64 * 7 + number) as u8).collect();
        Item { kind: Kind::Command, outcome: 0, number, body }
    }

    /// Carries messages both ways until there are no more; what arrived at either end.
    fn carry(ends: &mut [Flow; 2], room: usize) -> [Vec<Item>; 2] {
        let (mut arrived, mut message) = ([Vec::new(), Vec::new()], Vec::new());
        loop {
            let mut busy = false;
            for from in 0..2 {
                let mut on_their_way = Vec::new();
                while ends[from].next(room, &mut message) {
                    on_their_way.push(message.clone());
                }
                assert!(on_their_way.len() as u64 <= BUFFERS, "each finds a receive");
                busy |= !on_their_way.is_empty();
                for message in on_their_way {
                    arrived[1 - from].extend(ends[1 - from].take(&message).unwrap());
                }
            }
            if !busy {
                return arrived;
            }
        }
    }

    #[test]
    fn what_is_longer_than_all_credits_arrives_whole_and_in_order_both_ways() {
        let mut ends = [Flow::new(1 << 20), Flow::new(1 << 20)];
        let lengths = [0, 1, 231, 232, 233, 100_000, 7, 0, 50_000];
        let items: Vec<_> =
            lengths.iter().enumerate().map(|(at, length)| command(at as u64, *length)).collect();
        for item in &items {
            ends[0].push(item.clone());
            ends[1].push(Item { kind: Kind::Answer, outcome: 3, ..item.clone() });
        }
        let arrived = carry(&mut ends, 256);
        assert_eq!(arrived[1], items);
        assert_eq!(arrived[0].len(), items.len());
        assert_eq!((ends[0].waiting_bytes(), ends[1].waiting_bytes()), (0, 0));
    }

    #[test]
    fn no_end_sends_more_than_the_other_end_has_receives_for() {
        let mut flow = Flow::new(0);
        (0..100).for_each(|number| flow.push(command(number, 100)));
        let (mut message, mut count) = (Vec::new(), 0);
        while flow.next(64, &mut message) {
            count += 1;
        }
        assert_eq!(count, CREDITS);
    }

    #[test]
    fn what_was_begun_is_not_taken_back() {
        let mut flow = Flow::new(0);
        (1..=3).for_each(|number| flow.push(command(number, 100)));
        let mut message = Vec::new();
        assert!(flow.next(64, &mut message));
        assert_eq!(flow.unsent().collect::<Vec<_>>(), [2, 3]);
        assert!(!flow.take_back(1) && flow.take_back(2) && !flow.take_back(2));
        assert_eq!(flow.waiting_bytes(), 200, "what is begun waits whole");
        assert_eq!(flow.unsent().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn refusals_come_back() {
        let reason = "no room".to_owned();
        for refusal in [
            Refusal::NotLeader { leader: None },
            Refusal::Lost,
            Refusal::Full,
            Refusal::LogFull { reason: reason.clone() },
            Refusal::TooLarge { bytes: 9, limit: 8 },
            Refusal::Refused { reason },
        ] {
            let (outcome, body) = outcome_of(&refusal);
            let back = refusal_of(outcome, &body);
            assert_eq!(back.is_retryable(), refusal.is_retryable(), "{refusal}");
            match refusal {
                Refusal::Refused { .. } => assert!(back.to_string().contains("no room")),
                refusal => assert_eq!(back, refusal),
            }
        }
        assert_eq!(outcome_of(&Refusal::Stopped).0, LOST, "it may have been proposed");
        assert_eq!(refusal_of(TOO_LARGE, b"odd"), refusal_of(99, b"odd"));
    }

    #[test]
    fn a_peer_that_does_not_keep_to_the_format_is_left() {
        let good = Head { kind: COMMAND, outcome: 0, freed: 0, length: 8, number: 5 };
        let message = |head: Head, part: &[u8]| [&head.encode()[..], part].concat();
        let begun = || {
            let mut flow = Flow::new(64);
            assert_eq!(flow.take(&message(good, b"1234")), Ok(None));
            flow
        };
        let odd = [
            ("no head", vec![1; HEADER_BYTES - 1]),
            ("of another version", {
                let mut bytes = message(good, b"5678");
                bytes[3] = 2;
                bytes
            }),
            ("freed what was never sent", message(Head { freed: 1, ..good }, b"5678")),
            ("of another request", message(Head { number: 6, ..good }, b"5678")),
            ("of another length", message(Head { length: 9, ..good }, b"5678")),
            ("more than announced", message(good, b"56789")),
            ("nothing", message(good, b"")),
            ("of no kind", message(Head { kind: 9, ..good }, b"5678")),
            ("credit with a body", message(Head { kind: CREDIT, ..good }, b"5678")),
        ];
        for (what, bytes) in odd {
            assert_eq!(begun().take(&bytes), Err(Broken), "{what}");
        }
        assert!(begun().take(&message(good, b"5678")).unwrap().is_some());
        let long = Head { length: 65, ..good };
        assert_eq!(Flow::new(64).take(&message(long, b"1")), Err(Broken), "too long");
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_refused_in_bounds(
            messages in proptest::collection::vec(
                (any::<[u8; 4]>(), any::<bool>(), proptest::collection::vec(any::<u8>(), 0..64)),
                0..32,
            ),
        ) {
            let mut flow = Flow::new(128);
            for (noise, spelled, tail) in messages {
                let mut bytes = tail;
                if spelled {
                    let head = Head {
                        kind: noise[0] % 6,
                        outcome: noise[1] % 2,
                        freed: u32::from(noise[2] % 2),
                        length: u32::from(noise[3] % 140),
                        number: 0,
                    };
                    bytes.splice(0..0, head.encode());
                }
                match flow.take(&bytes) {
                    Ok(Some(item)) => prop_assert!(item.body.len() <= 128),
                    Ok(None) => {}
                    Err(Broken) => break,
                }
            }
        }
    }
}
