//! The monitor's talk with programs of this host, and knocks at their listening sockets.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};

use beeline_os::control_socket::{ControlSocket, Received};
use beeline_os::poller::Interest;
use beeline_sockets::packets::channel::VERSION;
use beeline_sockets::packets::dial::{KNOCK_FROM, PLACEHOLDER_NAME};
use beeline_sockets::packets::protocol::{self, Answer, BadRecord, Question};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::handshake::{Event, State};
use crate::keeper::Keeper;
use crate::message::{Message, Refusal};
use crate::monitor::{Broken, CLIENT, KNOCK, Monitor, peer_of};
use crate::partition::Key;

/// Programs that are heard at the same time.
const MOST_CLIENTS: usize = 1024;
/// Ports that are given to connecting programs, beside those of the kernel first.
pub(crate) const PORTS: std::ops::RangeInclusive<u16> = 61_000..=65_535;
const MORE_PORTS: std::ops::RangeInclusive<u16> = 20_000..=60_999;

/// The other end of a knock is gone, or refused it; or a program without the library accepted it, and speaks.
fn has_ended(knock: &OwnedFd) -> bool {
    let mut byte = [0_u8; 1];
    let peek = rustix::net::RecvFlags::DONTWAIT | rustix::net::RecvFlags::PEEK;
    match rustix::net::recv(knock, &mut byte[..], peek) {
        Ok(_) => true,
        Err(error) => !matches!(error, Errno::AGAIN | Errno::INTR),
    }
}

/// The process at the other end; 0: not known.
pub(crate) fn process_of(client: &ControlSocket) -> u64 {
    client.peer().ok().and_then(|peer| u64::try_from(peer.pid).ok()).unwrap_or(0)
}

