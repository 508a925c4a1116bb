//! The suite with one end in another host.
//!
//! With `BEELINE_CONFORMANCE_FAR=HOST:PORT` every second node of an item, and every peer process,
//! lives in the other host, where the same test binary runs with `BEELINE_CONFORMANCE_AGENT=PORT`.
//! Items do not know: what they hold of a far node are stand-ins that have each call made there,
//! one connection per thread, because data objects stay on their thread there too.
//!
//! ```text
//!  item ── near device ══════════ the network under test ══════════ device ── agent
//!    └──── stand-in ── calls and answers, a TCP connection per thread ──────────┘
//! ```
//!
//! Memory of a far node is a mirror here: looking at it through [`refresh`] fetches it first,
//! and what an item stores goes there through [`pushed`].

mod agent;
mod device;
mod process;
mod wire;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use beeline_fabric::{CompletionQueue, Device, FabricError};
use beeline_os::memory::{MemoryObject, copy_in, copy_out};

pub(crate) use process::FarProcess;

use crate::context::Context;
use crate::harness::{Harness, Stop};
use device::{FarDevice, FarQueue};
use wire::{Answer, Call, Kind};

const FAR_VARIABLE: &str = "BEELINE_CONFORMANCE_FAR";
const AGENT_VARIABLE: &str = "BEELINE_CONFORMANCE_AGENT";
/// Beyond any bound of an item, so that an item's own bound speaks first.
const PATIENCE: Duration = Duration::from_secs(120);

/// Nodes made by the item that runs.
static NODES: AtomicU64 = AtomicU64::new(0);
/// Far memory by the base of its mirror.
static MIRRORS: Mutex<Option<HashMap<usize, u64>>> = Mutex::new(None);

thread_local! {
    static CHANNEL: RefCell<Option<TcpStream>> = const { RefCell::new(None) };
}

/// The other host's address, where there is one.
fn far() -> Option<&'static str> {
    static FAR: OnceLock<Option<String>> = OnceLock::new();
    FAR.get_or_init(|| std::env::var(FAR_VARIABLE).ok()).as_deref()
}

/// The body of `conformance_peer_process` in the other host: serves until the process is ended.
/// Does nothing where no port is named.
pub(crate) fn agent(harness: &dyn Harness, module: &'static str) {
    let port = std::env::var(AGENT_VARIABLE).ok().and_then(|port| port.parse().ok());
    let Some(port) = port else { return };
    let served = agent::serve(Context::new(harness, module), port);
    assert!(served.is_ok(), "the agent serves: {served:?}");
}

/// True when the suite has another host.
pub(crate) fn is_there() -> bool {
    far().is_some()
}

/// An item begins.
pub(crate) fn begin_item() {
    NODES.store(0, Ordering::Relaxed);
}

/// The device of the item's next node, when that is in the other host.
pub(crate) fn next_device() -> Option<Result<Arc<dyn Device>, Stop>> {
    far()?;
    let is_far = NODES.fetch_add(1, Ordering::Relaxed) % 2 == 1;
    is_far.then(|| Ok(FarDevice::open()?))
}

fn connect() -> io::Result<TcpStream> {
    let address = far().ok_or(io::ErrorKind::NotConnected)?;
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn converse(stream: &mut TcpStream, call: &Call, bytes: &[u8]) -> io::Result<(Answer, Vec<u8>)> {
    wire::send(stream, call, bytes)?;
    wire::receive(stream)
}

/// Makes a call over this thread's connection.
fn ask_with(call: &Call, bytes: &[u8]) -> Result<(Answer, Vec<u8>), FabricError> {
    let unreachable =
        |source| FabricError::System { action: "asking the other host of the suite", source };
    let answered = CHANNEL.try_with(|channel| {
        let mut channel = channel.borrow_mut();
        let stream = match &mut *channel {
            Some(stream) => stream,
            None => channel.insert(connect()?),
        };
        converse(stream, call, bytes)
    });
    // A thread that ends has closed its connection, and with it everything of its own there.
    let answered = answered.map_err(|_| io::ErrorKind::NotConnected.into()).and_then(|done| done);
    match answered.map_err(unreachable)? {
        (Answer::Fabric(refusal), _) => Err(refusal.into()),
        (Answer::Failed(words), _) => Err(unreachable(io::Error::other(words))),
        answered => Ok(answered),
    }
}

fn ask(call: &Call) -> Result<Answer, FabricError> {
    Ok(ask_with(call, &[])?.0)
}

/// Forgets an object there; nobody is left to tell if that fails.
fn forget(kind: Kind, number: u64) {
    let _ = ask(&Call::Forget { kind, number });
}

fn unexpected(answer: &Answer) -> FabricError {
    let source = io::Error::other(format!("{answer:?} answers another call"));
    FabricError::System { action: "asking the other host of the suite", source }
}

fn with_mirrors<T>(work: impl FnOnce(&mut HashMap<usize, u64>) -> T) -> T {
    let mut mirrors = MIRRORS.lock().unwrap_or_else(PoisonError::into_inner);
    work(mirrors.get_or_insert_default())
}

/// The far memory that an object mirrors.
fn mirrored(memory: &dyn MemoryObject) -> Option<u64> {
    far()?;
    let base = memory.base().as_ptr() as usize;
    with_mirrors(|mirrors| mirrors.get(&base).copied())
}

/// Fetches a range before it is looked at, where the memory is far.
pub(crate) fn refresh(memory: &dyn MemoryObject, offset: usize, length: usize) {
    let Some(number) = mirrored(memory) else { return };
    let fetched = ask_with(&Call::Load { memory: number, offset, length }, &[]);
    assert!(fetched.is_ok(), "the other host shows its memory: {fetched:?}");
    if let Ok((_, bytes)) = fetched {
        copy_in(memory, offset, &bytes);
    }
}

/// Passes a range on after it was stored, where the memory is far.
pub(crate) fn pushed(memory: &dyn MemoryObject, offset: usize, length: usize) {
    let Some(number) = mirrored(memory) else { return };
    let mut bytes = vec![0; length];
    copy_out(memory, offset, &mut bytes);
    let stored = ask_with(&Call::Store { memory: number, offset }, &bytes);
    assert!(stored.is_ok(), "the other host takes what is stored: {stored:?}");
}

/// As [`crate::Harness::wait_readable`] for the event of a queue, which may be far.
pub(crate) fn wait_event(
    context: &Context<'_>,
    queue: &dyn CompletionQueue,
    timeout: Duration,
) -> Result<bool, Stop> {
    let descriptor: BorrowedFd<'_> = match queue.as_any().downcast_ref::<FarQueue>() {
        Some(queue) => return Ok(queue.is_readable(timeout)?),
        None => queue.event_descriptor(),
    };
    Ok(context.harness.wait_readable(descriptor, timeout)?)
}
