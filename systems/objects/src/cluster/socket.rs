//! Transfers over a plain socket (spec section 3.2): the fallback where fabric cannot connect, in
//! large pieces, and the published system's protocol, in pieces of 4096 bytes, for comparison.
//!
//! A `PULL` header (word a: bytes of a piece) is answered by a `DATA` header and data and metadata in
//! pieces of that size, one write each, or, where pieces are large, from the object's own memory;
//! `FIN` ends the transfer. Or by `GONE`. The connection is kept for the next object.
//!
//! Each message wakes a thread, which then wants a processor that the bytes need: `DATA` leaves with the
//! first of them, and `FIN` once the object is sealed and those that wait for it were told.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use beeline_os::callers::{AfterFailure, after_failure};
use beeline_wire::checksum::crc32c;
use rustix::net::sockopt;

use super::Shared;
use super::patience::{Bounded, ROOM};
use crate::client::{Client, Object};
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::transfer::{Header, Kind, Outcome};

const HEADER: usize = 80;
const LONGEST_PIECE: usize = 4 << 20;
/// How often the listener looks whether it should stop.
const NAP: Duration = Duration::from_millis(500);

/// Connections served at once; each has a thread, and a stranger may have one for [`FIRST_WORD`].
const MOST: u64 = 256;
/// A connection over which objects went is kept so long for the next one.
const IDLE: Duration = Duration::from_secs(60);
/// An object of so few bytes is put in one call once they are all here.
const SMALL: u64 = 64 << 10;
/// While so many bytes come, the store wakes up.
const LAST_PART: usize = 128 << 10;
/// From pieces of this size on, a peer wants the object and not its pieces.
const WHOLE: usize = 64 << 10;
/// How long a connection may take to say what it wants.
const FIRST_WORD: Duration = Duration::from_secs(2);

/// Serves transfers until the manager stops.
pub(super) fn listen(shared: &Arc<Shared>, listener: &TcpListener) {
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    let mut poller = match beeline_os::poller::Poller::new(1) {
        Ok(poller) => poller,
        Err(error) => return tracing::warn!(%error, "no socket transfers are served"),
    };
    let _ = poller.add(listener, 0, beeline_os::poller::Interest::READ);
    while !shared.stops() {
        match listener.accept() {
            Ok((stream, _)) => start(shared, stream),
            Err(error) => match after_failure(&error) {
                AfterFailure::Sleep => drop(poller.wait(Some(NAP))),
                AfterFailure::Next => {}
                AfterFailure::MakeRoom => {
                    // The caller waits and keeps the listener readable: asking at once would be
                    // asking for ever.
                    tracing::warn!(%error, "callers of the object socket have to wait");
                    std::thread::sleep(NAP);
                }
            },
        }
    }
}

/// Serves one connection on a thread of its own; one too many is hung up on, and its peer takes
/// another holder or comes again.
fn start(shared: &Arc<Shared>, stream: TcpStream) {
    let count = |shared: &Shared| shared.figures.sockets.fetch_sub(1, Ordering::AcqRel);
    if shared.figures.sockets.fetch_add(1, Ordering::AcqRel) >= MOST {
        count(shared);
        return;
    }
    let of_thread = Arc::clone(shared);
    let spawned =
        std::thread::Builder::new().name("objects-socket-peer".to_owned()).spawn(move || {
            of_thread.settle_thread();
            if let Err(error) = serve(&of_thread, stream) {
                tracing::debug!(%error, "a socket transfer ended");
            }
            count(&of_thread);
        });
    if spawned.is_err() {
        count(shared);
    }
}

