//! Which descriptor number is which connection.
//!
//! The kernel hands out the numbers; this table only says what we know about one. It is ordinary
//! private memory: a forked child has its own copy. A number that nobody told us about is plain.
//!
//! Connections are shared by the numbers that `dup` made, counted, and retired when the last is
//! closed: see [`crate::retired`].

use std::os::fd::RawFd;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use crate::connection::Connection;
use crate::packets;
use crate::retired::{retire, take_back};
use crate::{together, young};

/// Numbers from here on are always plain.
pub const NUMBERS: usize = 1 << 20;

const PLAIN: usize = 0;
const CONNECTING: usize = 1;
const WATCHED_PLAIN: usize = 2;
/// As [`CONNECTING`], with other numbers of the same socket.
const COPIED: usize = 4;
/// The lower bits of a place that leads to a packet connection, whose address has none there; no mark of a
/// young connection ends so.
const PACKETS: usize = 3;
const LOWER: usize = 7;

/// What is known about a number.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// The kernel's.
    Plain,
    /// Begun by `connect`, which did not wait: may become a connection of ours.
    Connecting,
    /// Connected, and the kernel's until it has shown that it lives: see [`crate::young`].
    Young,
    /// Ours, by rings.
    Ours(&'static Connection),
    /// Ours, by packets.
    Packets(&'static packets::Connection),
}

static TABLE: AtomicPtr<AtomicUsize> = AtomicPtr::new(std::ptr::null_mut());
static HIGHEST: AtomicI32 = AtomicI32::new(-1);
static LEFT: AtomicBool = AtomicBool::new(false);
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// When the kernel began this process.
static BEGUN_AT: AtomicU64 = AtomicU64::new(0);
/// How often it was found restored.
static RESTORED: AtomicU32 = AtomicU32::new(0);
/// Makes the table; before that, every number is plain. Called once, by the library's constructor.
pub fn begin() {
    // The variable is read before the program may change its environment.
    let _ = crate::control::name();
    let bytes = NUMBERS * size_of::<AtomicUsize>();
    if let Ok(mapping) = beeline_os::Mapping::anonymous(bytes) {
        let base = mapping.base().cast::<AtomicUsize>();
        // For as long as the program lives.
        std::mem::forget(mapping);
        PROCESS.store(std::process::id(), Ordering::Relaxed);
        let _ = was_restored();
        // Release with the Acquire in `slot`.
        TABLE.store(base.as_ptr(), Ordering::Release);
        inherit();
    }
}

/// Finds connections that were ours in the program that this one replaced.
fn inherit() {
    let Ok(folder) = rustix::fs::open(
        "/proc/self/fd",
        rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    ) else {
        return;
    };
    let Ok(entries) = rustix::fs::Dir::new(folder) else { return };
    let numbers =
        entries.flatten().filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok());
    let numbers: Vec<RawFd> = numbers.collect();
    numbers.into_iter().for_each(crate::connection::inherited);
    each(|_, connection| connection.segment.own().begin_with_thread());
}

#[inline]
pub(crate) fn slot(fd: RawFd) -> Option<&'static AtomicUsize> {
    let index = usize::try_from(fd).ok().filter(|&index| index < NUMBERS)?;
    // Acquire with the Release in `begin`.
    let table = TABLE.load(Ordering::Acquire);
    if table.is_null() {
        return None;
    }
    // SAFETY: the table has `NUMBERS` entries, zeroed by the kernel, and is never unmapped.
    let slot = unsafe { table.add(index) };
    // SAFETY: as above; entries are atomics.
    Some(unsafe { &*slot })
}

/// What is known about `fd`.
#[inline]
#[must_use]
pub fn kind(fd: RawFd) -> Kind {
    let Some(slot) = slot(fd) else { return Kind::Plain };
    // Acquire with the Release in `set`: the connection is whole.
    let value = slot.load(Ordering::Acquire);
    if young::is_mark(value) { young::settled_kind(slot) } else { kind_of(value) }
}

/// What a place's value tells that is no mark of a young connection.
pub(crate) fn kind_of(value: usize) -> Kind {
    match value {
        PLAIN | WATCHED_PLAIN => Kind::Plain,
        CONNECTING | COPIED => Kind::Connecting,
        // SAFETY: as below, put here by `set_packets`.
        place if place & LOWER == PACKETS => Kind::Packets(unsafe { &*packets_at(place) }),
        // SAFETY: every other value was a leaked box, put here by `set`, and is given back only
        // after its last number left the table and the grace was over.
        place => Kind::Ours(unsafe { &*(place as *const Connection) }),
    }
}

