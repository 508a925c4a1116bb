//! System calls, made without the C library's names: those are ours in a program that preloads us.
//!
//! Each function is one call on a descriptor number that the program gave us. A number that is not
//! open is the kernel's to refuse.

use std::os::fd::RawFd;

/// An error number as `errno` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// What a call yields.
pub type Outcome = Result<usize, Errno>;

/// A system call.
macro_rules! call {
    ($number:expr $(, $argument:expr)*) => {{
        let arguments = [$(Argument::word($argument)),*];
        let mut words = [0; 6];
        words[..arguments.len()].copy_from_slice(&arguments);
        // SAFETY: the function around this call says why its arguments are valid for the kernel.
        outcome(unsafe { enter($number, words) })
    }};
}

pub mod threads;

/// Enters the kernel by the processor's own instruction: the C library's `syscall` is ours too in a
/// program that preloads us, and leads back here. The answer is the kernel's: an error is its number
/// below zero, and `errno` stays.
///
/// # Safety
///
/// The arguments are valid for the call of this number.
#[cfg(target_arch = "x86_64")]
#[inline]
pub unsafe fn enter(number: libc::c_long, arguments: [libc::c_long; 6]) -> libc::c_long {
    let [a, b, c, d, e, f] = arguments;
    let outcome: libc::c_long;
    // SAFETY: the kernel's calling convention; the caller answers for what the call does.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => outcome,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    outcome
}

/// As on x86-64.
///
/// # Safety
///
/// The arguments are valid for the call of this number.
#[cfg(target_arch = "aarch64")]
#[inline]
pub unsafe fn enter(number: libc::c_long, arguments: [libc::c_long; 6]) -> libc::c_long {
    let [a, b, c, d, e, f] = arguments;
    let outcome: libc::c_long;
    // SAFETY: the kernel's calling convention; the caller answers for what the call does.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => outcome,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    outcome
}

/// By the C library, whose `syscall` the preload library leaves alone on this processor.
///
/// # Safety
///
/// The arguments are valid for the call of this number.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub unsafe fn enter(number: libc::c_long, arguments: [libc::c_long; 6]) -> libc::c_long {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: as the caller promised.
    let outcome = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if outcome == -1 {
        let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return -libc::c_long::from(error);
    }
    outcome
}

/// An argument as a whole word.
trait Argument {
    fn word(self) -> libc::c_long;
}

impl Argument for i32 {
    #[inline]
    fn word(self) -> libc::c_long {
        libc::c_long::from(self)
    }
}

impl Argument for u32 {
    #[inline]
    fn word(self) -> libc::c_long {
        libc::c_long::from(self)
    }
}

impl Argument for u64 {
    #[inline]
    fn word(self) -> libc::c_long {
        self.cast_signed()
    }
}

impl Argument for usize {
    #[inline]
    fn word(self) -> libc::c_long {
        self.cast_signed() as libc::c_long
    }
}

impl<T> Argument for *const T {
    #[inline]
    fn word(self) -> libc::c_long {
        self.expose_provenance().word()
    }
}

impl<T> Argument for *mut T {
    #[inline]
    fn word(self) -> libc::c_long {
        self.expose_provenance().word()
    }
}

#[inline]
fn outcome(value: libc::c_long) -> Outcome {
    // Addresses may be negative words; errors are the last page of them.
    if (-4095..0).contains(&value) {
        return Err(Errno(i32::try_from(-value).unwrap_or(libc::EIO)));
    }
    Ok(value.cast_unsigned() as usize)
}

/// `recv` into `bytes`.
pub fn receive(fd: RawFd, bytes: &mut [u8], flags: i32) -> Outcome {
    let (none, length) = (std::ptr::null_mut::<u8>(), bytes.len());
    // The buffer is ours and as long as told.
    call!(libc::SYS_recvfrom, fd, bytes.as_mut_ptr(), length, flags, none, none)
}

/// `send` of `bytes`.
pub fn send(fd: RawFd, bytes: &[u8], flags: i32) -> Outcome {
    let none = std::ptr::null::<u8>();
    // The buffer is ours and as long as told.
    call!(libc::SYS_sendto, fd, bytes.as_ptr(), bytes.len(), flags, none, 0)
}

