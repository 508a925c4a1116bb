//! One connection of the packet lane, as a program sees it.
//!
//! Bytes go through queues and blocks that the program shares with its host's proxy. The
//! placeholder is one end of a Unix socket pair, whose other end the proxy has; the kernel's view of
//! it says what is to be said, so `poll`, `select` and epoll sets need no help:
//!
//! | the kernel says | because |
//! | --- | --- |
//! | readable | the proxy rang (one byte): packets came while the reader was armed |
//! | end of stream | the proxy shut its side: the peer's stream ended, or the proxy is gone |
//! | not writable | the program put a *filler* into the queue: there was no block; the proxy takes it out when there are |
//! | hung up, at the proxy | the last holder of the placeholder is gone: the connection closes |
//!
//! Invariants:
//! - while the placeholder is watched: packets are there only if the reader is armed, or a ring is
//!   in the placeholder or on its way. Who empties the queue takes the rings and arms;
//! - who publishes looks at the sleep of the proxy's thread behind a full fence; the thread says that
//!   it sleeps, and looks at the queues behind one;
//! - a program that was refused room finds the placeholder not writable, or has yet to be told of a change: a filler
//!   that the proxy took out together with something else is put in again by the next call that finds no room;
//! - a half is worked on by one thread at a time, over all processes ([`crate::holder`]).

use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use beeline_ring::packets::Corrupt;

use super::channel::{Channel, Direction};
use super::header::{HEADER_BYTES, Header, PacketKind};
use super::options::Options;
use super::page::Page;
use super::patience::Patience;
use crate::holder::hold_within;
use crate::kernel::{self, Errno, Outcome};
use crate::receive::room;
use crate::send::call_time;
use crate::sleepers::Sleepers;

/// Packets taken or published with one update of a position.
const BATCH: usize = 16;
/// Bytes that make the kernel say of a placeholder that it is not writable: more than a quarter of
/// its room, which the proxy sets.
pub const FILLER_BYTES: usize = 12 << 10;
/// Room of a placeholder's queue towards the proxy, as given to the kernel, which doubles it.
pub const PLACEHOLDER_BYTES: i32 = 20 << 10;

/// Least and most own time that a call looks before it sleeps.
const LOOKS: [Duration; 2] = [Duration::from_micros(4), Duration::from_micros(60)];

pub(super) const QUIET: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
const BLOCKS: u8 = 1;
const BLOCKS_NOT: u8 = 2;

/// One connection.
#[derive(Debug)]
pub struct Connection {
    /// Its memory.
    pub channel: Channel,
    page: Arc<Page>,
    /// Numbers in the table that lead here.
    pub references: AtomicU32,
    pub(super) sleepers: Sleepers,
    /// Of calls that wait; a second thread in one waits with a fresh one.
    patience: std::sync::Mutex<Patience>,
    /// What the program set and the placeholder cannot keep.
    pub options: Options,
    /// Version of addresses of the socket that the program had; 0: not known.
    pub version: AtomicI32,
    reset_told: AtomicBool,
    is_gone: AtomicBool,
    is_shared: AtomicBool,
    /// A ring that was begun did not come in time: others are not slept for.
    pub(super) gave_up_rings: AtomicBool,
    blocking: AtomicU8,
    /// Memory of either host in programs' hands.
    pub(super) extents: super::extents::Extents,
    /// Bytes that this process copied into its buffers from the blocks, and out of them: each written with its half held.
    copied: [AtomicU64; 2],
}

/// What a look at the queue found.
enum Step {
    Bytes(usize),
    End,
    Nothing,
}

/// Where the next byte of a list of pieces goes to or comes from.
struct Cursor<'a> {
    pieces: &'a [libc::iovec],
    index: usize,
    within: usize,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [libc::iovec], skip: usize) -> Self {
        let mut cursor = Self { pieces, index: 0, within: 0 };
        let mut skip = skip;
        while let Some((_, length)) = cursor.place() {
            let part = skip.min(length);
            cursor.within += part;
            skip -= part;
            if skip == 0 {
                break;
            }
        }
        cursor
    }

    /// The place and what is left of its piece.
    fn place(&mut self) -> Option<(*mut u8, usize)> {
        loop {
            let piece = self.pieces.get(self.index)?;
            if self.within < piece.iov_len {
                let place = piece.iov_base.cast::<u8>().wrapping_add(self.within);
                return Some((place, piece.iov_len - self.within));
            }
            self.index += 1;
            self.within = 0;
        }
    }
}