fn packets_at(value: usize) -> *const packets::Connection {
    (value & !LOWER) as *const packets::Connection
}

/// The packet connection behind `fd`, if there is one.
#[inline]
#[must_use]
pub fn packets(fd: RawFd) -> Option<&'static packets::Connection> {
    if let Kind::Packets(connection) = kind(fd) { Some(connection) } else { None }
}

/// `fd` is the placeholder of `connection` from now on.
pub fn set_packets(
    fd: RawFd,
    connection: Box<packets::Connection>,
) -> &'static packets::Connection {
    forget(fd);
    packets::take_back();
    let connection: &'static packets::Connection = Box::leak(connection);
    set(fd, std::ptr::from_ref(connection) as usize | PACKETS);
    connection
}

/// Every packet connection of this process, with a number of it.
pub fn each_packets(mut visit: impl FnMut(RawFd, &'static packets::Connection)) {
    for fd in 0..=HIGHEST.load(Ordering::Relaxed) {
        if let Kind::Packets(connection) = kind(fd) {
            visit(fd, connection);
        }
    }
}

/// `fd` is young from now on: `value` is a mark.
pub(crate) fn set_mark(fd: RawFd, value: usize) {
    forget(fd);
    set(fd, value);
}

/// Puts a connection where `mark` was left.
///
/// Errors: the connection, where there is something else by now.
pub(crate) fn replace_mark(
    fd: RawFd,
    mark: usize,
    connection: Box<Connection>,
) -> Result<(), Box<Connection>> {
    take_back();
    let Some(slot) = slot(fd) else { return Err(connection) };
    connection.references.store(1, Ordering::Relaxed);
    let place = Box::into_raw(connection);
    // Release with the Acquire in `kind`.
    if slot.compare_exchange(mark, place as usize, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        return Ok(());
    }
    // SAFETY: ours alone: it was not put into the table.
    Err(unsafe { Box::from_raw(place) })
}

/// Every young connection's number.
pub fn each_young(mut visit: impl FnMut(RawFd)) {
    for fd in 0..=HIGHEST.load(Ordering::Relaxed) {
        if slot(fd).is_some_and(|slot| young::is_mark(slot.load(Ordering::Relaxed))) {
            visit(fd);
        }
    }
}

/// True, once, when this process is not the one that it was: a checkpoint was restored. What tells is the
/// time at which the kernel began it, which no checkpoint brings back.
#[must_use]
pub fn was_restored() -> bool {
    let now = crate::kernel::begun_at();
    let before = BEGUN_AT.swap(now, Ordering::Relaxed);
    let restored = before != 0 && now != 0 && before != now;
    if restored {
        crate::together::forget_name();
        RESTORED.fetch_add(1, Ordering::Release);
    }
    restored
}

/// How often [`was_restored`] has said so: segments from before are copies that the other ends do not have.
pub(crate) fn restores() -> u32 {
    RESTORED.load(Ordering::Acquire)
}

/// True when `fd` was copied, or is a copy, from before it was connected.
pub(crate) fn was_copied_early(fd: RawFd) -> bool {
    slot(fd).is_some_and(|slot| slot.load(Ordering::Relaxed) == COPIED)
}

/// The connection behind `fd`, if it is ours.
#[inline]
#[must_use]
pub fn ours(fd: RawFd) -> Option<&'static Connection> {
    if let Kind::Ours(connection) = kind(fd) { Some(connection) } else { None }
}

fn set(fd: RawFd, value: usize) {
    if let Some(slot) = slot(fd) {
        HIGHEST.fetch_max(fd, Ordering::Relaxed);
        // Release with the Acquire in `kind`.
        slot.store(value, Ordering::Release);
    }
}

/// `fd` was begun by a `connect` that did not wait.
pub fn set_connecting(fd: RawFd) {
    if !was_copied_early(fd) {
        forget(fd);
        set(fd, CONNECTING);
    }
}

/// `fd`, which is none of ours, is in an epoll set with the program's own data: it may not become
/// ours, since the set would not hear of it.
pub fn set_watched_plain(fd: RawFd) {
    if !is_foreign_process() && packets(fd).is_none() {
        set(fd, WATCHED_PLAIN);
    }
}

/// True after [`set_watched_plain`], until the number is forgotten.
#[must_use]
pub fn is_watched_plain(fd: RawFd) -> bool {
    slot(fd).is_some_and(|slot| slot.load(Ordering::Relaxed) == WATCHED_PLAIN)
}

