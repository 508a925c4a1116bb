//! Moving a memory object to another backing while threads of this process store into it.
//!
//! A replacement copies the old backing and then maps the new one over the same addresses: what a
//! thread stores in between lands in the old one and is lost. So a provider that places bytes on
//! the application's behalf (a received message, the result of a read, a remote write it executes)
//! does so under a [`Storing`], and [`replace`] waits for those and holds new ones up. The
//! application's own stores have no such guard: not to make any meanwhile is its part.
//!
//! Whatever reaches the memory without going through this process's mapping, and cannot be moved
//! along, is a [`Tie`]: a device that was told the pages, a peer that maps the descriptor. A tied
//! object is not replaced.
//!
//! ```text
//! thread    slot = object; light fence; is anything moving?  no ─▶ store … slot = none
//! replace   moving += object; heavy fence; wait until no slot names the object; copy; map
//! ```
//!
//! One of the two sees the other. A guard costs two stores and a load, and no locked instruction
//! where fences are asymmetric.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::barrier;
use crate::memory::MemoryObject;

/// A word on cache lines of its own: what lies beside it is neither waited for nor taken away.
#[derive(Debug)]
#[repr(align(128))]
struct Apart(AtomicUsize);

/// Objects that are being moved; the only thing a guard looks at.
static MOVING: Apart = Apart(AtomicUsize::new(0));

static TABLE: Mutex<Option<Table>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

#[derive(Default)]
struct Table {
    /// One per thread that ever stored; what it stores into, or 0.
    slots: Vec<&'static AtomicUsize>,
    /// Slots of threads that ended.
    spare: Vec<&'static AtomicUsize>,
    moving: Vec<usize>,
    ties: Vec<Tied>,
    next_tie: u64,
}

/// One tie, while its object lives: other memory may come to lie at the same address.
struct Tied {
    object: usize,
    memory: Weak<dyn MemoryObject>,
    number: u64,
}

type Locked = MutexGuard<'static, Option<Table>>;