/// `write` of `bytes`, to any descriptor.
pub fn write(fd: RawFd, bytes: &[u8]) -> Outcome {
    // The buffer is ours and as long as told.
    call!(libc::SYS_write, fd, bytes.as_ptr(), bytes.len())
}

fn message(pieces: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: a plain C structure for which all zeros means: no name, no pieces, no control.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len();
    message
}

/// `recvmsg` into the program's own `pieces`: a bad address is the kernel's to refuse.
pub fn receive_pieces(fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
    let mut message = message(pieces);
    // The header is ours; it refers to the program's pieces, which the kernel checks.
    call!(libc::SYS_recvmsg, fd, &raw mut message, flags)
}

/// A datagram into `bytes`, and the user who sent it where the kernel tells (`SO_PASSCRED`). Never waits; what
/// else came with it is closed.
///
/// Errors: the kernel's.
pub fn receive_from_user(fd: RawFd, bytes: &mut [u8]) -> Result<(usize, Option<u32>), Errno> {
    #[repr(C)]
    struct Control {
        head: libc::cmsghdr,
        sender: libc::ucred,
    }
    // SAFETY: plain C structures, for which all zeros is a value: of no level, from nobody.
    let mut control: Control = unsafe { std::mem::zeroed() };
    let pieces = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    let mut message = message(&pieces);
    message.msg_control = (&raw mut control).cast();
    // No room for anything behind the sender, which comes first.
    message.msg_controllen = size_of::<Control>();
    // Buffers are ours and as long as told.
    let length = call!(libc::SYS_recvmsg, fd, &raw mut message, libc::MSG_DONTWAIT)?;
    let told = (control.head.cmsg_level, control.head.cmsg_type);
    let is_told = told == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS);
    Ok((length, is_told.then_some(control.sender.uid)))
}

/// `sendmsg` of the program's own `pieces`.
pub fn send_pieces(fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
    let message = message(pieces);
    // As in `receive_pieces`.
    call!(libc::SYS_sendmsg, fd, &raw const message, flags)
}

/// A word of the kernel's randomness, if it has any by now.
pub fn random() -> Option<u64> {
    let mut word = [0_u8; 8];
    // The buffer is ours and as long as told.
    let count =
        call!(libc::SYS_getrandom, word.as_mut_ptr(), word.len(), libc::GRND_NONBLOCK).ok()?;
    (count == word.len()).then(|| u64::from_le_bytes(word))
}

/// `poll` of one descriptor, for at most `timeout_ms` (negative: for ever). Its `revents`.
pub fn poll_one(fd: RawFd, events: i16, timeout_ms: i32) -> Result<i16, Errno> {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    // One entry, ours.
    call!(libc::SYS_poll, &raw mut entry, 1, timeout_ms)?;
    Ok(entry.revents)
}

/// Sleeps for `milliseconds`.
///
/// Errors: `EINTR` when a signal came first.
pub fn pause(milliseconds: i32) -> Result<(), Errno> {
    let none = std::ptr::null_mut::<libc::pollfd>();
    // No entries.
    call!(libc::SYS_poll, none, 0, milliseconds).map(|_| ())
}

/// As [`pause`], in a call that goes on after a signal whose handler wants that (`SA_RESTART`): the only one
/// with a time-out and without a descriptor. Linux before 5.16 does not have it, and sleeps to the end.
///
/// Errors: `EINTR` when a signal came first whose handler does not want it.
pub fn pause_again(milliseconds: u32) -> Result<(), Errno> {
    // Nobody else has the word.
    let word = 0_u32;
    let flags = (libc::FUTEX2_SIZE_U32 | libc::FUTEX2_PRIVATE).unsigned_abs();
    // A `futex_waitv`: what the word is, where, and how it is meant, in the lower half.
    let waiter = [0, (&raw const word).expose_provenance() as u64, u64::from(flags)];
    let clock = libc::CLOCK_MONOTONIC;
    let until = now_ns(clock).cast_signed() + i64::from(milliseconds) * 1_000_000;
    let until = libc::timespec { tv_sec: until / 1_000_000_000, tv_nsec: until % 1_000_000_000 };
    // One waiter, its word and the time: ours.
    match call!(libc::SYS_futex_waitv, waiter.as_ptr(), 1, 0, &raw const until, clock) {
        Ok(_) | Err(Errno(libc::ETIMEDOUT)) => Ok(()),
        Err(Errno(libc::EINTR)) => Err(Errno(libc::EINTR)),
        Err(_) => {
            let _ = pause(milliseconds.cast_signed());
            Ok(())
        }
    }
}

