//! What happened, in a few bytes each, and a hash over all of it.

/// Kind of a trace record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TraceKind {
    /// A request was posted; value: its number on the queue pair.
    Post,
    /// A packet left; value: its number on the connection.
    Depart,
    /// A packet arrived; value: its number on the connection.
    Arrive,
    /// A packet was lost or held back; value: its number on the connection.
    Hold,
    /// Bytes were placed at the target; value: how many.
    Place,
    /// A completion was queued; value: the request's `wr_id`.
    Complete,
    /// A queue pair went to the error state; value: 0.
    Break,
    /// A fault was injected; value: which.
    Fault,
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Virtual time, nanoseconds.
    pub at_ns: u64,
    /// What happened.
    pub kind: TraceKind,
    /// To which queue pair (or node, for faults).
    pub qp_num: u32,
    /// See [`TraceKind`].
    pub value: u64,
}

/// The running hash and the first records.
#[derive(Debug)]
pub(crate) struct Trace {
    records: Vec<TraceRecord>,
    keep: usize,
    hash: u64,
    count: u64,
}

impl Trace {
    pub(crate) fn new(keep: usize) -> Self {
        Self { records: Vec::new(), keep, hash: 0xcbf2_9ce4_8422_2325, count: 0 }
    }

    pub(crate) fn record(&mut self, record: TraceRecord) {
        for word in [record.at_ns, u64::from(record.qp_num) << 8 | record.kind as u64, record.value]
        {
            // FNV-1a over words, with a rotation so that high bits reach low ones.
            self.hash = (self.hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
        }
        self.count += 1;
        if self.records.len() < self.keep {
            self.records.push(record);
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn records(&self) -> Vec<TraceRecord> {
        self.records.clone()
    }
}
