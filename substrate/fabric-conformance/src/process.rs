//! Peers that can die, stop and misbehave: real processes where the provider has them, crashed
//! simulated nodes where it does not.
//!
//! [`Peer`] is a node under remote control. Its work is done by [`PeerNode`], which runs either in
//! this process or in a child: the test binary runs itself again with the test
//! `conformance_peer_process`, told by environment variables which suite it belongs to and where
//! to report. Commands and replies are [`Message`]s over a Unix socket.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_fabric::{
    ConnectInfo, LocalData, MemoryRegion, Operation, QueuePairOptions, QueuePairState,
    RemoteAddress, RemoteKey, Role, Status, WorkCompletion, WorkRequest,
};
use rustix::process::{Pid, Signal};

use crate::context::{
    ALL, BOUND, Context, Endpoint, EndpointOptions, Node, Queue, bytes_at, pattern, store, whole,
};
use crate::far::FarProcess;
use crate::harness::{Harness, Stop};

const SUITE_VARIABLE: &str = "BEELINE_CONFORMANCE_SUITE";
const SOCKET_VARIABLE: &str = "BEELINE_CONFORMANCE_SOCKET";

/// A peer process that hears nothing for this long ends itself.
const ORPHAN_BOUND: Duration = Duration::from_secs(120);

/// What a peer is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Order {
    /// Region bytes, number of queue pairs, transport time-out ms, RNR time-out ms → key.
    Open,
    /// Index → connection data.
    Info,
    /// Index, connection data (the peer is the passive end).
    Connect,
    /// Index → 1 when connected.
    Connected,
    /// Index, count: receives without buffers.
    Receive,
    /// Offset, length → bytes of the region.
    Bytes,
    /// Index: disconnect in good order.
    Drop,
    /// Index, key, offset, length: write over and over until an error.
    StartWriting,
    /// Index → 0 while writing, else 1 + a number for the status; and the number of writes done.
    WriterState,
    /// → number of completions so far.
    Completions,
}

impl Order {
    fn from_code(code: u8) -> Option<Self> {
        use Order::{
            Bytes, Completions, Connect, Connected, Drop, Info, Open, Receive, StartWriting,
            WriterState,
        };
        [
            Open,
            Info,
            Connect,
            Connected,
            Receive,
            Bytes,
            Drop,
            StartWriting,
            WriterState,
            Completions,
        ]
        .into_iter()
        .find(|order| *order as u8 == code)
    }
}

/// A command or a reply: numbers and bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message {
    pub(crate) code: u8,
    pub(crate) numbers: [u64; 4],
    pub(crate) bytes: Vec<u8>,
}

impl Message {
    fn order(order: Order, numbers: [u64; 4]) -> Self {
        Self { code: order as u8, numbers, bytes: Vec::new() }
    }

    fn reply(number: u64) -> Self {
        Self { code: 0, numbers: [number, 0, 0, 0], bytes: Vec::new() }
    }

    pub(crate) fn send(&self, socket: &mut UnixStream) -> std::io::Result<()> {
        let mut frame = vec![self.code];
        for number in self.numbers {
            frame.extend_from_slice(&number.to_le_bytes());
        }
        frame.extend_from_slice(&(self.bytes.len() as u64).to_le_bytes());
        frame.extend_from_slice(&self.bytes);
        socket.write_all(&frame)
    }

    pub(crate) fn receive(socket: &mut UnixStream) -> std::io::Result<Self> {
        let mut head = [0; 1 + 5 * 8];
        socket.read_exact(&mut head)?;
        let mut words = head[1..].chunks_exact(8).map(|word| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            u64::from_le_bytes(bytes)
        });
        let numbers = std::array::from_fn(|_| words.next().unwrap_or(0));
        let length = words.next().unwrap_or(0);
        let mut bytes = vec![0; usize::try_from(length).map_err(std::io::Error::other)?];
        socket.read_exact(&mut bytes)?;
        Ok(Self { code: head[0], numbers, bytes })
    }
}

/// A peer that writes without end.
#[derive(Debug)]
struct Writer {
    remote: RemoteAddress,
    source: MemoryRegion,
    rounds: u64,
    outstanding: u32,
    ended: Option<Status>,
}

/// The work of a peer: a node, a region with all rights, queue pairs on one completion queue.
#[derive(Debug)]
struct PeerNode {
    node: Node,
    region: MemoryRegion,
    queue: std::rc::Rc<Queue>,
    endpoints: Vec<Option<Endpoint>>,
    writers: Vec<Option<Writer>>,
    completions: u64,
}

