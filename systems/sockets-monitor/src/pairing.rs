//! Who waits for whom.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use beeline_os::Mapping;
use beeline_os::mapping::MappingError;
use beeline_sockets::control::Introduced;
use beeline_sockets::relayed::Adopted;
use beeline_sockets::segment::{
    COOKIES_AT, DEFAULT_RING_BYTES, STATE_AT, STATE_OPEN, Segment, length_bytes,
};

use crate::held::Held;
use crate::kept::{Keeping, Kept};
use crate::policy::Policy;
use crate::relaying::{self, Elsewhere, Relaying};

/// What a monitor can be told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes of a ring: a power of two from 4 KiB to 64 MiB. Larger holds more unread bytes;
    /// smaller leaves more to the caches. Each connection has two.
    pub ring_bytes: usize,
    /// Most ends that wait for their other end.
    pub most_waiting: usize,
    /// How long an end waits before its other end is taken for a plain program.
    pub patience: Duration,
    /// Which connections may be accelerated.
    pub policy: Policy,
    /// Other hosts, if there are any.
    pub elsewhere: Option<Elsewhere>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            ring_bytes: DEFAULT_RING_BYTES,
            most_waiting: 4096,
            patience: Duration::from_secs(30),
            policy: Policy::default(),
            elsewhere: None,
        }
    }
}

/// When too many wait, those that do not any more are looked for this often: a look at each costs a
/// millisecond and more.
const CROWDED_TURN: Duration = Duration::from_millis(50);

/// Introductions remembered for `beeline sockets connections`.
const REMEMBERED: usize = 128;

/// Why a socket gets no segment.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The kernel would not tell its addresses.
    #[error("no connected internet socket: {0}")]
    Unconnected(#[from] rustix::io::Errno),
    /// Not an internet socket.
    #[error("an address of another family")]
    Family,
    /// Its process is about to be moved.
    #[error("its process is called back to the kernel")]
    Held,
    /// Both ends are the same address: one socket connected to itself.
    #[error("connected to itself")]
    Itself,
    /// The policy says so.
    #[error("the policy leaves it to the kernel")]
    Denied,
    /// The other end is in another host, and there are none.
    #[error("the other end is in another host, and none is configured")]
    NoHosts,
    /// The other end is in another host, to be reached by TCP: the kernel does that better.
    #[error("the link to {0} would be TCP, which the kernel carries better itself")]
    OverTcp(SocketAddr),
    /// The other end is in another host, and the relay could not watch who has this one.
    #[error("process {0} has numbers of its own for processes")]
    OtherProcesses(i32),
    /// The other end is in a host that is none of those configured.
    #[error("{0} is in another host, and none of those configured")]
    Stranger(SocketAddr),
    /// Too many wait already.
    #[error("{0} ends wait already")]
    Crowded(usize),
    /// The other end waited, and then went on without.
    #[error("the other end has given up")]
    GivenUp,
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MappingError),
    /// The memory could not be prepared or handed on.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// What an asker gets.
pub enum Outcome {
    /// A fresh segment.
    First(OwnedFd),
    /// The segment of the end that asked first.
    Second(OwnedFd),
    /// A fresh segment, whose other end the relay is.
    Relayed(OwnedFd),
}

/// An end whose other end has not asked.
#[derive(Debug)]
struct Waiting {
    memory: OwnedFd,
    cookie: u64,
    process: i32,
    since: Instant,
}

impl Waiting {
    /// False when it was closed, or has turned to the kernel for good, or its process is gone. What
    /// that process wrote is taken for a hint: who lies is not introduced.
    fn still_waits(&self) -> bool {
        read_word(&self.memory, STATE_AT) == Some(STATE_OPEN) && exists(self.process)
    }
}

/// A connection as one end sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ends {
    own: SocketAddr,
    peer: SocketAddr,
}

impl Ends {
    fn mirrored(self) -> Self {
        Self { own: self.peer, peer: self.own }
    }

