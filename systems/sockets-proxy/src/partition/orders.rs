//! What a partition is told and what it tells.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use beeline_sockets::packets::channel::Channel;

use super::Key;
use crate::conduit::Connection;
use crate::waits::Position;

/// What the monitor has a partition do.
#[derive(Debug)]
pub enum Command {
    /// A connection comes.
    Create {
        /// Its ports.
        key: Key,
        /// The monitor's number of it.
        id: u64,
        /// Its memory.
        channel: Arc<Channel>,
        /// The proxy's end of the placeholder.
        socket: OwnedFd,
        /// 0: the highest.
        priority: u8,
        /// Packets may go at once; else after [`Command::Open`].
        open: bool,
    },
    /// The other host has the connection, too.
    Open {
        /// Its ports.
        key: Key,
    },
    /// It is broken off.
    Break {
        /// Its ports.
        key: Key,
    },
    /// The link is up, or is not: without one every connection is broken off.
    Link {
        /// Which.
        up: bool,
    },
    /// The link is not up, and is expected to be again: connections stay, and nothing goes.
    Suspend,
    /// A connection that a proxy had which is gone.
    Adopt {
        /// Its ports.
        key: Key,
        /// The monitor's number of it.
        id: u64,
        /// Its memory.
        channel: Arc<Channel>,
        /// The proxy's end of the placeholder.
        socket: OwnedFd,
        /// 0: the highest.
        priority: u8,
    },
    /// The other host is to hear where a connection stands: [`Notice::Position`].
    Report {
        /// Its ports.
        key: Key,
        /// In this life of the link.
        life: u64,
    },
    /// Packets may go again, from there on.
    Resume {
        /// Its ports.
        key: Key,
        /// Packets in the other program's queue so far, counted round.
        delivered: u32,
        /// Of these, those that it has consumed.
        consumed: u32,
    },
    /// The other host has nothing of the connection any more: it is over, or broken off where its end
    /// had not come.
    Abandon {
        /// Its ports.
        key: Key,
    },
    /// A connection is to go to another partition. The other host's end follows by itself.
    Move {
        /// Its ports.
        key: Key,
        /// Which partition.
        to: usize,
    },
    /// A connection comes from another partition.
    Arrive(Departure),
    /// The partitions of this link, for connections that depart.
    Siblings(Vec<Arc<crate::thread::Mailbox<Command>>>),
    /// The thread ends.
    Stop,
}

/// A connection on its way to another partition of the same link.
#[derive(Debug)]
pub struct Departure {
    pub(crate) connection: Box<Connection>,
    /// Which partition.
    pub to: usize,
}

impl Departure {
    /// The proxy's end of its placeholder.
    #[must_use]
    pub fn socket(&self) -> Option<&OwnedFd> {
        Some(&*self.connection.socket)
    }

    /// Its memory.
    #[must_use]
    pub fn channel(&self) -> &Channel {
        &self.connection.channel
    }
}

/// What a partition tells the monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A connection is known: packets for it are taken.
    Created {
        /// The monitor's number of it.
        id: u64,
    },
    /// A connection is not known any more.
    Gone {
        /// The monitor's number of it.
        id: u64,
    },
    /// Where a connection stands: after [`Command::Report`].
    Position {
        /// The monitor's number of it.
        id: u64,
        /// How far it has come.
        position: Position,
    },
    /// A connection came from another partition.
    Moved {
        /// The monitor's number of it.
        id: u64,
        /// Its ports.
        key: Key,
    },
    /// Every connection was broken off after [`Command::Link`], or stands still after
    /// [`Command::Suspend`].
    Cleared,
    /// The other host broke the rules.
    Fault {
        /// Which.
        reason: String,
    },
}
