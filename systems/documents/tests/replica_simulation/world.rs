//! The world of the simulation: the log of the cluster, messages, faults, the operator, and the checker.

use std::collections::{BTreeMap, BTreeSet};

use beeline_documents::replica::conduct::{Duty, Report, Standing};
use beeline_documents::replica::register::{Ballot, Order, Place, Register};

use crate::members::{Following, MEMBERS, Member, Message, Random, founders};

const STEP_MS: u64 = 5;
/// Virtual time with faults, and after them.
const FAULTY_MS: u64 = 15_000;
const CALM_MS: u64 = 6_000;
/// The operator ends a change within.
const CHANGE_MS: u64 = 6_000;

/// A bug put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    None,
    /// A member that applied a newer term still acknowledges to the older primary.
    AcknowledgesBehindTheFence,
    /// A member takes entries that the primary of another term sent.
    TakesEntriesOfAnotherTerm,
    /// A member takes back more than the primary lacks.
    TakesBackTooMuch,
    /// A member votes without saying how far its log goes.
    VotesBlindly,
    /// A member follows without a look where the logs part.
    FollowsWithoutLooking,
    /// A member that was started again goes on to lead in the term in which its last process did.
    LeadsAgain,
    /// What a majority has is a time that goes on to count in the next term.
    CountsTimesOfAnotherTerm,
    /// New voters count alone from the moment they are proposed.
    CountsNewVotersAlone,
    /// A primary says that the voters before count no more without an entry at a majority of the new ones.
    SettlesAtOnce,
}

pub(super) struct World {
    seed: u64,
    bug: Bug,
    random: Random,
    now_ms: u64,
    pub(super) members: Vec<Member>,
    /// The cluster's log, and orders on their way to it.
    orders: Vec<Order>,
    proposals: Vec<(u64, Order)>,
    /// When, from, to.
    messages: Vec<(u64, u16, u16, Message)>,
    /// Pairs that hear nothing of each other, and members that hear nothing of the log.
    cut: BTreeSet<(u16, u16)>,
    deaf: BTreeSet<u16>,
    /// With the term in which a primary acknowledged it first.
    pub(super) acknowledged: BTreeMap<Place, u64>,
    pub(super) leaders: BTreeMap<u64, u16>,
    sessions: u64,
    pub(super) taken_back: usize,
    problem: Option<String>,
    /// The set that the operator wants, the members to be started with it, and those to be stopped then.
    wanted: BTreeSet<u16>,
    to_start: Vec<u16>,
    to_stop: Vec<u16>,
    pub(super) changes: usize,
}

impl World {
    pub(super) fn new(seed: u64, bug: Bug) -> Self {
        Self::of(seed, bug, MEMBERS)
    }

    pub(super) fn of(seed: u64, bug: Bug, members: u16) -> Self {
        Self {
            seed,
            bug,
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now_ms: 0,
            members: (1..=members).map(|id| Member::new(id, founders(), 0)).collect(),
            orders: Vec::new(),
            proposals: Vec::new(),
            messages: Vec::new(),
            cut: BTreeSet::new(),
            deaf: BTreeSet::new(),
            acknowledged: BTreeMap::new(),
            leaders: BTreeMap::new(),
            sessions: 0,
            taken_back: 0,
            problem: None,
            wanted: founders(),
            to_start: Vec::new(),
            to_stop: Vec::new(),
            changes: 0,
        }
    }

    fn is_changing(&self) -> bool {
        self.members.len() > usize::from(MEMBERS)
    }

    fn random_member(&mut self) -> usize {
        self.random.below(self.members.len() as u64) as usize
    }

    /// The register of which everything proposed so far is part.
    fn decided(&self) -> Register {
        let mut register = Register::default();
        for order in &self.orders {
            register.apply(order);
            if self.bug == Bug::CountsNewVotersAlone {
                register.before.clear();
            }
        }
        register
    }

