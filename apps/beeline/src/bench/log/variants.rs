//! Ways to replicate, over bare memory: what a round costs, and what a follower's processor costs.
//!
//! Each does the least that its protocol needs for one command at a time: no state machine, no
//! checksums. The one-round variant is this log's; the two-round one writes the entry to a
//! majority and then, as DARE does, the pointer to its end; in the acknowledged one, as in APUS,
//! followers' processors watch their memory, copy the entry into a log of their own and answer.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FlushKind, LocalData, MemoryRegion, Operation,
    QueuePair, QueuePairOptions, RemoteAddress, RemoteKey, Role, ScatterGatherEntry,
    WorkCompletion, WorkRequest,
};
use beeline_fabric_open::open;
use beeline_os::memory::{MemoryObject, copy_across, load_u64, store_u64};

use super::Bench;
use crate::bench::report::{Better, Row, shown};
use crate::bench::turns::{Contender, alternate, unpin};

const LENGTH: usize = 1 << 20;
/// Where entries begin; before them, control words.
const ENTRIES: u64 = 4096;
/// In a follower's memory: the number of the newest entry; in the leader's: a line per follower.
const NEWEST: u64 = 0;
const TAIL: u64 = 64;
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Variant {
    OneRound,
    TwoRounds,
    Acknowledged,
}

/// What two ends tell each other.
struct Card {
    info: ConnectInfo,
    key: RemoteKey,
}

struct Follower {
    qp: Box<dyn QueuePair>,
    key: RemoteKey,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<anyhow::Result<()>>>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Leader {
    variant: Variant,
    queue: Rc<dyn CompletionQueue>,
    memory: Arc<dyn MemoryObject>,
    region: MemoryRegion,
    followers: Vec<Follower>,
    number: u64,
    next: u64,
}

/// A follower's thread. In the acknowledged variant it watches its memory.
fn follow(
    fabric: &str,
    at: usize,
    acknowledges: bool,
    bytes: usize,
    stop: &AtomicBool,
    (cards, theirs): (Sender<Card>, Receiver<Card>),
) -> anyhow::Result<()> {
    let device: Arc<dyn Device> = open(fabric)?;
    let domain = device.allocate_protection_domain()?;
    let queue = device.create_completion_queue(256)?;
    let memory = device.allocate_memory(LENGTH)?;
    let own = device.allocate_memory(LENGTH)?;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::LOCAL_WRITE;
    let region = domain.register(Arc::clone(&memory), rights)?;
    let mut qp = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
    cards.send(Card { info: qp.connect_info(), key: region.remote_key() })?;
    let leader = theirs.recv()?;
    qp.connect(&leader.info, Role::Passive)?;
    qp.wait_connected(PATIENCE)?;
    let mut completions = [WorkCompletion::EMPTY; 16];
    let mut seen = 0;
    while !stop.load(Ordering::Relaxed) {
        if !acknowledges {
            std::thread::sleep(Duration::from_millis(5));
            queue.poll(&mut completions)?;
            continue;
        }
        let newest = load_u64(memory.as_ref(), NEWEST as usize);
        if newest == seen {
            // The first write to a key waits for the leader's library.
            queue.poll(&mut completions)?;
            std::thread::yield_now();
            continue;
        }
        seen = newest;
        let offset = ENTRIES as usize;
        copy_across((memory.as_ref(), offset), (own.as_ref(), offset), bytes);
        let word = newest.to_le_bytes();
        let remote = RemoteAddress { key: leader.key, offset: 64 * (at as u64 + 1) };
        let write = Operation::Write { local: LocalData::Inline(&word), remote };
        qp.post_send(&[WorkRequest::unsignalled(0, write)])?;
        queue.poll(&mut completions)?;
    }
    Ok(())
}

impl Leader {
    fn new(fabric: &str, variant: Variant, members: usize, bytes: usize) -> anyhow::Result<Self> {
        let device = open(fabric)?;
        let domain = device.allocate_protection_domain()?;
        let queue = device.create_completion_queue(1024)?;
        let memory = device.allocate_memory(LENGTH)?;
        let rights = Access::REMOTE_WRITE | Access::LOCAL_WRITE;
        let region = domain.register(Arc::clone(&memory), rights)?;
        let mut followers = Vec::new();
        for at in 0..members - 1 {
            let ((to_us, from_them), (to_them, from_us)) = (channel(), channel());
            let stop = Arc::new(AtomicBool::new(false));
            let (fabric, stopped) = (fabric.to_owned(), Arc::clone(&stop));
            let acknowledges = variant == Variant::Acknowledged;
            let thread = std::thread::spawn(move || {
                follow(&fabric, at, acknowledges, bytes, &stopped, (to_us, from_us))
            });
            let mut qp =
                domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
            let card = from_them.recv_timeout(PATIENCE).context("a follower did not start")?;
            to_them.send(Card { info: qp.connect_info(), key: region.remote_key() })?;
            qp.connect(&card.info, Role::Active)?;
            qp.wait_connected(PATIENCE)?;
            followers.push(Follower { qp, key: card.key, stop, thread: Some(thread) });
        }
        let (number, next) = (1, ENTRIES);
        let mut leader = Self { variant, queue, memory, region, followers, number, next };
        // The first use of a key asks the follower's library; from then on nobody is asked.
        let all = leader.followers.len();
        leader.round(ENTRIES, 64, None, all)?;
        Ok(leader)
    }

