//! Connections begun, copied, ended; options.

use std::ffi::{c_int, c_uint, c_ulong, c_void};
use std::sync::atomic::Ordering;

use beeline_sockets::connection::{Connection, closing, look};
use beeline_sockets::kernel::Errno;
use beeline_sockets::lane::{self, Carries as _};
use beeline_sockets::packets;
use beeline_sockets::packets::dial::{self, Accepted, Connected};
use beeline_sockets::young::{accepted, connected, leave_to_kernel};
use beeline_sockets::{receive, table};
use libc::{sockaddr, socklen_t};

use crate::real::real;
use crate::{guarded_int, quietly};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = real!(socket(domain, kind, protocol) as fn(c_int, c_int, c_int) -> c_int);
    // A number whose closing we did not see.
    quietly(|| {
        table::forget(fd);
    });
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the program's address.
    if let Some(outcome) = unsafe { connect_by_packets(fd, to, length) } {
        return outcome;
    }
    let outcome = real!(connect(fd, to, length) as fn(c_int, *const sockaddr, socklen_t) -> c_int);
    let internet = !to.is_null()
        && length >= 2
        // SAFETY: the program's address has at least its family.
        && matches!(i32::from(unsafe { (*to).sa_family }), libc::AF_INET | libc::AF_INET6);
    if internet {
        let error = if outcome == 0 { 0 } else { crate::errno() };
        quietly(|| match error {
            0 => connected(fd),
            libc::EINPROGRESS if !table::is_watched_plain(fd) => table::set_connecting(fd),
            _ => {}
        });
    }
    outcome
}

