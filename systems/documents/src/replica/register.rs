//! The register of terms: what the cluster's log decides about the documents.
//!
//! ```text
//!  term t, elected ── Begin(t+1) ──► term t+1, voting ── votes of a majority ──► term t+1, elected
//!                                        └── Begin(t+2), where it comes to nothing ──► …
//! ```
//!
//! Every member applies the same orders in the same order, so all of them know the same primary of a
//! term. A member that applied `Begin(t+1)` acknowledges nothing to the primary of `t` any more, and
//! only then says in its vote how far its own log goes. So what a majority had acknowledged lies in the
//! log of some voter of every majority, and the voter with the newest log leads.
//!
//! A primary is deposed where a majority says that it hears nothing of it ([`Order::Suspect`]): one member whose way
//! to it is cut deposes nobody.
//!
//! The voters change with a term. Until an entry of a term with the new voters is durable at a majority of both
//! ([`Order::Settle`]), a majority is one of the voters before as well as one of the new: for elections here, for
//! acknowledgements in [`super::conduct::Standing`]. So each election hears of what either set acknowledged.
//!
//! ```text
//!  voters A ── Begin(t+1, B) ──► voters B, before A ── Settle(t+1) ──► voters B
//! ```
//!
//! A pure state machine: no clock, thread or file.

use std::collections::{BTreeMap, BTreeSet};

/// A place in the operation log: newer terms are newer, then newer times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The term of the primary that made the entry.
    pub term: u64,
    /// The entry's time.
    pub time: u64,
}

/// What a member says of itself when it votes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ballot {
    /// Where its log ends.
    pub last: Place,
    /// Its documents are those of its log, so it may lead.
    pub electable: bool,
}

/// How far a term is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Before the first term.
    Idle,
    /// Votes come in.
    Voting(BTreeMap<u16, Ballot>),
    /// This member leads.
    Elected(u16),
}

/// What a member proposes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// A new term, in which these members vote.
    Begin {
        /// One above the present one, or nothing happens.
        term: u64,
        /// The members of the set.
        voters: BTreeSet<u16>,
    },
    /// A member hears nothing of the primary; once a majority says so, the next term begins.
    Suspect {
        /// The term of the primary.
        term: u64,
        /// The member.
        member: u16,
    },
    /// A vote.
    Vote {
        /// The term it counts in.
        term: u64,
        /// The member that votes.
        member: u16,
        /// What it says.
        ballot: Ballot,
    },
    /// An entry of this term is durable at a majority of its voters and of those before: the latter count no more.
    Settle {
        /// The term, in which its primary says so.
        term: u64,
    },
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Register {
    /// The present term.
    pub term: u64,
    /// The members that vote in it.
    pub voters: BTreeSet<u16>,
    /// The voters before, while a majority of them counts as well; empty: the voters have not changed.
    pub before: BTreeSet<u16>,
    /// How far it is.
    pub phase: Phase,
    /// Members that hear nothing of the primary.
    pub suspects: BTreeSet<u16>,
}

impl Default for Register {
    fn default() -> Self {
        Self::voting(0, BTreeSet::new(), Phase::Idle)
    }
}

/// More than half of so many.
#[must_use]
pub fn majority(members: usize) -> usize {
    members / 2 + 1
}

impl Register {
    fn voting(term: u64, voters: BTreeSet<u16>, phase: Phase) -> Self {
        let (before, suspects) = (BTreeSet::new(), BTreeSet::new());
        Self { term, voters, before, phase, suspects }
    }

    /// The voters of which a majority counted last by itself.
    #[must_use]
    pub fn settled(&self) -> &BTreeSet<u16> {
        if self.before.is_empty() { &self.voters } else { &self.before }
    }

    /// Whether what this member says counts.
    #[must_use]
    pub fn counts(&self, member: u16) -> bool {
        self.voters.contains(&member) || self.before.contains(&member)
    }