/// Bytes that the kernel holds for a reader of `fd`.
#[must_use]
pub fn unread(fd: RawFd) -> usize {
    let mut count = 0_i32;
    // One integer, ours.
    let outcome = call!(libc::SYS_ioctl, fd, libc::FIONREAD, &raw mut count);
    if outcome.is_ok() { usize::try_from(count).unwrap_or(0) } else { 0 }
}

/// Nanoseconds of the clock that is cheap to read and ticks every few milliseconds.
#[must_use]
pub fn coarse_ns() -> u64 {
    now_ns(libc::CLOCK_MONOTONIC_COARSE)
}

/// How long this thread has had a processor, in nanoseconds. A system call.
#[must_use]
pub fn worked_ns() -> u64 {
    now_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn now_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one plain structure of ours; no name of ours.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// `close`.
pub fn close(fd: RawFd) -> Outcome {
    call!(libc::SYS_close, fd)
}

/// `shutdown`.
pub fn shutdown(fd: RawFd, how: i32) -> Outcome {
    call!(libc::SYS_shutdown, fd, how)
}

/// An integer or small structure option.
pub fn option<T: Copy>(fd: RawFd, level: i32, name: i32, mut value: T) -> Result<T, Errno> {
    let mut length = u32::try_from(size_of::<T>()).unwrap_or(0);
    // The kernel writes at most `length` bytes of a plain value.
    call!(libc::SYS_getsockopt, fd, level, name, &raw mut value, &raw mut length)?;
    Ok(value)
}

/// Sets an integer or small structure option.
pub fn set_option<T: Copy>(fd: RawFd, level: i32, name: i32, value: T) -> Outcome {
    let length = u32::try_from(size_of::<T>()).unwrap_or(0);
    // The kernel reads `length` bytes of a plain value.
    call!(libc::SYS_setsockopt, fd, level, name, &raw const value, length)
}

/// Any option, as bytes; its length.
pub fn option_bytes(fd: RawFd, level: i32, name: i32, value: &mut [u8]) -> Outcome {
    let mut length = u32::try_from(value.len()).unwrap_or(u32::MAX);
    // The kernel writes at most `length` bytes of ours.
    call!(libc::SYS_getsockopt, fd, level, name, value.as_mut_ptr(), &raw mut length)?;
    Ok(length as usize)
}

/// Sets any option.
pub fn set_option_bytes(fd: RawFd, level: i32, name: i32, value: &[u8]) -> Outcome {
    let length = u32::try_from(value.len()).unwrap_or(u32::MAX);
    // The kernel reads `length` bytes of ours.
    call!(libc::SYS_setsockopt, fd, level, name, value.as_ptr(), length)
}

/// A fresh TCP socket of this version of addresses.
pub fn tcp_socket(version: i32) -> Result<std::os::fd::OwnedFd, Errno> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    let fd = call!(libc::SYS_socket, version, kind, 0)?;
    let fd = RawFd::try_from(fd).map_err(|_| Errno(libc::EMFILE))?;
    // SAFETY: fresh, and ours alone.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) })
}

/// `dup3`: `new` is what `old` is, and closed by `exec` if so told.
pub fn replace(old: RawFd, new: RawFd, closes: bool) -> Outcome {
    call!(libc::SYS_dup3, old, new, if closes { libc::O_CLOEXEC } else { 0 })
}

/// True for a Unix socket whose other end has an abstract name that begins with `prefix`.
#[must_use]
pub fn is_bound_beside(fd: RawFd, prefix: &[u8]) -> bool {
    let Ok((address, length)) = name(fd, true) else { return false };
    let from = std::mem::offset_of!(libc::sockaddr_un, sun_path);
    if i32::from(address.ss_family) != libc::AF_UNIX || length < from + 1 + prefix.len() {
        return false;
    }
    let bytes = std::ptr::from_ref(&address).cast::<u8>().wrapping_add(from);
    // SAFETY: `length` bytes of the address were written, and it is large enough for all of them.
    let name =
        unsafe { std::slice::from_raw_parts(bytes, length.min(size_of_val(&address)) - from) };
    name[0] == 0 && name[1..].starts_with(prefix)
}

