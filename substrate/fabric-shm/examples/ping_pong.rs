//! Measures the provider against the machine: an 8-byte write answered by an 8-byte write beside a
//! bare cache-line ping-pong of the same two processors, the cost of a post and its poll, message
//! round trips, and 1 MiB writes beside `memcpy`. Turns alternate; medians of the rounds.
//!
//! `cargo run --release -p beeline-fabric-shm --example ping_pong`

use std::error::Error;
use std::hint::spin_loop;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, LocalData, MemoryRegion, Operation, QueuePair,
    QueuePairOptions, ReceiveRequest, RemoteAddress, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_os::affinity;
use beeline_os::memory::load_u64;

const TURNS: u64 = 50_000;
const ROUNDS: usize = 7;
const BIG: usize = 1 << 20;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

struct End {
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
    region: MemoryRegion,
    remote: RemoteAddress,
}

fn connect(
    device: &Arc<dyn Device>,
    role: Role,
    tell: &mpsc::Sender<(ConnectInfo, RemoteAddress)>,
    hear: &mpsc::Receiver<(ConnectInfo, RemoteAddress)>,
) -> Outcome<End> {
    let domain = device.allocate_protection_domain()?;
    let queue = device.create_completion_queue(1024)?;
    let mut pair = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
    let region = domain.register(device.allocate_memory(4 << 20)?, Access::all())?;
    tell.send((pair.connect_info(), region.remote_address(0)))?;
    let (info, remote) = hear.recv()?;
    pair.connect(&info, role)?;
    pair.wait_connected(Duration::from_secs(5))?;
    let mut end = End { queue, pair, region, remote };
    // Opens the key, and touches both mappings.
    let whole = ScatterGatherEntry { region: &end.region, offset: 2 << 20, length: BIG as u64 };
    let write =
        Operation::Write { local: LocalData::Gather(&[whole]), remote: remote.advanced(1 << 20) };
    let warm = WorkRequest::new(0, write);
    end.pair.post_send(&[warm])?;
    end.next()?;
    Ok(end)
}

impl End {
    fn next(&mut self) -> Outcome<WorkCompletion> {
        let mut one = [WorkCompletion::EMPTY];
        while self.queue.poll(&mut one)? == 0 {
            spin_loop();
        }
        if one[0].is_success() { Ok(one[0]) } else { Err(format!("{:?}", one[0]).into()) }
    }

    fn write(&mut self, value: u64, signalled: bool) -> Outcome<()> {
        let bytes = value.to_ne_bytes();
        let local = LocalData::Inline(&bytes);
        let operation = Operation::Write { local, remote: self.remote };
        self.pair.post_send(&[WorkRequest { wr_id: value, operation, signalled }])?;
        Ok(())
    }

    fn await_value(&self, value: u64) {
        while load_u64(self.region.memory().as_ref(), 0) != value {
            spin_loop();
        }
    }

    fn post_empty_receive(&mut self) -> Outcome<()> {
        Ok(self.pair.post_receive(&[ReceiveRequest { wr_id: 0, buffer: None }])?)
    }

    fn notify(&mut self) -> Outcome<()> {
        let local = LocalData::Inline(&[1; 8]);
        let operation = Operation::WriteWithImmediate { local, remote: self.remote, immediate: 1 };
        Ok(self.pair.post_send(&[WorkRequest::unsignalled(0, operation)])?)
    }
}

fn serve(mut end: End, bare: &[AtomicU64; 32], barrier: &Barrier) -> Outcome<()> {
    for round in 0..ROUNDS as u64 {
        barrier.wait();
        for turn in 1..=TURNS {
            while bare[0].load(Ordering::Acquire) != round * TURNS + turn {
                spin_loop();
            }
            bare[16].store(round * TURNS + turn, Ordering::Release);
        }
        barrier.wait();
        for turn in 1..=TURNS {
            end.await_value(round * TURNS + turn);
            end.write(round * TURNS + turn, false)?;
        }
        end.post_empty_receive()?;
        barrier.wait();
        for _ in 0..TURNS {
            end.next()?;
            end.post_empty_receive()?;
            end.notify()?;
        }
        barrier.wait();
    }
    // The other side measures on.
    barrier.wait();
    Ok(())
}