    /// As the library has it: the other end may be in another host.
    fn leads_elsewhere(self) -> bool {
        let (own, peer) = (self.own.ip(), self.peer.ip());
        own != peer && !(own.is_loopback() && peer.is_loopback())
    }
}

/// All of them.
#[derive(Debug)]
pub struct Pairing {
    settings: Settings,
    waiting: HashMap<Ends, Waiting>,
    introduced: VecDeque<Introduced>,
    kept: Keeping,
    relaying: Option<Relaying>,
    held: Held,
    swept: Instant,
    expired: Instant,
    crowded: Instant,
}

impl Pairing {
    pub fn new(settings: Settings) -> Self {
        let now = Instant::now();
        let relaying = settings.elsewhere.clone().map(Relaying::new);
        Self {
            settings,
            waiting: HashMap::new(),
            introduced: VecDeque::new(),
            kept: Keeping::default(),
            relaying,
            held: Held::default(),
            swept: now,
            expired: now,
            crowded: now.checked_sub(CROWDED_TURN).unwrap_or(now),
        }
    }

    pub fn is_keeping(&self) -> bool {
        !self.kept.is_empty() || self.relaying.as_ref().is_some_and(|far| far.kept() > 0)
    }

    /// Connections to other hosts, if there are hosts.
    pub fn relaying(&mut self) -> Option<&mut Relaying> {
        self.relaying.as_mut()
    }

    /// Processes nothing of which is introduced.
    pub fn held(&mut self) -> &mut Held {
        &mut self.held
    }

