//! What the members on one thread of a host share.
//!
//! One protection domain, one completion queue, whose completions are given to the member that owns the
//! queue pair, and the *beat*: a word in memory that every peer may read, and that grows while the thread
//! runs. A peer that knows the beat's key reads it through the control connection of any member, for all
//! members of this thread at once ([`crate::host`]).
//!
//! They also share what receives and reads land in: pieces of larger memory, since memory of its own takes a
//! descriptor, of which a process has few. A piece is not used twice: what a provider still stores for a
//! connection that is gone lands where no member looks.
//!
//! Invariant: a queue pair is entered before anything is posted on it, so each completion has an owner,
//! unless that is gone.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{
    Access, CompletionQueue, Device, FabricError, MemoryRegion, ProtectionDomain, QueuePair,
    RemoteKey,
};
use beeline_os::memory::{MemoryObject, Part, store_u64};

use crate::error::LogError;
use crate::line::Lines;

/// Completions that may wait for the thread. All queue pairs of a thousand members may break at once.
const QUEUE_DEPTH: u32 = 1 << 16;
/// Below so many queue pairs those that are gone are not looked for.
const FEW: usize = 1024;
/// Memory that pieces are cut from, bytes: touched where pieces are used. It goes when the last of them does.
const CHUNK_BYTES: usize = 1 << 20;

/// Which thread of which host a member runs on, and the key of that thread's beat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beat {
    /// Drawn when the thread started; never 0.
    pub(crate) host: u64,
    pub(crate) key: RemoteKey,
}

#[derive(Debug)]
struct Owners {
    of: HashMap<u32, u64>,
    /// Those that are gone are looked for when there are as many.
    sweep_at: usize,
}

/// Memory that pieces are cut from, and how much of it is cut.
type Chunk = Option<(Arc<dyn MemoryObject>, usize)>;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) domain: Arc<dyn ProtectionDomain>,
    pub(crate) queue: Rc<dyn CompletionQueue>,
    host: u64,
    beat: MemoryRegion,
    owners: Rc<RefCell<Owners>>,
    chunk: Rc<RefCell<Chunk>>,
    /// To other hosts' threads.
    pub(crate) lines: Lines,
}

impl Shared {
    /// `host` is drawn by the caller.
    ///
    /// Errors: the fabric's.
    pub(crate) fn open(device: Arc<dyn Device>, host: u64) -> Result<Self, LogError> {
        let domain = device.allocate_protection_domain()?;
        let beat = domain.register(device.allocate_memory(64)?, Access::REMOTE_READ)?;
        let depth = device.attributes().max_completion_queue_depth.min(QUEUE_DEPTH);
        let queue = device.create_completion_queue(depth)?;
        let owners = Rc::new(RefCell::new(Owners { of: HashMap::new(), sweep_at: FEW }));
        let (chunk, lines) = (Rc::default(), Lines::default());
        Ok(Self { device, domain, queue, host, beat, owners, chunk, lines })
    }

    /// Memory for what this side alone is told: received messages, and what it reads.
    ///
    /// Errors: the fabric's.
    pub(crate) fn own_memory(&self, length: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        if length == 0 || length > CHUNK_BYTES / 4 {
            return self.device.allocate_memory(length);
        }
        let mut chunk = self.chunk.borrow_mut();
        let cut = |(whole, used): &(Arc<dyn MemoryObject>, usize)| {
            Part::new(Arc::clone(whole), *used, length)
        };
        let piece = match chunk.as_ref().and_then(cut) {
            Some(piece) => piece,
            None => {
                let whole = self.device.allocate_memory(CHUNK_BYTES)?;
                let first = cut(&(Arc::clone(&whole), 0));
                *chunk = Some((whole, 0));
                let Some(first) = first else { return self.device.allocate_memory(length) };
                first
            }
        };
        if let Some((_, used)) = chunk.as_mut() {
            *used += length.next_multiple_of(Part::ALIGNMENT);
        }
        Ok(Arc::new(piece))
    }

    pub(crate) fn beat(&self) -> Beat {
        Beat { host: self.host, key: self.beat.remote_key() }
    }

    /// Lets the beat say this.
    pub(crate) fn store_beat(&self, beats: u64) {
        store_u64(self.beat.memory().as_ref(), 0, beats);
    }

    pub(crate) fn own(&self, qp: &dyn QueuePair, member: u64) {
        self.owners.borrow_mut().of.insert(qp.qp_num(), member);
    }

    pub(crate) fn owner(&self, qp_num: u32) -> Option<u64> {
        self.owners.borrow().of.get(&qp_num).copied()
    }

    /// Forgets queue pairs that are gone, once in a while: `is_there` knows.
    pub(crate) fn sweep(&self, is_there: impl Fn(u64, u32) -> bool) {
        let mut owners = self.owners.borrow_mut();
        if owners.of.len() >= owners.sweep_at {
            owners.of.retain(|qp_num, member| is_there(*member, *qp_num));
            owners.sweep_at = FEW.max(2 * owners.of.len());
        }
    }
}
