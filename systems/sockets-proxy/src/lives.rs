//! Connections beyond one life of a link, of a proxy, or of a place: what a dead proxy left, links that
//! fall and come back, moves between partitions.
//!
//! When a link is up again each monitor says of every connection how far its end has come, and each
//! partition goes on from where the other end is: the sending end still has the blocks of all that is
//! not consumed ([`crate::flow`]).

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use beeline_sockets::packets::channel::Channel;

use crate::handshake::{Event, State};
use crate::keeper::{Inheritance, Kept};
use crate::message::Message;
use crate::monitor::Monitor;
use crate::partition::{Command, Key};
use crate::thread::Place;
use crate::waits::Position;

impl Monitor {
    /// Takes over what a proxy left that died.
    pub(crate) fn inherit(&mut self, all: Inheritance) {
        for (at, inode, owner) in all.listeners {
            self.listeners.add(at, inode, owner);
        }
        for kept in all.connections {
            let id = kept.id;
            if !self.adopt(kept)
                && let Some(keeper) = &self.keeper
            {
                keeper.forget(id);
            }
        }
    }

    /// True when the connection lives on.
    fn adopt(&mut self, kept: Kept) -> bool {
        let Kept { id, record, memory, socket } = kept;
        let named = |remote: &crate::peer::Remote| remote.peer.name == record.peer;
        let link = self.remotes.iter().position(named);
        let Some(link) = link.filter(|_| record.established) else { return hang_up(&socket) };
        let geometry = self.remotes[link].geometry;
        let descriptor = memory.try_clone();
        let channel = match Channel::take(memory) {
            Ok(channel) => channel,
            Err(error) => {
                self.tally.not_adopted += 1;
                if self.tally.not_adopted == 1 {
                    tracing::warn!(%error, "a connection is broken off, as others like it are");
                }
                return hang_up(&socket);
            }
        };
        let Ok(descriptor) = descriptor else { return hang_up(&socket) };
        if record.partition >= geometry.partitions
            || channel.shape() != geometry.shape()
            || self.keys.contains_key(&(link, record.key))
        {
            return hang_up(&socket);
        }
        channel.mapping().forget_descriptor();
        let thread = link * self.config.partitions + record.partition;
        channel.partition().store(u32::try_from(thread).unwrap_or(0), Ordering::SeqCst);
        let (key, priority) = (record.key, record.priority);
        let next = std::mem::replace(&mut self.next, id);
        self.add(link, key, record.source, record.destination, priority, State::Established);
        self.next = next;
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.peer_id = record.peer_id;
            connection.partition = Some(record.partition);
            connection.owner = record.owner;
            connection.memory = Some(Arc::new(descriptor));
            connection.waits.begin(Instant::now());
        }
        self.remotes[link].load[record.partition] += 1;
        self.tally.adopted += 1;
        let channel = Arc::new(channel);
        self.command(id, Command::Adopt { key, id, channel, socket, priority });
        true
    }

    /// The link fell, and may come back: connections that both programs have wait for that.
    pub(crate) fn suspend_link(&mut self, index: usize) {
        let now = Instant::now();
        let (mut others, mut over) = (Vec::new(), Vec::new());
        let mut load = vec![0; self.remotes[index].geometry.partitions];
        for (&id, connection) in &mut self.connections {
            if connection.link != index {
                continue;
            }
            connection.moving = false;
            let stays = matches!(connection.state, State::Established | State::PeerGone);
            if stays && !self.config.grace.is_zero() {
                if connection.state == State::PeerGone {
                    // Nothing comes any more, whether the link does or not: the program reads what is there.
                    over.push((id, connection.key));
                } else {
                    connection.waits.begin(now);
                }
                if let Some(partition) = connection.partition {
                    load[partition] += 1;
                }
            } else {
                others.push(id);
            }
        }
        for id in others {
            self.end_kept(id);
        }
        for (id, key) in over {
            self.command(id, Command::Abandon { key });
        }
        self.remotes[index].load = load;
    }

    /// A connection is over at this host, whatever the other one thinks.
    pub(crate) fn end_kept(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.waits.end();
        let key = connection.key;
        self.command(id, Command::Break { key });
        self.happens(id, Event::LinkDown);
    }

    /// The link is up again: the other monitor hears how far every connection has come.
    pub(crate) fn report_link(&mut self, index: usize) {
        let Some(life) = self.remotes[index].life() else { return };
        self.remotes[index].resumed = true;
        let (mut kept, mut heard) = (Vec::new(), Vec::new());
        for (&id, connection) in &mut self.connections {
            if connection.link == index {
                let (reports, position) = connection.waits.up(life);
                kept.extend(reports.then_some((id, connection.key)));
                heard.extend(position.map(|position| (id, position)));
            }
        }
        for (id, key) in kept {
            self.command(id, Command::Report { key, life });
        }
        for (id, (position, partition)) in heard {
            self.go_on(id, partition, position);
        }
    }

    pub(crate) fn tell_position(&mut self, id: u64, position: Position) {
        let Some(connection) = self.connections.get(&id) else { return };
        if self.remotes[connection.link].life() != Some(position.life) {
            // That life is over; the next one has a position of its own.
            return;
        }
        let partition = connection.partition.and_then(|place| u8::try_from(place).ok());
        let (link, to) = (connection.link, connection.peer_id);
        let partition = partition.unwrap_or(0);
        self.send(link, &Message::Resume { to, from: id, partition, position });
    }

    /// The other end of a connection says how far it has come.
    pub(crate) fn hear_resume(
        &mut self,
        index: usize,
        (to, from): (u64, u64),
        partition: usize,
        position: Position,
    ) {
        let life = self.remotes[index].life();
        let known = self.connections.get_mut(&to);
        let known = known.filter(|known| known.link == index && known.peer_id == from);
        let Some(connection) = known.filter(|known| known.state == State::Established) else {
            return self.send(index, &Message::Gone { to: from });
        };
        if connection.waits.hears(position, partition, life) {
            self.go_on(to, partition, position);
        }
    }

    /// Both ends of a connection know where the other one stands in this life of the link.
    fn go_on(&mut self, id: u64, partition: usize, position: Position) {
        let Some(connection) = self.connections.get(&id) else { return };
        if connection.partition != Some(partition) {
            // The proxy died while the connection was on its way to another partition.
            let (link, to) = (connection.link, connection.peer_id);
            self.end_kept(id);
            return self.send(link, &Message::Gone { to });
        }
        self.tally.continued += 1;
        let key = connection.key;
        let Position { delivered, consumed, .. } = position;
        self.command(id, Command::Resume { key, delivered, consumed });
    }

    pub(crate) fn hear_gone(&mut self, index: usize, to: u64) {
        let Some(connection) = self.connections.get_mut(&to) else { return };
        if connection.link != index {
            return;
        }
        if connection.waits.end() {
            // What the other host has not is either all here, or lost.
            let key = connection.key;
            self.command(to, Command::Abandon { key });
        }
        self.happens(to, Event::PeerGone);
    }

    // ---- moves ----

    /// Moves a connection from a loaded partition to another. Of two ends the first decides.
    pub(crate) fn balance(&mut self, index: usize, now: Instant) {
        if !self.remotes[index].decides() {
            return;
        }
        let Some((from, to)) = self.remotes[index].unequal(now) else { return };
        let stays = |connection: &crate::monitor::Connection| {
            connection.link == index
                && connection.partition == Some(from)
                && connection.state == State::Established
                && !connection.waits.is_waiting()
                && !connection.moving
        };
        let chosen = self.connections.iter().find(|(_, connection)| stays(connection));
        if let Some((&id, _)) = chosen {
            self.migrate(id, to);
        }
    }

    /// Has a connection carried by another partition, at both hosts.
    pub(crate) fn migrate(&mut self, id: u64, to: usize) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.moving = true;
        let key = connection.key;
        self.command(id, Command::Move { key, to });
    }

    pub(crate) fn has_moved(&mut self, id: u64, key: Key, place: Place) {
        let Place { link, partition: to } = place;
        let Some(connection) = self.connections.get_mut(&id) else {
            // It ended here while it moved: the order to break it off went to the partition that it had left.
            if !self.keys.contains_key(&(link, key)) {
                self.remotes[link].partitions[to].commands.put(Command::Break { key });
            }
            return;
        };
        let from = connection.partition.replace(to);
        connection.moving = false;
        let load = &mut self.remotes[link].load;
        if let Some(count) = from.and_then(|from| load.get_mut(from)) {
            *count = count.saturating_sub(1);
        }
        if let Some(count) = load.get_mut(to) {
            *count += 1;
        }
        self.tally.moved += 1;
        if let Some(keeper) = &self.keeper {
            let record = connection.record(&self.remotes[link].peer.name);
            keeper.amend(id, &record);
        }
    }
}

/// A connection that does not live on: its program hears so at once.
fn hang_up(socket: &std::os::fd::OwnedFd) -> bool {
    let _ = rustix::net::shutdown(socket.as_fd(), rustix::net::Shutdown::Both);
    false
}
