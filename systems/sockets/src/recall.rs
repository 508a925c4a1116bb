//! The way back: a connection leaves its rings and is the kernel's stream again, at a told byte, so
//! that what moves programs (a checkpoint that carries TCP connections) can move it, and its ends may
//! [ask anew](crate::anew) afterwards.
//!
//! ```text
//! kernel's stream of a direction:  | bytes | doorbells .......... | bytes
//!                                          ^ switched_at          ^ returned_at
//! ring:                                    | messages, to the last one |
//! ```
//!
//! Who calls it back is neither end, but somebody who has both sockets and the segment: the ends may be
//! asleep, or kept from running. He takes the four halves (so that nobody sends or receives), shuts the
//! doorbells of both ends (`at_bells`: nobody rings or swallows), rings once for each end, and only then
//! asks the kernel how many bytes each end has given and taken. What it says is exact, whoever was
//! killed before, and goes into both ends' words; then the halves are let go. A reader takes what is
//! left before the switch, the ring to its last message, skips the doorbells, and goes on in the
//! kernel's stream. A sleeper was woken by the last doorbell, and looks. Who sleeps for room would sleep on
//! if another thread skipped that doorbell first: bytes that are to come wake readers, and nothing wakes him.
//! So he is counted (`for_room`), and the doorbells stay until he has left:
//!
//! ```text
//! sleeps for room:  for_room += 1; fence; returned? no: sleeps while the kernel's stream is empty
//! skips doorbells:  returned; fence; for_room? not 0: leaves them where they are, and waits
//! ```
//!
//! Between hosts nobody has both sockets: each relay does this for its own end, after both have
//! carried everything, and they tell each other the two numbers.
//!
//! Invariants:
//! - `returned_at` of both ends is stored, and then by one store the state that makes them count, while all
//!   halves are held and no bell is under way: nobody takes a doorbell for a byte, nor a byte for a
//!   doorbell, also if who calls it back is killed;
//! - afterwards nothing is put into either ring, and no doorbell is sent or swallowed for this segment;
//! - from then on each end counts what it gives to the kernel and takes from it (`by_kernel`), doorbells
//!   included: a socket that was restored elsewhere counts from 0 again, these words do not;
//! - whoever cannot be waited for leaves the connection as it was: then this fails, and says who it was.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::holder::{self, Signed, is_held_by_another};
use crate::kernel::{self, Errno, Life};
use crate::relayed;
use crate::segment::{
    End, STATE_GIVEN_UP, STATE_OPEN, STATE_PAIRED, STATE_RETURNED, Segment, Sharing,
};

/// Longest wait for who works on a half or rings.
const PATIENCE: Duration = Duration::from_secs(1);
/// And at least so many looks, a millisecond apart: while a machine stood still, and its clock went on, nobody
/// came to an end.
const LEAST_LOOKS: u32 = 200;
/// Longest wait for who calls a connection back: he takes no longer, whatever the words say. Relays wait so
/// long for each other.
const LONGEST: Duration = Duration::from_secs(10);

/// What became of the doorbells that lie before the program's next byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bells {
    /// There are none.
    Passed,
    /// Some are told of that have not come yet.
    ToCome,
    /// Somebody sleeps for room, and they are to wake him: [`Connection::let_room_be_heard_of`].
    Needed,
}

/// A thread that sleeps for room, until it is dropped.
#[derive(Debug)]
pub(crate) struct ForRoom<'a>(&'a AtomicU32);

impl Drop for ForRoom<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Doorbells that are skipped in one call.
const MOST_BELLS: usize = 1 << 20;

/// Of `at_bells`: nobody rings or swallows any more, and how often that was said. The lower
/// half counts those who do.
const NO_BELLS: u32 = 1 << 31;
const SAID: u32 = 1 << 16;
const SAID_ALL: u32 = NO_BELLS - SAID;

/// A thread that rings or swallows, until it is dropped.
///
/// It is counted, and while it is, its number stands in a place of [`Sharing::ringing`], if one is free. So
/// every number there is one that is counted, whoever is killed when: it comes after the counting, and goes
/// before the end of that.
#[derive(Debug)]
pub struct AtBells<'a> {
    count: &'a AtomicU32,
    signed: Option<Signed<'a>>,
}

