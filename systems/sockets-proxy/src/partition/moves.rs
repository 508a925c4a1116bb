//! A partition's part in lives and moves: connections that are taken over from a proxy that died, that wait
//! for a link, and that go to another partition.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_sockets::packets::channel::{ARMED, Channel, Direction, RINGING};
use beeline_sockets::packets::header::{HEADER_BYTES, Header, PacketKind};
use rustix::net::Shutdown;

use super::{Cause, Departure, Fault, Key, Notice, Partition, libc_reset};
use crate::conduit::{Connection, Incoming, Moving};
use crate::flow::{Allowance, Receipts, Violation};
use crate::waits::Position;

impl Partition {
    // ---- taking up ----

    /// A connection whose proxy is gone: what that one had in its hands is put right, and everything
    /// else stands in the memory that the program has, too.
    pub(super) fn adopt(
        &mut self,
        key: Key,
        id: u64,
        channel: Arc<Channel>,
        socket: OwnedFd,
        priority: u8,
    ) -> Option<usize> {
        let blocks = u32::try_from(self.geometry.blocks).unwrap_or(u32::MAX);
        let to_proxy = channel.packets(Direction::ToProxy);
        let to_program = channel.packets(Direction::ToProgram);
        let put = to_program.filled().put();
        let flow = (
            Allowance::kept(blocks, to_proxy.filled().taken()),
            Receipts::resume(blocks, put, to_program.returned()),
        );
        let whole = channel.proxy().reset.load(Ordering::Acquire) == 0;
        let (true, Ok(()), Ok(()), (allowance, Ok(receipts))) =
            (whole, to_proxy.mend_receiver(), to_program.mend_sender(), flow)
        else {
            channel.proxy().reset.store(libc_reset(), Ordering::Release);
            let _ = rustix::net::shutdown(&socket, Shutdown::Both);
            self.notices.push(Notice::Gone { id });
            return None;
        };
        let came = channel.proxy().ended.load(Ordering::Acquire) != 0;
        if came {
            let _ = rustix::net::shutdown(&socket, Shutdown::Write);
        }
        // A ring that was begun is taken back, and one that may have been sent uncounted is looked for by
        // the program from now on.
        let armed = &channel.program().reader_armed;
        let _ = armed.compare_exchange(RINGING, ARMED, Ordering::SeqCst, Ordering::SeqCst);
        channel.proxy().bells.fetch_add(1, Ordering::Release);
        self.keeps = true;
        let place =
            self.create(key, id, channel, socket, priority, false, (allowance, receipts))?;
        if let Some(connection) = self.connections[place].as_mut() {
            connection.ends.finish_came = came;
            // Given back and not told.
            connection.give_room();
        }
        if let Some(incoming) = self.half.get().at(place) {
            // What was published and not rung for.
            incoming.ring(&self.counters);
            incoming.finish_came = came;
        }
        Some(place)
    }

    pub(super) fn report(&mut self, key: Key, life: u64) {
        let Some(place) = self.find(key) else { return };
        let Some(id) = self.connections[place].as_ref().map(|connection| connection.id) else {
            return;
        };
        let position = self.half.get().at(place).map(Incoming::position);
        match position.unwrap_or(Err(Violation)) {
            Ok((delivered, consumed)) => {
                let position = Position { life, delivered, consumed };
                self.notices.push(Notice::Position { id, position });
            }
            Err(Violation) => self.break_off(place, Cause::Consumed),
        }
    }

    /// Nothing goes until [`Command::Resume`](super::Command::Resume); what is under way in the window counts as lost, and is
    /// sent again from the programs' blocks.
    pub(super) fn suspend(&mut self) {
        for connection in self.connections.iter_mut().flatten() {
            connection.open = false;
            connection.moving = Moving::Not;
            connection.late_credit = None;
        }
        self.answers.clear();
        self.due.clear();
        self.half.get().is_up = false;
        (self.is_up, self.keeps) = (false, true);
        // Those that were to be broken off where they go stay here: the other end hears of it when it reports.
        for place in 0..self.connections.len() {
            if self.connections[place].as_ref().is_some_and(|connection| connection.is_doomed) {
                self.break_off(place, Cause::Interrupted);
            }
        }
        (0..self.connections.len()).for_each(|place| self.note(place));
        self.notices.push(Notice::Cleared);
    }

    // ---- moving ----

    /// There are [`Partition::notices`] or [`Partition::departures`].
    #[must_use]
    #[inline]
    pub fn has_news(&self) -> bool {
        !self.notices.is_empty() || !self.departures.is_empty()
    }

