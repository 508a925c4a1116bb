//! Work completions: what is polled.

/// Which operation completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// [`crate::Operation::Write`].
    Write,
    /// [`crate::Operation::WriteWithImmediate`], at the initiator.
    WriteWithImmediate,
    /// [`crate::Operation::Read`].
    Read,
    /// [`crate::Operation::Send`].
    Send,
    /// [`crate::Operation::CompareAndSwap`].
    CompareAndSwap,
    /// [`crate::Operation::FetchAndAdd`].
    FetchAndAdd,
    /// [`crate::Operation::Flush`].
    Flush,
    /// A message arrived in a posted receive.
    Receive,
    /// A write with immediate arrived and consumed a posted receive.
    ReceiveWithImmediate,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Done.
    Success,
    /// The queue pair was in, or went to, the error state first; nothing can be said about
    /// whether the operation took effect.
    Flushed,
    /// The peer refused key, range or rights, or the region is revoked.
    RemoteAccessError,
    /// The operation is malformed for the target (unaligned atomic).
    RemoteInvalidRequest,
    /// The peer did not post a receive within the bound.
    ReceiverNotReady,
    /// The message is longer than the posted receive (at the receiver), or the receiver reported
    /// that (at the sender).
    LengthError,
    /// The peer or the link died, or did not answer within the bound.
    TransportError,
    /// The target could not make the bytes persistent.
    PersistenceError,
}

/// One completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// From the request.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// What it was.
    pub opcode: Opcode,
    /// Bytes moved: read, received, or placed by the write that carried the immediate.
    pub length: u64,
    /// Immediate value, where one arrived.
    pub immediate: Option<u32>,
    /// Local number of the queue pair.
    pub qp_num: u32,
    /// What its owner gave the queue pair to be known by
    /// ([`crate::QueuePairOptions::context`]).
    pub context: u64,
}

impl WorkCompletion {
    /// An all-zero completion to size a polling buffer with.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        status: Status::Success,
        opcode: Opcode::Write,
        length: 0,
        immediate: None,
        qp_num: 0,
        context: 0,
    };

    /// True for [`Status::Success`].
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.status == Status::Success
    }
}
