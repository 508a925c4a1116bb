//! What is replicated: the state machine above the log.

use std::io::{self, Read, Write};

use beeline_paxos::Position;

/// Writes a captured state, on a thread of its own.
pub type SnapshotWriter = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;

/// Replicated state: the same commands in the same order lead to the same state and replies at
/// every member. So `apply` uses no clock and no chance; whoever proposes puts them into the
/// command.
///
/// Every call comes from the log's thread, but for [`StateMachine::examine`] and [`StateMachine::restore`]: the machine
/// goes to another thread for these, and comes back. A call on the log's thread that takes longer than
/// `Options::patience` lets the others take a leader for hung.
pub trait StateMachine: Send + 'static {
    /// Applies a committed command, and writes its reply into `reply`, which is empty.
    fn apply(&mut self, position: Position, command: &[u8], reply: &mut Vec<u8>);

    /// As [`StateMachine::apply`], of a command that follows another one in a run: the machine may put it off, to
    /// apply several at the same time. `false`: so it did, and [`StateMachine::settle`] tells the reply.
    fn take(&mut self, position: Position, command: &[u8], reply: &mut Vec<u8>) -> bool {
        self.apply(position, command, reply);
        true
    }

    /// Applies what was put off, as if one after another in the order in which it was taken, and appends a reply to
    /// `replies` for each of it, in that order. Comes before [`StateMachine::flush`].
    fn settle(&mut self, _replies: &mut Vec<Vec<u8>>) {}

    /// After a run of [`StateMachine::apply`] that ended with `applied`, and before its replies
    /// leave: a machine that is durable by itself persists.
    ///
    /// Errors: the machine's; the server stops, and no reply leaves.
    fn flush(&mut self, _applied: Position) -> io::Result<()> {
        Ok(())
    }

    /// Commands up to here have taken effect in this machine, durably. Asked once, when the server
    /// starts: they are not applied again. [`Position::NONE`] for a machine that is rebuilt from
    /// snapshot and log.
    fn applied(&self) -> Position {
        Position::NONE
    }

    /// Some commands up to here, and none behind, may have taken effect in this machine: at least
    /// [`StateMachine::applied`]. It skips what did when it comes again. So nothing that was never chosen may stand
    /// at a position up to here. Asked once, when the server starts.
    fn reached(&self) -> Position {
        self.applied()
    }

    /// A log begins behind [`StateMachine::applied`], upon what this machine has: nothing that comes took effect
    /// here before, whatever the machine remembers of positions behind that one. It says so durably. Called for each
    /// start with a log that is still empty.
    ///
    /// Errors: the machine's; the server does not start.
    fn founded_upon(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether what [`StateMachine::flush`] returned for lasts in the machine itself: then the log
    /// forgets entries without a snapshot, which is captured only for a peer that lacks them.
    fn is_durable(&self) -> bool {
        false
    }

    /// Whether the machine is about to have no room for more: its service then refuses what needs
    /// some, at every member ([`crate::Handle::is_short`]), before a command cannot be applied here.
    /// Asked often; quick.
    fn is_short(&self) -> bool {
        false
    }

    /// Whether there is room for what `command`, which is committed, may store: the one of this index in the entry
    /// at `position`, of which all are asked about, in order, before one is applied. While there is none
    /// this member applies nothing from that entry on, takes part in everything else, and asks again, from index 0,
    /// with every turn: a member that stopped would come back with as little room. Quick: it may do a step of
    /// what makes room.
    fn has_room_for(&mut self, _position: Position, _index: usize, _command: &[u8]) -> bool {
        true
    }

    /// A command that another member forwarded is about to be proposed here: writes into it what its
    /// proposer alone can say, such as the time.
    ///
    /// Errors: why it is no command; nothing is proposed, and the other member is told.
    fn stamp(&mut self, _command: &mut [u8]) -> Result<(), String> {
        Ok(())
    }

    /// Captures the state as it is now. Quick: the log waits; what is returned writes the state
    /// later, on another thread.
    ///
    /// Errors: the machine's, also while it has a part of what lies behind ([`StateMachine::reached`]); the log tries
    /// again later, and its ring may fill up meanwhile.
    fn snapshot(&mut self) -> io::Result<SnapshotWriter>;

    /// Looks whether [`StateMachine::restore`] can take this state, before anything of the old one is
    /// given up: above all, whether there is room for it. What it reads was not checked yet.
    ///
    /// Errors: why it cannot. The member goes on with the state that it has, and is offered a snapshot
    /// again later.
    fn examine(&mut self, _position: Position, _state: &mut dyn Read) -> io::Result<()> {
        Ok(())
    }

    /// Replaces the state by that of a snapshot, which covers every command up to `position`.
    ///
    /// Errors: the machine's; the server stops.
    fn restore(&mut self, position: Position, reader: &mut dyn Read) -> io::Result<()>;

    /// Answers a query from the state as it is now, and changes nothing.
    fn query(&mut self, _query: &[u8], _reply: &mut Vec<u8>) {}
}
