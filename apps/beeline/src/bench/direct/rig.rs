//! The service in this process, its clients, and the loads they run.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use beeline_direct::{DirectOptions, DirectService, FabricClient};
use beeline_env::Randomness;
use beeline_fabric::{ConnectInfo, Device};
use beeline_kv_direct::{Link, LinkOptions, Request, Status};
use beeline_observe::LatencyRecorder;

use crate::bench::kv::load::Keys;
use crate::bench::turns::pin;

/// Polls that long before it sleeps: what is measured is not a wake-up.
const SPIN: Duration = Duration::from_millis(1);
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
    /// A service on the first processor with room for `pairs` small ones, and then some.
    pub fn start(pairs: u64) -> anyhow::Result<Self> {
        let memory_bytes = (pairs * 64).max(32 << 20);
        let options = DirectOptions { memory_bytes, spin: SPIN, ..DirectOptions::default() };
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
        Ok(Link::connect(&device, &mut exchange, LinkOptions::default())?)
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
        self.at = (self.at + 1) % self.requests.len();
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
