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
//! kernel's stream. A sleeper was woken by the last doorbell, and looks.
//!
//! Between hosts nobody has both sockets: each relay does this for its own end, after both have
//! carried everything, and they tell each other the two numbers.
//!
//! Invariants:
//! - `returned_at` of both ends is stored while all halves are held and no bell is under way: nobody
//!   takes a doorbell for a byte, nor a byte for a doorbell;
//! - afterwards nothing is put into either ring, and no doorbell is sent or swallowed for this segment;
//! - from then on each end counts what it gives to the kernel and takes from it (`by_kernel`), doorbells
//!   included: a socket that was restored elsewhere counts from 0 again, these words do not;
//! - whoever cannot be waited for leaves the connection as it was: then this fails, and says who it was.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::holder::{Held, hold, hold_within};
use crate::kernel::{self, Errno};
use crate::segment::{End, STATE_PAIRED, Segment, Sharing};

/// Longest wait for who works on a half or rings.
const PATIENCE: Duration = Duration::from_secs(1);

/// Of [`Sharing::at_bells`]: nobody rings or swallows any more.
const NO_BELLS: u32 = 1 << 31;

/// A thread that rings or swallows, until it is dropped.
#[derive(Debug)]
pub struct AtBells<'a>(&'a Sharing);

impl Drop for AtBells<'_> {
    fn drop(&mut self) {
        // Release with the Acquire in `Stilled::new`: what was rung is in the kernel's count.
        self.0.at_bells.fetch_sub(1, Ordering::Release);
    }
}

impl Sharing {
    /// Before a doorbell is sent or swallowed. `None` when there are none any more.
    #[must_use]
    pub fn go_to_bells(&self) -> Option<AtBells<'_>> {
        let at_bells = AtBells(self);
        let before = self.at_bells.fetch_add(1, Ordering::AcqRel);
        (before & NO_BELLS == 0).then_some(at_bells)
    }
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
    /// Somebody was killed, or stopped, while ringing.
    #[error("a thread was stopped or killed while it sent a doorbell; let it run, or try again")]
    Ringing,
    /// The kernel does not say how many bytes went through it, or its count cannot be.
    #[error("the kernel does not tell how many bytes it has carried: a connection half over")]
    Unclear,
}

/// An end on which nobody works and for which nobody rings. Undone when dropped, unless
/// [`Still::leave`] was called.
#[derive(Debug)]
pub struct Still<'a> {
    end: &'a End,
    _receiving: Held<'a>,
    _sending: Held<'a>,
    left: bool,
}

impl<'a> Still<'a> {
    /// Takes both halves of `end` and shuts its doorbells, at the latest at `until`.
    ///
    /// Errors: [`NotRecalled::Busy`], [`NotRecalled::Ringing`].
    pub fn new(end: &'a End, until: Instant) -> Result<Self, NotRecalled> {
        // In the order of a reader that gives room back, and may take the other half to ring.
        let receiving = hold_within(&end.receiving.holder, until).map_err(NotRecalled::Busy)?;
        let sending = hold_within(&end.sending.holder, until).map_err(NotRecalled::Busy)?;
        end.sharing.at_bells.fetch_or(NO_BELLS, Ordering::AcqRel);
        let still = Self { end, _receiving: receiving, _sending: sending, left: false };
        // Acquire with the Release in `AtBells::drop`.
        while end.sharing.at_bells.load(Ordering::Acquire) != NO_BELLS {
            if Instant::now() >= until {
                return Err(NotRecalled::Ringing);
            }
            let _ = kernel::pause(1);
        }
        Ok(still)
    }

    /// What this end has given to the kernel and taken from it, by the count that both ends share.
    fn moved(&self, socket: RawFd) -> Option<(u64, u64)> {
        let sharing = &self.end.sharing;
        if sharing.is_anew.load(Ordering::Relaxed) == 0 {
            return kernel::moved(socket);
        }
        let (sent, taken) = kernel::counted(socket)?;
        let [given, got] = &sharing.origins;
        Some((
            sent.wrapping_add(given.load(Ordering::Relaxed)),
            taken.wrapping_add(got.load(Ordering::Relaxed)),
        ))
    }