    /// Connections that leave for other partitions: to be handed over before the next turn, which tells the
    /// other end, whose packets then come to the other partition.
    pub fn departures(&mut self) -> Vec<Departure> {
        std::mem::take(&mut self.departures)
    }

    /// A connection came from another partition of this link.
    pub(super) fn arrive(&mut self, mut connection: Connection) -> Option<usize> {
        let id = connection.id;
        if !self.is_up {
            connection.moving = Moving::Not;
            connection.open = false;
        }
        let ends = !self.is_up && (!self.keeps || connection.is_doomed);
        if ends || self.places.contains_key(&connection.key) {
            connection.channel.proxy().reset.store(libc_reset(), Ordering::Release);
            connection.hang_up();
            self.notices.push(Notice::Gone { id });
            return None;
        }
        self.counters.moves.fetch_add(1, Ordering::Relaxed);
        self.notices.push(Notice::Moved { id, key: connection.key });
        Some(self.settle(connection))
    }

    /// The connection at `place` goes to the partition `to`, where it is `then`.
    fn depart(&mut self, place: usize, to: usize, then: Moving) {
        let Some(mut connection) = self.connections.get_mut(place).and_then(Option::take) else {
            return;
        };
        connection.moving = then;
        connection.incoming = self.forget(place, &connection);
        self.departures.push(Departure { connection: Box::new(connection), to });
    }

    /// Says what is to be said about connections that move.
    pub(super) fn settle_moves(&mut self) -> Result<usize, Fault> {
        let mut count = 0;
        while !self.due.is_empty() && self.data_out.room()? > 0 {
            if let Some((key, to)) = self.due.pop() {
                self.say_migrate(key, to);
                count += 1;
            }
        }
        if !std::mem::take(&mut self.moves) {
            self.data_out.publish();
            return Ok(count);
        }
        for place in 0..self.connections.len() {
            let Some(connection) = self.connections[place].as_mut() else { continue };
            let (key, moving) = (connection.key, connection.moving);
            self.moves |= moving != Moving::Not;
            let to = match moving {
                // The other end may be gone once it has this end's last packet, and would answer no move.
                Moving::Leaving(_) if connection.ends.finish_sent => {
                    connection.moving = Moving::Not;
                    self.note(place);
                    continue;
                }
                Moving::Leaving(to) => to,
                Moving::Arrived => 0,
                Moving::Not | Moving::Left(_) | Moving::Awaiting => continue,
            };
            if self.data_out.room()? == 0 {
                break;
            }
            if moving == Moving::Arrived {
                self.stays(place);
            } else {
                connection.moving = Moving::Left(to);
            }
            self.say_migrate(key, to);
            count += 1;
        }
        self.data_out.publish();
        Ok(count)
    }

    fn say_migrate(&mut self, key: Key, to: usize) {
        let words = [to as u64, 0];
        let length = u16::try_from(HEADER_BYTES + 16).unwrap_or(0);
        let kind = PacketKind::Migrate;
        let Key { own: source, peer: destination } = key;
        let header = Header { source, destination, length, sync: false, kind };
        // SAFETY: the sixteen bytes of two words of ours.
        unsafe { self.data_out.stage(header, words.as_ptr().cast()) };
    }

    /// A connection is where it is to be, at both ends.
    fn stays(&mut self, place: usize) {
        let Some(connection) = self.connections[place].as_mut() else { return };
        connection.moving = Moving::Not;
        let is_doomed = connection.is_doomed;
        self.note(place);
        if let Some(incoming) = self.half.get().at(place) {
            // What was said on the way may have been said to a partition that it had left.
            incoming.retell = true;
        }
        if is_doomed {
            self.break_off(place, Cause::Doomed);
        }
    }

    /// The other end's last packet here, or its first after a move.
    pub(super) fn migrate(&mut self, place: usize, to: u64) -> Result<(), Fault> {
        let Some(connection) = self.connections[place].as_mut() else { return Ok(()) };
        let key = connection.key;
        let violation = Fault::Flow { key, violation: Violation };
        let to = usize::try_from(to).ok().filter(|to| *to < self.geometry.partitions);
        let to = to.ok_or(violation)?;
        match connection.moving {
            Moving::Not => {
                self.answers.push((key, to));
                self.depart(place, to, Moving::Awaiting);
            }
            Moving::Left(own) if own == to => self.depart(place, to, Moving::Arrived),
            Moving::Awaiting => self.stays(place),
            Moving::Left(_) | Moving::Leaving(_) | Moving::Arrived => {
                return Err(Fault::Flow { key, violation: Violation });
            }
        }
        Ok(())
    }
}
