//! What a member does next, and how far a majority is: decisions without clock, thread or socket.
//!
//! The member's conductor asks here, and so does the simulation of a whole set.
//! Times are milliseconds of a clock that nobody sets.

use std::collections::{BTreeMap, BTreeSet};

use crate::replica::register::{Order, Phase, Register, majority};

/// A member's turn among those that find a primary silent: so far apart, so that mostly one proposes.
const STAGGER_MS: u64 = 60;

/// How patient a member is.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// A primary that is not heard for so long is taken for dead.
    pub silence_ms: u64,
    /// A primary that a majority did not talk to for so long takes no writes.
    pub lease_ms: u64,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Nothing.
    Wait,
    /// Propose this term.
    Begin(u64),
    /// Say that the primary of this term is not heard.
    Suspect(u64),
    /// Vote in this term.
    Vote(u64),
    /// Lead in this term.
    Lead(u64),
    /// Follow.
    Follow {
        /// In this term.
        term: u64,
        /// This member.
        source: u16,
    },
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Conduct {
    me: u16,
    voters: BTreeSet<u16>,
    timing: Timing,
    /// What was seen of the register last: the term, and whether it is elected.
    seen: (u64, bool),
    since_ms: u64,
    heard_ms: u64,
}

impl Conduct {
    /// Of member `me` of a set, from now on.
    #[must_use]
    pub fn new(me: u16, voters: BTreeSet<u16>, timing: Timing, now_ms: u64) -> Self {
        Self { me, voters, timing, seen: (0, false), since_ms: now_ms, heard_ms: now_ms }
    }

    fn stagger_ms(&self) -> u64 {
        self.voters.iter().position(|voter| *voter == self.me).unwrap_or(0) as u64 * STAGGER_MS
    }

    /// The primary of this term was heard.
    pub fn heard(&mut self, term: u64, now_ms: u64) {
        if self.seen == (term, true) {
            self.heard_ms = self.heard_ms.max(now_ms);
        }
    }

    /// What to do, as the register says at this moment.
    pub fn duty(&mut self, register: &Register, now_ms: u64) -> Duty {
        let seen = (register.term, register.primary().is_some());
        if seen != self.seen {
            (self.seen, self.since_ms, self.heard_ms) = (seen, now_ms, now_ms);
        }
        let (term, stagger) = (register.term, self.stagger_ms());
        let waited = |since: u64, patience: u64| now_ms.saturating_sub(since) >= patience + stagger;
        match register.phase {
            Phase::Idle if waited(self.since_ms, 0) => Duty::Begin(1),
            Phase::Voting(_) if !register.has_vote_of(self.me) => Duty::Vote(term),
            Phase::Voting(_)
                if register.counts(self.me)
                    && waited(self.since_ms, 2 * self.timing.silence_ms) =>
            {
                Duty::Begin(term + 1)
            }
            Phase::Elected(member) if member == self.me => Duty::Lead(term),
            Phase::Elected(_)
                if register.counts(self.me)
                    && !register.suspects.contains(&self.me)
                    && waited(self.heard_ms, self.timing.silence_ms) =>
            {
                Duty::Suspect(term)
            }
            Phase::Elected(source) => Duty::Follow { term, source },
            _ => Duty::Wait,
        }
    }
}

/// What a member told the primary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The time up to which it has everything.
    pub applied: u64,
    /// The time up to which it would have everything after a crash.
    pub durable: u64,
    /// When it was told.
    pub at_ms: u64,
}

/// How far the members are, as the primary of a term knows.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The term.
    pub term: u64,
    me: u16,
    /// A majority of each of these counts: the voters, and those before while the voters change.
    sets: Vec<BTreeSet<u16>>,
    /// The time of the term's first entry.
    first: u64,
    reports: BTreeMap<u16, Report>,
    commit: u64,
}

