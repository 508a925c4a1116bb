//! Members of a set with their threads, in one process: each over a store in memory that outlives it, a register of
//! terms that all of them hear, and calls in place of messages.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_documents::operation::Operation;
use beeline_documents::replica::agreed::Agreed;
use beeline_documents::replica::entry::Spot;
use beeline_documents::replica::register::{Order, Register};
use beeline_documents::replica::source::{
    COMMAND, Patience, Progress, Sources, SyncError, SyncSource, Told,
};
use beeline_documents::replica::store::{Fetched, Gate, Pairs, ReplicaStore, is_own};
use beeline_documents::replica::{Propose, Replica, ReplicaOptions, Running, State};
use beeline_documents::reply::Reply;
use beeline_documents::store::{Backing, Change, Memory, Store, Stretch, Visitor, with_row};
use beeline_documents::{Engine, EngineOptions};
use beeline_documents_query::error::{Code, Result, fail};
use bson::{Document, doc};
use common::Client;

/// Long beside what keeps a member's threads from a processor: where a primary is to stay, none is suspected.
const ELECTION: Duration = Duration::from_millis(1500);
const PATIENCE: Duration = Duration::from_secs(40);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a member's process leaves behind.
#[derive(Debug, Default)]
struct Disk {
    rows: Memory,
    /// The process was killed: nothing of it comes here any more.
    dead: AtomicBool,
    /// Milliseconds that a batch takes.
    slow_ms: AtomicU64,
    /// Bytes that a batch of several rows may take; 0: any.
    longest: AtomicUsize,
}

struct Row<'r>(&'r mut dyn Backing, &'r Disk);

impl Backing for Row<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        self.0.get(key, out)
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        self.0.range(stretch, backward, visit)
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        std::thread::sleep(Duration::from_millis(self.1.slow_ms.load(Ordering::SeqCst)));
        self.0.apply(changes)
    }
}

impl Disk {
    fn check(&self) -> Result<()> {
        match self.dead.load(Ordering::SeqCst) {
            true => fail(Code::InternalError, "the process was killed"),
            false => Ok(()),
        }
    }
}

impl Store for Disk {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        self.check()?;
        self.rows.with(row, &mut |inner| work(&mut Row(inner, self)))
    }

    fn now_ms(&self) -> u64 {
        self.rows.now_ms()
    }

    fn space(&self) -> (u64, u64) {
        self.rows.space()
    }

    fn apply_all(&self, rows: &[(Vec<u8>, Vec<Change>)], then: &mut dyn FnMut()) -> Result<()> {
        self.check()?;
        std::thread::sleep(Duration::from_millis(self.slow_ms.load(Ordering::SeqCst)));
        let length = |one: &Change| one.key.len() + one.value.as_ref().map_or(0, Vec::len);
        let bytes: usize = rows.iter().flat_map(|(_, changes)| changes).map(length).sum();
        let longest = self.longest.load(Ordering::SeqCst);
        if longest > 0 && bytes > longest {
            return fail(Code::TransactionTooLarge, "the batch is too large");
        }
        self.rows.apply_all(rows, then)
    }
}

/// What all members hear, and how they reach each other.
#[derive(Default)]
struct World {
    register: Mutex<Register>,
    running: Mutex<BTreeMap<u16, Arc<Replica>>>,
    /// Members that hear the register and none of the others.
    cut: Mutex<BTreeSet<u16>>,
    /// Entries that each member fetched, and most of them at once.
    fetched: Mutex<BTreeMap<u16, (usize, usize)>>,
}

impl fmt::Debug for World {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("World")
    }
}

/// A member's way to the register and to the others.
#[derive(Clone, Debug)]
struct Way {
    world: Arc<World>,
    me: u16,
}

impl Propose for Way {
    fn propose(&self, order: Vec<u8>, done: Box<dyn FnOnce() + Send>) {
        if lock(&self.world.running).contains_key(&self.me) {
            let mut register = lock(&self.world.register);
            register.apply(&Order::decode(&order).unwrap());
            for replica in lock(&self.world.running).values() {
                replica.agreed.set(register.clone());
            }
        }
        done();
    }
}

#[derive(Debug)]
struct Link {
    way: Way,
    source: u16,
    term: u64,
}

