//! What two hosts of a suite say to each other: calls, answers, and how they cross a stream.
//!
//! A frame is the length of its words (u32), the length of its bytes (u64), the words as JSON, the
//! bytes. One connection per thread: a call, then its answer.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use beeline_fabric::{
    Access, FabricError, FlushKind, Opcode, PostError, QueuePairOptions, QueuePairState, Status,
    WorkCompletion,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Longest words of a frame.
const MAX_WORDS: usize = 64 << 20;

/// A range of a far region.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Range {
    pub(super) region: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// Where bytes come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Local {
    Inline(Vec<u8>),
    Gather(Vec<Range>),
}

/// One operation; remote addresses are key and offset.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Work {
    Write(Local, (u64, u64), Option<u32>),
    Read(Range, (u64, u64)),
    Send(Local, Option<u32>),
    CompareAndSwap(Range, (u64, u64), (u64, u64)),
    FetchAndAdd(Range, (u64, u64), u64),
    /// Length, and whether it is persistent.
    Flush((u64, u64), u64, bool),
}

/// One request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) wr_id: u64,
    pub(super) signalled: bool,
    pub(super) work: Work,
}

/// One receive.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Receive {
    pub(super) wr_id: u64,
    pub(super) buffer: Option<Range>,
}

/// What to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    Device,
    Domain,
    Memory,
    Region,
    CompletionQueue,
    SharedQueue,
    Pair,
}

/// Depths, time-outs in microseconds, and the context.
pub(super) type Shape = (u32, u32, u64, u64, u64);

pub(super) fn shape(options: QueuePairOptions) -> Shape {
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let (rnr, transport) = (options.receiver_not_ready_timeout, options.transport_timeout);
    (options.send_depth, options.receive_depth, us(rnr), us(transport), options.context)
}

pub(super) fn options(
    (send_depth, receive_depth, rnr, transport, context): Shape,
) -> QueuePairOptions {
    QueuePairOptions {
        send_depth,
        receive_depth,
        receiver_not_ready_timeout: Duration::from_micros(rnr),
        transport_timeout: Duration::from_micros(transport),
        context,
    }
}

/// What is asked of the other host. Objects are numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Call {
    OpenDevice,
    AllocateMemory {
        device: u64,
        length: usize,
    },
    Domain {
        device: u64,
    },
    /// `survives`: the memory counts as persistent by write-back of cache lines.
    Register {
        domain: u64,
        memory: u64,
        access: u8,
        survives: bool,
    },
    RevokeRegion {
        region: u64,
    },
    Forget {
        kind: Kind,
        number: u64,
    },
    Load {
        memory: u64,
        offset: usize,
        length: usize,
    },
    Store {
        memory: u64,
        offset: usize,
    },
    CompletionQueue {
        device: u64,
        depth: u32,
    },
    SharedQueue {
        domain: u64,
        depth: u32,
    },
    Pair {
        domain: u64,
        send: u64,
        receive: u64,
        shared: Option<u64>,
        shape: Shape,
    },
    Poll {
        queue: u64,
        most: usize,
    },
    Arm {
        queue: u64,
    },
    Acknowledge {
        queue: u64,
    },
    Wait {
        queue: u64,
        most: usize,
        us: u64,
    },
    Readable {
        queue: u64,
        us: u64,
    },
    State {
        pair: u64,
    },
    Info {
        pair: u64,
    },
    Connect {
        pair: u64,
        info: Vec<u8>,
        active: bool,
    },
    WaitConnected {
        pair: u64,
        us: u64,
    },
    PostSend {
        pair: u64,
        requests: Vec<Request>,
    },
    PostReceive {
        pair: u64,
        requests: Vec<Receive>,
    },
    RevokePair {
        pair: u64,
    },
    PostShared {
        queue: u64,
        requests: Vec<Receive>,
    },
    Posted {
        queue: u64,
    },
    /// A process of the suite of this name; this connection is its own from here on.
    Process {
        suite: String,
    },
    /// A message for that process.
    Order {
        code: u8,
        numbers: [u64; 4],
    },
    Kill,
    Stop,
    GoOn,
}

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    Number(u64),
    Device { number: u64, attributes: Attributes },
    Region { number: u64, local: u32, remote: u64 },
    Pair { number: u64, qp_num: u32 },
    Completions(Vec<Completion>),
    State(u8),
    Bytes(Vec<u8>),
    Said { code: u8, numbers: [u64; 4] },
    Fabric(Refusal),
    Post(PostRefusal),
    Failed(String),
}

