//! One end of a connection, and what it can be timed at.

use std::hint::spin_loop;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, LocalData, MemoryRegion, Operation, QueuePair,
    QueuePairOptions, ReceiveRequest, RemoteAddress, RemoteKey, Role, ScatterGatherEntry,
    WorkCompletion, WorkRequest,
};
use beeline_os::memory::{load_u64, store_u64};
use serde::{Deserialize, Serialize};

use super::blocks;
use super::peer::Echo;

/// A large operation.
pub const LARGE: usize = 1 << 20;
/// The words that the ends write to each other, and that atomics work on, lie first; large
/// operations go from the second MiB here to the third there.
const SOURCE: u64 = LARGE as u64;
const TARGET: u64 = 2 * LARGE as u64;
const REGION_BYTES: usize = 3 * LARGE;
/// Where messages arrive, and results of reads and atomics.
const INBOX: u64 = 4096;
const RESULT: u64 = 8192;
const ATOMIC: u64 = 12_288;
/// Nothing takes longer; a peer that is silent for this long is gone.
const BOUND: Duration = Duration::from_secs(20);
const RECEIVES: usize = 16;

/// What one end tells the other before they are connected.
#[derive(Debug, Serialize, Deserialize)]
pub struct Card {
    info: Vec<u8>,
    key: u64,
}

/// Operations that need nobody at the target.
#[derive(Clone, Copy, Debug)]
pub enum OneSided {
    /// 8 bytes, inline.
    Write,
    /// 8 bytes.
    Read,
    /// 8 bytes.
    FetchAndAdd,
    /// 8 bytes; fails and succeeds in turns.
    CompareAndSwap,
}

/// One end.
#[derive(Debug)]
pub struct End {
    pair: Box<dyn QueuePair>,
    queue: Rc<dyn CompletionQueue>,
    region: MemoryRegion,
    remote: RemoteAddress,
    /// The word last written; each round writes the next.
    word: u64,
    /// True where the other end's writes arrive without this end's polling.
    one_sided: bool,
    receives: bool,
    alone: bool,
    _device: Arc<dyn Device>,
}

impl End {
    /// A queue pair on a device of its own, not yet connected, and its card. With `alone`, both
    /// ends share one processor, and who waits gives it up.
    pub fn open(url: &str, alone: bool) -> anyhow::Result<(Self, Card)> {
        let device = beeline_fabric_open::open(url)?;
        let domain = device.allocate_protection_domain()?;
        let queue = device.create_completion_queue(1024)?;
        let pair = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
        let region = domain.register(device.allocate_memory(REGION_BYTES)?, Access::all())?;
        let card = Card { info: pair.connect_info().0, key: region.remote_key().0 };
        let remote = RemoteAddress { key: RemoteKey(0), offset: 0 };
        let one_sided = device.attributes().one_sided;
        Ok((
            Self {
                pair,
                queue,
                region,
                remote,
                word: 0,
                one_sided,
                receives: false,
                alone,
                _device: device,
            },
            card,
        ))
    }

    /// Connects to the end that showed `card`.
    pub fn connect(&mut self, card: Card, role: Role) -> anyhow::Result<()> {
        self.remote.key = RemoteKey(card.key);
        self.pair.connect(&ConnectInfo(card.info), role)?;
        self.pair.wait_connected(BOUND)?;
        Ok(())
    }

    /// Touches what large operations use, so that no turn pays for pages or for a first use.
    pub fn warm(&mut self) -> anyhow::Result<()> {
        self.write_bandwidth(4, 1)?;
        self.read_bandwidth(4, 1)?;
        for operation in [OneSided::Write, OneSided::Read, OneSided::FetchAndAdd] {
            self.operate(operation)?;
        }
        Ok(())
    }

    fn pause(&self) {
        if self.alone { std::thread::yield_now() } else { spin_loop() }
    }

    fn next(&mut self) -> anyhow::Result<WorkCompletion> {
        let mut one = [WorkCompletion::EMPTY];
        let mut turns = 0_u32;
        let mut start = None;
        while self.queue.poll(&mut one)? == 0 {
            self.pause();
            patience(&mut turns, &mut start)?;
        }
        ensure!(one[0].is_success(), "an operation ended in {:?}", one[0].status);
        Ok(one[0])
    }

    fn asleep(&mut self) -> anyhow::Result<()> {
        let mut one = [WorkCompletion::EMPTY];
        let count = self.queue.wait(&mut one, BOUND)?;
        ensure!(count == 1, "the peer did not answer");
        ensure!(one[0].is_success(), "an operation ended in {:?}", one[0].status);
        Ok(())
    }

    fn receive(&mut self) -> anyhow::Result<()> {
        let buffer = ScatterGatherEntry { region: &self.region, offset: INBOX, length: 64 };
        Ok(self.pair.post_receive(&[ReceiveRequest { wr_id: 0, buffer: Some(buffer) }])?)
    }

    /// Receives posted once and kept up by every exchange that takes one.
    pub fn ready(&mut self, echo: Echo) -> anyhow::Result<()> {
        if echo != Echo::Write && !self.receives {
            self.receives = true;
            for _ in 0..RECEIVES {
                self.receive()?;
            }
        }
        Ok(())
    }

    fn tell(&mut self, echo: Echo) -> anyhow::Result<()> {
        let bytes = self.word.to_ne_bytes();
        let (local, remote) = (LocalData::Inline(&bytes), self.remote);
        let operation = match echo {
            Echo::Write => Operation::Write { local, remote },
            Echo::Immediate | Echo::ImmediateAsleep => {
                Operation::WriteWithImmediate { local, remote, immediate: 1 }
            }
            Echo::Message => Operation::Send { local, immediate: None },
        };
        Ok(self.pair.post_send(&[WorkRequest::unsignalled(0, operation)])?)
    }

