//! One accelerated connection, as this process sees it: beginning, sharing, end.
//!
//! ```text
//!  connect/accept ──ask──► OPEN ──other end asked──► PAIRED      the kernel's stream until each
//!                           │                          │         sender switches, at a byte that
//!                           └─ 64 calls in vain        │         it tells (`switched_at`)
//!                              ▼                       ▼
//!                           GIVEN_UP: plain         rings; the kernel's stream carries doorbells
//! ```
//!
//! Invariants:
//! - a half (sending, receiving) is worked on by the thread whose number is in its `holder` word;
//!   nobody sleeps while holding one. A holder that no longer exists loses it;
//! - doorbells follow `switched_at` in program order, and a reader of the kernel's stream loads
//!   `switched_at` after it read, so that no doorbell is taken for a byte;
//! - a doorbell is swallowed only by who is sure that nobody else waits for it.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use beeline_os::barrier;

use crate::anew::Anew;
use crate::control::Question;
pub use crate::ending::{closing, shutdown};
use crate::kernel::{self, Errno};
use crate::segment::{CLOSED_CLEANLY, End, STATE_GIVEN_UP, STATE_OPEN, STATE_PAIRED, Segment};
use crate::sleepers::Sleepers;
use crate::table::{self, Kind};
use crate::wait::Budget;
use crate::{anew, board, epoll, introduce, receive, together, young};

/// The holders of an end are counted this often.
const COUNTED_NS: u64 = 20_000_000;
/// A sender asks the kernel this often whether the other end is alive.
const BLIND_NS: u64 = 2_000_000;
const BLIND_IN_SET_NS: u64 = 30_000_000;
/// And this often where only a byte sent can tell.
const PROBE_NS: u64 = 100_000_000;

/// Calls through the kernel before an end stops waiting for the other to ask: so many and so many bytes,
/// or sixteen times as many; and so long.
const PATIENT_CALLS: u32 = 64;
const PATIENT_BYTES: u64 = 4 * young::BYTES as u64;
const PATIENT_NS: u64 = 250_000_000;
/// Every so many calls that found nothing and do not wait, the kernel is asked whether the other end is alive.
const VAIN_CALLS: u32 = 64;

/// Options of the kernel's connection that would delay doorbells, as level, name, and the value
/// they have while the connection is ours. What the program sets is kept for it here.
pub const HELD_OPTIONS: [(i32, i32, i32); 3] = [
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
    (libc::IPPROTO_TCP, libc::TCP_CORK, 0),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1),
];
const LOW_WATER: usize = 2;

/// One connection.
#[derive(Debug)]
pub struct Connection {
    /// The shared memory.
    pub segment: Segment,
    /// Its own, in this process: never used again.
    pub number: u64,
    /// Numbers in the table that lead here.
    pub references: AtomicU32,
    /// Threads of this process that sleep on it.
    pub sleepers: Sleepers,
    /// Of the end's watchers, those that are epoll sets of this process.
    pub sets: AtomicU32,
    /// Learned spinning time of readers and writers.
    pub budget: Budget,
    /// An error the kernel told us that the program has not heard of yet.
    pub pending_error: AtomicI32,
    /// The kernel said that the other end is gone or will send no more.
    pub kernel_ended: AtomicBool,
    /// A send found the ring full since an edge-triggered set last reported room.
    pub was_full: AtomicBool,
    /// Who slept for room when it went [back](crate::recall) was waited for in vain.
    pub(crate) room_was_heard_of: AtomicBool,
    /// Who seemed to call it back was waited for in vain.
    pub(crate) recall_was_waited_for: AtomicBool,
    /// What the program thinks its [`HELD_OPTIONS`] are.
    pub held_options: [AtomicI32; HELD_OPTIONS.len()],
    /// Sends so far, counted round.
    pub sends: AtomicU32,
    /// This process notes on the board in its segment.
    pub(crate) lends: AtomicBool,
    /// Sets of this process whose board is in its segment: its memory stays.
    pub(crate) borrowed: AtomicU32,
    /// When this process got it, on the coarse clock.
    pub(crate) begun_ns: u64,
    listened_ns: AtomicU64,
    /// When its holders were last counted.
    counted_ns: AtomicU64,
    /// Whether calls on it block, as was found out when [`together`]'s word was so: that word above, the answer below.
    blocking: AtomicU64,
    calls: AtomicU32,
    /// Bytes that went through the kernel either way before it was ours.
    moved_before: u64,
    vain: AtomicU32,
    /// Its memory is to be given back.
    pub(crate) is_retired: AtomicBool,
    /// In the list of those that come to be [`crate::retired`].
    pub(crate) next_retired: AtomicPtr<Connection>,
    /// Asking anew.
    pub(crate) anew: Anew,
}

