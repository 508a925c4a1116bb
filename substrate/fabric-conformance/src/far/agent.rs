//! The other host: makes the calls it is asked to make.
//!
//! A thread per connection, as the callers have: data objects are the thread's own, devices,
//! domains, memory and regions everybody's.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use beeline_fabric::{
    Access, AtomicScope, CompletionQueue, ConnectInfo, Device, FabricError, LocalData,
    MemoryRegion, Operation, PostError, ProtectionDomain, QueuePair, ReceiveRequest, RemoteAddress,
    RemoteKey, Role, ScatterGatherEntry, SharedReceiveQueue, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{MemoryObject, Persistence, copy_in, copy_out};

use super::wire::{
    Answer, Attributes, Call, Kind, Local, Range, Receive, Request, Work, completion_code,
    flush_kind, lasting, options, receive, send, state_code,
};
use crate::context::Context;
use crate::harness::Stop;
use crate::process::{Message, go_on, spawn, stop};

/// What all threads share.
#[derive(Debug, Default)]
struct Common {
    next: AtomicU64,
    devices: Mutex<HashMap<u64, Arc<dyn Device>>>,
    domains: Mutex<HashMap<u64, Arc<dyn ProtectionDomain>>>,
    memory: Mutex<HashMap<u64, Arc<dyn MemoryObject>>>,
    regions: Mutex<HashMap<u64, MemoryRegion>>,
}

/// Why a call was not made or failed.
enum Failure {
    Fabric(FabricError),
    Post(PostError),
    Other(Stop),
}

impl From<FabricError> for Failure {
    fn from(error: FabricError) -> Self {
        Self::Fabric(error)
    }
}

impl From<PostError> for Failure {
    fn from(error: PostError) -> Self {
        Self::Post(error)
    }
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        Self::Other(stop)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Other(error.into())
    }
}

fn unknown(kind: Kind) -> Stop {
    Stop::failed(format!("there is no such {kind:?} at the other host"))
}

fn get<T: Clone>(table: &Mutex<HashMap<u64, T>>, number: u64, kind: Kind) -> Result<T, Stop> {
    let table = table.lock().unwrap_or_else(PoisonError::into_inner);
    table.get(&number).cloned().ok_or_else(|| unknown(kind))
}

impl Common {
    fn put<T>(&self, table: &Mutex<HashMap<u64, T>>, value: T) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        table.lock().unwrap_or_else(PoisonError::into_inner).insert(number, value);
        number
    }
}

/// Takes a value out and drops it after the table was let go.
fn take<T>(table: &Mutex<HashMap<u64, T>>, number: u64) {
    let taken = table.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    drop(taken);
}

/// Memory that counts as persistent by write-back of cache lines.
#[derive(Debug)]
struct Surviving(Arc<dyn MemoryObject>);

// SAFETY: every promise is kept by the object inside, which lives as long as this one.
unsafe impl MemoryObject for Surviving {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }

    fn length_bytes(&self) -> usize {
        self.0.length_bytes()
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.0.descriptor()
    }

    fn persistence(&self) -> Persistence {
        Persistence::CacheLine
    }

    fn stored(&self, offset: usize, length: usize) {
        self.0.stored(offset, length);
    }

    fn replace_backing(&self) -> std::io::Result<()> {
        self.0.replace_backing()
    }
}

/// A thread's own objects. Pairs go before the queues they use.
struct Own<'a> {
    context: Context<'a>,
    common: &'a Common,
    pairs: HashMap<u64, Box<dyn QueuePair>>,
    shared: HashMap<u64, Rc<dyn SharedReceiveQueue>>,
    queues: HashMap<u64, Rc<dyn CompletionQueue>>,
}