    fn hear(&mut self, echo: Echo) -> anyhow::Result<()> {
        match echo {
            Echo::Write => {
                let (mut turns, mut start) = (0, None);
                while load_u64(self.region.memory().as_ref(), 0) != self.word {
                    // Where writes arrive by themselves, polling only notices a peer that died.
                    if !self.one_sided || turns % 1024 == 1023 {
                        let mut one = [WorkCompletion::EMPTY];
                        let count = self.queue.poll(&mut one)?;
                        ensure!(one[..count].iter().all(WorkCompletion::is_success), "it failed");
                    }
                    self.pause();
                    patience(&mut turns, &mut start)?;
                }
            }
            Echo::Immediate | Echo::Message => {
                self.next()?;
                self.receive()?;
            }
            Echo::ImmediateAsleep => {
                self.asleep()?;
                self.receive()?;
            }
        }
        Ok(())
    }

    /// Writes, and waits for the answer, `rounds` times: median and p99 of blocks, microseconds.
    pub fn ask(&mut self, echo: Echo, rounds: u64) -> anyhow::Result<(f64, f64)> {
        self.ready(echo)?;
        blocks(rounds, || {
            self.word += 1;
            self.tell(echo)?;
            self.hear(echo)
        })
    }

    /// As [`End::ask`], untimed and without looking at a clock.
    pub fn repeat(&mut self, echo: Echo, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            self.word += 1;
            self.tell(echo)?;
            self.hear(echo)?;
        }
        Ok(())
    }

    /// Answers what comes, `rounds` times.
    pub fn answer(&mut self, echo: Echo, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            self.word += 1;
            self.hear(echo)?;
            self.tell(echo)?;
        }
        Ok(())
    }

    /// One operation, posted and completed.
    pub fn operate(&mut self, operation: OneSided) -> anyhow::Result<()> {
        let bytes = [7; 8];
        let remote = self.remote.advanced(ATOMIC);
        let local = ScatterGatherEntry { region: &self.region, offset: RESULT, length: 8 };
        let operation = match operation {
            OneSided::Write => Operation::Write { local: LocalData::Inline(&bytes), remote },
            OneSided::Read => Operation::Read { local, remote },
            OneSided::FetchAndAdd => Operation::FetchAndAdd { local, remote, addend: 1 },
            OneSided::CompareAndSwap => {
                let expected = load_u64(self.region.memory().as_ref(), RESULT as usize);
                let desired = expected.wrapping_add(1);
                Operation::CompareAndSwap { local, remote, expected, desired }
            }
        };
        self.pair.post_send(&[WorkRequest::new(0, operation)])?;
        self.next().map(drop)
    }

    /// Gigabytes per second of `count` writes of 1 MiB, `depth` outstanding.
    pub fn write_bandwidth(&mut self, count: usize, depth: usize) -> anyhow::Result<f64> {
        let remote = self.remote.advanced(TARGET);
        self.bandwidth(count, depth, |pair, entry| {
            let operation = Operation::Write { local: LocalData::Gather(&[entry]), remote };
            Ok(pair.post_send(&[WorkRequest::new(0, operation)])?)
        })
    }

    /// Gigabytes per second of `count` reads of 1 MiB, `depth` outstanding.
    pub fn read_bandwidth(&mut self, count: usize, depth: usize) -> anyhow::Result<f64> {
        let remote = self.remote.advanced(TARGET);
        self.bandwidth(count, depth, |pair, local| {
            Ok(pair.post_send(&[WorkRequest::new(0, Operation::Read { local, remote })])?)
        })
    }

    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    fn bandwidth(
        &mut self,
        count: usize,
        depth: usize,
        post: impl Fn(&mut dyn QueuePair, ScatterGatherEntry<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<f64> {
        let (mut posted, mut completed) = (0, 0);
        let mut done = [WorkCompletion::EMPTY; 16];
        let start = Instant::now();
        while completed < count {
            while posted < count && posted - completed < depth {
                let length = LARGE as u64;
                let entry = ScatterGatherEntry { region: &self.region, offset: SOURCE, length };
                post(self.pair.as_mut(), entry)?;
                posted += 1;
            }
            let found = if self.one_sided {
                self.queue.poll(&mut done)?
            } else {
                self.queue.wait(&mut done, BOUND)?
            };
            ensure!(
                done[..found].iter().all(WorkCompletion::is_success),
                "an operation failed: {:?}",
                done[0].status
            );
            ensure!(start.elapsed() < BOUND * 10, "the peer does not take the bytes");
            completed += found;
        }
        Ok((count * LARGE) as f64 / start.elapsed().as_secs_f64() / 1e9)
    }

    /// Sets the word both ends start from, once the other end knows.
    pub fn forget(&mut self) {
        self.word = 0;
        store_u64(self.region.memory().as_ref(), 0, 0);
    }
}

/// Ends a spin that takes too long, without looking at the clock each time.
fn patience(turns: &mut u32, start: &mut Option<Instant>) -> anyhow::Result<()> {
    *turns = turns.wrapping_add(1);
    if (*turns).is_multiple_of(1 << 14) {
        let start = start.get_or_insert_with(Instant::now);
        (start.elapsed() < BOUND).then_some(()).context("the peer is silent")?;
    }
    Ok(())
}
