//! The life of a connection at a monitor, as one table of states, events and actions (NTSocks 3.10,
//! 3.11), without sockets or time.
//!
//! ```text
//!  client                                             server
//!  SynSent ──── syn ─────────────────────────────────► Preparing   context here
//!                                                      Knocking    at the listening socket
//!  Mirroring ◄───────────────────── syn-ack ────────── Answered
//!  Established ──── established ─────────────────────► Established packets may go
//!      │ own context gone: gone ─►         ◄─ gone: peer's context gone
//!      ▼                                                  ▼
//!  OwnGone ── gone came ─► Closed         PeerGone ── own context gone: gone ─► Closed
//! ```
//!
//! Ports are free again when both contexts are gone, so that no packet of an old connection meets a
//! new one with the same ports.

/// How a connection stands at one monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The other monitor was asked.
    SynSent,
    /// The other host has a context, and this one is about to have.
    Mirroring,
    /// The other monitor asked; this host is about to have a context.
    Preparing,
    /// The listening socket is being knocked at.
    Knocking,
    /// The other monitor was told yes.
    Answered,
    /// Both programs have it.
    Established,
    /// This host's context is gone, the other's not yet.
    OwnGone,
    /// The other host's context is gone, this one's not yet.
    PeerGone,
    /// Nothing is left.
    Closed,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The other monitor said yes.
    SynAck,
    /// The other monitor said no.
    Refused,
    /// The partition knows the connection.
    Created,
    /// The knock was taken into the backlog.
    Knocked,
    /// It was not.
    KnockFailed,
    /// The other monitor says that its program has the connection.
    Established,
    /// The partition knows the connection no more, or never came to.
    OwnGone,
    /// The other host knows it no more.
    PeerGone,
    /// It took too long.
    TimedOut,
    /// The link is gone, and with it the other host's context and this one's.
    LinkDown,
}

/// What the monitor does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have the partition make a context, closed for sending (server) or open (client).
    Create,
    /// Connect to the listening socket.
    Knock,
    /// Say yes to the other monitor.
    SendSynAck,
    /// Say no to the other monitor.
    SendRefusal,
    /// Tell the other monitor that the program has it.
    SendEstablished,
    /// Tell the other monitor that this host knows it no more.
    SendGone,
    /// Let packets go.
    Open,
    /// Give the program its connection.
    Give,
    /// Tell the program no.
    Refuse,
    /// Have the partition break it off.
    Break,
    /// Free ports and memory.
    Free,
}

/// Every state.
pub const STATES: [State; 9] = [
    State::SynSent,
    State::Mirroring,
    State::Preparing,
    State::Knocking,
    State::Answered,
    State::Established,
    State::OwnGone,
    State::PeerGone,
    State::Closed,
];

/// Every event.
pub const EVENTS: [Event; 10] = [
    Event::SynAck,
    Event::Refused,
    Event::Created,
    Event::Knocked,
    Event::KnockFailed,
    Event::Established,
    Event::OwnGone,
    Event::PeerGone,
    Event::TimedOut,
    Event::LinkDown,
];