impl Monitor {
    /// Connects to the listening socket through the kernel.
    pub(crate) fn knock(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let to = connection.destination;
        let made = (|| -> io::Result<(OwnedFd, SocketAddr)> {
            let (family, from): (_, IpAddr) = if to.is_ipv4() {
                (AddressFamily::INET, KNOCK_FROM.into())
            } else {
                (AddressFamily::INET6, Ipv6Addr::LOCALHOST.into())
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
            rustix::net::bind(&socket, &SocketAddr::new(from, 0))?;
            match rustix::net::connect(&socket, &to) {
                Ok(()) | Err(Errno::INPROGRESS) => {}
                Err(error) => return Err(error.into()),
            }
            let own = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
            self.poller.add(&socket, KNOCK | id, Interest::READ_WRITE)?;
            Ok((socket, SocketAddr::new(own.ip().to_canonical(), own.port())))
        })();
        match made {
            Ok((socket, from)) => {
                connection.knock = Some(socket);
                connection.knock_from = Some(from);
                self.knocks.insert(from, id);
            }
            Err(error) => {
                tracing::debug!(%error, %to, "a knock was not made");
                connection.refusal = Refusal::NotTaken;
                self.happens(id, Event::KnockFailed);
            }
        }
    }

    pub(crate) fn hear_knock(&mut self, id: u64) {
        if let Some(broken) = self.broken.get(&id) {
            // The listening socket is gone, or a program without the library accepted.
            if has_ended(&broken.knock) {
                let _ = self.poller.remove(&broken.knock);
                self.knocks.remove(&broken.from);
                self.broken.remove(&id);
            }
            return;
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(knock) = &connection.knock else { return };
        if has_ended(knock) {
            let _ = self.poller.remove(knock);
            connection.knock_from.map(|from| self.knocks.remove(&from));
            connection.knock = None;
            connection.refusal = Refusal::NotTaken;
            return self.happens(id, Event::KnockFailed);
        }
        connection.knocked = true;
        // From now on only its end is of interest.
        let _ = self.poller.modify(knock, KNOCK | id, Interest::READ);
        self.happens(id, Event::Knocked);
    }

    pub(crate) fn meet_programs(&mut self) {
        let waiting: Vec<_> = self.programs.waiting(64).collect();
        for client in waiting {
            let own = rustix::process::geteuid().as_raw();
            let theirs = client.peer().map(|peer| peer.uid);
            if self.clients.len() >= MOST_CLIENTS || !theirs.is_ok_and(|uid| uid == own || uid == 0)
            {
                continue;
            }
            let index = self.next;
            self.next += 1;
            if self.poller.add(&client, CLIENT | index, Interest::READ).is_ok() {
                self.clients.insert(index, (client, std::time::Instant::now()));
                self.hear_client(index);
            }
        }
    }

    pub(crate) fn hear_client(&mut self, index: u64) {
        let Some((client, _)) = self.clients.get(&index) else { return };
        let (mut record, mut descriptors) = ([0; protocol::LONGEST], Vec::new());
        let length = match client.receive(&mut record, &mut descriptors) {
            Ok(Received::Empty) => return,
            Ok(Received::Record(length)) => length,
            Ok(Received::Closed) | Err(_) => 0,
        };
        let Some((client, _)) = self.clients.remove(&index) else { return };
        let _ = self.poller.remove(&client);
        let question = match Question::decode(&record[..length]) {
            Ok(question) => question,
            Err(BadRecord::OtherVersion { found }) => return self.meet_stranger(&client, found),
            Err(_) => return,
        };
        match question {
            Question::Hello => match self.page.for_reading() {
                Ok(page) => _ = client.send(&Answer::Page.encode(), &[page.as_fd()]),
                Err(error) => tracing::warn!(%error, "the page was not given"),
            },
            Question::Connect { to, own, priority } => self.connect(client, to, own, priority),
            Question::Listen { at, inode } => {
                let owner = process_of(&client);
                self.listeners.add(at, inode, owner);
                if let Some(keeper) = &self.keeper {
                    keeper.listener(at, inode, owner);
                }
                let _ = client.send(&Answer::Done.encode(), &[]);
            }
            Question::Claim => self.claim(&client, descriptors.pop()),
            Question::Resume => self.resume(&client, descriptors.pop()),
            Question::Extent { bytes } => self.ask_extent(client, descriptors.pop(), bytes),
            Question::Arrivals => self.give_arrivals(&client, descriptors.pop()),
            Question::Status => {
                for line in self.status() {
                    if client.send(&Answer::Line(line).encode(), &[]).is_err() {
                        return;
                    }
                }
                let _ = client.send(&Answer::Done.encode(), &[]);
            }
        }
    }

    /// A library of another version: its program has the kernel's connections alone, and listens for those alone. The
    /// answer is of this version, which a library that comes later can tell.
    fn meet_stranger(&mut self, client: &ControlSocket, found: u8) {
        const WHY: &str = "the program's library is of another version";
        if !self.tally.fallbacks.contains_key(WHY) {
            let process = process_of(client);
            tracing::warn!(process, "a program's library is of version {found}, this is {VERSION}");
        }
        self.leave_to_kernel(client, 0, WHY);
    }

    pub(crate) fn leave_to_kernel(
        &mut self,
        client: &ControlSocket,
        error: i32,
        why: &'static str,
    ) {
        *self.tally.fallbacks.entry(why).or_default() += 1;
        let _ = client.send(&Answer::Kernel { error }.encode(), &[]);
    }

    pub(crate) fn connect(
        &mut self,
        client: ControlSocket,
        to: SocketAddr,
        own: Option<SocketAddr>,
        priority: u8,
    ) {
        let Some(index) = self.remotes.iter().position(|remote| remote.has(to.ip())) else {
            return self.leave_to_kernel(&client, 0, "no peer has the address");
        };
        if !self.remotes[index].is_usable() {
            return self.leave_to_kernel(&client, 0, "the link is down");
        }
        let host = own.map(|own| own.ip()).filter(|host| !host.is_unspecified());
        let host = host.or_else(|| {
            let fits = |address: &&IpAddr| address.is_ipv4() == to.ip().is_ipv4();
            self.config.addresses.iter().find(fits).copied()
        });
        let Some(host) = host.filter(|host| self.config.addresses.contains(host)) else {
            return self.leave_to_kernel(&client, 0, "bound to an address that is not of the list");
        };
        if !self.config.allows(host, to.port()) {
            self.tally.denied += 1;
            let error = Errno::PERM.raw_os_error();
            return self.leave_to_kernel(&client, error, "denied by this host");
        }
        let owner = process_of(&client);
        if !self.has_memory(owner, index) {
            return self.leave_to_kernel(&client, 0, "the memory of the process is used up");
        }
        let wanted = own.map_or(0, |own| own.port());
        let Some(port) = self.port(index, to.port(), wanted) else {
            return self.leave_to_kernel(&client, 0, "no port is free");
        };
        let key = Key { own: port, peer: to.port() };
        let source = SocketAddr::new(host, port);
        let id = self.add(index, key, source, to, priority, State::SynSent);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.client = Some(client);
            connection.owner = owner;
        }
        self.send(index, &Message::Syn { from: id, priority, source, destination: to });
    }

    /// Whether the process may have the memory of one more connection over this link.
    pub(crate) fn has_memory(&self, process: u64, link: usize) -> bool {
        let Some(most) = self.config.memory_of_a_process else { return true };
        let bytes = |link: usize| self.remotes[link].geometry.shape().length_bytes() as u64;
        let own = self.connections.values().filter(|known| known.owner == process && process != 0);
        own.map(|known| bytes(known.link)).sum::<u64>() + bytes(link) <= most
    }

    /// A port for a connection to `peer` at this link, or `wanted` if it is free.
    pub(crate) fn port(&mut self, link: usize, peer: u16, wanted: u16) -> Option<u16> {
        let free = |port: u16| !self.keys.contains_key(&(link, Key { own: port, peer }));
        if wanted != 0 {
            return free(wanted).then_some(wanted);
        }
        let from = self.next_port;
        let first = (from..=*PORTS.end()).chain(*PORTS.start()..from).chain(MORE_PORTS);
        let found = first.into_iter().find(|&port| free(port))?;
        self.next_port = if found >= *PORTS.end() || found < *PORTS.start() {
            *PORTS.start()
        } else {
            found + 1
        };
        Some(found)
    }

    /// A program accepted a knock.
    pub(crate) fn claim(&mut self, client: &ControlSocket, knock: Option<OwnedFd>) {
        let peer = knock.as_ref().and_then(peer_of);
        let from = peer.map(|peer| SocketAddr::new(peer.ip().to_canonical(), peer.port()));
        let id = from.and_then(|from| self.knocks.get(&from).copied());
        if let Some(Broken { knock, from, memory, placeholder }) =
            id.and_then(|id| self.broken.remove(&id))
        {
            let _ = self.poller.remove(&knock);
            self.knocks.remove(&from);
            let _ = client.send(&Answer::Channel.encode(), &[memory.as_fd(), placeholder.as_fd()]);
            return;
        }
        let Some(connection) = id.and_then(|id| self.connections.get_mut(&id)) else {
            // An address that knocks come from is no program's.
            let aborted = Errno::CONNABORTED.raw_os_error();
            let knocks =
                peer.is_some_and(|peer| peer.ip().to_canonical() == IpAddr::from(KNOCK_FROM));
            let error = if knocks { aborted } else { 0 };
            let _ = client.send(&Answer::Kernel { error }.encode(), &[]);
            return;
        };
        if let Some(knock) = connection.knock.take() {
            let _ = self.poller.remove(&knock);
        }
        connection.knock_from.map(|from| self.knocks.remove(&from));
        if let Some((placeholder, memory)) =
            connection.placeholder.take().zip(connection.memory.clone())
        {
            self.tally.accepted += 1;
            let _ = client.send(&Answer::Channel.encode(), &[memory.as_fd(), placeholder.as_fd()]);
        }
        // Who accepts it may be faster than the news that it was taken.
        if let Some(id) = id {
            self.happens(id, Event::Knocked);
        }
    }

    /// The number of the connection whose placeholder this is.
    pub(crate) fn placeholders_id(&self, end: &OwnedFd) -> Option<u64> {
        let name = SocketAddrUnix::try_from(rustix::net::getpeername(end).ok()??).ok()?;
        let text =
            std::str::from_utf8(name.abstract_name()?.strip_prefix(PLACEHOLDER_NAME)?).ok()?;
        let (process, id) = text.split_once('-')?;
        let own = self.keeper.as_ref().map_or_else(std::process::id, Keeper::process);
        (process.parse() == Ok(own)).then_some(id.parse::<u64>().ok()?)
    }

    /// A program came into possession of a placeholder.
    pub(crate) fn resume(&mut self, client: &ControlSocket, placeholder: Option<OwnedFd>) {
        let id = placeholder.and_then(|end| self.placeholders_id(&end));
        let memory = id.and_then(|id| self.connections.get(&id)?.memory.clone());
        match memory {
            Some(memory) => {
                self.tally.resumed += 1;
                let _ = client.send(&Answer::Channel.encode(), &[memory.as_fd()]);
            }
            None => _ = client.send(&Answer::Kernel { error: 0 }.encode(), &[]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A program with the library asks for its connection before it says anything.
    #[test]
    fn a_knock_has_ended_when_it_is_closed_and_when_the_program_that_accepted_it_speaks() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        for speaks in [true, false] {
            let knock = OwnedFd::from(TcpStream::connect(at).unwrap());
            let (mut accepted, _) = listener.accept().unwrap();
            assert!(!has_ended(&knock));
            if speaks {
                accepted.write_all(b"220 ready").unwrap();
            } else {
                drop(accepted);
            }
            let mut ready = [rustix::event::PollFd::new(&knock, rustix::event::PollFlags::IN)];
            assert_eq!(rustix::event::poll(&mut ready, None), Ok(1));
            assert!(has_ended(&knock), "speaks: {speaks}");
        }
    }
}
