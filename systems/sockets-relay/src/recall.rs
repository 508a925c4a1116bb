//! Bringing a connection back to the kernel, with the other relay (`beeline_sockets::recall`).
//!
//! ```text
//! relay of A                                              relay of B
//! asked: takes A's halves, shuts its bells    recall ──►  takes B's halves, shuts its bells
//! carries everything, waits until it is there             the same
//!                                            drained ◄──► drained
//! rings B once more, counts A's bytes                     rings A once more, counts B's bytes
//!                                       total of A's ──►
//!                                                    ◄──  total of B's
//! stores both, lets A go on by the kernel                 the same
//! ```
//!
//! Either may say `stay` before it is drained, and the other answers `stay`: both go on as before. What is
//! heard between the two belongs to what was given up. After both are drained nobody says it.
//! A relay that heard both `drained` rings for nobody any more: what it sends on a copy of its program's
//! socket would be taken for bytes. And once it has told its total the other one may have let go, and answers
//! nothing: a program that closes then closes by the kernel, and one that cannot go on is reset without
//! waiting for a word. Whether the other end is the kernel's already cannot be known then, also where the link
//! breaks, or this relay ends: so the kernel's connection is reset, and nobody there takes it for an end.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use beeline_sockets::control::LONGEST_HOLD_SECONDS;
use beeline_sockets::recall::{Counted, Hold, leave_to_kernel};
use beeline_sockets::segment::{CLOSED_CLEANLY, CLOSED_UNREAD};

use crate::connection::Phase;
use crate::guard;
use crate::message::Record;
use crate::mirror::Nonsense;
use crate::relay::Core;

/// Longest wait for a program that works on its end.
const PATIENCE: Duration = Duration::from_secs(1);
/// An honest relay answers before: this connection is none any more.
const LONGEST: Duration = Duration::from_secs(10);
/// An end whose relay was asked by the other may ask anew after so long, where a command called it back.
const STAYS: Duration = Duration::from_secs(1);
/// And after so long at most, whatever the other relay says.
const LONGEST_HOLD: Duration = Duration::from_secs(LONGEST_HOLD_SECONDS as u64);

/// Whoever was on the way when a connection went back finds its memory for so long.
const LONGEST_WAY: Duration = Duration::from_secs(600);
/// Most of which this is so; beyond them the oldest goes.
const MOST_RETURNED: usize = 256;

/// A connection that went back while somebody who is to have it was on the way: in a message that nobody has taken,
/// to a child. Without the memory he would take doorbells for bytes.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) cookie: u64,
    pub(crate) memory: Arc<OwnedFd>,
    until: Duration,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The program works on its end, or rings.
    Busy,
    /// The program's end is still; something is left to carry.
    Still,
    /// Everything is there.
    Drained,
    /// The other relay was told the total, and rings are over.
    Told(Counted),
    /// Given up, until the other relay has said so, too.
    Stays,
}

/// A connection that is called back.
#[derive(Clone, Copy, Debug)]
pub struct Recalling {
    stage: Stage,
    since: Duration,
    /// How long its end does not ask anew.
    hold: Hold,
    far_drained: bool,
    far_total: Option<u64>,
}

impl Recalling {
    fn new(since: Duration, hold: Hold) -> Self {
        Self { stage: Stage::Busy, since, hold, far_drained: false, far_total: None }
    }

    /// The halves of the program's end are ours.
    #[must_use]
    pub fn holds_program(&self) -> bool {
        !matches!(self.stage, Stage::Busy | Stage::Stays)
    }

    /// No doorbell is sent any more.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        matches!(self.stage, Stage::Told(_))
    }
}

impl Core {
    /// Brings the connection named `cookie` back to the kernel, if it ever left it.
    pub fn recall(&mut self, cookie: u64, hold: Duration) {
        if let Some(index) = self.cookies.get(&cookie).copied() {
            self.bring_back(index, hold.into(), STAYS.into());
        }
    }