impl Sources for Way {
    fn open(&self, source: u16, term: u64, _: &Patience) -> Result<Box<dyn SyncSource>, SyncError> {
        Ok(Box::new(Link { way: self.clone(), source, term }))
    }
}

fn refused(reason: impl ToString) -> SyncError {
    SyncError::Refused { address: "a member".to_owned(), reason: reason.to_string() }
}

impl Link {
    fn primary(&self) -> Result<Arc<Replica>, SyncError> {
        let running = lock(&self.way.world.running);
        let reaches =
            running.contains_key(&self.way.me) && !lock(&self.way.world.cut).contains(&self.way.me);
        let known = running.get(&self.source).filter(|_| reaches);
        let leads = |one: &&Arc<Replica>| {
            one.state() == State::Primary && one.agreed.is(self.term, self.source)
        };
        known.filter(leads).cloned().ok_or_else(|| refused("it does not lead"))
    }

    fn of<R>(&self, ask: impl FnOnce(&ReplicaStore) -> Result<R>) -> Result<R, SyncError> {
        let primary = self.primary()?;
        ask(&primary.store).map_err(refused)
    }
}

impl SyncSource for Link {
    fn find(&mut self, spots: &[Spot]) -> Result<Option<usize>, SyncError> {
        self.of(|store| store.find(spots))
    }

    fn entries(
        &mut self,
        after: u64,
        most: usize,
        wait: Duration,
    ) -> Result<Option<Fetched>, SyncError> {
        let fetched = self.of(|store| store.read(after, most))?;
        let count = fetched.as_ref().map_or(0, |one| one.entries.len());
        let mut all = lock(&self.way.world.fetched);
        let known = all.entry(self.way.me).or_default();
        *known = (known.0 + count, known.1.max(count));
        drop(all);
        if fetched.as_ref().is_some_and(|one| one.entries.is_empty()) {
            std::thread::sleep(wait.min(Duration::from_millis(5)));
        }
        Ok(fetched)
    }

    fn rows(&mut self) -> Result<(Vec<Vec<u8>>, Spot), SyncError> {
        self.of(|store| {
            let last = store.last();
            Ok((store.rows(), last))
        })
    }

    fn page(
        &mut self,
        row: &[u8],
        after: Option<&[u8]>,
        most: usize,
    ) -> Result<(Pairs, bool), SyncError> {
        self.of(|store| store.page(row, after.map(<[u8]>::to_vec), most))
    }

    fn values(&mut self, row: &[u8], keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, SyncError> {
        self.of(|store| store.values(row, keys, 1 << 20))
    }

    fn report(&mut self, progress: Progress) -> Result<Told, SyncError> {
        let me = lock(&self.way.world.running).get(&self.way.me).cloned();
        let setting = me.ok_or_else(|| refused("it was killed"))?.setting();
        let members: Vec<i32> = setting.into_iter().map(i32::from).collect();
        let body = doc! {
            COMMAND: "report", "cluster": 1_i64, "term": self.term as i64, "member": i32::from(self.way.me),
            "members": members,
            "applied": progress.applied as i64, "durable": progress.durable as i64, "state": i32::from(progress.state),
        };
        match self.primary()?.answer(&body, false).map_err(refused)? {
            Reply::Document(told) => Ok(Told {
                commit: told.get_i64("commit").unwrap() as u64,
                latest: told.get_i64("latest").unwrap() as u64,
            }),
            _ => Err(refused("no document")),
        }
    }
}

struct Member {
    replica: Arc<Replica>,
    client: Client,
    running: Option<Running>,
}

struct Set {
    world: Arc<World>,
    home: tempfile::TempDir,
    disks: BTreeMap<u16, Arc<Disk>>,
    members: BTreeMap<u16, Member>,
}

impl Set {
    fn of(members: u16) -> Self {
        let home = tempfile::tempdir().unwrap();
        let disks = (1..=members).map(|member| (member, Arc::default())).collect();
        let mut set = Self { world: Arc::default(), home, disks, members: BTreeMap::new() };
        (1..=members).for_each(|member| set.start(member));
        set
    }

    fn rollback(&self, member: u16) -> PathBuf {
        self.home.path().join(format!("rollback-{member}"))
    }