static NUMBER: AtomicU64 = AtomicU64::new(1);

const BLOCKS: u64 = 1;
const BLOCKS_NOT: u64 = 2;

/// What looking at the kernel's stream for doorbells found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Doorbells or nothing; the other end is alive as far as the kernel knows.
    Nothing,
    /// The other end closed.
    End,
    /// The connection broke; the error waits in `pending_error`.
    Broken,
    /// Somebody calls the connection back at this moment, and who asked does not wait for him: what was
    /// told of is to be told of again.
    Later,
}

/// What became of this process's connections.
#[derive(Debug)]
pub struct Tally {
    /// Connections within this host, or to other hosts, that the monitor was asked about.
    pub asked: AtomicU32,
    /// Of these, those it gave a segment.
    pub taken: AtomicU32,
    /// Of these, those that sent through their ring.
    pub switched: AtomicU32,
}

/// Counts of this process.
pub static TALLY: Tally =
    Tally { asked: AtomicU32::new(0), taken: AtomicU32::new(0), switched: AtomicU32::new(0) };

impl Connection {
    /// A connection of the connected kernel socket `fd` and its segment.
    #[must_use]
    pub fn new(segment: Segment, fd: RawFd) -> Self {
        let own = segment.own();
        // Also where this process was restored since it last did.
        let asymmetric = barrier::renew();
        own.signs.asymmetric.store(u32::from(asymmetric), Ordering::Relaxed);
        own.signs.program.store(board::program(), Ordering::Relaxed);
        let held_options = HELD_OPTIONS.map(|(level, name, ours)| {
            let theirs = kernel::option(fd, level, name, 0).unwrap_or(ours);
            if theirs != ours {
                let _ = kernel::set_option(fd, level, name, ours);
            }
            AtomicI32::new(theirs)
        });
        let moved_before = moved_by_kernel(own);
        let connection = Self {
            segment,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            references: AtomicU32::new(0),
            sleepers: Sleepers::default(),
            sets: AtomicU32::new(0),
            budget: Budget::default(),
            pending_error: AtomicI32::new(0),
            kernel_ended: AtomicBool::new(false),
            was_full: AtomicBool::new(false),
            room_was_heard_of: AtomicBool::new(false),
            recall_was_waited_for: AtomicBool::new(false),
            held_options,
            sends: AtomicU32::new(0),
            lends: AtomicBool::new(false),
            borrowed: AtomicU32::new(0),
            begun_ns: kernel::coarse_ns(),
            listened_ns: AtomicU64::new(0),
            counted_ns: AtomicU64::new(0),
            blocking: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            moved_before,
            vain: AtomicU32::new(0),
            is_retired: AtomicBool::new(false),
            next_retired: AtomicPtr::new(std::ptr::null_mut()),
            anew: Anew::new(fd),
        };
        together::enter(&connection.segment);
        connection.begin_to_hold();
        connection
    }