impl<'a> AtBells<'a> {
    /// Counts the calling thread; and what was said before.
    fn new(sharing: &'a Sharing) -> (Self, u32) {
        let count = &sharing.at_bells;
        // Acquire with the Release in `go_on`.
        let before = count.fetch_add(1, Ordering::AcqRel);
        let rings = before & NO_BELLS == 0;
        let signed = if rings { sharing.ringing.iter().find_map(Signed::new) } else { None };
        (Self { count, signed }, before)
    }
}

impl Drop for AtBells<'_> {
    fn drop(&mut self) {
        // Not counted any more by who does not see this thread, or in the child that a handler made.
        if self.signed.take().is_none_or(Signed::take_down) {
            // Release with the Acquire in `still`: what was rung is in the kernel's count.
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}

impl Sharing {
    /// Of those that `at_bells` counts, takes out who is dead: what he did is in the kernel's count. He is not
    /// known where he died between two steps: counted and not signed yet, or not any more.
    fn bury_ringers(&self) {
        for word in &self.ringing {
            let thread = word.load(Ordering::Acquire);
            if thread != 0 && holder::life_of(thread) == Life::Over {
                self.bury(word, thread);
            }
        }
    }

    fn bury(&self, word: &AtomicU32, thread: u32) {
        if holder::take_down(word, thread) {
            self.at_bells.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl End {
    /// Sees to it that nobody works on this end and nobody rings for it, without waiting. [`End::go_on`],
    /// or [`leave_to_kernel`] and [`End::let_go`], follow.
    ///
    /// Errors: [`NotRecalled::Busy`], [`NotRecalled::Ringing`]; nothing is changed then.
    pub fn still(&self) -> Result<(), NotRecalled> {
        let busy = |holder| NotRecalled::Busy(holder::number_of(holder));
        holder::take(&self.receiving.holder).map_err(busy)?;
        if let Err(holder) = holder::take(&self.sending.holder) {
            holder::leave(&self.receiving.holder);
            return Err(busy(holder));
        }
        let says = |now: u32| {
            let said = (now & SAID_ALL).wrapping_add(SAID) & SAID_ALL;
            Some(now & !SAID_ALL | said | NO_BELLS)
        };
        // Acquire with the Release in `AtBells::drop`.
        let before = self.sharing.at_bells.fetch_update(Ordering::AcqRel, Ordering::Acquire, says);
        if before.is_ok_and(|before| before & (SAID - 1) == 0) {
            return Ok(());
        }
        self.sharing.bury_ringers();
        // Acquire as above.
        if self.sharing.at_bells.load(Ordering::Acquire) & (SAID - 1) == 0 {
            return Ok(());
        }
        self.go_on();
        Err(NotRecalled::Ringing)
    }

    /// At the beginning of a program: the calling thread works on no half and does not ring. One that was ended
    /// by another one's `exec` may have, and that one has its number now.
    pub(crate) fn begin_with_thread(&self) {
        let me = holder::thread();
        holder::take_down(&self.receiving.holder, me);
        holder::take_down(&self.sending.holder, me);
        self.sharing.ringing.iter().for_each(|word| self.sharing.bury(word, me));
    }

    /// The end goes on as before [`End::still`].
    pub fn go_on(&self) {
        self.sharing.at_bells.fetch_and(!NO_BELLS, Ordering::Release);
        holder::leave(&self.sending.holder);
        holder::leave(&self.receiving.holder);
    }

    /// What this end has given to the kernel and taken from it, by the count that both ends share.
    fn moved(&self, socket: RawFd) -> Option<(u64, u64)> {
        if self.sharing.is_anew.load(Ordering::Relaxed) == 0 {
            return kernel::moved(socket);
        }
        let (sent, taken) = kernel::counted(socket)?;
        let [given, got] = &self.sharing.origins;
        Some((
            sent.wrapping_add(given.load(Ordering::Relaxed)),
            taken.wrapping_add(got.load(Ordering::Relaxed)),
        ))
    }

    /// The end switches if it has not, so that it can ring: who never sent may be waited for by who wants
    /// room. One that shut its side of the kernel's stream before cannot. The end is [still](End::still).
    pub fn switch(&self) {
        let signs = &self.signs;
        if signs.switched_at.load(Ordering::Relaxed) == 0 && signs.mute.load(Ordering::Relaxed) == 0
        {
            let sent = self.sending.by_kernel.load(Ordering::Relaxed);
            // As in `sends_by_ring`.
            signs.switched_at.store(sent.saturating_add(1), Ordering::Release);
        }
    }

    /// Wakes whoever sleeps at the other end: it is the last doorbell. The end is [still](End::still).
    pub fn ring_once(&self, socket: BorrowedFd<'_>) {
        if self.signs.switched_at.load(Ordering::Relaxed) != 0 {
            // A full socket holds unread bytes, which wake just as well.
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            let _ = kernel::send(socket.as_raw_fd(), &[0], flags);
        }
    }

    /// Counts what went through the kernel so far, while the end is [still](End::still).
    ///
    /// Errors: [`NotRecalled::Unclear`].
    pub fn count(&self, socket: BorrowedFd<'_>) -> Result<Counted, NotRecalled> {
        let (sent, taken) = self.moved(socket.as_raw_fd()).ok_or(NotRecalled::Unclear)?;
        let switched = self.signs.switched_at.load(Ordering::Relaxed);
        let bytes = self.sending.by_kernel.load(Ordering::Relaxed);
        // Who has not switched has rung for nobody.
        let sane = if switched == 0 { sent == bytes } else { sent >= switched - 1 };
        // A socket that was restored counts from 0.
        let sane = sane && taken >= self.receiving.by_kernel.load(Ordering::Relaxed);
        if sane { Ok(Counted { sent, taken }) } else { Err(NotRecalled::Unclear) }
    }

    /// Notes what holds once the connection is [left to the kernel](leave_to_kernel).
    fn prepare(&self, counted: Counted, hold: Hold) {
        let Counted { sent, taken } = counted;
        self.sending.by_kernel.store(sent, Ordering::Relaxed);
        self.receiving.by_kernel.store(taken, Ordering::Relaxed);
        self.sharing.hold_ns.store(hold.encode(), Ordering::Relaxed);
        self.signs.returned_at.store(sent.saturating_add(1), Ordering::Relaxed);
    }

    /// What was a word so far is the kernel's to say now: the end's `shutdown`s. After [`End::count`], and
    /// before the connection is [left to the kernel](leave_to_kernel), so that nobody who is killed in between
    /// leaves a reader to wait for an end: until it is, this is an end that sends no doorbells any more.
    pub fn tell_kernel(&self, socket: BorrowedFd<'_>) {
        let finished = self.signs.finished.load(Ordering::Relaxed) != 0;
        if finished && self.signs.mute.load(Ordering::Relaxed) == 0 {
            // Release with the Acquire in `is_other_mute`: said before the kernel says it.
            self.signs.mute.store(1, Ordering::Release);
            let _ = kernel::shutdown(socket.as_raw_fd(), libc::SHUT_WR);
        }
        if self.receiving.shut.load(Ordering::Relaxed) != 0 {
            let _ = kernel::shutdown(socket.as_raw_fd(), libc::SHUT_RD);
        }
    }

    /// After the connection was [left to the kernel](leave_to_kernel): whoever wants to may go on.
    pub fn let_go(&self) {
        holder::leave(&self.sending.holder);
        holder::leave(&self.receiving.holder);
    }
}

/// The connection is the kernel's from here on: `ends` are still (or nobody's but the caller's), with what
/// was counted for each, and the time for which it asks for nothing else. One store decides it: a caller
/// who is killed before it has changed nothing that counts.
pub fn leave_to_kernel(segment: &Segment, ends: [(&End, Counted, Hold); 2]) {
    for (end, counted, hold) in ends {
        end.prepare(counted, hold);
    }
    // Release with the Acquire in `is_returned` and `left_in_ring`.
    segment.state().store(STATE_RETURNED, Ordering::Release);
}

/// Why a connection was not brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotRecalled {
    /// Its ends never left the kernel's stream, or went back before.
    #[error("it is the kernel's already")]
    Kernels,
    /// An end was closed.
    #[error("an end of it was closed")]
    Closed,
    /// A thread worked on it all the while: it is stopped, or was killed without a trace.
    #[error("thread {0} works on it and does not come to an end; let it run, or try again")]
    Busy(u32),
    /// Somebody was stopped while ringing, or killed where that leaves no trace.
    #[error(
        "a thread was stopped while it sent a doorbell, or killed at its edge; let it run, or try again"
    )]
    Ringing,
    /// The kernel does not say how many bytes went through it, or its count cannot be.
    #[error("the kernel does not tell how many bytes it has carried: a connection half over")]
    Unclear,
}

/// An end that is [still](End::still), until it is dropped or left to the kernel.
struct Still<'a>(Option<&'a End>);