fn header(stream: &mut Bounded) -> io::Result<Header> {
    let mut bytes = [0; HEADER];
    stream.read_exact(&mut bytes)?;
    Header::decode(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Serves what a connection asks for, one object after the other.
fn serve(shared: &Shared, stream: TcpStream) -> io::Result<()> {
    // What was not sent when the connection is closed is not sent any more: a peer that was given up
    // finds it reset.
    sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    let mut stream = Bounded::new(stream, shared.options.patience, FIRST_WORD)?;
    let mut idle = FIRST_WORD;
    while stream.speaks(idle, || shared.stops())? {
        stream.within(FIRST_WORD);
        let asked = header(&mut stream)?;
        if asked.kind != Kind::Pull {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let client = shared.client().map_err(io::Error::other)?;
        match client.get(asked.id, Duration::ZERO) {
            Ok(object) => serve_one(shared, &object, &mut stream, &asked)?,
            Err(_) => {
                let gone = Header::new(Kind::Gone, asked.number, asked.id, [0; 6]);
                stream.write_all(&gone.encode())?;
            }
        }
        idle = IDLE;
    }
    Ok(())
}

/// Sends the object, and sees to it that the peer has it.
fn serve_one(
    shared: &Shared,
    object: &Object,
    stream: &mut Bounded,
    asked: &Header,
) -> io::Result<()> {
    let location = object.location();
    stream.expect(location.size.saturating_add(location.metadata_size));
    let checksum = Header::checksum_word(location.checksum);
    let words = [location.size, location.metadata_size, checksum, 0, 0, 0];
    // Together with the first bytes: a header alone would wake the peer before there is anything to take.
    let sizes = Header::new(Kind::Data, asked.number, asked.id, words).encode();
    if location.size + location.metadata_size > 0 {
        stream.write_ahead(&sizes)?;
    } else {
        stream.write_all(&sizes)?;
    }
    let piece = usize::try_from(asked.words[0]).unwrap_or(0).clamp(512, LONGEST_PIECE);
    let segment = shared.handle.segment(location.segment).filter(|_| piece >= WHOLE);
    if let Some(segment) = segment {
        // Metadata lies right behind the data.
        let total = location.size + location.metadata_size;
        stream.send_memory(&*segment, location.offset, total)?;
    } else {
        let mut buffer = vec![0; piece];
        let mut at = 0;
        while at < location.size {
            let length = (location.size - at).min(piece as u64);
            let part = &mut buffer[..length as usize];
            object.read_at(at, part).map_err(io::Error::other)?;
            stream.write_all(part)?;
            at += length;
        }
        stream.write_all(&object.metadata())?;
    }
    match header(stream)?.kind {
        Kind::Fin => Ok(()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A connection to a peer's socket, kept for the objects to come.
#[derive(Debug)]
pub(super) struct Wire {
    stream: Bounded,
    number: u32,
    /// Objects came over it.
    used: bool,
}

impl Wire {
    /// Connects to the socket at `address` within `connect`.
    ///
    /// Errors: the kernel's; an address that is none.
    pub(super) fn dial(address: &str, connect: Duration, patience: Duration) -> io::Result<Self> {
        let mut addresses = address.to_socket_addrs()?;
        let address = addresses.next().ok_or(io::ErrorKind::NotFound)?;
        let stream = TcpStream::connect_timeout(&address, connect)?;
        Ok(Self { stream: Bounded::new(stream, patience, patience)?, number: 0, used: false })
    }

    /// Whether its peer may have let it go since the last object.
    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// Takes an object in pieces of so many bytes. With an outcome, whether the connection can be used
    /// again.
    ///
    /// Errors: the connection is over.
    pub(super) fn pull(
        &mut self,
        client: &Client,
        id: ObjectId,
        piece_bytes: u32,
        patience: Duration,
    ) -> io::Result<(Outcome, bool)> {
        let stream = &mut self.stream;
        stream.within(patience);
        self.number = self.number.wrapping_add(1);
        let words = [u64::from(piece_bytes), 0, 0, 0, 0, 0];
        stream.write_all(&Header::new(Kind::Pull, self.number, id, words).encode())?;
        let sizes = header(stream)?;
        match sizes.kind {
            Kind::Gone => return Ok((Outcome::Gone, true)),
            Kind::Data => {}
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        self.used = true;
        let [size, metadata_size, ..] = sizes.words;
        let total = size.saturating_add(metadata_size);
        stream.expect(total);
        let expected = sizes.checksum();
        let fin = Header::new(Kind::Fin, self.number, id, [1, 0, 0, 0, 0, 0]).encode();
        let damaged = || Outcome::Failed("its bytes differ from its checksum".to_owned());
        if total <= SMALL {
            let mut bytes = vec![0; total as usize];
            for piece in bytes.chunks_mut(piece_bytes.max(512) as usize) {
                stream.read_exact(piece)?;
            }
            stream.check()?;
            let outcome = if expected.is_some_and(|expected| crc32c(&bytes) != expected) {
                damaged()
            } else {
                match client.put_bare(id, &bytes, size, expected, ROOM) {
                    Ok(()) => Outcome::Came { bytes: total, read: false },
                    Err(ObjectsError::Exists { .. }) => Outcome::Here,
                    Err(error) => Outcome::Failed(error.to_string()),
                }
            };
            return Ok((outcome, stream.write_all(&fin).is_ok()));
        }
        // Without the object's bytes, which are on their way, nothing else can follow.
        let mut buffer = match client.create_bare(id, size, metadata_size, ROOM) {
            Ok(buffer) => buffer,
            Err(ObjectsError::Exists { .. }) => return Ok((Outcome::Here, false)),
            Err(error) => return Ok((Outcome::Failed(error.to_string()), false)),
        };
        let bytes = buffer.all_bytes_mut();
        let early = bytes.len().saturating_sub(LAST_PART);
        let (first, last) = bytes.split_at_mut(early);
        for piece in first.chunks_mut(piece_bytes.max(512) as usize) {
            stream.read_exact(piece)?;
        }
        // The store wakes up for the seal while the last part comes.
        client.rouse();
        for piece in last.chunks_mut(piece_bytes.max(512) as usize) {
            stream.read_exact(piece)?;
        }
        // Before the seal: the sender may have given the transfer up.
        stream.check()?;
        let outcome = if expected.is_some_and(|expected| crc32c(buffer.all_bytes_mut()) != expected)
        {
            damaged()
        } else {
            buffer.seal_with(expected).map_err(io::Error::other)?;
            Outcome::Came { bytes: total, read: false }
        };
        // After it: the sender's thread would wake while the object is waited for here.
        Ok((outcome, stream.write_all(&fin).is_ok()))
    }
}
