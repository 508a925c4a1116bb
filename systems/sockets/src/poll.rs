//! `poll` and `select` over descriptors of ours and of the kernel's.
//!
//! Ours are answered from the rings; an epoll set that holds some of ours is asked for what is due in
//! it. Before sleeping, each of ours is armed and watched in the
//! kernel for a doorbell, so one `ppoll` waits for everything.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_os::barrier;

use crate::connection::{Connection, look};
use crate::kernel::{self, Errno, Outcome};
use crate::recall::ForRoom;
use crate::wait::Budget;
use crate::wake::EACH;
use crate::{anew, epoll};

/// What the rings say of one connection, as `poll` bits, whatever was asked for.
#[must_use]
pub fn readiness(connection: &Connection) -> i16 {
    let (own, other) = (connection.segment.own(), connection.segment.other());
    let mut ready = 0;
    if connection.kernel_bytes_left().is_none() {
        if connection.is_worth_reading() {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        let ended = connection.is_over()
            || other.signs.finished.load(Ordering::Acquire) != 0
            || own.receiving.shut.load(Ordering::Relaxed) != 0;
        if ended {
            ready |= libc::POLLRDHUP;
            if own.signs.finished.load(Ordering::Relaxed) != 0 {
                ready |= libc::POLLHUP;
            }
        }
    }
    if connection.pending_error.load(Ordering::Relaxed) != 0 {
        ready |= libc::POLLERR | libc::POLLHUP;
    }
    if connection.is_bound_for_ring() && connection.is_writable() {
        ready |= libc::POLLOUT | libc::POLLWRNORM;
    }
    ready
}

/// Arms a connection for what somebody is about to sleep for.
pub fn arm(connection: &Connection, reading: bool, writing: bool) {
    let signs = &connection.segment.own().signs;
    for (wanted, armed) in [(reading, &signs.receive_armed), (writing, &signs.send_armed)] {
        if wanted && armed.load(Ordering::Relaxed) != EACH {
            armed.swap(EACH, Ordering::SeqCst);
        }
    }
}

/// Bits that are reported whether asked for or not.
const ALWAYS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
const READING: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP;
const WRITING: i16 = libc::POLLOUT | libc::POLLWRNORM;

static BUDGET: std::sync::LazyLock<Budget> = std::sync::LazyLock::new(Budget::default);

/// What of ours an entry of `poll` stands for.
#[derive(Clone, Copy)]
enum Subject {
    Connection(&'static Connection),
    /// An epoll set with entries of ours.
    Set(RawFd),
}

#[derive(Clone, Copy)]
struct Watched {
    index: usize,
    subject: Subject,
}

impl Watched {
    fn of(index: usize, fd: RawFd) -> Option<Self> {
        let connection = look(fd).map(Subject::Connection);
        let subject =
            connection.or_else(|| epoll::is_mixed_and_polled(fd).then_some(Subject::Set(fd)))?;
        Some(Self { index, subject })
    }

    fn connection(self) -> Option<&'static Connection> {
        if let Subject::Connection(connection) = self.subject { Some(connection) } else { None }
    }

    fn readiness(self) -> i16 {
        match self.subject {
            Subject::Connection(connection) => readiness(connection),
            Subject::Set(set) if epoll::is_due(set) => libc::POLLIN | libc::POLLRDNORM,
            Subject::Set(_) => 0,
        }
    }
}

/// Answers `poll` if any entry is ours: the number of entries with `revents`. `None`: none is, ask
/// the kernel.
pub fn poll(
    entries: &mut [libc::pollfd],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Option<Outcome> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let watched: Vec<Watched> = entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.fd >= 0)
            .filter_map(|(index, entry)| Watched::of(index, entry.fd))
            .collect();
        if watched.is_empty() {
            return None;
        }
        let outcome = poll_watched(entries, &watched, timeout, deadline, mask);
        if outcome != Err(anew::MOVED) {
            return Some(outcome);
        }
    }
}