impl<'a> Still<'a> {
    /// Waits for who works on `end` of `segment`, until `until` or for [`LEAST_LOOKS`], whichever is later.
    fn new(segment: &Segment, end: &'a End, until: Instant) -> Result<Self, NotRecalled> {
        let mut looks = 0;
        loop {
            looks += 1;
            // Somebody else may have called it back meanwhile.
            if segment.state().load(Ordering::Acquire) != STATE_PAIRED {
                return Err(NotRecalled::Kernels);
            }
            match end.still() {
                Ok(()) => return Ok(Self(Some(end))),
                Err(why) if looks >= LEAST_LOOKS && Instant::now() >= until => return Err(why),
                Err(_) => _ = kernel::pause(1),
            }
        }
    }

    fn let_go(mut self) {
        if let Some(end) = self.0.take() {
            end.let_go();
        }
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        if let Some(end) = self.0 {
            end.go_on();
        }
    }
}

/// Bytes that an end has given to the kernel and taken from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Given.
    pub sent: u64,
    /// Taken.
    pub taken: u64,
}

/// For how long an end does not [ask anew](crate::anew).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    /// So long.
    pub time: Duration,
    /// Or until what passes is not [small](crate::anew) any more.
    pub while_small: bool,
}

/// Of [`Sharing::hold_ns`]: [`Hold::while_small`].
const WHILE_SMALL: u64 = 1 << 63;