/// The kernel's number of the socket, the same for all its copies.
#[must_use]
pub fn cookie(fd: RawFd) -> Option<u64> {
    option(fd, libc::SOL_SOCKET, libc::SO_COOKIE, 0).ok()
}

/// The beginning of the kernel's `struct tcp_info`, of which only some is read.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpInfo {
    state: u8,
    _flags: [u8; 7],
    _early: [u32; 24],
    _pacing: [u64; 2],
    acknowledged: u64,
    received: u64,
    _segments: [u32; 2],
    not_sent: u32,
    _middle: [u32; 3],
    _rates: [u64; 4],
    _delivered: [u32; 2],
    sent: u64,
    sent_again: u64,
}

const _: () = assert!(std::mem::offset_of!(TcpInfo, received) == 128);
const _: () = assert!(std::mem::offset_of!(TcpInfo, not_sent) == 144);
const _: () = assert!(std::mem::offset_of!(TcpInfo, sent) == 200);
const ESTABLISHED: u8 = 1;

fn tcp_info(fd: RawFd) -> Option<TcpInfo> {
    let zeros = [0_u64; size_of::<TcpInfo>() / 8];
    // SAFETY: integers only, for which every bit pattern is a value.
    let mut info: TcpInfo = unsafe { std::mem::transmute(zeros) };
    let whole = u32::try_from(size_of::<TcpInfo>()).ok()?;
    let mut length = whole;
    // The kernel writes at most `length` bytes of a plain value.
    call!(
        libc::SYS_getsockopt,
        fd,
        libc::IPPROTO_TCP,
        libc::TCP_INFO,
        &raw mut info,
        &raw mut length
    )
    .ok()?;
    // An older kernel tells less.
    (length == whole && info.state == ESTABLISHED).then_some(info)
}

/// Bytes that the program has given to the kernel's stream so far, and taken from it, while no call of
/// the program's is under way. `None` where the kernel cannot say, or the stream is over one way or the other.
#[must_use]
pub fn moved(fd: RawFd) -> Option<(u64, u64)> {
    // What arrives, and what is confirmed, in between changes the answers: then once more.
    for _ in 0..16 {
        let before = tcp_info(fd)?;
        let (unread, unconfirmed) = (unread(fd) as u64, unconfirmed(fd)?);
        let after = tcp_info(fd)?;
        if (before.received, before.acknowledged) != (after.received, after.acknowledged) {
            continue;
        }
        let sent = after.sent.checked_sub(after.sent_again)? + u64::from(after.not_sent);
        // In another way, in which the end that connected counts its beginning as a byte.
        let again = after.acknowledged + unconfirmed;
        let agrees = again == sent || again == sent + 1;
        let taken = after.received.checked_sub(unread)?;
        return agrees.then_some((sent, taken));
    }
    None
}

/// As [`moved`], by a count that begins anywhere and goes round: for who compares it with a later one of
/// the same socket. A restored socket has no other.
#[must_use]
pub fn counted(fd: RawFd) -> Option<(u64, u64)> {
    for _ in 0..16 {
        let before = tcp_info(fd)?;
        let (unread, unconfirmed) = (unread(fd) as u64, unconfirmed(fd)?);
        let after = tcp_info(fd)?;
        if (before.received, before.acknowledged) == (after.received, after.acknowledged) {
            let given = after.acknowledged.wrapping_add(unconfirmed);
            return Some((given, after.received.wrapping_sub(unread)));
        }
    }
    None
}

/// Bytes given to the kernel's stream that the other end's kernel has not confirmed.
fn unconfirmed(fd: RawFd) -> Option<u64> {
    let mut count = 0_i32;
    // One integer, ours.
    call!(libc::SYS_ioctl, fd, libc::TIOCOUTQ, &raw mut count).ok()?;
    u64::try_from(count).ok()
}

/// Keeps signals from this thread; what was in force before.
#[must_use]
pub fn block_signals() -> u64 {
    let (all, mut before) = (u64::MAX, 0_u64);
    // Eight bytes of a mask each, ours.
    let _ = call!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const all, &raw mut before, 8);
    before
}