fn lock() -> Locked {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(table: Locked) -> Locked {
    CHANGED.wait(table).unwrap_or_else(PoisonError::into_inner)
}

/// A thread's slot, given back when the thread ends.
struct Owned(&'static AtomicUsize);

impl Owned {
    fn take() -> Self {
        let mut table = lock();
        let table = table.get_or_insert_default();
        let slot = table.spare.pop().unwrap_or_else(|| {
            let slot: &'static Apart = Box::leak(Box::new(Apart(AtomicUsize::new(0))));
            table.slots.push(&slot.0);
            &slot.0
        });
        Self(slot)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        AT_HAND.set(None);
        lock().get_or_insert_default().spare.push(self.0);
    }
}

thread_local! {
    static SLOT: Owned = Owned::take();
    /// The slot again, without asking each time whether the thread is ending.
    static AT_HAND: Cell<Option<&'static AtomicUsize>> = const { Cell::new(None) };
}

/// The thread's slot, at its first guard.
#[cold]
fn first_slot() -> &'static AtomicUsize {
    // A thread that is ending, and has given its slot back already, takes one for good.
    let for_good = |_| std::mem::ManuallyDrop::new(Owned::take()).0;
    let slot = SLOT.try_with(|owned| owned.0).unwrap_or_else(for_good);
    AT_HAND.set(Some(slot));
    slot
}

/// Leave to store into one object; the object's backing stays until it is dropped. Short-lived: one
/// bounded copy. One at a time on a thread.
#[derive(Debug)]
#[must_use = "a replacement waits for as long as this lives"]
pub struct Storing {
    slot: &'static AtomicUsize,
    /// Stays on its thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for Storing {
    fn drop(&mut self) {
        // Pairs with the acquire load in `replace`: what was stored is copied.
        self.slot.store(0, Ordering::Release);
    }
}

/// Leave to store into the object at `anchor` ([`crate::MemoryObject::anchor`]); waits while it is
/// being moved.
#[inline]
pub fn storing(anchor: NonNull<u8>) -> Storing {
    let slot = AT_HAND.get().unwrap_or_else(first_slot);
    debug_assert_eq!(slot.load(Ordering::Relaxed), 0, "a thread stores into one object at a time");
    let object = anchor.addr().get();
    slot.store(object, Ordering::Relaxed);
    // Pairs with the heavy fence in `replace`.
    barrier::light(barrier::is_asymmetric());
    // Acquire: no store of the caller's moves up before the look.
    if MOVING.0.load(Ordering::Acquire) != 0 {
        wait_out(slot, object);
    }
    Storing { slot, _thread: PhantomData }
}

#[cold]
fn wait_out(slot: &AtomicUsize, object: usize) {
    let mut table = lock();
    while table.get_or_insert_default().moving.contains(&object) {
        slot.store(0, Ordering::Release);
        table = wait(table);
    }
    // Under the lock: whoever moves the object next sees it.
    slot.store(object, Ordering::Relaxed);
}

/// Somebody reaches the object by other ways than this process's mapping, and would not follow it.
#[derive(Debug)]
#[must_use = "the object can be moved again once this is dropped"]
pub struct Tie(u64);

/// Ties the object that `memory` is, or is a part of, to its backing, for as long as that lives;
/// waits while it is being moved.
pub fn tie(memory: &Arc<dyn MemoryObject>) -> Tie {
    let object = memory.anchor().addr().get();
    let mut table = lock();
    while table.get_or_insert_default().moving.contains(&object) {
        table = wait(table);
    }
    let known = table.get_or_insert_default();
    known.next_tie += 1;
    let number = known.next_tie;
    let memory = Arc::downgrade(&memory.whole().unwrap_or_else(|| Arc::clone(memory)));
    known.ties.push(Tied { object, memory, number });
    Tie(number)
}

impl Drop for Tie {
    fn drop(&mut self) {
        let mut table = lock();
        table.get_or_insert_default().ties.retain(|tied| tied.number != self.0);
    }
}

/// Ends a replacement, however it went.
struct Done(usize);

impl Drop for Done {
    fn drop(&mut self) {
        let mut table = lock();
        let moving = &mut table.get_or_insert_default().moving;
        if let Some(place) = moving.iter().position(|object| *object == self.0) {
            moving.swap_remove(place);
        }
        MOVING.0.fetch_sub(1, Ordering::SeqCst);
        drop(table);
        CHANGED.notify_all();
    }
}

/// Runs `act`, which moves the object at `anchor` to another backing, while no thread of this
/// process stores into it under a guard. One replacement of an object at a time.
///
/// Errors: `ResourceBusy` while the object is tied; those of `act`.
pub fn replace(
    anchor: NonNull<u8>,
    act: impl FnOnce() -> std::io::Result<()>,
) -> std::io::Result<()> {
    let object = anchor.addr().get();
    let mut table = lock();
    while table.get_or_insert_default().moving.contains(&object) {
        table = wait(table);
    }
    let known = table.get_or_insert_default();
    known.ties.retain(|tied| tied.memory.strong_count() > 0);
    if known.ties.iter().any(|tied| tied.object == object) {
        return Err(std::io::Error::new(
            std::io::ErrorKind::ResourceBusy,
            "a device or another provider reaches this memory by itself, and would not follow it; \
             drop what is registered there first",
        ));
    }
    known.moving.push(object);
    MOVING.0.fetch_add(1, Ordering::SeqCst);
    drop(table);
    let _done = Done(object);
    barrier::heavy();
    while is_stored_into(object) {
        std::thread::yield_now();
    }
    act()
}

fn is_stored_into(object: usize) -> bool {
    // Pairs with the release in `Storing::drop`.
    lock().get_or_insert_default().slots.iter().any(|slot| slot.load(Ordering::Acquire) == object)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;
    use crate::SharedMemory;
    use crate::memory::{atomic_u64, load_u64};

    #[test]
    fn what_is_stored_under_a_guard_is_there_after_every_replacement() {
        // Long enough to copy that much happens meanwhile.
        const WORDS: usize = 256 << 10;
        let memory = SharedMemory::allocate("moving", WORDS * 8).unwrap();
        let (over, stored) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let storer = scope.spawn(|| {
                let mut value = 1;
                while !over.load(Ordering::Relaxed) {
                    for word in 0..WORDS {
                        let guard = storing(memory.anchor());
                        atomic_u64(&memory, word * 8).store(value, Ordering::Relaxed);
                        drop(guard);
                        stored.fetch_add(1, Ordering::Relaxed);
                    }
                    for word in 0..WORDS {
                        let found = load_u64(&memory, word * 8);
                        assert_eq!(found, value, "word {word} was lost in a replacement");
                    }
                    value += 1;
                }
            });
            for round in 1..=30 {
                // Some stores between any two.
                while stored.load(Ordering::Relaxed) < round * 50_000 && !storer.is_finished() {
                    std::thread::yield_now();
                }
                memory.replace_backing().unwrap();
            }
            over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_tied_object_is_not_moved() {
        let memory: Arc<dyn MemoryObject> = Arc::new(SharedMemory::allocate("tied", 4096).unwrap());
        let (one, other) = (tie(&memory), tie(&memory));
        drop(one);
        let error = memory.replace_backing().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ResourceBusy);
        drop(other);
        memory.replace_backing().unwrap();
    }

    #[test]
    fn a_tie_to_an_object_that_is_gone_holds_no_other_memory() {
        let mut ties = Vec::new();
        for _ in 0..20 {
            // At the same address as the one before, likely.
            let memory: Arc<dyn MemoryObject> =
                Arc::new(SharedMemory::allocate("tied", 4096).unwrap());
            memory.replace_backing().unwrap();
            ties.push(tie(&memory));
        }
    }
}