/// `fd` is `connection` from now on.
pub fn set_ours(fd: RawFd, connection: Box<Connection>) -> &'static Connection {
    forget(fd);
    take_back();
    let connection: &'static Connection = Box::leak(connection);
    connection.references.store(1, Ordering::Relaxed);
    set(fd, std::ptr::from_ref(connection) as usize);
    connection
}

/// `new` is a duplicate of `old`.
pub fn duplicate(old: RawFd, new: RawFd) {
    if old == new {
        return;
    }
    young::settle(old);
    if is_foreign_process() {
        return;
    }
    match kind(old) {
        Kind::Ours(connection) => {
            connection.references.fetch_add(1, Ordering::SeqCst);
            forget(new);
            set(new, std::ptr::from_ref(connection) as usize);
            std::sync::atomic::fence(Ordering::SeqCst);
            if let Some(successor) = crate::anew::successor(connection) {
                succeed_one(new, connection, successor);
            }
        }
        Kind::Connecting => {
            set(old, COPIED);
            forget(new);
            set(new, COPIED);
        }
        Kind::Packets(connection) => {
            connection.references.fetch_add(1, Ordering::SeqCst);
            forget(new);
            set(new, std::ptr::from_ref(connection) as usize | PACKETS);
        }
        Kind::Plain | Kind::Young => {
            forget(new);
        }
    }
}

/// The number is plain again. Returns its connection when this was the last number.
pub fn forget(fd: RawFd) -> Option<&'static Connection> {
    let slot = slot(fd)?;
    if slot.load(Ordering::Relaxed) == PLAIN {
        return None;
    }
    let before = slot.swap(PLAIN, Ordering::AcqRel);
    if before <= WATCHED_PLAIN || before == COPIED || young::is_mark(before) {
        return None;
    }
    if before & LOWER == PACKETS {
        // SAFETY: as in `kind_of`; this number's own count keeps the connection until below.
        let connection = unsafe { &*packets_at(before) };
        if connection.references.fetch_sub(1, Ordering::AcqRel) == 1 {
            packets::retire(connection);
        }
        return None;
    }
    // SAFETY: as in `kind`; this number's own count keeps the connection until below.
    let connection = unsafe { &*(before as *const Connection) };
    if connection.references.fetch_sub(1, Ordering::AcqRel) != 1 {
        return None;
    }
    retire(connection);
    Some(connection)
}

/// A count of a connection's numbers that stands for none yet, until it is dropped.
struct Count(&'static Connection);

impl Count {
    fn new(connection: &'static Connection) -> Self {
        connection.references.fetch_add(1, Ordering::SeqCst);
        Self(connection)
    }

    /// It stands for a number from now on.
    fn stand_for_number(self) {
        std::mem::forget(self);
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        if self.0.references.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        // Its last number was closed meanwhile, by who did not take it for the last.
        self.0.is_nobodys();
        together::leave(&self.0.segment);
        if self.0.leave(false) {
            self.0.tell_relay();
        }
        retire(self.0);
    }
}

/// Every number that leads to `old` leads to `new` from now on; `new` says so as the
/// [successor](crate::anew) of `old`.
pub(crate) fn succeed(old: &'static Connection, new: &'static Connection) {
    // It is not to be retired by a number that is closed before the next one leads there.
    let _count = Count::new(new);
    for fd in 0..=HIGHEST.load(Ordering::Relaxed) {
        succeed_one(fd, old, new);
    }
    // A copy that is made at this moment sees the successor, or was seen here.
    if old.references.load(Ordering::SeqCst) == 0 {
        retire(old);
    }
}

pub(crate) fn succeed_one(fd: RawFd, old: &'static Connection, new: &'static Connection) {
    let Some(slot) = slot(fd) else { return };
    let [from, to] = [old, new].map(|one| std::ptr::from_ref(one) as usize);
    if slot.load(Ordering::SeqCst) != from {
        return;
    }
    let count = Count::new(new);
    // Release with the Acquire in `kind`.
    if slot.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
        count.stand_for_number();
        if old.references.fetch_sub(1, Ordering::SeqCst) == 1 {
            // A copy that `succeed` did not see: nobody else comes to it.
            retire(old);
        }
    }
}

/// If `fd` is a copy of a socket that is ours, it is the same connection from now on, and true is
/// returned.
#[must_use]
pub fn is_copy(fd: RawFd) -> bool {
    let Some(cookie) = crate::kernel::cookie(fd) else { return false };
    let mut same = None;
    each(|other, _| {
        if same.is_none() && other != fd && crate::kernel::cookie(other) == Some(cookie) {
            same = Some(other);
        }
    });
    if let Some(other) = same {
        duplicate(other, fd);
    }
    same.is_some()
}

