//! Transfers over a plain socket (spec section 3.2): the fallback where fabric cannot connect, in
//! large pieces, and the published system's protocol, in pieces of 4096 bytes, for comparison.
//!
//! One connection a transfer: a `PULL` header (word a: bytes of a piece), then a `DATA` header and
//! data and metadata in pieces of that size, one write each; or `GONE`.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use beeline_os::callers::{AfterFailure, after_failure};
use beeline_wire::checksum::crc32c;

use super::Shared;
use super::patience::{Bounded, ROOM};
use crate::client::Client;
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::transfer::{Header, Kind, Outcome};

const HEADER: usize = 80;
const LONGEST_PIECE: usize = 4 << 20;
/// How often the listener looks whether it should stop.
const NAP: Duration = Duration::from_millis(500);

/// Connections served at once; each has a thread, and a stranger may have one for [`FIRST_WORD`].
const MOST: u64 = 64;
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

fn serve(shared: &Shared, stream: TcpStream) -> io::Result<()> {
    let mut stream = Bounded::new(stream, shared.options.patience, FIRST_WORD)?;
    let client = shared.client().map_err(io::Error::other)?;
    let asked = header(&mut stream)?;
    if asked.kind != Kind::Pull {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let Ok(object) = client.get(asked.id, Duration::ZERO) else {
        let gone = Header::new(Kind::Gone, asked.number, asked.id, [0; 6]);
        return stream.write_all(&gone.encode());
    };
    let location = object.location();
    stream.expect(location.size.saturating_add(location.metadata_size));
    let checksum = Header::checksum_word(location.checksum);
    let words = [location.size, location.metadata_size, checksum, 0, 0, 0];
    stream.write_all(&Header::new(Kind::Data, asked.number, asked.id, words).encode())?;
    let piece = usize::try_from(asked.words[0]).unwrap_or(0).clamp(512, LONGEST_PIECE);
    let mut buffer = vec![0; piece];
    let mut at = 0;
    while at < location.size {
        let length = (location.size - at).min(piece as u64);
        let part = &mut buffer[..length as usize];
        object.read_at(at, part).map_err(io::Error::other)?;
        stream.write_all(part)?;
        at += length;
    }
    stream.write_all(&object.metadata())
}

/// Takes an object from the socket at `address`.
///
/// Errors: why not, in words.
pub(super) fn pull(
    client: &Client,
    address: &str,
    id: ObjectId,
    piece_bytes: u32,
    shared: &Shared,
) -> Result<Outcome, String> {
    let take = || -> io::Result<Outcome> {
        let mut addresses = address.to_socket_addrs()?;
        let address = addresses.next().ok_or(io::ErrorKind::NotFound)?;
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        let patience = shared.options.patience;
        let mut stream = Bounded::new(stream, patience, patience)?;
        let words = [u64::from(piece_bytes), 0, 0, 0, 0, 0];
        stream.write_all(&Header::new(Kind::Pull, 1, id, words).encode())?;
        let sizes = header(&mut stream)?;
        match sizes.kind {
            Kind::Gone => return Ok(Outcome::Gone),
            Kind::Data => {}
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        let [size, metadata_size, ..] = sizes.words;
        stream.expect(size.saturating_add(metadata_size));
        let mut buffer = match client.create_bare(id, size, metadata_size, ROOM) {
            Ok(buffer) => buffer,
            Err(ObjectsError::Exists { .. }) => return Ok(Outcome::Here),
            Err(error) => return Ok(Outcome::Failed(error.to_string())),
        };
        for piece in buffer.all_bytes_mut().chunks_mut(piece_bytes.max(512) as usize) {
            stream.read_exact(piece)?;
        }
        let expected = sizes.checksum();
        if expected.is_some_and(|expected| crc32c(buffer.all_bytes_mut()) != expected) {
            return Ok(Outcome::Failed("its bytes differ from its checksum".to_owned()));
        }
        buffer.seal_with(expected).map_err(io::Error::other)?;
        Ok(Outcome::Came { bytes: size + metadata_size, read: false })
    };
    take().map_err(|error| format!("{address}: {error}"))
}
