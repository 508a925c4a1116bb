//! A connection for a program that has no library: a process that carries its bytes.
//!
//! A static or set-uid program that gets a connection of ours would read doorbells. So it gets one
//! end of a Unix socket pair instead, and a process of its own, which has the library's memory, carries bytes
//! between the other end and the rings. The program sees a stream socket with the same bytes and
//! the same ends; its names and TCP options are another matter.
//!
//! Where others have the connection too, it may be that the program was only not kept from
//! inheriting it, and never reads. Then what it does not read must stay for them: the carrier
//! *lends*. It puts a copy of the next bytes before the program, and takes them from the ring when
//! the program has read them all. Nor does the program's end end the connection then.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::connection::{self, Connection};
use crate::kernel::{self, Errno};
use crate::{between, poll, receive, send, table, together};

/// Bytes carried at a time.
const BLOCK: usize = 64 << 10;
const QUIET: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Replaces `numbers`, which all are `connection`, by a carried stream. One carrier for all of
/// them.
///
/// Errors: the kernel's, of making a process or a descriptor; nothing is replaced then.
pub fn replace(numbers: &[RawFd], connection: &'static Connection) -> Result<(), Errno> {
    let Some(&fd) = numbers.first() else { return Ok(()) };
    if connection.references.load(Ordering::Relaxed) as usize > numbers.len() {
        // The program's other numbers for it stay.
        together::share_for_good(&connection.segment);
    }
    let far = begin(fd, connection)?;
    let mut outcome = Ok(());
    for &number in numbers {
        outcome = outcome.and(kernel::duplicate_onto(far, number).map(|_| ()));
        if !table::is_foreign_process() && table::forget(number).is_some() {
            between::handed_to_carrier(connection);
        }
    }
    let _ = kernel::close(far);
    outcome
}

/// Starts a carrier for `connection`. Returns the program's end of its stream, which blocks as `fd`
/// does and is closed by `exec`.
///
/// Errors: as for [`replace`].
pub fn begin(fd: RawFd, connection: &'static Connection) -> Result<RawFd, Errno> {
    let shared = !together::is_alone(&connection.segment, true);
    together::share_for_good(&connection.segment);
    let [near, far] = kernel::socket_pair()?;
    // SAFETY: the child goes on in `carry_on` and ends there, or here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // The carrier is nobody's child, so that nobody waits for it.
        // SAFETY: as above.
        let carrier = unsafe { libc::fork() };
        if carrier == 0 {
            kernel::be_alone([fd, near]);
            // Their numbers are to be others now.
            table::each(|other, one| {
                if other != fd && table::forget(other).is_some() {
                    between::leaving_by_exec(one);
                }
            });
            carry_on(fd, connection, near, shared);
        }
        kernel::exit(i32::from(carrier < 0));
    }
    let made = child > 0 && kernel::wait_for(child);
    let _ = kernel::close(near);
    let mode = if connection.blocks(fd) { Ok(0) } else { kernel::set_nonblocking(far) };
    match mode {
        Ok(_) if made => Ok(far),
        other => {
            let _ = kernel::close(far);
            Err(other.err().unwrap_or(Errno(libc::EAGAIN)))
        }
    }
}

fn piece(bytes: &mut [u8]) -> [libc::iovec; 1] {
    [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }]
}

fn take(fd: RawFd, connection: &Connection, bytes: &mut [u8], flags: i32) -> Result<usize, Errno> {
    // SAFETY: our own buffer, as long as told.
    unsafe { receive::receive(fd, connection, &piece(bytes), QUIET | flags) }
}

/// Bytes on their way in one direction.
struct Way {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    /// The source said end; the target has not heard of it.
    ended: bool,
    over: bool,
}

impl Way {
    fn new() -> Self {
        Self { bytes: vec![0; BLOCK], from: 0, to: 0, ended: false, over: false }
    }

    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// One step; false when the target takes no more, ever.
    fn step(
        &mut self,
        mut take: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
        mut give: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
        mut end: impl FnMut(),
    ) -> bool {
        if self.is_empty() && !self.ended {
            match take(&mut self.bytes) {
                Ok(0) => self.ended = true,
                Ok(count) => (self.from, self.to) = (0, count),
                Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
                Err(_) => self.ended = true,
            }
        }
        while !self.is_empty() {
            match give(self.bytes.get_mut(self.from..self.to).unwrap_or_default()) {
                Ok(count) => self.from += count,
                Err(Errno(libc::EAGAIN | libc::EINTR)) => break,
                Err(_) => return false,
            }
        }
        if self.ended && self.is_empty() && !self.over {
            self.over = true;
            end();
        }
        true
    }

    fn wants(&self) -> bool {
        self.is_empty() && !self.ended
    }
}

/// Where an end's reader stands: bytes from the kernel, position and offset in the ring.
type Position = (u64, u64, u64);

