//! Asking the monitor for a connection's segment. One Unix connection per question: no descriptor
//! of ours stays in the program's table, and a monitor that was restarted is simply asked next.

use std::cell::Cell;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::control::{Answer, LONGEST_ANSWER, LONGEST_HOLD_SECONDS, Question, name};
use crate::relayed::{LONGEST_RECORD, Reply, Request};
use crate::segment::Segment;
use crate::{kernel, relayed};

/// Longest wait for the monitor, in milliseconds; then the connection stays with the kernel.
const DEFAULT_MS: u32 = 250;
/// Variable for another time than [`DEFAULT_MS`], in milliseconds, 10 to 60000: for machines with far more to do than
/// processors.
pub const VARIABLE: &str = "BEELINE_SOCKETS_PATIENCE_MS";

static PATIENCE_MS: AtomicU32 = AtomicU32::new(DEFAULT_MS);

/// From now on questions wait as long as the environment says.
pub(crate) fn begin() {
    let given = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<u32>().ok());
    if let Some(milliseconds) = given {
        PATIENCE_MS.store(milliseconds.clamp(10, 60_000), Ordering::Relaxed);
    }
}

/// Longest wait for the monitor.
pub(crate) fn patience() -> Duration {
    Duration::from_millis(PATIENCE_MS.load(Ordering::Relaxed).into())
}

/// A connection to the monitor of this user, in this network namespace.
///
/// Errors: `ConnectionRefused` when there is none; `PermissionDenied` when somebody else took its
/// name; the kernel's.
pub fn dial() -> std::io::Result<OwnedFd> {
    dial_at(name())
}

fn dial_at(name: &str) -> std::io::Result<OwnedFd> {
    dial_within(name, patience())
}

fn dial_within(name: &str, patience: Duration) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(patience))?;
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    let uid = rustix::process::geteuid();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    rustix::net::connect(&socket, &address)?;
    let peer = socket_peercred(&socket)?;
    if peer.uid != uid && !peer.uid.is_root() {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    Ok(socket)
}

/// Sends `question` with the descriptor it is about.
///
/// Errors: the kernel's.
pub fn ask(
    socket: &OwnedFd,
    question: Question,
    about: Option<BorrowedFd<'_>>,
) -> std::io::Result<()> {
    send_with(socket, &question.encode(), about)
}

pub(crate) fn send_with(
    socket: &OwnedFd,
    record: &[u8],
    about: Option<BorrowedFd<'_>>,
) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let about = about.as_slice();
    if !about.is_empty() && !control.push(SendAncillaryMessage::ScmRights(about)) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(record)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next answer, with the descriptor that comes with it.
///
/// Errors: `InvalidData` for a record that is none; `WouldBlock` when nothing comes in time; the
/// kernel's.
pub fn answer(socket: &OwnedFd) -> std::io::Result<(Answer, Option<OwnedFd>)> {
    let mut record = [0; LONGEST_ANSWER];
    let (received, mut descriptors) = receive_with(socket, &mut record)?;
    let bad = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    let answer = record.get(..received).and_then(|record| Answer::decode(record).ok());
    Ok((answer.ok_or_else(bad)?, descriptors.pop()))
}

/// The next record, with the descriptors that come with it, four at most.
pub(crate) fn receive_with(
    socket: &OwnedFd,
    record: &mut [u8],
) -> std::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(record)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut slices, &mut control, flags)?.bytes;
    let mut all = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            all.extend(descriptors);
        }
    }
    Ok((received, all))
}

/// Has the monitor introduce nothing of a process for so long, whole seconds and one hour at most; for no
/// time, lifts that. `process` is its `pidfd`.
///
/// Errors: as [`dial`] and [`answer`].
pub fn hold(process: BorrowedFd<'_>, time: Duration) -> std::io::Result<()> {
    let seconds = time.as_millis().div_ceil(1000);
    let seconds = u16::try_from(seconds).unwrap_or(u16::MAX).min(LONGEST_HOLD_SECONDS);
    let socket = dial()?;
    ask(&socket, Question::Hold { seconds }, Some(process))?;
    match answer(&socket)? {
        (Answer::End, _) => Ok(()),
        _ => Err(std::io::ErrorKind::InvalidData.into()),
    }
}