    /// Wakes whoever sleeps at the other end: it is the last doorbell. Where this end has not switched,
    /// what it sends are bytes; nobody there sleeps for anything else.
    pub fn ring_once(&self, socket: RawFd) {
        let signs = &self.end.signs;
        if signs.switched_at.load(Ordering::Relaxed) != 0 && signs.mute.load(Ordering::Relaxed) == 0
        {
            // A full socket holds unread bytes, which wake just as well.
            let _ = kernel::send(socket, &[0], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        }
    }

    /// Counts what went through the kernel so far; after [`Still::ring_once`].
    ///
    /// Errors: [`NotRecalled::Unclear`].
    pub fn count(&self, socket: RawFd) -> Result<Counted, NotRecalled> {
        let (sent, taken) = self.moved(socket).ok_or(NotRecalled::Unclear)?;
        let switched = self.end.signs.switched_at.load(Ordering::Relaxed);
        let bytes = self.end.sending.by_kernel.load(Ordering::Relaxed);
        // Who has not switched has rung for nobody.
        let sane = if switched == 0 { sent == bytes } else { sent >= switched - 1 };
        if sane { Ok(Counted { sent, taken }) } else { Err(NotRecalled::Unclear) }
    }

    /// The end is the kernel's from here on, and asks for nothing else for the time of `hold`.
    pub fn leave(mut self, counted: Counted, hold: Duration, socket: RawFd) {
        self.left = true;
        let Counted { sent, taken } = counted;
        let end = self.end;
        end.sending.by_kernel.store(sent, Ordering::Relaxed);
        end.receiving.by_kernel.store(taken, Ordering::Relaxed);
        let until = kernel::coarse_ns()
            .saturating_add(u64::try_from(hold.as_nanos()).unwrap_or(u64::MAX));
        end.sharing.held_until_ns.store(until, Ordering::Relaxed);
        // Release with the Acquire in `kernel_bytes_left`.
        end.signs.returned_at.store(sent.saturating_add(1), Ordering::Release);
        let finished = end.signs.finished.load(Ordering::Relaxed) != 0;
        if finished && end.signs.mute.load(Ordering::Relaxed) == 0 {
            // What was a word so far is the kernel's to say now.
            let _ = kernel::shutdown(socket, libc::SHUT_WR);
        }
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        if !self.left {
            self.end.sharing.at_bells.fetch_and(!NO_BELLS, Ordering::AcqRel);
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

/// Brings a connection inside a host back to the kernel: `segment` seen from end 0, and the sockets of
/// end 0 and 1. Neither end asks anew for the time of `hold`, unless its socket is another by then.
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
    let sockets = sockets.map(|socket| socket.as_raw_fd());
    if segment.state().load(Ordering::Acquire) != STATE_PAIRED
        || ends.iter().any(|end| end.signs.returned_at.load(Ordering::Acquire) != 0)
    {
        return Err(NotRecalled::Kernels);
    }
    let until = Instant::now() + PATIENCE;
    let stills = [Still::new(ends[0], until)?, Still::new(ends[1], until)?];
    if ends.iter().any(|end| end.signs.closed.load(Ordering::Acquire) != 0) {
        return Err(NotRecalled::Closed);
    }
    for (still, socket) in stills.iter().zip(sockets) {
        still.ring_once(socket);
    }
    let counted = [stills[0].count(sockets[0])?, stills[1].count(sockets[1])?];
    if counted[0].taken > counted[1].sent || counted[1].taken > counted[0].sent {
        return Err(NotRecalled::Unclear);
    }
    for (((still, counted), socket), hold) in stills.into_iter().zip(counted).zip(sockets).zip(hold)
    {
        still.leave(counted, hold, socket);
    }
    Ok(())
}

impl Connection {
    /// The connection went [back](crate::recall) to the kernel. What was in the ring may still be there.
    #[inline]
    #[must_use]
    pub fn is_returned(&self) -> bool {
        self.segment.own().signs.returned_at.load(Ordering::Relaxed) != 0
    }

    /// What `kernel_bytes_left` tells after the way back, when nothing before the switch is left.
    #[cold]
    pub(crate) fn left_in_ring(&self) -> Option<u64> {
        (!self.segment.consumer().is_ready()).then_some(u64::MAX)
    }

    /// Doorbells that lie between the ring's last byte and the next one of the kernel's.
    fn bells_left(&self) -> u64 {
        let other = &self.segment.other().signs;
        let returned = other.returned_at.load(Ordering::Acquire);
        if returned == 0 || self.kernel_bytes_left() != Some(u64::MAX) {
            return 0;
        }
        let read = self.segment.own().receiving.by_kernel.load(Ordering::Relaxed);
        (returned - 1).saturating_sub(read)
    }

    /// Skips the doorbells that lie before the program's next byte; true when there are none. The caller
    /// holds the receiving half.
    ///
    /// Errors: the kernel's.
    pub(crate) fn skip_bells(&self, fd: RawFd) -> Result<bool, Errno> {
        let mut bells = [0; 64];
        loop {
            let left = self.bells_left();
            if left == 0 || self.segment.other().signs.switched_at.load(Ordering::Relaxed) == 0 {
                return Ok(true);
            }
            let most = usize::try_from(left).unwrap_or(bells.len()).min(bells.len());
            match kernel::receive(fd, &mut bells[..most], libc::MSG_DONTWAIT) {
                // The end of the stream, sooner than told.
                Ok(0) => return Ok(true),
                Ok(count) => {
                    let read = &self.segment.own().receiving.by_kernel;
                    let before = read.load(Ordering::Relaxed);
                    read.store(before.saturating_add(count as u64), Ordering::Relaxed);
                }
                Err(Errno(libc::EAGAIN)) => return Ok(false),
                Err(Errno(libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// What the kernel says of readiness, told as `poll` bits, where doorbells lie before the program's
    /// bytes: they are no news. `told`: what it said just now when asked for `events`.
    pub(crate) fn without_bells(&self, fd: RawFd, told: i16, events: i16) -> i16 {
        if self.segment.other().signs.returned_at.load(Ordering::Relaxed) == 0
            || told & libc::POLLIN == 0
            || self.bells_left() == 0
        {
            return told;
        }
        let Ok(held) = hold(&self.segment.own().receiving.holder) else { return told };
        let skipped = self.skip_bells(fd);
        drop(held);
        self.make_up_for_swallowed(fd);
        if skipped.is_err() { told } else { kernel::poll_one(fd, events, 0).unwrap_or(told) }
    }
}