impl Own<'_> {
    fn number(&self) -> u64 {
        self.common.next.fetch_add(1, Ordering::Relaxed)
    }

    fn queue(&self, number: u64) -> Result<&Rc<dyn CompletionQueue>, Stop> {
        self.queues.get(&number).ok_or_else(|| unknown(Kind::CompletionQueue))
    }

    fn pair(&mut self, number: u64) -> Result<&mut Box<dyn QueuePair>, Stop> {
        self.pairs.get_mut(&number).ok_or_else(|| unknown(Kind::Pair))
    }

    fn region(&self, number: u64) -> Result<MemoryRegion, Stop> {
        get(&self.common.regions, number, Kind::Region)
    }

    /// Makes one call.
    fn make(&mut self, call: Call, bytes: &[u8]) -> Result<(Answer, Vec<u8>), Failure> {
        if let Call::Load { memory, offset, length } = call {
            let memory = get(&self.common.memory, memory, Kind::Memory)?;
            let mut bytes = vec![0; length];
            copy_out(memory.as_ref(), offset, &mut bytes);
            return Ok((Answer::Done, bytes));
        }
        let answer = match call {
            Call::Store { memory, offset } => {
                let memory = get(&self.common.memory, memory, Kind::Memory)?;
                copy_in(memory.as_ref(), offset, bytes);
                Answer::Done
            }
            Call::Poll { .. }
            | Call::Arm { .. }
            | Call::Acknowledge { .. }
            | Call::Wait { .. }
            | Call::Readable { .. } => self.of_queue(&call)?,
            Call::State { .. }
            | Call::Info { .. }
            | Call::Connect { .. }
            | Call::WaitConnected { .. }
            | Call::PostSend { .. }
            | Call::PostReceive { .. }
            | Call::RevokePair { .. }
            | Call::PostShared { .. }
            | Call::Posted { .. } => self.of_pair(call)?,
            call => self.control(&call)?,
        };
        Ok((answer, Vec::new()))
    }

    /// Makes, revokes and forgets objects.
    fn control(&mut self, call: &Call) -> Result<Answer, Failure> {
        let common = self.common;
        let device = |number| get(&common.devices, number, Kind::Device);
        let domain = |number| get(&common.domains, number, Kind::Domain);
        Ok(match *call {
            Call::OpenDevice => {
                let device = self.context.harness.open_device()?;
                let found = device.attributes();
                let attributes = Attributes {
                    provider: found.provider.to_owned(),
                    sizes: [found.max_message_bytes, found.max_send_bytes],
                    counts: [
                        found.max_inline_bytes,
                        found.max_scatter_gather_entries,
                        found.max_queue_depth,
                        found.max_completion_queue_depth,
                    ],
                    one_sided: found.one_sided,
                    with_processor: found.atomics == AtomicScope::Processor,
                    persistent_flush: found.persistent_flush.to_owned(),
                };
                Answer::Device { number: common.put(&common.devices, device), attributes }
            }
            Call::AllocateMemory { device: number, length } => {
                let memory = device(number)?.allocate_memory(length)?;
                Answer::Number(common.put(&common.memory, memory))
            }
            Call::Domain { device: number } => {
                let domain = device(number)?.allocate_protection_domain()?;
                Answer::Number(common.put(&common.domains, domain))
            }
            Call::Register { domain: number, memory, access, survives } => {
                let memory = get(&common.memory, memory, Kind::Memory)?;
                let memory: Arc<dyn MemoryObject> =
                    if survives { Arc::new(Surviving(memory)) } else { memory };
                let access = Access::from_bits_truncate(access);
                let region = domain(number)?.register(memory, access)?;
                let (local, remote) = (region.local_key().0, region.remote_key().0);
                Answer::Region { number: common.put(&common.regions, region), local, remote }
            }
            Call::RevokeRegion { region } => {
                self.region(region)?.revoke()?;
                Answer::Done
            }
            Call::Forget { kind, number } => {
                match kind {
                    Kind::Device => take(&common.devices, number),
                    Kind::Domain => take(&common.domains, number),
                    Kind::Memory => take(&common.memory, number),
                    Kind::Region => take(&common.regions, number),
                    Kind::CompletionQueue => drop(self.queues.remove(&number)),
                    Kind::SharedQueue => drop(self.shared.remove(&number)),
                    Kind::Pair => drop(self.pairs.remove(&number)),
                }
                Answer::Done
            }
            Call::CompletionQueue { device: number, depth } => {
                let queue = device(number)?.create_completion_queue(depth)?;
                let number = self.number();
                self.queues.insert(number, queue);
                Answer::Number(number)
            }
            Call::SharedQueue { domain: number, depth } => {
                let queue = domain(number)?.create_shared_receive_queue(depth)?;
                let number = self.number();
                self.shared.insert(number, queue);
                Answer::Number(number)
            }
            Call::Pair { domain: number, send, receive, shared, shape } => {
                let shared = shared.map(|number| {
                    self.shared.get(&number).ok_or_else(|| unknown(Kind::SharedQueue))
                });
                let (send, receive) = (self.queue(send)?, self.queue(receive)?);
                let domain = domain(number)?;
                let pair =
                    domain.create_queue_pair(send, receive, shared.transpose()?, options(shape))?;
                let (number, qp_num) = (self.number(), pair.qp_num());
                self.pairs.insert(number, pair);
                Answer::Pair { number, qp_num }
            }
            _ => return Err(Stop::failed("a call of a process that was not started").into()),
        })
    }

    fn of_queue(&self, call: &Call) -> Result<Answer, Failure> {
        let room = |most: usize| vec![WorkCompletion::EMPTY; most.min(4096)];
        let found = |completions: &[WorkCompletion]| {
            Answer::Completions(completions.iter().map(completion_code).collect())
        };
        Ok(match *call {
            Call::Poll { queue, most } => {
                let mut into = room(most);
                let count = self.queue(queue)?.poll(&mut into)?;
                found(&into[..count])
            }
            Call::Wait { queue, most, us } => {
                let mut into = room(most);
                let count = self.queue(queue)?.wait(&mut into, Duration::from_micros(us))?;
                found(&into[..count])
            }
            Call::Arm { queue } => {
                self.queue(queue)?.arm()?;
                Answer::Done
            }
            Call::Acknowledge { queue } => {
                self.queue(queue)?.acknowledge()?;
                Answer::Done
            }
            Call::Readable { queue, us } => {
                let descriptor = self.queue(queue)?.event_descriptor();
                let timeout = Duration::from_micros(us);
                let readable = self.context.harness.wait_readable(descriptor, timeout)?;
                Answer::Number(u64::from(readable))
            }
            _ => return Err(Stop::failed("not a call of a queue").into()),
        })
    }

    fn of_pair(&mut self, call: Call) -> Result<Answer, Failure> {
        Ok(match call {
            Call::State { pair } => Answer::State(state_code(self.pair(pair)?.state())),
            Call::Info { pair } => Answer::Bytes(self.pair(pair)?.connect_info().0),
            Call::Connect { pair, info, active } => {
                let role = if active { Role::Active } else { Role::Passive };
                self.pair(pair)?.connect(&ConnectInfo(info), role)?;
                Answer::Done
            }
            Call::WaitConnected { pair, us } => {
                self.pair(pair)?.wait_connected(Duration::from_micros(us))?;
                Answer::Done
            }
            Call::RevokePair { pair } => {
                self.pair(pair)?.revoke()?;
                Answer::Done
            }
            Call::PostSend { pair, requests } => {
                self.post_send(pair, &requests)?;
                Answer::Done
            }
            Call::PostReceive { pair, requests } => {
                let regions = self.buffers(&requests)?;
                self.pair(pair)?.post_receive(&receives(&requests, &regions))?;
                Answer::Done
            }
            Call::PostShared { queue, requests } => {
                let regions = self.buffers(&requests)?;
                let queue = self.shared.get(&queue).ok_or_else(|| unknown(Kind::SharedQueue))?;
                queue.post_receive(&receives(&requests, &regions))?;
                Answer::Done
            }
            Call::Posted { queue } => {
                let queue = self.shared.get(&queue).ok_or_else(|| unknown(Kind::SharedQueue))?;
                Answer::Number(queue.posted().into())
            }
            _ => return Err(Stop::failed("not a call of a queue pair").into()),
        })
    }

    fn buffers(&self, requests: &[Receive]) -> Result<Vec<Option<MemoryRegion>>, Stop> {
        let region =
            |request: &Receive| request.buffer.map(|buffer| self.region(buffer.region)).transpose();
        requests.iter().map(region).collect()
    }

    fn post_send(&mut self, pair: u64, requests: &[Request]) -> Result<(), Failure> {
        // First the regions, then the entries over them, then the requests over those.
        let ranges = |request: &Request| -> Vec<Range> {
            match &request.work {
                Work::Write(Local::Gather(list), ..) | Work::Send(Local::Gather(list), _) => {
                    list.clone()
                }
                Work::Read(range, _)
                | Work::CompareAndSwap(range, ..)
                | Work::FetchAndAdd(range, ..) => vec![*range],
                _ => Vec::new(),
            }
        };
        let mut held = Vec::new();
        for request in requests {
            let mut regions = Vec::new();
            for range in ranges(request) {
                regions.push((self.region(range.region)?, range));
            }
            held.push(regions);
        }
        let entries: Vec<Vec<ScatterGatherEntry<'_>>> = held
            .iter()
            .map(|regions| regions.iter().map(|(region, range)| entry(region, *range)).collect())
            .collect();
        let list: Vec<WorkRequest<'_>> =
            requests.iter().zip(&entries).map(|(one, entries)| request(one, entries)).collect();
        Ok(self.pair(pair)?.post_send(&list)?)
    }
}