impl PeerNode {
    fn open(context: &Context<'_>, numbers: [u64; 4]) -> Result<Self, Stop> {
        let [length, count, transport_ms, rnr_ms] = numbers;
        let node = context.node()?;
        let length = usize::try_from(length).map_err(|_| Stop::failed("region too long"))?;
        let region = node.region(length, ALL)?;
        let queue = node.queue(4096)?;
        let options = EndpointOptions {
            queue_pair: QueuePairOptions {
                transport_timeout: Duration::from_millis(transport_ms),
                receiver_not_ready_timeout: Duration::from_millis(rnr_ms),
                ..QueuePairOptions::default()
            },
            completion_depth: 4096,
        };
        let mut endpoints = Vec::new();
        let mut writers = Vec::new();
        for _ in 0..count {
            endpoints.push(Some(node.endpoint_on(&queue, None, options)?));
            writers.push(None);
        }
        Ok(Self { node, region, queue, endpoints, writers, completions: 0 })
    }

    fn endpoint(&mut self, index: u64) -> Result<&mut Endpoint, Stop> {
        let slot = usize::try_from(index).ok().and_then(|index| self.endpoints.get_mut(index));
        slot.and_then(Option::as_mut).ok_or_else(|| Stop::failed("no such endpoint at the peer"))
    }

    fn obey(&mut self, message: &Message) -> Result<Message, Stop> {
        let [first, second, third, fourth] = message.numbers;
        let order = Order::from_code(message.code);
        let order = order.ok_or_else(|| Stop::failed("unknown order"))?;
        match order {
            Order::Open => Ok(Message::reply(self.region.remote_key().0)),
            Order::Info => {
                let ConnectInfo(bytes) = self.endpoint(first)?.qp.connect_info();
                Ok(Message { bytes, ..Message::default() })
            }
            Order::Connect => {
                let info = ConnectInfo(message.bytes.clone());
                self.endpoint(first)?.qp.connect(&info, Role::Passive)?;
                Ok(Message::reply(0))
            }
            Order::Connected => {
                let state = self.endpoint(first)?.qp.state();
                Ok(Message::reply(u64::from(state == QueuePairState::ReadyToSend)))
            }
            Order::Receive => {
                for wr_id in 0..second {
                    self.endpoint(first)?.post_empty_receive(wr_id)?;
                }
                Ok(Message::reply(0))
            }
            Order::Bytes => {
                let offset = usize::try_from(first).unwrap_or(0);
                let length = usize::try_from(second).unwrap_or(0);
                let bytes = bytes_at(&self.region, offset, length);
                Ok(Message { bytes, ..Message::default() })
            }
            Order::Drop => {
                let slot = usize::try_from(first).ok();
                let slot = slot.and_then(|index| self.endpoints.get_mut(index));
                drop(slot.and_then(Option::take));
                Ok(Message::reply(0))
            }
            Order::StartWriting => {
                let length = usize::try_from(fourth).unwrap_or(0);
                let source = self.node.region(length, ALL)?;
                let remote = RemoteAddress { key: RemoteKey(second), offset: third };
                let writer = Writer { remote, source, rounds: 0, outstanding: 0, ended: None };
                let index = usize::try_from(first).unwrap_or(usize::MAX);
                let slot = self.writers.get_mut(index);
                *slot.ok_or_else(|| Stop::failed("no such endpoint"))? = Some(writer);
                Ok(Message::reply(0))
            }
            Order::WriterState => {
                let index = usize::try_from(first).unwrap_or(usize::MAX);
                let writer = self.writers.get(index).and_then(Option::as_ref);
                let writer = writer.ok_or_else(|| Stop::failed("no such writer"))?;
                let ended = writer.ended.map_or(0, status_number);
                Ok(Message { numbers: [ended, writer.rounds, 0, 0], ..Message::default() })
            }
            Order::Completions => Ok(Message::reply(self.completions)),
        }
    }