    /// Readable when the relay ended.
    pub fn relay(&self) -> Option<BorrowedFd<'_>> {
        self.relaying.as_ref()?.relay()
    }

    /// True while there is a relay to be started or reached.
    pub fn is_without_relay(&self) -> bool {
        self.relaying.as_ref().is_some_and(Relaying::is_due)
    }

    /// The segment of a socket that was introduced before, or waits to be, and which end it is. The end
    /// is `process`'s now, if one is told.
    pub fn resume(&mut self, socket: &OwnedFd, process: Option<i32>) -> Option<(u8, OwnedFd)> {
        let cookie = rustix::net::sockopt::socket_cookie(socket).ok()?;
        if let Some((side, memory)) = self.kept.find(cookie) {
            return Some((side, memory.try_clone().ok()?));
        }
        // Its other end may ask later than this one changed hands.
        if let Some(waiting) = self.waiting.get_mut(&ends(socket).ok()?)
            && waiting.cookie == cookie
        {
            waiting.process = process.unwrap_or(waiting.process);
            return Some((0, waiting.memory.try_clone().ok()?));
        }
        Some((0, self.relaying.as_ref()?.resume(cookie)?))
    }

    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub fn waiting(&self) -> u64 {
        self.waiting.len() as u64
    }

    pub fn introduced(&self) -> impl Iterator<Item = &Introduced> {
        self.introduced.iter()
    }

    /// Connections whose segment is kept.
    pub fn kept(&self) -> u64 {
        self.kept.len() as u64 + self.relaying.as_ref().map_or(0, Relaying::kept)
    }

    /// Connections handed to the relay, so far.
    pub fn handed(&self) -> u64 {
        self.relaying.as_ref().map_or(0, Relaying::handed)
    }

    /// What went into the rings of the connections that are kept.
    pub fn traffic(&self) -> impl Iterator<Item = (Introduced, [u64; 2])> {
        let here = self.kept.traffic();
        here.chain(self.relaying.iter().flat_map(Relaying::traffic))
    }

    /// The segment for `socket`, which `process` of user `uid` holds.
    pub fn ask(&mut self, socket: &OwnedFd, process: i32, uid: u32) -> Result<Outcome, Refusal> {
        let ends = ends(socket)?;
        if !self.settings.policy.allows(uid, [ends.own.port(), ends.peer.port()]) {
            return Err(Refusal::Denied);
        }
        if ends.own == ends.peer {
            return Err(Refusal::Itself);
        }
        if self.held.has(process) {
            return Err(Refusal::Held);
        }
        let cookie = rustix::net::sockopt::socket_cookie(socket)?;
        self.kept.forget_returned(cookie);
        self.relaying.iter_mut().for_each(|relaying| relaying.forget_past(cookie));
        let is_here = self.settings.elsewhere.as_ref().map(|elsewhere| elsewhere.is_here);
        if ends.leads_elsewhere() && !is_here.is_some_and(|is_here| is_here(ends.peer.ip())) {
            return self.ask_elsewhere(socket, ends, process, cookie);
        }
        if let Some(other) = self.waiting.remove(&ends.mirrored())
            && exists(other.process)
        {
            if !other.still_waits() || self.held.has(other.process) {
                return Err(Refusal::GivenUp);
            }
            name(&other.memory, 1, cookie);
            let introduced = self.remember(ends, process, other.process);
            let memory = other.memory.try_clone()?;
            self.kept.keep(Kept {
                memory: other.memory,
                cookies: [other.cookie, cookie],
                processes: [other.process, process],
                introduced,
            });
            return Ok(Outcome::Second(memory));
        }
        if self.waiting.len() >= self.settings.most_waiting
            && self.crowded.elapsed() >= CROWDED_TURN
        {
            // Ends of short connections to plain programs, most of them.
            self.crowded = Instant::now();
            self.waiting.retain(|_, waiting| waiting.still_waits());
        }
        if self.waiting.len() >= self.settings.most_waiting {
            return Err(Refusal::Crowded(self.waiting.len()));
        }
        // An older socket with the same addresses is gone, or this one gave up and asks anew.
        let stale = self
            .waiting
            .get(&ends)
            .is_some_and(|waiting| waiting.cookie != cookie || !waiting.still_waits());
        if stale {
            self.waiting.remove(&ends);
        }
        if let Some(waiting) = self.waiting.get(&ends) {
            // The same socket asks again: the same answer.
            return Ok(Outcome::First(waiting.memory.try_clone()?));
        }
        let memory = self.fresh()?;
        name(&memory, 0, cookie);
        let copy = memory.try_clone()?;
        self.waiting.insert(ends, Waiting { memory, cookie, process, since: Instant::now() });
        Ok(Outcome::First(copy))
    }

    fn ask_elsewhere(
        &mut self,
        socket: &OwnedFd,
        Ends { own, peer }: Ends,
        process: i32,
        cookie: u64,
    ) -> Result<Outcome, Refusal> {
        let relaying = self.relaying.as_mut().ok_or(Refusal::NoHosts)?;
        if !relaying.leads_to(peer) {
            return Err(Refusal::Stranger(peer));
        }
        if relaying.is_left_over_tcp(peer) {
            return Err(Refusal::OverTcp(peer));
        }
        if !shares_numbers(process) {
            return Err(Refusal::OtherProcesses(process));
        }
        let connection = Adopted { own, peer, process: process.unsigned_abs(), cookie };
        let length = length_bytes(self.settings.ring_bytes);
        let memory = relaying.ask(socket, connection, || {
            let memory = memory(length)?;
            relaying::format(&memory, length, &connection)?;
            Ok(memory)
        })?;
        self.note(relaying::introduced(&connection));
        Ok(Outcome::Relayed(memory))
    }

    fn fresh(&self) -> Result<OwnedFd, Refusal> {
        let length = length_bytes(self.settings.ring_bytes);
        let memory = memory(length)?;
        // Two words of one page.
        let page = Mapping::shared_at(memory.as_fd(), 0, length)?;
        Segment::format(&page)
            .map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidInput, error))?;
        Ok(memory)
    }

    fn remember(&mut self, second: Ends, second_process: i32, first_process: i32) -> Introduced {
        let introduced = Introduced {
            first: second.peer,
            first_process: first_process.unsigned_abs(),
            second: second.own,
            second_process: second_process.unsigned_abs(),
        };
        self.note(introduced);
        introduced
    }

    fn note(&mut self, introduced: Introduced) {
        if self.introduced.len() == REMEMBERED {
            self.introduced.pop_front();
        }
        self.introduced.push_back(introduced);
    }

    /// Forgets ends that waited too long, or whose process ended, and connections that are over.
    pub fn expire(&mut self) {
        if self.swept.elapsed() >= Duration::from_secs(5) {
            self.swept = Instant::now();
            self.kept.sweep();
            if let Some(relaying) = &mut self.relaying {
                relaying.sweep();
            }
        }
        if self.expired.elapsed() < Duration::from_secs(1) {
            return;
        }
        self.expired = Instant::now();
        let patience = self.settings.patience;
        self.waiting
            .retain(|_, waiting| waiting.since.elapsed() < patience && waiting.still_waits());
    }
}

