//! A member's conductor: does what [`Conduct`] says.
//!
//! One thread. It never waits for another member or for the log, so it notices within some milliseconds that
//! another term began.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_documents_query::error::Result;

use crate::engine::{Engine, lock};
use crate::replica::conduct::{Conduct, Duty, Standing};
use crate::replica::follow;
use crate::replica::register::{Ballot, Order};
use crate::replica::source::{Patience, Sources};
use crate::replica::{Propose, Replica, State};

/// Between two looks while nothing happens.
const LOOK: Duration = Duration::from_millis(20);
/// Between two attempts to propose the same.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a primary that stops waits for a majority to have everything.
const HAND_OVER: Duration = Duration::from_secs(1);
/// Between two looks whether the log is too long.
const TRIM: Duration = Duration::from_secs(20);

/// A session in which another member is followed.
struct Following {
    term: u64,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// See the module's documentation.
pub(crate) struct Conductor {
    replica: Arc<Replica>,
    engine: Arc<Engine>,
    propose: Box<dyn Propose>,
    sources: Arc<dyn Sources>,
    following: Option<Following>,
    /// The term this member leads in.
    led: u64,
    /// The term in which this member was elected when it started: another process led in it.
    found: Option<u64>,
    /// The term this member was elected in and could not lead, and the entries that it had applied by then.
    failed: Option<(u64, u64)>,
    asked: Option<(Order, Instant)>,
    under_way: Arc<AtomicBool>,
    trimmed: Instant,
}

impl Conductor {
    pub(crate) fn new(
        replica: &Arc<Replica>,
        engine: &Arc<Engine>,
        propose: Box<dyn Propose>,
        sources: Arc<dyn Sources>,
    ) -> Self {
        Self {
            replica: Arc::clone(replica),
            engine: Arc::clone(engine),
            propose,
            sources,
            following: None,
            led: 0,
            found: None,
            failed: None,
            asked: None,
            under_way: Arc::default(),
            trimmed: Instant::now(),
        }
    }

    pub(crate) fn run(mut self) {
        let replica = Arc::clone(&self.replica);
        let gate = Arc::clone(&replica.agreed.gate);
        let voters = replica.options.members.keys().copied().collect();
        let register = replica.agreed.now();
        self.found = register
            .primary()
            .filter(|primary| *primary == replica.options.me)
            .map(|_| register.term);
        let mut conduct = Conduct::new(replica.options.me, voters, replica.timing(), gate.now_ms());
        while !replica.stopping.load(Ordering::SeqCst) {
            let register = replica.agreed.wait(LOOK);
            if replica.broken().is_some() {
                self.step_down(State::Recovering);
                continue;
            }
            let now_ms = gate.now_ms();
            let (term, heard_ms) = *lock(&replica.heard);
            conduct.heard(term, heard_ms);
            let duty = conduct.duty(&register, now_ms);
            self.act(duty, now_ms);
            replica.note_health(now_ms);
            if self.trimmed.elapsed() >= TRIM {
                self.trimmed = Instant::now();
                self.trim();
            }
        }
        self.hand_over();
        self.step_down(State::Recovering);
        if let Some(following) = self.following.take() {
            following.stop.store(true, Ordering::SeqCst);
            let _ = following.thread.join();
        }
    }

    /// A primary that is told to stop waits a little until a majority has everything, and has another elected.
    fn hand_over(&mut self) {
        let alone = self.replica.agreed.now().voters.len() < 2;
        if self.led == 0 || alone || self.replica.store.settle().is_err() {
            return;
        }
        let (last, began) = (self.replica.store.last().place.time, Instant::now());
        let have = || {
            let standing = lock(&self.replica.standing);
            standing.as_ref().is_some_and(|known| known.is_at_majority(last))
        };
        while !have() && began.elapsed() < HAND_OVER {
            std::thread::sleep(Duration::from_millis(5));
        }
        if have() {
            self.begin(self.led + 1);
        }
    }

    /// Proposes a term with the voters that counted last by themselves: others are proposed by a primary alone.
    fn begin(&mut self, term: u64) {
        let register = self.replica.agreed.now();
        let voters = match register.settled().is_empty() {
            true => self.replica.setting(),
            false => register.settled().clone(),
        };
        self.ask(Order::Begin { term, voters });
    }