    fn start(&mut self, me: u16) {
        let disk = Arc::clone(&self.disks[&me]);
        disk.dead.store(false, Ordering::SeqCst);
        let agreed = Arc::new(Agreed::new(Arc::<Gate>::default()));
        let store = Arc::new(ReplicaStore::open(disk, Arc::clone(&agreed.gate)).unwrap());
        let rows: Arc<dyn Store> = Arc::<ReplicaStore>::clone(&store);
        let engine = Engine::open(rows, &EngineOptions::default()).unwrap();
        let options = ReplicaOptions {
            set: "rs0".to_owned(),
            me,
            members: self.disks.keys().map(|id| (*id, ([127, 0, 0, 1], *id).into())).collect(),
            fabric: BTreeMap::new(),
            cluster: 1,
            election_timeout: ELECTION,
            oplog_bytes: 64 << 20,
            longest_batch: 64 << 20,
            batch_bytes: 256 << 10,
            rollback_directory: self.rollback(me),
            held_file: self.home.path().join(format!("held-{me}")),
        };
        let replica = Arc::new(Replica::new(options, store, agreed));
        replica.notice_loss().unwrap();
        engine.replica.set(Arc::clone(&replica)).unwrap();
        {
            // It hears what was agreed on before, and from then on everything.
            let register = lock(&self.world.register);
            replica.agreed.set(register.clone());
            lock(&self.world.running).insert(me, Arc::clone(&replica));
        }
        let way = Way { world: Arc::clone(&self.world), me };
        let running = replica.start(&engine, Box::new(way.clone()), Arc::new(way)).unwrap();
        let client = Client::of(&engine);
        self.members.insert(me, Member { replica, client, running: Some(running) });
    }

    /// As kill -9: neither its store nor the others hear of it from now on.
    fn kill(&mut self, member: u16) {
        lock(&self.world.running).remove(&member);
        self.disks[&member].dead.store(true, Ordering::SeqCst);
        drop(self.members.remove(&member).unwrap().running.take());
    }

