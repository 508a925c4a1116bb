//! A server that is alone in its cluster leads for as long as it runs, and rests when it may; one with a
//! follower rests when that one knows everything, and knows that it does.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]

mod common;

use std::collections::VecDeque;

use beeline_paxos::{
    AccessKey, Command, Event, Grant, HeapMemory, Message, NodeId, Options, Position, Replica,
    RoleName, Status, Term,
};
use common::{memory, start};

/// A replica whose commands are carried out at once.
struct Alone {
    replica: Replica<HeapMemory>,
    now_ns: u64,
    step_downs: u32,
    applied: Position,
}

impl Alone {
    fn new() -> Self {
        let replica = Replica::open(start(&[NodeId(1)]), Options::default(), memory()).unwrap();
        Self { replica, now_ns: 1, step_downs: 0, applied: Position::NONE }
    }

    fn step(&mut self, event: Event<'static>) {
        let (mut events, mut commands) = (VecDeque::from([event]), Vec::new());
        while let Some(event) = events.pop_front() {
            self.replica.step(event, &mut commands);
            for command in commands.drain(..) {
                match command {
                    Command::Fence => events.push_back(Event::Fenced { key: AccessKey(9) }),
                    Command::PersistVote { .. } => events.push_back(Event::VotePersisted),
                    Command::PersistLog { term, last, .. } => {
                        events.push_back(Event::LogPersisted { term, last });
                    }
                    Command::Apply { last, .. } => self.applied = last,
                    Command::SteppedDown { .. } => self.step_downs += 1,
                    Command::Leading { .. } => {}
                    other => panic!("it has no peer to do this with: {other:?}"),
                }
            }
        }
    }

    /// Whether it rests within few ticks: a round of confirmations may be under way.
    fn rests(&mut self) -> bool {
        (0..3).any(|_| {
            self.pass(5);
            self.replica.rest(|_| false)
        })
    }

    fn pass(&mut self, span_ms: u64) {
        for _ in 0..span_ms / 5 {
            self.now_ns += 5_000_000;
            self.step(Event::Tick { now_ns: self.now_ns });
        }
    }
}

#[test]
fn a_server_alone_leads_on_and_rests_until_it_is_asked() {
    let mut alone = Alone::new();
    alone.pass(10_000);
    assert_eq!((alone.replica.role(), alone.step_downs), (RoleName::Leader, 0));
    assert!(alone.rests() && alone.replica.is_resting());
    // An hour without ticks, then one.
    alone.now_ns += 3_600_000_000_000;
    alone.step(Event::Tick { now_ns: alone.now_ns });
    assert!(alone.replica.is_resting());
    let position = alone.replica.propose(b"woken").unwrap();
    alone.step(Event::Proposed);
    assert!(!alone.replica.is_resting());
    assert_eq!(alone.applied, position);
    alone.pass(1_000);
    assert_eq!((alone.replica.role(), alone.step_downs), (RoleName::Leader, 0));
    assert!(alone.rests());
    alone.step(Event::Wake);
    assert!(!alone.replica.is_resting());
    // What is not committed is not rested upon.
    alone.pass(10);
    alone.replica.propose(b"unsaid").unwrap();
    assert!(!alone.replica.rest(|_| false));
}

const PEER: NodeId = NodeId(2);

/// The leader of two, and what the other one shows; whatever is asked of that one is done at once.
struct Led {
    replica: Replica<HeapMemory>,
    now_ns: u64,
    /// The status words of the other one.
    shows: Status,
    told_awake: u32,
}

impl Led {
    fn new() -> Self {
        let replica =
            Replica::open(start(&[NodeId(1), PEER]), Options::default(), memory()).unwrap();
        let mut led = Self { replica, now_ns: 1, shows: Status::default(), told_awake: 0 };
        led.pass(2_000);
        assert_eq!(led.replica.role(), RoleName::Leader);
        led
    }

    fn step(&mut self, event: Event<'static>) {
        let (mut events, mut commands) = (VecDeque::from([event]), Vec::new());
        while let Some(event) = events.pop_front() {
            self.replica.step(event, &mut commands);
            for command in commands.drain(..) {
                events.extend(self.done(command));
            }
        }
    }

