//! One kind of operation, many times, both ends on one thread: no cache line crosses, no end waits,
//! and what an operation takes can be counted. With a thousand and with three thousand operations
//! under `valgrind --tool=callgrind --toggle-collect='*End::post*'` (`poll`, `receive`), the difference
//! is what two thousand take of that stage.
//!
//! `cargo run --release -p beeline-fabric-shm --example counted -- KIND COUNT`, where KIND is
//! `write` (8 bytes, posted), `completed` (posted and polled), `immediate` (8 bytes with an
//! immediate, polled by the other end, its receive posted again), `send`, `read`, `add`.

use std::error::Error;
use std::hint::{black_box, spin_loop};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, LocalData, MemoryRegion, Operation, QueuePair,
    QueuePairOptions, ReceiveRequest, RemoteAddress, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_shm::{ShmConfig, ShmDevice};

type Outcome<T> = Result<T, Box<dyn Error>>;

struct End {
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
    region: MemoryRegion,
    remote: RemoteAddress,
    _device: Arc<dyn Device>,
}

impl End {
    fn open() -> Outcome<Self> {
        let device = ShmDevice::open(ShmConfig::default())?;
        let domain = device.allocate_protection_domain()?;
        let queue = device.create_completion_queue(1024)?;
        let pair = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
        let region = domain.register(device.allocate_memory(1 << 20)?, Access::all())?;
        let remote = region.remote_address(0);
        Ok(Self { queue, pair, region, remote, _device: device })
    }

    fn connect(&mut self, info: &ConnectInfo, remote: RemoteAddress, role: Role) -> Outcome<()> {
        self.remote = remote;
        Ok(self.pair.connect(info, role)?)
    }

    #[inline(never)]
    fn post(&mut self, request: &WorkRequest<'_>) -> Outcome<()> {
        Ok(self.pair.post_send(std::slice::from_ref(request))?)
    }

    #[inline(never)]
    fn poll(&mut self) -> Outcome<WorkCompletion> {
        let mut one = [WorkCompletion::EMPTY];
        while self.queue.poll(&mut one)? == 0 {
            spin_loop();
        }
        if one[0].is_success() { Ok(one[0]) } else { Err(format!("{:?}", one[0]).into()) }
    }

    /// As [`End::poll`], under a name of its own: how often it looks depends on another thread.
    #[inline(never)]
    fn wait(&mut self) -> Outcome<()> {
        let mut one = [WorkCompletion::EMPTY];
        while self.queue.wait(&mut one, Duration::from_secs(10))? == 0 {}
        if one[0].is_success() { Ok(()) } else { Err(format!("{:?}", one[0]).into()) }
    }

    #[inline(never)]
    fn receive(&mut self) -> Outcome<()> {
        let buffer = ScatterGatherEntry { region: &self.region, offset: 4096, length: 64 };
        Ok(self.pair.post_receive(&[ReceiveRequest { wr_id: 0, buffer: Some(buffer) }])?)
    }

    fn operate(&mut self, kind: &str, word: u64) -> Outcome<()> {
        let bytes = word.to_ne_bytes();
        let inline = LocalData::Inline(&bytes);
        let region = self.region.clone();
        let local = ScatterGatherEntry { region: &region, offset: 8192, length: 8 };
        let remote = self.remote;
        let silent = |operation| WorkRequest::unsignalled(0, operation);
        let told = |operation| WorkRequest::new(0, operation);
        self.post(&match kind {
            "write" => silent(Operation::Write { local: inline, remote }),
            "completed" => told(Operation::Write { local: inline, remote }),
            "immediate" => {
                silent(Operation::WriteWithImmediate { local: inline, remote, immediate: 1 })
            }
            "send" => silent(Operation::Send { local: inline, immediate: None }),
            "read" => told(Operation::Read { local, remote }),
            "add" => told(Operation::FetchAndAdd { local, remote, addend: 1 }),
            _ => return Err(format!("{kind} is no kind of operation").into()),
        })
    }
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let kind = arguments.next().unwrap_or_else(|| "write".to_owned());
    let count: u64 = arguments.next().map_or(Ok(1000), |count| count.parse())?;
    let (mut near, mut far) = (End::open()?, End::open()?);
    let (near_info, near_memory) = (near.pair.connect_info(), near.remote);
    near.connect(&far.pair.connect_info(), far.remote, Role::Active)?;
    far.connect(&near_info, near_memory, Role::Passive)?;
    for end in [&mut near, &mut far] {
        end.pair.wait_connected(Duration::from_secs(10))?;
    }
    for _ in 0..16 {
        far.receive()?;
    }
    // Opens the key.
    near.operate("completed", 1)?;
    near.wait()?;
    let far_answers = matches!(kind.as_str(), "immediate" | "send");
    for word in 0..black_box(count) {
        near.operate(&kind, word)?;
        match kind.as_str() {
            "write" => {}
            _ if far_answers => {
                far.poll()?;
                far.receive()?;
            }
            _ => drop(near.poll()?),
        }
    }
    Ok(())
}
