//! Synchronising files for persisters that do not wait for it.
//!
//! ```text
//!   begin_fence ── files, ticket ──▶ queue ──▶ a worker per file ── fdatasync
//!   fenced_to ◀── line of tickets ◀── the last file of a ticket is done ──┘
//! ```
//!
//! A file has one worker at a time. Requests that name a file while its worker synchronises it wait, and
//! share the next synchronisation: all of one persister, and those of several. Different files have
//! different workers, so that none waits for another's; the kernel joins what they write.
//!
//! Invariants:
//! - A synchronisation serves requests that were in the queue before it began, and no others.
//! - A fence whose files all wait for the latest ticket of its persister has that ticket: however long a disk
//!   takes, a persister has few requests in the queue.
//! - A ticket counts as fenced when all its files and those of every earlier ticket of its persister were
//!   synchronised. A failure sticks in the pool before the ticket counts: a persister that sees the ticket
//!   and then asks the pool hears of it.
//! - A worker holds nothing of the pool while it tells of a ticket: a pool may close right then.
//! - Workers sleep while the queue is empty, and end with the pool.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::core::Core;
use crate::segment::Segment;

/// Called when a ticket counts as fenced, on whatever thread found out. It does not block.
pub(crate) type Waker = Box<dyn Fn() + Send + Sync>;

/// A file to synchronise.
#[derive(Clone, Debug)]
pub(crate) enum File {
    /// That of a segment.
    Segment(Arc<Segment>),
    /// `pool.bee`.
    Table(Arc<Core>),
}

impl File {
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Segment(one), Self::Segment(other)) => Arc::ptr_eq(one, other),
            (Self::Table(_), Self::Table(_)) => true,
            _ => false,
        }
    }

    /// A failure stays in the pool, for every request.
    fn synchronise(&self) {
        let _ = match self {
            Self::Segment(segment) => segment.synchronise(),
            Self::Table(core) => core.sync_table(),
        };
    }
}

