//! One connection at a relay, and all of them by number.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use beeline_fabric::{MemoryRegion, RemoteAddress};
use beeline_sockets::segment::{CLOSED_CLEANLY, CLOSED_UNREAD};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use crate::guard;
use crate::mirror::{Mirror, SignsCopy};
use crate::recall::Recalling;
use crate::sleepy::Sleepy;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its other end has not been heard of.
    Waiting,
    /// The other relay was asked about it.
    Offered,
    /// The other relay asked; it was told yes, and has the last word.
    Promised,
    /// Both have it.
    Paired,
    /// The other relay was told the end, and is to say that it let go.
    Ending,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    /// Of the program's end.
    pub own: SocketAddr,
    /// Of the other end.
    pub peer: SocketAddr,
    /// The kernel's number of the program's socket.
    pub cookie: u64,
    /// Place of the peer's host in the configuration.
    pub host: usize,
    /// The segment.
    pub mirror: Mirror,
    /// A copy of the program's socket; none once it was let go.
    pub socket: Option<OwnedFd>,
    /// Where it is.
    pub phase: Phase,
    /// Since when.
    pub since: Duration,
    /// Which link it is on, from `Offered` on.
    pub link: usize,
    /// How the other relay names it.
    pub far: u64,
    /// The other segment's incoming ring.
    pub ground: Option<RemoteAddress>,
    /// The outgoing ring, for our writes.
    pub outgoing: Option<MemoryRegion>,
    /// The incoming ring, for the other relay's.
    pub incoming: Option<MemoryRegion>,
    /// Messages under way with data of it.
    pub in_flight: u32,
    /// It is looked at in every turn.
    pub is_hot: bool,
    /// When it last had news.
    pub news_at: Duration,
    /// The other relay was asked to make its program switch.
    pub has_nudged: bool,
    /// The other relay asked that this program switches: it stays armed until it has.
    pub is_nudged: bool,
    /// Bytes or an end were stored that the program may sleep for.
    pub stored: bool,
    /// Room was stored that the program may sleep for.
    pub gave_room: bool,
    /// Processes that hold the program's end.
    pub holders: Vec<u32>,
    /// None of them is left: what the last one would have said.
    pub last_word: Option<u32>,
    /// It is called back to the kernel.
    pub recalling: Option<Recalling>,
    /// Whether its program sleeps all the time.
    pub sleepy: Sleepy,
    /// Bytes out of this host and into it, with headers.
    pub moved: [u64; 2],
}

impl Connection {
    /// The program's signs, or what is to be said for a program that is no more.
    #[must_use]
    pub fn signs(&self) -> SignsCopy {
        let mut signs = self.mirror.signs();
        if let Some(word) = self.last_word
            && signs.closed == 0
        {
            signs.closed = word;
        }
        signs
    }