fn poll_watched(
    entries: &mut [libc::pollfd],
    watched: &[Watched],
    timeout: Option<Duration>,
    deadline: Option<Instant>,
    mask: Option<&libc::sigset_t>,
) -> Outcome {
    // True when the rings alone know everything.
    let only_ours = watched.len() == entries.iter().filter(|entry| entry.fd >= 0).count()
        && watched.iter().all(|watch| {
            watch.connection().is_some_and(|connection| {
                connection.kernel_bytes_left().is_none() && connection.is_bound_for_ring()
            })
        });
    let any_ready = |entries: &[libc::pollfd]| {
        watched.iter().any(|watch| {
            let wanted = entries[watch.index].events | ALWAYS;
            watch.readiness() & wanted != 0
        })
    };
    let mut first = true;
    let moved = || watched.iter().filter_map(|watch| watch.connection()).any(anew::has_moved);
    loop {
        if moved() {
            return Err(anew::MOVED);
        }
        // With others in the set, the kernel is asked before any spinning delays their news.
        let at_once = first && any_ready(entries);
        if !only_ours || !at_once && timeout == Some(Duration::ZERO) {
            ask_kernel(entries, watched, Some(Duration::ZERO), None)?;
        } else {
            entries.iter_mut().for_each(|entry| entry.revents = 0);
        }
        let ready = merge(entries, watched);
        if ready > 0 || timeout == Some(Duration::ZERO) {
            return Ok(ready);
        }
        first = false;
        if BUDGET.spin(|| any_ready(entries)) {
            first = true;
            continue;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let began = Instant::now();
        let outcome = sleep(entries, watched, left, mask);
        BUDGET.learn(began.elapsed());
        outcome?;
        if moved() {
            return Err(anew::MOVED);
        }
        let ready = merge(entries, watched);
        let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if ready > 0 || late {
            return Ok(ready);
        }
    }
}

fn sleep(
    entries: &mut [libc::pollfd],
    watched: &[Watched],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Result<(), Errno> {
    let mut shared = false;
    let connections = || watched.iter().filter_map(|watch| watch.connection());
    // Counted first: see `Sleepers::enter`.
    let asleep: Vec<_> = connections().map(|connection| connection.sleepers.enter()).collect();
    // Before the fence: who is woken for room counts on the last doorbell.
    let for_room: Vec<_> = watched
        .iter()
        .filter(|watch| entries[watch.index].events & WRITING != 0)
        .filter_map(|watch| watch.connection())
        .map(Connection::sleeps_for_room)
        .collect();
    // Before the sets are armed: who swallows a doorbell stirs, then looks whether anybody sleeps.
    let any_set = watched.iter().any(|watch| matches!(watch.subject, Subject::Set(_)));
    let polling = any_set.then(epoll::Polling::new);
    for watch in watched {
        let events = entries[watch.index].events;
        match watch.subject {
            Subject::Connection(connection) => {
                connection.segment.own().sharing.watchers.fetch_add(1, Ordering::SeqCst);
                let full = events & WRITING != 0 && !connection.is_writable();
                arm(connection, events & READING != 0, full);
                // Nobody rings for room there.
                shared |= full && connection.is_other_mute();
                // Who reads the kernel's stream up to the switch takes doorbells behind it along.
                shared |= full && connection.kernel_bytes_left().is_some();
            }
            Subject::Set(set) => shared |= epoll::arm_all(set),
        }
    }
    barrier::heavy();
    let ready =
        watched.iter().any(|watch| watch.readiness() & (entries[watch.index].events | ALWAYS) != 0);
    // Where somebody else watches the same end, a doorbell may be swallowed by him, or not be ours
    // to swallow: then we look by the clock too.
    shared |= watched
        .iter()
        .filter_map(|watch| watch.connection())
        .any(|connection| connection.segment.own().sharing.watchers.load(Ordering::SeqCst) > 1);
    let moving = watched
        .iter()
        .filter_map(|watch| watch.connection())
        .any(|connection| connection.anew.is_moving());
    let bound = if ready || moving {
        Some(Duration::ZERO)
    } else if shared {
        Some(timeout.unwrap_or(Duration::MAX).min(Duration::from_millis(1)))
    } else {
        timeout
    };
    let outcome = ask(entries, watched, bound, mask, Some(for_room));
    drop(polling);
    for connection in watched.iter().filter_map(|watch| watch.connection()) {
        connection.segment.own().sharing.watchers.fetch_sub(1, Ordering::SeqCst);
    }
    drop(asleep);
    // As bytes in the kernel's stream that the program does not ask for.
    let stays = shared
        || watched
            .iter()
            .filter_map(|watch| watch.connection())
            .any(|connection| connection.kernel_bytes_left().is_some());
    if stays && outcome.is_ok_and(|reported| reported > 0) && merge(entries, watched) == 0 {
        // A doorbell that is left to another watcher would wake us again at once.
        let _ = kernel::pause(1);
    }
    outcome.map(|_| ())
}

fn ask_kernel(
    entries: &mut [libc::pollfd],
    watched: &[Watched],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Outcome {
    ask(entries, watched, timeout, mask, None)
}

/// One `ppoll`; of ours, `revents` afterwards says only what the kernel's stream is asked for. `sleeps`: for
/// who is one of the watchers, with those that he waits for room at.
fn ask(
    entries: &mut [libc::pollfd],
    watched: &[Watched],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
    sleeps: Option<Vec<ForRoom<'_>>>,
) -> Outcome {
    let wanted: Vec<i16> = watched.iter().map(|watch| entries[watch.index].events).collect();
    for watch in watched {
        // A set is asked by the kernel's rules: its doorbells are swallowed by who waits on it.
        let Some(connection) = watch.connection() else { continue };
        let by_kernel = !connection.is_bound_for_ring();
        let entry = &mut entries[watch.index];
        let out = if by_kernel { entry.events & WRITING } else { 0 };
        entry.events = libc::POLLIN | libc::POLLRDHUP | out;
    }
    let outcome = kernel::poll_many(entries, timeout.map(time), mask);
    let watching = u32::from(sleeps.is_some());
    // Awake: doorbells are not left in place for this thread.
    drop(sleeps);
    for (watch, wanted) in watched.iter().zip(wanted) {
        let Some(connection) = watch.connection() else { continue };
        let entry = &mut entries[watch.index];
        entry.events = wanted;
        if outcome.is_err() {
            continue;
        }
        if connection.kernel_bytes_left().is_some() {
            if entry.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0 {
                connection.look_behind_bytes(entry.fd);
            }
            let asked = entry.events | wanted;
            entry.revents = connection.without_bells(entry.fd, entry.revents, asked, || {
                connection.make_up_for_swallowed(entry.fd);
            }) & (wanted | ALWAYS);
            continue;
        }
        let out = entry.revents & WRITING & wanted;
        if entry.revents & !WRITING != 0 {
            connection.listen(entry.fd, watching);
        }
        entry.revents = out;
    }
    outcome
}

/// Adds what the rings say; the number of entries with anything.
fn merge(entries: &mut [libc::pollfd], watched: &[Watched]) -> usize {
    for watch in watched {
        let entry = &mut entries[watch.index];
        entry.revents |= watch.readiness() & (entry.events | ALWAYS);
    }
    entries.iter().filter(|entry| entry.fd >= 0 && entry.revents != 0).count()
}

/// As the kernel takes it.
#[must_use]
pub fn time(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