    /// Polls, and keeps the writers writing.
    fn turn(&mut self) -> Result<(), Stop> {
        self.queue.drain()?;
        for completion in self.queue.take_all() {
            self.completions += 1;
            self.note(&completion);
        }
        for (endpoint, writer) in self.endpoints.iter_mut().zip(&mut self.writers) {
            let (Some(endpoint), Some(writer)) = (endpoint, writer) else { continue };
            if writer.ended.is_some() || writer.outstanding > 0 {
                continue;
            }
            if endpoint.qp.state() == QueuePairState::Error {
                writer.ended = Some(Status::Flushed);
                continue;
            }
            writer.rounds += 1;
            let fill = pattern(writer.rounds, 4096);
            let length = writer.source.memory().length_bytes();
            for offset in (0..length).step_by(4096) {
                store(&writer.source, offset, &fill[..fill.len().min(length - offset)]);
            }
            let entries = [whole(&writer.source)];
            let operation =
                Operation::Write { local: LocalData::Gather(&entries), remote: writer.remote };
            let posted = endpoint.qp.post_send(&[WorkRequest::new(writer.rounds, operation)]);
            if posted.is_ok() {
                writer.outstanding = 1;
            } else {
                writer.ended = Some(Status::Flushed);
            }
        }
        Ok(())
    }

    fn note(&mut self, completion: &WorkCompletion) {
        for (endpoint, writer) in self.endpoints.iter().zip(&mut self.writers) {
            let (Some(endpoint), Some(writer)) = (endpoint, writer) else { continue };
            if endpoint.qp.qp_num() == completion.qp_num && writer.outstanding > 0 {
                writer.outstanding = 0;
                if !completion.is_success() {
                    writer.ended = Some(completion.status);
                }
            }
        }
    }
}

fn status_number(status: Status) -> u64 {
    match status {
        Status::Success => 1,
        Status::Flushed => 2,
        Status::RemoteAccessError => 3,
        Status::TransportError => 4,
        _ => 5,
    }
}

/// A node under remote control: see the module's documentation.
pub(crate) struct Peer<'a> {
    context: Context<'a>,
    region_key: RemoteKey,
    body: Body,
}

enum Body {
    Process {
        child: Child,
        control: UnixStream,
    },
    /// A process in the suite's other host.
    Far(FarProcess),
    Here(Box<PeerNode>),
}

/// What a peer is opened with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerOptions {
    pub(crate) region_bytes: u64,
    pub(crate) queue_pairs: u64,
    pub(crate) transport_timeout: Duration,
    pub(crate) receiver_not_ready_timeout: Duration,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self {
            region_bytes: 64 << 10,
            queue_pairs: 1,
            transport_timeout: Duration::from_secs(5),
            receiver_not_ready_timeout: Duration::from_secs(5),
        }
    }
}

impl<'a> Peer<'a> {
    /// Starts a peer: a process where the provider has them, else a simulated node.
    pub(crate) fn start(context: &Context<'a>, options: PeerOptions) -> Result<Self, Stop> {
        let capabilities = context.harness.capabilities();
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let numbers = [
            options.region_bytes,
            options.queue_pairs,
            millis(options.transport_timeout),
            millis(options.receiver_not_ready_timeout),
        ];
        if capabilities.peer_processes.is_err() {
            Context::require(capabilities.simulated_faults)?;
            let node = PeerNode::open(context, numbers)?;
            let region_key = node.region.remote_key();
            return Ok(Self { context: *context, region_key, body: Body::Here(Box::new(node)) });
        }
        let body = if crate::far::is_there() {
            Body::Far(FarProcess::start(context.module)?)
        } else {
            let (child, control) = spawn(context.module)?;
            Body::Process { child, control }
        };
        let mut peer = Self { context: *context, region_key: RemoteKey(0), body };
        peer.region_key = RemoteKey(peer.ask(&Message::order(Order::Open, numbers))?.numbers[0]);
        Ok(peer)
    }

    fn ask(&mut self, message: &Message) -> Result<Message, Stop> {
        match &mut self.body {
            Body::Here(node) => node.obey(message),
            Body::Process { control, .. } => {
                message.send(control)?;
                Self::replied(Message::receive(control)?)
            }
            Body::Far(process) => {
                let (code, numbers, bytes) =
                    process.order((message.code, message.numbers, &message.bytes))?;
                Self::replied(Message { code, numbers, bytes })
            }
        }
    }

    fn replied(reply: Message) -> Result<Message, Stop> {
        if reply.code == 0 {
            return Ok(reply);
        }
        let text = String::from_utf8_lossy(&reply.bytes).into_owned();
        Err(Stop::failed(format!("the peer process reports: {text}")))
    }