fn per_turn(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / TURNS as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[expect(clippy::print_stdout, reason = "the table is the example's result")]
fn measure(mut end: End, bare: &[AtomicU64; 32], barrier: &Barrier) -> Outcome<()> {
    let mut samples: [Vec<f64>; 6] = Default::default();
    let (mut source, mut target) = (vec![1_u8; BIG], vec![2_u8; BIG]);
    for round in 0..ROUNDS as u64 {
        barrier.wait();
        let start = Instant::now();
        for turn in 1..=TURNS {
            bare[0].store(round * TURNS + turn, Ordering::Release);
            while bare[16].load(Ordering::Acquire) != round * TURNS + turn {
                spin_loop();
            }
        }
        samples[0].push(per_turn(start));
        barrier.wait();
        let start = Instant::now();
        for turn in 1..=TURNS {
            end.write(round * TURNS + turn, false)?;
            end.await_value(round * TURNS + turn);
        }
        samples[1].push(per_turn(start));
        end.post_empty_receive()?;
        barrier.wait();
        let start = Instant::now();
        for _ in 0..TURNS {
            end.notify()?;
            end.next()?;
            end.post_empty_receive()?;
        }
        samples[2].push(per_turn(start));
        // One receive is left over; the next round posts its own on top, well below the depth.
        barrier.wait();
        let start = Instant::now();
        for turn in 0..TURNS {
            end.write(turn | 1 << 60, true)?;
            end.next()?;
        }
        samples[3].push(per_turn(start));
        let megabytes = |start: Instant| 200.0 * BIG as f64 / start.elapsed().as_secs_f64() / 1e9;
        let start = Instant::now();
        for _ in 0..200 {
            target.copy_from_slice(std::hint::black_box(&source));
            std::mem::swap(&mut source, &mut target);
        }
        samples[4].push(megabytes(start));
        let start = Instant::now();
        for _ in 0..200 {
            let local =
                ScatterGatherEntry { region: &end.region, offset: 2 << 20, length: BIG as u64 };
            let write = Operation::Write {
                local: LocalData::Gather(&[local]),
                remote: end.remote.advanced(1 << 20),
            };
            end.pair.post_send(&[WorkRequest::unsignalled(0, write)])?;
        }
        samples[5].push(megabytes(start));
    }
    barrier.wait();
    let [bare, write, notify, post, memcpy, big] = samples.map(median);
    println!("bare cache-line ping-pong        {bare:7.0} ns");
    println!("8 B write, answered              {write:7.0} ns  {:.2} x bare", write / bare);
    println!("write with immediate, answered   {notify:7.0} ns  {:.2} x bare", notify / bare);
    println!("post and poll of an 8 B write    {post:7.0} ns");
    println!("memcpy of 1 MiB                  {memcpy:7.1} GB/s");
    println!("write of 1 MiB                   {big:7.1} GB/s  {:.2} x memcpy", big / memcpy);
    Ok(())
}

fn main() -> Outcome<()> {
    let cpus = affinity::allowed()?;
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    let bare: Arc<[AtomicU64; 32]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
    let barrier = Arc::new(Barrier::new(2));
    let (to_server, from_client) = mpsc::channel();
    let (to_client, from_server) = mpsc::channel();
    let theirs = (Arc::clone(&bare), Arc::clone(&barrier));
    let server = std::thread::spawn(move || -> Outcome<()> {
        affinity::pin_current_thread(last)?;
        let device = ShmDevice::open(ShmConfig::default())?;
        let end = connect(&device, Role::Passive, &to_client, &from_client)?;
        serve(end, &theirs.0, &theirs.1)
    });
    affinity::pin_current_thread(first)?;
    let device = ShmDevice::open(ShmConfig::default())?;
    let end = connect(&device, Role::Active, &to_server, &from_server)?;
    measure(end, &bare, &barrier)?;
    server.join().map_err(|_| "the serving thread panicked")??;
    Ok(())
}
