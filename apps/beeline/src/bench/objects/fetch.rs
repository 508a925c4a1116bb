//! Transfers between two nodes of this process, by protocol: one node has the objects, another fetches
//! them by one protocol after the other. With a node for each protocol, two nodes with the same one
//! differed by more than the protocols do. Beside them the reads of the provider alone.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, MemoryRegion, Operation, QueuePair,
    QueuePairOptions, RemoteAddress, RemoteKey, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_open::open;
use beeline_objects::ObjectId;
use beeline_objects::cluster::Move;
use beeline_os::SharedMemory;
use beeline_os::memory::copy_in;

use super::local::memory_for;
use super::nodes::{Node, Rack, WAIT, url};
use super::peers::Scripted;
use super::{Bench, rate, size_name};
use crate::bench::report::{Better, Report, Row, Spread, number};
use crate::bench::turns::{Contender, alternate};

/// The baseline first, the mixed protocol last.
const PROTOCOLS: [(&str, Move); 5] = [
    ("socket, 4 KiB pieces", Move::Socket { piece_bytes: 4096 }),
    ("socket, 1 MiB pieces", Move::Socket { piece_bytes: 1 << 20 }),
    ("two-sided", Move::Sent),
    ("one-sided", Move::Read),
    ("mixed", Move::Auto),
];
const ONE_SIDED: usize = 3;
const MIXED: usize = 4;
const PROVIDER: &str = "the provider's reads";
/// Mooncake's ways to get an object: what its program is told, and the name of the row.
const MOONCAKE: [(&str, &str); 2] =
    [("fetch", "mooncake, TCP"), ("into", "mooncake, TCP, into a registered buffer")];

/// From this size on the mixed protocol knows its way after fewer objects.
const LARGE: u64 = 4 << 20;

/// One read of the provider's, and how many are outstanding: as the store's transfers.
const READ_BYTES: u64 = 32 << 20;
const READS: u64 = 4;

/// The end that is read: a thread that keeps it until the value is dropped.
struct FarEnd {
    _stop: mpsc::Sender<()>,
}

/// Reads of the provider between two pieces of memory as the store's segments are.
struct Reads {
    pair: Box<dyn QueuePair>,
    queue: std::rc::Rc<dyn CompletionQueue>,
    region: MemoryRegion,
    remote: RemoteAddress,
    longest: u64,
    _device: Arc<dyn Device>,
    _far: FarEnd,
}

type Made = (Arc<dyn Device>, Box<dyn QueuePair>, std::rc::Rc<dyn CompletionQueue>, MemoryRegion);

fn end(url: &str, bytes: u64) -> anyhow::Result<Made> {
    let device = open(url)?;
    let domain = device.allocate_protection_domain()?;
    let queue = device.create_completion_queue(64)?;
    let pair = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
    let memory = SharedMemory::allocate("beeline-bench", usize::try_from(bytes)?)?;
    let page = [3; 4096];
    for at in (0..usize::try_from(bytes)?).step_by(page.len()) {
        copy_in(&memory, at, &page[..page.len().min(usize::try_from(bytes)? - at)]);
    }
    let region = domain.register(Arc::new(memory), Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    Ok((device, pair, queue, region))
}

impl Reads {
    fn open(provider: &str, bytes: u64) -> anyhow::Result<Self> {
        let url = url(provider);
        let (device, mut pair, queue, region) = end(&url, bytes)?;
        let (stop, stopped) = mpsc::channel();
        let (card, shown) = mpsc::channel();
        let mine = pair.connect_info();
        let far = move || -> anyhow::Result<()> {
            let (_device, mut pair, _queue, region) = end(&url, bytes)?;
            card.send((pair.connect_info(), region.remote_key().0))?;
            pair.connect(&mine, Role::Passive)?;
            pair.wait_connected(WAIT)?;
            // Until the near end is gone.
            let _ = stopped.recv();
            Ok(())
        };
        std::thread::spawn(move || drop(far()));
        let (theirs, key): (ConnectInfo, u64) = shown.recv().context("the end that is read")?;
        pair.connect(&theirs, Role::Active)?;
        pair.wait_connected(WAIT)?;
        let longest = READ_BYTES.min(device.attributes().max_message_bytes);
        let remote = RemoteAddress { key: RemoteKey(key), offset: 0 };
        let _far = FarEnd { _stop: stop };
        Ok(Self { pair, queue, region, remote, longest, _device: device, _far })
    }

    /// Reads `bytes` once.
    fn read(&mut self, bytes: u64) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let (mut posted, mut under_way) = (0, 0);
        let mut done = [WorkCompletion::EMPTY; 8];
        while posted < bytes || under_way > 0 {
            while posted < bytes && under_way < READS {
                let length = self.longest.min(bytes - posted);
                let local = ScatterGatherEntry { region: &self.region, offset: posted, length };
                let remote = self.remote.advanced(posted);
                self.pair.post_send(&[WorkRequest::new(0, Operation::Read { local, remote })])?;
                posted += length;
                under_way += 1;
            }
            let found = self.queue.wait(&mut done, WAIT)?;
            anyhow::ensure!(found > 0, "the provider is silent");
            anyhow::ensure!(done[..found].iter().all(WorkCompletion::is_success), "a read failed");
            under_way -= found as u64;
        }
        Ok(start.elapsed())
    }
}

/// Measures, and tells each row.
pub fn measure(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    for provider in &bench.arguments.providers {
        over(bench, provider, report).with_context(|| format!("provider {provider}"))?;
    }
    Ok(())
}