    fn act(&mut self, duty: Duty, now_ms: u64) {
        if self.led != 0 && duty != Duty::Lead(self.led) {
            tracing::info!(term = self.led, "this member leads the documents no more");
            self.step_down(State::Secondary);
        }
        let followed = match duty {
            Duty::Follow { term, .. } => term,
            // Until a majority suspects it the primary may come back.
            Duty::Suspect(term) => term,
            _ => 0,
        };
        if !self.ends_following(followed) {
            return;
        }
        match duty {
            Duty::Wait => {}
            // It could not vote, and hears little of the primary while it clears what it had.
            Duty::Begin(_) | Duty::Suspect(_) if self.is_copying() => {}
            Duty::Suspect(term) => {
                self.ask(Order::Suspect { term, member: self.replica.options.me });
            }
            Duty::Begin(term) => self.begin(term),
            Duty::Vote(term) => self.vote(term),
            Duty::Lead(term) if self.led != term && !self.may_lead(term) => {
                self.begin(term + 1);
            }
            Duty::Lead(term) if self.led != term => {
                if let Err(error) = self.lead(term, now_ms) {
                    self.replica.agreed.gate.shut();
                    let applied = self.replica.counts.applied.load(Ordering::Relaxed);
                    self.failed = Some((term, applied));
                    *lock(&self.replica.hindrance) = Some(error.to_string());
                    tracing::error!(%error, term, "this member cannot lead the documents");
                }
            }
            Duty::Lead(_) => {
                self.look_at_followers(now_ms);
                self.look_at_voters(now_ms);
            }
            Duty::Follow { term, source } => self.follow(term, source),
        }
    }

