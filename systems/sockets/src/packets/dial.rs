//! Connecting, listening and accepting, as far as the proxy's monitor has a part in it.
//!
//! A `connect` to an address where the proxy leads goes to the monitor first; whatever that cannot do
//! the kernel's `connect` does, on the program's own socket (NTSocks 3.17). A listening socket is and
//! stays the kernel's: its addresses, backlog, and who of several processes accepts. For a connection
//! through the window the monitor *knocks*: it connects to the listening socket through the kernel,
//! from an address of the loopback network that nothing else uses, and the `accept` that gets the
//! knock exchanges it for the connection's placeholder.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{
    AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::channel::Channel;
use super::connection::Connection;
use super::options::{Keeper, keeper};
use super::page::Page;
use super::protocol::{Answer, LONGEST, Question, name};
use crate::introduce::internet_address;
use crate::kernel::{self, Errno};
use crate::table::{self, Kind};

/// Where knocks come from.
pub const KNOCK_FROM: Ipv4Addr = Ipv4Addr::new(127, 78, 84, 83);
/// How long a proxy that was not there is not looked for.
const ABSENT_NS: u64 = 2_000_000_000;
/// How often a proxy is told of a listening socket before it counts as gone, and the time between.
const TELLS: u32 = 25;
const TELL_AGAIN: std::time::Duration = std::time::Duration::from_millis(10);
/// Tries to have a lock that other threads have for a few instructions, of which half give up the processor.
const BRIEFLY: u32 = 2000;
/// Longest time that the monitor takes for a handshake.
pub const LONGEST_HANDSHAKE: std::time::Duration = std::time::Duration::from_secs(3);

static PAGE: Mutex<Option<Arc<Page>>> = Mutex::new(None);
/// When the proxy was last found missing, on the coarse clock.
static MISSING: AtomicU64 = AtomicU64::new(0);
static IS_THERE: AtomicBool = AtomicBool::new(false);
/// A proxy was found once, so that one may have been told of this program's listening sockets.
static WAS_THERE: AtomicBool = AtomicBool::new(false);
/// No proxy answered for a placeholder lately: others are not waited for.
static RESUMED_IN_VAIN: AtomicBool = AtomicBool::new(false);
/// Priority of connections that are made next, for the explicit interface.
static LISTENERS: Mutex<Vec<(SocketAddr, u64)>> = Mutex::new(Vec::new());

/// What the monitor gave.
struct Given {
    memory: OwnedFd,
    placeholder: Option<OwnedFd>,
}

/// Asks the monitor, and reads one answer.
///
/// Errors: the system's, and for records that are none.
pub fn ask(
    question: Question,
    about: Option<BorrowedFd<'_>>,
) -> std::io::Result<(Answer, Vec<OwnedFd>)> {
    let socket = call(question, about)?;
    hear(&socket)
}

/// Connects to the monitor and asks; answers are read by [`hear`].
///
/// Errors: the system's; `PermissionDenied` where another user answers to the name.
pub fn call(question: Question, about: Option<BorrowedFd<'_>>) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(LONGEST_HANDSHAKE + LONGEST_HANDSHAKE))?;
    set_socket_timeout(&socket, Timeout::Send, Some(LONGEST_HANDSHAKE))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name().as_bytes())?)?;
    let peer = socket_peercred(&socket)?;
    if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    crate::introduce::send_with(&socket, &question.encode(), about)?;
    Ok(socket)
}

/// Reads one answer.
///
/// Errors: as [`ask`].
pub fn hear(socket: &OwnedFd) -> std::io::Result<(Answer, Vec<OwnedFd>)> {
    let mut record = [0; LONGEST];
    let (length, descriptors) = loop {
        match crate::introduce::receive_with(socket, &mut record) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            outcome => break outcome?,
        }
    };
    let answer = Answer::decode(record.get(..length).unwrap_or_default());
    Ok((answer.map_err(std::io::Error::other)?, descriptors))
}