    fn eventually<R>(&self, what: &str, mut look: impl FnMut() -> Option<R>) -> R {
        let began = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            let states: Vec<_> =
                self.members.iter().map(|(id, one)| (id, one.replica.state())).collect();
            assert!(began.elapsed() < PATIENCE, "{what} did not come: {states:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn primary(&self) -> u16 {
        self.eventually("a primary", || {
            self.members.iter().find(|(_, one)| one.replica.writes()).map(|(id, _)| *id)
        })
    }

    fn others(&self, than: u16) -> Vec<u16> {
        self.disks.keys().copied().filter(|member| *member != than).collect()
    }

    fn insert(&self, primary: u16, from: i32, count: i32, text: &str) {
        let documents: Vec<Document> =
            (from..from + count).map(|n| doc! { "_id": n, "text": text }).collect();
        for some in documents.chunks(50) {
            let reply =
                self.members[&primary].client.run(doc! { "insert": "c", "documents": some });
            assert_eq!(reply.get_i32("n").unwrap(), some.len() as i32, "{reply}");
        }
    }

    /// Inserts a document, at whichever member leads, until a majority has it.
    fn put(&self, n: i32) {
        self.eventually("a document at a majority", || {
            let (_, leads) = self.members.iter().find(|(_, one)| one.replica.writes())?;
            let insert = doc! { "insert": "c", "documents": [{ "_id": n, "text": "x" }] };
            let reply = leads.client.run(insert);
            let twice = reply.get_array("writeErrors").is_ok();
            if reply.get_i32("n").unwrap_or(0) != 1 && !twice {
                return None;
            }
            let (term, last) = (leads.replica.primary().0, leads.replica.store.last().place.time);
            let began = Instant::now();
            while leads.replica.commit() < last && began.elapsed() < ELECTION * 2 {
                std::thread::sleep(Duration::from_millis(2));
            }
            let still = leads.replica.agreed.gate.term() == Some(term);
            (still && leads.replica.commit() >= last).then_some(())
        });
    }

    /// Starts all members with the set as it is now, one after the other, while documents are written from here on;
    /// waits until they vote.
    fn change(&mut self, from: i32) {
        let all: Vec<u16> = self.disks.keys().copied().collect();
        for (n, member) in (from..).zip(all.iter().copied()) {
            if self.members.contains_key(&member) {
                self.kill(member);
            }
            self.start(member);
            self.put(n);
        }
        let all: BTreeSet<u16> = all.into_iter().collect();
        self.eventually("the new voters", || {
            let register = lock(&self.world.register);
            (register.voters == all && register.before.is_empty()).then_some(())
        });
    }

    /// Waits until a majority is known to have all that the primary has.
    fn settle(&self, primary: u16) {
        let replica = &self.members[&primary].replica;
        let last = replica.store.last().place.time;
        self.eventually("a majority", || (replica.commit() >= last).then_some(()));
    }

    fn rows(&self, member: u16) -> BTreeMap<(Vec<u8>, Vec<u8>), Vec<u8>> {
        let mut rows = BTreeMap::new();
        for name in self.members[&member].replica.store.rows() {
            with_row(&self.disks[&member].rows, &name, |row| {
                row.range(&Stretch::of_prefix(&[]), false, &mut |key, value| {
                    if !is_own(&name, key) {
                        rows.insert((name.clone(), key.to_vec()), value.to_vec());
                    }
                    ControlFlow::Continue(())
                })
            })
            .unwrap();
        }
        rows
    }

    /// Waits until all members are in step and have the same documents; their number.
    fn same(&self) -> usize {
        self.eventually("the same at all members", || {
            let primary = self.members.iter().find(|(_, one)| one.replica.writes())?.0;
            let last = self.members[primary].replica.store.last();
            let in_step = self
                .members
                .values()
                .all(|one| one.replica.is_readable() && one.replica.store.last() == last);
            in_step.then_some(())
        });
        let primary = self.primary();
        let rows = self.rows(primary);
        for other in self.others(primary) {
            assert!(self.rows(other) == rows, "members {primary} and {other} differ");
        }
        self.members[&primary].client.find("c", &doc! {}, &doc! {}).len()
    }

    fn taken_back(&self, member: u16) -> u64 {
        self.members[&member].replica.counts.taken_back.load(Ordering::SeqCst)
    }

    fn kept_files(&self, member: u16) -> usize {
        std::fs::read_dir(self.rollback(member)).map_or(0, Iterator::count)
    }
}

#[test]
fn a_primary_that_lost_its_documents_takes_no_others_with_it() {
    let mut set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 100, "x");
    set.settle(first);
    set.same();
    (1..=3).for_each(|member| set.kill(member));
    set.disks.insert(first, Arc::default());
    // The register says that it leads.
    set.start(first);
    std::thread::sleep(ELECTION);
    for other in set.others(first) {
        set.start(other);
    }
    assert_eq!(set.same(), 100);
}

#[test]
fn a_member_by_itself_that_lost_its_documents_says_so_and_stops() {
    let mut set = Set::of(1);
    set.insert(set.primary(), 0, 10, "x");
    set.kill(1);
    set.start(1);
    assert_eq!(set.same(), 10);
    set.kill(1);
    set.disks.insert(1, Arc::default());
    set.start(1);
    let why = set.eventually("a reason", || set.members[&1].replica.broken());
    assert!(why.contains("no other member"), "{why}");
}

/// A primary that has `count` documents more than the others, ends, and comes back behind another.
fn divergent(count: i32, text: &str, between: impl FnOnce(&Set, u16)) -> (Set, u16) {
    let mut set = Set::of(3);
    let first = set.primary();
    // The others have copied what there was, so that their logs hold all that follows.
    set.same();
    set.insert(first, 0, 20, "x");
    set.settle(first);
    set.same();
    let others = set.others(first);
    others.iter().for_each(|other| set.members[other].replica.pause(true));
    // What was asked for before is answered first.
    std::thread::sleep(Duration::from_millis(100));
    set.insert(first, 1000, count, text);
    set.kill(first);
    others.iter().for_each(|other| set.members[other].replica.pause(false));
    let second = set.primary();
    set.insert(second, 100, 20, "x");
    set.settle(second);
    between(&set, first);
    set.start(first);
    (set, first)
}

#[test]
fn what_parted_far_behind_is_taken_back_and_kept() {
    let (set, first) = divergent(2500, "y", |_, _| {});
    assert_eq!(set.same(), 40);
    assert!(set.taken_back(first) >= 2500, "{} taken back", set.taken_back(first));
    assert_eq!(set.kept_files(first), 1);
    assert_eq!(set.members[&first].replica.counts.copies.load(Ordering::SeqCst), 0);
}

#[test]
fn what_meets_nowhere_is_kept_before_everything_is_copied() {
    let (set, first) = divergent(30, "y", |set, first| {
        for other in set.others(first) {
            let replica = &set.members[&other].replica;
            replica.store.trim(0, replica.store.last().place.time).unwrap();
        }
    });
    assert_eq!(set.same(), 40);
    assert!(set.taken_back(first) >= 30, "{} taken back", set.taken_back(first));
    assert_eq!(set.kept_files(first), 1);
    assert_eq!(set.members[&first].replica.counts.copies.load(Ordering::SeqCst), 1);
}

#[test]
fn more_than_a_batch_holds_is_taken_back_by_a_copy() {
    let text = "y".repeat(1000);
    let (set, first) = divergent(400, &text, |set, first| {
        // An entry takes less; the keys to be taken back alone take more.
        set.disks[&first].longest.store(8_000, Ordering::SeqCst);
    });
    assert_eq!(set.same(), 40);
    assert!(set.taken_back(first) >= 400, "{} taken back", set.taken_back(first));
    assert_eq!(set.kept_files(first), 1);
}

#[test]
fn a_member_that_clears_slowly_leaves_the_primary_alone() {
    let set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 3000, "x");
    set.settle(first);
    set.same();
    let (term, other) = (lock(&set.world.register).term, set.others(first)[0]);
    let disk = &set.disks[&other];
    disk.slow_ms.store(600, Ordering::SeqCst);
    let replica = &set.members[&other].replica;
    replica.resync();
    set.eventually("a copy under way", || replica.store.mark().copying.then_some(()));
    std::thread::sleep(ELECTION * 3);
    assert!(replica.store.mark().copying, "it was faster than the election time-out");
    disk.slow_ms.store(0, Ordering::SeqCst);
    assert_eq!(set.same(), 3000);
    assert_eq!(lock(&set.world.register).term, term, "the primary was deposed");
}

