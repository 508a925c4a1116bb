//! Who is a member, and how that changes.
//!
//! A change of membership is an entry of the log (p. 3.4). It adds or removes one server and takes
//! effect for the positions after its own, once it is committed; its leader proposes nothing
//! behind it until then. The majorities before and after such a change overlap in a server.
//!
//! Payload of the entry, little endian: base position u64, number of members u16, then each member
//! u16, ascending. `base` is the position of the configuration it changes: an entry that survived
//! from a leadership which saw another base changes nothing, everywhere alike.

use crate::ids::{NodeId, Position};

/// Members of one cluster at most; eleven servers survive five failures.
pub const MAX_MEMBERS: usize = 11;

/// One server more or less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The server joins.
    Join(NodeId),
    /// The server leaves.
    Leave(NodeId),
}

/// The members from some position on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// The entry that made it; [`Position::NONE`] for the first.
    position: Position,
    members: Vec<NodeId>,
}

impl Configuration {
    /// The first configuration of a cluster. A server that waits to join starts with none.
    #[must_use]
    pub fn initial(members: &[NodeId]) -> Self {
        Self::at(Position::NONE, members.to_vec())
    }

    /// As a snapshot recorded it.
    #[must_use]
    pub fn at(position: Position, mut members: Vec<NodeId>) -> Self {
        members.sort_unstable();
        members.dedup();
        assert!(members.len() <= MAX_MEMBERS, "a cluster has at most {MAX_MEMBERS} members");
        Self { position, members }
    }

    /// Where the entry stands that made it.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// The members, ascending.
    #[must_use]
    pub fn members(&self) -> &[NodeId] {
        &self.members
    }

    /// Whether `id` is a member.
    #[must_use]
    pub fn contains(&self, id: NodeId) -> bool {
        self.members.binary_search(&id).is_ok()
    }

    /// f + 1.
    #[must_use]
    pub fn majority(&self) -> usize {
        self.members.len() / 2 + 1
    }

    /// Whether the members for which `holds` says so are a majority.
    #[must_use]
    pub fn has_majority(&self, holds: impl Fn(NodeId) -> bool) -> bool {
        let count = self.members.iter().filter(|id| holds(**id)).count();
        !self.members.is_empty() && count >= self.majority()
    }

    /// The highest position that a majority has reached, by what each member has.
    #[must_use]
    pub fn majority_position(&self, reached: impl Fn(NodeId) -> Position) -> Position {
        if self.members.is_empty() {
            return Position::NONE;
        }
        let mut positions = [Position::NONE; MAX_MEMBERS];
        let positions = &mut positions[..self.members.len()];
        for (position, id) in positions.iter_mut().zip(&self.members) {
            *position = reached(*id);
        }
        positions.sort_unstable();
        positions[self.members.len() - self.majority()]
    }

    /// The payload of the entry that makes `change`; `None` when there is nothing to change, or
    /// nobody or too many would be left.
    #[must_use]
    pub fn propose(&self, change: Change) -> Option<Vec<u8>> {
        let mut members = self.members.clone();
        match change {
            Change::Join(id) => members.push(id),
            Change::Leave(id) => members.retain(|member| *member != id),
        }
        members.sort_unstable();
        members.dedup();
        let differs = members != self.members;
        if !differs || members.is_empty() || members.len() > MAX_MEMBERS {
            return None;
        }
        let count = u16::try_from(members.len()).ok()?;
        let mut payload = self.position.0.to_le_bytes().to_vec();
        payload.extend_from_slice(&count.to_le_bytes());
        for id in members {
            payload.extend_from_slice(&id.0.to_le_bytes());
        }
        Some(payload)
    }

    /// The configuration that the entry at `position` makes of this one; `None` for an entry that
    /// changes nothing: another base, or no payload of ours.
    #[must_use]
    pub fn apply(&self, position: Position, payload: &[u8]) -> Option<Self> {
        let (base, rest) = payload.split_first_chunk::<8>()?;
        let (count, rest) = rest.split_first_chunk::<2>()?;
        let count = usize::from(u16::from_le_bytes(*count));
        let fits = u64::from_le_bytes(*base) == self.position.0
            && rest.len() == 2 * count
            && (1..=MAX_MEMBERS).contains(&count);
        if !fits {
            return None;
        }
        let members: Vec<NodeId> =
            rest.chunks_exact(2).map(|id| NodeId(u16::from_le_bytes([id[0], id[1]]))).collect();
        members.is_sorted_by(|left, right| left < right).then_some(Self { position, members })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[u16]) -> Vec<NodeId> {
        ids.iter().copied().map(NodeId).collect()
    }

    #[test]
    fn a_majority_is_f_plus_one_of_two_f_plus_one() {
        for (members, majority) in [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)] {
            let all: Vec<_> = (0..members).map(NodeId).collect();
            assert_eq!(Configuration::initial(&all).majority(), majority);
        }
        assert!(!Configuration::default().has_majority(|_| true), "nobody is no majority");
    }

    #[test]
    fn a_position_counts_once_f_plus_one_have_it() {
        let three = Configuration::initial(&ids(&[1, 2, 3]));
        let reached = |id: NodeId| Position([9, 4, 7][usize::from(id.0) - 1]);
        assert_eq!(three.majority_position(reached), Position(7));
        let four = Configuration::initial(&ids(&[1, 2, 3, 4]));
        let reached = |id: NodeId| Position([9, 4, 7, 1][usize::from(id.0) - 1]);
        assert_eq!(four.majority_position(reached), Position(4));
    }

    #[test]
    fn a_change_applies_to_its_own_base_only() {
        let three = Configuration::initial(&ids(&[1, 2, 3]));
        let join = three.propose(Change::Join(NodeId(4))).unwrap();
        let leave = three.propose(Change::Leave(NodeId(1))).unwrap();
        let four = three.apply(Position(10), &join).unwrap();
        assert_eq!(four.members(), ids(&[1, 2, 3, 4]));
        assert_eq!(four.apply(Position(11), &leave), None, "made for the configuration before");
        assert_eq!(three.propose(Change::Join(NodeId(3))), None);
        assert_eq!(three.propose(Change::Leave(NodeId(9))), None);
        assert_eq!(Configuration::initial(&ids(&[1])).propose(Change::Leave(NodeId(1))), None);
        assert_eq!(three.apply(Position(10), &join[..join.len() - 1]), None);
    }
}