/// What `lock` guards, for a few instructions: no thread asks the monitor, or sleeps, while it has one of the two
/// locks of this module. `None` where a process was forked out of such an instruction, or a handler interrupted it.
fn briefly<T, R>(lock: &Mutex<T>, with: impl FnOnce(&mut T) -> R) -> Option<R> {
    for turn in 0..BRIEFLY {
        match lock.try_lock() {
            Ok(mut guarded) => return Some(with(&mut guarded)),
            Err(std::sync::TryLockError::Poisoned(_)) => return None,
            Err(std::sync::TryLockError::WouldBlock) if turn < BRIEFLY / 2 => {
                std::hint::spin_loop()
            }
            Err(std::sync::TryLockError::WouldBlock) => kernel::yield_now(),
        }
    }
    None
}

/// The proxy's page, if there is a proxy; one that was missing is not looked for at once again.
fn page() -> Option<Arc<Page>> {
    let missing = MISSING.load(Ordering::Relaxed);
    if !IS_THERE.load(Ordering::Relaxed)
        && missing != 0
        && kernel::coarse_ns().wrapping_sub(missing) < ABSENT_NS
    {
        return None;
    }
    page_now()
}

/// As [`page`], also where a proxy was missing just now. Threads that ask at the same time each ask for themselves:
/// one that waited for another's answer, or went without, would leave its connection to the kernel.
fn page_now() -> Option<Arc<Page>> {
    if let Some(page) = briefly(&PAGE, |known| known.clone()).flatten() {
        return Some(page);
    }
    let found = ask(Question::Hello, None).ok().and_then(|(answer, mut descriptors)| {
        let memory = descriptors.pop().filter(|_| answer == Answer::Page)?;
        Page::take(memory).ok().map(Arc::new)
    });
    if found.is_none() {
        MISSING.store(kernel::coarse_ns().max(1), Ordering::Relaxed);
    }
    IS_THERE.store(found.is_some(), Ordering::Relaxed);
    WAS_THERE.fetch_or(found.is_some(), Ordering::Relaxed);
    briefly(&PAGE, |known| known.clone_from(&found));
    if found.is_some() {
        register_all();
    }
    found
}

/// The proxy does not answer: it is looked for anew.
fn lost() {
    briefly(&PAGE, |known| *known = None);
    IS_THERE.store(false, Ordering::Relaxed);
    MISSING.store(kernel::coarse_ns().max(1), Ordering::Relaxed);
}

fn register_all() {
    let listeners = briefly(&LISTENERS, |listeners| listeners.clone()).unwrap_or_default();
    for (at, inode) in listeners {
        let _ = ask(Question::Listen { at, inode }, None);
    }
}

/// `fd` listens from now on.
pub fn listening(fd: RawFd) {
    if table::is_left_to_kernel()
        || kernel::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0) != Ok(libc::IPPROTO_TCP)
    {
        return;
    }
    let at = kernel::name(fd, false).ok().and_then(|(storage, _)| internet_address(&storage));
    let (Some(at), Some(inode)) = (at, kernel::inode(fd)) else { return };
    briefly(&LISTENERS, |listeners| {
        if listeners.contains(&(at, inode)) {
            return;
        }
        // Those that are gone are known by their inodes, which come back never.
        if listeners.len() >= 64 {
            listeners.remove(0);
        }
        listeners.push((at, inode));
    });
    let known = briefly(&PAGE, |page| page.is_some()).unwrap_or(false);
    // One that is found now is told of all.
    if known {
        // One that died a moment ago is about to be replaced, and its successor knows of what it was told alone.
        let told = |_| {
            let told = ask(Question::Listen { at, inode }, None).is_ok();
            if !told {
                std::thread::sleep(TELL_AGAIN);
            }
            told
        };
        if !(0..TELLS).any(told) {
            lost();
        }
    } else {
        let _ = page();
    }
}

/// What became of a `connect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connected {
    /// It is the packet lane's.
    Yes,
    /// It failed so.
    Failed(Errno),
    /// It is the kernel's to make.
    Kernels,
}