#[test]
fn a_member_that_hears_nothing_of_the_primary_deposes_it_with_another_and_not_alone() {
    let set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 20, "x");
    set.settle(first);
    set.same();
    let (term, others) = (lock(&set.world.register).term, set.others(first));
    lock(&set.world.cut).insert(others[0]);
    set.eventually("a suspicion", || {
        lock(&set.world.register).suspects.contains(&others[0]).then_some(())
    });
    std::thread::sleep(ELECTION * 4);
    assert_eq!(lock(&set.world.register).term, term, "one member deposed the primary");
    set.insert(first, 100, 20, "x");
    set.settle(first);
    lock(&set.world.cut).insert(others[1]);
    set.eventually("another term", || (lock(&set.world.register).term > term).then_some(()));
    lock(&set.world.cut).clear();
    assert_eq!(set.same(), 40);
}

#[test]
fn a_report_of_what_was_never_written_moves_nothing() {
    let set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 1, "x");
    let replica = &set.members[&first].replica;
    let told = |applied: i64| {
        let term = lock(&set.world.register).term as i64;
        replica.answer(
            &doc! {
                COMMAND: "report", "cluster": 1_i64, "term": term, "member": i32::from(set.others(first)[0]),
                "applied": applied, "durable": applied, "state": 2,
            },
            false,
        )
    };
    assert_eq!(told(-1).unwrap_err().code, Code::BadValue);
    told(i64::MAX).unwrap();
    // Nor is one answered that is no member, or whose segments hold less than what fits here.
    for (member, segment) in [(9, 64 << 20), (i32::from(set.others(first)[0]), 32 << 20_i64)] {
        let other = doc! {
            COMMAND: "rows", "cluster": 1_i64, "term": lock(&set.world.register).term as i64,
            "member": member, "segment": segment,
        };
        let refused = replica.answer(&other, false).unwrap_err();
        assert_eq!(refused.code, Code::Unauthorized, "{refused}");
        assert!(refused.message.contains("9") || refused.message.contains("--segment-size"));
    }
    assert!(replica.commit() <= replica.store.clock().unwrap().last());
}

