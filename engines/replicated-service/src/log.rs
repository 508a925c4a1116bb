//! What a group asks of its log: the seam to the program that runs one.

use std::fmt::Debug;
use std::time::Duration;

use crate::journey::Load;

/// Why the log did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// Another member leads, or none.
    #[error("this member does not lead")]
    NotLeader,
    /// Not at this moment: the same may succeed soon.
    #[error("the log is busy: {reason}")]
    Busy {
        /// With what.
        reason: String,
    },
    /// The leadership was lost meanwhile: it may have happened or not.
    #[error("the leadership was lost; it may have happened or not")]
    Lost,
    /// Longer than an entry.
    #[error("{bytes} bytes do not fit into an entry of the log of {limit}")]
    TooLarge {
        /// As given.
        bytes: usize,
        /// Most.
        limit: usize,
    },
    /// It makes no sense for this cluster.
    #[error("{reason}")]
    Invalid {
        /// Why.
        reason: String,
    },
    /// The log has ended.
    #[error("the log has stopped")]
    Stopped,
}

impl Refused {
    /// Whether the same may succeed later, here or at another member.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotLeader | Self::Busy { .. } | Self::Lost)
    }
}

/// Called once, on any thread; must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T, Refused>) + Send>;

/// What a member does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogRole {
    /// Follows a leader, or looks for one.
    #[default]
    Follower,
    /// Wants to lead.
    Candidate,
    /// Elected, and completing what earlier leaders began.
    Recovering,
    /// Leads.
    Leader,
    /// Ended.
    Stopped,
}

impl LogRole {
    /// Its name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Follower => "follower",
            Self::Candidate => "candidate",
            Self::Recovering => "recovering",
            Self::Leader => "leader",
            Self::Stopped => "stopped",
        }
    }
}

/// A member as another one sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogMember {
    /// Its number.
    pub id: u16,
    /// Where its log answers.
    pub log_address: String,
    /// Where it serves Redis clients.
    pub resp_address: String,
    /// Whether this member has a connection to it.
    pub connected: bool,
    /// Entries the leader has committed and this member is not known to have; the leader knows.
    pub lag: Option<u64>,
    /// It is about to have no room; the leader knows.
    pub short: bool,
}

/// The log as this member sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogState {
    /// The cluster.
    pub cluster: u64,
    /// This member.
    pub id: u16,
    /// What it does.
    pub role: LogRole,
    /// The leadership it knows of.
    pub term: u32,
    /// Who leads.
    pub leader: Option<u16>,
    /// Position up to which entries are committed, as far as known here.
    pub committed: u64,
    /// Position up to which they are applied here.
    pub applied: u64,
    /// Position of the newest snapshot here.
    pub snapshot: u64,
    /// All members.
    pub members: Vec<LogMember>,
    /// Leaderships this member won.
    pub leaderships: u64,
    /// Snapshots sent to others.
    pub snapshots_sent: u64,
    /// Snapshots installed here.
    pub snapshots_installed: u64,
    /// Units and barriers of this member that a leader was asked for and did not answer: their way broke,
    /// or their time was over. They are tried again while there is time.
    pub forwards_unanswered: u64,
    /// Units and barriers of this member that no leader was asked for: it cannot be reached, or too much
    /// waits for it. They are tried again while there is time.
    pub forwards_refused: u64,
    /// Units and barriers that other members asked for here.
    pub forwards_served: u64,
    /// Longest command, bytes.
    pub command_limit_bytes: usize,
}

impl LogState {
    /// The member that leads, unless it is this one.
    #[must_use]
    pub fn other_leader(&self) -> Option<&LogMember> {
        let leader = self.leader.filter(|leader| *leader != self.id)?;
        self.members.iter().find(|member| member.id == leader)
    }

    /// Whether this member leads and takes proposals.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.role == LogRole::Leader
    }
}

/// What an operator asks of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Takes a member in.
    Join {
        /// Its number.
        id: u16,
        /// Where its log answers.
        log_address: String,
        /// Where it serves Redis clients.
        resp_address: String,
    },
    /// Lets a member go.
    Leave {
        /// Its number.
        id: u16,
    },
    /// Gives the leadership away.
    Transfer {
        /// To whom.
        id: u16,
    },
    /// Takes a snapshot at this member.
    Snapshot,
}

/// The log of one member. What it commits it gives to the group's [`crate::Machine`].
pub trait Log: Send + Sync + Debug {
    /// Proposes a command; `done` gets the reply that applying it made here.
    fn propose(&self, command: Vec<u8>, done: Done<Vec<u8>>);

    /// When `done` is called with a position, the state here includes everything that was
    /// acknowledged anywhere before the call. The leader alone can.
    fn barrier(&self, done: Done<u64>);

    /// Has the member `to`, which should lead, take a load as [`Log::propose`] and [`Log::barrier`] there
    /// do: a unit as it is, which that member stamps ([`crate::Group::stamp`]). `done` is told the replies
    /// or a position in decimal digits, within `limit`.
    fn forward(&self, to: u16, load: Load<'_>, limit: Duration, done: Done<Vec<u8>>);

    /// The log as of now.
    fn state(&self) -> LogState;

    /// Whether this member leads and takes proposals. Asked per unit.
    fn leads(&self) -> bool {
        self.state().leads()
    }

    /// Whether a member, this one or another, is about to have no room for more. A service refuses
    /// what needs some. Asked per request.
    fn is_short(&self) -> bool {
        false
    }

    /// Carries an order out.
    fn administer(&self, order: Order, done: Done<()>);
}