/// Tries to connect `fd` through the proxy.
#[must_use]
pub fn connect(fd: RawFd, to: &libc::sockaddr_storage) -> Connected {
    let Some(to) = internet_address(to) else { return Connected::Kernels };
    if !matches!(table::kind(fd), Kind::Plain)
        || table::is_watched_plain(fd)
        || table::is_foreign_process()
        || table::is_left_to_kernel()
        || kernel::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, 0) != Ok(libc::IPPROTO_TCP)
    {
        return Connected::Kernels;
    }
    let Some(page) = page() else { return Connected::Kernels };
    // Where the link is down the monitor says so, and counts it.
    if page.route(to.ip()).is_none() {
        return Connected::Kernels;
    }
    // Of one that is connected the kernel says so: it is not to be exchanged for another.
    if kernel::name(fd, true).is_ok() {
        return Connected::Kernels;
    }
    let own = kernel::name(fd, false).ok().and_then(|(storage, _)| internet_address(&storage));
    let own = own.filter(|own| own.port() != 0 || !own.ip().is_unspecified());
    let priority = crate::packets::options::priority(fd);
    match ask(Question::Connect { to, own, priority }, None) {
        Ok((Answer::Channel, descriptors)) => {
            let adopted = given(descriptors).and_then(|given| adopt(fd, given, page));
            if adopted.is_some() { Connected::Yes } else { Connected::Kernels }
        }
        Ok((Answer::Kernel { error }, _)) if error != 0 => Connected::Failed(Errno(error)),
        Ok(_) => Connected::Kernels,
        Err(_) => {
            lost();
            Connected::Kernels
        }
    }
}

fn given(descriptors: Vec<OwnedFd>) -> Option<Given> {
    let mut descriptors = descriptors.into_iter();
    let memory = descriptors.next()?;
    Some(Given { memory, placeholder: descriptors.next() })
}

/// Puts the placeholder where the program's socket was, with the properties it had.
fn adopt(fd: RawFd, given: Given, page: Arc<Page>) -> Option<&'static Connection> {
    let placeholder = given.placeholder?;
    let channel = Channel::take(given.memory).ok()?;
    let connection = Box::new(Connection::new(channel, page));
    let version = kernel::option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, 0_i32).unwrap_or(0);
    connection.version.store(version, Ordering::Relaxed);
    let raw = placeholder.as_raw_fd();
    if kernel::is_nonblocking(fd) {
        kernel::set_nonblocking(raw).ok()?;
    }
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let time = kernel::option(fd, libc::SOL_SOCKET, name, none).unwrap_or(none);
        if (time.tv_sec, time.tv_usec) != (0, 0) {
            let _ = kernel::set_option(raw, libc::SOL_SOCKET, name, time);
        }
    }
    for (level, name) in
        [(libc::IPPROTO_TCP, libc::TCP_NODELAY), (libc::SOL_SOCKET, libc::SO_KEEPALIVE)]
    {
        if let Ok(value) = kernel::option(fd, level, name, 0_i32)
            && value != 0
        {
            let _ = connection.options.set(level, name, &value.to_ne_bytes(), libc::AF_INET);
        }
    }
    kernel::replace(raw, fd, !kernel::survives_exec(fd)).ok()?;
    Some(table::set_packets(fd, connection))
}

/// What became of an `accept`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// The kernel's connection, as it is.
    Kernels,
    /// The packet lane's, of this peer.
    Packets(SocketAddr),
    /// A knock without a connection behind it any more.
    Broken,
}

/// `fd` has just come out of `accept`: exchanges a knock for its connection.
#[must_use]
pub fn accepted(fd: RawFd) -> Accepted {
    if table::is_foreign_process() {
        return Accepted::Kernels;
    }
    // Where there never was a proxy the connections of the kernel are not looked at.
    let known = page();
    if known.is_none() && !WAS_THERE.load(Ordering::Relaxed) {
        return Accepted::Kernels;
    }
    let peer = kernel::name(fd, true).ok().and_then(|(storage, _)| internet_address(&storage));
    let is_knock = match peer.map(|peer| peer.ip()) {
        Some(IpAddr::V4(host)) => host == KNOCK_FROM,
        Some(IpAddr::V6(host)) => host.is_loopback(),
        None => false,
    };
    if !is_knock {
        return Accepted::Kernels;
    }
    // A proxy that was gone a moment ago knocks as soon as another one has its place.
    let Some(page) = known.or_else(page_now) else { return Accepted::Kernels };
    // SAFETY: the program's open descriptor, for the length of the call.
    let about = unsafe { BorrowedFd::borrow_raw(fd) };
    match ask(Question::Claim, Some(about)) {
        Ok((Answer::Channel, descriptors)) => {
            let adopted = given(descriptors).and_then(|given| adopt(fd, given, page));
            let peer = adopted.and_then(|connection| connection.channel.addresses());
            peer.map_or(Accepted::Broken, |[_, peer]| Accepted::Packets(peer))
        }
        Ok((Answer::Kernel { error: 0 }, _)) => Accepted::Kernels,
        _ => Accepted::Broken,
    }
}

