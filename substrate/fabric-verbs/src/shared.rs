//! What the application's threads and the library's thread share of queue pairs and completion
//! queues.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use beeline_fabric::QueuePairState;

use crate::endpoint::{Endpoint, Nonce};
use crate::handle::{Context, Pair, Queue};
use crate::wake::Wake;

/// Why a queue pair broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Cause {
    /// It has not.
    None = 0,
    /// One of its requests failed, or its owner ended it.
    Own = 1,
    /// The peer left, or its link to us did.
    Peer = 2,
    /// A request waited for a receive beyond its bound, which the library watched.
    NoReceive = 3,
    /// The device reported an error, or is gone.
    Device = 4,
    /// The port stayed down.
    Port = 5,
    /// A completion queue overran.
    Overrun = 6,
}

impl Cause {
    fn from_code(code: u8) -> Self {
        match code {
            0 => Self::None,
            1 => Self::Own,
            2 => Self::Peer,
            3 => Self::NoReceive,
            4 => Self::Device,
            5 => Self::Port,
            _ => Self::Overrun,
        }
    }
}

fn code(state: QueuePairState) -> u8 {
    match state {
        QueuePairState::Init => 0,
        QueuePairState::ReadyToSend => 1,
        QueuePairState::Error => 2,
    }
}

/// How far the owner of a queue pair is, for the watch on waiting sends.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Requests posted.
    pub(crate) posted: AtomicU64,
    /// Requests completed.
    pub(crate) completed: AtomicU64,
    /// The oldest outstanding request that the device reports needs a receive at the peer.
    pub(crate) waits: AtomicBool,
    /// Its bytes, and of what is before it.
    pub(crate) length: AtomicU64,
    /// One more than `completed` was when the wait had taken too long; 0 before.
    pub(crate) overdue: AtomicU64,
}

/// The shared part of a queue pair.
#[derive(Debug)]
pub(crate) struct PairShared {
    pub(crate) number: u32,
    pub(crate) nonce: Nonce,
    pub(crate) transport_timeout: Duration,
    /// How long a send may wait for a receive, where the library watches that.
    pub(crate) watched: Option<Duration>,
    pub(crate) progress: Progress,
    state: AtomicU8,
    cause: AtomicU8,
    changed: (Mutex<()>, Condvar),
    /// The device's queue pair, until it is destroyed or put aside.
    hardware: Mutex<Option<Pair>>,
    pub(crate) queues: [Arc<QueueShared>; 2],
    pub(crate) board: Arc<Board>,
}

impl PairShared {
    pub(crate) fn new(
        (number, nonce): (u32, Nonce),
        (transport_timeout, watched): (Duration, Option<Duration>),
        hardware: Pair,
        queues: [Arc<QueueShared>; 2],
        board: Arc<Board>,
    ) -> Self {
        Self {
            number,
            nonce,
            transport_timeout,
            watched,
            progress: Progress::default(),
            state: AtomicU8::new(code(QueuePairState::Init)),
            cause: AtomicU8::new(Cause::None as u8),
            changed: (Mutex::new(()), Condvar::new()),
            hardware: Mutex::new(Some(hardware)),
            queues,
            board,
        }
    }

    pub(crate) fn state(&self) -> QueuePairState {
        // Acquire: pairs with the release in `turn`, so that whoever sees the state sees what led
        // to it.
        match self.state.load(Ordering::Acquire) {
            0 => QueuePairState::Init,
            1 => QueuePairState::ReadyToSend,
            _ => QueuePairState::Error,
        }
    }

    pub(crate) fn cause(&self) -> Cause {
        Cause::from_code(self.cause.load(Ordering::Acquire))
    }

    /// The device's queue pair.
    pub(crate) fn hardware(&self) -> MutexGuard<'_, Option<Pair>> {
        self.hardware.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turned(&self) {
        let guard = self.changed.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.1.notify_all();
        drop(guard);
        for queue in &self.queues {
            queue.wake.raise();
        }
    }