    /// Lets a peer in this process work; a peer process works by itself.
    pub(crate) fn turn(&mut self) -> Result<(), Stop> {
        match &mut self.body {
            Body::Here(node) => node.turn(),
            Body::Process { .. } | Body::Far(_) => Ok(()),
        }
    }

    /// An address in the peer's region.
    pub(crate) fn address(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { key: self.region_key, offset }
    }

    /// Connects `endpoint` to the peer's queue pair `index`.
    pub(crate) fn connect(&mut self, endpoint: &mut Endpoint, index: u64) -> Result<(), Stop> {
        let mut order = Message::order(Order::Connect, [index, 0, 0, 0]);
        order.bytes = endpoint.qp.connect_info().0;
        let info = self.ask(&Message::order(Order::Info, [index, 0, 0, 0]))?.bytes;
        self.ask(&order)?;
        endpoint.qp.connect(&ConnectInfo(info), Role::Active)?;
        let start = self.context.harness.now();
        loop {
            self.turn()?;
            endpoint.queue.drain()?;
            let there = self.ask(&Message::order(Order::Connected, [index, 0, 0, 0]))?.numbers[0];
            if there == 1 && endpoint.qp.state() == QueuePairState::ReadyToSend {
                return Ok(());
            }
            if self.context.harness.now().saturating_sub(start) > BOUND {
                return Err(Stop::failed("the connection to the peer was not made in time"));
            }
            self.context.harness.idle();
        }
    }

    /// Has the peer post receives without buffers.
    pub(crate) fn post_receives(&mut self, index: u64, count: u64) -> Result<(), Stop> {
        self.ask(&Message::order(Order::Receive, [index, count, 0, 0])).map(drop)
    }

