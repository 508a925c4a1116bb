//! The monitor's talk with other monitors.

use std::net::SocketAddr;
use std::time::Instant;

use beeline_os::poller::Interest;
use rustix::net::SocketFlags;

use crate::handshake::{Event, State};
use crate::message::{Message, Refusal};
use crate::monitor::{Monitor, SESSION, peer_of};
use crate::partition::Key;
use crate::peer::{Fall, Remote, Session};

impl Monitor {
    pub(crate) fn dial(&mut self, index: usize, now: Instant) {
        let remote = &mut self.remotes[index];
        match remote.dial(self.config.listen, now) {
            Ok(()) => self.watch_session(index, true),
            Err(error) => {
                tracing::debug!(%error, peer = remote.peer.name, "its monitor was not reached")
            }
        }
    }

    pub(crate) fn watch_session(&self, index: usize, fresh: bool) {
        let Some(session) = &self.remotes[index].session else { return };
        let interest = if session.wants_to_write() { Interest::READ_WRITE } else { Interest::READ };
        let token = SESSION | index as u64;
        let watched = if fresh {
            self.poller.add(session, token, interest)
        } else {
            self.poller.modify(session, token, interest)
        };
        if let Err(error) = watched {
            tracing::warn!(%error, "a session is not watched");
        }
    }

    pub(crate) fn meet_monitors(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(&self.monitors, flags) else { return };
        let from = peer_of(&socket);
        let Some(from) = from.map(|from| from.ip().to_canonical()) else { return };
        let known = |remote: &Remote| remote.peer.monitor.ip() == from || remote.has(from);
        let Some(index) = self.remotes.iter().position(known) else {
            tracing::warn!(%from, "a monitor that is no peer");
            return;
        };
        let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        if self.remotes[index].session.is_some() {
            // The other end began anew.
            self.lose_session(index, "its monitor called again");
        }
        let mut session = Session::new(socket, false);
        let hello = self.remotes[index].hello();
        if session.send(&hello).is_ok() {
            self.remotes[index].session = Some(session);
            self.watch_session(index, true);
        }
    }

    pub(crate) fn lose_session(&mut self, index: usize, reason: &str) {
        let remote = &mut self.remotes[index];
        let Some(session) = remote.session.take() else { return };
        let _ = self.poller.remove(&session);
        if remote.is_up() && session.greeted {
            remote.fail(reason.to_owned(), Fall::Keeps, None);
            self.suspend_link(index);
        }
    }

    pub(crate) fn hear_session(&mut self, index: usize) {
        // What the other monitor says follows what it saw of the link.
        if index < self.remotes.len() {
            self.look_at_link(index, Instant::now());
        }
        let Some(session) = self.remotes.get_mut(index).and_then(|remote| remote.session.as_mut())
        else {
            return;
        };
        if session.connecting {
            match rustix::net::sockopt::socket_error(&*session) {
                Ok(Ok(())) => session.connecting = false,
                _ => return self.lose_session(index, "its monitor was not reached"),
            }
        }
        let mut messages = Vec::new();
        let outcome = session.flush().and_then(|()| session.receive(&mut messages));
        for message in messages {
            self.hear_monitor(index, message);
        }
        match outcome {
            Ok(()) => self.watch_session(index, false),
            Err(error) => self.lose_session(index, &format!("its monitor is gone: {error}")),
        }
    }

    pub(crate) fn send(&mut self, index: usize, message: &Message) {
        let Some(session) = self.remotes[index].session.as_mut() else { return };
        match session.send(message) {
            Ok(()) => self.watch_session(index, false),
            Err(error) => self.lose_session(index, &format!("its monitor is gone: {error}")),
        }
    }

