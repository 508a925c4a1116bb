//! What the data thread and the control thread of one queue pair share.
//!
//! The control thread pushes events and raises the attention flag of the completion queues; the
//! data thread looks at one flag per poll and takes the events when it is up.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use beeline_fabric::Access;
use beeline_os::doorbell::{Doorbell, Rung};
use beeline_os::poller::Waker;
use beeline_os::{Mapping, MemoryObject, Persistence};

use crate::connect_info::Nonce;
use crate::object::{ConnectionObject, Geometry};

/// Locks, whether or not another thread panicked while holding the lock: every critical section
/// here leaves the data whole at each step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How other threads get a completion queue's attention.
#[derive(Debug)]
pub(crate) struct QueueSignal {
    attention: AtomicBool,
    waiting: Mutex<Vec<u32>>,
    pub waker: Waker,
}

impl QueueSignal {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (attention, waiting) = (AtomicBool::new(false), Mutex::new(Vec::new()));
        Ok(Self { attention, waiting, waker: Waker::new()? })
    }

    fn raise(&self, member: u32) {
        let mut waiting = lock(&self.waiting);
        if !waiting.contains(&member) {
            waiting.push(member);
        }
        drop(waiting);
        // Pairs with the acquire in `take`.
        self.attention.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Whether [`QueueSignal::take`] would find something.
    #[inline(always)]
    pub(crate) fn has_news(&self) -> bool {
        self.attention.load(Ordering::Relaxed)
    }

    /// Moves the members with news into `into`.
    pub(crate) fn take(&self, into: &mut Vec<u32>) {
        // Pairs with the release in `raise`. Lowered first: news that comes meanwhile raises it
        // again.
        self.attention.swap(false, Ordering::Acquire);
        into.append(&mut lock(&self.waiting));
    }
}

/// How the memory behind a key is reached.
#[derive(Debug)]
pub(crate) enum Opened {
    /// The peer's whole object, mapped once more.
    Mapped(Mapping),
    /// In this process: the memory that was registered.
    Here(Arc<dyn MemoryObject>),
}

impl Opened {
    pub(crate) fn base(&self) -> NonNull<u8> {
        match self {
            Self::Mapped(mapping) => mapping.base(),
            Self::Here(memory) => memory.base(),
        }
    }

    pub(crate) fn length_bytes(&self) -> usize {
        match self {
            Self::Mapped(mapping) => mapping.length_bytes(),
            Self::Here(memory) => memory.length_bytes(),
        }
    }

    pub(crate) fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        match self {
            Self::Mapped(mapping) => mapping.descriptor(),
            Self::Here(memory) => memory.descriptor(),
        }
    }
}

/// How a sleeping peer is woken.
#[derive(Debug)]
pub(crate) enum Bell {
    /// In another process, or as if it were.
    Doorbell(Doorbell),
    /// On a thread of this process.
    Thread(Weak<Link>),
}

impl Bell {
    pub(crate) fn ring(&self) {
        match self {
            Self::Doorbell(doorbell) => doorbell.ring(),
            Self::Thread(peer) => {
                if let Some(peer) = peer.upgrade() {
                    peer.raise();
                }
            }
        }
    }

    /// The rings of the peer that waited. Those of a thread come as news.
    pub(crate) fn clear(&self) -> Rung {
        match self {
            Self::Doorbell(doorbell) => doorbell.clear(),
            Self::Thread(_) => Rung::No,
        }
    }

    /// What becomes readable when the peer rings, where it is not the news.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Doorbell(doorbell) => Some(doorbell.as_fd()),
            Self::Thread(_) => None,
        }
    }
}

/// A key that was opened: the peer's region.
#[derive(Debug)]
pub(crate) struct OpenedKey {
    pub memory: Opened,
    /// Where the region begins in it, and its length: checked to lie inside.
    pub offset: u64,
    pub length: u64,
    pub access: Access,
    pub persistence: Persistence,
}

/// News from the control thread.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// Both ends hold the object.
    Connected { object: Arc<ConnectionObject>, bell: Bell, asymmetric: bool },
    /// The answer to an open; nothing when refused. `epoch` is the one the open was sent in.
    Key { key: u64, epoch: u64, opened: Option<OpenedKey> },
    /// A file flush ended.
    Flushed { succeeded: bool },
    /// The peer is gone, or misbehaved, or could not be reached.
    Closed,
}

/// The shared part of one queue pair.
#[derive(Debug)]
pub(crate) struct Link {
    pub qp_num: u32,
    pub nonce: Nonce,
    pub geometry: Geometry,
    /// Protection domain.
    pub domain: u64,
    inbox: Mutex<Vec<LinkEvent>>,
    arrived: Condvar,
    /// The completion queues and the queue pair's place in each.
    signals: [(Arc<QueueSignal>, u32); 2],
    object: OnceLock<Arc<ConnectionObject>>,
    epoch: AtomicU64,
    /// Set before the queue pair's exposures are collected; no key is granted after.
    revoked: AtomicBool,
}

impl Link {
    pub(crate) fn new(
        qp_num: u32,
        nonce: Nonce,
        geometry: Geometry,
        domain: u64,
        signals: [(Arc<QueueSignal>, u32); 2],
    ) -> Self {
        Self {
            qp_num,
            nonce,
            geometry,
            domain,
            inbox: Mutex::new(Vec::new()),
            arrived: Condvar::new(),
            signals,
            object: OnceLock::new(),
            epoch: AtomicU64::new(0),
            revoked: AtomicBool::new(false),
        }
    }

    /// Hands an event to the data thread.
    pub(crate) fn push(&self, event: LinkEvent) {
        if let LinkEvent::Connected { object, .. } = &event {
            let first = self.object.set(Arc::clone(object)).is_ok();
            assert!(first, "a queue pair is connected once");
        }
        lock(&self.inbox).push(event);
        self.arrived.notify_all();
        self.raise();
    }

    /// Has the completion queues look at the queue pair.
    pub(crate) fn raise(&self) {
        let [first, second] = &self.signals;
        first.0.raise(first.1);
        if !Arc::ptr_eq(&first.0, &second.0) || first.1 != second.1 {
            second.0.raise(second.1);
        }
    }

    /// Takes what arrived.
    pub(crate) fn take(&self) -> Vec<LinkEvent> {
        std::mem::take(&mut *lock(&self.inbox))
    }

    /// Blocks until something is in the inbox; false when `deadline` passed first.
    pub(crate) fn wait_for_event(&self, deadline: Instant) -> bool {
        let mut inbox = lock(&self.inbox);
        while inbox.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            inbox =
                self.arrived.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Makes the peer forget the keys it opened. The authoritative count is here; the shared word
    /// is what the peer sees of it.
    pub(crate) fn bump_epoch(&self) {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(object) = self.object.get() {
            object.publish_epoch(epoch);
        }
    }

    /// Whether the peer announces an atomic in progress.
    pub(crate) fn peer_is_in_atomic(&self) -> bool {
        self.object.get().is_some_and(|object| object.peer_is_in_atomic())
    }

    /// Tells a peer that is still inside an atomic that nobody waits for it any more.
    pub(crate) fn give_up_atomic(&self) {
        if let Some(object) = self.object.get() {
            object.give_up_atomic();
        }
    }

    /// The object, for tests that play a peer which scribbles over it.
    #[cfg(test)]
    pub(crate) fn object(&self) -> Option<&Arc<ConnectionObject>> {
        self.object.get()
    }

    pub(crate) fn set_revoked(&self) {
        self.revoked.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::SeqCst)
    }
}
