//! The daemon's half: it keeps every class supplied, off the path of requests.
//!
//! [`SlabPools::tend`] is one look at all classes. [`SlabDaemon`] runs it on a thread of its own that
//! sleeps until the processor asks; tests and models call `tend` themselves.
//!
//! Split: entries of a larger class are copied to the smaller one unchanged. Merge: only when a class
//! is nearly empty and no larger class has entries to give.
//!
//! Source: spec/kv-direct.md 5.2.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::slab::{BATCH, CLASSES, Class, Entry, SharedStack, merge};

/// A class with fewer entries than this is given some, entries.
pub const LOW_WATERMARK: u64 = 8 * BATCH as u64;
/// Fewest entries from which an end takes a batch: the batch and the guard.
const POPPABLE: u64 = 2 * BATCH as u64;
/// After a merge without gain the daemon's thread merges again when free memory has grown by this
/// part, or after this many times as long as the merge took, whatever comes first.
const GROWTH_PART: u64 = 8;
const REST_PER_MERGE: u32 = 16;
/// A merge is taken to have lasted at least this long.
const SHORTEST_MERGE: Duration = Duration::from_millis(1);

/// The last merge, where it joined nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Barren {
    /// Free bytes in the smaller classes that it could not join: a merge that finds no more than
    /// that would find nothing.
    bytes: u64,
    /// Until when another one waits for much more than that.
    rest_until: Option<Instant>,
}

/// The shared stacks of all classes, and how the two halves call each other.
#[derive(Debug)]
pub struct SlabPools {
    stacks: [SharedStack; CLASSES],
    units: u32,
    /// Passes asked for and passes done: a pass that began after it was asked for answers it.
    asked: AtomicU64,
    done: Mutex<u64>,
    changed: Condvar,
    stopping: AtomicBool,
    /// Entries copied from a larger class.
    split_entries: AtomicU64,
    /// Merges, and blocks they made.
    merges: AtomicU64,
    barren: Mutex<Barren>,
}

impl SlabPools {
    /// All of the units from `first` (a multiple of 64) to `end` free, in blocks of the largest
    /// class.
    #[must_use]
    pub fn new(first: u32, end: u32) -> Self {
        let largest = Class::new(CLASSES - 1);
        let units = end.saturating_sub(first) / largest.units() * largest.units();
        let stacks = std::array::from_fn(|class| {
            SharedStack::new((units / Class::new(class).units()) as usize)
        });
        let pools = Self {
            stacks,
            units: end,
            asked: AtomicU64::new(0),
            done: Mutex::new(0),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            split_entries: AtomicU64::new(0),
            merges: AtomicU64::new(0),
            barren: Mutex::default(),
        };
        let mut batch = Vec::with_capacity(BATCH);
        for unit in (first..first + units).step_by(largest.units() as usize) {
            batch.push(Entry { unit, class: largest });
            if batch.len() == BATCH {
                pools.stack(largest).push_right(&batch);
                batch.clear();
            }
        }
        pools.stack(largest).push_right(&batch);
        pools
    }

    /// The shared stack of a class.
    #[must_use]
    pub fn stack(&self, class: Class) -> &SharedStack {
        &self.stacks[class.index()]
    }

    /// Entries that were copied from a larger class to a smaller one.
    #[must_use]
    pub fn split_entries(&self) -> u64 {
        self.split_entries.load(Ordering::Relaxed)
    }

    /// Merges so far.
    #[must_use]
    pub fn merges(&self) -> u64 {
        self.merges.load(Ordering::Relaxed)
    }

    /// One look at every class by the daemon: the smallest last, because it can be supplied by all
    /// others. Returns whether anything moved.
    pub fn tend(&self) -> bool {
        self.pass(None)
    }

    /// As [`SlabPools::tend`]; with a time, merges without gain are held apart.
    fn pass(&self, now: Option<Instant>) -> bool {
        let mut moved = false;
        for class in Class::all().rev() {
            if self.stack(class).len() >= LOW_WATERMARK {
                continue;
            }
            let before = self.split_entries();
            if self.split_into(class) {
                moved |= self.split_entries() != before;
            } else if self.merge(now) {
                moved = true;
                self.split_into(class);
            }
        }
        moved
    }