    /// What the peer sees in its region.
    pub(crate) fn bytes(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, Stop> {
        Ok(self.ask(&Message::order(Order::Bytes, [offset, length, 0, 0]))?.bytes)
    }

    /// Completions the peer has polled.
    pub(crate) fn completions(&mut self) -> Result<u64, Stop> {
        self.turn()?;
        Ok(self.ask(&Message::order(Order::Completions, [0; 4]))?.numbers[0])
    }

    /// Has the peer drop a queue pair.
    pub(crate) fn disconnect(&mut self, index: u64) -> Result<(), Stop> {
        self.ask(&Message::order(Order::Drop, [index, 0, 0, 0])).map(drop)
    }

    /// Has the peer write `length` changing bytes at `remote`, over and over.
    pub(crate) fn start_writing(
        &mut self,
        index: u64,
        remote: RemoteAddress,
        length: u64,
    ) -> Result<(), Stop> {
        let numbers = [index, remote.key.0, remote.offset, length];
        self.ask(&Message::order(Order::StartWriting, numbers)).map(drop)
    }

    /// Writes begun, and the status that ended them, as [`status_number`]; 0 while writing.
    pub(crate) fn writer_state(&mut self, index: u64) -> Result<(u64, u64), Stop> {
        self.turn()?;
        let reply = self.ask(&Message::order(Order::WriterState, [index, 0, 0, 0]))?;
        Ok((reply.numbers[1], reply.numbers[0]))
    }

    /// Ends the peer with SIGKILL, or crashes its node.
    pub(crate) fn kill(&mut self) -> Result<(), Stop> {
        match &mut self.body {
            Body::Here(node) => self.context.harness.crash(&node.node.device),
            Body::Process { child, .. } => {
                child.kill()?;
                child.wait()?;
                Ok(())
            }
            Body::Far(process) => process.kill(),
        }
    }

    /// Stops the peer with SIGSTOP, or pauses its node. Returns once it stands still.
    pub(crate) fn stop(&mut self) -> Result<(), Stop> {
        match &mut self.body {
            Body::Here(node) => self.context.harness.pause(&node.node.device),
            Body::Process { child, .. } => stop(child),
            Body::Far(process) => process.stop(),
        }
    }

    /// Lets a stopped peer go on.
    pub(crate) fn go_on(&mut self) -> Result<(), Stop> {
        match &mut self.body {
            Body::Here(node) => self.context.harness.resume(&node.node.device),
            Body::Process { child, .. } => go_on(child),
            Body::Far(process) => process.go_on(),
        }
    }
}

impl Drop for Peer<'_> {
    fn drop(&mut self) {
        if let Body::Process { child, .. } = &mut self.body {
            // Either may fail because the item ended the peer itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Stops a process with SIGSTOP; returns once it stands still.
pub(crate) fn stop(child: &Child) -> Result<(), Stop> {
    signal(child, Signal::STOP)?;
    let stat = format!("/proc/{}/stat", child.id());
    for _ in 0..10_000 {
        let text = std::fs::read_to_string(&stat)?;
        let state = text.rsplit(')').next().and_then(|rest| rest.trim().chars().next());
        if state == Some('T') {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Stop::failed("the peer process did not stop"))
}

/// Lets a stopped process go on.
pub(crate) fn go_on(child: &Child) -> Result<(), Stop> {
    signal(child, Signal::CONT)
}

fn signal(child: &Child, signal: Signal) -> Result<(), Stop> {
    let raw = i32::try_from(child.id()).map_err(|_| Stop::failed("process number too large"))?;
    let pid = Pid::from_raw(raw).ok_or_else(|| Stop::failed("process number 0"))?;
    rustix::process::kill_process(pid, signal)
        .map_err(|error| Stop::from(std::io::Error::from(error)))
}

/// Runs this test binary again as a peer and waits until it reports.
pub(crate) fn spawn(module: &'static str) -> Result<(Child, UnixStream), Stop> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("beeline-conformance-{}-{number}.sock", std::process::id());
    let path = std::env::temp_dir().join(name);
    // Of a process that had this number and was killed.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    listener.set_nonblocking(true)?;
    let child = Command::new(std::env::current_exe()?)
        .args(["conformance_peer_process", "--nocapture", "--test-threads=1", "--quiet"])
        .env(SUITE_VARIABLE, module)
        .env(SOCKET_VARIABLE, &path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    let accepted = child.map_err(Stop::from).and_then(|child| accept(&listener, child));
    let _ = std::fs::remove_file(&path);
    accepted
}

fn accept(listener: &UnixListener, mut child: Child) -> Result<(Child, UnixStream), Stop> {
    let start = Instant::now();
    loop {
        match listener.accept() {
            Ok((control, _)) => {
                control.set_nonblocking(false)?;
                control.set_read_timeout(Some(BOUND))?;
                control.set_write_timeout(Some(BOUND))?;
                return Ok((child, control));
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(status) = child.try_wait()? {
            return Err(Stop::failed(format!("the peer process ended at once: {status}")));
        }
        if start.elapsed() > BOUND {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Stop::failed("the peer process did not report"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The body of `conformance_peer_process`: returns at once in an ordinary test run; in a process
/// that an item started, works for that item until its socket closes, then ends the process.
pub fn peer_main(harness: &dyn Harness, module: &'static str) {
    // A peer process inherits the agent's environment: the suite's name comes first.
    let Ok(suite) = std::env::var(SUITE_VARIABLE) else {
        return crate::far::agent(harness, module);
    };
    if suite != module {
        return;
    }
    let code = match std::env::var(SOCKET_VARIABLE) {
        Ok(path) => match serve(&Context::new(harness, module), &path) {
            Ok(()) => 0,
            Err(stop) => {
                let _ = writeln!(std::io::stderr(), "peer process: {stop}");
                1
            }
        },
        Err(_) => 2,
    };
    std::process::exit(code);
}

fn serve(context: &Context<'_>, path: &str) -> Result<(), Stop> {
    let mut control = UnixStream::connect(path)?;
    let mut node: Option<PeerNode> = None;
    let mut last_heard = Instant::now();
    let mut waiting = VecDeque::new();
    loop {
        use std::os::fd::AsFd as _;
        let patience = if node.is_some() { Duration::from_micros(100) } else { BOUND };
        if context.harness.wait_readable(control.as_fd(), patience)? {
            match Message::receive(&mut control) {
                Ok(message) => waiting.push_back(message),
                Err(_) => return Ok(()),
            }
        }
        while let Some(message) = waiting.pop_front() {
            last_heard = Instant::now();
            let reply = match &mut node {
                Some(node) => node.obey(&message),
                None => PeerNode::open(context, message.numbers).and_then(|opened| {
                    let opened = node.insert(opened);
                    opened.obey(&message)
                }),
            };
            let reply = reply.unwrap_or_else(|stop| Message {
                code: 1,
                bytes: stop.to_string().into_bytes(),
                ..Message::default()
            });
            if reply.send(&mut control).is_err() {
                return Ok(());
            }
        }
        if let Some(node) = &mut node {
            node.turn()?;
        }
        if last_heard.elapsed() > ORPHAN_BOUND {
            return Ok(());
        }
    }
}