fn position(connection: &Connection) -> Position {
    let receiving = &connection.segment.own().receiving;
    (
        receiving.by_kernel.load(Ordering::Relaxed),
        receiving.head.load(Ordering::Relaxed),
        receiving.offset.load(Ordering::Relaxed),
    )
}

/// Bytes that lie before the program and in the ring.
struct Loan {
    count: usize,
    at: Position,
}

/// The way to the program, where others may want the same bytes.
#[derive(Default)]
struct Lending {
    bytes: Vec<u8>,
    loan: Option<Loan>,
    ended: bool,
}

impl Lending {
    /// One step; false when the program takes no more, ever.
    fn step(&mut self, fd: RawFd, connection: &Connection, near: RawFd) -> bool {
        if self.loan.is_some() {
            if kernel::untaken(near) > 0 {
                return true;
            }
            self.settle(fd, connection);
        }
        if self.ended {
            return true;
        }
        self.bytes.resize(BLOCK, 0);
        let mut at = position(connection);
        let mut looked = take(fd, connection, &mut self.bytes, libc::MSG_PEEK);
        // What was seen is what stands at the position, not what another holder has taken meanwhile.
        while position(connection) != at {
            at = position(connection);
            looked = take(fd, connection, &mut self.bytes, libc::MSG_PEEK);
        }
        match looked {
            Ok(0) => self.end(near),
            Ok(count) => {
                let bytes = self.bytes.get(..count).unwrap_or_default();
                match kernel::send(near, bytes, QUIET) {
                    Ok(count) => self.loan = Some(Loan { count, at }),
                    Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
                    Err(_) => return false,
                }
            }
            Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
            Err(_) => self.end(near),
        }
        true
    }

    fn end(&mut self, near: RawFd) {
        self.ended = true;
        let _ = kernel::shutdown(near, libc::SHUT_WR);
    }

    /// The program has read what was lent. If somebody else read meanwhile, both have it, as the
    /// kernel would have given it to either.
    fn settle(&mut self, fd: RawFd, connection: &Connection) {
        let Some(Loan { mut count, at }) = self.loan.take() else { return };
        if position(connection) != at {
            return;
        }
        let mut patience = 1000;
        while count > 0 {
            let Some(bytes) = self.bytes.get_mut(..count.min(BLOCK)) else { return };
            match take(fd, connection, bytes, 0) {
                Ok(0) => return,
                Ok(taken) => count -= taken,
                Err(Errno(libc::EINTR)) => {}
                // Taken by another holder between the look and this: they are gone.
                Err(Errno(libc::EAGAIN)) if patience > 0 && !connection.is_over() => {
                    patience -= 1;
                    let _ = kernel::pause(1);
                }
                Err(_) => return,
            }
        }
    }
}

/// The way to the program.
enum Inward {
    Giving(Way),
    Lending(Lending),
}

impl Inward {
    fn step(&mut self, fd: RawFd, connection: &Connection, near: RawFd) -> bool {
        match self {
            Self::Giving(way) => way.step(
                |bytes| take(fd, connection, bytes, 0),
                |bytes| kernel::send(near, bytes, QUIET),
                || {
                    let _ = kernel::shutdown(near, libc::SHUT_WR);
                },
            ),
            Self::Lending(lending) => lending.step(fd, connection, near),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Giving(way) => way.over,
            Self::Lending(lending) => lending.ended && lending.loan.is_none(),
        }
    }

    /// It wants bytes from the connection.
    fn wants(&self) -> bool {
        match self {
            Self::Giving(way) => way.wants(),
            Self::Lending(lending) => lending.loan.is_none() && !lending.ended,
        }
    }

    /// It waits for room before the program.
    fn waits_for_room(&self) -> bool {
        matches!(self, Self::Giving(way) if !way.is_empty())
    }
}

/// Hears, as a readable descriptor, that the program has read something.
fn ear(near: RawFd) -> Option<RawFd> {
    let set = kernel::epoll_set().ok()?;
    #[expect(clippy::cast_sign_loss, reason = "bits")]
    let events = (libc::EPOLLOUT | libc::EPOLLET) as u32;
    let event = libc::epoll_event { events, u64: 0 };
    kernel::epoll_control(set, libc::EPOLL_CTL_ADD, near, Some(event)).ok()?;
    Some(set)
}