fn entry(region: &MemoryRegion, range: Range) -> ScatterGatherEntry<'_> {
    ScatterGatherEntry { region, offset: range.offset, length: range.length }
}

fn receives<'a>(
    requests: &[Receive],
    regions: &'a [Option<MemoryRegion>],
) -> Vec<ReceiveRequest<'a>> {
    let one = |(request, region): (&Receive, &'a Option<MemoryRegion>)| {
        let buffer = region.as_ref().zip(request.buffer);
        let buffer = buffer.map(|(region, range)| entry(region, range));
        ReceiveRequest { wr_id: request.wr_id, buffer }
    };
    requests.iter().zip(regions).map(one).collect()
}

fn request<'a>(request: &'a Request, entries: &'a [ScatterGatherEntry<'a>]) -> WorkRequest<'a> {
    let at = |(key, offset): (u64, u64)| RemoteAddress { key: RemoteKey(key), offset };
    let data = |local: &'a Local| match local {
        Local::Inline(bytes) => LocalData::Inline(bytes),
        Local::Gather(_) => LocalData::Gather(entries),
    };
    // Of those with one range, the caller made one entry.
    let operation = match &request.work {
        Work::Write(local, remote, None) => {
            Operation::Write { local: data(local), remote: at(*remote) }
        }
        Work::Write(local, remote, Some(immediate)) => Operation::WriteWithImmediate {
            local: data(local),
            remote: at(*remote),
            immediate: *immediate,
        },
        Work::Read(_, remote) => Operation::Read { local: entries[0], remote: at(*remote) },
        Work::Send(local, immediate) => {
            Operation::Send { local: data(local), immediate: *immediate }
        }
        Work::CompareAndSwap(_, remote, (expected, desired)) => Operation::CompareAndSwap {
            local: entries[0],
            remote: at(*remote),
            expected: *expected,
            desired: *desired,
        },
        Work::FetchAndAdd(_, remote, addend) => {
            Operation::FetchAndAdd { local: entries[0], remote: at(*remote), addend: *addend }
        }
        Work::Flush(remote, length, persistent) => {
            Operation::Flush { remote: at(*remote), length: *length, kind: flush_kind(*persistent) }
        }
    };
    WorkRequest { wr_id: request.wr_id, operation, signalled: request.signalled }
}

