//! Connections to other hosts: the relay that stands for the other ends, and what it was told of.
//!
//! The relay is a process of its own, so that a monitor's end breaks no connection. The monitor
//! starts it, keeps one connection to it (whose end tells each of the other's), and hands it every
//! connection without waiting for an answer.

use std::collections::HashMap;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use beeline_os::Mapping;
use beeline_os::control_socket::ControlSocket;
use beeline_sockets::control::Introduced;
use beeline_sockets::relayed::{Adopted, Request, relay_name};
use beeline_sockets::segment::{
    CLOSED_AT, HOLDERS, HOLDERS_AT, STATE_AT, STATE_GIVEN_UP, STATE_RETURNED, Segment, TAILS_AT,
};

use crate::hosts::Hosts;
use crate::pairing::{Refusal, exists, read_word, read_words};

/// Time between two tries to start a relay.
const STARTS: Duration = Duration::from_secs(1);
/// Segments kept for programs that change; the rest of the connections go on without.
const KEPT: usize = 4096;

/// How a relay is started.
#[derive(Clone, Debug)]
pub struct RelayProgram {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// Connections to other hosts.
#[derive(Clone, Debug)]
pub struct Elsewhere {
    /// Which.
    pub hosts: Hosts,
    /// What carries them; without it, one that runs already.
    pub relay: Option<RelayProgram>,
    /// Whether an address is this host's, however it is listed: [`is_here`].
    pub is_here: fn(IpAddr) -> bool,
}

/// True when this host has `address`: a program that was moved here brought its address along, which other
/// hosts' lists have elsewhere still. Only what is here can be bound to.
#[must_use]
pub fn is_here(address: IpAddr) -> bool {
    std::net::UdpSocket::bind(SocketAddr::new(address, 0)).is_ok()
}

/// A connection handed to the relay.
#[derive(Debug)]
struct Kept {
    memory: OwnedFd,
    connection: Adopted,
}

impl Kept {
    /// As with connections inside a host, what the program wrote is taken for a hint.
    fn is_over(&self) -> bool {
        read_word(&self.memory, CLOSED_AT[0]) != Some(0)
            || read_word(&self.memory, STATE_AT) == Some(STATE_GIVEN_UP)
            || !self.processes().any(exists)
    }

    /// Who asked for it, and who has it by now.
    fn processes(&self) -> impl Iterator<Item = i32> {
        let places = (0..HOLDERS).map(|place| HOLDERS_AT + 4 * place);
        let holders = places.filter_map(|place| read_word(&self.memory, place));
        let all = std::iter::once(self.connection.process).chain(holders);
        all.filter_map(|process| i32::try_from(process).ok()).filter(|process| *process > 0)
    }

    /// The kernel's again, or never anything else: who asks now is to get another.
    fn is_past(&self) -> bool {
        matches!(read_word(&self.memory, STATE_AT), Some(STATE_GIVEN_UP | STATE_RETURNED))
    }
}

#[derive(Debug)]
pub struct Relaying {
    elsewhere: Elsewhere,
    relay: Option<ControlSocket>,
    /// Whose zombie is ours to bury.
    child: Option<Child>,
    started: Option<Instant>,
    kept: HashMap<u64, Kept>,
    handed: u64,
}

impl Relaying {
    pub fn new(elsewhere: Elsewhere) -> Self {
        let mut relaying = Self {
            elsewhere,
            relay: None,
            child: None,
            started: None,
            kept: HashMap::new(),
            handed: 0,
        };
        // It listens for other hosts' relays from now on.
        let _ = relaying.reach();
        relaying
    }

    pub fn leads_to(&self, peer: SocketAddr) -> bool {
        self.elsewhere.hosts.has(peer.ip())
    }

    /// Nothing would carry it but the kernel's own TCP.
    pub fn is_left_over_tcp(&self, peer: SocketAddr) -> bool {
        self.elsewhere.hosts.is_left_over_tcp(peer.ip())
    }

    /// Readable when the relay ended.
    pub fn relay(&self) -> Option<BorrowedFd<'_>> {
        self.relay.as_ref().map(AsFd::as_fd)
    }

    /// The relay ended, or said what it has no reason to say.
    pub fn lost(&mut self) {
        self.relay = None;
    }

    /// Connections handed to the relay, so far.
    pub fn handed(&self) -> u64 {
        self.handed
    }

    pub fn kept(&self) -> u64 {
        self.kept.len() as u64
    }

    /// True while the relay is to be started or reached again.
    pub fn is_due(&self) -> bool {
        self.relay.is_none()
    }

