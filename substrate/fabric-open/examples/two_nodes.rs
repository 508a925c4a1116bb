//! Two nodes over fabric, on one screen: the first offers a region, the second reads, writes, adds
//! and says so with an immediate. No code of the first runs meanwhile where the provider is
//! one-sided (shm).
//!
//! ```sh
//! cargo run -p beeline-fabric-open --example two_nodes            # shared memory
//! cargo run -p beeline-fabric-open --example two_nodes -- tcp://
//! ```
//!
//! Here both nodes are threads, and a channel carries what each has to know of the other: the
//! connection data of its queue pair, and the address of the region. Between processes or hosts the
//! bootstrap exchange does that ([`beeline_fabric_open::Dialler`], [`beeline_fabric_open::Bootstrap`]).

#![allow(clippy::print_stdout, reason = "an example says what it found")]

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, LocalData, Operation, QueuePairOptions, ReceiveRequest,
    RemoteAddress, Role, ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out, load_u64};

type Failure = Box<dyn Error + Send + Sync>;

const PATIENCE: Duration = Duration::from_secs(10);

/// Waits for one completion, which has to be a good one.
fn completion(queue: &dyn CompletionQueue) -> Result<WorkCompletion, Failure> {
    let mut completions = [WorkCompletion::EMPTY];
    match queue.wait(&mut completions, PATIENCE)? {
        1 if completions[0].is_success() => Ok(completions[0]),
        1 => Err(format!("a request ended with {:?}", completions[0].status).into()),
        _ => Err("nothing completed in time".into()),
    }
}

/// Offers a region and waits to be told that the other is done; returns what it finds there.
fn offer(
    url: &str,
    peer: &Receiver<ConnectInfo>,
    to_peer: &Sender<(ConnectInfo, RemoteAddress)>,
) -> Result<(String, u64), Failure> {
    let device = beeline_fabric_open::open(url)?;
    let domain = device.allocate_protection_domain()?;
    let queue = device.create_completion_queue(16)?;
    let region = domain.register(device.allocate_memory(4096)?, Access::all())?;
    copy_in(region.memory().as_ref(), 0, b"hello");
    let mut pair = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
    // Posted before the other can send: the immediate below consumes it.
    pair.post_receive(&[ReceiveRequest { wr_id: 1, buffer: None }])?;
    to_peer.send((pair.connect_info(), region.remote_address(0)))?;
    pair.connect(&peer.recv()?, Role::Passive)?;
    pair.wait_connected(PATIENCE)?;
    let told = completion(queue.as_ref())?;
    assert_eq!(told.immediate, Some(42), "the other's word");
    // Until the visitor has hung up: a queue pair that goes ends what its peer has outstanding, and
    // the visitor may not have heard yet that its last request is done.
    let _ = peer.recv();
    let mut text = [0; 5];
    copy_out(region.memory().as_ref(), 0, &mut text);
    Ok((String::from_utf8_lossy(&text).into_owned(), load_u64(region.memory().as_ref(), 64)))
}

/// Reads the other's region, changes it, and says so; returns what it read.
fn visit(
    url: &str,
    peer: &Receiver<(ConnectInfo, RemoteAddress)>,
    to_peer: Sender<ConnectInfo>,
) -> Result<String, Failure> {
    let device = beeline_fabric_open::open(url)?;
    let domain = device.allocate_protection_domain()?;
    let queue = device.create_completion_queue(16)?;
    let own = domain.register(device.allocate_memory(4096)?, Access::LOCAL_WRITE)?;
    let mut pair = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default())?;
    let (info, remote) = peer.recv()?;
    to_peer.send(pair.connect_info())?;
    pair.connect(&info, Role::Active)?;
    pair.wait_connected(PATIENCE)?;

    let local = ScatterGatherEntry { region: &own, offset: 0, length: 5 };
    pair.post_send(&[WorkRequest::new(1, Operation::Read { local, remote })])?;
    completion(queue.as_ref())?;
    let mut text = [0; 5];
    copy_out(own.memory().as_ref(), 0, &mut text);

    // A list is posted whole, runs in order, and each request completes in order.
    let old = ScatterGatherEntry { region: &own, offset: 64, length: 8 };
    let add = Operation::FetchAndAdd { local: old, remote: remote.advanced(64), addend: 7 };
    let local = LocalData::Inline(b"HELLO");
    let write = Operation::WriteWithImmediate { local, remote, immediate: 42 };
    pair.post_send(&[WorkRequest::new(2, add), WorkRequest::new(3, write)])?;
    for expected in 2..=3 {
        assert_eq!(completion(queue.as_ref())?.wr_id, expected, "completions come in post order");
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Runs both nodes over devices of `url`; what the visitor read, and what it left behind.
pub fn run(url: &str) -> Result<(String, String, u64), Failure> {
    let (to_visitor, from_owner) = channel();
    let (to_owner, from_visitor) = channel();
    std::thread::scope(|scope| {
        let owner = scope.spawn(move || offer(url, &from_visitor, &to_visitor));
        let read = visit(url, &from_owner, to_owner);
        let (text, count) = owner.join().map_err(|_| "the owner's thread panicked")??;
        Ok((read?, text, count))
    })
}

#[allow(dead_code, reason = "the test of this example calls `run`")]
fn main() -> Result<(), Failure> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "shm://".to_owned());
    let (read, text, count) = run(&url)?;
    println!("over {url}: read {read:?}, left {text:?} and {count}");
    Ok(())
}
