//! A state machine that is further on than its server's log: a loss of power kept what it had
//! applied, and took the log's words or its entries.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use beeline_paxos::{
    AccessKey, Change, Command, Event, Grant, HeapMemory, Kind, Message, NodeId, Options, Position,
    Replica, RoleName, Start, Term,
    layout::{Status, vote_word},
};
use common::{layout, memory, start};

const OWN: NodeId = NodeId(1);
const OTHER: NodeId = NodeId(2);
const GRANTED: AccessKey = AccessKey(77);

/// A server whose own memory does at once what it is told; what concerns others is kept.
struct Server {
    replica: Replica<HeapMemory>,
    now_ns: u64,
    key: u64,
    kept: Vec<Command>,
}

impl Server {
    fn open(memory: HeapMemory, members: &[NodeId], chosen: u64, term: Term) -> Self {
        Self::open_reached(memory, members, (chosen, chosen), term)
    }

    /// Of a machine that has a part of what lies behind `chosen`, up to `reached`.
    fn open_reached(
        memory: HeapMemory,
        members: &[NodeId],
        (chosen, reached): (u64, u64),
        term: Term,
    ) -> Self {
        let start = Start {
            vote_word: vote_word(term, Some(OWN)),
            chosen: Position(chosen),
            reached: Position(reached),
            ..start(members)
        };
        let replica = Replica::open(start, Options::default(), memory).unwrap();
        Self { replica, now_ns: 0, key: 0, kept: Vec::new() }
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
                command => self.kept.push(command),
            }
        }
    }

    fn tick(&mut self) {
        self.now_ns += 10_000_000;
        self.step(Event::Tick { now_ns: self.now_ns });
    }

    fn lead(&mut self) {
        for _ in 0..1000 {
            if self.replica.role() != RoleName::Leader {
                self.tick();
            }
        }
        assert_eq!(self.replica.role(), RoleName::Leader);
    }

    /// Until the other server, which would vote for this one, is asked to.
    fn campaign(&mut self) {
        for _ in 0..1000 {
            self.tick();
            let asked = |command: &Command| match command {
                Command::Send { to: OTHER, message } => Some(*message),
                _ => None,
            };
            let message = self.kept.drain(..).filter_map(|command| asked(&command)).next_back();
            match message {
                Some(Message::WouldYouVote { term, .. }) => {
                    self.step(Event::Message { from: OTHER, message: Message::WouldVote { term } });
                }
                Some(Message::RequestVote { .. }) => break,
                _ => {}
            }
        }
    }

    fn propose(&mut self, text: &str) -> Position {
        let position = self.replica.propose(text.as_bytes()).unwrap();
        self.step(Event::Proposed);
        position
    }

    /// The other server lets this one into its log, which holds nothing.
    fn admit(&mut self) {
        let none = Position::NONE;
        let grant = Grant { key: GRANTED, committed: none, highest: none, snapshot: none };
        let message = Message::Following { term: self.replica.term(), grant };
        self.step(Event::Message { from: OTHER, message });
    }

    fn join_other(&mut self) {
        self.step(Event::ChangeMembers { change: Change::Join(OTHER), contact: b"" });
        self.admit();
    }

    fn copies(&self) -> Vec<(Position, Position)> {
        let range = |command: &Command| match command {
            Command::WriteFlush { first, last, .. } => Some((*first, *last)),
            _ => None,
        };
        self.kept.iter().filter_map(range).collect()
    }

    /// The other server votes for this one, and this one reads that one's slots, up to `highest`.
    fn learns_from(&mut self, voter: &HeapMemory, highest: u64) {
        use beeline_paxos::LogMemory as _;
        let (committed, snapshot) = (Position::NONE, Position::NONE);
        let grant = Grant { key: GRANTED, committed, highest: Position(highest), snapshot };
        let term = self.replica.term();
        self.step(Event::Message { from: OTHER, message: Message::Vote { term, grant } });
        assert_eq!(self.replica.role(), RoleName::Recovering);
        let mut bytes = vec![0; highest as usize * layout().slot_bytes() as usize];
        voter.load(layout().slot_offset(Position(1)), &mut bytes);
        let (peer, first) = (OTHER, Position(1));
        self.step(Event::SlotsRead { peer, key: GRANTED, first, bytes: &bytes });
    }

    fn sends_snapshot(&self) -> bool {
        self.kept.contains(&Command::SendSnapshot { to: OTHER })
    }
}

