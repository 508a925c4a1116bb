//! The service in this process, its clients, and the loads they run.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use beeline_direct::{DirectOptions, DirectService, FabricClient};
use beeline_env::Randomness;
use beeline_fabric::{ConnectInfo, Device};
use beeline_kv_direct::{Link, LinkOptions, Request, Status, TableOptions};
use beeline_kv_direct_model::index::{Sizes, tune};
use beeline_observe::LatencyRecorder;

use crate::bench::kv::load::Keys;
use crate::bench::turns::pin;

/// Polls that long before it sleeps: what is measured is not a wake-up.
const SPIN: Duration = Duration::from_millis(1);
/// Packets a link may have outstanding; each part of the benchmark says how many it uses.
const LINK_WINDOW: u16 = 64;
/// Requests that a stream repeats.
const STREAM: u64 = 1 << 20;

/// The bytes of key `number`.
pub fn key(number: u64) -> [u8; 8] {
    crate::bench::kv::load::key(number)
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Rig {
    service: DirectService,
    device: Arc<dyn Device>,
}

impl Rig {
    /// A service on the first processor whose memory `pairs` of 16 bytes fill to a quarter, its table tuned
    /// for them as the paper's are.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub fn start(pairs: u64) -> anyhow::Result<Self> {
        let memory_bytes = (pairs * 64).max(32 << 20);
        let utilisation = (pairs * 16) as f64 / memory_bytes as f64;
        // A few pairs in the least memory need no tuning.
        let tuned =
            if utilisation < 0.1 { None } else { tune(8 << 20, Sizes::one(16), utilisation)? };
        let table = tuned.map_or_else(TableOptions::default, |choice| TableOptions {
            // The largest that fits a small table may be too large by some pairs.
            index_permille: choice.index_permille * 9 / 10,
            inline_threshold: choice.inline_threshold,
            ..TableOptions::default()
        });
        Self::with(memory_bytes, table)
    }

    /// A service with this memory and table.
    pub fn with(memory_bytes: u64, table: TableOptions) -> anyhow::Result<Self> {
        let options = DirectOptions { memory_bytes, table, spin: SPIN, ..DirectOptions::default() };
        // Its threads run where the thread runs that starts them.
        let service = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                pin(0)?;
                Ok::<_, anyhow::Error>(DirectService::start(&options)?)
            });
            thread.join().map_err(|_| anyhow::anyhow!("starting the service panicked"))?
        })?;
        Ok(Self { service, device: beeline_fabric_open::open("shm://")? })
    }

    /// A connection for this thread.
    pub fn link(&self) -> anyhow::Result<Link> {
        let handle = self.service.handle();
        let mut exchange = |peer: &ConnectInfo, hello: &[u8]| {
            let (sender, receiver) = mpsc::channel();
            handle.accept(FabricClient {
                processor: 0,
                device: Arc::clone(&self.device),
                peer: peer.clone(),
                payload: hello.to_vec(),
                reply: Box::new(move |outcome| drop(sender.send(outcome))),
            });
            let welcome = receiver.recv()??;
            Ok((welcome.info.unwrap_or(ConnectInfo(Vec::new())), welcome.payload))
        };
        let device = beeline_fabric_open::open("shm://")?;
        let options = LinkOptions { window: LINK_WINDOW, ..LinkOptions::default() };
        Ok(Link::connect(&device, &mut exchange, options)?)
    }

    /// Stores every pair.
    pub fn fill(&self, pairs: u64) -> anyhow::Result<()> {
        let mut link = self.link()?;
        let mut next = 0;
        rate_of(&mut link, pairs, 32, 8, |push| {
            next += 1;
            push(&Request::put(&key(next - 1), &[1; 8]))
        })?;
        Ok(())
    }
}

/// Requests drawn ahead, so that drawing them costs the client nothing.
#[derive(Debug)]
pub struct Stream {
    requests: Vec<([u8; 8], bool)>,
    at: usize,
}

impl Stream {
    /// `gets` percent of GETs over `pairs` keys.
    pub fn new(pairs: u64, gets: u64, zipf: bool) -> Self {
        let mut keys = if zipf { Keys::zipf(pairs, 0.99, 1) } else { Keys::uniform(pairs, 1) };
        let mut random = Randomness::new(2);
        let count = STREAM.min(pairs * 16);
        let requests = (0..count).map(|_| (key(keys.next()), random.chance(gets, 100))).collect();
        Self { requests, at: 0 }
    }

    /// Key, and whether it is a GET.
    pub fn next(&mut self) -> ([u8; 8], bool) {
        let next = self.requests[self.at];
        // No division in the client's loop.
        self.at += 1;
        if self.at == self.requests.len() {
            self.at = 0;
        }
        next
    }
}

/// Operations a second, `batch` to a packet, `window` packets outstanding.
pub fn rate(
    link: &mut Link,
    stream: &mut Stream,
    operations: u64,
    batch: u16,
    window: usize,
) -> anyhow::Result<f64> {
    rate_of(link, operations, batch, window, |push| {
        let (key, get) = stream.next();
        if get { push(&Request::get(&key)) } else { push(&Request::put(&key, &[7; 8])) }
    })
}