    /// Changes the set: a member joins, leaves, or takes the place of another. The members of the new set are
    /// started with its setting, then what left is stopped.
    fn operate(&mut self, faulty: bool) {
        let pace = if faulty { 2 } else { 1 };
        if !self.to_start.is_empty() {
            if self.random.one_in(15 * pace) {
                let at = self.random.below(self.to_start.len() as u64) as usize;
                let index = usize::from(self.to_start.swap_remove(at)) - 1;
                let (setting, now_ms) = (self.wanted.clone(), self.now_ms);
                let member = &mut self.members[index];
                (member.setting, member.is_running) = (setting, true);
                member.restart(now_ms);
                self.forget(index);
            }
            return;
        }
        if !self.to_stop.is_empty() {
            if self.random.one_in(15 * pace)
                && let Some(id) = self.to_stop.pop()
            {
                let index = usize::from(id) - 1;
                self.members[index].is_running = false;
                self.forget(index);
            }
            return;
        }
        if !faulty || !self.random.one_in(40) {
            return;
        }
        let register = self.decided();
        if register.voters != self.wanted || !register.before.is_empty() {
            return;
        }
        let of = |world: &mut Self, inside: bool| {
            let id = world.random_member() as u16 + 1;
            (world.wanted.contains(&id) == inside).then_some(id)
        };
        let (mut wanted, kind) = (self.wanted.clone(), self.random.below(4));
        if kind != 0
            && let Some(joins) = of(self, false)
        {
            wanted.insert(joins);
        }
        if kind != 1
            && wanted.len() > usize::from(MEMBERS)
            && let Some(leaves) = of(self, true)
        {
            wanted.remove(&leaves);
        }
        if wanted != self.wanted {
            self.changes += 1;
            self.to_stop = self.wanted.difference(&wanted).copied().collect();
            self.to_start = wanted.iter().copied().collect();
            self.wanted = wanted;
        }
    }

    /// What was on its way to or from a member that ended is lost.
    fn forget(&mut self, index: usize) {
        let gone = index as u16 + 1;
        self.messages.retain(|(_, from, to, _)| *from != gone && *to != gone);
    }

    fn fails(&mut self, what: String) {
        let (seed, bug, at) = (self.seed, self.bug, self.now_ms);
        self.problem.get_or_insert_with(|| format!("seed {seed}, {bug:?}, at {at} ms: {what}"));
    }

    fn send(&mut self, from: u16, to: u16, message: Message) {
        if self.cut.contains(&(from.min(to), from.max(to))) {
            return;
        }
        let delay = match self.random.below(20) {
            0 => 50 + self.random.below(400),
            _ => 1 + self.random.below(15),
        };
        self.messages.push((self.now_ms + delay, from, to, message));
    }

    fn faults(&mut self) {
        let members = self.members.len() as u64;
        let id = |random: &mut Random| 1 + random.below(members) as u16;
        if self.random.one_in(150) {
            let (a, b) = (id(&mut self.random), id(&mut self.random));
            let pair = (a.min(b), a.max(b));
            if !self.cut.remove(&pair) && a != b {
                self.cut.insert(pair);
            }
        }
        if self.random.one_in(200) {
            let deaf = id(&mut self.random);
            if !self.deaf.remove(&deaf) {
                self.deaf.insert(deaf);
            }
        }
        if self.random.one_in(250) {
            let at = usize::from(id(&mut self.random)) - 1;
            self.members[at].paused_until_ms = self.now_ms + 50 + self.random.below(1500);
        }
        if self.random.one_in(300) {
            let at = usize::from(id(&mut self.random)) - 1;
            let now_ms = self.now_ms;
            self.members[at].restart(now_ms);
            self.forget(at);
        }
    }

    fn propose(&mut self, member: usize, order: Order) {
        let again = |asked: &(Order, u64)| asked.0 == order && self.now_ms < asked.1 + 100;
        if self.members[member].asked.as_ref().is_some_and(again) {
            return;
        }
        self.members[member].asked = Some((order.clone(), self.now_ms));
        if !self.deaf.contains(&self.members[member].id) {
            let delay = 2 + self.random.below(60);
            self.proposals.push((self.now_ms + delay, order));
        }
    }

    fn step(&mut self, faulty: bool) {
        self.now_ms += STEP_MS;
        if faulty {
            self.faults();
        }
        if self.is_changing() {
            self.operate(faulty);
        }
        let now_ms = self.now_ms;
        let (due, later) =
            std::mem::take(&mut self.proposals).into_iter().partition(|(at, _)| *at <= now_ms);
        self.proposals = later;
        let due: Vec<(u64, Order)> = due;
        self.orders.extend(due.into_iter().map(|(_, order)| order));
        for index in 0..self.members.len() {
            if self.members[index].paused_until_ms > now_ms || !self.members[index].is_running {
                continue;
            }
            self.hear_log(index);
            self.act(index);
        }
        let mut due = Vec::new();
        let members = &self.members;
        self.messages.retain(|(at, from, to, message)| {
            // A paused member reads what came when it wakes.
            let ready = *at <= now_ms && members[usize::from(*to) - 1].paused_until_ms <= now_ms;
            if ready {
                due.push((*at, *from, *to, message.clone()));
            }
            !ready
        });
        due.sort_by_key(|(at, ..)| *at);
        for (_, from, to, message) in due {
            self.receive(usize::from(to) - 1, from, message);
        }
    }