/// What [`block_signals`] told is in force again.
pub fn restore_signals(before: u64) {
    let none = std::ptr::null_mut::<u64>();
    // As above.
    let _ = call!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const before, none, 8);
}

/// `getsockname` (`peer` false) or `getpeername`: the address and its length.
pub fn name(fd: RawFd, peer: bool) -> Result<(libc::sockaddr_storage, usize), Errno> {
    // SAFETY: a plain C structure for which all zeros is a value.
    let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut length = u32::try_from(size_of::<libc::sockaddr_storage>()).unwrap_or(0);
    let number = if peer { libc::SYS_getpeername } else { libc::SYS_getsockname };
    // The kernel writes at most `length` bytes of ours.
    call!(number, fd, &raw mut address, &raw mut length)?;
    Ok((address, length as usize))
}

/// True when the open file description of `fd` does not block.
pub fn is_nonblocking(fd: RawFd) -> bool {
    let flags = call!(libc::SYS_fcntl, fd, libc::F_GETFL).unwrap_or(0);
    i32::try_from(flags).unwrap_or(0) & libc::O_NONBLOCK != 0
}

/// True when `fd` is open.
#[must_use]
pub fn is_open(fd: RawFd) -> bool {
    call!(libc::SYS_fcntl, fd, libc::F_GETFD).is_ok()
}

/// True when `fd` is an epoll set: the only kind that can be waited on. The place for the events
/// cannot be written, so nothing is taken from the set.
#[must_use]
pub fn is_epoll(fd: RawFd) -> bool {
    if !is_anonymous(fd) {
        return false;
    }
    let nowhere = std::ptr::without_provenance_mut::<libc::epoll_event>(8);
    let none = std::ptr::null::<libc::sigset_t>();
    // The kernel checks the place when it writes, and answers `EFAULT`.
    let outcome = call!(libc::SYS_epoll_pwait, fd, nowhere, 1, 0, none, 8_usize);
    matches!(outcome, Ok(_) | Err(Errno(libc::EFAULT)))
}

/// True for a file of no type at all, as epoll sets, timers and events are.
fn is_anonymous(fd: RawFd) -> bool {
    about(fd).is_some_and(|about| about.st_mode & libc::S_IFMT == 0)
}

fn about(fd: RawFd) -> Option<libc::stat> {
    // SAFETY: a plain C structure for which all zeros is a value.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    // The structure is ours.
    call!(libc::SYS_fstat, fd, &raw mut about).ok()?;
    Some(about)
}

/// The number that `/proc` calls a socket by.
#[must_use]
pub fn inode(fd: RawFd) -> Option<u64> {
    about(fd).map(|about| about.st_ino)
}

/// The calling thread's number, never 0.
#[must_use]
pub fn thread() -> u32 {
    call!(libc::SYS_gettid).ok().and_then(|id| u32::try_from(id).ok()).unwrap_or(1)
}

/// True while a thread of this number exists.
#[must_use]
pub fn thread_exists(thread: u32) -> bool {
    !matches!(call!(libc::SYS_tkill, thread, 0), Err(Errno(libc::ESRCH | libc::EINVAL)))
}

