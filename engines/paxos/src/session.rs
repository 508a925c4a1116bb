//! Client sessions: a retried command is not applied twice.
//!
//! Part of the replicated state: every member runs the same commands through its own table and
//! gets the same verdicts, and a snapshot contains the table.
//!
//! A session is opened by an entry and named after that entry's place, so its name never comes
//! again. Its commands are numbered from 1 and sent one at a time: the next once the last was
//! answered. Then each command meets one of four states:
//!
//! | its number | verdict |
//! |---|---|
//! | last + 1 | it runs, and its reply is kept |
//! | last | it ran: the kept reply is given again |
//! | anything else | it is refused: an old duplicate, or a command out of turn |
//! | session unknown | it is refused: the session expired, and whether the command ran is for the client to find out |
//!
//! When the table is full, opening a session drops the one that was used longest ago, counted in
//! log positions and not in time, so that every member drops the same one.

use std::collections::BTreeMap;

use crate::batch::ClientCommand;
use crate::ids::Position;

/// What became of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// A session was opened under this name.
    Opened(u64),
    /// It ran now.
    Applied(&'a [u8]),
    /// It had run before; this was its reply.
    Repeated(&'a [u8]),
    /// Not the session's next command, nor its last: `expected` would be next.
    OutOfTurn {
        /// The number that would run.
        expected: u64,
    },
    /// No such session, or no longer.
    Expired,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Session {
    last: u64,
    used: Position,
    reply: Vec<u8>,
}

/// The sessions of one state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sessions {
    capacity: usize,
    sessions: BTreeMap<u64, Session>,
}

impl Sessions {
    /// At most `capacity` sessions; the same number at every member.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "a table without room serves nobody");
        Self { capacity, sessions: BTreeMap::new() }
    }

    /// Sessions open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.sessions.len()
    }

    /// Takes the command that stands `index` commands into the entry at `position`; `run` is
    /// called if it is this command's turn, and writes the reply.
    pub fn apply(
        &mut self,
        position: Position,
        index: u16,
        command: &ClientCommand<'_>,
        run: impl FnOnce(&[u8], &mut Vec<u8>),
    ) -> Outcome<'_> {
        if command.session == 0 {
            return Outcome::Opened(self.create(position, index));
        }
        let Some(session) = self.sessions.get_mut(&command.session) else {
            return Outcome::Expired;
        };
        session.used = position;
        if command.sequence == session.last + 1 {
            session.last = command.sequence;
            session.reply.clear();
            run(command.bytes, &mut session.reply);
            Outcome::Applied(&session.reply)
        } else if command.sequence == session.last && session.last > 0 {
            Outcome::Repeated(&session.reply)
        } else {
            Outcome::OutOfTurn { expected: session.last + 1 }
        }
    }

    /// The table as bytes, for a snapshot: capacity u64, then for each session its name u64, last
    /// number u64, position of last use u64, reply length u32, reply; little endian.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = (self.capacity as u64).to_le_bytes().to_vec();
        for (name, session) in &self.sessions {
            for word in [*name, session.last, session.used.0] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
            let length = u32::try_from(session.reply.len()).unwrap_or(u32::MAX);
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(&session.reply[..length as usize]);
        }
        bytes
    }

    /// What [`Sessions::encode`] wrote; `None` for anything else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (capacity, mut rest) = bytes.split_first_chunk::<8>()?;
        let capacity = usize::try_from(u64::from_le_bytes(*capacity)).ok().filter(|n| *n > 0)?;
        let mut sessions = BTreeMap::new();
        while !rest.is_empty() {
            let (head, after) = rest.split_first_chunk::<28>()?;
            let long = |at: usize| {
                let mut word = [0; 8];
                word.copy_from_slice(&head[at..at + 8]);
                u64::from_le_bytes(word)
            };
            let length = (long(20) >> 32) as usize;
            let (reply, after) = after.split_at_checked(length)?;
            let session =
                Session { last: long(8), used: Position(long(16)), reply: reply.to_vec() };
            let ascends = sessions.last_key_value().is_none_or(|(last, _)| *last < long(0));
            if !ascends || sessions.len() == capacity {
                return None;
            }
            sessions.insert(long(0), session);
            rest = after;
        }
        Some(Self { capacity, sessions })
    }

    fn create(&mut self, position: Position, index: u16) -> u64 {
        if self.sessions.len() >= self.capacity {
            let idle = self.sessions.iter().min_by_key(|(name, session)| (session.used, **name));
            if let Some(name) = idle.map(|(name, _)| *name) {
                self.sessions.remove(&name);
            }
        }
        let name = position.0 << 16 | u64::from(index);
        self.sessions.insert(name, Session { last: 0, used: position, reply: Vec::new() });
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(session: u64, sequence: u64) -> ClientCommand<'static> {
        ClientCommand { session, sequence, bytes: b"x" }
    }

    #[test]
    fn a_command_runs_once_however_often_it_is_sent() {
        let mut sessions = Sessions::new(4);
        let Outcome::Opened(name) = sessions.apply(Position(3), 1, &command(0, 0), |_, _| ())
        else {
            panic!("not opened")
        };
        let mut runs = 0;
        for at in 4..8 {
            let outcome = sessions.apply(Position(at), 0, &command(name, 1), |bytes, reply| {
                runs += 1;
                reply.extend_from_slice(bytes);
            });
            let first = at == 4;
            assert_eq!(
                outcome,
                if first { Outcome::Applied(b"x") } else { Outcome::Repeated(b"x") }
            );
        }
        assert_eq!(runs, 1);
    }

    #[test]
    fn commands_out_of_turn_and_of_no_session_do_not_run() {
        let mut sessions = Sessions::new(4);
        let never = |_: &[u8], _: &mut Vec<u8>| panic!("it ran");
        assert_eq!(sessions.apply(Position(1), 0, &command(77, 1), never), Outcome::Expired);
        let Outcome::Opened(name) = sessions.apply(Position(2), 0, &command(0, 0), never) else {
            panic!("not opened")
        };
        for sequence in [0, 2, 9] {
            let outcome = sessions.apply(Position(3), 0, &command(name, sequence), never);
            assert_eq!(outcome, Outcome::OutOfTurn { expected: 1 });
        }
    }

    #[test]
    fn the_session_idle_longest_makes_room() {
        let mut sessions = Sessions::new(2);
        let mut open = |at| match sessions.apply(Position(at), 0, &command(0, 0), |_, _| ()) {
            Outcome::Opened(name) => name,
            other => panic!("{other:?}"),
        };
        let (first, second) = (open(1), open(2));
        sessions.apply(Position(3), 0, &command(first, 1), |_, _| ());
        sessions.apply(Position(4), 0, &command(0, 0), |_, _| ());
        assert_eq!(sessions.open(), 2);
        let gone = sessions.apply(Position(5), 0, &command(second, 1), |_, _| ());
        assert_eq!(gone, Outcome::Expired);
        let kept = sessions.apply(Position(6), 0, &command(first, 2), |_, _| ());
        assert_eq!(kept, Outcome::Applied(b""));
    }

    #[test]
    fn a_table_comes_back_from_its_bytes() {
        let mut sessions = Sessions::new(3);
        for at in 1..4 {
            sessions.apply(Position(at), 0, &command(0, 0), |_, _| ());
        }
        sessions.apply(Position(4), 0, &command(2 << 16, 1), |_, reply| reply.push(7));
        let bytes = sessions.encode();
        assert_eq!(Sessions::decode(&bytes), Some(sessions));
        for length in 0..bytes.len() {
            let cut = Sessions::decode(&bytes[..length]);
            assert!(cut.is_none_or(|cut| cut.open() < 3), "{length} bytes");
        }
        assert_eq!(Sessions::decode(&[0; 8]), None, "a table without room");
    }
}