/// `fd` came into this program from elsewhere: by `exec`, or in a message. If it is a placeholder, its
/// connection goes on here, or is reset here: a placeholder alone has rings for data, and what is written to it goes
/// nowhere.
pub fn inherited(fd: RawFd) {
    if !kernel::is_bound_beside(fd, PLACEHOLDER_NAME) || table::packets(fd).is_some() {
        return;
    }
    match resume(fd) {
        Some(connection) => {
            let connection = table::set_packets(fd, Box::new(connection));
            // Other processes may have it.
            connection.shared();
        }
        None => reset_here(fd),
    }
}

/// The connection of a placeholder. `None`: it is over, there is no proxy, or that is of another version.
fn resume(fd: RawFd) -> Option<Connection> {
    // SAFETY: an open descriptor, for the length of the call.
    let about = unsafe { BorrowedFd::borrow_raw(fd) };
    let tries = if RESUMED_IN_VAIN.load(Ordering::Relaxed) { 1 } else { TELLS };
    for _ in 0..tries {
        if let Some(page) = page_now()
            && let Ok((answer, descriptors)) = ask(Question::Resume, Some(about))
        {
            RESUMED_IN_VAIN.store(false, Ordering::Relaxed);
            let memory = given(descriptors).filter(|_| answer == Answer::Channel)?.memory;
            return Some(Connection::new(Channel::take(memory).ok()?, page));
        }
        lost();
        // One that died a moment ago is about to be replaced.
        std::thread::sleep(TELL_AGAIN);
    }
    RESUMED_IN_VAIN.store(true, Ordering::Relaxed);
    None
}

/// Puts a socket whose connection was reset where the program has a placeholder. Other processes have that, too, and
/// go on with its connection.
fn reset_here(fd: RawFd) {
    let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
    let made = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
    let replaced = made.is_ok_and(|(own, other)| {
        // A peer that closes with bytes unread: that is a reset.
        let _ = rustix::net::send(&own, &[0], rustix::net::SendFlags::empty());
        drop(other);
        let closes = !kernel::survives_exec(fd);
        kernel::replace(own.as_raw_fd(), fd, closes).is_ok()
    });
    if !replaced {
        // Better over for all than wrong here.
        let _ = kernel::shutdown(fd, libc::SHUT_RDWR);
    }
}

/// What the names begin with to which the proxy binds its ends of placeholders.
pub const PLACEHOLDER_NAME: &[u8] = b"beeline-packets-";

/// For programs that hold a descriptor of their own: the same as [`connect`], for a fresh socket.
///
/// Errors: the monitor's, `ENETUNREACH` where the proxy does not lead.
pub fn connect_fresh(to: SocketAddr, priority: u8) -> Result<(OwnedFd, Connection), Errno> {
    let page = page().ok_or(Errno(libc::ENETDOWN))?;
    match ask(Question::Connect { to, own: None, priority }, None) {
        Ok((Answer::Channel, descriptors)) => {
            let Given { memory, placeholder } = given(descriptors).ok_or(Errno(libc::EPROTO))?;
            let placeholder = placeholder.ok_or(Errno(libc::EPROTO))?;
            let channel = Channel::take(memory).map_err(|_| Errno(libc::EPROTO))?;
            Ok((placeholder, Connection::new(channel, page)))
        }
        Ok((Answer::Kernel { error }, _)) if error != 0 => Err(Errno(error)),
        Ok(_) => Err(Errno(libc::ENETUNREACH)),
        Err(_) => Err(Errno(libc::ENETDOWN)),
    }
}

