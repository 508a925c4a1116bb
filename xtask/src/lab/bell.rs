//! What QEMU's `ivshmem-doorbell` devices connect to: gives each guest a number, the memory they
//! share and a way to interrupt the others.
//!
//! Messages are 8-byte little-endian integers, some with a descriptor: the protocol's version (0),
//! the guest's number, -1 with the memory, each other guest's number with each of its eventfds, and last its
//! own number with its own. Who was there before is told of the new one; a number alone says that
//! its guest is gone.

use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Interrupts of each guest: for nine doorbells of sockets' connections through the window.
pub const VECTORS: usize = 9;

/// A window's server. Its thread ends with the program; each guest keeps what it was given.
#[derive(Debug)]
pub struct Server {
    socket: PathBuf,
}

#[derive(Debug)]
struct Peer {
    number: i64,
    stream: UnixStream,
    bells: Vec<OwnedFd>,
}

fn tell(stream: &UnixStream, word: i64, descriptor: Option<BorrowedFd<'_>>) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let bytes = word.to_le_bytes();
    sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Gives a guest another one's interrupts, or its own: one message for each.
fn introduce(stream: &UnixStream, peer: &Peer) -> std::io::Result<()> {
    peer.bells.iter().try_for_each(|bell| tell(stream, peer.number, Some(bell.as_fd())))
}

fn is_gone(stream: &UnixStream) -> bool {
    let mut stream = stream;
    matches!(stream.read(&mut [0; 8]), Ok(0))
}

/// Introduces a guest and those that are there to each other.
fn admit(peers: &mut Vec<Peer>, peer: Peer, memory: &OwnedFd) -> std::io::Result<()> {
    let (gone, here): (Vec<_>, Vec<_>) = peers.drain(..).partition(|peer| is_gone(&peer.stream));
    *peers = here;
    for old in peers.iter() {
        for left in &gone {
            let _ = tell(&old.stream, left.number, None);
        }
        let _ = introduce(&old.stream, &peer);
    }
    tell(&peer.stream, 0, None)?;
    tell(&peer.stream, peer.number, None)?;
    tell(&peer.stream, -1, Some(memory.as_fd()))?;
    for old in peers.iter() {
        introduce(&peer.stream, old)?;
    }
    introduce(&peer.stream, &peer)?;
    peer.stream.set_nonblocking(true)?;
    peers.push(peer);
    Ok(())
}

impl Server {
    /// Serves a window of `mebibytes` on a socket in `folder`.
    pub fn start(folder: &Path, mebibytes: u64) -> std::io::Result<Self> {
        let socket = folder.join("bell");
        let listener = UnixListener::bind(&socket)?;
        let memory = memfd_create("lab-window", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, mebibytes << 20)?;
        std::thread::spawn(move || {
            let mut peers = Vec::new();
            for (number, stream) in (0..).zip(listener.incoming().map_while(Result::ok)) {
                let bells = (0..VECTORS).map(|_| eventfd(0, EventfdFlags::CLOEXEC));
                let Ok(bells) = bells.collect() else { return };
                // One that hangs up meanwhile is not admitted.
                let _ = admit(&mut peers, Peer { number, stream, bells }, &memory);
            }
        });
        Ok(Self { socket })
    }

    /// Where guests connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