/// `connect` to where the proxy of this host leads; `None`: the kernel's.
///
/// # Safety
///
/// `to` is null or an address of `length` bytes.
unsafe fn connect_by_packets(fd: c_int, to: *const sockaddr, length: socklen_t) -> Option<c_int> {
    // SAFETY: a plain C structure for which all zeros is a value.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let length = length as usize;
    if to.is_null() || !(size_of::<libc::sockaddr_in>()..=size_of_val(&storage)).contains(&length) {
        return None;
    }
    let place = (&raw mut storage).cast::<u8>();
    // SAFETY: `length` bytes of the program's, and at least as much room.
    unsafe { place.copy_from_nonoverlapping(to.cast(), length) };
    if table::packets(fd).is_some() && i32::from(storage.ss_family) != libc::AF_UNSPEC {
        // Programs ask so whether a connection was made.
        return Some(guarded_int(|| Err(Errno(libc::EISCONN))));
    }
    let mut outcome = Connected::Kernels;
    quietly(|| outcome = dial::connect(fd, &storage));
    match outcome {
        Connected::Kernels => None,
        Connected::Yes => Some(0),
        Connected::Failed(error) => Some(guarded_int(|| Err(error))),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    let outcome = real!(listen(fd, backlog) as fn(c_int, c_int) -> c_int);
    if outcome == 0 {
        quietly(|| dial::listening(fd));
    }
    outcome
}

/// Writes `address` as the kernel would: as much of it as there is room for, and how long it is.
///
/// # Safety
///
/// Both are null or the program's places, `length` saying how much room there is.
unsafe fn tell(
    address: std::net::SocketAddr,
    version: c_int,
    to: *mut sockaddr,
    length: *mut socklen_t,
) {
    if to.is_null() || length.is_null() {
        return;
    }
    let (storage, whole) = packets::dial::storage(address, version);
    // SAFETY: the program's place.
    let room = unsafe { length.read() } as usize;
    let from = (&raw const storage).cast::<u8>();
    // SAFETY: at most as much as the address has, and as the program has room for.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(from, room.min(whole)) };
    // SAFETY: as above.
    unsafe { length.write(socklen_t::try_from(whole).unwrap_or(0)) };
}

/// A fresh connection out of `accept`, and its peer's place. `None`: it was a knock of a proxy that is gone, which
/// is no connection of any kind, so that the caller accepts again.
///
/// # Safety
///
/// As for [`tell`].
unsafe fn accept_done(fd: c_int, from: *mut sockaddr, length: *mut socklen_t) -> Option<c_int> {
    if fd < 0 {
        return Some(fd);
    }
    let mut outcome = Accepted::Kernels;
    quietly(|| {
        table::forget(fd);
        outcome = dial::accepted(fd);
    });
    match outcome {
        Accepted::Kernels => quietly(|| accepted(fd)),
        // SAFETY: the caller's contract.
        Accepted::Packets(peer) => unsafe { tell(peer, packets::dial::version(fd), from, length) },
        Accepted::Broken => {
            let _ = beeline_sockets::kernel::close(fd);
            return None;
        }
    }
    Some(fd)
}

/// `accept`, by the kernel's `take`, until there is a connection or an error. The kernel never says that a
/// connection was broken off in the backlog, and programs end when they hear so.
///
/// # Safety
///
/// As for [`tell`]; `take` is the kernel's call with the same places.
unsafe fn accept_by(
    mut take: impl FnMut() -> c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the program's place, or null.
    let room = unsafe { length.as_ref() }.copied();
    loop {
        let fresh = take();
        // The kernel has written over how much room there is.
        let mut own = room.unwrap_or(0);
        // SAFETY: the caller's contract, and a place of ours.
        let taken = unsafe { accept_done(fresh, from, &raw mut own) };
        // SAFETY: the caller's contract.
        let place = unsafe { length.as_mut() };
        match (taken, place) {
            (Some(fd), Some(place)) if table::packets(fd).is_some() => *place = own,
            (None, Some(place)) => *place = room.unwrap_or(0),
            _ => {}
        }
        if let Some(fd) = taken {
            return fd;
        }
    }
}

/// The address of a packet connection, which the placeholder does not know.
///
/// # Safety
///
/// As for [`tell`].
unsafe fn address_of(fd: c_int, peer: bool, to: *mut sockaddr, length: *mut socklen_t) -> bool {
    let Some(connection) = table::packets(fd) else { return false };
    let Some(address) = connection.address(peer) else { return false };
    // SAFETY: the caller's contract.
    unsafe { tell(address, packets::dial::version(fd), to, length) };
    true
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(
    fd: c_int,
    to: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the program's places.
    if unsafe { address_of(fd, false, to, length) } {
        return 0;
    }
    real!(getsockname(fd, to, length) as fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(
    fd: c_int,
    to: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the program's places.
    if unsafe { address_of(fd, true, to, length) } {
        return 0;
    }
    real!(getpeername(fd, to, length) as fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, length: *mut socklen_t) -> c_int {
    let take =
        || real!(accept(fd, from, length) as fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int);
    // SAFETY: the program's places.
    unsafe { accept_by(take, from, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let take = || {
        real!(accept4(fd, from, length, flags)
            as fn(c_int, *mut sockaddr, *mut socklen_t, c_int) -> c_int)
    };
    // SAFETY: the program's places.
    unsafe { accept_by(take, from, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    quietly(|| closing(fd));
    real!(close(fd) as fn(c_int) -> c_int)
}

/// `CLOSE_RANGE_CLOEXEC`: nothing is closed now.
const ONLY_ON_EXEC: c_int = 4;

fn closing_range(first: c_uint, last: c_uint) {
    let Ok(first) = c_int::try_from(first) else { return };
    let last = c_int::try_from(last).unwrap_or(c_int::MAX);
    for fd in first..=last.min(table::highest()) {
        closing(fd);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & ONLY_ON_EXEC == 0 {
        quietly(|| closing_range(first, last));
    }
    real!(close_range(first, last, flags) as fn(c_uint, c_uint, c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    quietly(|| closing_range(c_uint::try_from(first).unwrap_or(0), c_uint::MAX));
    let address = crate::real::closefrom.address();
    if !address.is_null() {
        // SAFETY: the C library's function of this name has this signature.
        let function: unsafe extern "C" fn(c_int) = unsafe { std::mem::transmute(address) };
        // SAFETY: the program's argument.
        unsafe { function(first) };
    }
}

fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0 {
        quietly(|| {
            table::duplicate(old, new);
            if !table::is_foreign_process() {
                beeline_sockets::epoll::duplicate(old, new);
                crate::stdio::adopt(&[new]);
            }
        });
    }
    new
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(old: c_int) -> c_int {
    duplicated(old, real!(dup(old) as fn(c_int) -> c_int))
}

/// The number that `dup2` and `dup3` are about to close, unless the call will fail.
fn replaced(old: c_int, new: c_int) {
    if old != new && beeline_sockets::kernel::is_open(old) {
        quietly(|| closing(new));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    replaced(old, new);
    duplicated(old, real!(dup2(old, new) as fn(c_int, c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    replaced(old, new);
    duplicated(old, real!(dup3(old, new, flags) as fn(c_int, c_int, c_int) -> c_int))
}

fn fcntl_done(fd: c_int, command: c_int, argument: c_ulong, outcome: c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, outcome),
        libc::F_SETFL => {
            if outcome == 0 && argument & libc::O_ASYNC as c_ulong != 0 {
                signals_asked(fd);
            }
            mode_changed(fd);
            outcome
        }
        _ => outcome,
    }
}

/// The program wants a signal with each message, which the kernel alone can send: a connection that has not changed
/// over stays the kernel's.
fn signals_asked(fd: c_int) {
    leave_to_kernel(fd);
}

fn mode_changed(fd: c_int) {
    match table::kind(fd) {
        table::Kind::Ours(connection) => connection.forget_blocking_mode(),
        table::Kind::Packets(connection) => connection.forget_blocking_mode(),
        _ => {}
    }
}

// The third argument is a word whatever the command takes; the callers' "..." passes it in the
// same register.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let outcome = real!(fcntl(fd, command, argument) as fn(c_int, c_int, c_ulong) -> c_int);
    fcntl_done(fd, command, argument, outcome)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let outcome = real!(fcntl64(fd, command, argument) as fn(c_int, c_int, c_ulong) -> c_int);
    fcntl_done(fd, command, argument, outcome)
}

/// Most bytes that `FIONREAD` counts.
const MOST_COUNTED: usize = 1 << 30;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if request == libc::FIONREAD
        && let Some(connection) = table::packets(fd)
    {
        return guarded_int(|| {
            let count = connection.unread().min(MOST_COUNTED);
            // SAFETY: the program's place for an int.
            unsafe { argument.cast::<c_int>().write(c_int::try_from(count).unwrap_or(0)) };
            Ok(0)
        });
    }
    if request == libc::FIONREAD
        && let Some(connection) = look(fd)
        && connection.kernel_bytes_left().is_none()
    {
        return guarded_int(|| {
            let counted = receive::available(connection, MOST_COUNTED);
            let count = counted.map_err(|_| receive::corrupt(fd, connection))?;
            // SAFETY: the program's place for an int.
            unsafe { argument.cast::<c_int>().write(c_int::try_from(count).unwrap_or(0)) };
            Ok(0)
        });
    }
    let outcome = real!(ioctl(fd, request, argument) as fn(c_int, c_ulong, *mut c_void) -> c_int);
    if request == libc::FIONREAD
        && outcome == 0
        && let Some(connection) = look(fd)
        && let Some(left) = connection.kernel_bytes_left()
    {
        // Without doorbells, before and behind the program's bytes.
        // SAFETY: the kernel has just written the program's int.
        let counted = unsafe { argument.cast::<c_int>().read() };
        let bytes = u64::try_from(counted).unwrap_or(0).saturating_sub(connection.bells_left());
        let bytes = c_int::try_from(bytes.min(left)).unwrap_or(counted);
        // SAFETY: as above.
        unsafe { argument.cast::<c_int>().write(bytes) };
    }
    if request == libc::FIONBIO {
        mode_changed(fd);
    }
    // SAFETY: the kernel has just read the program's int.
    if request == libc::FIOASYNC && outcome == 0 && unsafe { argument.cast::<c_int>().read() } != 0
    {
        signals_asked(fd);
    }
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let ours = lane::look(fd);
    // One that has not shown that it lives, and now ends.
    leave_to_kernel(fd);
    match ours {
        Some(ours) => guarded_int(|| ours.carries().shutdown(fd, how)),
        None => real!(shutdown(fd, how) as fn(c_int, c_int) -> c_int),
    }
}

/// Options that we answer ourselves.
fn own_option(connection: &Connection, level: c_int, name: c_int) -> Option<c_int> {
    if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) {
        return receive::take_error(connection).map(|Errno(error)| error);
    }
    connection.held_option(level, name).map(|value| value.load(Ordering::Relaxed))
}

/// Options whose effect would be on bytes that no longer pass through the kernel: encryption there
/// (TLS, MD5), and the notices of sends without a copy. As on a kernel without them, programs go
/// on without.
fn refused_option(level: c_int, name: c_int) -> Option<Errno> {
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_ULP) => Some(Errno(libc::ENOENT)),
        (libc::IPPROTO_TCP, libc::TCP_MD5SIG) => Some(Errno(libc::ENOPROTOOPT)),
        (libc::SOL_SOCKET, libc::SO_ZEROCOPY) => Some(Errno(libc::EOPNOTSUPP)),
        _ => None,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    if let Some(connection) = table::packets(fd)
        && !value.is_null()
        && !length.is_null()
    {
        // SAFETY: the program's place, not null.
        let room = unsafe { *length } as usize;
        let place = value.cast::<u8>();
        // SAFETY: the program's place, as long as it says.
        let bytes = unsafe { std::slice::from_raw_parts_mut(place, room) };
        match packets::dial::option(fd, connection, level, name, bytes) {
            Some(Ok(count)) => {
                // SAFETY: as above.
                unsafe { *length = socklen_t::try_from(count).unwrap_or(0) };
                return 0;
            }
            Some(Err(error)) => return guarded_int(|| Err(error)),
            None => {}
        }
    }
    if let Some(connection) = table::ours(fd)
        && !value.is_null()
        && !length.is_null()
        // SAFETY: the program's place, not null.
        && unsafe { *length } as usize >= size_of::<c_int>()
        && let Some(answer) = own_option(connection, level, name)
    {
        // SAFETY: the program's place for at least an int.
        unsafe { value.cast::<c_int>().write_unaligned(answer) };
        // SAFETY: as above.
        unsafe { *length = 4 };
        return 0;
    }
    real!(getsockopt(fd, level, name, value, length)
        as fn(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    if let Some(connection) = table::packets(fd) {
        if let Some(refusal) = refused_option(level, name) {
            return guarded_int(|| Err(refusal));
        }
        if !value.is_null() {
            // SAFETY: the program's value, as long as it says.
            let bytes = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), length as usize) };
            if let Some(outcome) = packets::dial::set_option(connection, level, name, bytes) {
                return guarded_int(|| outcome);
            }
        }
    }
    if let Some(connection) = table::ours(fd) {
        if let Some(refusal) = refused_option(level, name) {
            return guarded_int(|| Err(refusal));
        }
        if let Some(held) = connection.held_option(level, name)
            && !value.is_null()
            && length as usize >= size_of::<c_int>()
        {
            // SAFETY: the program's int.
            let wanted = unsafe { value.cast::<c_int>().read_unaligned() };
            let wanted = match level {
                libc::IPPROTO_TCP => c_int::from(wanted != 0),
                // A low-water mark, as the kernel has it.
                _ if wanted < 0 => c_int::MAX,
                _ => wanted.max(1),
            };
            held.store(wanted, Ordering::Relaxed);
            return 0;
        }
    } else if refused_option(level, name).is_some() {
        leave_to_kernel(fd);
    }
    real!(setsockopt(fd, level, name, value, length)
        as fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int)
}