    /// This end is there; the later of the two says that both are. False when the other has given
    /// up. An end that was answered and never came (no memory, no descriptor, a late answer) so is
    /// waited for like one that never asked.
    #[must_use]
    pub fn join(&self) -> bool {
        // Stored, then looked at, by both: at least one sees the other.
        self.segment.own().signs.present.store(1, Ordering::SeqCst);
        let state = self.segment.state();
        if self.segment.other().signs.present.load(Ordering::SeqCst) != 0 {
            // Release with the Acquire in `sends_by_ring`: our signs are there.
            let _ = state.compare_exchange(
                STATE_OPEN,
                STATE_PAIRED,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
        }
        state.load(Ordering::Acquire) != STATE_GIVEN_UP
    }

    /// Bytes that are worth telling a program of that waits for some: `SO_RCVLOWAT`.
    #[inline]
    pub fn low_water(&self) -> usize {
        let water = self.held_options[LOW_WATER].load(Ordering::Relaxed);
        usize::try_from(water.max(1)).unwrap_or(1)
    }

    /// As [`Connection::is_readable`], for who is told of readiness: there is as much as he asked for, or
    /// so much that the sender may soon wait.
    #[inline]
    #[must_use]
    pub fn is_worth_reading(&self) -> bool {
        self.is_readable() && (self.low_water() == 1 || self.is_above_low_water())
    }

    #[cold]
    fn is_above_low_water(&self) -> bool {
        let (own, other) = (self.segment.own(), self.segment.other());
        let water = self.low_water();
        let head = own.receiving.head.load(Ordering::Relaxed);
        // A hint: the other end's own count of what it wrote.
        let filled = other.sending.tail.load(Ordering::Relaxed).wrapping_sub(head);
        other.signs.finished.load(Ordering::Acquire) != 0
            || own.receiving.shut.load(Ordering::Relaxed) != 0
            || self.is_over()
            || self.is_returned()
            || filled >= self.segment.ring_bytes() as u64 / 4
            || receive::available(self, water).is_ok_and(|bytes| bytes >= water)
    }

    /// Whether calls on it block. Remembered while all processes that have the connection have the library:
    /// the hooks of `fcntl` and `ioctl` make all of them forget.
    pub fn blocks(&self, fd: RawFd) -> bool {
        let known = self.blocking.load(Ordering::Relaxed);
        // Before the kernel is asked: a change that it knows of is counted afterwards.
        let word = self.segment.own().sharing.processes.load(Ordering::Acquire);
        if known & (BLOCKS | BLOCKS_NOT) != 0 && known >> 2 == u64::from(word) {
            return known & BLOCKS != 0;
        }
        let blocks = !kernel::is_nonblocking(fd);
        if word & together::FOR_GOOD == 0 {
            let mode = if blocks { BLOCKS } else { BLOCKS_NOT };
            self.blocking.store(u64::from(word) << 2 | mode, Ordering::Relaxed);
        }
        blocks
    }

    /// The program may have changed the mode.
    pub fn forget_blocking_mode(&self) {
        together::changed(&self.segment);
    }

    /// Several processes have this end, as far as was found out a moment ago.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        if !together::is_shared(&self.segment) {
            return false;
        }
        let now = kernel::coarse_ns();
        if now.wrapping_sub(self.counted_ns.load(Ordering::Relaxed)) < COUNTED_NS {
            return true;
        }
        self.counted_ns.store(now, Ordering::Relaxed);
        !together::is_alone(&self.segment, false)
    }

    /// True when this end sends through its ring; switches when both ends have the segment. The
    /// caller holds the sending half.
    #[inline]
    pub fn sends_by_ring(&self) -> bool {
        let own = self.segment.own();
        let returned = self.is_returned();
        if returned || own.signs.switched_at.load(Ordering::Relaxed) != 0 {
            return !returned;
        }
        // Acquire with the Release of the end that came second.
        if self.segment.state().load(Ordering::Acquire) != STATE_PAIRED {
            return false;
        }
        let sent = own.sending.by_kernel.load(Ordering::Relaxed);
        // Release with the readers' Acquire loads. The other end can write the word: no overflow.
        own.signs.switched_at.store(sent.saturating_add(1), Ordering::Release);
        TALLY.switched.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// True when the next send goes into the ring.
    #[inline]
    #[must_use]
    pub fn is_bound_for_ring(&self) -> bool {
        !self.is_returned()
            && (self.segment.own().signs.switched_at.load(Ordering::Relaxed) != 0
                || self.segment.state().load(Ordering::Acquire) == STATE_PAIRED)
    }

    /// Bytes that the kernel's stream still holds or may hold for the program, before anything else:
    /// `None` while it is the ring's turn, `Some(u64::MAX)` while the other end has not switched, and
    /// after its way [back](crate::recall) once the ring is empty.
    #[inline]
    pub fn kernel_bytes_left(&self) -> Option<u64> {
        let other = &self.segment.other().signs;
        // Acquire with the Release in `sends_by_ring`.
        let switched = other.switched_at.load(Ordering::Acquire);
        if switched == 0 {
            return Some(u64::MAX);
        }
        let read = self.segment.own().receiving.by_kernel.load(Ordering::Relaxed);
        let left = (switched - 1).saturating_sub(read);
        if left > 0 {
            return Some(left);
        }
        // Acquire with the Release in `recall`: nothing comes into the ring any more.
        if other.returned_at.load(Ordering::Acquire) == 0 { None } else { self.left_in_ring() }
    }

    /// What the other end of a relayed connection is called, as long as a relay stands for it.
    #[inline]
    #[must_use]
    pub fn between_hosts(&self) -> Option<u64> {
        self.segment.relayed().filter(|_| !self.is_returned())
    }

    /// All that the kernel's stream has to say is doorbells and ends.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.kernel_bytes_left().is_none() && self.is_bound_for_ring()
    }

    /// One number of one process leads here.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.references.load(Ordering::Relaxed) == 1 && !self.is_shared()
    }

    /// The program can read, or will be told an end, without asking the kernel.
    #[inline]
    #[must_use]
    pub fn is_readable(&self) -> bool {
        if self.kernel_bytes_left().is_some() {
            return false;
        }
        let other = self.segment.other();
        self.segment.consumer().is_ready()
            || other.signs.finished.load(Ordering::Acquire) != 0
            || self.segment.own().receiving.shut.load(Ordering::Relaxed) != 0
            || self.is_over()
    }

    /// The other end is gone, or the connection broke.
    #[inline]
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.kernel_ended.load(Ordering::Relaxed) || self.pending_error.load(Ordering::Relaxed) != 0
    }

    /// The program can send a fair amount, or will be told an error: an end that was closed reads
    /// its ring no more, so what is sent goes to the kernel, which says so.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.segment.own().signs.finished.load(Ordering::Relaxed) != 0
            || self.is_over()
            || self.is_returned()
            || self.segment.other().signs.closed.load(Ordering::Relaxed) != 0
            || self.segment.producer().has_room().unwrap_or(true)
    }

    /// Asks the kernel whether the other end is alive, unless it was asked just now. Cheap enough
    /// for every few sends.
    pub fn look_after_peer(&self, fd: RawFd) {
        let before = self.listened_ns.load(Ordering::Relaxed);
        // Sets hear of it from the kernel when they are waited on.
        let watched = self.sets.load(Ordering::Relaxed) > 0;
        let bound = if watched { BLIND_IN_SET_NS } else { BLIND_NS };
        if kernel::coarse_ns().wrapping_sub(before) >= bound {
            self.look_after_peer_now(fd);
        }
    }

    /// Asks the kernel whether the other end is alive.
    pub fn look_after_peer_now(&self, fd: RawFd) {
        // Sets swallow their doorbells themselves.
        let listens = self.sets.load(Ordering::Relaxed) == 0 && !self.ended_in_order();
        if listens && self.kernel_bytes_left().is_none() {
            self.listened_ns.store(kernel::coarse_ns(), Ordering::Relaxed);
            self.listen(fd, 0);
        } else {
            self.look_behind_bytes(fd);
        }
    }

    /// Asks the kernel whether the other end is alive, where its stream may hold the program's bytes
    /// or ended in good order: nothing is read.
    pub fn look_behind_bytes(&self, fd: RawFd) {
        let now = kernel::coarse_ns();
        let since = now.wrapping_sub(self.listened_ns.load(Ordering::Relaxed));
        let bits = kernel::poll_one(fd, libc::POLLRDHUP, 0).unwrap_or(0);
        let over = bits & (libc::POLLHUP | libc::POLLERR) != 0;
        // Loaded after asking: an end says that it is mute before it shuts its side.
        let mute = self.ended_in_order();
        let ended = bits & libc::POLLRDHUP != 0 && !mute;
        if let (true, Some(name)) = (over || ended, self.between_hosts()) {
            let due = since >= PROBE_NS;
            if due {
                self.listened_ns.store(now, Ordering::Relaxed);
            }
            self.heard_hang_up_between_hosts(fd, name, over, due);
        } else if over || ended {
            self.kernel_ended.store(true, Ordering::Relaxed);
        } else if mute && since >= PROBE_NS && self.own_doorbells_reach() {
            self.listened_ns.store(now, Ordering::Relaxed);
            let Some(_at_bells) = self.go_to_bells(false) else { return };
            if let Some(name) = self.between_hosts() {
                self.ring_relay(fd, name);
                return;
            }
            // Alive, it takes a doorbell for one; gone, it answers with a reset.
            let _ = kernel::send(fd, &[0], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        } else if !mute {
            self.listened_ns.store(now, Ordering::Relaxed);
        }
    }

    /// The other end shut its side of the kernel's stream, and can send no doorbells: before it had switched,
    /// or on the way [back](crate::recall).
    pub fn is_other_mute(&self) -> bool {
        // Acquire: said before the kernel was told.
        self.segment.other().signs.mute.load(Ordering::Acquire) != 0
    }

    /// That the kernel's stream ends says nothing of the other end: that one is [mute](Self::is_other_mute), or
    /// this process shut its reading side, which the kernel was told to wake a sleeper.
    pub fn ended_in_order(&self) -> bool {
        self.is_other_mute() || self.segment.own().receiving.shut.load(Ordering::Relaxed) != 0
    }

    /// What this end sends through the kernel is a doorbell, and is carried.
    fn own_doorbells_reach(&self) -> bool {
        let signs = &self.segment.own().signs;
        signs.switched_at.load(Ordering::Relaxed) != 0 && signs.mute.load(Ordering::Relaxed) == 0
    }

    /// Swallows doorbells, if nobody else would miss them (`watching`: how many of the watchers
    /// are the caller), and hears whether the other end is alive. Only when the kernel's stream
    /// carries nothing else.
    pub fn listen(&self, fd: RawFd, watching: u32) -> Heard {
        // After the way back bytes may lie behind the bells. Who closes holds no set's lock either.
        let waits = matches!(watching, 0 | u32::MAX);
        let Some(_at_bells) = self.go_to_bells(waits) else {
            let later = watching > 0 && !self.is_returned();
            return if later { Heard::Later } else { Heard::Nothing };
        };
        let alone = self.may_swallow(watching);
        let peek = if alone { 0 } else { libc::MSG_PEEK };
        let (mut bells, mut swallowed) = ([0; 64], false);
        let heard = loop {
            match kernel::receive(fd, &mut bells, libc::MSG_DONTWAIT | peek) {
                // Its own direction ended, in good order; it may still read.
                Ok(0) if self.ended_in_order() => break Heard::Nothing,
                Ok(0) => break self.heard_end(),
                // To the last: the end of the stream may lie behind the bells, and an
                // edge-triggered set is told of both at once.
                Ok(_) if alone => swallowed = true,
                Ok(_) => break self.look_behind_bells(fd),
                Err(Errno(libc::EAGAIN)) => break Heard::Nothing,
                Err(Errno(libc::EINTR)) => {}
                Err(Errno(error)) => break self.heard_error(error),
            }
        };
        // Who watches himself was alone, and may hold a set's lock.
        if swallowed && watching == 0 {
            self.make_up_for_swallowed(fd);
        }
        heard
    }

    /// After a doorbell was swallowed, or this process changed what the end reports: a set that
    /// counts on a doorbell looks again in its next turn, and one that is slept on is woken.
    ///
    /// In this order, and after the swallowing: a thread that goes to sleep says so, then takes the
    /// stirs. A stir from before could be taken, and the end armed and let go of, while the doorbell
    /// for that arm is swallowed here.
    pub fn make_up_for_swallowed(&self, fd: RawFd) {
        if self.sets.load(Ordering::SeqCst) > 0 {
            epoll::stir(fd);
            if !epoll::nobody_sleeps() {
                epoll::kick(fd);
            }
        }
    }

    /// True when nobody would miss a doorbell that is swallowed now: nobody else watches, or only
    /// sets of this process, which are told in another way.
    fn may_swallow(&self, watching: u32) -> bool {
        let watchers = self.segment.own().sharing.watchers.load(Ordering::SeqCst);
        if watchers <= watching {
            return true;
        }
        // Who watches himself (`watching`) may hold a set's lock, and leaves it to the others; and
        // so does everybody where a thread sleeps: the doorbell may be meant for it.
        watching == 0 && watchers <= self.sets.load(Ordering::SeqCst) && epoll::nobody_sleeps()
    }

    /// Whether the stream ends behind doorbells that are not ours to swallow.
    fn look_behind_bells(&self, fd: RawFd) -> Heard {
        let ends = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
        match kernel::poll_one(fd, libc::POLLRDHUP, 0) {
            Ok(bits) if bits & ends != 0 && !self.ended_in_order() => self.heard_end(),
            _ => Heard::Nothing,
        }
    }

    /// The kernel's stream ended, and not only because the other end is mute.
    pub fn heard_end(&self) -> Heard {
        if self.between_hosts().is_some() {
            return self.heard_end_between_hosts();
        }
        self.kernel_ended.store(true, Ordering::Relaxed);
        Heard::End
    }

    /// The kernel told us `error` on the stream.
    pub fn heard_error(&self, error: i32) -> Heard {
        self.kernel_ended.store(true, Ordering::Relaxed);
        // A doorbell that met a socket just closed makes the kernel reset a connection that was
        // closed in good order; so does one that lay unread when its process ended without a word.
        let closed = self.segment.other().signs.closed.load(Ordering::Acquire);
        // Between hosts the other end's words are there before the kernel's.
        let here = self.segment.relayed().is_none();
        let orderly = closed == CLOSED_CLEANLY || closed == 0 && here && self.all_was_read();
        if error == libc::ECONNRESET && orderly && !self.is_returned() {
            return Heard::End;
        }
        // So who slept on it is told where this host's relay resets it.
        let reset = !here && matches!(error, libc::EPIPE | libc::ENOTCONN);
        let error = if reset { libc::ECONNRESET } else { error };
        self.pending_error.store(error, Ordering::Relaxed);
        Heard::Broken
    }

    /// The other end has read everything this one sent. What its words say is a hint: who lies is
    /// told of as closed instead of as reset.
    fn all_was_read(&self) -> bool {
        let (own, other) = (self.segment.own(), self.segment.other());
        other.receiving.head.load(Ordering::Acquire) == own.sending.tail.load(Ordering::Relaxed)
            && other.receiving.by_kernel.load(Ordering::Relaxed)
                == own.sending.by_kernel.load(Ordering::Relaxed)
    }

    /// True when it is time for a call that found nothing to look at the kernel.
    pub fn is_due_to_listen(&self) -> bool {
        let vain = self.vain.load(Ordering::Relaxed).wrapping_add(1);
        self.vain.store(vain, Ordering::Relaxed);
        let closed = self.segment.other().signs.closed.load(Ordering::Relaxed) != 0;
        closed || vain.is_multiple_of(VAIN_CALLS)
    }

    /// Counts a call through the kernel by an end that waits for the other. When there were
    /// enough of them, the connection stays with the kernel for good.
    pub fn waited_for_other_end(&self, fd: RawFd) {
        if self.rests() {
            return self.count_towards_anew(fd);
        }
        let calls = self.calls.load(Ordering::Relaxed).wrapping_add(1);
        self.calls.store(calls, Ordering::Relaxed);
        // The other end asks when it has made as many calls, or moved as many bytes, as it takes to show
        // that it lives; this one may make many small calls for one of its large ones.
        let moved = moved_by_kernel(self.segment.own()).saturating_sub(self.moved_before);
        let many = moved >= PATIENT_BYTES || calls >= PATIENT_CALLS * 16;
        // The kernel holds much that the other end has not come to yet.
        let patience = if self.anew.is_renewed() { anew::PATIENT_NS } else { PATIENT_NS };
        let long = || kernel::coarse_ns().wrapping_sub(self.begun_ns) >= patience;
        if calls >= PATIENT_CALLS && many && long() && !self.is_being_matched() {
            self.give_up(fd);
        }
    }

    /// Leaves the connection to the kernel if it never left it. True when it is the kernel's.
    pub fn stay_with_kernel(&self, fd: RawFd) -> bool {
        let state = self.segment.state();
        let open =
            state.compare_exchange(STATE_OPEN, STATE_GIVEN_UP, Ordering::AcqRel, Ordering::Acquire);
        let plain = open.is_ok() || open == Err(STATE_GIVEN_UP);
        // One that rests keeps what the program sets for itself.
        if plain && !self.anew.is_renewed() {
            self.restore_options(fd);
        }
        if open.is_ok() {
            self.tell_relay();
        }
        plain
    }

    /// Closed before anybody could use it: the other end, if it has not asked, need not wait.
    pub(crate) fn is_nobodys(&self) {
        let state = self.segment.state();
        let _ =
            state.compare_exchange(STATE_OPEN, STATE_GIVEN_UP, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(crate) fn give_up(&self, fd: RawFd) {
        if self.stay_with_kernel(fd) {
            if self.anew.is_renewed() {
                self.anew.put_off();
            } else {
                table::forget(fd);
            }
        }
    }

    fn restore_options(&self, fd: RawFd) {
        for ((level, name, ours), theirs) in HELD_OPTIONS.into_iter().zip(&self.held_options) {
            let theirs = theirs.load(Ordering::Relaxed);
            if theirs != ours {
                let _ = kernel::set_option(fd, level, name, theirs);
            }
        }
    }

    /// What the program thinks one of [`HELD_OPTIONS`] is.
    #[must_use]
    pub fn held_option(&self, level: i32, name: i32) -> Option<&AtomicI32> {
        let mine = |option: &(i32, i32, i32)| (option.0, option.1) == (level, name);
        self.held_options.get(HELD_OPTIONS.iter().position(mine)?)
    }
}

/// Bytes that went through the kernel either way.
fn moved_by_kernel(own: &End) -> u64 {
    let sent = own.sending.by_kernel.load(Ordering::Relaxed);
    sent.saturating_add(own.receiving.by_kernel.load(Ordering::Relaxed))
}

/// `fd` has just come out of `accept`: asks whether it can be ours.
pub fn accepted(fd: RawFd) {
    table::forget(fd);
    connected(fd);
}

/// `fd` has just become connected: asks whether it can be ours.
pub fn connected(fd: RawFd) {
    if table::is_foreign_process()
        || table::is_left_to_kernel()
        || table::is_watched_plain(fd)
        || table::ours(fd).is_some()
        || table::packets(fd).is_some()
        || !introduce::is_candidate(fd)
    {
        return;
    }
    let copied = table::was_copied_early(fd);
    table::forget(fd);
    // Its other number may have become ours already.
    if copied && table::is_copy(fd) {
        epoll::became_ours(fd);
        return;
    }
    if let Some(connection) = introduced(fd, 0, 0) {
        table::set_ours(fd, Box::new(connection));
        epoll::became_ours(fd);
    }
}

/// Asks for a young connection, on which no call is under way.
pub(crate) fn asked(fd: RawFd) -> Option<Connection> {
    if table::is_left_to_kernel() || !introduce::is_candidate(fd) {
        return None;
    }
    let (sent, received) = kernel::moved(fd)?;
    introduced(fd, sent, received)
}

/// Asks the monitor for `fd`, which has given and taken so many bytes through the kernel.
fn introduced(fd: RawFd, sent: u64, received: u64) -> Option<Connection> {
    TALLY.asked.fetch_add(1, Ordering::Relaxed);
    let segment = introduce::segment(fd, Question::Attach)?;
    TALLY.taken.fetch_add(1, Ordering::Relaxed);
    let own = segment.own();
    own.sending.by_kernel.store(sent, Ordering::Relaxed);
    own.receiving.by_kernel.store(received, Ordering::Relaxed);
    let connection = Connection::new(segment, fd);
    if connection.join() {
        return Some(connection);
    }
    connection.restore_options(fd);
    None
}

/// `fd` came into this program from elsewhere: by `exec`, or in a message. If it was introduced
/// before, it goes on where its last holder stopped.
pub fn inherited(fd: RawFd) {
    crate::packets::dial::inherited(fd);
    if table::ours(fd).is_some() || !introduce::is_candidate(fd) || table::is_copy(fd) {
        return;
    }
    let Some(segment) = introduce::segment(fd, Question::Resume) else { return };
    if segment.state().load(Ordering::Acquire) == STATE_GIVEN_UP {
        return;
    }
    let sharing = &segment.own().sharing;
    if together::is_alone(&segment, true) {
        // Whoever watched it was the program that this one replaced.
        sharing.watchers.store(0, Ordering::SeqCst);
        sharing.for_room.store(0, Ordering::SeqCst);
        segment.own_board().name.store(0, Ordering::SeqCst);
    }
    table::set_ours(fd, Box::new(Connection::new(segment, fd)));
}

/// `fd` came in a message. As [`inherited`].
pub fn received(fd: RawFd) {
    inherited(fd);
    if let Some(connection) = table::ours(fd)
        && connection.between_hosts().is_some()
    {
        connection.segment.holders().expected_one();
    }
}

/// The message of [`handed_on`] was not sent, or took something else.
pub fn not_handed_on(fd: RawFd) {
    if let Some(connection) = table::ours(fd)
        && connection.between_hosts().is_some()
    {
        connection.segment.holders().expected_one();
    }
}

/// `fd` goes to another program in a message: several may have it from now on. Returns it if it is
/// accelerated, or may be when its other end asks.
pub fn handed_on(fd: RawFd) -> Option<&'static Connection> {
    young::settle(fd);
    if let Some(connection) = table::packets(fd) {
        connection.shared();
    }
    let connection = table::ours(fd)?;
    let connection = anew::shared(connection, together::share_for_good);
    if connection.between_hosts().is_some() {
        connection.segment.holders().expect_one();
    }
    Some(connection)
}

/// If `fd` was connecting and is connected by now, asks whether it can be ours.
pub fn look_at_connecting(fd: RawFd) {
    if kernel::name(fd, true).is_ok() {
        if !table::was_copied_early(fd) {
            table::forget(fd);
        }
        young::connected(fd);
    }
}

/// The connection behind `fd`, for a call that young connections do not count: such a one asks now.
#[inline]
#[must_use]
pub fn find(fd: RawFd) -> Option<&'static Connection> {
    match table::kind(fd) {
        Kind::Ours(connection) => Some(connection),
        Kind::Plain | Kind::Packets(_) => None,
        Kind::Connecting => {
            look_at_connecting(fd);
            young::settle(fd);
            table::ours(fd)
        }
        Kind::Young => {
            young::settle(fd);
            table::ours(fd)
        }
    }
}

/// As [`find`], for who only looks at `fd`: one that is young stays so.
#[inline]
#[must_use]
pub fn look(fd: RawFd) -> Option<&'static Connection> {
    if let Kind::Connecting = table::kind(fd) {
        look_at_connecting(fd);
    }
    table::ours(fd)
}
