//! What file actions of `posix_spawn` hand to a child.
//!
//! A child gets the numbers that `exec` leaves open, and those that an action copies onto another. Which
//! these are stands in the program's own `posix_spawn_file_actions_t`, in a form that is the C library's. So
//! the calls that make one are listened to: a few objects at a time, a few numbers each. What is not known
//! (more objects or numbers than that, an object made in another way) may hand on anything.
//!
//! Nothing here waits for long: where the notes are another thread's when a `fork` happens, the child's are
//! never let go, and from then on nothing is known.

use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::quietly;
use crate::real::real;

/// Objects at a time; the oldest makes room.
const OBJECTS: usize = 64;
/// Numbers of one.
const NUMBERS: usize = 16;
/// Looks at notes that another thread has.
const PATIENCE: u32 = 10_000;

type Actions = *mut c_void;

/// Numbers that actions copy; `None`: perhaps any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Handed {
    numbers: [c_int; NUMBERS],
    count: usize,
    any: bool,
}

impl Handed {
    /// What nothing is known about.
    const ANY: Self = Self { numbers: [0; NUMBERS], count: 0, any: true };

    fn add(&mut self, number: c_int) {
        if self.has(number) {
            return;
        }
        match self.numbers.get_mut(self.count) {
            Some(place) => {
                *place = number;
                self.count += 1;
            }
            None => self.any = true,
        }
    }

    /// True when `number` may be copied for the child.
    pub(crate) fn has(&self, number: c_int) -> bool {
        self.any || self.numbers.iter().take(self.count).any(|&one| one == number)
    }
}

/// What is known of the objects at some places, the oldest first.
struct Notes {
    all: [(usize, Handed); OBJECTS],
    next: usize,
}

impl Notes {
    const NONE: (usize, Handed) = (0, Handed { numbers: [0; NUMBERS], count: 0, any: false });
    const fn new() -> Self {
        Self { all: [Self::NONE; OBJECTS], next: 0 }
    }

    fn find(&mut self, place: usize) -> Option<&mut Handed> {
        self.all.iter_mut().find(|(known, _)| *known == place).map(|(_, handed)| handed)
    }

    /// A fresh object, where there may have been another.
    fn begin(&mut self, place: usize) {
        if let Some(handed) = self.find(place) {
            *handed = Handed::default();
            return;
        }
        let free = self.all.iter().position(|(known, _)| *known == 0);
        let at = free.unwrap_or(self.next % OBJECTS);
        self.next = self.next.wrapping_add(1);
        if let Some(entry) = self.all.get_mut(at) {
            *entry = (place, Handed::default());
        }
    }

    fn end(&mut self, place: usize) {
        if let Some(entry) = self.all.iter_mut().find(|(known, _)| *known == place) {
            *entry = Self::NONE;
        }
    }
}

static NOTES: Mutex<Notes> = Mutex::new(Notes::new());
static LOST: AtomicBool = AtomicBool::new(false);

/// `part` on the notes, if they can be had; if not, nothing is known from now on.
fn noted<T>(part: impl FnOnce(&mut Notes) -> T) -> Option<T> {
    for _ in 0..PATIENCE {
        if LOST.load(Ordering::Relaxed) {
            return None;
        }
        if let Ok(mut notes) = NOTES.try_lock() {
            return Some(part(&mut notes));
        }
        std::thread::yield_now();
    }
    LOST.store(true, Ordering::Relaxed);
    None
}

/// What the object `actions`, which may be none, hands to a child beside what `exec` leaves open.
pub(crate) fn handed(actions: *const c_void) -> Handed {
    if actions.is_null() {
        return Handed::default();
    }
    noted(|notes| notes.find(actions.addr()).map(|handed| *handed)).flatten().unwrap_or(Handed::ANY)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_init(actions: Actions) -> c_int {
    let outcome = real!(posix_spawn_file_actions_init(actions) as fn(Actions) -> c_int);
    quietly(|| {
        noted(|notes| notes.begin(actions.addr()));
    });
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_destroy(actions: Actions) -> c_int {
    quietly(|| {
        noted(|notes| notes.end(actions.addr()));
    });
    real!(posix_spawn_file_actions_destroy(actions) as fn(Actions) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    actions: Actions,
    old: c_int,
    new: c_int,
) -> c_int {
    quietly(|| {
        noted(|notes| {
            if let Some(handed) = notes.find(actions.addr()) {
                handed.add(old);
            }
        });
    });
    real!(posix_spawn_file_actions_adddup2(actions, old, new) as fn(Actions, c_int, c_int) -> c_int)
}