impl From<Duration> for Hold {
    fn from(time: Duration) -> Self {
        Self { time, while_small: false }
    }
}

impl Hold {
    /// Both hold.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let while_small = self.while_small && other.while_small;
        Self { time: self.time.max(other.time), while_small }
    }

    /// As a segment has it: never 0, unless it is over at once.
    fn encode(self) -> u64 {
        let ns = u64::try_from(self.time.as_nanos()).unwrap_or(u64::MAX).min(WHILE_SMALL - 1);
        if ns != 0 && self.while_small { ns | WHILE_SMALL } else { ns }
    }

    pub(crate) fn decode(word: u64) -> Self {
        let time = Duration::from_nanos(word & !WHILE_SMALL);
        Self { time, while_small: word & WHILE_SMALL != 0 }
    }
}

/// Brings a connection inside a host back to the kernel: `segment` as one end has it, and the sockets of
/// that end and of the other. Neither asks anew for its time of `hold`, unless its socket is another by
/// then.
///
/// The caller's threads and those of both ends have to have numbers that each can see.
///
/// Errors: [`NotRecalled`]; the connection goes on as it was.
pub fn recall(
    segment: &Segment,
    sockets: [BorrowedFd<'_>; 2],
    hold: [Duration; 2],
) -> Result<(), NotRecalled> {
    let ends = [segment.own(), segment.other()];
    let until = Instant::now() + PATIENCE;
    let still = |end| Still::new(segment, ends[end], until);
    // Side 0 first, whoever's own it is: of two callers at once neither holds what the other waits for.
    let side = segment.side();
    let stills = [still(side)?, still(1 - side)?];
    // Somebody else may have called it back before the last was still.
    if segment.state().load(Ordering::Acquire) != STATE_PAIRED {
        return Err(NotRecalled::Kernels);
    }
    if ends.iter().any(|end| end.signs.closed.load(Ordering::Acquire) != 0) {
        return Err(NotRecalled::Closed);
    }
    for (end, socket) in ends.iter().zip(&sockets) {
        end.switch();
        end.ring_once(*socket);
    }
    let counted = [ends[0].count(sockets[0])?, ends[1].count(sockets[1])?];
    if counted[0].taken > counted[1].sent || counted[1].taken > counted[0].sent {
        return Err(NotRecalled::Unclear);
    }
    ends.iter().zip(&sockets).for_each(|(end, socket)| end.tell_kernel(*socket));
    let both = [0, 1].map(|end| (ends[end], counted[end], hold[end].into()));
    leave_to_kernel(segment, both);
    stills.into_iter().for_each(Still::let_go);
    Ok(())
}

/// Leaves an end that waits for its other end to the kernel, so that it is not accelerated later; it asks
/// again after its time of `hold` at the earliest, if at all. False when it does not wait.
#[must_use]
pub fn stop_waiting(segment: &Segment, hold: Duration) -> bool {
    segment.own().sharing.hold_ns.store(Hold::from(hold).encode(), Ordering::Relaxed);
    // Release with the Acquire of whoever finds that it gave up.
    let stops = segment.state().compare_exchange(
        STATE_OPEN,
        STATE_GIVEN_UP,
        Ordering::AcqRel,
        Ordering::Acquire,
    );
    if stops.is_ok()
        && let Some(name) = segment.relayed()
    {
        // A relay that does not hear of it looks every now and then.
        let _ = relayed::ring(name);
    }
    stops.is_ok()
}

impl Connection {
    /// The connection went [back](crate::recall) to the kernel. What was in the ring may still be there.
    #[inline]
    #[must_use]
    pub fn is_returned(&self) -> bool {
        self.segment.own().signs.returned_at.load(Ordering::Relaxed) != 0
            && self.is_left_to_kernel()
    }

    /// It went back, and everything in the ring was read: the kernel has what follows.
    #[inline]
    pub(crate) fn is_behind_ring(&self) -> bool {
        self.is_returned() && self.kernel_bytes_left() == Some(u64::MAX)
    }

    /// That it did was decided.
    #[cold]
    fn is_left_to_kernel(&self) -> bool {
        // Acquire with the Release in `leave_to_kernel`.
        self.segment.state().load(Ordering::Acquire) == STATE_RETURNED
    }

    /// Before a doorbell is sent or swallowed. `None` when there are none any more. While somebody calls
    /// the connection back it waits, since he may not succeed; unless not `waits`, for who holds a set's
    /// lock: then nothing is rung or swallowed now.
    #[must_use]
    pub fn go_to_bells(&self, waits: bool) -> Option<AtBells<'_>> {
        let (mut since, mut asleep) = (None, None);
        loop {
            let (at_bells, before) = AtBells::new(&self.segment.own().sharing);
            if before & NO_BELLS == 0 {
                // Let go of by one who came too late to call it back: there are none all the same.
                return (!self.is_returned()).then_some(at_bells);
            }
            drop(at_bells);
            // Once: whoever did not come to an end by then is no caller.
            let waits = waits && !self.recall_was_waited_for.load(Ordering::Relaxed);
            if waits {
                // For longer than a call takes.
                asleep.get_or_insert_with(|| self.sleepers.enter());
            }
            let since = *since.get_or_insert_with(Instant::now);
            if !self.waits_for_recall(waits) {
                return None;
            }
            if since.elapsed() > LONGEST {
                self.recall_was_waited_for.store(true, Ordering::Relaxed);
                return None;
            }
        }
    }

    /// Waits a little for who calls the connection back; if he is gone, makes good what he left. False
    /// when he has succeeded, or is not waited for.
    #[cold]
    fn waits_for_recall(&self, waits: bool) -> bool {
        let own = self.segment.own();
        let said = own.sharing.at_bells.load(Ordering::Acquire);
        // He holds both halves from before he says it until after he said how it ended.
        let holders = [&own.receiving.holder, &own.sending.holder];
        let [receiving, sending] = holders.map(|holder| holder.load(Ordering::Acquire));
        if self.is_returned() {
            return false;
        }
        if receiving == sending && is_held_by_another(receiving) {
            if !waits {
                return false;
            }
            let _ = kernel::pause(1);
        } else if said & NO_BELLS != 0 {
            // Not if another came to call it back meanwhile: then the number of times is another.
            let word = &own.sharing.at_bells;
            let lifts = |now: u32| {
                (now & (NO_BELLS | SAID_ALL) == said & (NO_BELLS | SAID_ALL))
                    .then_some(now & !NO_BELLS)
            };
            let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, lifts);
        }
        true
    }

    /// What `kernel_bytes_left` tells after the way back, when nothing before the switch is left.
    #[cold]
    pub(crate) fn left_in_ring(&self) -> Option<u64> {
        (self.is_left_to_kernel() && !self.segment.consumer().is_ready()).then_some(u64::MAX)
    }

    /// After the way back, what a reader of the kernel's stream finds there before the bytes that follow the
    /// ring's last: doorbells, and what was given to the kernel before the switch and is not read yet.
    #[cold]
    pub(crate) fn lies_before_last_bytes(&self) -> Option<u64> {
        let returned = self.segment.other().signs.returned_at.load(Ordering::Acquire);
        if returned == 0 || !self.is_returned() {
            return None;
        }
        let read = self.segment.own().receiving.by_kernel.load(Ordering::Relaxed);
        Some((returned - 1).saturating_sub(read))
    }

    /// Doorbells that lie between the ring's last byte and the next one of the kernel's.
    #[must_use]
    pub fn bells_left(&self) -> u64 {
        let other = &self.segment.other().signs;
        let returned = other.returned_at.load(Ordering::Acquire);
        if returned == 0 || !self.is_returned() || self.kernel_bytes_left() != Some(u64::MAX) {
            return 0;
        }
        let read = self.segment.own().receiving.by_kernel.load(Ordering::Relaxed);
        (returned - 1).saturating_sub(read)
    }

    /// The calling thread is about to sleep until there is room: before the fence behind which it looks
    /// whether there is any.
    pub(crate) fn sleeps_for_room(&self) -> ForRoom<'_> {
        let count = &self.segment.own().sharing.for_room;
        count.fetch_add(1, Ordering::SeqCst);
        ForRoom(count)
    }

    /// Doorbells have to stay for who sleeps for room.
    fn is_room_awaited(&self) -> bool {
        // With the fence of who sleeps: he sees that the connection went back, or is seen.
        fence(Ordering::SeqCst);
        self.segment.own().sharing.for_room.load(Ordering::SeqCst) != 0
            && !self.room_was_heard_of.load(Ordering::Relaxed)
    }

    /// Waits until those who sleep for room were woken by the doorbells that lie there and have left. Once:
    /// one that was stopped or killed keeps nobody from the bytes for longer.
    #[cold]
    pub(crate) fn let_room_be_heard_of(&self) {
        let _asleep = self.sleepers.enter();
        let since = Instant::now();
        while self.is_room_awaited() {
            let _ = kernel::pause(1);
            if since.elapsed() > PATIENCE {
                self.room_was_heard_of.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Skips the doorbells that lie before the program's next byte. The caller holds the receiving half, and
    /// no set's lock.
    ///
    /// Errors: the kernel's.
    pub(crate) fn skip_bells(&self, fd: RawFd) -> Result<Bells, Errno> {
        let before = self.bells_left();
        let outcome = self.skip_bells_quietly(fd);
        if self.bells_left() < before {
            // A set that waits for room, too.
            self.make_up_for_swallowed(fd);
        }
        outcome
    }

    /// As [`Connection::skip_bells`]; [`Connection::make_up_for_swallowed`] is the caller's.
    fn skip_bells_quietly(&self, fd: RawFd) -> Result<Bells, Errno> {
        let mut bells = [0; 64];
        // More there are not, unless somebody pours: then the next call goes on.
        for _ in 0..MOST_BELLS / bells.len() {
            let left = self.bells_left();
            if left == 0 || self.segment.other().signs.switched_at.load(Ordering::Relaxed) == 0 {
                return Ok(Bells::Passed);
            }
            if self.is_room_awaited() {
                // What is not there yet wakes nobody: it is not waited for.
                let lie = kernel::unread(fd) > 0;
                return Ok(if lie { Bells::Needed } else { Bells::ToCome });
            }
            let most = usize::try_from(left).unwrap_or(bells.len()).min(bells.len());
            match kernel::receive(fd, &mut bells[..most], libc::MSG_DONTWAIT) {
                // The end of the stream, sooner than told.
                Ok(0) => return Ok(Bells::Passed),
                Ok(count) => {
                    let read = &self.segment.own().receiving.by_kernel;
                    let before = read.load(Ordering::Relaxed);
                    read.store(before.saturating_add(count as u64), Ordering::Relaxed);
                }
                Err(Errno(libc::EAGAIN)) => return Ok(Bells::ToCome),
                Err(Errno(libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Bells::ToCome)
    }

    /// What the kernel says of readiness, told as `poll` bits, where doorbells lie before the program's
    /// bytes: they are no news. `told`: what it said just now when asked for `events`. `skipped` is told
    /// when some were, and has [`Connection::make_up_for_swallowed`] follow.
    pub(crate) fn without_bells(
        &self,
        fd: RawFd,
        told: i16,
        events: i16,
        skipped: impl FnOnce(),
    ) -> i16 {
        if self.segment.other().signs.returned_at.load(Ordering::Relaxed) == 0
            || told & libc::POLLIN == 0
            || self.bells_left() == 0
        {
            return told;
        }
        // The caller may hold a set's lock, and waits for nobody.
        let half = &self.segment.own().receiving.holder;
        if holder::take(half).is_err() {
            return told;
        }
        let outcome = self.skip_bells_quietly(fd);
        let only_bells = outcome == Ok(Bells::Needed)
            && u64::try_from(kernel::unread(fd)).is_ok_and(|unread| unread <= self.bells_left());
        holder::leave(half);
        skipped();
        match outcome {
            // They stay there, and wake the caller again.
            Ok(Bells::Needed) if only_bells => told & !(libc::POLLIN | libc::POLLRDNORM),
            Ok(Bells::Needed) | Err(_) => told,
            Ok(_) => kernel::poll_one(fd, events, 0).unwrap_or(told),
        }
    }
}

#[cfg(test)]
mod tests {
    use beeline_os::Mapping;

    use super::*;
    use crate::segment::length_bytes;

    fn segment() -> Segment {
        let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        Segment::take(mapping, 0).unwrap()
    }

    #[test]
    fn a_hold_comes_out_of_its_word_as_it_was() {
        let hour = Duration::from_secs(3600);
        for time in [Duration::ZERO, Duration::from_nanos(1), hour] {
            for while_small in [false, !time.is_zero()] {
                let hold = Hold { time, while_small };
                assert_eq!(Hold::decode(hold.encode()), hold);
            }
        }
        let endless = Hold::decode(Hold::from(Duration::MAX).encode());
        assert!(endless.time > hour && !endless.while_small);
    }

    #[test]
    fn what_a_thread_did_when_another_ones_exec_ended_it_is_over() {
        let segment = segment();
        let end = segment.own();
        holder::take(&end.receiving.holder).unwrap();
        holder::take(&end.sending.holder).unwrap();
        std::mem::forget(AtBells::new(&end.sharing));
        assert_eq!(end.still(), Err(NotRecalled::Busy(kernel::thread())));
        end.begin_with_thread();
        assert_eq!(end.still(), Ok(()));
    }

    #[test]
    fn time_that_passed_while_nobody_ran_is_none_that_a_holder_had() {
        let segment = segment();
        segment.state().store(STATE_PAIRED, Ordering::Release);
        let end = segment.own();
        let (held, holds) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                holder::take(&end.receiving.holder).unwrap();
                held.send(()).unwrap();
                let _ = kernel::pause(10);
                holder::leave(&end.receiving.holder);
            });
            holds.recv().unwrap();
            // As after a look that found it held, before the machine stood still.
            assert!(Still::new(&segment, end, Instant::now()).is_ok());
        });
    }

    #[test]
    fn each_of_the_dead_is_buried_once_and_the_living_stay_counted() {
        let segment = segment();
        let sharing = &segment.own().sharing;
        for _ in 0..3 {
            let dies = || std::mem::forget(AtBells::new(sharing));
            std::thread::scope(|scope| scope.spawn(dies).join().unwrap());
        }
        let (rings, _) = AtBells::new(sharing);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..1000).for_each(|_| sharing.bury_ringers()));
            }
        });
        assert_eq!(sharing.at_bells.load(Ordering::Relaxed), 1);
        assert_eq!(segment.own().still(), Err(NotRecalled::Ringing));
        drop(rings);
        assert_eq!(segment.own().still(), Ok(()));
    }
}