/// A log of `entries`, of which the commit word was lost; and then the slots from `lost` on.
fn log_without(entries: u64, lost: u64) -> HeapMemory {
    use beeline_paxos::LogMemory as _;
    let mut server = Server::open(memory(), &[OWN], 0, Term(1));
    server.lead();
    for at in 1..=entries {
        assert_eq!(server.propose(&format!("entry {at}")), Position(at));
    }
    assert_eq!(server.replica.committed(), Position(entries));
    let mut memory = server.replica.memory().clone();
    memory.store(layout().commit_offset(), &[0; 8]);
    for at in lost..=entries {
        memory.store(layout().slot_offset(Position(at)), &[0; 32]);
    }
    memory
}

#[test]
fn nothing_new_is_proposed_where_the_machine_has_applied_something_that_the_log_lost() {
    let mut server = Server::open(log_without(9, 5), &[OWN], 9, Term(2));
    server.lead();
    assert_eq!(server.replica.committed(), Position(9));
    let new = server.propose("new");
    assert_eq!(new, Position(10), "the machine would skip it: it has 9 already");
    let mut payload = Vec::new();
    assert_eq!(server.replica.entry(Position(4), &mut payload), Kind::Commands);
    assert_eq!(payload, b"entry 4");
    assert_eq!(server.replica.entry(Position(9), &mut payload), Kind::Lost);
}

#[test]
fn who_joins_a_log_that_lost_what_its_machine_has_gets_the_machine_s_state() {
    let mut server = Server::open(log_without(9, 5), &[OWN], 9, Term(2));
    server.lead();
    server.propose("new");
    server.join_other();
    assert!(server.sends_snapshot(), "{:?}", server.kept);
    assert_eq!(server.copies(), [], "the log alone would leave out what positions 5 to 9 did");

    // The same after another start: what is lost is known from the log itself.
    let memory = server.replica.memory().clone();
    for chosen in [0, 10] {
        let mut again = Server::open(memory.clone(), &[OWN], chosen, Term(3));
        again.lead();
        again.join_other();
        assert!(again.sends_snapshot(), "{:?}", again.kept);
        assert_eq!(again.copies(), []);
    }
}

#[test]
fn a_candidate_that_lacks_what_a_log_lost_is_refused_and_gets_the_machine_s_state() {
    let mut server = Server::open(log_without(9, 5), &[OWN], 9, Term(2));
    server.lead();
    server.propose("new");
    // It has 10 entries, and lost 5 to 9.
    for (committed, votes) in [(4, false), (8, false), (9, true)] {
        let memory = server.replica.memory().clone();
        let mut again = Server::open(memory, &[OWN, OTHER, NodeId(3)], 10, Term(3));
        again.tick();
        let (term, committed) = (Term(4), Position(committed));
        let message = Message::RequestVote { term, committed, transfer: true };
        again.step(Event::Message { from: OTHER, message });
        let voted = again.kept.iter().any(|command| {
            matches!(command, Command::Send { to: OTHER, message: Message::Vote { .. } })
        });
        assert_eq!((voted, again.sends_snapshot()), (votes, !votes), "{committed}");
    }
}

#[test]
fn a_leader_that_finds_entries_lost_at_a_voter_takes_over_none_of_them() {
    let mut lost = Server::open(log_without(9, 5), &[OWN], 9, Term(2));
    lost.lead();
    let mut server = Server::open(memory(), &[OWN, OTHER, NodeId(3)], 0, Term(2));
    server.campaign();
    server.learns_from(lost.replica.memory(), 9);
    assert_eq!(server.replica.role(), RoleName::Follower);
    assert_eq!((server.replica.committed(), server.copies()), (Position::NONE, Vec::new()));
}

/// Of what the member `OWN` of three was asked for within so many ticks of 10 ms, whether it wants to lead.
fn campaigns(server: &mut Server, ticks: u32) -> bool {
    (0..ticks).for_each(|_| server.tick());
    let asks = |command: &Command| {
        matches!(command, Command::Send { message: Message::WouldYouVote { .. }, .. })
    };
    server.kept.iter().any(asks)
}