    /// Begins to bring it back: its end does not ask anew for `hold`, and the other one not for
    /// `far`.
    /// False when that is under way, or it is not carried.
    pub(crate) fn bring_back(&mut self, index: u32, hold: Hold, far: Hold) -> bool {
        let begun = self.begin_recall(index, hold);
        if begun && let Some(connection) = self.table.get(index) {
            let (at, name) = (connection.link, connection.far);
            let hold_ms = u64::try_from(far.time.as_millis()).unwrap_or(u64::MAX);
            if let Some(link) = self.link(at) {
                link.owe(name, Record::Recall { hold_ms, while_small: far.while_small });
            }
        }
        begun
    }

    /// The other relay was asked to bring it back.
    pub(crate) fn hear_recall(&mut self, index: u32, hold_ms: u64, while_small: bool) {
        let time = Duration::from_millis(hold_ms).min(LONGEST_HOLD);
        self.begin_recall(index, Hold { time, while_small });
    }

    fn begin_recall(&mut self, index: u32, hold: Hold) -> bool {
        let now = self.now;
        let paired =
            self.table.get_mut(index).filter(|connection| connection.phase == Phase::Paired);
        let Some(connection) = paired else { return false };
        if let Some(known) = &mut connection.recalling {
            known.hold = known.hold.and(hold);
            return false;
        }
        connection.recalling = Some(Recalling::new(now, hold));
        self.recalls.push(index);
        // Looked at in every turn: nothing is left behind.
        self.heat(index);
        true
    }

    /// The other relay has carried everything.
    pub(crate) fn hear_drained(&mut self, index: u32) {
        let recalling = self.table.get_mut(index).and_then(|one| one.recalling.as_mut());
        if let Some(recalling) = recalling {
            recalling.far_drained = true;
        }
    }

    /// Its end stays where it is. False when it said before that it does not.
    pub(crate) fn hear_stay(&mut self, index: u32) -> bool {
        let Some(connection) = self.table.get(index) else { return true };
        let (at, far) = (connection.link, connection.far);
        let Some(stage) = connection.recalling.map(|one| one.stage) else { return true };
        if matches!(stage, Stage::Told(_)) {
            return false;
        }
        self.stop_recall(index);
        if stage != Stage::Stays
            && let Some(link) = self.link(at)
        {
            link.owe(far, Record::Stay);
        }
        true
    }

    /// The other program's bytes by the kernel, up to its way back. False when it was too early for it.
    pub(crate) fn hear_total(&mut self, index: u32, sent: u64) -> bool {
        let recalling = self.table.get_mut(index).and_then(|one| one.recalling.as_mut());
        match recalling {
            Some(recalling) if recalling.far_drained && recalling.far_total.is_none() => {
                recalling.far_total = Some(sent);
                true
            }
            _ => false,
        }
    }

    /// The connection is not brought back, or ended: its program goes on.
    pub(crate) fn stop_recall(&mut self, index: u32) {
        let Some(connection) = self.table.get_mut(index) else { return };
        if let Some(recalling) = connection.recalling.take() {
            connection.release(&recalling);
        }
    }

    /// The next steps of all that are called back. True when one was taken.
    pub(crate) fn advance_recalls(&mut self) -> bool {
        if self.recalls.is_empty() {
            return false;
        }
        let mut progress = false;
        let all = std::mem::take(&mut self.recalls);
        for index in all {
            progress |= self.advance_recall(index);
            if self.table.get(index).is_some_and(|one| one.recalling.is_some()) {
                self.recalls.push(index);
            }
        }
        progress
    }