    /// The connection to the relay, which is started if need be.
    fn reach(&mut self) -> std::io::Result<&ControlSocket> {
        if self.relay.is_none() {
            self.relay = match ControlSocket::connect(relay_name().as_bytes()) {
                Ok(relay) => Some(relay),
                Err(error) => {
                    self.start()?;
                    return Err(error);
                }
            };
            let uid = rustix::process::geteuid().as_raw();
            let known = |relay: &ControlSocket| {
                relay.peer().is_ok_and(|peer| peer.uid == uid || peer.uid == 0)
            };
            if !self.relay.as_ref().is_some_and(known) {
                self.relay = None;
            }
        }
        self.relay.as_ref().ok_or_else(|| std::io::ErrorKind::PermissionDenied.into())
    }

    fn start(&mut self) -> std::io::Result<()> {
        let Some(relay) = &self.elsewhere.relay else { return Ok(()) };
        if self.started.is_some_and(|started| started.elapsed() < STARTS) {
            return Ok(());
        }
        self.started = Some(Instant::now());
        if let Some(mut child) = self.child.take()
            && child.try_wait()?.is_none()
        {
            // It has not taken its name yet.
            self.child = Some(child);
            return Ok(());
        }
        use std::os::unix::process::CommandExt as _;
        let mut command = Command::new(&relay.program);
        command.args(&relay.arguments).current_dir("/").env_remove("LD_PRELOAD");
        // A group of its own: what ends the monitor from a terminal does not end the relay.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        tracing::info!(program = %relay.program.display(), "starting the relay");
        self.child = Some(command.spawn()?);
        Ok(())
    }

    /// Hands `socket` to the relay: the segment whose other end it will be.
    pub fn ask(
        &mut self,
        socket: &OwnedFd,
        connection: Adopted,
        fresh: impl FnOnce() -> Result<OwnedFd, Refusal>,
    ) -> Result<OwnedFd, Refusal> {
        if let Some(kept) = self.kept.get(&connection.cookie) {
            // The same socket asks again: the same answer.
            return Ok(kept.memory.try_clone()?);
        }
        let memory = fresh()?;
        let record = Request::Adopt(connection).encode();
        let with = [socket.as_fd(), memory.as_fd()];
        if self.reach()?.send(&record, &with).is_err() {
            // An old one's name, or a full queue.
            self.relay = None;
            self.reach()?.send(&record, &with)?;
        }
        self.handed += 1;
        if self.kept.len() >= KEPT {
            self.sweep();
        }
        if self.kept.len() < KEPT {
            let copy = memory.try_clone()?;
            self.kept.insert(connection.cookie, Kept { memory: copy, connection });
        }
        Ok(memory)
    }

    /// A socket asks anew, here or elsewhere: its old segment is not found any more.
    pub fn forget_past(&mut self, cookie: u64) {
        if self.kept.get(&cookie).is_some_and(Kept::is_past) {
            self.kept.remove(&cookie);
        }
    }

    /// The segment of a socket that was handed to the relay before.
    pub fn resume(&self, cookie: u64) -> Option<OwnedFd> {
        self.kept.get(&cookie)?.memory.try_clone().ok()
    }

    /// What went into the rings of the connections that are kept.
    pub fn traffic(&self) -> impl Iterator<Item = (Introduced, [u64; 2])> {
        self.kept.values().map(|kept| {
            (introduced(&kept.connection), TAILS_AT.map(|place| read_words(&kept.memory, place)))
        })
    }

    /// Forgets connections that are over.
    pub fn sweep(&mut self) {
        self.kept.retain(|_, kept| !kept.is_over());
    }

    /// Sees to it that there is a relay.
    pub fn keep_up(&mut self) {
        if let Some(child) = &mut self.child
            && !matches!(child.try_wait(), Ok(None))
        {
            self.child = None;
        }
        let _ = self.reach();
    }
}

/// As for connections inside a host; the other end's process is not known here.
pub fn introduced(connection: &Adopted) -> Introduced {
    Introduced {
        first: connection.own,
        first_process: connection.process,
        second: connection.peer,
        second_process: 0,
    }
}

/// Makes `memory` a relayed connection's segment.
pub fn format(memory: &OwnedFd, length: usize, connection: &Adopted) -> Result<(), Refusal> {
    let mapping = Mapping::shared_at(memory.as_fd(), 0, length)?;
    Segment::format_relayed(&mapping, connection.cookie, connection.process)
        .map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidInput, error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use beeline_sockets::segment::length_bytes;

    use super::*;

    #[test]
    fn a_connection_is_kept_as_long_as_a_process_that_has_it_lives() {
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
        Segment::format_relayed(&mapping, 7, ended.id()).unwrap();
        let memory = mapping.descriptor().unwrap().try_clone().unwrap();
        let place = "127.0.0.1:1".parse().unwrap();
        let connection = Adopted { cookie: 7, own: place, peer: place, process: ended.id() };
        let kept = Kept { memory, connection };
        assert!(kept.is_over());
        let segment = Segment::take(mapping, 0).unwrap();
        segment.holders().add(std::process::id());
        assert!(!kept.is_over());
    }
}