/// Carries until both directions are over, or the program is gone; then ends this process.
fn carry_on(fd: RawFd, connection: &'static Connection, near: RawFd, shared: bool) -> ! {
    let ear = if shared { ear(near) } else { None };
    let mut inward = match ear {
        Some(_) => Inward::Lending(Lending::default()),
        None => Inward::Giving(Way::new()),
    };
    let mut outward = Way::new();
    // The program reads no more; its end was closed; with bytes that it had not read.
    let (mut deaf, mut gone, mut unread) = (false, false, false);
    loop {
        deaf |= gone || !inward.step(fd, connection, near);
        let outward_goes = outward.step(
            |bytes| {
                let taken = kernel::receive(near, bytes, QUIET);
                unread |= taken == Err(Errno(libc::ECONNRESET));
                taken
            },
            // SAFETY: our own buffer, as long as told.
            |bytes| unsafe { send::send(fd, connection, &piece(bytes), QUIET) },
            || {
                // Closed is not shut: others may go on sending.
                if !(shared && kernel::poll_one(near, 0, 0).is_ok_and(|bits| bits != 0)) {
                    let _ = connection::shutdown(fd, connection, libc::SHUT_WR);
                }
            },
        );
        if !outward_goes || outward.over && (deaf || inward.is_over()) {
            break;
        }
        let bit = |wanted, bit| if wanted { bit } else { 0 };
        let reads = !deaf && inward.wants();
        let mut entries = [
            libc::pollfd {
                fd,
                events: bit(reads, libc::POLLIN) | bit(!outward.is_empty(), libc::POLLOUT),
                revents: 0,
            },
            libc::pollfd {
                // Closed, it would tell so again and again.
                fd: if gone && !outward.wants() { -1 } else { near },
                events: bit(outward.wants(), libc::POLLIN)
                    | bit(!deaf && inward.waits_for_room(), libc::POLLOUT),
                revents: 0,
            },
            libc::pollfd { fd: ear.unwrap_or(-1), events: libc::POLLIN, revents: 0 },
        ];
        // Asked nothing, it would only tell of its end again and again.
        if entries[0].events == 0 {
            entries[0].fd = -1;
        }
        if poll::poll(&mut entries, None, None).is_none() {
            let _ = kernel::poll_many(&mut entries, None, None);
        }
        if entries[2].revents != 0
            && let Some(ear) = ear
        {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }];
            let _ = kernel::epoll_wait(ear, &mut events, Some(poll::time(Duration::ZERO)), None);
        }
        gone |= entries[1].revents & (libc::POLLHUP | libc::POLLERR) != 0;
    }
    // What it had read of a loan when it ended is only known where that was all or nothing.
    unread |= kernel::option(near, libc::SOL_SOCKET, libc::SO_ERROR, 0).is_ok_and(|e| e != 0);
    if let Inward::Lending(lending) = &mut inward
        && gone
        && !unread
    {
        lending.settle(fd, connection);
    }
    connection::closing(fd);
    let _ = kernel::close(fd);
    kernel::exit(0)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsRawFd as _, FromRawFd as _};
    use std::os::unix::net::UnixStream;

    use beeline_os::Mapping;
    use beeline_os::mapping::Protection;

    use super::*;
    use crate::segment::{Segment, length_bytes};

    /// Both ends, a carrier's socket and its program's.
    fn carried() -> ([(TcpStream, Box<Connection>); 2], [UnixStream; 2]) {
        table::tests::begin_once();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = listener.accept().unwrap().0;
        let length = length_bytes(1 << 18);
        let near = Mapping::memfd("test", length).unwrap();
        Segment::format(&near).unwrap();
        let fd = near.descriptor().unwrap().try_clone().unwrap();
        let far = Mapping::shared(fd, length, Protection::ReadWrite).unwrap();
        let end = |stream: TcpStream, mapping, side| {
            let segment = Segment::take(mapping, side).unwrap();
            let connection = Connection::new(segment, stream.as_raw_fd());
            assert!(connection.join());
            (stream, Box::new(connection))
        };
        let ends = [end(one, near, 0), end(other, far, 1)];
        let pair = kernel::socket_pair().unwrap();
        // SAFETY: fresh descriptors of our own.
        let program = pair.map(|fd| unsafe { UnixStream::from_raw_fd(fd) });
        (ends, program)
    }

    fn put(end: &(TcpStream, Box<Connection>), bytes: &[u8]) {
        let pieces =
            [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        // SAFETY: our own buffer, which is only read.
        let sent = unsafe { send::send(end.0.as_raw_fd(), &end.1, &pieces, 0) };
        assert_eq!(sent, Ok(bytes.len()));
    }

    #[test]
    fn what_is_lent_is_lent_once() {
        let ([sender, reader], [near, mut program]) = carried();
        let mut lending = Lending::default();
        let mut step = || lending.step(reader.0.as_raw_fd(), &reader.1, near.as_raw_fd());
        put(&sender, b"abc");
        for bytes in [b"defg", b"hijk"] {
            put(&sender, bytes);
        }
        program.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let mut all = Vec::<u8>::new();
        for _ in 0..9 {
            assert!(step());
            let mut bytes = [0; 99];
            if let Ok(count) = program.read(&mut bytes) {
                all.extend(&bytes[..count]);
            }
        }
        assert_eq!(all, b"abcdefghijk");
    }
}
