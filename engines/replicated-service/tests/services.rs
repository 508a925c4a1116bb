//! Two services that share one log, at members that are a machine each.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use beeline_replicated_log::{Position, SnapshotWriter, StateMachine as _};
use beeline_replicated_service::{
    CannotApply, Done, Failure, Group, GroupOptions, LaneName, Load, Log, LogRole, LogState,
    Machine, Order, Refused, Replicated, Replicator, Replies, Tag, Turn, Unit, unit,
};

const ONE: Tag = Tag::FIRST_FREE;
const OTHER: Tag = Tag(Tag::FIRST_FREE.0 + 1);

/// Joins what it is told; the reply is the length so far.
#[derive(Default)]
struct Words {
    tag: u16,
    text: Arc<Mutex<String>>,
    turns: HashMap<LaneName, Turn>,
    /// Hears every command differently.
    deaf: bool,
}

impl Replicated for Words {
    fn tag(&self) -> Tag {
        Tag(self.tag)
    }

    fn format(&self) -> u8 {
        1
    }

    fn applied(&self) -> Position {
        Position::NONE
    }

    fn is_durable(&self) -> bool {
        false
    }

    fn last_turn(&mut self, lane: LaneName) -> Result<Turn, CannotApply> {
        Ok(self.turns.get(&lane).copied().unwrap_or_default())
    }

    fn apply(
        &mut self,
        _position: Position,
        unit: &Unit<'_>,
        replies: &mut Replies<'_>,
    ) -> Result<(), CannotApply> {
        let mut text = self.text.lock().unwrap();
        for request in unit.requests() {
            text.push_str(if self.deaf { "?" } else { str::from_utf8(request).unwrap() });
            replies.put(|reply| reply.extend_from_slice(text.len().to_string().as_bytes()));
        }
        self.turns.insert(unit.lane, unit.turn);
        Ok(())
    }

    fn flush(&mut self, _position: Position) -> io::Result<()> {
        Ok(())
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        let text = self.text.lock().unwrap().clone();
        Ok(Box::new(move |out: &mut dyn Write| out.write_all(text.as_bytes())))
    }

    fn restore(&mut self, _position: Position, state: &mut dyn Read) -> io::Result<()> {
        let mut text = self.text.lock().unwrap();
        text.clear();
        state.read_to_string(&mut text).map(|_| ())
    }
}

struct Member {
    group: Arc<Group>,
    machine: Machine,
    texts: [Arc<Mutex<String>>; 2],
}

impl Member {
    fn new(node: u16, deaf: bool) -> Self {
        let options = GroupOptions {
            cluster: 1,
            node,
            request_timeout: Duration::from_secs(5),
            incarnation: 7,
        };
        let group = Arc::new(Group::new(options, Arc::new(|| 1234)));
        let texts = [Arc::default(), Arc::default()];
        let service = |tag: Tag, text: &Arc<Mutex<String>>| -> Box<dyn Replicated> {
            Box::new(Words { tag: tag.0, text: Arc::clone(text), deaf, ..Words::default() })
        };
        let services = vec![service(ONE, &texts[0]), service(OTHER, &texts[1])];
        let machine = Machine::new(Arc::clone(&group), services).unwrap();
        Self { group, machine, texts }
    }

    fn apply(&mut self, position: u64, command: &[u8]) -> Vec<u8> {
        let mut reply = Vec::new();
        self.machine.apply(Position(position), command, &mut reply);
        reply
    }

    fn texts(&self) -> [String; 2] {
        [0, 1].map(|index| self.texts[index].lock().unwrap().clone())
    }
}

#[test]
fn a_clock_that_was_set_back_brings_no_incarnation_that_any_service_has_seen() {
    let (node, turn) = (1, |incarnation| Turn { incarnation, number: 5 });
    let name = |node, lane| LaneName { service: OTHER, node, lane };
    let turns =
        [(name(node, 3), turn(1000)), (name(2, 0), turn(5000)), (name(node, 700), turn(2000))];
    let words = |tag: Tag, turns: &[(LaneName, Turn)]| -> Box<dyn Replicated> {
        Box::new(Words { tag: tag.0, turns: turns.iter().copied().collect(), ..Words::default() })
    };
    let request_timeout = Duration::from_secs(5);
    let options = GroupOptions { cluster: 1, node, request_timeout, incarnation: 7 };
    let group = Arc::new(Group::new(options, Arc::new(|| 1234)));
    let services = vec![words(ONE, &[]), words(OTHER, &turns)];
    let mut machine = Machine::new(Arc::clone(&group), services).unwrap();
    assert_eq!(group.incarnation(), 1001, "this member's own lanes alone count");
    // A lane that is not looked at before it is used: its units are skipped once.
    let mut unit = vec![0; unit::HEAD_BYTES];
    unit::put_head(&mut unit, name(node, 700), 1, Turn { incarnation: 1001, number: 1 });
    let mut reply = Vec::new();
    machine.apply(Position(1), &unit, &mut reply);
    assert_eq!((reply.as_slice(), group.incarnation()), (&unit::REPEATED[..], 2001));
}

fn command(service: Tag, format: u8, number: u64, words: &[&str]) -> Vec<u8> {
    let mut bytes = vec![0; unit::HEAD_BYTES];
    let lane = LaneName { service, node: 1, lane: 0 };
    unit::put_head(&mut bytes, lane, format, Turn { incarnation: 7, number });
    for word in words {
        unit::put_part(&mut bytes, |out| out.extend_from_slice(word.as_bytes()));
    }
    bytes
}