/// When the kernel began this process, in ticks since the machine's beginning; 0 if it does not say.
#[must_use]
pub fn begun_at() -> u64 {
    let status = short_file("/proc/self/stat");
    // The 22nd word; behind the second, which may hold anything, the 20th.
    let rest = status.rsplit(") ").next().unwrap_or_default();
    rest.split(' ').nth(19).and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// When the process of this number began, as [`begun_at`]; `Some(None)`: it has ended, all its threads; `None`: the
/// kernel does not say.
#[must_use]
pub fn process_begun_at(process: u32) -> Option<Option<u64>> {
    let status = short_file(&format!("/proc/{process}/stat"));
    if status.is_empty() {
        return (!thread_exists(process)).then_some(None);
    }
    let rest = status.rsplit(") ").next().unwrap_or_default();
    let mut words = rest.split(' ');
    let state = words.next();
    // Of a process whose first thread has ended, others may live.
    let threads = words.nth(16)?.parse::<u32>().ok()?;
    let begun = words.nth(1)?.parse::<u64>().ok()?;
    let over = matches!(state, Some("Z" | "X")) && threads <= 1;
    Some((!over).then_some(begun))
}

/// The kernel's number of this process's namespace of processes; 0 if it does not say.
#[must_use]
pub fn process_namespace() -> u64 {
    // The path is ours and ends with a zero.
    let path = c"/proc/self/ns/pid";
    let mut text = [0_u8; 64];
    // The buffer is ours and as long as told.
    let count =
        call!(libc::SYS_readlinkat, libc::AT_FDCWD, path.as_ptr(), text.as_mut_ptr(), text.len());
    let text = text.get(..count.unwrap_or(0)).unwrap_or_default();
    let text = std::str::from_utf8(text).unwrap_or_default();
    let number = text.strip_prefix("pid:[").and_then(|text| text.strip_suffix(']'));
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// The beginning of a file as text, empty if there is none. Without the C library's `close`, which is ours
/// and would wait for the lock of a set that the caller may hold.
fn short_file(path: &str) -> String {
    let Ok(path) = std::ffi::CString::new(path) else { return String::new() };
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // The path is ours and ends with a zero.
    let opened = call!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0);
    let Some(fd) = opened.ok().and_then(|fd| RawFd::try_from(fd).ok()) else {
        return String::new();
    };
    let mut text = [0_u8; 1024];
    // The buffer is ours and as long as told.
    let count = call!(libc::SYS_read, fd, text.as_mut_ptr(), text.len()).unwrap_or(0);
    let _ = close(fd);
    String::from_utf8_lossy(text.get(..count).unwrap_or_default()).into_owned()
}

/// What becomes of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It runs, or will.
    Running,
    /// By a signal or a debugger.
    Stopped,
    /// It ended, though its number may still be taken: nobody has waited for it.
    Over,
}

/// What becomes of the thread of this number: one call to look it up, and a file of `/proc`.
#[must_use]
pub fn life_of(thread: u32) -> Life {
    if !thread_exists(thread) {
        return Life::Over;
    }
    let status = short_file(&format!("/proc/{thread}/stat"));
    // Behind the name, which may hold anything.
    match status.rsplit(") ").next().and_then(|rest| rest.bytes().next()) {
        Some(b'T' | b't') => Life::Stopped,
        Some(b'Z' | b'X') => Life::Over,
        _ => Life::Running,
    }
}

/// Sends the calling thread `signal`.
pub fn raise(signal: i32) {
    let process = call!(libc::SYS_getpid).unwrap_or(0);
    let _ = call!(libc::SYS_tgkill, process, thread(), signal);
}

/// The process that made this one, if it lives and nobody has taken its place.
#[must_use]
pub fn parent() -> u32 {
    call!(libc::SYS_getppid).ok().and_then(|id| u32::try_from(id).ok()).unwrap_or(0)
}

/// True when `fd` is the same open file in process `other` as in this one. False also where the kernel does
/// not say.
#[must_use]
pub fn is_same_file_in(other: u32, fd: RawFd) -> bool {
    const FILE: i32 = 0;
    let (fd, process) = (fd as libc::c_ulong, std::process::id());
    call!(libc::SYS_kcmp, other, process, FILE, fd, fd) == Ok(0)
}

/// Lets another thread run.
pub fn yield_now() {
    let _ = call!(libc::SYS_sched_yield);
}

/// `ppoll` on the program's own entries. `mask` is in force meanwhile.
pub fn poll_many(
    entries: &mut [libc::pollfd],
    timeout: Option<libc::timespec>,
    mask: Option<&libc::sigset_t>,
) -> Outcome {
    let mut timeout = timeout;
    let bound = timeout.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    // Entries, time and mask outlive the call; the kernel reads eight bytes of the mask.
    call!(libc::SYS_ppoll, entries.as_mut_ptr(), entries.len(), bound, mask, 8)
}