    pub(crate) fn hear_monitor(&mut self, index: usize, message: Message) {
        let remote = &mut self.remotes[index];
        if let Message::Hello { announced } = message {
            let own = remote.geometry.announcement();
            match own.iter().zip(announced).position(|(own, theirs)| *own != theirs) {
                None => remote.greeted(),
                Some(place) => {
                    let name = crate::geometry::Geometry::name_of(Some(place));
                    remote.reason = format!(
                        "the other end has {name} {}, this one {}",
                        announced[place], own[place]
                    );
                    tracing::error!(peer = remote.peer.name, reason = remote.reason, "refused");
                }
            }
            return;
        }
        if !remote.session.as_ref().is_some_and(|session| session.greeted) {
            return;
        }
        let event = |monitor: &mut Self, to: u64, event: Event| {
            // Only of a connection with this peer.
            if monitor.connections.get(&to).is_some_and(|known| known.link == index) {
                monitor.happens(to, event);
            }
        };
        match message {
            Message::Hello { .. } => {}
            Message::Syn { from, priority, source, destination } => {
                self.hear_syn(index, from, priority, source, destination);
            }
            Message::SynAck { to, from, partition } => {
                let partitions = self.remotes[index].geometry.partitions;
                let Some(connection) = self.connections.get_mut(&to) else {
                    return self.send(index, &Message::Gone { to: from });
                };
                if connection.link != index || connection.peer_id != 0 {
                    return;
                }
                connection.peer_id = from;
                if connection.state != State::SynSent {
                    // This end gave up meanwhile, and could not say so.
                    return self.happens(to, Event::SynAck);
                }
                if usize::from(partition) >= partitions {
                    return self.happens(to, Event::Refused);
                }
                connection.partition = Some(usize::from(partition));
                self.remotes[index].load[usize::from(partition)] += 1;
                self.happens(to, Event::SynAck);
            }
            Message::Refusal { to, why } => {
                let known = self.connections.get_mut(&to).filter(|known| known.link == index);
                if let Some(connection) = known {
                    connection.refusal = why;
                }
                event(self, to, Event::Refused);
            }
            Message::Established { to } => event(self, to, Event::Established),
            Message::Gone { to } => self.hear_gone(index, to),
            Message::Extent { to, from, bytes } => self.hear_extent(index, to, from, bytes),
            Message::ExtentIs { to, number } => self.hear_extent_is(index, to, number),
            Message::Resume { to, from, partition, position } => {
                self.hear_resume(index, (to, from), usize::from(partition), position);
            }
        }
    }

    /// A program of the other host wants a connection to one of this.
    pub(crate) fn hear_syn(
        &mut self,
        index: usize,
        from: u64,
        priority: u8,
        source: SocketAddr,
        destination: SocketAddr,
    ) {
        let key = Key { own: destination.port(), peer: source.port() };
        let (from_host, to_host) = (source.ip().to_canonical(), destination.ip().to_canonical());
        // Rules go by addresses: no peer speaks for this host, or for another peer.
        let others = self.remotes.iter().enumerate().filter(|&(other, _)| other != index);
        let is_anothers = self.config.addresses.contains(&from_host)
            || others.into_iter().any(|(_, other)| other.has(from_host));
        let refusal = if !self.config.addresses.contains(&to_host) || is_anothers {
            Some(Refusal::NotHere)
        } else if !self.config.allows(from_host, destination.port()) {
            self.tally.denied += 1;
            Some(Refusal::Denied)
        } else if self.keys.contains_key(&(index, key)) {
            Some(Refusal::PortInUse)
        } else {
            None
        };
        let keeper = self.keeper.as_ref();
        let gone = |inode| keeper.into_iter().for_each(|keeper| keeper.forget_listener(inode));
        let (refusal, owner) = match refusal {
            None => match self.listeners.takes(destination, gone) {
                None => (Some(Refusal::NoListener), 0),
                Some(owner) if !self.has_memory(owner, index) => (Some(Refusal::NoRoom), owner),
                Some(owner) => (None, owner),
            },
            refused => (refused, 0),
        };
        if let Some(why) = refusal {
            self.tally.refused += 1;
            return self.send(index, &Message::Refusal { to: from, why });
        }
        let most = self.config.connections_per_partition;
        let Some(partition) = self.remotes[index].place(most) else {
            self.tally.refused += 1;
            return self.send(index, &Message::Refusal { to: from, why: Refusal::NoRoom });
        };
        let id = self.add(index, key, source, destination, priority, State::Preparing);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.peer_id = from;
            connection.partition = Some(partition);
            connection.owner = owner;
        }
        self.create(id, false);
    }
}