    /// It is called back, and the last doorbell was sent.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.recalling.is_some_and(|recalling| recalling.is_silent())
    }

    /// The program goes on, if it was kept from it.
    pub fn release(&self, recalling: &Recalling) {
        if recalling.holds_program() {
            self.mirror.program().go_on();
        }
    }

    /// Whoever held the program's end is gone: as the kernel closes for it.
    pub fn orphan(&mut self) {
        if self.last_word.is_none() {
            let unread = self.mirror.has_unread();
            self.last_word = Some(if unread { CLOSED_UNREAD } else { CLOSED_CLEANLY });
        }
    }

    /// Lets the kernel's connection go: nobody but the program holds it now. An end that is to be
    /// told as a reset is one.
    pub fn let_go(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        guard::unmark(&socket);
        if self.last_word == Some(CLOSED_UNREAD) {
            let _ = set_socket_linger(&socket, Some(Duration::ZERO));
        } else if self.mirror.signs_sent().closed == CLOSED_CLEANLY {
            self.swallow(&socket);
        }
    }

    /// The kernel's connection will end as with bytes unread, once the last who has it closes it.
    pub fn reset_by_close(&self) {
        if let Some(socket) = &self.socket {
            let _ = set_socket_linger(socket, Some(Duration::ZERO));
        }
    }

    /// Takes `most` doorbells that lie before what is the kernel's: its program has closed.
    pub fn take_bells(&self, most: u64) {
        let mut bells = [0_u8; 64];
        let mut left = usize::try_from(most).unwrap_or(usize::MAX);
        while left > 0
            && let Some(socket) = &self.socket
        {
            let some = left.min(bells.len());
            match rustix::net::recv(socket, &mut bells[..some], RecvFlags::DONTWAIT) {
                Ok((_, taken @ 1..)) => left -= taken.min(left),
                _ => return,
            }
        }
    }

    /// Doorbells that nobody took would make the kernel reset what ends in good order.
    fn swallow(&self, socket: &OwnedFd) {
        let switched = self.mirror.signs_stored().switched_at;
        let read = self.mirror.segment().other().receiving.by_kernel.load(
            // A hint: who lies about it is told of as reset.
            std::sync::atomic::Ordering::Relaxed,
        );
        if switched == 0 || read < switched - 1 {
            return;
        }
        let mut bells = [0_u8; 64];
        for _ in 0..64 {
            match rustix::net::recv(socket, &mut bells[..], RecvFlags::DONTWAIT) {
                Ok((_, 1..)) => {}
                _ => return,
            }
        }
    }

    /// Breaks the kernel's connection, so that whoever sleeps on it wakes, here and there. A program there that
    /// went [back](crate::recall) to it, as may be when the other relay was told the total, hears of a reset:
    /// this one did not end in good order, and an end of the kernel's stream would say so.
    pub fn cut(&mut self) {
        let is_silent = self.is_silent();
        if let Some(socket) = self.socket.take() {
            guard::unmark(&socket);
            // Whoever else has it open: without an address, a connection is taken down by a reset.
            if !is_silent || rustix::net::connect_unspec(&socket).is_err() {
                let _ = rustix::net::shutdown(&socket, Shutdown::Both);
            }
        }
    }

    /// Sends the other program a doorbell. False when the kernel's connection is broken.
    #[must_use]
    pub fn ring(&self) -> bool {
        use rustix::io::Errno;
        let Some(socket) = &self.socket else { return true };
        match rustix::net::send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            // A full socket holds unread bytes, which wake just as well.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => true,
            Err(_) => false,
        }
    }
}

/// Connections by number; a number is used again with another generation.
#[derive(Debug, Default)]
pub struct Table {
    places: Vec<(u32, Option<Box<Connection>>)>,
    free: Vec<u32>,
    count: usize,
}

impl Table {
    /// Connections in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Takes one in; its number.
    pub fn insert(&mut self, connection: Connection) -> u32 {
        self.count += 1;
        let connection = Some(Box::new(connection));
        if let Some(index) = self.free.pop() {
            self.places[index as usize].1 = connection;
            return index;
        }
        self.places.push((1, connection));
        u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
    }

    /// Takes one out.
    pub fn remove(&mut self, index: u32) -> Option<Box<Connection>> {
        let (generation, place) = self.places.get_mut(index as usize)?;
        let connection = place.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(index);
        self.count -= 1;
        Some(connection)
    }

    /// The one with this number.
    #[must_use]
    pub fn get(&self, index: u32) -> Option<&Connection> {
        self.places.get(index as usize)?.1.as_deref()
    }

    /// The one with this number.
    #[must_use]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut Connection> {
        self.places.get_mut(index as usize)?.1.as_deref_mut()
    }

    /// How another relay is to name it.
    #[must_use]
    pub fn name(&self, index: u32) -> u64 {
        let generation = self.places.get(index as usize).map_or(0, |place| place.0);
        u64::from(generation) << 32 | u64::from(index)
    }

    /// The number of what another relay names so, if it is still there.
    #[must_use]
    pub fn named(&self, name: u64) -> Option<u32> {
        let (index, generation) = (name as u32, (name >> 32) as u32);
        let place = self.places.get(index as usize)?;
        (place.0 == generation && place.1.is_some()).then_some(index)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Connection)> {
        self.places
            .iter()
            .enumerate()
            .filter_map(|(index, place)| Some((u32::try_from(index).ok()?, place.1.as_deref()?)))
    }

    /// Numbers of all that `which` says yes to.
    #[must_use]
    pub fn select(&self, mut which: impl FnMut(&Connection) -> bool) -> Vec<u32> {
        self.iter().filter(|(_, one)| which(one)).map(|(index, _)| index).collect()
    }
}