impl Standing {
    /// Of the primary `me`, whose term begins with the entry of `first`. The members count as heard now.
    #[must_use]
    pub fn new(term: u64, me: u16, voters: BTreeSet<u16>, first: u64, now_ms: u64) -> Self {
        let (sets, reports) = (vec![voters.clone()], BTreeMap::new());
        Self { term, me, sets, first, reports, commit: 0 }.beside(voters, now_ms)
    }

    /// With the voters before, of which a majority counts as well; none: they have not changed.
    #[must_use]
    pub fn joint(mut self, before: BTreeSet<u16>, now_ms: u64) -> Self {
        if before.is_empty() {
            return self;
        }
        self.sets.push(before.clone());
        self.beside(before, now_ms)
    }

    /// With members that tell how far they are, whether they vote or not.
    #[must_use]
    pub fn beside(mut self, members: impl IntoIterator<Item = u16>, now_ms: u64) -> Self {
        let heard = Report { at_ms: now_ms, ..Report::default() };
        for member in members {
            if member != self.me {
                self.reports.entry(member).or_insert(heard);
            }
        }
        self
    }

    /// The voters alone count from now on.
    pub fn settle(&mut self) {
        self.sets.truncate(1);
        self.advance();
    }

    /// Takes a report. One of another term says nothing: its member may have fenced this one off since.
    pub fn report(&mut self, term: u64, member: u16, report: Report) -> bool {
        if term != self.term || member == self.me {
            return false;
        }
        let Some(known) = self.reports.get_mut(&member) else { return false };
        known.applied = known.applied.max(report.applied);
        known.durable = known.durable.max(report.durable);
        known.at_ms = known.at_ms.max(report.at_ms);
        self.advance();
        true
    }

    /// A member asked for something: it lives.
    pub fn contact(&mut self, term: u64, member: u16, now_ms: u64) {
        if term == self.term
            && let Some(known) = self.reports.get_mut(&member)
        {
            known.at_ms = known.at_ms.max(now_ms);
        }
    }

    /// The value that a majority of a set reaches: the primary has all there is.
    fn reached_in(&self, set: &BTreeSet<u16>, of: impl Fn(&Report) -> u64) -> u64 {
        let mut all: Vec<u64> =
            set.iter().filter_map(|member| self.reports.get(member)).map(of).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        match majority(set.len()) - usize::from(set.contains(&self.me)) {
            0 => u64::MAX,
            needed => all.get(needed - 1).copied().unwrap_or(0),
        }
    }

    /// The value that a majority of each set reaches.
    fn reached(&self, of: impl Fn(&Report) -> u64) -> u64 {
        self.sets.iter().map(|set| self.reached_in(set, &of)).min().unwrap_or(0)
    }

    fn advance(&mut self) {
        // An entry of an older term that a majority has may still be missing in the log of the next primary, until
        // an entry of this term lies behind it at a majority.
        let reached = self.reached(|report| report.durable);
        if reached >= self.first {
            self.commit = self.commit.max(reached);
        }
    }

    /// Everything up to this time is durable at a majority, and in every later primary's log. A set of one member
    /// has all there is.
    #[must_use]
    pub fn commit(&self, latest: u64) -> u64 {
        if self.reached(|report| report.durable) == u64::MAX { latest } else { self.commit }
    }

    /// Whether a majority has everything up to a time.
    #[must_use]
    pub fn is_at_majority(&self, time: u64) -> bool {
        self.reached(|report| report.applied) >= time
    }

    /// What the primary proposes about the voters, with this setting of its own and all there is up to `latest`:
    /// that those before count no more, or that the members of its setting vote, once a majority of them is there,
    /// says the same setting (`same`), and has an entry of this term.
    #[must_use]
    pub fn change_of_voters(
        &self,
        register: &Register,
        setting: &BTreeSet<u16>,
        latest: u64,
        same: impl Fn(u16) -> bool,
    ) -> Option<Order> {
        if register.term != self.term || self.commit(latest) < self.first {
            return None;
        }
        if !register.before.is_empty() {
            return Some(Order::Settle { term: self.term });
        }
        let agreed = setting.iter().filter(|member| **member == self.me || same(**member)).count();
        let ready = setting.contains(&self.me)
            && agreed >= majority(setting.len())
            && self.reached_in(setting, |report| report.durable) >= self.first;
        (ready && register.voters != *setting)
            .then(|| Order::Begin { term: self.term + 1, voters: setting.clone() })
    }