/// Milliseconds that are left, rounded up, of the time of a call that has slept `since`; -1 where it has no end. `which`
/// is the option that says the time.
///
/// Errors: `EAGAIN` when it is over.
fn left_ms(fd: RawFd, which: i32, since: Instant) -> Result<i32, Errno> {
    let Some(longest) = call_time(fd, true, which) else { return Ok(-1) };
    match longest.saturating_sub(since.elapsed()).as_micros().div_ceil(1000) {
        0 => Err(Errno(libc::EAGAIN)),
        left => Ok(i32::try_from(left).unwrap_or(i32::MAX)),
    }
}

/// Sleeps until a ring is there, for what is left of the time of a call that has slept `since`.
fn await_ring_again(fd: RawFd, since: Instant) -> Outcome {
    let ring = |flags| kernel::receive(fd, &mut [0], libc::MSG_PEEK | flags);
    match left_ms(fd, libc::SO_RCVTIMEO, since)? {
        // A signal whose handler wants that is gone on after, as by the first sleep.
        -1 => return ring(0),
        left if kernel::poll_one(fd, libc::POLLIN, left)? == 0 => return Err(Errno(libc::EAGAIN)),
        _ => {}
    }
    match ring(libc::MSG_DONTWAIT) {
        // Another thread took it: the call looks for its packet and comes back.
        Err(Errno(libc::EAGAIN)) => Ok(1),
        outcome => outcome,
    }
}

/// Adds to a counter that one thread at a time writes: an atomic addition would wait for every store before it.
fn tally(counter: &AtomicU64, count: usize) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(count as u64);
    counter.store(sum, Ordering::Relaxed);
}

impl Connection {
    /// The connection with this memory and its host's page.
    #[must_use]
    pub fn new(channel: Channel, page: Arc<Page>) -> Self {
        channel.mapping().forget_descriptor();
        Self {
            channel,
            page,
            references: AtomicU32::new(1),
            sleepers: Sleepers::default(),
            patience: std::sync::Mutex::new(Patience::new(LOOKS[1])),
            options: Options::default(),
            version: AtomicI32::new(0),
            reset_told: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            is_shared: AtomicBool::new(false),
            gave_up_rings: AtomicBool::new(false),
            blocking: AtomicU8::new(0),
            extents: super::extents::Extents::default(),
            copied: [const { AtomicU64::new(0) }; 2],
        }
    }

    /// Bytes that this process copied between its buffers and the blocks.
    #[must_use]
    pub fn copied(&self) -> u64 {
        self.copied.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Whether calls on it block: remembered while one process has it.
    fn blocks(&self, fd: RawFd) -> bool {
        match self.blocking.load(Ordering::Relaxed) {
            BLOCKS => return true,
            BLOCKS_NOT => return false,
            _ => {}
        }
        let blocks = !kernel::is_nonblocking(fd);
        if !self.is_shared.load(Ordering::Relaxed) {
            self.blocking.store(if blocks { BLOCKS } else { BLOCKS_NOT }, Ordering::Relaxed);
        }
        blocks
    }

    /// The program may have changed the mode.
    pub fn forget_blocking_mode(&self) {
        self.blocking.store(0, Ordering::Relaxed);
    }

    /// Another process is about to have it too.
    pub fn shared(&self) {
        self.is_shared.store(true, Ordering::Relaxed);
        self.forget_blocking_mode();
    }

    /// Threads of this process sleep in a call on it.
    pub(crate) fn is_slept_on(&self) -> bool {
        self.sleepers.any()
    }

    /// Changes whenever one falls asleep or wakes.
    pub(crate) fn sleep_stamp(&self) -> u64 {
        self.sleepers.stamp()
    }

    pub(super) fn has_packets(&self) -> bool {
        // Nonsense counts as something, to be found out.
        let taken = self.channel.taken(Direction::ToProgram);
        self.channel.put(Direction::ToProgram) != taken
    }

    fn is_over(&self) -> bool {
        let proxy = self.channel.proxy();
        proxy.ended.load(Ordering::Acquire) != 0
            || proxy.reset.load(Ordering::Acquire) != 0
            || self.is_gone.load(Ordering::Relaxed)
    }

    /// The program can read, or will be told an end.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.has_packets()
            || self.is_over()
            || self.channel.receiving().shut.load(Ordering::Relaxed) != 0
    }