/// The connection behind a knock that a program accepted by itself.
///
/// Errors: the socket, where it is no knock; `ECONNABORTED`.
pub fn claim(knock: OwnedFd) -> Result<(OwnedFd, Connection), Result<OwnedFd, Errno>> {
    let fd = knock.into_raw_fd();
    let broken = Err(Errno(libc::ECONNABORTED));
    // SAFETY: just taken out of its owner.
    let knock = unsafe { OwnedFd::from_raw_fd(fd) };
    let Some(page) = page() else { return Err(Ok(knock)) };
    match ask(Question::Claim, Some(knock.as_fd())) {
        Ok((Answer::Channel, descriptors)) => {
            let Some(Given { memory, placeholder: Some(placeholder) }) = given(descriptors) else {
                return Err(broken);
            };
            let Ok(channel) = Channel::take(memory) else { return Err(broken) };
            Ok((placeholder, Connection::new(channel, page)))
        }
        Ok((Answer::Kernel { error: 0 }, _)) => Err(Ok(knock)),
        _ => Err(broken),
    }
}

/// As the C library has an address; one of version 4 in clothes of version 6 where the socket was so.
#[must_use]
pub fn storage(address: SocketAddr, version: i32) -> (libc::sockaddr_storage, usize) {
    // SAFETY: a plain C structure for which all zeros is a value.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut storage;
    let address = match address {
        SocketAddr::V4(old) if version == libc::AF_INET6 => {
            SocketAddr::new(old.ip().to_ipv6_mapped().into(), old.port())
        }
        other => other,
    };
    let family = |number: i32| libc::sa_family_t::try_from(number).unwrap_or(0);
    match address {
        SocketAddr::V4(address) => {
            let written = libc::sockaddr_in {
                sin_family: family(libc::AF_INET),
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: address.ip().to_bits().to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is large enough and aligned for every address.
            unsafe { place.cast::<libc::sockaddr_in>().write(written) };
            (storage, size_of::<libc::sockaddr_in>())
        }
        SocketAddr::V6(address) => {
            let written = libc::sockaddr_in6 {
                sin6_family: family(libc::AF_INET6),
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: 0,
            };
            // SAFETY: as above.
            unsafe { place.cast::<libc::sockaddr_in6>().write(written) };
            (storage, size_of::<libc::sockaddr_in6>())
        }
    }
}

/// The version of addresses that the program's socket had.
#[must_use]
pub fn version(fd: RawFd) -> i32 {
    let Some(connection) = table::packets(fd) else { return libc::AF_INET };
    match connection.version.load(Ordering::Relaxed) {
        0 => match connection.channel.addresses() {
            Some([SocketAddr::V6(_), _]) => libc::AF_INET6,
            _ => libc::AF_INET,
        },
        version => version,
    }
}

/// An option of a packet connection: its length. `None`: the placeholder's.
#[must_use]
pub fn option(
    fd: RawFd,
    connection: &Connection,
    level: i32,
    name: i32,
    value: &mut [u8],
) -> Option<Result<usize, Errno>> {
    let number = match keeper(level, name, version(fd)) {
        Keeper::Placeholder => return None,
        Keeper::Here => return Some(connection.options.get(level, name, value, version(fd))),
        Keeper::Error => connection.take_error().map_or(0, |Errno(error)| error),
        Keeper::Constant(number) => number,
    };
    let bytes = number.to_ne_bytes();
    let count = bytes.len().min(value.len());
    value.get_mut(..count)?.copy_from_slice(bytes.get(..count)?);
    Some(Ok(count))
}

/// Sets an option of a packet connection. `None`: the placeholder's.
#[must_use]
pub fn set_option(
    connection: &Connection,
    level: i32,
    name: i32,
    value: &[u8],
) -> Option<Result<usize, Errno>> {
    let version = connection.version.load(Ordering::Relaxed);
    let version = if version == 0 { libc::AF_INET } else { version };
    match keeper(level, name, version) {
        Keeper::Placeholder => None,
        Keeper::Error | Keeper::Constant(_) => Some(Err(Errno(libc::ENOPROTOOPT))),
        Keeper::Here => {
            if (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER)
                && let Some((on, time)) = value.split_first_chunk::<4>()
            {
                // A linger of no time: closing breaks off.
                let abort = *on != [0; 4] && time.iter().all(|&byte| byte == 0);
                connection.channel.program().abort.store(u32::from(abort), Ordering::Relaxed);
            }
            Some(connection.options.set(level, name, value, version).map(|()| 0))
        }
    }
}
