//! Messages with terms that no election has led to: from a peer that is broken.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use beeline_paxos::{Command, Event, Message, NodeId, Options, Position, Replica, Term};
use common::{memory, start};

#[test]
fn a_term_out_of_all_reach_is_believed_by_nobody_and_leaves_terms_to_ask_for() {
    let members = [1, 2, 3].map(NodeId);
    let mut replica = Replica::open(start(&members), Options::default(), memory()).unwrap();
    let (from, committed, transfer) = (NodeId(2), Position::NONE, true);
    for term in [Term(u32::MAX), Term(u32::MAX - 1), Term(1 << 25)] {
        for message in [
            Message::Refused { term },
            Message::WouldYouVote { term, committed },
            Message::RequestVote { term, committed, transfer },
            Message::Follow { term },
            Message::TakeOver { term },
        ] {
            let mut commands = Vec::new();
            replica.step(Event::Message { from, message }, &mut commands);
            assert!(commands.is_empty(), "{message:?}: {commands:?}");
        }
    }
    // It campaigns as ever.
    let mut asked = None;
    for tick in 1..1000 {
        let mut commands = Vec::new();
        replica.step(Event::Tick { now_ns: tick * 10_000_000 }, &mut commands);
        asked = asked.or(commands.into_iter().find_map(|command| match command {
            Command::Send { message: Message::WouldYouVote { term, .. }, .. } => Some(term),
            _ => None,
        }));
    }
    assert_eq!(asked, Some(Term(1)));
    let mut commands = Vec::new();
    let message = Message::Follow { term: Term(1 << 20) };
    replica.step(Event::Message { from, message }, &mut commands);
    assert!(commands.contains(&Command::Fence), "a term that may be is followed: {commands:?}");
}