    fn has_room(&self) -> bool {
        !self.channel.packets(Direction::ToProxy).free().is_empty()
    }

    /// The error with which it broke, if the program has not heard of it.
    pub fn take_error(&self) -> Option<Errno> {
        let reset = self.channel.proxy().reset.load(Ordering::Acquire);
        let gone = self.is_gone.load(Ordering::Relaxed)
            && self.channel.proxy().ended.load(Ordering::Acquire) == 0;
        let error = match reset {
            0 if gone => libc::ECONNRESET,
            0 => return None,
            error => i32::try_from(error).unwrap_or(libc::ECONNRESET),
        };
        (!self.reset_told.swap(true, Ordering::Relaxed)).then_some(Errno(error))
    }

    /// Wakes the proxy's thread, which looks at this connection.
    pub(super) fn poke(&self, fd: RawFd) {
        let _ = kernel::send(fd, &[1], QUIET);
    }

    /// After something was published for the proxy: wakes it if it sleeps.
    pub(super) fn published(&self, fd: RawFd) {
        // Against the fence between the proxy's saying that it sleeps and its last look.
        fence(Ordering::SeqCst);
        let thread = self.channel.partition().load(Ordering::Relaxed) as usize;
        if self.page.asleep(thread).load(Ordering::Relaxed) != 0 {
            self.poke(fd);
        }
    }