/// As [`rate`], with requests that `next` hands to the function it is given.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn rate_of(
    link: &mut Link,
    operations: u64,
    batch: u16,
    window: usize,
    mut next: impl FnMut(&mut dyn FnMut(&Request<'_>)),
) -> anyhow::Result<f64> {
    let mut packet = link.packet();
    let (mut sent, mut done, mut refused) = (0, 0, 0);
    let began = Instant::now();
    while done < operations {
        while sent < operations && link.room() > 0 && link.outstanding() < window {
            let mut whole = true;
            for _ in 0..u64::from(batch).min(operations - sent) {
                next(&mut |request| whole &= packet.push(request));
                sent += 1;
            }
            ensure!(whole, "the packet is too small for the batch");
            link.submit(&mut packet)?;
        }
        link.wait(Duration::from_secs(1), |_, results| {
            for (status, _) in results {
                refused += u64::from(status != Status::Ok);
                done += 1;
            }
        })?;
    }
    ensure!(refused == 0, "{refused} operations were refused");
    Ok(operations as f64 / began.elapsed().as_secs_f64())
}

/// Bytes of the key in a pair of `bytes`: eight, or all but the value's one.
pub fn key_bytes(bytes: usize) -> usize {
    bytes.saturating_sub(1).clamp(1, 8)
}

/// Stores `pairs` pairs of `bytes` each; false where they do not fit.
pub fn fill_sized(rig: &Rig, pairs: u64, bytes: usize) -> anyhow::Result<bool> {
    let length = key_bytes(bytes);
    let value = vec![1; bytes - length];
    let mut link = rig.link()?;
    let mut next = 0;
    let filled = rate_of(&mut link, pairs, 32, 8, |push| {
        next += 1;
        push(&Request::put(&key(next - 1)[..length], &value))
    });
    // Where it is full the rate is an error: operations were refused.
    Ok(filled.is_ok())
}

/// As [`rate`], with pairs of `bytes` each.
pub fn rate_sized(
    link: &mut Link,
    stream: &mut Stream,
    operations: u64,
    batch: u16,
    bytes: usize,
) -> anyhow::Result<f64> {
    let length = key_bytes(bytes);
    let value = vec![7; bytes - length];
    rate_of(link, operations, batch, 8, |push| {
        let (key, get) = stream.next();
        let key = &key[..length];
        if get { push(&Request::get(key)) } else { push(&Request::put(key, &value)) }
    })
}

/// Packets of `batch` operations sent at `rate` operations a second, whether the ones before were answered
/// or not: latencies count from the time at which a packet should have been sent.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn offered(
    link: &mut Link,
    stream: &mut Stream,
    operations: u64,
    batch: u16,
    rate: f64,
) -> anyhow::Result<LatencyRecorder> {
    let mut packet = link.packet();
    let mut recorder = LatencyRecorder::new();
    let between_ns = 1e9 * f64::from(batch) / rate;
    let packets = operations / u64::from(batch);
    let mut due_of = [0_u64; LINK_WINDOW as usize];
    let began = Instant::now();
    let now = || u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let (mut sent, mut answered, mut refused) = (0_u64, 0_u64, 0_u64);
    while answered < packets {
        let due = (sent as f64 * between_ns) as u64;
        if sent < packets && link.room() > 0 && now() >= due {
            for _ in 0..batch {
                let (key, get) = stream.next();
                let request = if get { Request::get(&key) } else { Request::put(&key, &[7; 8]) };
                ensure!(packet.push(&request), "the packet is too small for the batch");
            }
            let slot = link.submit(&mut packet)?;
            due_of[usize::from(slot)] = due;
            sent += 1;
        }
        link.poll(|slot, results| {
            refused += results.filter(|(status, _)| *status != Status::Ok).count() as u64;
            recorder.record_ns(now().saturating_sub(due_of[usize::from(slot)]));
            answered += 1;
        })?;
    }
    ensure!(refused == 0, "{refused} operations were refused");
    Ok(recorder)
}

/// Median and 99th percentile of single GETs, microseconds.
#[expect(clippy::cast_precision_loss, reason = "latencies far below 2^52 ns")]
pub fn latency(
    link: &mut Link,
    stream: &mut Stream,
    operations: u64,
) -> anyhow::Result<(f64, f64)> {
    let mut packet = link.packet();
    let mut recorder = LatencyRecorder::new();
    for _ in 0..operations {
        let (key, _) = stream.next();
        let began = Instant::now();
        ensure!(packet.push(&Request::get(&key)), "an empty packet holds a GET");
        link.submit(&mut packet)?;
        let mut found = None;
        link.wait(Duration::from_secs(1), |_, mut results| {
            found = results.next().map(|(status, _)| status);
        })?;
        recorder.record_ns(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let status = found.context("a reply without a result")?;
        ensure!(status == Status::Ok, "a key that was stored is gone");
    }
    let summary = recorder.summary();
    Ok((summary.p50_ns as f64 / 1e3, summary.p99_ns as f64 / 1e3))
}