/// As many descriptors as we may have: one per connection that is kept.
pub fn allow_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Refused, fewer connections survive an `exec`.
    let _ = setrlimit(Resource::Nofile, limit);
}

fn memory(length: usize) -> Result<OwnedFd, Refusal> {
    Ok(beeline_os::mapping::create_memfd("beeline-socket", length)?)
}

/// Tells which socket's end `side` of a segment is, for who finds the memory in a process.
fn name(memory: &OwnedFd, side: usize, cookie: u64) {
    let _ = rustix::io::pwrite(memory, &cookie.to_le_bytes(), COOKIES_AT[side] as u64);
}

/// The four bytes at `place` of a segment that is not mapped here.
pub fn read_word(memory: &OwnedFd, place: usize) -> Option<u32> {
    let mut word = [0; 4];
    let read = rustix::io::pread(memory, &mut word, place as u64);
    (read == Ok(word.len())).then(|| u32::from_le_bytes(word))
}

/// The eight bytes at `place`; 0 where they cannot be read.
pub fn read_words(memory: &OwnedFd, place: usize) -> u64 {
    let mut word = [0; 8];
    let read = rustix::io::pread(memory, &mut word, place as u64);
    if read == Ok(word.len()) { u64::from_le_bytes(word) } else { 0 }
}

pub fn exists(process: i32) -> bool {
    let Some(process) = rustix::process::Pid::from_raw(process) else { return false };
    !matches!(rustix::process::test_kill_process(process), Err(rustix::io::Errno::SRCH))
}

/// False when `process` is in another process namespace, as far as one may look: numbers that it and
/// its children give for themselves are others' here.
fn shares_numbers(process: i32) -> bool {
    let namespace = |of: &str| {
        rustix::fs::stat(format!("/proc/{of}/ns/pid")).map(|about| (about.st_dev, about.st_ino))
    };
    // 0: not even visible.
    process > 0
        && match (namespace(&process.to_string()), namespace("self")) {
            (Ok(theirs), Ok(ours)) => theirs == ours,
            _ => true,
        }
}