    /// Both ends are there.
    pub(crate) fn ready(&self) {
        let (init, ready) = (code(QueuePairState::Init), code(QueuePairState::ReadyToSend));
        // Release: pairs with the acquire in `state`.
        let turned =
            self.state.compare_exchange(init, ready, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if turned {
            self.turned();
        }
    }

    /// Breaks the connection: the device flushes what is outstanding. False when it was broken.
    pub(crate) fn fail(&self, cause: Cause) -> bool {
        // The cause is there before the state: whoever sees the second sees the first.
        let (none, why) = (Cause::None as u8, cause as u8);
        let _ = self.cause.compare_exchange(none, why, Ordering::AcqRel, Ordering::Relaxed);
        let error = code(QueuePairState::Error);
        if self.state.swap(error, Ordering::AcqRel) == error {
            return false;
        }
        if let Some(pair) = &*self.hardware()
            && let Err(error) = pair.to_error()
        {
            // A device that is gone; its completion queues say so.
            tracing::debug!(qp_num = self.number, %error, "queue pair refused its error state");
        }
        self.board.command(Command::Left(self.number));
        self.turned();
        true
    }

    /// Blocks until the state is no longer `Init`, at most for `timeout`.
    pub(crate) fn wait_decided(&self, timeout: Duration) -> QueuePairState {
        let deadline = Instant::now() + timeout;
        let mut guard = self.changed.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let state = self.state();
            let left = deadline.saturating_duration_since(Instant::now());
            if state != QueuePairState::Init || left.is_zero() {
                return state;
            }
            guard =
                self.changed.1.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The shared part of a completion queue.
#[derive(Debug)]
pub(crate) struct QueueShared {
    pub(crate) hardware: Arc<Queue>,
    /// The device dropped a completion.
    pub(crate) overrun: AtomicBool,
    /// The device is gone: nothing will come from it.
    pub(crate) lost: AtomicBool,
    /// A request of one of its queue pairs has waited too long, unless its completion is here.
    pub(crate) overdue: AtomicBool,
    /// Something happened that the device's channel does not tell.
    pub(crate) wake: Wake,
    /// The channel's descriptor and `wake`, together.
    pub(crate) events: OwnedFd,
}

/// What the application asks of the library's thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Connect to a peer that expects it.
    Dial(Arc<PairShared>, Endpoint),
    /// Expect a peer that connects.
    Expect(Arc<PairShared>, Endpoint),
    /// A queue pair is broken or gone: its peer must learn of it.
    Left(u32),
}

/// What the application's objects and the library's thread of one device share.
#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) context: Arc<Context>,
    pub(crate) stop: AtomicBool,
    /// The device is gone.
    pub(crate) lost: AtomicBool,
    pub(crate) kick: Wake,
    commands: Mutex<Vec<Command>>,
    /// By our number.
    pairs: Mutex<HashMap<u32, Weak<PairShared>>>,
    /// By the tag of the device's queue pair.
    tags: Mutex<HashMap<usize, Weak<PairShared>>>,
    /// By the tag of the device's completion queue.
    queues: Mutex<HashMap<usize, Weak<QueueShared>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Board {
    pub(crate) fn new(context: Arc<Context>, kick: Wake) -> Self {
        Self {
            context,
            stop: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            kick,
            commands: Mutex::default(),
            pairs: Mutex::default(),
            tags: Mutex::default(),
            queues: Mutex::default(),
        }
    }

    pub(crate) fn command(&self, command: Command) {
        lock(&self.commands).push(command);
        self.kick.raise();
    }

    pub(crate) fn take_commands(&self) -> Vec<Command> {
        std::mem::take(&mut *lock(&self.commands))
    }

    pub(crate) fn add_pair(&self, tag: usize, pair: &Arc<PairShared>) {
        lock(&self.pairs).insert(pair.number, Arc::downgrade(pair));
        lock(&self.tags).insert(tag, Arc::downgrade(pair));
    }

    pub(crate) fn remove_pair(&self, tag: usize, number: u32) {
        lock(&self.pairs).remove(&number);
        lock(&self.tags).remove(&tag);
    }

    pub(crate) fn pair(&self, number: u32) -> Option<Arc<PairShared>> {
        lock(&self.pairs).get(&number)?.upgrade()
    }

    pub(crate) fn pair_of_tag(&self, tag: usize) -> Option<Arc<PairShared>> {
        lock(&self.tags).get(&tag)?.upgrade()
    }

    pub(crate) fn all_pairs(&self) -> Vec<Arc<PairShared>> {
        lock(&self.pairs).values().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn add_queue(&self, tag: usize, queue: &Arc<QueueShared>) {
        lock(&self.queues).insert(tag, Arc::downgrade(queue));
    }

    pub(crate) fn remove_queue(&self, tag: usize) {
        lock(&self.queues).remove(&tag);
    }

    pub(crate) fn queue(&self, tag: usize) -> Option<Arc<QueueShared>> {
        lock(&self.queues).get(&tag)?.upgrade()
    }

    pub(crate) fn all_queues(&self) -> Vec<Arc<QueueShared>> {
        lock(&self.queues).values().filter_map(Weak::upgrade).collect()
    }
}