/// A peer process and the messages for it.
fn process(suite: String, stream: &mut TcpStream) -> Result<(), Stop> {
    let (mut child, mut control) = spawn(lasting(suite))?;
    let worked = errands(&mut child, &mut control, stream);
    let _ = child.kill();
    let _ = child.wait();
    worked
}

fn errands(
    child: &mut Child,
    control: &mut UnixStream,
    stream: &mut TcpStream,
) -> Result<(), Stop> {
    send(stream, &Answer::Done, &[])?;
    while let Ok((call, bytes)) = receive::<Call>(stream) {
        let done = match call {
            Call::Order { code, numbers } => {
                let order = Message { code, numbers, bytes };
                order.send(control).and_then(|()| Message::receive(control)).map_err(Stop::from)
            }
            Call::Kill => child.kill().and_then(|()| child.wait()).map_err(Stop::from).map(nothing),
            Call::Stop => stop(child).map(nothing),
            Call::GoOn => go_on(child).map(nothing),
            other => Err(Stop::failed(format!("{other:?} is not for a process"))),
        };
        match done {
            Ok(Message { code, numbers, bytes }) => {
                send(stream, &Answer::Said { code, numbers }, &bytes)?;
            }
            Err(stop) => send(stream, &Answer::Failed(stop.to_string()), &[])?,
        }
    }
    Ok(())
}

fn nothing<T>(_: T) -> Message {
    Message::default()
}

fn answer(context: Context<'_>, common: &Common, mut stream: TcpStream) -> Result<(), Stop> {
    stream.set_nodelay(true)?;
    let (pairs, shared, queues) = (HashMap::new(), HashMap::new(), HashMap::new());
    let mut own = Own { context, common, pairs, shared, queues };
    while let Ok((call, bytes)) = receive::<Call>(&mut stream) {
        if let Call::Process { suite } = call {
            let started = process(suite, &mut stream);
            if let Err(stop) = started {
                send(&mut stream, &Answer::Failed(stop.to_string()), &[])?;
            }
            return Ok(());
        }
        let (answer, bytes) = match own.make(call, &bytes) {
            Ok(answer) => answer,
            Err(Failure::Fabric(error)) => (Answer::Fabric(error.into()), Vec::new()),
            Err(Failure::Post(error)) => (Answer::Post(error.into()), Vec::new()),
            Err(Failure::Other(stop)) => (Answer::Failed(stop.to_string()), Vec::new()),
        };
        send(&mut stream, &answer, &bytes)?;
    }
    Ok(())
}

/// Serves on `port` until the process is ended.
pub(super) fn serve(context: Context<'_>, port: u16) -> Result<(), Stop> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    let common = Common::default();
    std::thread::scope(|scope| {
        for stream in listener.incoming().flatten() {
            let common = &common;
            scope.spawn(move || {
                // What a caller that is gone left behind ends with its thread.
                let _ = answer(context, common, stream);
            });
        }
    });
    Ok(())
}
