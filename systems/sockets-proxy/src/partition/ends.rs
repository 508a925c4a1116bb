//! How connections of a partition end: finishes and resets towards the other host, and what becomes of one that is
//! broken off at this one.
//!
//! Invariant: code that breaks a connection off names the [`Cause`], which the log has at debug.

use std::sync::atomic::Ordering;

use beeline_sockets::packets::header::{HEADER_BYTES, Header, PacketKind};

use super::{Fault, Key, Notice, Partition};
use crate::conduit::{Connection, Incoming, Moving};
use crate::flow::Act;

/// Why a connection is broken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The other host says so.
    Reset,
    /// The other host has nothing of it any more.
    Abandoned,
    /// The link went.
    Link,
    /// It was to be broken off while it moved.
    Doomed,
    /// The same, and the link went meanwhile: the other end hears of it when it reports.
    Interrupted,
    /// The monitor says so.
    Order,
    /// Its last holder closed it with packets unread, or had it broken off.
    Unread,
    /// Nonsense in the queues that the program has, too.
    Queue,
    /// A packet came for which no block is free: the program says that it gave one back, and did not.
    NoBlock,
    /// The program says that it consumed what never came.
    Consumed,
    /// Where the other end stands cannot be.
    Position,
}

impl Cause {
    /// The other host is to hear of it.
    fn is_told(self) -> bool {
        !matches!(self, Self::Reset | Self::Abandoned | Self::Link | Self::Interrupted)
    }
}

impl Partition {
    /// Breaks a connection off at this host.
    pub(super) fn break_off(&mut self, place: usize, cause: Cause) {
        let Some(connection) = self.connections.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        if self.is_up && connection.moving != Moving::Not {
            // The other end is to hear of it where it is then.
            connection.is_doomed = true;
            return;
        }
        connection.channel.proxy().reset.store(libc_reset(), Ordering::Release);
        tracing::debug!(key = ?connection.key, ?cause, "a connection is broken off");
        self.counters.resets.fetch_add(1, Ordering::Relaxed);
        if cause.is_told() {
            self.orphans.push(connection.key);
        }
        self.let_go(place);
    }

    /// The connection is not known here any more.
    fn let_go(&mut self, place: usize) {
        let Some(connection) = self.connections.get_mut(place).and_then(Option::take) else {
            return;
        };
        connection.hang_up();
        self.forget(place, &connection);
        self.notices.push(Notice::Gone { id: connection.id });
        self.unwatched.push(connection.socket);
    }

    /// Takes a connection out of what is known; its receiving half, where it is to go on elsewhere.
    pub(super) fn forget(&mut self, place: usize, connection: &Connection) -> Option<Incoming> {
        self.places.remove(&connection.key);
        self.present[usize::from(connection.priority)] -= 1;
        self.find_lowest();
        self.last = None;
        self.free.push(place);
        self.counters.connections.store(self.places.len() as u64, Ordering::Relaxed);
        self.half.get().take(place)
    }

    /// Finishes, resets, and connections that are over.
    pub(super) fn settle_ends(&mut self) -> Result<usize, Fault> {
        let mut count = 0;
        for place in 0..self.connections.len() {
            let Some(connection) = self.connections[place].as_mut() else { continue };
            let key = connection.key;
            if connection.ends.is_closed {
                let unread = self.half.get().at(place).is_some_and(|incoming| incoming.unread);
                connection.ends.unread |= unread;
            }
            match connection.look_at_ends() {
                Act::Wait => {}
                _ if self.data_out.room()? == 0 => break,
                Act::Finish => {
                    connection.ends.finish_sent = true;
                    self.data_out_control(key, PacketKind::Finish);
                    count += 1;
                }
                Act::Reset => self.break_off(place, Cause::Unread),
                Act::LetGo => self.let_go(place),
            }
        }
        while !self.orphans.is_empty() && self.data_out.room()? > 0 {
            if let Some(key) = self.orphans.pop() {
                self.data_out_control(key, PacketKind::Reset);
                count += 1;
            }
        }
        self.data_out.publish();
        Ok(count)
    }

    fn data_out_control(&mut self, key: Key, kind: PacketKind) {
        let length = u16::try_from(HEADER_BYTES).unwrap_or(0);
        let header = Header { source: key.own, destination: key.peer, length, sync: false, kind };
        // SAFETY: no payload.
        unsafe { self.data_out.stage(header, std::ptr::null()) };
    }
}

pub(super) fn libc_reset() -> u32 {
    u32::try_from(rustix::io::Errno::CONNRESET.raw_os_error()).unwrap_or(104)
}
