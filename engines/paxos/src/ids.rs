//! Names of servers, leaderships and places in the log.

use std::fmt;

/// A server of the cluster. Never given to another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u16);

/// A leadership, and the ballot of everything proposed under it; 0 is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Term(pub u32);

impl Term {
    /// The next leadership.
    #[must_use]
    pub fn next(self) -> Self {
        assert!(self.0 < u32::MAX, "terms are not used up: one election a second lasts a century");
        Self(self.0 + 1)
    }
}

/// A place in the log; the first is 1, and 0 stands for "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position(pub u64);

impl Position {
    /// Before the first.
    pub const NONE: Self = Self(0);

    /// The place after this one.
    #[must_use]
    pub fn next(self) -> Self {
        self.plus(1)
    }

    /// The place `count` further on.
    #[must_use]
    pub fn plus(self, count: u64) -> Self {
        Self(self.0.saturating_add(count))
    }

    /// How many places lie after `earlier`, up to and including this one; 0 if it is not earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Tells one cluster's bytes from another's: it enters every checksum of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClusterId(pub u64);

/// What a peer needs to reach a server's log region for as long as it holds it: a fabric's remote
/// key, given anew at every change of leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccessKey(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}", self.0)
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