    fn hear_log(&mut self, index: usize) {
        let slow = self.deaf.contains(&self.members[index].id) || self.random.one_in(3);
        if slow {
            return;
        }
        let member = &mut self.members[index];
        while let Some(order) = self.orders.get(member.seen) {
            member.register.apply(order);
            if self.bug == Bug::CountsNewVotersAlone {
                member.register.before.clear();
            }
            member.seen += 1;
        }
    }

    fn act(&mut self, index: usize) {
        let now_ms = self.now_ms;
        let member = &mut self.members[index];
        let register = member.register.clone();
        let duty = member.conduct.duty(&register, now_ms);
        if member.led != 0 && duty != Duty::Lead(member.led) {
            (member.led, member.standing) = (0, None);
        }
        // What was under way ends some time after the term.
        let goes_on = matches!(duty, Duty::Follow { .. } | Duty::Suspect(_))
            || self.bug == Bug::AcknowledgesBehindTheFence;
        if !goes_on && self.random.one_in(4) {
            member.following = None;
        }
        match duty {
            Duty::Wait => {}
            Duty::Begin(term) => {
                let voters = member.voters();
                self.propose(index, Order::Begin { term, voters });
            }
            Duty::Suspect(term) => {
                let member = member.id;
                self.propose(index, Order::Suspect { term, member });
            }
            Duty::Vote(term) => {
                let last = match self.bug {
                    Bug::VotesBlindly => Place::default(),
                    _ => member.last(),
                };
                let vote = Order::Vote {
                    term,
                    member: member.id,
                    ballot: Ballot { last, electable: true },
                };
                self.propose(index, vote);
            }
            Duty::Lead(term) if member.found == Some(term) && self.bug != Bug::LeadsAgain => {
                let voters = member.voters();
                self.propose(index, Order::Begin { term: term + 1, voters });
            }
            Duty::Lead(term) if member.led != term => self.lead(index, term),
            Duty::Lead(_) => {
                // The end is quiet, so that all logs come to be the same.
                let busy = now_ms < FAULTY_MS + CALM_MS / 2;
                // Now and then nothing is written for a while, and the logs come to be equal.
                let writes = busy && (now_ms / 600).is_multiple_of(2);
                if writes && member.writes(now_ms) && self.random.one_in(4) {
                    self.members[index].write(now_ms);
                    self.acknowledge(index);
                }
                // A batch that is refused has taken a time.
                if busy && self.random.one_in(8) {
                    self.members[index].clock += self.random.below(300);
                }
                self.look_at_voters(index, &register);
            }
            Duty::Follow { term, source } => self.follow(index, term, source),
        }
        self.apply(index);
    }

    fn lead(&mut self, index: usize, term: u64) {
        let (now_ms, bug) = (self.now_ms, self.bug);
        let id = self.members[index].id;
        if let Some(other) = self.leaders.insert(term, id).filter(|other| *other != id) {
            self.fails(format!("members {other} and {id} lead in term {term}"));
        }
        // One that was started again may not have heard of newer terms yet, and no majority hears it any more.
        let log = &self.members[index].log;
        let lacks = |(place, told): &(&Place, &u64)| **told < term && !log.contains(place);
        let missing = self.acknowledged.iter().find(lacks).map(|(place, _)| place);
        if let Some(missing) = missing.copied() {
            self.fails(format!("member {id} leads term {term} without {missing:?}"));
        }
        let member = &mut self.members[index];
        member.led = term;
        member.clock = member.clock.max(member.last().time);
        if bug != Bug::CountsTimesOfAnotherTerm {
            member.commit = member.commit.min(member.last().time);
        }
        member.write(now_ms);
        member.following = None;
        let first = member.last().time;
        let Register { voters, before, .. } = member.register.clone();
        let standing = Standing::new(term, id, voters, first, now_ms).joint(before, now_ms);
        member.standing = Some(standing.beside(member.setting.clone(), now_ms));
        member.told.clear();
        self.acknowledge(index);
    }