#[test]
fn a_slow_applier_holds_the_fetcher_back() {
    let set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 1, "x");
    set.settle(first);
    set.same();
    let other = set.others(first)[0];
    let replica = &set.members[&other].replica;
    let applied = || replica.counts.applied.load(Ordering::SeqCst);
    // It has fetched nothing yet where the first copy brought it the row.
    let fetched = || lock(&set.world.fetched).get(&other).copied().unwrap_or_default();
    let (before, start) = (applied(), fetched().0);
    set.disks[&other].slow_ms.store(50, Ordering::SeqCst);
    // Some 100 KB in each entry, two or so in each batch.
    set.insert(first, 1, 2000, &"y".repeat(2000));
    let (last, mut ahead) = (set.members[&first].replica.store.last(), 0);
    set.eventually("everything applied", || {
        let waits = (fetched().0 - start) as u64;
        ahead = ahead.max(waits.saturating_sub(applied() - before));
        (replica.store.last() == last).then_some(())
    });
    // Four batches wait, one is fetched and one applied.
    let (count, largest) = fetched();
    let (all, most) = ((count - start) as u64, 6 * largest as u64);
    assert!(ahead > 0 && ahead <= most, "{ahead} entries ahead, {most} at most");
    assert!(most * 2 < all, "{all} entries fill no queue");
}

#[test]
fn a_member_that_has_everything_waits_at_the_primary() {
    let set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 1, "x");
    let replica = &set.members[&first].replica;
    let ask = |after: u64, may_wait: bool| {
        let body = doc! {
            COMMAND: "entries", "cluster": 1_i64, "term": lock(&set.world.register).term as i64,
            "member": i32::from(set.others(first)[0]), "after": after as i64, "most": 1 << 20, "wait": 150,
        };
        replica.answer(&body, may_wait).unwrap()
    };
    let reached = replica.store.reached();
    assert!(matches!(ask(reached, true), Reply::Later(150)));
    assert!(matches!(ask(reached, false), Reply::Document(_)), "its wait is over");
    assert!(matches!(ask(reached - 1, true), Reply::Document(_)), "there is news");
}

#[test]
fn members_join_and_leave_a_set_that_goes_on() {
    let mut set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 100, "x");
    set.settle(first);
    set.same();
    // A fourth: each member is started with the new setting, one after the other.
    set.disks.insert(4, Arc::default());
    set.change(100);
    assert_eq!(set.same(), 104);
    // One takes the place of another, which is stopped.
    set.kill(2);
    set.disks.remove(&2);
    set.disks.insert(5, Arc::default());
    set.change(200);
    assert_eq!(set.same(), 108);
    (300..310).for_each(|n| set.put(n));
    assert_eq!(set.same(), 118);
}

#[test]
fn a_member_says_why_it_does_not_lead_or_lags() {
    let mut set = Set::of(3);
    let first = set.primary();
    set.insert(first, 0, 10, "x");
    set.settle(first);
    set.same();
    let others = set.others(first);
    let reason = |set: &Set, member: u16, words: &str| {
        set.eventually(words, || {
            let text = set.members[&member].replica.reason().map(|reason| reason.text);
            text.filter(|text| text.contains(words))
        });
    };
    set.eventually("no reasons", || {
        set.members.values().all(|one| one.replica.reason().is_none()).then_some(())
    });
    set.members[&others[0]].replica.pause(true);
    reason(&set, others[0], "paused");
    set.members[&others[0]].replica.pause(false);
    lock(&set.world.cut).insert(others[0]);
    reason(&set, others[0], &format!("does not follow member {first}"));
    let illness = |set: &Set| set.members[&first].replica.illness();
    assert_eq!(illness(&set), None);
    set.kill(others[1]);
    reason(&set, first, "takes no writes");
    set.eventually("illness", || illness(&set).filter(|why| why.contains("takes no writes")));
    set.kill(first);
    reason(&set, others[0], "does not follow");
}

#[test]
fn a_command_over_two_terms_is_not_acknowledged() {
    let set = Set::of(1);
    let replica = &set.members[&set.primary()].replica;
    let term = lock(&set.world.register).term;
    let body = doc! { "insert": "c" };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = |term: u64| {
        let operation = Operation { term: Some(term), ..Operation::default() };
        let held = replica.hold("insert", &body, &operation).unwrap().unwrap();
        match runtime.block_on(replica.release(held, Reply::ok(), "insert", &body)) {
            Reply::Document(answer) => answer,
            _ => panic!("no document"),
        }
    };
    assert_eq!(answer(term).get_f64("ok").unwrap(), 1.0);
    assert_eq!(answer(term - 1).get_i32("code").unwrap(), 189);
}
