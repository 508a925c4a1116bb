//! poll, select, epoll.

use std::ffi::c_int;
use std::time::Duration;

use beeline_sockets::young::Watched;
use beeline_sockets::{epoll, poll as polling, table};
use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use crate::real::real;
use crate::{guarded_int, quietly};

/// Longest array that is looked at.
const MOST: usize = 1 << 20;

/// From now on the placeholders of these packet connections say what there is; true if there are any.
fn watch_packets(numbers: impl Iterator<Item = c_int>) -> bool {
    let mut any = false;
    for fd in numbers {
        if let Some(connection) = table::packets(fd) {
            any = true;
            quietly(|| connection.watch(fd));
        }
    }
    any
}

/// The program's array.
///
/// # Safety
///
/// `list` is an array of `count` entries, as the program says.
unsafe fn array<'a, T>(list: *mut T, count: usize) -> &'a mut [T] {
    if list.is_null() || count == 0 || count > MOST {
        return &mut [];
    }
    // SAFETY: the contract; no other thread uses the array during the call.
    unsafe { std::slice::from_raw_parts_mut(list, count) }
}

fn milliseconds(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// # Safety
///
/// `time` is null or the program's.
unsafe fn duration(time: *const timespec) -> Option<Duration> {
    // SAFETY: the contract.
    let time = unsafe { time.as_ref() }?;
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    Some(Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanoseconds))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(list: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's array.
    let entries = unsafe { array(list, usize::try_from(count).unwrap_or(0)) };
    let _watched = Watched::new(entries.iter().map(|entry| entry.fd));
    watch_packets(entries.iter().map(|entry| entry.fd));
    let ours = polling::poll(entries, milliseconds(timeout), None);
    match ours {
        Some(outcome) => guarded_int(|| outcome),
        None => real!(poll(list, count, timeout) as fn(*mut pollfd, nfds_t, c_int) -> c_int),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __poll_chk(
    list: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    _room: usize,
) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { poll(list, count, timeout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    list: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's array.
    let entries = unsafe { array(list, usize::try_from(count).unwrap_or(0)) };
    let _watched = Watched::new(entries.iter().map(|entry| entry.fd));
    watch_packets(entries.iter().map(|entry| entry.fd));
    // SAFETY: the program's time.
    let bound = unsafe { duration(timeout) };
    // SAFETY: null or the program's.
    match polling::poll(entries, bound, unsafe { mask.as_ref() }) {
        Some(outcome) => guarded_int(|| outcome),
        None => real!(ppoll(list, count, timeout, mask)
            as fn(*mut pollfd, nfds_t, *const timespec, *const sigset_t) -> c_int),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __ppoll_chk(
    list: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    _room: usize,
) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { ppoll(list, count, timeout, mask) }
}

/// One of `select`'s three sets.
struct Bits(*mut fd_set);

impl Bits {
    fn has(&self, fd: c_int) -> bool {
        // SAFETY: the program's set is as long as the numbers it asks about.
        !self.0.is_null() && unsafe { libc::FD_ISSET(fd, self.0) }
    }

    fn keep(&self, fd: c_int, keep: bool) {
        if !keep && self.has(fd) {
            // SAFETY: as above.
            unsafe { libc::FD_CLR(fd, self.0) };
        }
    }
}

const READ: i16 = libc::POLLIN | libc::POLLHUP | libc::POLLERR;
const WRITE: i16 = libc::POLLOUT | libc::POLLERR;

/// The young ones among those that `select` is asked about.
fn watched(count: c_int, sets: &[Bits; 3]) -> Watched {
    let asked = |fd: &c_int| sets.iter().any(|set| set.has(*fd));
    watch_packets((0..count.clamp(0, 1024)).filter(asked));
    Watched::new((0..count.clamp(0, 1024)).filter(asked))
}

/// `select` as `poll`, if one of ours is asked about.
fn select_ours(
    count: c_int,
    sets: [Bits; 3],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> Option<c_int> {
    let count = count.clamp(0, 1024);
    let asked = |fd| sets.iter().any(|set| set.has(fd));
    let ours = |fd| beeline_sockets::connection::look(fd).is_some() || epoll::is_mixed(fd);
    if !(0..count).any(|fd| asked(fd) && ours(fd)) {
        return None;
    }
    let [read, write, exceptional] = &sets;
    let mut entries: Vec<pollfd> = (0..count)
        .filter(|&fd| asked(fd))
        .map(|fd| {
            let bits = [(read, libc::POLLIN), (write, libc::POLLOUT), (exceptional, libc::POLLPRI)];
            let events = bits.iter().filter(|(set, _)| set.has(fd)).map(|(_, bit)| bit).sum();
            pollfd { fd, events, revents: 0 }
        })
        .collect();
    let outcome = polling::poll(&mut entries, timeout, mask)?;
    Some(guarded_int(|| {
        outcome?;
        if entries.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
            return Err(beeline_sockets::Errno(libc::EBADF));
        }
        let mut total = 0;
        for entry in &entries {
            for (set, bits) in [(read, READ), (write, WRITE), (exceptional, libc::POLLPRI)] {
                if set.has(entry.fd) {
                    let ready = entry.revents & bits != 0;
                    set.keep(entry.fd, ready);
                    total += usize::from(ready);
                }
            }
        }
        Ok(total)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: null or the program's.
    let bound = unsafe { timeout.as_ref() }.map(|time| {
        Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
            + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
    });
    let began = std::time::Instant::now();
    let sets = [Bits(read), Bits(write), Bits(exceptional)];
    let _watched = watched(count, &sets);
    if let Some(outcome) = select_ours(count, sets, bound, None) {
        // SAFETY: null or the program's; what is left, as Linux tells it.
        if let (Some(place), Some(bound)) = (unsafe { timeout.as_mut() }, bound) {
            let left = bound.saturating_sub(began.elapsed());
            place.tv_sec = i64::try_from(left.as_secs()).unwrap_or(0);
            place.tv_usec = i64::from(left.subsec_micros());
        }
        return outcome;
    }
    real!(select(count, read, write, exceptional, timeout)
        as fn(c_int, *mut fd_set, *mut fd_set, *mut fd_set, *mut timeval) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's time.
    let bound = unsafe { duration(timeout) };
    let sets = [Bits(read), Bits(write), Bits(exceptional)];
    let _watched = watched(count, &sets);
    // SAFETY: null or the program's.
    if let Some(outcome) = select_ours(count, sets, bound, unsafe { mask.as_ref() }) {
        return outcome;
    }
    real!(pselect(count, read, write, exceptional, timeout, mask)
        as fn(
            c_int,
            *mut fd_set,
            *mut fd_set,
            *mut fd_set,
            *const timespec,
            *const sigset_t,
        ) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: null or the program's.
    let wanted = unsafe { event.as_ref() }.copied();
    watch_packets(std::iter::once(fd));
    match epoll::control(set, operation, fd, wanted) {
        Some(outcome) => guarded_int(|| outcome),
        None => real!(epoll_ctl(set, operation, fd, event)
            as fn(c_int, c_int, c_int, *mut epoll_event) -> c_int),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_create(size: c_int) -> c_int {
    created(real!(epoll_create(size) as fn(c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    created(real!(epoll_create1(flags) as fn(c_int) -> c_int))
}

fn created(set: c_int) -> c_int {
    if set >= 0 {
        quietly(|| epoll::created(set));
    }
    set
}

/// What a wait is called with.
#[derive(Clone, Copy)]
struct Wait<'a> {
    set: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: Option<Duration>,
    mask: Option<&'a sigset_t>,
}

impl Wait<'_> {
    /// The program's array; of a longer one, as much as anybody fills.
    fn answers<'a>(self) -> &'a mut [epoll_event] {
        // SAFETY: the program's array.
        unsafe { array(self.events, usize::try_from(self.count).unwrap_or(0).min(MOST)) }
    }

    /// The wait on a set that holds some of ours; `None` when it holds none.
    fn ours(self) -> Option<c_int> {
        let outcome = epoll::wait(self.set, self.answers(), self.timeout, self.mask)?;
        Some(guarded_int(|| outcome))
    }

    /// The wait, by the C library's own function where the set holds none of ours. A thread may be
    /// cancelled in there: nothing here has anything to tidy up.
    fn any(self, plainly: impl Fn() -> c_int) -> c_int {
        if self.events.is_null() || self.count <= 0 {
            // The kernel's to refuse.
            return plainly();
        }
        if let Some(outcome) = self.ours() {
            return outcome;
        }
        let began = std::time::Instant::now();
        while epoll::sleeps_plainly(self.set) {
            let outcome = plainly();
            let reported = usize::try_from(outcome).unwrap_or(0);
            if let Some(told) = epoll::wakes_plainly(self.set, self.answers(), reported) {
                return if reported > 0 {
                    c_int::try_from(told).unwrap_or(outcome)
                } else {
                    outcome
                };
            }
            // Another thread has put one of ours into the set, and perhaps taken it out again.
            let timeout = self.timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
            if let Some(outcome) = (Wait { timeout, ..self }).ours() {
                return outcome;
            }
        }
        let timeout = self.timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
        (Wait { timeout, ..self }).ours().unwrap_or(0)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
) -> c_int {
    Wait { set, events, count, timeout: milliseconds(timeout), mask: None }.any(|| {
        real!(epoll_wait(set, events, count, timeout)
            as fn(c_int, *mut epoll_event, c_int, c_int) -> c_int)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: null or the program's.
    let signals = unsafe { mask.as_ref() };
    Wait { set, events, count, timeout: milliseconds(timeout), mask: signals }.any(|| {
        real!(epoll_pwait(set, events, count, timeout, mask)
            as fn(c_int, *mut epoll_event, c_int, c_int, *const sigset_t) -> c_int)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's time.
    let bound = unsafe { duration(timeout) };
    // SAFETY: null or the program's.
    let signals = unsafe { mask.as_ref() };
    Wait { set, events, count, timeout: bound, mask: signals }.any(|| {
        real!(epoll_pwait2(set, events, count, timeout, mask)
            as fn(c_int, *mut epoll_event, c_int, *const timespec, *const sigset_t) -> c_int)
    })
}