    /// Copies entries of larger classes, the nearest first: those that stay above their own low
    /// watermark give up to this class's, and where that is not enough for one batch, any that has a
    /// batch gives it. False where the class has no batch to give after that.
    fn split_into(&self, class: Class) -> bool {
        let mut hand = Vec::with_capacity(BATCH);
        let own = self.stack(class);
        for (wanted, kept) in [(LOW_WATERMARK, LOW_WATERMARK), (POPPABLE, 0)] {
            for larger in Class::all().filter(|larger| *larger > class) {
                let donor = self.stack(larger);
                while own.len() < wanted
                    && donor.len() >= kept + BATCH as u64
                    && donor.pop_right(&mut hand)
                {
                    own.push_right(&hand);
                    self.split_entries.fetch_add(hand.len() as u64, Ordering::Relaxed);
                    hand.clear();
                }
            }
        }
        own.len() >= POPPABLE
    }

    /// Joins what is free in all classes but the largest; false where nothing could be joined.
    fn merge(&self, now: Option<Instant>) -> bool {
        let smaller = || Class::all().take(CLASSES - 1);
        let bytes = || -> u64 {
            smaller().map(|class| self.stack(class).len() * class.bytes() as u64).sum()
        };
        let found = bytes();
        let last = *self.barren.lock().unwrap_or_else(PoisonError::into_inner);
        let rests = now.zip(last.rest_until).is_some_and(|(now, until)| now < until);
        if found <= last.bytes || (rests && found < last.bytes + last.bytes / GROWTH_PART) {
            return false;
        }
        let began = Instant::now();
        let mut free = Vec::new();
        for class in smaller() {
            while self.stack(class).pop_right(&mut free) {}
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let before = free.len();
        let joined = merge::by_sorting(&free, if before > 1 << 16 { threads } else { 1 });
        let fruitful = joined.len() < before;
        // Each block goes to the pool of its real size; a batch may hold one class only.
        for class in Class::all() {
            let of_class: Vec<Entry> =
                joined.iter().filter(|entry| entry.class == class).copied().collect();
            for batch in of_class.chunks(BATCH) {
                self.stack(class).push_right(batch);
            }
        }
        self.merges.fetch_add(1, Ordering::Relaxed);
        let took = began.elapsed().max(SHORTEST_MERGE);
        let rest_until = (!fruitful).then(|| Instant::now() + took * REST_PER_MERGE);
        *self.barren.lock().unwrap_or_else(PoisonError::into_inner) =
            Barren { bytes: bytes(), rest_until };
        fruitful
    }

    /// Asks the daemon for a pass and does not wait.
    pub fn ask(&self) -> u64 {
        let ticket = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        // Taking the lock orders this with a daemon that is about to sleep.
        drop(self.done.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
        ticket
    }

    /// Asks for a pass and waits for it, `limit` at most; false where none ended by then.
    pub fn ask_and_wait(&self, limit: Duration) -> bool {
        let ticket = self.ask();
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = |done: &mut u64| *done < ticket;
        match self.changed.wait_timeout_while(done, limit, waiting) {
            Ok((done, _)) => *done >= ticket,
            Err(_) => false,
        }
    }

    /// Units of memory, the index included.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units
    }

    fn serve(&self) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.stopping.load(Ordering::SeqCst) {
            let asked = self.asked.load(Ordering::SeqCst);
            if *done >= asked {
                done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(done);
            self.pass(Some(Instant::now()));
            done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
            *done = asked;
            self.changed.notify_all();
        }
    }
}

/// The daemon's thread. It sleeps until it is asked; dropping it ends it.
#[derive(Debug)]
pub struct SlabDaemon {
    pools: Arc<SlabPools>,
    thread: Option<JoinHandle<()>>,
}

impl SlabDaemon {
    /// Starts a daemon for `pools`.
    ///
    /// Errors: the thread cannot be made.
    pub fn start(pools: Arc<SlabPools>) -> std::io::Result<Self> {
        let served = Arc::clone(&pools);
        let thread = std::thread::Builder::new()
            .name("direct-slabs".to_owned())
            .spawn(move || served.serve())?;
        Ok(Self { pools, thread: Some(thread) })
    }
}

impl Drop for SlabDaemon {
    fn drop(&mut self) {
        self.pools.stopping.store(true, Ordering::SeqCst);
        self.pools.ask();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