    /// Receives as `recvmsg` would.
    ///
    /// Errors: `errno` as the kernel's sockets have it.
    ///
    /// # Safety
    ///
    /// Each piece is writable memory of the program's.
    pub unsafe fn receive(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        if flags & libc::MSG_OOB != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let (wanted, peek) = (room(pieces), flags & libc::MSG_PEEK != 0);
        let all = flags & libc::MSG_WAITALL != 0 && !peek;
        let waits = || flags & libc::MSG_DONTWAIT == 0 && self.blocks(fd);
        let (mut total, mut slept) = (0, None);
        if wanted == 0 {
            return Ok(0);
        }
        loop {
            let longest = || call_time(fd, waits(), libc::SO_RCVTIMEO);
            let held = hold_within(&self.channel.receiving().holder, &self.sleepers, longest)?;
            // SAFETY: the caller's contract.
            let step = unsafe { self.take(fd, pieces, total, wanted, peek) };
            drop(held);
            match step {
                Err(Corrupt) => return Err(self.corrupt(fd)),
                Ok(Step::Bytes(count)) => {
                    total += count;
                    slept = None;
                    if total == wanted || !all {
                        self.after_receiving(fd);
                        return Ok(total);
                    }
                }
                Ok(Step::End) => {
                    if total > 0 {
                        return Ok(total);
                    }
                    return self.take_error().map_or(Ok(0), Err);
                }
                Ok(Step::Nothing) => {
                    if total > 0 {
                        self.after_receiving(fd);
                    }
                    let outcome = if waits() {
                        self.wait_readable(fd, &mut slept)
                    } else {
                        self.look_again(fd)
                    };
                    match outcome {
                        Ok(()) => {}
                        Err(_) if total > 0 => return Ok(total),
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }

    /// Copies packets into the pieces behind `skip` bytes; the receiving half is held.
    ///
    /// # Safety
    ///
    /// As for [`Connection::receive`].
    unsafe fn take(
        &self,
        fd: RawFd,
        pieces: &[libc::iovec],
        skip: usize,
        wanted: usize,
        peek: bool,
    ) -> Result<Step, Corrupt> {
        let (channel, receiving) = (&self.channel, self.channel.receiving());
        let packets = channel.packets(Direction::ToProgram);
        if receiving.shut.load(Ordering::Relaxed) != 0 {
            return Ok(Step::End);
        }
        let mut cursor = Cursor::new(pieces, skip);
        let (mut count, room) = (0, wanted - skip);
        let mut offset =
            usize::try_from(receiving.offset.load(Ordering::Relaxed)).map_err(|_| Corrupt)?;
        while count < room {
            let mut numbers = [0; BATCH];
            let found = packets.look(&mut numbers)?;
            if found == 0 {
                break;
            }
            let position = channel.taken(Direction::ToProgram);
            // A small packet comes with the position that tells of it.
            let copied =
                if found == 1 { channel.copied(Direction::ToProgram, position) } else { None };
            let (mut done, mut ranges) = (0, false);
            for &number in &numbers[..found] {
                let (from, length) = if let Some((header, words)) = &copied {
                    (NonNull::from(&words[1..]).cast(), header.payload_bytes())
                } else {
                    let piece = self.piece(fd, number).map_err(|_| Corrupt)?;
                    ranges |= piece.0 != channel.payload(Direction::ToProgram, number);
                    piece
                };
                if offset >= length {
                    return Err(Corrupt);
                }
                while offset < length
                    && let Some((place, left)) = cursor.place()
                {
                    let part = left.min(length - offset);
                    // SAFETY: `offset` is below the length, which fits the block or the extent.
                    let source = unsafe { from.add(offset) };
                    // SAFETY: the source as above, the target by the caller's contract.
                    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), place, part) };
                    cursor.within += part;
                    offset += part;
                    count += part;
                }
                if offset < length {
                    break;
                }
                offset = 0;
                done += 1;
            }
            if peek {
                break;
            }
            receiving.offset.store(offset as u64, Ordering::Relaxed);
            packets.release(&numbers[..done])?;
            if ranges && done > 0 {
                // Their writer waits for ranges rather than for blocks.
                self.published(fd);
            }
            if done < found {
                break;
            }
        }
        if count > 0 {
            tally(&self.copied[0], count);
            return Ok(Step::Bytes(count));
        }
        let reset = channel.proxy().reset.load(Ordering::Acquire) != 0;
        // Acquire: what came before the end is in the queue.
        if self.is_over() && (reset || packets.filled().is_empty()) {
            return Ok(Step::End);
        }
        Ok(Step::Nothing)
    }

    /// Bytes of a packet's payload, or of the range that it tells of.
    fn length_of(&self, number: u32) -> usize {
        let word = self.channel.header(Direction::ToProgram, number).load(Ordering::Relaxed);
        match Header::decode(word, self.channel.shape().block_bytes) {
            Ok(Some(header)) if header.kind == PacketKind::Data => header.payload_bytes(),
            Ok(Some(header)) if header.kind == PacketKind::Extent => {
                let payload = self.channel.payload(Direction::ToProgram, number);
                // SAFETY: a block's payload has room for two words.
                let [_, length] = unsafe { payload.cast::<[u64; 2]>().as_ptr().read_unaligned() };
                usize::try_from(length).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// Blocks went back: a watched placeholder says so if all were read, and the proxy hears of
    /// credits that its peer may wait for.
    fn after_receiving(&self, fd: RawFd) {
        if self.channel.program().watched.load(Ordering::Relaxed) != 0 && !self.has_packets() {
            self.settle(fd);
        }
        let credited = self.channel.proxy().credited.load(Ordering::Relaxed);
        let due = self.channel.taken(Direction::ToProgram).wrapping_sub(credited) as usize;
        if due >= self.channel.shape().blocks / 4 {
            self.published(fd);
        }
    }

    /// A call that does not wait found nothing.
    fn look_again(&self, fd: RawFd) -> Result<(), Errno> {
        self.settle(fd);
        if self.is_readable() { Ok(()) } else { Err(Errno(libc::EAGAIN)) }
    }

    /// Looks until `ready` says so, or it is time to sleep.
    fn look(&self, ready: impl FnMut() -> bool) -> bool {
        match self.patience.try_lock() {
            Ok(mut patience) => patience.wait(ready),
            Err(_) => Patience::new(LOOKS[0]).wait(ready),
        }
    }

    fn learn(&self, slept: Duration) {
        if let Ok(mut patience) = self.patience.try_lock() {
            patience.slept(slept, LOOKS);
        }
    }

    /// For [`super::blocks`]: waits until there may be a packet, or an end. `slept` is as in `wait_readable`.
    pub(super) fn await_packets(
        &self,
        fd: RawFd,
        slept: &mut Option<Instant>,
    ) -> Result<(), Errno> {
        if self.blocks(fd) { self.wait_readable(fd, slept) } else { self.look_again(fd) }
    }

    /// Waits until there may be something to read. `slept`: since when the program's call has slept for want of bytes:
    /// it has its time once, however often it wakes for nothing.
    fn wait_readable(&self, fd: RawFd, slept: &mut Option<Instant>) -> Result<(), Errno> {
        if self.look(|| self.is_readable()) {
            return Ok(());
        }
        let _asleep = self.sleepers.enter();
        self.settle(fd);
        if self.is_readable() {
            return Ok(());
        }
        let began = Instant::now();
        let outcome = match slept.replace(slept.unwrap_or(began)) {
            // The kernel's rules for time-outs and signals.
            None => kernel::receive(fd, &mut [0], libc::MSG_PEEK),
            Some(since) => await_ring_again(fd, since),
        };
        self.learn(began.elapsed());
        match outcome {
            Ok(0) | Err(Errno(libc::ECONNRESET | libc::ENOTCONN)) => {
                if !self.is_readable() {
                    self.is_gone.store(true, Ordering::Relaxed);
                }
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends as `sendmsg` would.
    ///
    /// Errors: `errno` as the kernel's sockets have it.
    ///
    /// # Safety
    ///
    /// Each piece is readable memory of the program's.
    pub unsafe fn send(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        if flags & libc::MSG_OOB != 0 {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let wanted = room(pieces);
        let waits = || flags & libc::MSG_DONTWAIT == 0 && self.blocks(fd);
        let (mut total, mut slept) = (0, None);
        loop {
            if let Some(error) = self.refusal() {
                if total > 0 {
                    return Ok(total);
                }
                if error == Errno(libc::EPIPE) && flags & libc::MSG_NOSIGNAL == 0 {
                    kernel::raise(libc::SIGPIPE);
                }
                return Err(error);
            }
            let longest = || call_time(fd, waits(), libc::SO_SNDTIMEO);
            let held = hold_within(&self.channel.sending().holder, &self.sleepers, longest)?;
            // SAFETY: the caller's contract.
            let filled = unsafe { self.fill(pieces, total, wanted) };
            drop(held);
            let count = filled.map_err(|Corrupt| self.corrupt(fd))?;
            if count > 0 {
                self.published(fd);
                slept = None;
            }
            total += count;
            if total == wanted {
                return Ok(total);
            }
            let outcome = if waits() { self.wait_room(fd, &mut slept) } else { self.want_room(fd) };
            match outcome {
                Ok(()) => {}
                Err(_) if total > 0 => return Ok(total),
                Err(error) => return Err(error),
            }
        }
    }

    /// Why nothing can be sent, if so.
    pub(super) fn refusal(&self) -> Option<Errno> {
        if self.channel.program().finished.load(Ordering::Relaxed) != 0 {
            return Some(Errno(libc::EPIPE));
        }
        if self.channel.proxy().reset.load(Ordering::Acquire) != 0
            || self.is_gone.load(Ordering::Relaxed)
        {
            return Some(self.take_error().unwrap_or(Errno(libc::EPIPE)));
        }
        None
    }

    /// Fills free blocks from the pieces behind `skip` bytes, a batch with one update; the sending
    /// half is held.
    ///
    /// # Safety
    ///
    /// As for [`Connection::send`].
    unsafe fn fill(
        &self,
        pieces: &[libc::iovec],
        skip: usize,
        wanted: usize,
    ) -> Result<usize, Corrupt> {
        let channel = &self.channel;
        let packets = channel.packets(Direction::ToProxy);
        let (most, mut cursor) = (channel.payload_bytes(), Cursor::new(pieces, skip));
        let mut total = skip;
        while total < wanted {
            let mut numbers = [0; BATCH];
            let needed = (wanted - total).div_ceil(most).min(BATCH);
            let taken = packets.take(&mut numbers[..needed])?;
            if taken == 0 {
                break;
            }
            for &number in &numbers[..taken] {
                let mut length = 0;
                while length < most
                    && let Some((place, left)) = cursor.place()
                {
                    let part = left.min(most - length);
                    // SAFETY: below the most that the block's payload holds.
                    let target = unsafe { channel.payload(Direction::ToProxy, number).add(length) };
                    // SAFETY: the target as above, the source by the caller's contract.
                    unsafe { std::ptr::copy_nonoverlapping(place, target.as_ptr(), part) };
                    cursor.within += part;
                    length += part;
                }
                total += length;
                let whole = u16::try_from(length + HEADER_BYTES).map_err(|_| Corrupt)?;
                let header = Header {
                    source: 0,
                    destination: 0,
                    length: whole,
                    sync: false,
                    kind: PacketKind::Data,
                };
                channel
                    .header(Direction::ToProxy, number)
                    .store(header.encode(), Ordering::Relaxed);
            }
            channel.publish(Direction::ToProxy, &numbers[..taken])?;
        }
        tally(&self.copied[1], total - skip);
        Ok(total - skip)
    }

    /// Has the kernel say that there is no room, until there is.
    fn want_room(&self, fd: RawFd) -> Result<(), Errno> {
        let wanted = &self.channel.program().room_wanted;
        // The filler of a wish that stands already may be gone: a proxy that was emptying the placeholder when the
        // wish was said took it along. Without one no room that comes would be told.
        let stood = wanted.swap(1, Ordering::SeqCst) != 0;
        if !stood || !self.has_room() && Self::is_said_writable(fd) {
            let _ = kernel::send(fd, &[0; FILLER_BYTES], QUIET);
        }
        // Against the fence between the proxy's giving blocks back and its look at the word.
        fence(Ordering::SeqCst);
        if self.has_room() || self.refusal_is_near() { Ok(()) } else { Err(Errno(libc::EAGAIN)) }
    }

    /// The kernel's view of the placeholder.
    fn is_said_writable(fd: RawFd) -> bool {
        kernel::poll_one(fd, libc::POLLOUT, 0).is_ok_and(|bits| bits & libc::POLLOUT != 0)
    }

    fn refusal_is_near(&self) -> bool {
        self.channel.proxy().reset.load(Ordering::Acquire) != 0
            || self.is_gone.load(Ordering::Relaxed)
    }

    /// Waits until there may be room. `slept` is as in `wait_readable`.
    fn wait_room(&self, fd: RawFd, slept: &mut Option<Instant>) -> Result<(), Errno> {
        if self.look(|| self.has_room() || self.refusal_is_near()) {
            return Ok(());
        }
        let _asleep = self.sleepers.enter();
        if self.want_room(fd).is_ok() {
            return Ok(());
        }
        let since = *slept.get_or_insert_with(Instant::now);
        let milliseconds = left_ms(fd, libc::SO_SNDTIMEO, since)?;
        let bits = kernel::poll_one(fd, libc::POLLOUT, milliseconds)?;
        if bits & (libc::POLLHUP | libc::POLLERR) != 0 && !self.has_room() {
            self.is_gone.store(true, Ordering::Relaxed);
        }
        if bits == 0 { Err(Errno(libc::EAGAIN)) } else { Ok(()) }
    }

    /// The proxy wrote nonsense.
    fn corrupt(&self, fd: RawFd) -> Errno {
        self.channel.program().abort.store(1, Ordering::Relaxed);
        self.is_gone.store(true, Ordering::Relaxed);
        let _ = kernel::shutdown(fd, libc::SHUT_RDWR);
        self.reset_told.store(true, Ordering::Relaxed);
        Errno(libc::ECONNRESET)
    }

    /// `shutdown`.
    ///
    /// Errors: `EINVAL`.
    pub fn shutdown(&self, fd: RawFd, how: i32) -> Outcome {
        if !matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR) {
            return Err(Errno(libc::EINVAL));
        }
        if how != libc::SHUT_RD {
            let held = hold_within(&self.channel.sending().holder, &self.sleepers, || None)?;
            // Release: what was sent before is in the queue.
            self.channel.program().finished.store(1, Ordering::Release);
            drop(held);
            self.poke(fd);
        }
        if how != libc::SHUT_WR {
            self.channel.receiving().shut.store(1, Ordering::SeqCst);
            let _ = kernel::shutdown(fd, libc::SHUT_RD);
        }
        Ok(0)
    }

    /// For [`super::blocks`]: a free block, or the wish for one.
    pub(super) fn take_block(&self, fd: RawFd) -> Result<Option<u32>, Errno> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        loop {
            let held = hold_within(&self.channel.sending().holder, &self.sleepers, || None)?;
            let mut numbers = [0; 1];
            let taken = self.channel.packets(Direction::ToProxy).take(&mut numbers);
            drop(held);
            if taken.map_err(super::blocks::reset)? == 1 {
                return Ok(Some(numbers[0]));
            }
            if self.want_room(fd).is_err() {
                return Ok(None);
            }
        }
    }

    /// For [`super::blocks`]: publishes a block that was filled. Its position in the queue, counted round.
    pub(super) fn publish_block(&self, fd: RawFd, number: u32) -> Result<u32, Errno> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let held = hold_within(&self.channel.sending().holder, &self.sleepers, || None)?;
        let position = self.channel.packets(Direction::ToProxy).filled().put();
        let outcome = self.channel.publish(Direction::ToProxy, &[number]);
        drop(held);
        self.published(fd);
        outcome.map(|()| position).map_err(super::blocks::reset)
    }

    /// For [`super::blocks`]: the packet at the head.
    pub(super) fn first_block(&self, fd: RawFd) -> Result<Option<super::blocks::First>, Errno> {
        let packets = self.channel.packets(Direction::ToProgram);
        for _ in 0..2 {
            let mut numbers = [0; 1];
            if packets.look(&mut numbers).map_err(super::blocks::reset)? == 1 {
                let (from, length) = self.piece(fd, numbers[0])?;
                let offset = self.channel.receiving().offset.load(Ordering::Relaxed);
                let offset = usize::try_from(offset).unwrap_or(usize::MAX);
                let whole = offset < length;
                return if whole {
                    Ok(Some((numbers[0], from, offset, length)))
                } else {
                    Err(self.corrupt(fd))
                };
            }
            if self.is_over() && packets.filled().is_empty() {
                return Err(self.take_error().unwrap_or(Errno(libc::ENODATA)));
            }
            // The kernel's view says from then on that there is something to read: the end.
            if self.channel.receiving().shut.load(Ordering::Relaxed) != 0 {
                return Err(Errno(libc::ENODATA));
            }
            self.settle(fd);
        }
        Ok(None)
    }

    /// For [`super::blocks`]: the packet at the head was read.
    pub(super) fn release_block(&self, fd: RawFd, number: u32) -> Result<(), Errno> {
        let word = self.channel.header(Direction::ToProgram, number).load(Ordering::Relaxed);
        let direct = matches!(
            Header::decode(word, self.channel.shape().block_bytes),
            Ok(Some(Header { kind: PacketKind::Extent, .. }))
        );
        let held = hold_within(&self.channel.receiving().holder, &self.sleepers, || None)?;
        self.channel.receiving().offset.store(0, Ordering::Relaxed);
        let outcome = self.channel.packets(Direction::ToProgram).release(&[number]);
        drop(held);
        self.after_receiving(fd);
        if direct {
            // Its writer waits for the range rather than for a block.
            self.published(fd);
        }
        outcome.map_err(super::blocks::reset)
    }

    /// Bytes that can be read now.
    #[must_use]
    pub fn unread(&self) -> usize {
        let packets = self.channel.packets(Direction::ToProgram);
        let mut numbers = [0; 1 << 10];
        let found = packets.look(&mut numbers).unwrap_or(0);
        let lengths = numbers[..found].iter().map(|&number| self.length_of(number));
        let offset = usize::try_from(self.channel.receiving().offset.load(Ordering::Relaxed));
        lengths.sum::<usize>().saturating_sub(offset.unwrap_or(0))
    }
}
