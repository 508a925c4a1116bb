//! A server among many of one program: campaigns are held back, and a member that stands still is not
//! overwhelmed by its leader.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use beeline_paxos::{
    AccessKey, Command, Event, Grant, HeapMemory, Message, NodeId, Options, Position, Replica,
    RoleName, Term,
};
use common::{memory, start};

const OWN: NodeId = NodeId(1);
const VOTER: NodeId = NodeId(2);
const SILENT: NodeId = NodeId(3);
const TICK_NS: u64 = 10_000_000;

/// A server whose memory does at once what it is told, as the voter does; the third member says nothing.
struct Server {
    replica: Replica<HeapMemory>,
    now_ns: u64,
    key: u64,
    /// Messages to each of the others.
    to_voter: u32,
    to_silent: u32,
}

impl Server {
    fn open() -> Self {
        let replica =
            Replica::open(start(&[OWN, VOTER, SILENT]), Options::default(), memory()).unwrap();
        Self { replica, now_ns: 0, key: 0, to_voter: 0, to_silent: 0 }
    }

    fn step(&mut self, event: Event<'_>) {
        let mut commands = Vec::new();
        self.replica.step(event, &mut commands);
        for command in commands {
            match command {
                Command::Fence => {
                    self.key += 1;
                    self.step(Event::Fenced { key: AccessKey(self.key) });
                }
                Command::PersistVote { .. } => self.step(Event::VotePersisted),
                Command::PersistLog { term, last, .. } => {
                    self.step(Event::LogPersisted { term, last });
                }
                Command::WriteFlush { peer, key, last, .. } => {
                    self.step(Event::Flushed { peer, key, last });
                }
                Command::Confirm { peer, key, round } => {
                    self.step(Event::Confirmed { peer, key, round });
                }
                Command::ReadStatus { peer } => {
                    self.step(Event::StatusRead { peer, status: None });
                }
                Command::Send { to: SILENT, .. } => self.to_silent += 1,
                Command::Send { to, message } => {
                    self.to_voter += 1;
                    self.answer(to, message);
                }
                _ => {}
            }
        }
    }

    fn answer(&mut self, from: NodeId, message: Message) {
        let grant = Grant {
            key: AccessKey(77),
            committed: Position::NONE,
            highest: Position::NONE,
            snapshot: Position::NONE,
        };
        let answer = match message {
            Message::WouldYouVote { term, .. } => Message::WouldVote { term },
            Message::RequestVote { term, .. } => Message::Vote { term, grant },
            _ => return,
        };
        self.step(Event::Message { from, message: answer });
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds * 100 {
            self.now_ns += TICK_NS;
            self.step(Event::Tick { now_ns: self.now_ns });
        }
    }
}

#[test]
fn a_campaign_waits_until_it_may_begin_and_then_goes_on() {
    let mut server = Server::open();
    server.replica.let_campaign(false);
    server.run(10);
    assert_eq!((server.replica.role(), server.to_voter), (RoleName::Follower, 0));
    assert!(!server.replica.is_campaigning());
    server.replica.let_campaign(true);
    server.run(1);
    assert_eq!(server.replica.role(), RoleName::Leader);
    assert!(!server.replica.is_campaigning());
    server.replica.let_campaign(false);
    server.run(10);
    assert_eq!(server.replica.role(), RoleName::Leader, "that was about campaigns alone");
}

#[test]
fn a_member_that_stands_still_finds_few_requests_and_is_asked_at_once_when_it_is_back() {
    let mut server = Server::open();
    server.run(1);
    assert_eq!(server.replica.role(), RoleName::Leader);
    server.run(20);
    // Once a heartbeat that were two hundred, and its connection would end for want of room.
    assert!(server.to_silent < 30, "{}", server.to_silent);
    // In the longest pause: it says something.
    let asked = server.to_silent;
    server.step(Event::Message { from: SILENT, message: Message::Awake { term: Term(0) } });
    server.now_ns += TICK_NS;
    server.step(Event::Tick { now_ns: server.now_ns });
    assert_eq!(server.to_silent, asked + 1);
}
