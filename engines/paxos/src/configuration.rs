//! Who is a member, and how that changes.
//!
//! A change of membership is an entry of the log (p. 3.4). It adds or removes one server and takes
//! effect for the positions after its own, once it is committed; its leader proposes nothing
//! behind it until then. The majorities before and after such a change overlap in a server.
//!
//! Payload of the entry, little endian: base position u64, number of members u16, then for each
//! member, ascending: id u16, length of its contact u16, contact. `base` is the position of the
//! configuration it changes: an entry that survived from a leadership which saw another base
//! changes nothing, everywhere alike.
//!
//! A *contact* is how servers and clients reach a member; the protocol carries it and does not
//! read it.

use crate::ids::{NodeId, Position};

/// Members of one cluster at most; eleven servers survive five failures.
pub const MAX_MEMBERS: usize = 11;

/// Bytes of a contact at most.
pub const MAX_CONTACT_BYTES: usize = 240;

/// One server more or less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The server joins; a member gets another contact.
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
    /// Of each member, in the same order.
    contacts: Vec<Vec<u8>>,
}

impl Configuration {
    /// The first configuration of a cluster, without contacts. A server that waits to join starts
    /// with none.
    #[must_use]
    pub fn initial(members: &[NodeId]) -> Self {
        Self::at(Position::NONE, members.iter().map(|id| (*id, Vec::new())).collect())
    }

    /// As a snapshot recorded it: members and their contacts.
    #[must_use]
    pub fn at(position: Position, mut members: Vec<(NodeId, Vec<u8>)>) -> Self {
        members.sort_by_key(|(id, _)| *id);
        members.dedup_by_key(|(id, _)| *id);
        assert!(members.len() <= MAX_MEMBERS, "a cluster has at most {MAX_MEMBERS} members");
        let (members, contacts) = members.into_iter().unzip();
        Self { position, members, contacts }
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

    /// How to reach a member; empty for one without a contact, and for a stranger.
    #[must_use]
    pub fn contact(&self, id: NodeId) -> &[u8] {
        self.members.binary_search(&id).map_or(&[], |index| &self.contacts[index])
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
    /// nobody or too many would be left. `contact` is that of a server that joins.
    #[must_use]
    pub fn propose(&self, change: Change, contact: &[u8]) -> Option<Vec<u8>> {
        let mut changed = self.clone();
        let (Change::Join(id) | Change::Leave(id)) = change;
        if let Ok(index) = changed.members.binary_search(&id) {
            changed.members.remove(index);
            changed.contacts.remove(index);
        }
        if let (Change::Join(_), Err(index)) = (change, changed.members.binary_search(&id)) {
            changed.members.insert(index, id);
            changed.contacts.insert(index, contact.to_vec());
        }
        let fits = (1..=MAX_MEMBERS).contains(&changed.members.len());
        let differs = changed != *self;
        (differs && fits && contact.len() <= MAX_CONTACT_BYTES).then(|| changed.encode())
    }

    /// The configuration as bytes: the payload of an entry that changes it, whose base is this
    /// one's position; in a snapshot, with [`Configuration::decode`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = self.position.0.to_le_bytes().to_vec();
        let short = |length: usize| u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes();
        payload.extend_from_slice(&short(self.members.len()));
        for (id, contact) in self.members.iter().zip(&self.contacts) {
            assert!(contact.len() <= MAX_CONTACT_BYTES, "contacts are bounded when proposed");
            payload.extend_from_slice(&id.0.to_le_bytes());
            payload.extend_from_slice(&short(contact.len()));
            payload.extend_from_slice(contact);
        }
        payload
    }

    /// What [`Configuration::encode`] wrote; `None` for anything else.
    #[must_use]
    pub fn decode(payload: &[u8]) -> Option<Self> {
        fn short<'a>(rest: &mut &'a [u8]) -> Option<u16> {
            let (bytes, after): (&'a [u8; 2], _) = rest.split_first_chunk::<2>()?;
            *rest = after;
            Some(u16::from_le_bytes(*bytes))
        }
        let (base, mut rest) = payload.split_first_chunk::<8>()?;
        let count = usize::from(short(&mut rest)?);
        if count > MAX_MEMBERS {
            return None;
        }
        let (mut members, mut contacts) = (Vec::new(), Vec::new());
        for _ in 0..count {
            members.push(NodeId(short(&mut rest)?));
            let length = usize::from(short(&mut rest)?);
            let (contact, after) = rest.split_at_checked(length)?;
            rest = after;
            if length > MAX_CONTACT_BYTES {
                return None;
            }
            contacts.push(contact.to_vec());
        }
        let sound = rest.is_empty() && members.is_sorted_by(|left, right| left < right);
        let position = Position(u64::from_le_bytes(*base));
        sound.then_some(Self { position, members, contacts })
    }

    /// The configuration that the entry at `position` makes of this one; `None` for an entry that
    /// changes nothing: another base, or no payload of ours.
    #[must_use]
    pub fn apply(&self, position: Position, payload: &[u8]) -> Option<Self> {
        let changed = Self::decode(payload)?;
        let applies = changed.position == self.position && !changed.members.is_empty();
        applies.then_some(Self { position, ..changed })
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
        let join = three.propose(Change::Join(NodeId(4)), b"four").unwrap();
        let leave = three.propose(Change::Leave(NodeId(1)), b"").unwrap();
        let four = three.apply(Position(10), &join).unwrap();
        assert_eq!(four.members(), ids(&[1, 2, 3, 4]));
        assert_eq!(four.apply(Position(11), &leave), None, "made for the configuration before");
        assert_eq!(three.propose(Change::Join(NodeId(3)), b""), None);
        assert_eq!(three.propose(Change::Leave(NodeId(9)), b""), None);
        assert_eq!(Configuration::initial(&ids(&[1])).propose(Change::Leave(NodeId(1)), b""), None);
        assert_eq!(three.apply(Position(10), &join[..join.len() - 1]), None);
        assert_eq!((four.contact(NodeId(4)), four.contact(NodeId(9))), (&b"four"[..], &b""[..]));
        let moved = four.propose(Change::Join(NodeId(4)), b"elsewhere").unwrap();
        let moved = four.apply(Position(12), &moved).unwrap();
        assert_eq!(
            (moved.members(), moved.contact(NodeId(4))),
            (four.members(), &b"elsewhere"[..])
        );
        assert_eq!(four.propose(Change::Join(NodeId(4)), b"four"), None, "nothing to change");
        assert_eq!(Configuration::decode(&moved.encode()), Some(moved));
    }
}