    /// Whether a majority of the voters, and one of those before, are such members.
    fn is_majority(&self, such: impl Fn(u16) -> bool) -> bool {
        let has = |set: &BTreeSet<u16>| {
            set.iter().filter(|member| such(**member)).count() >= majority(set.len())
        };
        has(&self.voters) && (self.before.is_empty() || has(&self.before))
    }

    /// The next term, in which these vote.
    fn begin(&mut self, voters: BTreeSet<u16>) {
        let settled = self.settled().clone();
        let before = if settled == voters { BTreeSet::new() } else { settled };
        let next = Self::voting(self.term + 1, voters, Phase::Voting(BTreeMap::new()));
        *self = Self { before, ..next };
    }

    /// The primary of the present term, once it is elected.
    #[must_use]
    pub fn primary(&self) -> Option<u16> {
        match self.phase {
            Phase::Elected(member) => Some(member),
            _ => None,
        }
    }

    /// Whether a member's vote of the present term is in, or would count for nothing.
    #[must_use]
    pub fn has_vote_of(&self, member: u16) -> bool {
        match &self.phase {
            Phase::Voting(ballots) => ballots.contains_key(&member) || !self.counts(member),
            _ => true,
        }
    }

    /// Applies an order; false: it came too late and changes nothing.
    pub fn apply(&mut self, order: &Order) -> bool {
        match order {
            Order::Begin { term, voters } => {
                if *term != self.term + 1 || voters.is_empty() {
                    return false;
                }
                self.begin(voters.clone());
                true
            }
            Order::Suspect { term, member } => {
                if *term != self.term
                    || self.primary().is_none()
                    || !self.counts(*member)
                    || !self.suspects.insert(*member)
                {
                    return false;
                }
                // A primary needs both majorities: either may say that it hears nothing.
                let deposes = |set: &BTreeSet<u16>| {
                    !set.is_empty()
                        && set.intersection(&self.suspects).count() >= majority(set.len())
                };
                if deposes(&self.voters) || deposes(&self.before) {
                    // Voters that never came to count are not insisted on.
                    let voters = self.settled().clone();
                    self.begin(voters);
                }
                true
            }
            Order::Vote { term, member, ballot } => {
                let Phase::Voting(ballots) = &mut self.phase else { return false };
                if *term != self.term
                    || !(self.voters.contains(member) || self.before.contains(member))
                    || ballots.contains_key(member)
                {
                    return false;
                }
                ballots.insert(*member, *ballot);
                if let Some(elected) = self.elect() {
                    self.phase = Phase::Elected(elected);
                }
                true
            }
            Order::Settle { term } => {
                if *term != self.term || self.primary().is_none() || self.before.is_empty() {
                    return false;
                }
                self.before.clear();
                true
            }
        }
    }

    /// The member that the votes elect: the one with the newest log among those whose log is as new as those of a
    /// majority that voted. What a majority acknowledged lies in the log of a member of that majority, so in the
    /// elected one's. A voter that may not lead, or leaves the set, still says how far its log goes.
    fn elect(&self) -> Option<u16> {
        let Phase::Voting(ballots) = &self.phase else { return None };
        let leads = |last: Place| {
            self.is_majority(|member| ballots.get(&member).is_some_and(|one| one.last <= last))
        };
        ballots
            .iter()
            .filter(|(member, ballot)| ballot.electable && self.voters.contains(member))
            .filter(|(_, ballot)| leads(ballot.last))
            .max_by_key(|(member, ballot)| (ballot.last, std::cmp::Reverse(**member)))
            .map(|(member, _)| *member)
    }
}

/// Bytes out of bytes; `None` when they end too early.
pub(crate) struct Taker<'t>(pub &'t [u8]);