#[test]
fn who_has_a_part_of_what_its_log_lacks_lets_others_lead_until_it_has_all() {
    let members = [OWN, OTHER, NodeId(3)];
    // Its machine has 4 entries and a part of 5 to 9; the log has some of those.
    for lost in [5, 9] {
        let memory = log_without(9, lost);
        let mut server = Server::open_reached(memory, &members, (4, 9), Term(2));
        // Less than its patience, in which another one may lead.
        assert!(!campaigns(&mut server, 25), "it lacks {lost}");
        let (term, committed) = (Term(3), Position::NONE);
        let message = Message::RequestVote { term, committed, transfer: false };
        server.step(Event::Message { from: OTHER, message });
        let voted = server.kept.iter().any(|command| {
            matches!(command, Command::Send { to: OTHER, message: Message::Vote { .. } })
        });
        assert!(voted, "others need its vote");
        // And not when it is told to.
        let message = Message::TakeOver { term };
        server.step(Event::Message { from: OTHER, message });
        assert_eq!(server.replica.role(), RoleName::Follower);
    }
    let mut server = Server::open_reached(log_without(9, 10), &members, (4, 9), Term(2));
    assert!(campaigns(&mut server, 25), "it has all of it in its log");
}

/// `OTHER` has all of it and lacks the word that it is committed, so that this one may not be led by it; the third is
/// dead.
#[test]
fn who_has_a_part_of_what_its_log_lacks_leads_where_nobody_else_does_and_a_voter_has_it() {
    let members = [OWN, OTHER, NodeId(3)];
    let whole = log_without(9, 10);
    let mut server = Server::open_reached(log_without(9, 5), &members, (4, 9), Term(2));
    server.campaign();
    server.learns_from(&whole, 9);
    server.step(Event::Flushed { peer: OTHER, key: GRANTED, last: Position(9) });
    assert_eq!(server.replica.role(), RoleName::Leader, "{:?}", server.kept);
    assert_eq!(server.replica.committed(), Position(9));
    let mut payload = Vec::new();
    assert_eq!(server.replica.entry(Position(9), &mut payload), Kind::Commands);
    assert_eq!(payload, b"entry 9");
}

/// It had filled in what was lost while it was alone.
#[test]
fn who_has_a_part_of_what_its_own_log_names_lost_does_not_lead_others_with_it() {
    let mut alone = Server::open_reached(log_without(9, 5), &[OWN], (4, 9), Term(2));
    alone.lead();
    let mut memory = alone.replica.memory().clone();
    {
        use beeline_paxos::LogMemory as _;
        memory.store(layout().commit_offset(), &[0; 8]);
    }
    let members = [OWN, OTHER, NodeId(3)];
    let mut server = Server::open_reached(memory, &members, (4, 9), Term(3));
    server.campaign();
    let none = Position::NONE;
    let grant = Grant { key: GRANTED, committed: none, highest: none, snapshot: none };
    let term = server.replica.term();
    server.step(Event::Message { from: OTHER, message: Message::Vote { term, grant } });
    assert_eq!(server.replica.role(), RoleName::Follower, "{:?}", server.kept);
    assert!(!server.sends_snapshot());
}

#[test]
fn a_leader_that_has_a_part_of_what_a_voter_lost_does_not_take_it_for_lost() {
    let mut lost = Server::open(log_without(9, 5), &[OWN], 9, Term(2));
    lost.lead();
    let members = [OWN, OTHER, NodeId(3)];
    let mut server = Server::open_reached(log_without(9, 10), &members, (4, 9), Term(2));
    server.campaign();
    server.learns_from(lost.replica.memory(), 9);
    assert_eq!(server.replica.role(), RoleName::Follower);
    assert_eq!((server.replica.committed(), server.copies()), (Position::NONE, Vec::new()));
}

