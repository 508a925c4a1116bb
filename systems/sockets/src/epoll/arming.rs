//! Arming the entries of a set, and letting go of those that have nothing to report: before a sleep, for
//! others that sleep, and where too many are looked at. The module above lists who wakes whom.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use beeline_os::barrier;

use super::fork::join;
use super::set::{Entry, Inner, QUIET_LOOKS};
use super::{DEEPEST, OUT, adjust, due, known, lock, watch};
use crate::connection::Connection;
use crate::poll::arm;
use crate::{table, wake};

/// Arms everything in the set `fd`, for who is about to sleep on it by `poll` (after
/// [`super::is_mixed_and_polled`], and [`super::Polling`]). True when he has to look by the clock.
pub fn arm_all(fd: RawFd) -> bool {
    arm_within(fd, DEEPEST)
}

pub(super) fn arm_within(fd: RawFd, depth: u32) -> bool {
    let Some(set) = known(fd).filter(|_| depth > 0) else { return false };
    let mut inner = lock(set);
    join(set, &mut inner);
    inner.take_stirred();
    arm_and_cool(fd, &mut inner, depth, Arming::Sleep, |_| true)
}

/// How hot entries are armed.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Arming {
    /// Everybody rings for each; those that have nothing to report are let go.
    Each,
    /// As [`Arming::Each`] those that were looked at in vain so many times; the others stay hot, and
    /// are armed with the name of this one sleep. Who wakes from it looks at them.
    Sleep,
    /// As [`Arming::Each`], by a thread that stays with the set.
    LetGo,
}

/// Arms the hot entries for which `chosen` says so, and lets go of those that have nothing to
/// report afterwards: who makes them ready rings. True when one needs looks by the clock.
pub(super) fn arm_and_cool(
    number: RawFd,
    inner: &mut Inner,
    depth: u32,
    arming: Arming,
    chosen: impl Fn(&Entry) -> bool,
) -> bool {
    let (mut any, mut by_clock) = (false, false);
    let name = if arming == Arming::Sleep && inner.hot() > 1 { wake::name() } else { None };
    let stays = |entry: &Entry| name.is_some() && entry.vain < QUIET_LOOKS;
    for turn in 0..inner.hot() {
        let Some(entry) = inner.hot_entry(turn) else { continue };
        if entry.silent || !chosen(entry) {
            continue;
        }
        if entry.is_set {
            by_clock |= arm_within(entry.fd, depth - 1);
            continue;
        }
        let Some(connection) = table::ours(entry.fd) else { continue };
        watch(entry, connection);
        adjust(number, entry, Some(connection));
        let own = connection.segment.own();
        let full = entry.wanted & OUT != 0 && !connection.is_writable();
        // Who else watches counts on his own arm.
        let alone = own.sharing.watchers.load(Ordering::SeqCst) <= 1;
        let armed = &own.signs.receive_armed;
        let noted = entry.noted.filter(|place| armed.load(Ordering::Relaxed) == place.armed);
        let name = name.filter(|_| noted.is_none() && alone && stays(entry));
        let place = if name.is_none() && alone && entry.can_be_noted() && can_be_noted(connection) {
            inner.place_for(turn, connection)
        } else {
            if name.is_none() && entry.noted.is_some() {
                inner.displace(turn);
            }
            None
        };
        if let Some(name) = name.or(place) {
            wake::arm_as(armed, name);
            arm(connection, false, full);
        } else {
            arm(connection, true, full);
        }
        any = true;
    }
    // Behind the last place that was given, perhaps on a board of this very turn, and before the fence.
    if arming != Arming::LetGo && !inner.places_noted.is_empty() {
        match name.or_else(wake::name) {
            Some(name) => inner.places_noted.sleep_as(name),
            None => by_clock = true,
        }
        any = true;
    }
    if any {
        barrier::heavy();
    }
    inner.cool_if(|entry| {
        if entry.silent {
            // Until the program asks for it anew.
            return true;
        }
        if !chosen(entry) || entry.is_set {
            return false;
        }
        let Some(connection) = table::ours(entry.fd) else { return false };
        // Where others watch too, doorbells stay in place, and we look by the clock.
        let others = connection.segment.own().sharing.watchers.load(Ordering::SeqCst) > 1;
        // Nobody rings for room there.
        let unheard =
            entry.wanted & OUT != 0 && connection.is_other_mute() && !connection.is_writable();
        by_clock |= others || unheard;
        // Before both ends have the segment, room in the kernel's stream is the kernel's news.
        let settled =
            !others && !unheard && (connection.is_bound_for_ring() || connection.is_returned());
        settled
            && (!stays(entry) || is_armed_with_place(entry, connection))
            && due(entry, connection, false) == 0
    });
    by_clock
}

fn is_armed_with_place(entry: &Entry, connection: &Connection) -> bool {
    let armed = connection.segment.own().signs.receive_armed.load(Ordering::Relaxed);
    entry.noted.is_some_and(|place| place.armed == armed)
}

/// Its other end's senders may note it: one process has it, and all its news are in the ring.
fn can_be_noted(connection: &Connection) -> bool {
    connection.is_settled() && connection.is_alone() && connection.segment.relayed().is_none()
}