/// The next state and what to do; `None`: the event says nothing in this state (a late answer).
#[must_use]
pub fn step(state: State, event: Event) -> Option<(State, &'static [Action])> {
    use {Action as A, Event as E, State as S};
    Some(match (state, event) {
        (S::SynSent, E::SynAck) => (S::Mirroring, &[A::Create]),
        (S::SynSent, E::Refused | E::PeerGone | E::LinkDown) => (S::Closed, &[A::Refuse, A::Free]),
        // The other monitor's number of it is not known yet, so that it cannot be told.
        (S::SynSent, E::TimedOut) => (S::OwnGone, &[A::Refuse]),

        (S::Mirroring, E::Created) => (S::Established, &[A::SendEstablished, A::Give]),
        (S::Mirroring, E::OwnGone) => (S::OwnGone, &[A::Refuse, A::SendGone]),
        (S::Mirroring, E::PeerGone | E::Refused) => (S::PeerGone, &[A::Refuse, A::Break]),
        (S::Mirroring, E::LinkDown) => (S::Closed, &[A::Refuse, A::Free]),

        (S::Preparing, E::Created) => (S::Knocking, &[A::Knock]),
        (S::Preparing, E::OwnGone) => (S::Closed, &[A::SendRefusal, A::Free]),
        (S::Preparing, E::PeerGone) => (S::PeerGone, &[A::Break]),

        (S::Knocking, E::Knocked) => (S::Answered, &[A::SendSynAck]),
        (S::Knocking, E::KnockFailed | E::TimedOut) => (S::PeerGone, &[A::SendRefusal, A::Break]),
        (S::Knocking, E::PeerGone) => (S::PeerGone, &[A::Break]),
        (S::Knocking, E::OwnGone) => (S::Closed, &[A::SendRefusal, A::Free]),

        (S::Answered, E::Established) => (S::Established, &[A::Open]),
        (S::Answered, E::OwnGone) => (S::OwnGone, &[A::SendGone]),
        (S::Answered, E::PeerGone) => (S::PeerGone, &[A::Break]),
        // The listening socket was closed before the program accepted.
        (S::Answered | S::Established, E::KnockFailed) => (state, &[A::Break]),

        (S::Established, E::OwnGone) => (S::OwnGone, &[A::SendGone]),
        (S::Established, E::PeerGone) => (S::PeerGone, &[]),

        (S::OwnGone, E::PeerGone | E::Refused) => (S::Closed, &[A::Free]),
        // It said yes when this end had given up.
        (S::OwnGone, E::SynAck) => (S::OwnGone, &[A::SendGone]),
        (S::PeerGone, E::OwnGone) => (S::Closed, &[A::SendGone, A::Free]),

        (
            S::Preparing | S::Knocking | S::Answered | S::Established | S::OwnGone | S::PeerGone,
            E::LinkDown,
        ) => (S::Closed, &[A::Free]),

        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet, VecDeque};

    use super::*;

    #[test]
    fn every_state_but_the_last_is_left_when_the_link_goes_and_frees_what_it_has() {
        for state in STATES {
            let left = step(state, Event::LinkDown);
            if state == State::Closed {
                assert_eq!(left, None);
                continue;
            }
            let (next, actions) = left.unwrap();
            assert_eq!(next, State::Closed);
            assert!(actions.contains(&Action::Free));
        }
        assert!(EVENTS.iter().all(|&event| step(State::Closed, event).is_none()));
    }

    #[test]
    fn the_table_is_the_one_that_was_agreed() {
        use {Action as A, Event as E, State as S};
        let expected: &[(S, E, S, &[A])] = &[
            (S::SynSent, E::SynAck, S::Mirroring, &[A::Create]),
            (S::SynSent, E::Refused, S::Closed, &[A::Refuse, A::Free]),
            (S::SynSent, E::PeerGone, S::Closed, &[A::Refuse, A::Free]),
            (S::SynSent, E::TimedOut, S::OwnGone, &[A::Refuse]),
            (S::Mirroring, E::Created, S::Established, &[A::SendEstablished, A::Give]),
            (S::Mirroring, E::OwnGone, S::OwnGone, &[A::Refuse, A::SendGone]),
            (S::Mirroring, E::PeerGone, S::PeerGone, &[A::Refuse, A::Break]),
            (S::Mirroring, E::Refused, S::PeerGone, &[A::Refuse, A::Break]),
            (S::Preparing, E::Created, S::Knocking, &[A::Knock]),
            (S::Preparing, E::OwnGone, S::Closed, &[A::SendRefusal, A::Free]),
            (S::Preparing, E::PeerGone, S::PeerGone, &[A::Break]),
            (S::Knocking, E::Knocked, S::Answered, &[A::SendSynAck]),
            (S::Knocking, E::KnockFailed, S::PeerGone, &[A::SendRefusal, A::Break]),
            (S::Knocking, E::TimedOut, S::PeerGone, &[A::SendRefusal, A::Break]),
            (S::Knocking, E::PeerGone, S::PeerGone, &[A::Break]),
            (S::Knocking, E::OwnGone, S::Closed, &[A::SendRefusal, A::Free]),
            (S::Answered, E::Established, S::Established, &[A::Open]),
            (S::Answered, E::OwnGone, S::OwnGone, &[A::SendGone]),
            (S::Answered, E::PeerGone, S::PeerGone, &[A::Break]),
            (S::Answered, E::KnockFailed, S::Answered, &[A::Break]),
            (S::Established, E::KnockFailed, S::Established, &[A::Break]),
            (S::Established, E::OwnGone, S::OwnGone, &[A::SendGone]),
            (S::Established, E::PeerGone, S::PeerGone, &[]),
            (S::OwnGone, E::PeerGone, S::Closed, &[A::Free]),
            (S::OwnGone, E::Refused, S::Closed, &[A::Free]),
            (S::OwnGone, E::SynAck, S::OwnGone, &[A::SendGone]),
            (S::PeerGone, E::OwnGone, S::Closed, &[A::SendGone, A::Free]),
        ];
        let known: HashMap<_, _> = expected
            .iter()
            .map(|&(state, event, next, actions)| ((state, event), (next, actions)))
            .collect();
        assert_eq!(known.len(), expected.len());
        for state in STATES {
            for event in EVENTS {
                if event != Event::LinkDown {
                    let found = step(state, event);
                    assert_eq!(found, known.get(&(state, event)).copied(), "{state:?} {event:?}");
                }
            }
        }
    }

    /// Two monitors and the messages between them, each in order.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        states: [State; 2],
        /// Messages to each, as events.
        wires: [VecDeque<Event>; 2],
        contexts: [bool; 2],
        freed: [bool; 2],
        /// The other monitor's number is known: the first one learns it with the answer.
        knows: [bool; 2],
    }

    fn happens(world: &World, side: usize, event: Event) -> World {
        let mut next = world.clone();
        next.knows[side] |= event == Event::SynAck;
        let Some((state, actions)) = step(world.states[side], event) else { return next };
        next.states[side] = state;
        let other = 1 - side;
        for action in actions {
            match action {
                Action::SendSynAck => next.wires[other].push_back(Event::SynAck),
                Action::SendRefusal => next.wires[other].push_back(Event::Refused),
                Action::SendEstablished => next.wires[other].push_back(Event::Established),
                // What is said of a number that is none is heard by no monitor.
                Action::SendGone if next.knows[side] => {
                    next.wires[other].push_back(Event::PeerGone)
                }
                Action::Free => next.freed[side] = true,
                _ => {}
            }
        }
        next
    }

    #[test]
    fn whatever_happens_when_both_ends_are_freed_in_the_end_and_never_beside_a_context() {
        let start = World {
            states: [State::SynSent, State::Preparing],
            wires: [VecDeque::new(), VecDeque::new()],
            contexts: [false, false],
            freed: [false, false],
            knows: [false, true],
        };
        let (mut seen, mut left) = (HashSet::new(), vec![start]);
        let mut ends = 0;
        while let Some(world) = left.pop() {
            if !seen.insert(world.clone()) {
                continue;
            }
            for side in 0..2 {
                assert!(!(world.freed[side] && world.contexts[side]), "freed under its context");
            }
            if world.wires.iter().all(VecDeque::is_empty) {
                for side in 0..2 {
                    let waits = matches!(world.states[side], State::Answered | State::Established);
                    let gone = matches!(
                        world.states[1 - side],
                        State::OwnGone | State::PeerGone | State::Closed
                    );
                    assert!(!(waits && gone), "no end waits for one that is gone: {world:?}");
                }
            }
            let mut next = Vec::new();
            for side in 0..2 {
                let mut quiet = world.clone();
                if let Some(event) = quiet.wires[side].pop_front() {
                    next.push(happens(&quiet, side, event));
                }
                let state = world.states[side];
                if matches!(state, State::Mirroring | State::Preparing) && !world.contexts[side] {
                    let mut made = world.clone();
                    made.contexts[side] = true;
                    next.push(happens(&made, side, Event::Created));
                    next.push(happens(&world, side, Event::OwnGone));
                }
                if state == State::Knocking {
                    for event in [Event::Knocked, Event::KnockFailed] {
                        next.push(happens(&world, side, event));
                    }
                }
                if state == State::SynSent {
                    next.push(happens(&world, side, Event::TimedOut));
                }
                if world.contexts[side] || state == State::PeerGone {
                    let mut gone = world.clone();
                    gone.contexts[side] = false;
                    next.push(happens(&gone, side, Event::OwnGone));
                }
            }
            if next.iter().all(|one| seen.contains(one))
                && world.wires.iter().all(VecDeque::is_empty)
            {
                let over = world.states == [State::Closed; 2];
                let idle = next.iter().all(|one| *one == world);
                assert!(over || !idle, "stuck in {:?}", world.states);
                ends += u32::from(over);
            }
            left.extend(next);
        }
        assert!(ends > 0 && seen.len() > 30, "{} worlds, {ends} ends", seen.len());
    }
}
