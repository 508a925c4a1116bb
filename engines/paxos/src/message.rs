//! What servers say to each other with their processors: elections, and nothing else.
//!
//! Messages may be lost, delayed, repeated and reordered. The data path has none: entries, the
//! commit position, signs of life and confirmations of leadership travel by one-sided operations.

use crate::ids::{AccessKey, Position, Term};

/// What a server that has promised itself to a leader or candidate hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Opens its log region, until it promises itself to somebody else.
    pub key: AccessKey,
    /// Its slots up to here hold chosen values.
    pub committed: Position,
    /// No slot of it holds an entry beyond this.
    pub highest: Position,
    /// Its slots up to here may be overwritten.
    pub snapshot: Position,
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A server that lost its leader asks whether an election would succeed, before it disturbs
    /// anybody with a higher term.
    WouldYouVote {
        /// The term it would ask for.
        term: Term,
        /// Its slots up to here hold chosen values.
        committed: Position,
    },
    /// The answer: yes. Binds nobody.
    WouldVote {
        /// As asked.
        term: Term,
    },
    /// A candidate asks for a vote.
    RequestVote {
        /// Its term.
        term: Term,
        /// Its slots up to here hold chosen values.
        committed: Position,
        /// The leader asked it to take over: a living leader is no reason to refuse.
        transfer: bool,
    },
    /// The vote, given after the old leader was fenced off and the promise persisted.
    Vote {
        /// As asked.
        term: Term,
        /// What a new leader needs.
        grant: Grant,
    },
    /// A leader asks a member that did not vote for it for access.
    Follow {
        /// Its term.
        term: Term,
    },
    /// The answer to `Follow`, given as a vote is.
    Following {
        /// As asked.
        term: Term,
        /// What the leader needs.
        grant: Grant,
    },
    /// No, to any of the requests.
    Refused {
        /// The highest term the sender promised itself to.
        term: Term,
    },
    /// The leader asks a member with everything in its log to take over.
    TakeOver {
        /// The leader's term.
        term: Term,
    },
    /// The leader rested, and its beats go on.
    Awake {
        /// The leader's term.
        term: Term,
    },
}

impl Message {
    /// The term it is about.
    #[must_use]
    pub fn term(&self) -> Term {
        match self {
            Self::WouldYouVote { term, .. }
            | Self::WouldVote { term }
            | Self::RequestVote { term, .. }
            | Self::Vote { term, .. }
            | Self::Follow { term }
            | Self::Following { term, .. }
            | Self::Refused { term }
            | Self::TakeOver { term }
            | Self::Awake { term } => *term,
        }
    }
}