/// Asks this user's relay, and takes its replies: one, or as many as there are before the end.
///
/// Errors: as [`dial`] and [`answer`].
pub fn ask_relay(request: Request) -> std::io::Result<Vec<Reply>> {
    let socket = dial_at(&relayed::relay_name())?;
    rustix::net::send(&socket, &request.encode(), SendFlags::NOSIGNAL)?;
    let mut replies = Vec::new();
    loop {
        let mut record = [0; LONGEST_RECORD];
        let (length, _) = rustix::net::recv(&socket, &mut record[..], RecvFlags::empty())?;
        match Reply::decode(record.get(..length).unwrap_or_default()) {
            Ok(Reply::End) => return Ok(replies),
            Ok(reply) => replies.push(reply),
            Err(_) => return Err(std::io::ErrorKind::InvalidData.into()),
        }
        if !matches!(request, Request::Connections) {
            return Ok(replies);
        }
    }
}

/// Tells this user's relay what it does not answer.
///
/// Errors: as [`dial`].
pub fn tell_relay(request: &Request) -> std::io::Result<()> {
    let socket = dial_at(&relayed::relay_name())?;
    rustix::net::send(&socket, &request.encode(), SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The segment of a connection that was introduced before, for who has a copy of a socket of its. `None`:
/// neither the monitor nor a relay knows of one.
///
/// Errors: as [`dial`] and [`answer`], of either; `InvalidData` for memory that is no segment.
pub fn resumed(about: BorrowedFd<'_>) -> std::io::Result<Option<Segment>> {
    let socket = dial()?;
    ask(&socket, Question::Look, Some(about))?;
    let found = match answer(&socket)? {
        (Answer::Segment { side }, Some(memory)) => Some((side, memory)),
        (Answer::Plain | Answer::NoHosts, _) => match dial_at(&relayed::relay_name()) {
            Ok(relay) => look_at_relay(&relay, about)?.map(|memory| (0, memory)),
            // There is none.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => None,
            Err(error) => return Err(error),
        },
        _ => return Err(std::io::ErrorKind::InvalidData.into()),
    };
    let bad = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    found.map(|(side, memory)| map(side, memory).ok_or_else(bad)).transpose()
}

/// The segment of a relayed connection's socket, from the relay that carries it: the monitor was
/// restarted since, or has forgotten it.
fn resume_at_relay(about: BorrowedFd<'_>) -> Option<OwnedFd> {
    look_at_relay(&dial_at(&relayed::relay_name()).ok()?, about).ok()?
}

fn look_at_relay(relay: &OwnedFd, about: BorrowedFd<'_>) -> std::io::Result<Option<OwnedFd>> {
    send_with(relay, &Request::Resume.encode(), Some(about))?;
    let mut record = [0; LONGEST_RECORD];
    let (length, mut memory) = receive_with(relay, &mut record)?;
    match (Reply::decode(record.get(..length).unwrap_or_default()), memory.pop()) {
        (Ok(Reply::Segment), Some(memory)) => Ok(Some(memory)),
        (Ok(Reply::End), _) => Ok(None),
        _ => Err(std::io::ErrorKind::InvalidData.into()),
    }
}

thread_local! {
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// True while this thread asks the monitor: descriptors that it closes are ours. The C library's
/// `close` is ours, too, and would wait for the locks of epoll sets that our caller may hold.
#[must_use]
pub fn is_asking() -> bool {
    ASKING.get()
}

/// The segment for the connected socket `fd`, or `None`: no monitor, a refusal, or no answer in
/// time. The connection is then an ordinary one.
#[must_use]
pub fn segment(fd: RawFd, question: Question) -> Option<Segment> {
    ASKING.set(true);
    let segment = ask_for_segment(fd, question);
    ASKING.set(false);
    segment
}

/// True when another program that gets the connected socket `fd` will find its segment.
#[must_use]
pub fn is_known(fd: RawFd) -> bool {
    ASKING.set(true);
    let known = ask_for_memory(fd, Question::Look).is_some();
    ASKING.set(false);
    known
}

fn ask_for_memory(fd: RawFd, question: Question) -> Option<(u8, OwnedFd)> {
    let patience = BREAKER.patience(question, kernel::coarse_ns())?;
    let answer = ask_for_memory_within(fd, question, patience);
    match &answer {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            BREAKER.timed_out(kernel::coarse_ns());
        }
        _ => BREAKER.answered(),
    }
    answer.ok().flatten()
}

fn ask_for_memory_within(
    fd: RawFd,
    question: Question,
    patience: Duration,
) -> std::io::Result<Option<(u8, OwnedFd)>> {
    let socket = dial_within(name(), patience).inspect_err(|_| no_hosts())?;
    // SAFETY: the program's descriptor, borrowed for one call that only reads it; a number that
    // was closed meanwhile is refused by the kernel.
    let about = unsafe { BorrowedFd::borrow_raw(fd) };
    ask(&socket, question, Some(about))?;
    Ok(match answer(&socket)? {
        (Answer::Segment { side }, Some(memory)) => Some((side, memory)),
        (Answer::NoHosts, _) => {
            no_hosts();
            None
        }
        (Answer::Plain, _) if question != Question::Attach => {
            resume_at_relay(about).map(|memory| (0, memory))
        }
        _ => None,
    })
}

/// What keeps a monitor that stands still from costing every connection [`patience`]: after one question without an
/// answer the next are not asked, and their connections are the kernel's, but for one now and then, which waits for
/// a moment only. The first answer ends that.
#[derive(Debug)]
struct Breaker {
    /// Questions in a row that were not answered.
    silent: AtomicU32,
    /// When the next may be asked, on the coarse clock.
    next_ns: AtomicU64,
}

static BREAKER: Breaker = Breaker { silent: AtomicU32::new(0), next_ns: AtomicU64::new(0) };

/// So long after a question without an answer the next one is asked; twice as long after each further one.
const SILENCE_NS: u64 = 1_000_000_000;
/// Doublings of it, at most.
const MOST_SILENCE: u32 = 5;
/// How long such a question waits, for the first time; twice as long each further time up to [`patience`], or a
/// monitor that answers slowly would be taken for one that stands still for ever.
const PROBE: Duration = Duration::from_millis(40);
/// Doublings of it.
const MOST_PROBE: u32 = 3;
/// Questions about connections that came with `exec`, or in a message, which would be lost: so many are asked with
/// patience all the same.
const MOST_PATIENT: u32 = 4;

impl Breaker {
    /// How long `question`, asked now, is to wait; `None`: it is not asked.
    fn patience(&self, question: Question, now: u64) -> Option<Duration> {
        let silent = self.silent.load(Ordering::Relaxed);
        if silent == 0 || question == Question::Resume && silent < MOST_PATIENT {
            return Some(patience());
        }
        // Not asked, the connection would be lost for certain.
        if question == Question::Resume {
            return Some(PROBE);
        }
        let probe = PROBE.saturating_mul(1 << (silent - 1).min(MOST_PROBE)).min(patience());
        let next = self.next_ns.load(Ordering::Relaxed);
        let due = now >= next
            // Of several threads, one asks.
            && self
                .next_ns
                .compare_exchange(next, now + SILENCE_NS, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        due.then_some(probe)
    }

    fn timed_out(&self, now: u64) {
        let before = self.silent.fetch_add(1, Ordering::Relaxed);
        let wait = SILENCE_NS << before.min(MOST_SILENCE);
        self.next_ns.store(now.saturating_add(wait), Ordering::Relaxed);
    }

    /// Whatever it was, also that there is no monitor: no caller waited for it.
    fn answered(&self) {
        if self.silent.load(Ordering::Relaxed) != 0 {
            self.silent.store(0, Ordering::Relaxed);
        }
    }
}

fn ask_for_segment(fd: RawFd, question: Question) -> Option<Segment> {
    let (side, memory) = ask_for_memory(fd, question)?;
    map(side, memory)
}

fn map(side: u8, memory: OwnedFd) -> Option<Segment> {
    let length = usize::try_from(rustix::fs::fstat(&memory).ok()?.st_size).ok()?;
    let mapping = Mapping::shared(memory, length, Protection::ReadWrite).ok()?;
    let segment = Segment::take(mapping, usize::from(side)).ok()?;
    // The program sees its own descriptors only.
    segment.mapping().forget_descriptor();
    Some(segment)
}

/// An address of the C library's, if it is an internet one; one of version 4 in its version 6
/// clothes is one of version 4.
#[must_use]
pub fn internet_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let from = std::ptr::from_ref(storage);
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the storage is large enough and aligned for every address, and made of
            // plain integers, whatever the family says.
            let address = unsafe { from.cast::<libc::sockaddr_in>().read() };
            let host = IpAddr::V4(u32::from_be(address.sin_addr.s_addr).into());
            Some(SocketAddr::new(host, u16::from_be(address.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { from.cast::<libc::sockaddr_in6>().read() };
            let host = IpAddr::V6(address.sin6_addr.s6_addr.into()).to_canonical();
            Some(SocketAddr::new(host, u16::from_be(address.sin6_port)))
        }
        _ => None,
    }
}

/// How long nobody is asked about connections to other hosts after it was said that there are none.
const NO_HOSTS_NS: u64 = 5_000_000_000;
/// When that was, on the coarse clock; 0 for never.
static NO_HOSTS: AtomicU64 = AtomicU64::new(0);

fn no_hosts() {
    NO_HOSTS.store(kernel::coarse_ns(), Ordering::Relaxed);
}

fn may_have_hosts() -> bool {
    let said = NO_HOSTS.load(Ordering::Relaxed);
    said == 0 || kernel::coarse_ns().wrapping_sub(said) >= NO_HOSTS_NS
}

/// True when `fd` is a TCP connection that may be accelerated: its two ends are on this host, or the
/// monitor may know the other one.
#[must_use]
pub fn is_candidate(fd: RawFd) -> bool {
    let tcp = kernel::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0);
    if tcp != Ok(libc::IPPROTO_TCP) {
        return false;
    }
    let address = |peer| kernel::name(fd, peer).ok().and_then(|(a, _)| internet_address(&a));
    let (Some(own), Some(peer)) = (address(false), address(true)) else { return false };
    own.ip() == peer.ip() || own.ip().is_loopback() && peer.ip().is_loopback() || may_have_hosts()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker() -> Breaker {
        Breaker { silent: AtomicU32::new(0), next_ns: AtomicU64::new(0) }
    }

    #[test]
    fn after_one_silence_few_are_asked_and_after_one_answer_all() {
        let breaker = breaker();
        let asks = |now| breaker.patience(Question::Attach, now);
        assert_eq!((asks(1), asks(2)), (Some(patience()), Some(patience())));
        let (mut now, mut asked) = (5, 0);
        breaker.timed_out(now);
        // A minute, a connection every millisecond.
        for _ in 0..60_000 {
            now += 1_000_000;
            if let Some(waits) = asks(now) {
                assert!((PROBE..=patience()).contains(&waits), "{waits:?}");
                asked += 1;
                breaker.timed_out(now);
            }
        }
        assert!((3..=8).contains(&asked), "{asked}");
        breaker.answered();
        assert_eq!(asks(now), Some(patience()));
    }

    #[test]
    fn what_would_be_lost_is_asked_for_with_patience_a_few_times() {
        let breaker = breaker();
        let patient = (0..100)
            .filter(|_| breaker.patience(Question::Resume, 9) == Some(patience()))
            .inspect(|_| breaker.timed_out(9));
        assert_eq!(patient.count(), MOST_PATIENT as usize);
    }
}