/// It finds the other member in its log, and only then that entries behind are lost.
#[test]
fn who_took_itself_for_alone_gives_up_where_it_has_a_part_of_what_is_lost() {
    let mut server = Server::open(memory(), &[OWN], 0, Term(1));
    server.lead();
    for at in 1..=3 {
        server.propose(&format!("entry {at}"));
    }
    server.join_other();
    server.step(Event::Flushed { peer: OTHER, key: GRANTED, last: Position(3) });
    let (term, snapshot) = (Term(0), Position::NONE);
    let status = Some(Status { term, beats: 0, snapshot, short: false, rests: false });
    (0..10).for_each(|_| server.tick());
    server.step(Event::StatusRead { peer: OTHER, status });
    server.tick();
    let joined = server.replica.last();
    assert_eq!(joined, Position(4), "{:?}", server.kept);
    server.step(Event::Flushed { peer: OTHER, key: GRANTED, last: joined });
    for at in 5..=9 {
        server.propose(&format!("entry {at}"));
    }
    let mut memory = server.replica.memory().clone();
    {
        use beeline_paxos::LogMemory as _;
        memory.store(layout().commit_offset(), &[0; 8]);
        for at in 7..=9 {
            memory.store(layout().slot_offset(Position(at)), &[0; 32]);
        }
    }
    let mut again = Server::open_reached(memory, &[OWN], (6, 9), Term(2));
    for _ in 0..1000 {
        if again.replica.configuration().members() != [OWN, OTHER] {
            again.tick();
        }
    }
    assert_eq!(again.replica.committed(), joined);
    let none = Position::NONE;
    let grant = Grant { key: GRANTED, committed: none, highest: none, snapshot: none };
    let term = again.replica.term();
    again.step(Event::Message { from: OTHER, message: Message::Vote { term, grant } });
    assert_eq!(again.replica.role(), RoleName::Follower, "{:?}", again.kept);
    again.kept.clear();
    (0..1000).for_each(|_| again.tick());
    assert!(again.replica.committed() <= Position(6), "nobody votes for it again");
}

#[test]
fn a_log_that_lost_its_commit_word_alone_is_copied_as_it_is() {
    let mut server = Server::open(log_without(9, 10), &[OWN], 9, Term(2));
    server.lead();
    server.join_other();
    assert!(!server.sends_snapshot());
    assert_eq!(server.copies(), [(Position(1), Position(9))]);
}

#[test]
fn what_a_machine_has_applied_is_taken_from_a_majority_s_logs_and_not_from_its_own_alone() {
    // Two of three vote. The own log lost 5 to 9, the other has them: they are proposed as they
    // were, counted at once, and what lies behind them is not.
    let members = [OWN, OTHER, NodeId(3)];
    let whole = log_without(12, 13);
    let mut server = Server::open(log_without(9, 5), &members, 9, Term(2));
    server.campaign();
    let (none, highest) = (Position::NONE, Position(12));
    let grant = Grant { key: GRANTED, committed: none, highest, snapshot: none };
    let term = server.replica.term();
    server.step(Event::Message { from: OTHER, message: Message::Vote { term, grant } });
    assert_eq!(server.replica.role(), RoleName::Recovering);
    let read = server.kept.iter().find_map(|command| match command {
        Command::ReadSlots { first, count, .. } => Some((*first, *count)),
        _ => None,
    });
    assert_eq!(read, Some((Position(1), 12)));
    let mut bytes = vec![0; 12 * layout().slot_bytes() as usize];
    {
        use beeline_paxos::LogMemory as _;
        whole.load(layout().slot_offset(Position(1)), &mut bytes);
    }
    let (peer, first) = (OTHER, Position(1));
    server.step(Event::SlotsRead { peer, key: GRANTED, first, bytes: &bytes });
    assert_eq!(server.replica.committed(), Position(9), "behind it a majority is needed");
    assert_eq!(server.replica.role(), RoleName::Recovering);
    let mut payload = Vec::new();
    assert_eq!(server.replica.entry(Position(9), &mut payload), Kind::Commands);
    assert_eq!(payload, b"entry 9");
    assert!(!server.sends_snapshot());
    assert_eq!(server.copies(), [(Position(1), Position(12))]);
    server.step(Event::Flushed { peer, key: GRANTED, last: Position(12) });
    assert_eq!(server.replica.committed(), Position(12));
    assert_eq!(server.replica.role(), RoleName::Leader);
}