/// The tickets of one persister.
#[derive(Default)]
pub(crate) struct Line {
    /// Every ticket up to this one is fenced.
    fenced_to: AtomicU64,
    /// The tickets that were begun and are not fenced, in order, with the files that each waits for.
    begun: Mutex<VecDeque<(u64, usize)>>,
    changed: Condvar,
    waker: OnceLock<Waker>,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Line").field("fenced_to", &self.fenced_to).finish_non_exhaustive()
    }
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, usize)>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every ticket up to this one is fenced.
    #[inline]
    pub fn fenced_to(&self) -> u64 {
        // Pairs with the release in `settle`: what the worker left in the pool is seen, too.
        self.fenced_to.load(Ordering::Acquire)
    }

    pub fn set_waker(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// A ticket that waits for so many files.
    pub fn begin(&self, ticket: u64, files: usize) {
        let mut begun = self.lock();
        begun.push_back((ticket, files));
        self.settle(&mut begun);
    }

    /// A file of a ticket was synchronised, or failed.
    pub fn done(&self, ticket: u64) {
        let fenced = {
            let mut begun = self.lock();
            let waiting = begun.iter_mut().find(|(begun, _)| *begun == ticket);
            let Some((_, files)) = waiting else { return };
            *files -= 1;
            self.settle(&mut begun)
        };
        if fenced && let Some(waker) = self.waker.get() {
            waker();
        }
    }

    fn settle(&self, begun: &mut VecDeque<(u64, usize)>) -> bool {
        let mut fenced = false;
        while let Some((ticket, 0)) = begun.front() {
            self.fenced_to.store(*ticket, Ordering::Release);
            begun.pop_front();
            fenced = true;
        }
        if fenced {
            self.changed.notify_all();
        }
        fenced
    }

    /// Waits until no ticket is under way.
    pub fn wait(&self) {
        let mut begun = self.lock();
        while !begun.is_empty() {
            begun = self.changed.wait(begun).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[derive(Debug)]
struct Task {
    file: File,
    waiting: Vec<(Arc<Line>, u64)>,
    running: bool,
}

#[derive(Debug, Default)]
struct Queue {
    /// In the order in which they are due; those that are being synchronised stay.
    tasks: Vec<Task>,
    workers: usize,
    sleeping: usize,
    /// Most workers: one for each persister that ever asked, and one for a second file.
    most: usize,
    stopping: bool,
}

impl Queue {
    fn due(&self) -> Option<usize> {
        self.tasks.iter().position(|task| !task.running && !task.waiting.is_empty())
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Synchroniser {
    queue: Mutex<Queue>,
    work: Condvar,
}

impl Synchroniser {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another persister will ask.
    pub fn expect_one_more(&self) {
        let mut queue = self.lock();
        queue.most = (queue.most + 1).max(2);
    }

    /// True when each of `files` waits already to be synchronised for this ticket of `line`, the latest there:
    /// what was stored so far is then covered by it.
    pub fn covers(&self, line: &Arc<Line>, ticket: u64, files: &[File]) -> bool {
        let queue = self.lock();
        let waits = |task: &Task| {
            task.waiting.iter().any(|(known, at)| Arc::ptr_eq(known, line) && *at == ticket)
        };
        let mut tasks = files.iter().map(|file| queue.tasks.iter().find(|task| task.file.is(file)));
        !files.is_empty() && tasks.all(|task| task.is_some_and(waits))
    }

    /// Has `files` synchronised for a ticket that was begun in `line`.
    pub fn submit(self: &Arc<Self>, line: &Arc<Line>, ticket: u64, files: Vec<File>) {
        let mut queue = self.lock();
        let mut fresh = 0;
        for file in files {
            let request = (Arc::clone(line), ticket);
            match queue.tasks.iter_mut().find(|task| task.file.is(&file)) {
                Some(task) => task.waiting.push(request),
                None => {
                    queue.tasks.push(Task { file, waiting: vec![request], running: false });
                    fresh += 1;
                }
            }
        }
        // A worker that was woken and has not taken its file yet counts as asleep.
        let due = queue.tasks.iter().filter(|task| !task.running && !task.waiting.is_empty());
        let wanted = due.count().saturating_sub(queue.sleeping);
        let started = wanted.min(queue.most - queue.workers.min(queue.most));
        queue.workers += started;
        let nobody = queue.workers == started;
        drop(queue);
        (0..fresh).for_each(|_| self.work.notify_one());
        let mut failed = 0;
        for _ in 0..started {
            let synchroniser = Arc::clone(self);
            let thread = std::thread::Builder::new().name("beeline-sync".to_owned());
            failed += usize::from(thread.spawn(move || synchroniser.run()).is_err());
        }
        if failed > 0 {
            self.lock().workers -= failed;
        }
        if nobody && failed == started {
            // The system has no more threads: the asker does the work.
            while self.synchronise_one() {}
        }
    }

    /// The pool closes: no request is left, as each holds the pool.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.work.notify_all();
    }

    fn run(&self) {
        loop {
            while self.synchronise_one() {}
            let mut queue = self.lock();
            if queue.stopping {
                return;
            }
            if queue.due().is_none() {
                queue.sleeping += 1;
                let woken = self.work.wait(queue);
                woken.unwrap_or_else(PoisonError::into_inner).sleeping -= 1;
            }
        }
    }

    /// Synchronises the file that is due; false where there is none.
    fn synchronise_one(&self) -> bool {
        let mut queue = self.lock();
        let Some(at) = queue.due() else { return false };
        let mut task = queue.tasks.remove(at);
        let file = task.file.clone();
        let served = std::mem::take(&mut task.waiting);
        task.running = true;
        queue.tasks.push(task);
        drop(queue);
        file.synchronise();
        let mut queue = self.lock();
        let at = queue.tasks.iter().position(|task| task.file.is(&file));
        let idle = at.and_then(|at| {
            let task = &mut queue.tasks[at];
            task.running = false;
            task.waiting.is_empty().then(|| queue.tasks.remove(at))
        });
        drop(queue);
        // The pool may close as soon as the last request is told.
        drop((idle, file));
        served.into_iter().for_each(|(line, ticket)| line.done(ticket));
        true
    }
}