    /// WRITE and FLUSH to every follower, then the completions of so many.
    fn round(
        &mut self,
        offset: u64,
        length: u64,
        inline: Option<u64>,
        wanted: usize,
    ) -> anyhow::Result<()> {
        let wr_id = self.number << 1 | u64::from(inline.is_some());
        for follower in &mut self.followers {
            let remote = RemoteAddress { key: follower.key, offset };
            let word = inline.unwrap_or_default().to_le_bytes();
            let entries = [ScatterGatherEntry { region: &self.region, offset, length }];
            let local = match inline {
                Some(_) => LocalData::Inline(&word),
                None => LocalData::Gather(&entries),
            };
            let flush = Operation::Flush { remote, length, kind: FlushKind::Visible };
            follower.qp.post_send(&[
                WorkRequest::unsignalled(0, Operation::Write { local, remote }),
                WorkRequest::new(wr_id, flush),
            ])?;
        }
        let mut count = 0;
        let mut completions = [WorkCompletion::EMPTY; 16];
        while count < wanted {
            let found = self.queue.poll(&mut completions)?;
            for completion in &completions[..found] {
                anyhow::ensure!(completion.is_success(), "{completion:?}");
                count += usize::from(completion.wr_id == wr_id);
            }
        }
        Ok(())
    }

    fn commit(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.number += 1;
        if self.next + bytes > LENGTH as u64 || self.variant == Variant::Acknowledged {
            self.next = ENTRIES;
        }
        let offset = self.next;
        self.next += bytes.next_multiple_of(64);
        let number = self.number;
        store_u64(self.memory.as_ref(), offset as usize, number);
        // With the leader, a majority.
        let majority = self.followers.len().div_ceil(2);
        match self.variant {
            Variant::OneRound => self.round(offset, bytes, None, majority),
            Variant::TwoRounds => {
                self.round(offset, bytes, None, majority)?;
                self.round(TAIL, 8, Some(offset), majority)
            }
            Variant::Acknowledged => {
                for follower in &mut self.followers {
                    let remote = RemoteAddress { key: follower.key, offset };
                    let entries =
                        [ScatterGatherEntry { region: &self.region, offset, length: bytes }];
                    let local = LocalData::Gather(&entries);
                    let entry = Operation::Write { local, remote };
                    let word = number.to_le_bytes();
                    let remote = RemoteAddress { key: follower.key, offset: NEWEST };
                    let local = LocalData::Inline(&word);
                    let newest = Operation::Write { local, remote };
                    follower.qp.post_send(&[
                        WorkRequest::unsignalled(0, entry),
                        WorkRequest::new(0, newest),
                    ])?;
                }
                let mut completions = [WorkCompletion::EMPTY; 16];
                let start = Instant::now();
                loop {
                    let has = |at: usize| load_u64(self.memory.as_ref(), 64 * (at + 1)) >= number;
                    if (0..self.followers.len()).filter(|at| has(*at)).count() >= majority {
                        break;
                    }
                    self.queue.poll(&mut completions)?;
                    anyhow::ensure!(start.elapsed() < PATIENCE, "no answer of a follower");
                    std::thread::yield_now();
                }
                while self.queue.poll(&mut completions)? > 0 {}
                Ok(())
            }
        }
    }

    /// Microseconds at p50.
    fn commits_us(&mut self, bytes: usize, count: u32) -> anyhow::Result<f64> {
        let mut latencies = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let start = Instant::now();
            self.commit(bytes as u64)?;
            latencies.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
        latencies.sort_by(f64::total_cmp);
        Ok(latencies[latencies.len() / 2])
    }
}

/// One round against the others, by size and members.
pub fn rows(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let count = bench.options.size(bench.options.amount(None, 10_000, 3_000), 20);
    let fabric = &bench.arguments.fabric;
    let mut rows = Vec::new();
    for members in bench.arguments.members.iter().copied().filter(|members| *members > 1) {
        for bytes in &bench.arguments.sizes {
            let leader = |variant| Leader::new(fabric, variant, members, *bytes);
            let mut one = leader(Variant::OneRound)?;
            let mut two = leader(Variant::TwoRounds)?;
            bench.pin_leader()?;
            let mut contenders = [
                Contender::new("one round", || one.commits_us(*bytes, count)),
                Contender::new("two rounds", || two.commits_us(*bytes, count)),
                Contender::new("acknowledged", || {
                    // Its followers watch their memory; they would be in the others' way.
                    unpin()?;
                    let mut acknowledged = leader(Variant::Acknowledged)?;
                    bench.pin_leader()?;
                    acknowledged.commits_us(*bytes, count / 10 + 1)
                }),
            ];
            let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
            drop(contenders);
            unpin()?;
            for (peer, theirs) in [("two rounds", &figures[1]), ("acknowledged", &figures[2])] {
                let case = format!("{bytes} B to {members} bare memories");
                let row = Row::new(case, "one round", "us", Better::Lower, &figures[0]);
                rows.push(shown(row.against(peer, &figures[0], theirs), bench.output));
            }
        }
    }
    Ok(rows)
}