    fn look_at_voters(&mut self, index: usize, register: &Register) {
        let member = &mut self.members[index];
        let Some(standing) = &mut member.standing else { return };
        if register.before.is_empty() {
            standing.settle();
        }
        let (setting, told) = (&member.setting, &member.told);
        let same = |other: u16| told.get(&other) == Some(setting);
        let order = match self.bug {
            Bug::SettlesAtOnce if !register.before.is_empty() => {
                Some(Order::Settle { term: standing.term })
            }
            _ => standing.change_of_voters(register, setting, member.clock, same),
        };
        if let Some(order) = order {
            self.propose(index, order);
        }
    }

    /// The newest write is answered at once where its time counts for a majority already.
    fn acknowledge(&mut self, index: usize) {
        let member = &self.members[index];
        let last = member.last();
        if last.time <= member.commit {
            self.acknowledged.entry(last).or_insert(member.led);
        }
    }

    fn follow(&mut self, index: usize, term: u64, source: u16) {
        let now_ms = self.now_ms;
        // Where others are stands in the configuration.
        if !self.members[index].setting.contains(&source) {
            self.members[index].following = None;
            return;
        }
        let id = self.members[index].id;
        let stale = match &self.members[index].following {
            Some(known) => known.term != term || now_ms > known.asked_ms + 250,
            None => true,
        };
        if stale {
            self.sessions += 1;
            let session = self.sessions;
            let member = &mut self.members[index];
            let (log, applied) = (member.log.clone(), member.last().time);
            let in_step = self.bug == Bug::FollowsWithoutLooking;
            member.following = Some(Following {
                term,
                source,
                session,
                in_step,
                asked_ms: now_ms,
                fetched: applied,
                applied,
                queue: Vec::new(),
            });
            let message = match in_step {
                true => Message::Fetch { term, session, after: applied },
                false => Message::Find { term, session, log },
            };
            self.send(id, source, message);
        }
        let due = now_ms >= self.members[index].reported_ms + 50;
        let member = &mut self.members[index];
        if let Some(known) = member.following.as_ref().filter(|known| known.in_step && due) {
            member.reported_ms = now_ms;
            let (source, message) = (known.source, member.report_of(known.term, known.applied));
            self.send(id, source, message);
        }
    }

    /// The applier: what was fetched is applied some time later, and reported then.
    fn apply(&mut self, index: usize) {
        let ready = !self.random.one_in(3);
        let (bug, id) = (self.bug, self.members[index].id);
        let member = &mut self.members[index];
        let Some(following) = member.following.as_mut() else { return };
        if !ready || following.queue.is_empty() {
            return;
        }
        let (entries, upto) = following.queue.remove(0);
        member.log.extend(entries);
        member.clock = member.clock.max(upto);
        following.applied = upto;
        let (term, source) = (following.term, following.source);
        let current = member.register.term == term && member.register.primary() == Some(source);
        if current || bug == Bug::AcknowledgesBehindTheFence {
            let report = member.report_of(term, upto);
            self.send(id, source, report);
        }
    }