impl<'t> Taker<'t> {
    pub(crate) fn bytes(&mut self, length: usize) -> Option<&'t [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.first_chunk::<N>().copied()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// Version of orders and of the register's own bytes.
const VERSION: u8 = 1;
/// Version of a register whose voters are changing: theirs before stand behind the voters.
const CHANGING: u8 = 2;

fn put_voters(voters: &BTreeSet<u16>, out: &mut Vec<u8>) {
    out.extend((voters.len() as u16).to_le_bytes());
    voters.iter().for_each(|voter| out.extend(voter.to_le_bytes()));
}

fn take_voters(taker: &mut Taker<'_>) -> Option<BTreeSet<u16>> {
    let count = taker.u16()?;
    (0..count).map(|_| taker.u16()).collect()
}

fn put_ballot(ballot: &Ballot, out: &mut Vec<u8>) {
    out.extend(ballot.last.term.to_le_bytes());
    out.extend(ballot.last.time.to_le_bytes());
    out.push(u8::from(ballot.electable));
}

fn take_ballot(taker: &mut Taker<'_>) -> Option<Ballot> {
    let last = Place { term: taker.u64()?, time: taker.u64()? };
    let electable = match taker.u8()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    Some(Ballot { last, electable })
}

impl Order {
    /// As it travels in the log: version, kind, fields. The log's own checksum covers it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        match self {
            Self::Begin { term, voters } => {
                out.push(1);
                out.extend(term.to_le_bytes());
                put_voters(voters, &mut out);
            }
            Self::Suspect { term, member } => {
                out.push(3);
                out.extend(term.to_le_bytes());
                out.extend(member.to_le_bytes());
            }
            Self::Vote { term, member, ballot } => {
                out.push(2);
                out.extend(term.to_le_bytes());
                out.extend(member.to_le_bytes());
                put_ballot(ballot, &mut out);
            }
            Self::Settle { term } => {
                out.push(4);
                out.extend(term.to_le_bytes());
            }
        }
        out
    }

    /// Reads [`Order::encode`]; `None`: damaged, or of another version.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut taker = Taker(bytes);
        if taker.u8()? != VERSION {
            return None;
        }
        let order = match taker.u8()? {
            1 => Self::Begin { term: taker.u64()?, voters: take_voters(&mut taker)? },
            2 => Self::Vote {
                term: taker.u64()?,
                member: taker.u16()?,
                ballot: take_ballot(&mut taker)?,
            },
            3 => Self::Suspect { term: taker.u64()?, member: taker.u16()? },
            4 => Self::Settle { term: taker.u64()? },
            _ => return None,
        };
        taker.0.is_empty().then_some(order)
    }
}