/// A device's attributes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Attributes {
    pub(super) provider: String,
    pub(super) sizes: [u64; 2],
    pub(super) counts: [u32; 4],
    pub(super) one_sided: bool,
    /// They are atomic with the processor's own.
    pub(super) with_processor: bool,
    pub(super) persistent_flush: String,
}

/// A fabric error, without its borrowed words.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Refusal {
    CannotRegister(String, u8, String),
    BadConnectInfo(String),
    ConnectTimeout(u64),
    WrongState(u8, String),
    Limit(String, u64, u64),
    Overrun(u32),
    PeerGone,
    Unsupported(String, String),
    Other(String),
}

/// A post error.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum PostRefusal {
    QueueFull,
    NotReady(u8),
    LocalProtection,
    TooLarge(String, u64),
}

/// Words that live as long as the program: the errors of fabric borrow them.
pub(super) fn lasting(words: String) -> &'static str {
    Box::leak(words.into_boxed_str())
}

pub(super) fn state_code(state: QueuePairState) -> u8 {
    match state {
        QueuePairState::Init => 0,
        QueuePairState::ReadyToSend => 1,
        QueuePairState::Error => 2,
    }
}

pub(super) fn state_of(code: u8) -> QueuePairState {
    match code {
        0 => QueuePairState::Init,
        1 => QueuePairState::ReadyToSend,
        _ => QueuePairState::Error,
    }
}

impl From<FabricError> for Refusal {
    fn from(error: FabricError) -> Self {
        match error {
            FabricError::CannotRegister { provider, access, reason } => {
                Self::CannotRegister(provider.into(), access.bits(), reason.into())
            }
            FabricError::BadConnectInfo { reason } => Self::BadConnectInfo(reason.into()),
            FabricError::ConnectTimeout { timeout_ms } => Self::ConnectTimeout(timeout_ms),
            FabricError::WrongState { state, needed } => {
                Self::WrongState(state_code(state), needed.into())
            }
            FabricError::Limit { what, requested, limit } => {
                Self::Limit(what.into(), requested, limit)
            }
            FabricError::CompletionQueueOverrun { depth_entries } => Self::Overrun(depth_entries),
            FabricError::PeerGone => Self::PeerGone,
            FabricError::Unsupported { provider, what } => {
                Self::Unsupported(provider.into(), what.into())
            }
            other => Self::Other(other.to_string()),
        }
    }
}

impl From<Refusal> for FabricError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::CannotRegister(provider, access, reason) => Self::CannotRegister {
                provider: lasting(provider),
                access: Access::from_bits_truncate(access),
                reason: lasting(reason),
            },
            Refusal::BadConnectInfo(reason) => Self::BadConnectInfo { reason: lasting(reason) },
            Refusal::ConnectTimeout(timeout_ms) => Self::ConnectTimeout { timeout_ms },
            Refusal::WrongState(state, needed) => {
                Self::WrongState { state: state_of(state), needed: lasting(needed) }
            }
            Refusal::Limit(what, requested, limit) => {
                Self::Limit { what: lasting(what), requested, limit }
            }
            Refusal::Overrun(depth_entries) => Self::CompletionQueueOverrun { depth_entries },
            Refusal::PeerGone => Self::PeerGone,
            Refusal::Unsupported(provider, what) => {
                Self::Unsupported { provider: lasting(provider), what: lasting(what) }
            }
            Refusal::Other(words) => {
                Self::System { action: "a call at the other host", source: io::Error::other(words) }
            }
        }
    }
}

