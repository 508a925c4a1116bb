//! The members of the simulation, what they say to each other, and a random number by seed.

use std::collections::{BTreeMap, BTreeSet};

use beeline_documents::replica::conduct::{Conduct, Standing, Timing};
use beeline_documents::replica::register::{Order, Place, Register};

pub(super) const MEMBERS: u16 = 3;
pub(super) const TIMING: Timing = Timing { silence_ms: 300, lease_ms: 600 };

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    pub(super) fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }
}

#[derive(Clone, Debug)]
pub(super) enum Message {
    Find { term: u64, session: u64, log: Vec<Place> },
    Found { term: u64, session: u64, kept: usize },
    Fetch { term: u64, session: u64, after: u64 },
    Entries { term: u64, session: u64, entries: Vec<Place>, upto: u64 },
    Report { term: u64, applied: u64, setting: BTreeSet<u16> },
    Heard { term: u64, commit: u64 },
}

pub(super) struct Following {
    pub(super) term: u64,
    pub(super) source: u16,
    pub(super) session: u64,
    pub(super) in_step: bool,
    pub(super) asked_ms: u64,
    pub(super) fetched: u64,
    pub(super) applied: u64,
    pub(super) queue: Vec<(Vec<Place>, u64)>,
}

pub(super) struct Member {
    pub(super) id: u16,
    pub(super) log: Vec<Place>,
    pub(super) register: Register,
    /// Orders of the log that were applied here.
    pub(super) seen: usize,
    pub(super) conduct: Conduct,
    pub(super) following: Option<Following>,
    pub(super) standing: Option<Standing>,
    pub(super) led: u64,
    /// The term in which it was elected when it was started.
    pub(super) found: Option<u64>,
    pub(super) clock: u64,
    /// Its wall clock is behind by so much.
    pub(super) behind_ms: u64,
    pub(super) commit: u64,
    pub(super) asked: Option<(Order, u64)>,
    pub(super) paused_until_ms: u64,
    pub(super) reported_ms: u64,
    /// The members that its configuration names.
    pub(super) setting: BTreeSet<u16>,
    /// What the others said that theirs name.
    pub(super) told: BTreeMap<u16, BTreeSet<u16>>,
    pub(super) is_running: bool,
}

pub(super) fn founders() -> BTreeSet<u16> {
    (1..=MEMBERS).collect()
}

impl Member {
    pub(super) fn new(id: u16, setting: BTreeSet<u16>, now_ms: u64) -> Self {
        Self {
            id,
            log: Vec::new(),
            register: Register::default(),
            seen: 0,
            conduct: Conduct::new(id, setting.clone(), TIMING, now_ms),
            following: None,
            standing: None,
            led: 0,
            found: None,
            clock: 0,
            behind_ms: u64::from(id) * 97 % 200,
            commit: 0,
            asked: None,
            paused_until_ms: 0,
            reported_ms: 0,
            is_running: setting.contains(&id),
            setting,
            told: BTreeMap::new(),
        }
    }

    /// The voters that it proposes with a term.
    pub(super) fn voters(&self) -> BTreeSet<u16> {
        let settled = self.register.settled();
        if settled.is_empty() { self.setting.clone() } else { settled.clone() }
    }

    pub(super) fn last(&self) -> Place {
        self.log.last().copied().unwrap_or_default()
    }

    /// What a process that was killed has when it comes back.
    pub(super) fn restart(&mut self, now_ms: u64) {
        let fresh = Self::new(self.id, self.setting.clone(), now_ms);
        let (log, register, seen) =
            (std::mem::take(&mut self.log), self.register.clone(), self.seen);
        let found = (register.primary() == Some(self.id)).then_some(register.term);
        *self = Self { log, register, seen, found, is_running: self.is_running, ..fresh };
        self.clock = self.last().time;
    }

    pub(super) fn report_of(&self, term: u64, applied: u64) -> Message {
        Message::Report { term, applied, setting: self.setting.clone() }
    }

    pub(super) fn writes(&self, now_ms: u64) -> bool {
        let lease = self
            .standing
            .as_ref()
            .is_some_and(|standing| standing.contact_ms(now_ms) + TIMING.lease_ms > now_ms);
        self.led != 0 && self.led == self.register.term && lease
    }

    pub(super) fn write(&mut self, now_ms: u64) {
        self.clock = (self.clock + 1).max(now_ms.saturating_sub(self.behind_ms));
        self.log.push(Place { term: self.led, time: self.clock });
    }
}