    fn receive(&mut self, index: usize, from: u16, message: Message) {
        let (now_ms, bug) = (self.now_ms, self.bug);
        let id = self.members[index].id;
        let member = &mut self.members[index];
        let known = member.setting.contains(&from) || member.register.counts(from);
        if !member.is_running || !known && member.led != 0 {
            return;
        }
        let leads = |term: u64| member.led == term && term != 0;
        match message {
            Message::Find { term, session, log } if leads(term) => {
                let kept = log.iter().rposition(|place| member.log.binary_search(place).is_ok());
                let kept = kept.map_or(0, |at| at + 1);
                self.contact(index, term, from);
                self.send(id, from, Message::Found { term, session, kept });
            }
            Message::Fetch { term, session, after } if leads(term) => {
                let upto = member.clock;
                let start = member.log.partition_point(|place| place.time <= after);
                // Small pieces while there are faults; what is behind by then catches up afterwards.
                let most = if now_ms < FAULTY_MS { 4 } else { 64 };
                let whole = member.log.len() - start <= most;
                let entries: Vec<Place> = member.log[start..].iter().take(most).copied().collect();
                let upto = if whole { upto } else { entries.last().map_or(upto, |last| last.time) };
                // Without news the primary keeps a fetch for a while.
                let kept = entries.is_empty() && !self.random.one_in(8);
                let upto = if kept { after } else { upto };
                self.contact(index, term, from);
                self.send(id, from, Message::Entries { term, session, entries, upto });
            }
            Message::Report { term, applied, setting } => {
                let Some(standing) = member.standing.as_mut() else { return };
                member.told.insert(from, setting);
                standing.report(term, from, Report { applied, durable: applied, at_ms: now_ms });
                let (term, commit) = (standing.term, standing.commit(member.clock));
                // What the primary acknowledges now.
                let start = member.log.partition_point(|place| place.time <= member.commit);
                let told: Vec<Place> = member.log[start..]
                    .iter()
                    .filter(|place| place.time <= commit)
                    .copied()
                    .collect();
                member.commit = member.commit.max(commit);
                for place in told {
                    self.acknowledged.entry(place).or_insert(term);
                }
                self.send(id, from, Message::Heard { term, commit });
            }
            Message::Heard { term, commit } => {
                member.conduct.heard(term, now_ms);
                // A session of another term has ended.
                if member.following.as_ref().is_some_and(|one| one.term == term) {
                    member.commit = member.commit.max(commit);
                }
            }
            Message::Found { term, session, kept } => {
                let Some(following) = member
                    .following
                    .as_mut()
                    .filter(|one| (one.term, one.session) == (term, session))
                else {
                    return;
                };
                following.asked_ms = now_ms;
                following.in_step = true;
                let kept = if bug == Bug::TakesBackTooMuch { kept.saturating_sub(3) } else { kept };
                let gone = member.log.split_off(kept);
                let last = member.log.last().map_or(0, |last| last.time);
                (following.fetched, following.applied) = (last, last);
                let source = following.source;
                if bug != Bug::CountsTimesOfAnotherTerm {
                    member.commit = member.commit.min(last);
                }
                member.conduct.heard(term, now_ms);
                self.taken_back += gone.len();
                if let Some(lost) = gone.iter().find(|place| self.acknowledged.contains_key(place))
                {
                    self.fails(format!("member {id} takes back {lost:?}"));
                }
                self.send(id, source, Message::Fetch { term, session, after: last });
            }
            Message::Entries { term, session, entries, upto } => {
                let own = |one: &&mut Following| {
                    (one.term, one.session) == (term, session)
                        || bug == Bug::TakesEntriesOfAnotherTerm
                };
                let Some(following) = member.following.as_mut().filter(own) else {
                    return;
                };
                following.asked_ms = now_ms;
                following.fetched = following.fetched.max(upto);
                following.queue.push((entries, upto));
                let (source, after) = (following.source, following.fetched);
                member.conduct.heard(term, now_ms);
                self.send(id, source, Message::Fetch { term, session, after });
            }
            Message::Find { .. } | Message::Fetch { .. } => {}
        }
    }

    fn contact(&mut self, index: usize, term: u64, from: u16) {
        let now_ms = self.now_ms;
        if let Some(standing) = &mut self.members[index].standing {
            standing.contact(term, from, now_ms);
        }
    }

    pub(super) fn run(mut self) -> Result<Self, String> {
        while self.now_ms < FAULTY_MS && self.problem.is_none() {
            self.step(true);
        }
        self.cut.clear();
        self.deaf.clear();
        self.members.iter_mut().for_each(|member| member.paused_until_ms = 0);
        // A change under way is ended before all is quiet.
        let change_ms = if self.is_changing() { CHANGE_MS } else { 0 };
        while self.now_ms < FAULTY_MS + CALM_MS + change_ms && self.problem.is_none() {
            self.step(false);
        }
        if self.problem.is_none() {
            self.check_calm();
        }
        match self.problem.take() {
            Some(problem) => Err(problem),
            None => Ok(self),
        }
    }

    fn check_calm(&mut self) {
        let register = self.decided();
        if register.voters != self.wanted || !register.before.is_empty() {
            let wanted = &self.wanted;
            self.fails(format!("{:?} vote, not {wanted:?}", register.voters));
        }
        let leading: Vec<u16> = self
            .members
            .iter()
            .filter(|member| member.writes(self.now_ms))
            .map(|member| member.id)
            .collect();
        if leading.len() != 1 {
            self.fails(format!("{leading:?} lead once faults have ended"));
        }
        let wanted: Vec<&Member> =
            self.members.iter().filter(|one| self.wanted.contains(&one.id)).collect();
        let first = &wanted[0].log;
        if wanted.iter().any(|member| member.log != *first) {
            let lengths: Vec<usize> = wanted.iter().map(|one| one.log.len()).collect();
            self.fails(format!("logs of {lengths:?} entries differ once faults have ended"));
            return;
        }
        let lost = self.acknowledged.keys().find(|place| !first.contains(place)).copied();
        if let Some(lost) = lost {
            self.fails(format!("{lost:?} is lost"));
        }
    }
}