fn over(bench: &Bench<'_>, provider: &str, report: &mut Report) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let memory = memory_for(&bench.sizes);
    let rack = Rack::default();
    let serving = Node::start(&rack, provider, &folder.path().join("serves"), memory, Move::Auto)?;
    let near = Node::start(&rack, provider, &folder.path().join("fetches"), memory, Move::Auto)?;
    // Beside tcp as the same wire, and beside shm as what two nodes of one host choose by themselves.
    let mut mooncake = match provider {
        "shm" | "tcp" => bench.scripted("mooncake", folder.path(), memory),
        _ => None,
    };
    for size in &bench.sizes {
        // Two in turn: of one alone each fetch would wait for what the fetching node does after the last.
        let ids = (0..2).map(|_| serving.put(*size)).collect::<anyhow::Result<_>>()?;
        let objects = Objects { size: *size, ids, from: serving.address };
        size_over(bench, provider, &objects, &near, &mut mooncake, report)?;
        objects.ids.iter().try_for_each(|id| serving.client.delete(*id))?;
    }
    // The fetching node ends before the serving one.
    drop(near);
    Ok(())
}

/// Objects of one size, and the node that has them.
struct Objects {
    size: u64,
    ids: Vec<ObjectId>,
    from: SocketAddr,
}

impl Objects {
    /// Has `node` fetch the next object, and forget it again.
    fn fetch(&self, node: &Node, next: &mut usize) -> anyhow::Result<Duration> {
        *next += 1;
        node.fetch(self.ids[*next % self.ids.len()], self.from)
    }

    /// Fetches per second by one protocol, and what each took.
    fn turn(
        &self,
        node: &Node,
        moves: Move,
        turn: Duration,
        times: &RefCell<Vec<f64>>,
    ) -> anyhow::Result<f64> {
        node.manager.move_by(moves);
        let mut next = 0;
        rate(turn, || {
            let took = self.fetch(node, &mut next)?;
            times.borrow_mut().push(took.as_secs_f64() * 1e6);
            Ok((1, took))
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
fn size_over(
    bench: &Bench<'_>,
    provider: &str,
    objects: &Objects,
    near: &Node,
    mooncake: &mut Option<Scripted>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let size = objects.size;
    // Connections, registrations and first pages; and what the mixed protocol learns from.
    for (name, moves) in PROTOCOLS {
        near.manager.move_by(moves);
        let learns = if size < LARGE { 40 } else { 8 };
        let rounds = if name == "mixed" { bench.options.size(learns, 2) } else { 2 };
        let mut next = 0;
        (0..rounds).try_for_each(|_| objects.fetch(near, &mut next).map(drop))?;
    }
    let mut reads = Reads::open(provider, size)?;
    let times: [RefCell<Vec<f64>>; PROTOCOLS.len()] = Default::default();
    let mooncake = mooncake.as_mut().map(RefCell::new);
    let turn = bench.turn;
    let mut contenders: Vec<_> = PROTOCOLS
        .iter()
        .zip(&times)
        .map(|((name, moves), times)| {
            Contender::new(name, move || objects.turn(near, *moves, turn, times))
        })
        .collect();
    let turn = || rate(bench.turn, || Ok((1, reads.read(size)?)));
    contenders.push(Contender::new(PROVIDER, turn));
    for (call, name) in MOONCAKE {
        let Some(mooncake) = &mooncake else { break };
        let turn = move || mooncake.borrow_mut().figure(call, size, bench.turn);
        contenders.push(Contender::new(name, turn));
    }
    let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
    drop(contenders);
    let case = format!("fetch {} over {provider}", size_name(size));
    let medians: Vec<f64> = figures.iter().map(|figures| Spread::of(figures).median).collect();
    let best = (0..MIXED).max_by(|one, other| medians[*one].total_cmp(&medians[*other]));
    let best = best.unwrap_or(0);
    // A rate is ruled by the slowest transfers; what most of them take stands beside it.
    let usual: Vec<f64> = times.iter().map(|times| Spread::of(&times.borrow()).median).collect();
    let least = usual[..MIXED].iter().copied().fold(f64::INFINITY, f64::min);
    let row = |index: usize| {
        let row = Row::new(&case, PROTOCOLS[index].0, "op/s", Better::Higher, &figures[index]);
        let bytes = row.figure.median * size as f64 / 1e9;
        row.beside("GB/s", number(bytes)).beside("median us", number(usual[index]))
    };
    report.tell(row(0), bench.output)?;
    for index in 1..PROTOCOLS.len() {
        let row = row(index).against(PROTOCOLS[0].0, &figures[index], &figures[0]);
        report.tell(row, bench.output)?;
    }
    near.manager.publish();
    let crossing = near.manager.metrics().objects_crossing_bytes.value();
    let of_best = row(MIXED)
        .against(format!("the best: {}", PROTOCOLS[best].0), &figures[MIXED], &figures[best])
        .beside("by median time", number(least / usual[MIXED]))
        .beside("crossing", size_name(crossing));
    report.tell(of_best, bench.output)?;
    let provider = PROTOCOLS.len();
    let beside = row(ONE_SIDED).against(PROVIDER, &figures[ONE_SIDED], &figures[provider]);
    report.tell(beside, bench.output)?;
    for ((_, name), theirs) in MOONCAKE.iter().zip(&figures[provider + 1..]) {
        report.tell(row(MIXED).against(*name, &figures[MIXED], theirs), bench.output)?;
    }
    Ok(())
}