#[test]
fn units_reach_the_service_of_their_tag_once_and_its_state_travels() {
    let mut member = Member::new(2, false);
    let reply = member.apply(1, &command(ONE, 1, 1, &["a", "bc"]));
    assert_eq!(unit::parts(&reply).collect::<Vec<_>>(), [b"1", b"3"]);
    member.apply(2, &command(OTHER, 1, 1, &["x"]));
    let again = member.apply(3, &command(ONE, 1, 1, &["a", "bc"]));
    assert_eq!(again, unit::REPEATED);
    member.machine.flush(Position(3)).unwrap();
    assert_eq!(member.texts(), ["abc", "x"]);
    assert_eq!((member.group.stats().units, member.group.stats().repeated), (2, 1));
    let mut state = Vec::new();
    member.machine.snapshot().unwrap()(&mut state).unwrap();
    let mut late = Member::new(3, false);
    late.machine.restore(Position(3), &mut state.as_slice()).unwrap();
    assert_eq!(late.texts(), member.texts());
    assert!(late.group.has_applied(3) && !late.group.is_loading());
}

#[test]
fn what_another_member_forwards_is_stamped_here_and_rubbish_is_refused() {
    let mut leader = Member::new(1, false);
    let mut unit = command(OTHER, 1, 1, &["word"]);
    leader.machine.stamp(&mut unit).unwrap();
    let stamped = Unit::decode(&unit).unwrap();
    assert_eq!((stamped.unix_ms, stamped.lane.service, stamped.format), (1234, OTHER, 1));
    let mut later = unit.clone();
    later[0] = 9;
    for rubbish in [&mut b"rubbish".to_vec(), &mut Vec::new(), &mut later] {
        let refused = leader.machine.stamp(rubbish).unwrap_err();
        assert_eq!(refused, "no unit of a known version");
    }
}

#[test]
fn what_a_member_does_not_serve_stops_it_and_is_not_skipped() {
    let mut later = command(ONE, 1, 1, &["a"]);
    later[0] = 4;
    // Of a service that keeps none.
    let mut piece = vec![0; unit::PIECE_HEAD_BYTES];
    let lane = LaneName { service: ONE, node: 1, lane: 0 };
    let turn = Turn { incarnation: 1, number: 1 };
    let which = unit::Piece { series: 1, index: 0, count: 2 };
    unit::put_piece_head(&mut piece, lane, 1, turn, which);
    let unknown = [command(Tag(9), 1, 1, &["a"]), command(ONE, 2, 1, &["a"]), later, piece];
    for command in unknown {
        let mut member = Member::new(2, false);
        member.apply(1, &command);
        assert!(member.group.has_failed());
        assert!(member.machine.flush(Position(1)).is_err());
        assert_eq!(member.group.obstacle(false), Some(Failure::Failed));
    }
}

#[test]
fn members_that_differ_are_noticed_within_some_windows_and_others_are_not() {
    let (mut leader, mut same, mut other) =
        (Member::new(1, false), Member::new(2, false), Member::new(3, true));
    // It joined in between, from a snapshot of its own state.
    let mut late = Member::new(4, true);
    for position in 1..=200 {
        let mut unit = command(ONE, 1, position, &["word"]);
        leader.group.stamp(&mut unit);
        for member in [&mut leader, &mut same, &mut other] {
            member.apply(position, &unit);
        }
        if position > 100 {
            late.apply(position, &unit);
        }
    }
    assert_eq!((same.group.stats().divergences, leader.group.stats().divergences), (0, 0));
    assert!(other.group.stats().divergences > 0);
    assert!(late.group.stats().divergences > 0, "whole windows of its own are compared");
    assert_eq!(leader.texts()[0].len(), 800);
}

/// A log whose leader is the member itself, and that agrees at once.
struct Own {
    member: Mutex<(Member, u64)>,
}

impl std::fmt::Debug for Own {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Own")
    }
}

impl Log for Own {
    fn propose(&self, command: Vec<u8>, done: Done<Vec<u8>>) {
        let reply = {
            let mut own = self.member.lock().unwrap();
            let (member, position) = &mut *own;
            *position += 1;
            let reply = member.apply(*position, &command);
            member.machine.flush(Position(*position)).unwrap();
            reply
        };
        done(Ok(reply));
    }

    fn barrier(&self, done: Done<u64>) {
        let position = self.member.lock().unwrap().1;
        done(Ok(position));
    }

    fn forward(&self, _to: u16, _load: Load<'_>, _limit: Duration, done: Done<Vec<u8>>) {
        done(Err(Refused::NotLeader));
    }

    fn state(&self) -> LogState {
        let role = LogRole::Leader;
        LogState { id: 1, role, leader: Some(1), command_limit_bytes: 256, ..LogState::default() }
    }

    fn administer(&self, _order: Order, done: Done<()>) {
        done(Err(Refused::NotLeader));
    }
}

#[test]
fn a_service_proposes_and_reads_through_a_replicator() {
    let member = Member::new(1, false);
    let (group, texts) = (Arc::clone(&member.group), member.texts.clone());
    assert!(group.attach(Arc::new(Own { member: Mutex::new((member, 0)) })));
    let replicator = Replicator::start(&group, (OTHER, 1), 0).unwrap();
    assert_eq!(replicator.propose_wait(b"hello ".to_vec()), Ok(b"6".to_vec()));
    assert_eq!(replicator.propose_wait(b"world".to_vec()), Ok(b"11".to_vec()));
    assert_eq!(replicator.barrier_wait(), Ok(()));
    assert_eq!(*texts[1].lock().unwrap(), "hello world");
    let long = replicator.propose_wait(vec![b'x'; 300]);
    assert!(matches!(long, Err(Failure::TooLarge { limit: 256, .. })), "{long:?}");
    group.fail();
    assert_eq!(replicator.propose_wait(b"!".to_vec()), Err(Failure::Failed));
}