    /// True once no session of another term than this one runs.
    fn ends_following(&mut self, term: u64) -> bool {
        let Some(following) = &self.following else { return true };
        if following.thread.is_finished() {
            if let Some(ended) = self.following.take() {
                let _ = ended.thread.join();
            }
            return true;
        }
        if following.term != term {
            following.stop.store(true, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Proposes, unless the same is under way.
    fn ask(&mut self, order: Order) {
        let waits = |asked: &(Order, Instant)| asked.0 == order && asked.1.elapsed() < AGAIN;
        if self.asked.as_ref().is_some_and(waits) || self.under_way.load(Ordering::SeqCst) {
            return;
        }
        tracing::debug!(?order, "proposed");
        self.under_way.store(true, Ordering::SeqCst);
        let under_way = Arc::clone(&self.under_way);
        let done = Box::new(move || under_way.store(false, Ordering::SeqCst));
        self.propose.propose(order.encode(), done);
        self.asked = Some((order, Instant::now()));
    }

    fn is_copying(&self) -> bool {
        self.replica.store.mark().copying || self.replica.resync.load(Ordering::SeqCst)
    }

    /// Whether it could not write when it was to lead, and nothing has shown since that it can.
    fn is_hindered(&self) -> bool {
        let applied = self.replica.counts.applied.load(Ordering::Relaxed);
        self.replica.options.members.len() > 1 && self.failed.is_some_and(|(_, at)| at == applied)
    }

    /// A member that copies all documents has forgotten what it acknowledged, and says nothing.
    fn vote(&mut self, term: u64) {
        let mark = self.replica.store.mark();
        if self.is_copying() {
            if self.replica.options.members.len() == 1 {
                let held = self.replica.options.held_file.display();
                self.replica.stop_for(format!(
                    "this member's documents are gone, and there is no other member to copy them from: put the folder of documents back, or remove it and {held} to begin without them"
                ));
            }
            return;
        }
        // The term was fenced off where it was applied, so nothing is acknowledged behind this look.
        let last = self.replica.store.last().place;
        let ballot = match mark.floor {
            Some(_) => Ballot { last: mark.kept.unwrap_or(last), electable: false },
            None => Ballot { last, electable: !self.is_hindered() },
        };
        self.ask(Order::Vote { term, member: self.replica.options.me, ballot });
    }

    /// Whether the documents here are those for which this member was elected. Where a process led that is gone,
    /// votes say anew who has what; and documents that were lost or are half there lead nobody.
    fn may_lead(&self, term: u64) -> bool {
        let mark = self.replica.store.mark();
        let failed = self.failed.is_some_and(|(failed, _)| failed == term);
        self.found != Some(term) && !failed && !mark.copying && mark.floor.is_none()
    }

    fn lead(&mut self, term: u64, now_ms: u64) -> Result<()> {
        let replica = &self.replica;
        let register = replica.agreed.now();
        if register.term != term {
            return Ok(());
        }
        replica.begin_behind(replica.store.last().place.time);
        let lease_until_ms = now_ms + replica.timing().lease_ms;
        let first = replica.store.lead(term, lease_until_ms)?;
        // Behind the mark: a note without one says that documents were lost.
        if let Err(error) = replica.note_held() {
            tracing::error!(%error, "no note beside the documents says that there are some");
        }
        let (me, time) = (replica.options.me, first.place.time);
        let standing = Standing::new(term, me, register.voters, time, now_ms)
            .joint(register.before, now_ms)
            .beside(replica.setting(), now_ms);
        *lock(&replica.standing) = Some(standing);
        *lock(&replica.hindrance) = None;
        replica.counts.led.fetch_add(1, Ordering::Relaxed);
        replica.set_state(State::Primary);
        self.led = term;
        tracing::info!(term, "this member leads the documents");
        self.look_at_followers(now_ms);
        let engine = Arc::clone(&self.engine);
        // Index builds may take long.
        let thread = std::thread::Builder::new().name("documents-begin".to_owned());
        if let Err(error) = thread.spawn(move || engine.take_over()) {
            tracing::warn!(%error, "what an earlier primary left half done stays so");
        }
        Ok(())
    }

    /// A set of one has no followers whose reports would move anything.
    fn look_at_followers(&self, now_ms: u64) {
        let standing = lock(&self.replica.standing);
        self.replica.renew(standing.as_ref(), now_ms);
        if let Some(standing) = &*standing {
            self.replica.set_commit(standing.commit(self.replica.store.last().place.time));
        }
    }

    /// The voters before count no more, or the members of this primary's setting are to vote.
    fn look_at_voters(&mut self, now_ms: u64) {
        let register = self.replica.agreed.now();
        let (setting, latest) = (self.replica.setting(), self.replica.store.last().place.time);
        let order = {
            let mut standing = lock(&self.replica.standing);
            let Some(standing) = standing.as_mut().filter(|one| one.term == register.term) else {
                return;
            };
            if register.before.is_empty() {
                standing.settle();
            }
            let same = |member: u16| self.replica.names(member, &setting, now_ms);
            standing.change_of_voters(&register, &setting, latest, same)
        };
        if let Some(order) = order {
            self.ask(order);
        }
    }

    fn step_down(&mut self, state: State) {
        if self.led == 0 {
            return;
        }
        self.led = 0;
        let replica = &self.replica;
        replica.agreed.gate.shut();
        *lock(&replica.standing) = None;
        replica.set_state(state);
        if let Err(error) = replica.store.settle() {
            tracing::error!(%error, "writes that were under way could not be waited for");
        }
        self.engine.transactions.abort_all();
        replica.moved.notify_waiters();
        self.engine.changed.notify_waiters();
    }

    fn follow(&mut self, term: u64, source: u16) {
        if self.following.is_some() {
            return;
        }
        let stop = Arc::<AtomicBool>::default();
        let session = follow::Session {
            replica: Arc::clone(&self.replica),
            engine: Arc::clone(&self.engine),
            sources: Arc::clone(&self.sources),
            stop: Arc::clone(&stop),
            patience: Patience::of(Arc::clone(&stop)),
            term,
            source,
            parted: AtomicBool::new(false),
        };
        let thread = std::thread::Builder::new().name("documents-follow".to_owned());
        match thread.spawn(move || session.run()) {
            Ok(thread) => self.following = Some(Following { term, stop, thread }),
            Err(error) => tracing::error!(%error, "no thread to follow the primary with"),
        }
    }

    fn trim(&self) {
        let replica = &self.replica;
        // What no majority is known to have may have to be taken back.
        if let Err(error) = replica.store.trim(replica.options.oplog_bytes, replica.commit()) {
            tracing::warn!(%error, "the operation log could not be shortened");
        }
    }
}