impl From<PostError> for PostRefusal {
    fn from(error: PostError) -> Self {
        match error {
            PostError::QueueFull => Self::QueueFull,
            PostError::NotReady(state) => Self::NotReady(state_code(state)),
            PostError::TooLarge { what, limit } => Self::TooLarge(what.into(), limit),
            _ => Self::LocalProtection,
        }
    }
}

impl From<PostRefusal> for PostError {
    fn from(refusal: PostRefusal) -> Self {
        match refusal {
            PostRefusal::QueueFull => Self::QueueFull,
            PostRefusal::NotReady(state) => Self::NotReady(state_of(state)),
            PostRefusal::LocalProtection => Self::LocalProtection,
            PostRefusal::TooLarge(what, limit) => Self::TooLarge { what: lasting(what), limit },
        }
    }
}

/// A completion: request, status, opcode, length, immediate, queue pair, its context.
pub(super) type Completion = (u64, u8, u8, u64, Option<u32>, u32, u64);

const STATUSES: [Status; 8] = [
    Status::Success,
    Status::Flushed,
    Status::RemoteAccessError,
    Status::RemoteInvalidRequest,
    Status::ReceiverNotReady,
    Status::LengthError,
    Status::TransportError,
    Status::PersistenceError,
];

const OPCODES: [Opcode; 9] = [
    Opcode::Write,
    Opcode::WriteWithImmediate,
    Opcode::Read,
    Opcode::Send,
    Opcode::CompareAndSwap,
    Opcode::FetchAndAdd,
    Opcode::Flush,
    Opcode::Receive,
    Opcode::ReceiveWithImmediate,
];

fn place<T: PartialEq>(list: &[T], wanted: &T) -> u8 {
    let place = list.iter().position(|known| known == wanted);
    assert!(place.is_some(), "every value is in its list");
    place.and_then(|place| u8::try_from(place).ok()).unwrap_or(0)
}

pub(super) fn completion_code(done: &WorkCompletion) -> Completion {
    let (status, opcode) = (place(&STATUSES, &done.status), place(&OPCODES, &done.opcode));
    (done.wr_id, status, opcode, done.length, done.immediate, done.qp_num, done.context)
}

pub(super) fn completion_of(
    (wr_id, status, opcode, length, immediate, qp_num, context): Completion,
) -> WorkCompletion {
    let (status, opcode) = (usize::from(status), usize::from(opcode));
    WorkCompletion {
        wr_id,
        status: STATUSES.get(status).copied().unwrap_or(Status::TransportError),
        opcode: OPCODES.get(opcode).copied().unwrap_or(Opcode::Write),
        length,
        immediate,
        qp_num,
        context,
    }
}

pub(super) fn flush_kind(persistent: bool) -> FlushKind {
    if persistent { FlushKind::Persistent } else { FlushKind::Visible }
}

/// Sends one frame.
pub(super) fn send(stream: &mut TcpStream, words: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
    let words = serde_json::to_vec(words)?;
    let length = u32::try_from(words.len()).map_err(io::Error::other)?;
    let mut head = length.to_le_bytes().to_vec();
    head.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    head.extend_from_slice(&words);
    stream.write_all(&head)?;
    stream.write_all(bytes)
}

/// Receives one frame.
pub(super) fn receive<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<(T, Vec<u8>)> {
    let (mut words, mut bytes) = ([0; 4], [0; 8]);
    stream.read_exact(&mut words)?;
    stream.read_exact(&mut bytes)?;
    let words = u32::from_le_bytes(words) as usize;
    if words > MAX_WORDS {
        return Err(io::Error::other("a frame's words are too long"));
    }
    let mut words = vec![0; words];
    stream.read_exact(&mut words)?;
    let bytes = usize::try_from(u64::from_le_bytes(bytes)).map_err(io::Error::other)?;
    let mut bytes = vec![0; bytes];
    stream.read_exact(&mut bytes)?;
    Ok((serde_json::from_slice(&words)?, bytes))
}