    /// Whether so many members, the primary with them, have everything up to a time.
    #[must_use]
    pub fn has(&self, members: usize, time: u64, journal: bool) -> bool {
        let reached = |report: &Report| {
            if journal { report.durable.min(report.applied) } else { report.applied }
        };
        1 + self.reports.values().filter(|report| reached(report) >= time).count() >= members
    }

    /// When a majority was heard last; `now` where the primary is one by itself.
    #[must_use]
    pub fn contact_ms(&self, now_ms: u64) -> u64 {
        self.reached(|report| report.at_ms).min(now_ms)
    }

    /// What each other member told last.
    #[must_use]
    pub fn reports(&self) -> &BTreeMap<u16, Report> {
        &self.reports
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replica::register::{Ballot, Order};

    const TIMING: Timing = Timing { silence_ms: 1000, lease_ms: 2000 };

    fn report(applied: u64, durable: u64, at_ms: u64) -> Report {
        Report { applied, durable, at_ms }
    }

    #[test]
    fn a_majority_has_what_it_has_durably_and_of_this_term() {
        let mut standing = Standing::new(7, 1, [1, 2, 3].into(), 100, 0);
        assert!(standing.report(7, 2, report(99, 99, 5)));
        assert_eq!(standing.commit(500), 0, "of an older term");
        assert!(!standing.report(6, 2, report(200, 200, 6)), "told to another primary");
        assert!(!standing.report(7, 9, report(200, 200, 6)), "no member");
        standing.report(7, 2, report(150, 120, 7));
        assert_eq!(standing.commit(500), 120);
        assert!(standing.has(2, 150, false) && !standing.has(2, 150, true));
        assert!(!standing.has(3, 100, false));
        standing.report(7, 2, report(90, 90, 8));
        assert_eq!(standing.commit(500), 120, "it never goes back");
        assert_eq!(standing.contact_ms(50), 8);
        let alone = Standing::new(1, 1, [1].into(), 1, 0);
        assert_eq!((alone.commit(500), alone.contact_ms(50)), (500, 50));
    }

    #[test]
    fn while_voters_change_both_majorities_acknowledge() {
        let mut standing = Standing::new(7, 1, [1, 4, 5].into(), 100, 0).joint([1, 2, 3].into(), 0);
        standing.report(7, 4, report(200, 200, 5));
        standing.report(7, 5, report(200, 200, 5));
        assert_eq!((standing.commit(500), standing.contact_ms(50)), (0, 0));
        assert!(!standing.is_at_majority(150));
        standing.report(7, 2, report(150, 150, 6));
        assert_eq!((standing.commit(500), standing.contact_ms(50)), (150, 5));
        standing.settle();
        assert_eq!(standing.commit(500), 200);
        // A primary that leaves the set counts for nothing in it.
        let mut leaving = Standing::new(7, 1, [2, 3].into(), 100, 0);
        leaving.report(7, 2, report(200, 200, 5));
        assert_eq!(leaving.commit(500), 0);
        leaving.report(7, 3, report(150, 150, 5));
        assert_eq!(leaving.commit(500), 150);
    }

    #[test]
    fn a_primary_changes_voters_once_a_majority_of_the_new_ones_names_them_and_has_its_entries() {
        let mut register = Register { term: 7, voters: [1, 2, 3].into(), ..Register::default() };
        register.phase = Phase::Elected(1);
        let setting: BTreeSet<u16> = [1, 2, 4, 5].into();
        let mut standing = Standing::new(7, 1, [1, 2, 3].into(), 100, 0).beside(setting.clone(), 0);
        let change = |standing: &Standing, register: &Register, same: &[u16]| {
            standing.change_of_voters(register, &setting, 500, |member| same.contains(&member))
        };
        standing.report(7, 2, report(200, 200, 5));
        assert_eq!(change(&standing, &register, &[2, 4]), None, "4 has nothing");
        standing.report(7, 4, report(100, 100, 5));
        assert_eq!(change(&standing, &register, &[2]), None, "4 was started with another setting");
        let begin = Order::Begin { term: 8, voters: setting.clone() };
        assert_eq!(change(&standing, &register, &[2, 4]), Some(begin.clone()));
        register.apply(&begin);
        assert_eq!(change(&standing, &register, &[2, 4]), None, "of another term");
        // Elected by both: those before count until its first entry is at both.
        register.phase = Phase::Elected(1);
        let mut standing = Standing::new(8, 1, setting.clone(), 300, 0).joint([1, 2, 3].into(), 0);
        standing.report(8, 4, report(300, 300, 5));
        standing.report(8, 5, report(300, 300, 5));
        assert_eq!(change(&standing, &register, &[2, 4]), None);
        standing.report(8, 3, report(300, 300, 5));
        assert_eq!(change(&standing, &register, &[2, 4]), Some(Order::Settle { term: 8 }));
        register.apply(&Order::Settle { term: 8 });
        assert_eq!(change(&standing, &register, &[2, 4, 5]), None, "nothing to change");
    }

    #[test]
    fn a_member_that_does_not_count_says_nothing() {
        let mut register = Register::default();
        let mut conduct = Conduct::new(4, [1, 2, 4].into(), TIMING, 0);
        register.apply(&Order::Begin { term: 1, voters: [1, 2, 3].into() });
        assert_eq!(conduct.duty(&register, 0), Duty::Wait);
        assert_eq!(conduct.duty(&register, 9000), Duty::Wait);
        register.phase = Phase::Elected(1);
        assert_eq!(conduct.duty(&register, 9000), Duty::Follow { term: 1, source: 1 });
        assert_eq!(conduct.duty(&register, 20_000), Duty::Follow { term: 1, source: 1 });
    }

    #[test]
    fn a_member_votes_follows_and_proposes_when_the_primary_is_silent() {
        let mut register = Register::default();
        let mut conduct = Conduct::new(2, [1, 2, 3].into(), TIMING, 0);
        assert_eq!(conduct.duty(&register, 10), Duty::Wait);
        assert_eq!(conduct.duty(&register, 60), Duty::Begin(1));
        register.apply(&Order::Begin { term: 1, voters: [1, 2, 3].into() });
        assert_eq!(conduct.duty(&register, 70), Duty::Vote(1));
        let ballot = Ballot { last: Default::default(), electable: true };
        register.apply(&Order::Vote { term: 1, member: 2, ballot });
        assert_eq!(conduct.duty(&register, 80), Duty::Wait);
        assert_eq!(conduct.duty(&register, 70 + 2060), Duty::Begin(2), "no majority came");
        register.apply(&Order::Vote { term: 1, member: 1, ballot });
        assert_eq!(conduct.duty(&register, 3000), Duty::Follow { term: 1, source: 1 });
        conduct.heard(1, 3500);
        conduct.heard(0, 9000);
        assert_eq!(conduct.duty(&register, 4559), Duty::Follow { term: 1, source: 1 });
        assert_eq!(conduct.duty(&register, 4560), Duty::Suspect(1));
        register.apply(&Order::Suspect { term: 1, member: 2 });
        assert_eq!(conduct.duty(&register, 4570), Duty::Follow { term: 1, source: 1 });
        let mut first = Conduct::new(1, [1, 2, 3].into(), TIMING, 0);
        assert_eq!(first.duty(&register, 0), Duty::Lead(1));
    }
}