fn ends(socket: &OwnedFd) -> Result<Ends, Refusal> {
    let address = |any: rustix::net::SocketAddrAny| {
        let address = SocketAddr::try_from(any).map_err(|_| Refusal::Family)?;
        Ok::<_, Refusal>(SocketAddr::new(address.ip().to_canonical(), address.port()))
    };
    let own = address(rustix::net::getsockname(socket)?)?;
    let peer = rustix::net::getpeername(socket)?.ok_or(rustix::io::Errno::NOTCONN)?;
    Ok(Ends { own, peer: address(peer)? })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use beeline_sockets::segment::{CLOSED_AT, STATE_RETURNED, TAILS_AT};

    use super::*;

    #[test]
    fn a_process_with_numbers_of_its_own_is_told_from_one_without() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(shares_numbers(me) && !shares_numbers(0));
        let mut other = std::process::Command::new("unshare")
            .args(["--pid", "--fork", "sleep", "20"])
            .spawn()
            .unwrap();
        let children = format!("/proc/{0}/task/{0}/children", other.id());
        let begun = Instant::now();
        let inside = loop {
            let text = std::fs::read_to_string(&children).unwrap_or_default();
            if let Some(inside) = text.split_whitespace().next() {
                break inside.parse::<i32>().ok();
            }
            if other.try_wait().unwrap().is_some() || begun.elapsed() > Duration::from_secs(20) {
                // Not allowed here.
                break None;
            }
        };
        if let Some(inside) = inside {
            assert!(!shares_numbers(inside));
            let inside = rustix::process::Pid::from_raw(inside).unwrap();
            let _ = rustix::process::kill_process(inside, rustix::process::Signal::KILL);
        }
        let _ = other.kill();
        other.wait().unwrap();
    }

    fn connection() -> (OwnedFd, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one.into(), listener.accept().unwrap().0.into())
    }

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    fn file(memory: &OwnedFd) -> u64 {
        rustix::fs::fstat(memory).unwrap().st_ino
    }

    #[test]
    fn the_two_ends_of_a_connection_get_one_segment() {
        let mut pairing = Pairing::new(Settings::default());
        let (one, other) = connection();
        let Outcome::First(memory) = pairing.ask(&one, me(), 0).unwrap() else { panic!("first") };
        // Whoever has the socket meanwhile gets it as the same end.
        let (side, again) = pairing.resume(&one, Some(me())).unwrap();
        assert_eq!((side, file(&again)), (0, file(&memory)));
        assert!(pairing.resume(&other, Some(me())).is_none());
        // Asking again changes nothing.
        let Outcome::First(again) = pairing.ask(&one, me(), 0).unwrap() else { panic!("first") };
        assert_eq!(file(&memory), file(&again));
        let Outcome::Second(same) = pairing.ask(&other, me(), 0).unwrap() else { panic!("second") };
        assert_eq!(file(&memory), file(&same));
        let cookies = [&one, &other].map(|end| rustix::net::sockopt::socket_cookie(end).unwrap());
        assert_eq!(COOKIES_AT.map(|place| read_words(&memory, place)), cookies);
        assert!(!pairing.is_waiting());
        assert_eq!(pairing.introduced().count(), 1);
        // Whoever has one of the sockets later gets it again, as the same end.
        for (socket, side) in [(&one, 0), (&other, 1)] {
            let (found, again) = pairing.resume(socket, Some(me())).unwrap();
            assert_eq!((found, file(&again)), (side, file(&memory)));
        }
        // Until an end says that it was closed.
        rustix::io::pwrite(&memory, &[1], CLOSED_AT[1] as u64).unwrap();
        pairing.swept -= Duration::from_secs(60);
        pairing.expire();
        assert!(pairing.resume(&one, Some(me())).is_none() && !pairing.is_keeping());
    }

    #[test]
    fn an_end_that_asks_anew_leaves_the_other_where_it_is() {
        let mut pairing = Pairing::new(Settings::default());
        let (one, other) = connection();
        let found = |pairing: &mut Pairing, socket: &OwnedFd| {
            pairing.resume(socket, Some(me())).map(|(side, memory)| (side, file(&memory)))
        };
        pairing.ask(&one, me(), 0).unwrap();
        let Outcome::Second(old) = pairing.ask(&other, me(), 0).unwrap() else { panic!("second") };
        rustix::io::pwrite(&old, &STATE_RETURNED.to_le_bytes(), STATE_AT as u64).unwrap();
        let Outcome::First(new) = pairing.ask(&one, me(), 0).unwrap() else { panic!("first") };
        assert_ne!(file(&new), file(&old));
        assert_eq!(found(&mut pairing, &one), Some((0, file(&new))));
        // It may lie in a message: who gets it finds there what was not read.
        assert_eq!(found(&mut pairing, &other), Some((1, file(&old))));
        assert_eq!(pairing.traffic().count(), 0);
        let Outcome::Second(same) = pairing.ask(&other, me(), 0).unwrap() else { panic!("second") };
        assert_eq!(file(&same), file(&new));
        for (socket, side) in [(&one, 0), (&other, 1)] {
            assert_eq!(found(&mut pairing, socket), Some((side, file(&new))));
        }
        assert_eq!(pairing.kept(), 1);
    }

    #[test]
    fn a_connection_that_the_policy_denies_waits_for_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let one: OwnedFd = TcpStream::connect(listener.local_addr().unwrap()).unwrap().into();
        let text = format!("[[rules]]\nuid = 3\nports = \"{port}\"\naccelerate = false");
        let policy = Policy::parse(&text).unwrap();
        let mut pairing = Pairing::new(Settings { policy, ..Settings::default() });
        assert!(matches!(pairing.ask(&one, me(), 3), Err(Refusal::Denied)));
        assert!(!pairing.is_waiting());
        assert!(matches!(pairing.ask(&one, me(), 4), Ok(Outcome::First(_))));
    }

    #[test]
    fn what_the_ends_wrote_is_told_as_traffic() {
        let mut pairing = Pairing::new(Settings::default());
        let (one, other) = connection();
        let Outcome::First(memory) = pairing.ask(&one, me(), 0).unwrap() else { panic!("first") };
        pairing.ask(&other, me(), 0).unwrap();
        rustix::io::pwrite(&memory, &77_u64.to_le_bytes(), TAILS_AT[1] as u64).unwrap();
        let all: Vec<_> = pairing.traffic().collect();
        assert_eq!((all.len(), all[0].1), (1, [0, 77]));
    }

    #[test]
    fn connections_are_not_mixed_up() {
        let mut pairing = Pairing::new(Settings::default());
        let (one, _) = connection();
        let (_, another) = connection();
        assert!(matches!(pairing.ask(&one, me(), 0).unwrap(), Outcome::First(_)));
        assert!(matches!(pairing.ask(&another, me(), 0).unwrap(), Outcome::First(_)));
    }

    #[test]
    fn an_end_whose_process_ended_is_not_waited_for() {
        let mut pairing = Pairing::new(Settings::default());
        let (one, other) = connection();
        // No process has this number.
        pairing.ask(&one, i32::MAX, 0).unwrap();
        assert!(matches!(pairing.ask(&other, me(), 0).unwrap(), Outcome::First(_)));
    }

    #[test]
    fn ends_that_gave_up_make_room_and_are_not_introduced() {
        let give_up = |memory: &OwnedFd| {
            let word = beeline_sockets::segment::STATE_GIVEN_UP.to_le_bytes();
            rustix::io::pwrite(memory, &word, STATE_AT as u64).unwrap();
        };
        let mut pairing = Pairing::new(Settings { most_waiting: 3, ..Settings::default() });
        let connections: Vec<_> = (0..4).map(|_| connection()).collect();
        let first = |pairing: &mut Pairing, turn: usize| {
            let Outcome::First(memory) = pairing.ask(&connections[turn].0, me(), 0).unwrap() else {
                panic!("nobody else asked")
            };
            memory
        };
        let memories: Vec<_> = (0..3).map(|turn| first(&mut pairing, turn)).collect();
        give_up(&memories[0]);
        give_up(&memories[1]);
        // The kernel has them: their other ends need no segment.
        assert!(matches!(pairing.ask(&connections[0].1, me(), 0), Err(Refusal::GivenUp)));
        assert_eq!(pairing.waiting(), 2);
        first(&mut pairing, 0);
        assert_eq!(pairing.waiting(), 3);
        // No place, but one of the three does not wait any more.
        first(&mut pairing, 3);
        assert_eq!(pairing.waiting(), 3);
        let still = pairing.ask(&connections[2].1, me(), 0);
        assert!(matches!(still, Ok(Outcome::Second(_))));
    }

    #[test]
    fn what_is_no_connected_internet_socket_is_refused() {
        let mut pairing = Pairing::new(Settings { most_waiting: 1, ..Settings::default() });
        let (left, _right) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(pairing.ask(&left.into(), me(), 0).is_err());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(pairing.ask(&listener.into(), me(), 0).is_err());
        let (one, _peer) = connection();
        let (another, _its_peer) = connection();
        pairing.ask(&one, me(), 0).unwrap();
        assert!(matches!(pairing.ask(&another, me(), 0), Err(Refusal::Crowded(1))));
    }
}