/// `epoll_pwait2`, or `epoll_pwait` in milliseconds where that is unknown.
pub fn epoll_wait(
    set: RawFd,
    events: &mut [libc::epoll_event],
    timeout: Option<libc::timespec>,
    mask: Option<&libc::sigset_t>,
) -> Outcome {
    let bound = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    // Events, time and mask outlive the call.
    let outcome =
        call!(libc::SYS_epoll_pwait2, set, events.as_mut_ptr(), events.len(), bound, mask, 8_usize);
    if outcome != Err(Errno(libc::ENOSYS)) {
        return outcome;
    }
    let timeout_ms = timeout.map_or(-1, |t| {
        let up = t.tv_sec.saturating_mul(1000).saturating_add((t.tv_nsec + 999_999) / 1_000_000);
        i32::try_from(up).unwrap_or(i32::MAX)
    });
    // As above.
    call!(libc::SYS_epoll_pwait, set, events.as_mut_ptr(), events.len(), timeout_ms, mask, 8_usize)
}

/// `epoll_ctl`; `event` may be null for a removal.
pub fn epoll_control(
    set: RawFd,
    operation: i32,
    fd: RawFd,
    event: Option<libc::epoll_event>,
) -> Outcome {
    let mut event = event;
    let place = event.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // The event is ours.
    call!(libc::SYS_epoll_ctl, set, operation, fd, place)
}

/// Two connected stream sockets of this host, closed by `exec`.
pub fn socket_pair() -> Result<[RawFd; 2], Errno> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // Room for two numbers, ours.
    call!(libc::SYS_socketpair, libc::AF_UNIX, kind, 0, ends.as_mut_ptr())?;
    Ok(ends)
}

/// `dup2`.
pub fn duplicate_onto(old: RawFd, new: RawFd) -> Outcome {
    call!(libc::SYS_dup3, old, new, 0)
}

/// Makes a fresh descriptor one that does not block.
pub fn set_nonblocking(fd: RawFd) -> Outcome {
    call!(libc::SYS_fcntl, fd, libc::F_SETFL, libc::O_NONBLOCK)
}

/// A fresh epoll set, closed by `exec`.
pub fn epoll_set() -> Result<RawFd, Errno> {
    let set = call!(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC)?;
    RawFd::try_from(set).map_err(|_| Errno(libc::EMFILE))
}

/// About how many bytes sent on a Unix socket nobody has read yet; 0 when all were read.
#[must_use]
pub fn untaken(fd: RawFd) -> usize {
    let mut count = 0_i32;
    // One integer, ours.
    let outcome = call!(libc::SYS_ioctl, fd, libc::TIOCOUTQ, &raw mut count);
    // One is left for a moment of what was just read: nothing that was sent counts so little.
    if outcome.is_ok() && count > 1 { usize::try_from(count).unwrap_or(0) } else { 0 }
}

/// True when `fd` stays open over `exec`.
#[must_use]
pub fn survives_exec(fd: RawFd) -> bool {
    let flags = call!(libc::SYS_fcntl, fd, libc::F_GETFD);
    flags.is_ok_and(|flags| flags & libc::FD_CLOEXEC.unsigned_abs() as usize == 0)
}

/// Ends this process without the program's own last rites.
pub fn exit(code: i32) -> ! {
    // SAFETY: never returns, and runs nothing of the program's.
    unsafe { libc::_exit(code) }
}

/// Waits for the end of a child; true when it ended well.
#[must_use]
pub fn wait_for(child: i32) -> bool {
    let mut status = 0_i32;
    loop {
        let none = std::ptr::null_mut::<libc::rusage>();
        // The place is ours.
        match call!(libc::SYS_wait4, child, &raw mut status, 0, none) {
            Ok(_) => return status == 0,
            Err(Errno(libc::EINTR)) => {}
            // Somebody who ignores its children's ends.
            Err(_) => return true,
        }
    }
}

/// Makes this process deaf to signals, and closes all it has but `kept`.
pub fn be_alone(kept: [RawFd; 2]) {
    let _ = call!(libc::SYS_setsid);
    let all = u64::MAX;
    let none = std::ptr::null_mut::<u64>();
    // Eight bytes of a mask, ours.
    let _ = call!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const all, none, 8);
    let (low, high) = (kept[0].min(kept[1]), kept[0].max(kept[1]));
    for (first, last) in [(0, low - 1), (low + 1, high - 1), (high + 1, RawFd::MAX)] {
        if first <= last {
            let _ = call!(libc::SYS_close_range, first, last, 0);
        }
    }
}