/// From now on no descriptor becomes ours: the program has a way around the names we export. Those
/// that are stay.
pub fn leave_to_kernel() {
    LEFT.store(true, Ordering::Relaxed);
}

/// True after [`leave_to_kernel`].
#[must_use]
pub fn is_left_to_kernel() -> bool {
    LEFT.load(Ordering::Relaxed)
}

/// True in a child that shares this memory with its parent (`vfork`): the table is the parent's.
#[must_use]
pub fn is_foreign_process() -> bool {
    std::process::id() != PROCESS.load(Ordering::Relaxed)
}

/// The largest number anything is known about.
#[must_use]
pub fn highest() -> RawFd {
    HIGHEST.load(Ordering::Relaxed).max(crate::epoll::highest())
}

/// Every connection of this process, with a number of it.
pub fn each(mut visit: impl FnMut(RawFd, &'static Connection)) {
    for fd in 0..=HIGHEST.load(Ordering::Relaxed) {
        if let Kind::Ours(connection) = kind(fd) {
            visit(fd, connection);
        }
    }
}

/// The first connection of this process that `is` says so of, with a number of it. Those that ask the
/// monitor at this moment are not waited for.
pub(crate) fn first(is: impl Fn(&Connection) -> bool) -> Option<(RawFd, &'static Connection)> {
    (0..=HIGHEST.load(Ordering::Relaxed)).find_map(|fd| {
        // Acquire with the Release in `set`.
        let value = slot(fd)?.load(Ordering::Acquire);
        if young::is_mark(value) {
            return None;
        }
        let Kind::Ours(connection) = kind_of(value) else { return None };
        is(connection).then_some((fd, connection))
    })
}

/// True while `fd` leads to this very connection.
pub(crate) fn leads_to(fd: RawFd, connection: &Connection) -> bool {
    let place = std::ptr::from_ref(connection) as usize;
    slot(fd).is_some_and(|slot| slot.load(Ordering::SeqCst) == place)
}

/// Before `fork`: every connection is about to be shared with a child that says so itself.
pub fn before_fork() {
    young::settle_all(|_| true);
    shared();
    crate::between::expect_holder();
    crate::epoll::before_fork();
    crate::retired::before_fork();
}

/// In the parent, after `fork`, and where that failed.
pub fn after_fork_in_parent() {
    crate::retired::after_fork();
    crate::epoll::after_fork_in_parent();
}

/// Every connection is about to be shared with a child that is expected.
fn shared() {
    crate::epoll::shared();
    each_once(|connection| {
        crate::anew::shared(connection, together::expect);
    });
    each_packets(|_, connection| connection.shared());
}

/// Every connection is about to be shared with a process of which nothing more is heard: a child that is not made by
/// `fork`.
pub fn shared_for_good() {
    each_young(young::leave_to_kernel);
    crate::epoll::shared();
    each(|_, connection| {
        crate::anew::shared(connection, together::share_for_good);
    });
    each_packets(|_, connection| connection.shared());
}

/// The child that [`before_fork`] expected was not made.
pub fn not_forked() {
    each_once(|connection| together::not_coming(&connection.segment));
    crate::between::expected_holder();
}

/// The connections with these numbers are about to be shared with a child that will run another program.
#[must_use]
pub fn shared_with_program(gets: impl Fn(RawFd) -> bool) -> Expected {
    let mut expected = Expected::default();
    each_packets(|fd, connection| {
        if gets(fd) {
            connection.shared();
        }
    });
    each(|fd, connection| {
        let number = connection.number;
        if gets(fd) && !expected.0.iter().any(|&(_, other)| other == number) {
            let connection = crate::anew::shared(connection, together::expect);
            expected.0.push((fd, connection.number));
        }
    });
    if !expected.0.is_empty() {
        crate::epoll::shared();
    }
    expected
}

/// Connections that a child is expected to have, by a number each and their own.
#[derive(Debug, Default)]
pub struct Expected(Vec<(RawFd, u64)>);

impl Expected {
    /// The child was made, or not: `child`. `None`: its number is not known.
    pub fn outcome(&self, child: Option<Result<u32, ()>>) {
        for &(fd, number) in &self.0 {
            // Closed meanwhile, it stays expected: for its other holders.
            let Some(connection) = ours(fd).filter(|ours| ours.number == number) else { continue };
            match child {
                Some(Ok(child)) => together::came(&connection.segment, child),
                Some(Err(())) => together::not_coming(&connection.segment),
                None => {
                    together::share_for_good(&connection.segment);
                    together::not_coming(&connection.segment);
                }
            }
        }
    }
}

/// [`each`], by one of its numbers each.
fn each_once(mut visit: impl FnMut(&'static Connection)) {
    let mut copies = Vec::new();
    each(|_, connection| {
        if connection.references.load(Ordering::Relaxed) > 1 {
            if copies.contains(&connection.number) {
                return;
            }
            copies.push(connection.number);
        }
        visit(connection);
    });
}

/// In the child, after `fork`.
pub fn after_fork_in_child() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    BEGUN_AT.store(crate::kernel::begun_at(), Ordering::Relaxed);
    crate::holder::forget_thread();
    together::forget_name();
    each_once(|connection| together::arrived(&connection.segment));
    crate::wake::forget_names();
    crate::board::forget_program();
    crate::retired::after_fork();
    crate::epoll::after_fork_in_child();
    crate::between::arrived();
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;
    use std::sync::Once;

    use beeline_os::Mapping;

    use super::*;
    use crate::segment::{Segment, length_bytes};

    /// Runs a test that forks in a process of its own: a child holds open what others close meanwhile. True once
    /// it has run there.
    pub(crate) fn has_run_apart(test: &str) -> bool {
        const APART: &str = "BEELINE_SOCKETS_TEST_APART";
        if std::env::var_os(APART).is_some() {
            return false;
        }
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output = command.args([test, "--exact"]).env(APART, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        true
    }

    /// Whether `act` says yes in a child, which is ended where it stands still.
    pub(crate) fn in_child(act: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls what programs call there, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes a number.
            let _ = unsafe { libc::alarm(5) };
            let said = act().into();
            // SAFETY: as above.
            unsafe { libc::_exit(said) };
        }
        let mut status = 0;
        // SAFETY: a child of ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1
    }

    /// A connection without another end, and its stream.
    pub(crate) fn alone() -> (TcpStream, &'static Connection) {
        begin_once();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        let connection = Connection::new(Segment::take(mapping, 0).unwrap(), stream.as_raw_fd());
        let connection = set_ours(stream.as_raw_fd(), Box::new(connection));
        (stream, connection)
    }

    /// As the library's constructor does, for the tests of one process.
    pub(crate) fn begin_once() {
        static ONCE: Once = Once::new();
        ONCE.call_once(begin);
    }

    #[test]
    fn a_search_does_not_wait_for_one_that_asks() {
        begin_once();
        let (fd, asks) = (5000, 0x106);
        assert!(young::is_mark(asks));
        set(fd, asks);
        assert!(first(|_| false).is_none());
        // Who waits for one that never ends makes it plain.
        assert_eq!(slot(fd).unwrap().load(Ordering::Relaxed), asks);
        set(fd, PLAIN);
    }

    fn connection(fd: RawFd) -> Box<Connection> {
        let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        Box::new(Connection::new(Segment::take(mapping, 0).unwrap(), fd))
    }

    #[test]
    fn one_whose_last_number_is_closed_while_another_is_led_on_to_it_is_retired() {
        begin_once();
        let (one, other) = (6000, 6001);
        let (old, new) = (set_ours(one, connection(-1)), set_ours(other, connection(-1)));
        let leads = Count::new(new);
        // By other threads, before the number leads there: neither is the last.
        assert!(forget(other).is_none());
        assert!(forget(one).is_some_and(|last| std::ptr::eq(last, old)));
        assert!(!new.is_retired.load(Ordering::SeqCst));
        drop(leads);
        assert!(new.is_retired.load(Ordering::SeqCst));
    }

    #[test]
    fn a_connection_whose_last_number_is_led_on_is_retired() {
        begin_once();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let fd = stream.as_raw_fd();
        let old = set_ours(fd, connection(fd));
        let new: &'static Connection = Box::leak(connection(fd));
        // Two numbers, of which one was copied while the other was led on already.
        old.references.store(2, Ordering::SeqCst);
        succeed_one(fd, old, new);
        assert!(!old.is_retired.load(Ordering::SeqCst));
        set(fd, std::ptr::from_ref(old) as usize);
        succeed_one(fd, old, new);
        assert!(old.is_retired.load(Ordering::SeqCst) && !new.is_retired.load(Ordering::SeqCst));
        assert!(ours(fd).is_some_and(|ours| std::ptr::eq(ours, new)));
        forget(fd);
    }
}