    fn advance_recall(&mut self, index: u32) -> bool {
        let now = self.now;
        let Some(connection) = self.table.get_mut(index) else { return false };
        let Some(mut recalling) = connection.recalling else { return false };
        let before = recalling.stage;
        let (at, far) = (connection.link, connection.far);
        // Nothing is missing once the other's total is there.
        let is_over = matches!(recalling.stage, Stage::Told(_)) && recalling.far_total.is_some();
        if !is_over && now.saturating_sub(recalling.since) >= LONGEST {
            self.fault(index, Nonsense { what: "the time of the other relay" });
            return true;
        }
        let program = connection.mirror.program();
        let mut say = None;
        match recalling.stage {
            Stage::Busy => match program.still() {
                Ok(()) => {
                    program.switch();
                    recalling.stage = Stage::Still;
                }
                Err(_) if now.saturating_sub(recalling.since) < PATIENCE => {}
                Err(why) => {
                    tracing::debug!(own = %connection.own, peer = %connection.peer, %why, "stays");
                    recalling.stage = Stage::Stays;
                    say = Some(Record::Stay);
                }
            },
            Stage::Still => {
                let carried = connection.in_flight == 0
                    && !connection.mirror.has_unsent()
                    && connection.mirror.credits() == Ok(None)
                    && connection.signs() == connection.mirror.signs_sent();
                let countable = || {
                    let socket = connection.socket.as_ref()?;
                    program.count(socket.as_fd()).ok()
                };
                if carried && countable().is_some() {
                    recalling.stage = Stage::Drained;
                    say = Some(Record::Drained);
                } else if now.saturating_sub(recalling.since) >= PATIENCE {
                    connection.release(&recalling);
                    recalling.stage = Stage::Stays;
                    say = Some(Record::Stay);
                }
            }
            Stage::Drained if recalling.far_drained => {
                let counted = connection.socket.as_ref().and_then(|socket| {
                    program.ring_once(socket.as_fd());
                    // From here on as in `Connection::cut`.
                    guard::mark_to_reset(socket);
                    program.count(socket.as_fd()).ok()
                });
                let Some(counted) = counted else {
                    self.fault(index, Nonsense { what: "the kernel's connection" });
                    return true;
                };
                recalling.stage = Stage::Told(counted);
                say = Some(Record::Total { sent: counted.sent });
            }
            Stage::Told(counted) => {
                if let Some(total) = recalling.far_total {
                    self.end_recall(index, counted, total, recalling.hold);
                    return true;
                }
            }
            Stage::Drained | Stage::Stays => {}
        }
        let moved = say.is_some() || recalling.stage != before;
        let is_still = recalling.stage == Stage::Still && before != Stage::Still;
        if let Some(connection) = self.table.get_mut(index)
            && let Some(known) = &mut connection.recalling
        {
            *known = recalling;
        }
        if let (Some(record), Some(link)) = (say, self.link(at)) {
            link.owe(far, record);
        }
        if is_still {
            // It may have cooled meanwhile, and the switch is news.
            self.heat(index);
        }
        moved
    }

    /// Both are told: the program goes on by the kernel, and the relay has nothing more to do with it.
    fn end_recall(&mut self, index: u32, counted: Counted, far: u64, hold: Hold) {
        let Some(connection) = self.table.get_mut(index) else { return };
        let switched = connection.mirror.signs_stored().switched_at;
        // What the program took of its bytes and bells cannot be more than they are.
        if far < counted.taken || switched > 0 && far < switched - 1 {
            self.fault(index, Nonsense { what: "the bytes of the other host" });
            return;
        }
        match connection.signs().closed {
            CLOSED_CLEANLY if switched > 0 && counted.taken >= switched - 1 => {
                connection.take_bells(far - counted.taken);
            }
            CLOSED_UNREAD => connection.reset_by_close(),
            _ => {}
        }
        let Some(socket) = connection.socket.take() else { return };
        // Before: a guardian that came to it afterwards would end what both programs go on with.
        guard::unmark(&socket);
        // All of the ring is there.
        let segment = connection.mirror.segment();
        let theirs = Counted { sent: far, taken: 0 };
        let both = [(segment.own(), theirs, Hold::default()), (segment.other(), counted, hold)];
        segment.other().tell_kernel(socket.as_fd());
        leave_to_kernel(segment, both);
        segment.other().let_go();
        connection.recalling = None;
        // Whoever sends it on from here on counts him first, and then hears that we do not know it.
        if segment.holders().births() > 0
            && let Some(memory) = segment.mapping().descriptor()
        {
            let (cookie, now) = (connection.cookie, self.now);
            self.returned.retain(|past| past.until > now && past.cookie != cookie);
            if self.returned.len() >= MOST_RETURNED {
                self.returned.pop_front();
            }
            self.returned.push_back(Returned { cookie, memory, until: now + LONGEST_WAY });
        }
        self.counters.recalled += 1;
        self.forget(index);
    }
}