impl Register {
    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let changing = !self.before.is_empty();
        let mut out = vec![if changing { CHANGING } else { VERSION }];
        out.extend(self.term.to_le_bytes());
        put_voters(&self.voters, &mut out);
        if changing {
            put_voters(&self.before, &mut out);
        }
        match &self.phase {
            Phase::Idle => out.push(0),
            Phase::Voting(ballots) => {
                out.push(1);
                out.extend((ballots.len() as u16).to_le_bytes());
                for (member, ballot) in ballots {
                    out.extend(member.to_le_bytes());
                    put_ballot(ballot, &mut out);
                }
            }
            Phase::Elected(member) => {
                out.push(if self.suspects.is_empty() { 2 } else { 3 });
                out.extend(member.to_le_bytes());
                if !self.suspects.is_empty() {
                    put_voters(&self.suspects, &mut out);
                }
            }
        }
        out
    }

    /// Reads [`Register::encode`]; `None`: damaged, or of another version.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut taker = Taker(bytes);
        let version = taker.u8()?;
        if !(VERSION..=CHANGING).contains(&version) {
            return None;
        }
        let (term, voters) = (taker.u64()?, take_voters(&mut taker)?);
        let mut before = BTreeSet::new();
        if version == CHANGING {
            before = take_voters(&mut taker)?;
        }
        let mut suspects = BTreeSet::new();
        let phase = match taker.u8()? {
            0 => Phase::Idle,
            1 => {
                let count = taker.u16()?;
                let ballots = (0..count).map(|_| Some((taker.u16()?, take_ballot(&mut taker)?)));
                Phase::Voting(ballots.collect::<Option<_>>()?)
            }
            2 => Phase::Elected(taker.u16()?),
            3 => {
                let elected = taker.u16()?;
                suspects = take_voters(&mut taker)?;
                Phase::Elected(elected)
            }
            _ => return None,
        };
        taker.0.is_empty().then_some(Self { term, voters, before, phase, suspects })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(term: u64) -> Order {
        Order::Begin { term, voters: [1, 2, 3].into() }
    }

    fn vote(term: u64, member: u16, last: (u64, u64), electable: bool) -> Order {
        let last = Place { term: last.0, time: last.1 };
        Order::Vote { term, member, ballot: Ballot { last, electable } }
    }

    #[test]
    fn a_majority_elects_the_voter_with_the_newest_log() {
        let mut register = Register::default();
        assert!(register.apply(&begin(1)) && !register.apply(&begin(1)));
        assert!(register.apply(&vote(1, 3, (0, 0), true)));
        assert!(!register.apply(&vote(1, 3, (9, 9), true)), "one vote each");
        assert!(!register.apply(&vote(1, 4, (9, 9), true)), "no member of the set");
        assert_eq!(register.primary(), None);
        assert!(register.apply(&vote(1, 2, (0, 0), true)));
        assert_eq!(register.primary(), Some(2), "the lower number among equals");
        assert!(!register.apply(&vote(1, 1, (5, 5), true)), "too late");
        assert!(register.apply(&begin(2)));
        assert!(!register.apply(&vote(1, 1, (5, 5), true)), "of an older term");
        assert!(register.apply(&vote(2, 1, (1, 90), true)));
        assert!(register.apply(&vote(2, 3, (2, 10), true)));
        assert_eq!(register.primary(), Some(3), "a newer term before a later time");
    }

    #[test]
    fn a_voter_that_may_not_lead_keeps_those_from_leading_that_lack_its_log() {
        let mut register = Register::default();
        register.apply(&begin(1));
        register.apply(&vote(1, 1, (1, 50), false));
        register.apply(&vote(1, 2, (1, 40), true));
        assert_eq!(register.primary(), None);
        register.apply(&vote(1, 3, (1, 50), true));
        assert_eq!(register.primary(), Some(3));
    }

    #[test]
    fn a_primary_is_deposed_by_a_majority_that_hears_nothing_of_it_and_by_no_member_alone() {
        let mut register = Register::default();
        let suspect = |term: u64, member: u16| Order::Suspect { term, member };
        register.apply(&begin(1));
        assert!(!register.apply(&suspect(1, 2)), "nobody is elected");
        register.apply(&vote(1, 1, (1, 1), true));
        register.apply(&vote(1, 2, (1, 1), true));
        assert!(register.apply(&suspect(1, 3)));
        for none in [suspect(1, 3), suspect(1, 9), suspect(0, 2), suspect(2, 2)] {
            assert!(!register.apply(&none), "{none:?}");
        }
        assert_eq!((register.term, register.primary()), (1, Some(1)));
        assert!(register.apply(&suspect(1, 2)));
        assert_eq!((register.term, register.primary()), (2, None));
        assert!(register.suspects.is_empty() && register.voters == [1, 2, 3].into());
    }

    fn elected(voters: &[u16], member: u16) -> Register {
        let voters: BTreeSet<u16> = voters.iter().copied().collect();
        Register { term: 1, voters, phase: Phase::Elected(member), ..Register::default() }
    }

    fn change(term: u64, voters: &[u16]) -> Order {
        Order::Begin { term, voters: voters.iter().copied().collect() }
    }

    #[test]
    fn while_voters_change_a_majority_of_both_elects() {
        // 1 and 2 acknowledged (1, 50) as a majority of {1, 2, 3}.
        let mut register = elected(&[1, 2, 3], 1);
        assert!(register.apply(&change(2, &[3, 4, 5])));
        register.apply(&vote(2, 3, (1, 10), true));
        register.apply(&vote(2, 4, (0, 0), true));
        register.apply(&vote(2, 5, (0, 0), true));
        assert_eq!(register.primary(), None, "no majority of the voters before");
        register.apply(&vote(2, 2, (1, 50), true));
        assert_eq!(register.primary(), None, "2 has the newest log, and leaves the set");
        // The voters before are a way back.
        assert!(register.apply(&change(3, &[1, 2, 3])) && register.before.is_empty());
        register.apply(&vote(3, 3, (1, 10), true));
        register.apply(&vote(3, 2, (1, 50), true));
        assert_eq!(register.primary(), Some(2));
    }

    #[test]
    fn voters_before_count_until_the_new_ones_are_settled() {
        let mut register = elected(&[1, 2, 3], 1);
        register.apply(&change(2, &[1, 2, 4]));
        assert!(!register.apply(&Order::Settle { term: 2 }), "no member is elected");
        register.apply(&vote(2, 1, (1, 50), true));
        register.apply(&vote(2, 2, (1, 40), true));
        assert_eq!(register.primary(), Some(1), "2 of both sets voted");
        assert!(register.counts(3) && register.counts(4));
        let mut again = register.clone();
        again.apply(&change(3, &[1, 4, 5]));
        assert_eq!(again.before, [1, 2, 3].into(), "those that counted last by themselves");
        assert!(!register.apply(&Order::Settle { term: 1 }));
        assert!(register.apply(&Order::Settle { term: 2 }) && !register.counts(3));
        assert_eq!(register.primary(), Some(1));
        register.apply(&change(3, &[1, 4, 5]));
        assert_eq!(register.before, [1, 2, 4].into());
        // Either majority deposes, and what never came to count is given up.
        register.apply(&vote(3, 1, (2, 60), true));
        register.apply(&vote(3, 4, (2, 60), true));
        assert_eq!(register.primary(), Some(1));
        for member in [2, 4] {
            assert!(register.apply(&Order::Suspect { term: 3, member }));
        }
        assert_eq!((register.term, &register.voters), (4, &[1, 2, 4].into()));
        assert!(register.before.is_empty());
    }

    #[test]
    fn a_log_that_no_majority_needs_keeps_no_other_from_leading() {
        let mut register = elected(&[1, 2, 3], 1);
        register.apply(&begin(2));
        register.apply(&vote(2, 1, (1, 50), false));
        register.apply(&vote(2, 2, (1, 40), true));
        assert_eq!(register.primary(), None, "a majority may have acknowledged (1, 50)");
        register.apply(&vote(2, 3, (1, 40), true));
        assert_eq!(register.primary(), Some(2), "none did");
    }

    #[test]
    fn orders_and_registers_come_back_and_no_part_is_taken_for_one() {
        let mut register = Register::default();
        let orders = [
            begin(1),
            vote(1, 1, (3, 7), true),
            vote(1, 2, (3, 9), false),
            vote(1, 3, (3, 9), true),
            Order::Suspect { term: 1, member: 2 },
        ];
        for order in orders {
            let bytes = order.encode();
            assert_eq!(Order::decode(&bytes), Some(order.clone()));
            assert!((0..bytes.len()).all(|length| Order::decode(&bytes[..length]).is_none()));
            let bytes = register.encode();
            assert_eq!(Register::decode(&bytes), Some(register.clone()));
            assert!((0..bytes.len()).all(|length| Register::decode(&bytes[..length]).is_none()));
            register.apply(&order);
        }
        assert_eq!(register.primary(), Some(3));
        assert_eq!(Register::decode(&register.encode()), Some(register.clone()));
        register.apply(&change(2, &[1, 4]));
        assert_eq!(Register::decode(&register.encode()), Some(register.clone()));
        let bytes = register.encode();
        assert!((0..bytes.len()).all(|length| Register::decode(&bytes[..length]).is_none()));
        let settle = Order::Settle { term: 2 };
        assert_eq!(Order::decode(&settle.encode()), Some(settle));
    }

    proptest::proptest! {
        #[test]
        fn hostile_bytes_are_refused_or_read_but_never_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..80)) {
            let _ = (Order::decode(&bytes), Register::decode(&bytes));
        }
    }
}