    fn done(&mut self, command: Command) -> Option<Event<'static>> {
        let event = match command {
            Command::Fence => Event::Fenced { key: AccessKey(9) },
            Command::PersistVote { .. } => Event::VotePersisted,
            Command::PersistLog { term, last, .. } => Event::LogPersisted { term, last },
            Command::WriteFlush { peer, key, last, .. } => Event::Flushed { peer, key, last },
            Command::Confirm { peer, key, round } => Event::Confirmed { peer, key, round },
            Command::ReadStatus { peer } => Event::StatusRead { peer, status: Some(self.shows) },
            Command::Send { message, .. } => {
                self.told_awake += u32::from(matches!(message, Message::Awake { .. }));
                Event::Message { from: PEER, message: answer(message)? }
            }
            _ => return None,
        };
        Some(event)
    }

    fn pass(&mut self, span_ms: u64) {
        for _ in 0..span_ms {
            self.now_ns += 1_000_000;
            self.step(Event::Tick { now_ns: self.now_ns });
        }
    }

    /// Whether it rests within some heartbeats.
    fn rests(&mut self) -> bool {
        (0..20).any(|_| {
            self.pass(5);
            self.replica.rest(|_| false)
        })
    }

    /// As the other one reads them.
    fn beats(&self) -> u32 {
        self.replica.memory().status.beats
    }
}

fn answer(message: Message) -> Option<Message> {
    let none = Position::NONE;
    let grant = Grant { key: AccessKey(5), committed: none, highest: none, snapshot: none };
    match message {
        Message::WouldYouVote { term, .. } => Some(Message::WouldVote { term }),
        Message::RequestVote { term, .. } => Some(Message::Vote { term, grant }),
        _ => None,
    }
}

/// A follower that was not told, or reads late what the leader was before, would rest on without what was
/// committed meanwhile.
#[test]
fn a_leader_rests_again_once_its_follower_saw_it_awake() {
    let mut led = Led::new();
    assert!(led.rests());
    let rested_at = led.beats();
    led.shows = Status { term: Term(0), beats: rested_at, rests: true, ..Status::default() };
    led.replica.propose(b"woken").unwrap();
    led.step(Event::Proposed);
    let told = led.told_awake;
    assert!(!led.rests(), "its follower rests on what it saw before");
    assert!(led.told_awake > told + 3, "told {} times", led.told_awake - told);
    // It woke, and shows what it saw before.
    led.shows.rests = false;
    assert!(!led.rests(), "what its follower asked for before may still arrive");
    led.shows.beats = led.beats();
    assert!(led.rests());
}

/// A member of three that promises itself to whoever asks.
struct Following {
    replica: Replica<HeapMemory>,
    now_ns: u64,
}

impl Following {
    fn new() -> Self {
        let replica =
            Replica::open(start(&[NodeId(1), PEER, NodeId(3)]), Options::default(), memory())
                .unwrap();
        Self { replica, now_ns: 1 }
    }

    fn step(&mut self, event: Event<'static>) {
        let (mut events, mut commands) = (VecDeque::from([event]), Vec::new());
        while let Some(event) = events.pop_front() {
            self.replica.step(event, &mut commands);
            for command in commands.drain(..) {
                match command {
                    Command::Fence => events.push_back(Event::Fenced { key: AccessKey(9) }),
                    Command::PersistVote { .. } => events.push_back(Event::VotePersisted),
                    _ => {}
                }
            }
        }
    }

    fn promise_to(&mut self, leader: NodeId, term: Term) {
        let committed = Position::NONE;
        let message = Message::RequestVote { term, committed, transfer: true };
        self.step(Event::Message { from: leader, message });
        assert_eq!(self.replica.term(), term);
        self.now_ns += 1_000_000;
        self.step(Event::Tick { now_ns: self.now_ns });
    }

    fn reads(&mut self, leader: NodeId, term: Term, beats: u32) {
        let status = Some(Status { term, beats, ..Status::default() });
        self.step(Event::StatusRead { peer: leader, status });
    }

    fn shows(&self) -> u32 {
        self.replica.memory().status.beats
    }
}

/// A leader takes what a follower shows for what that one saw of itself.
#[test]
fn a_follower_shows_the_beats_that_it_saw_of_its_leader_and_of_none_before() {
    let mut following = Following::new();
    following.promise_to(PEER, Term(1));
    assert_eq!(following.shows(), 0);
    for beats in [5, 6] {
        following.reads(PEER, Term(1), beats);
        assert_eq!(following.shows(), beats);
    }
    following.promise_to(NodeId(3), Term(2));
    assert_eq!(following.shows(), 0, "it saw nothing of this one");
    // What it had asked the one before may come still.
    following.reads(PEER, Term(1), 7);
    assert_eq!(following.shows(), 0);
    following.reads(NodeId(3), Term(2), 8);
    assert_eq!(following.shows(), 8);
}
