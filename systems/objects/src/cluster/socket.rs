//! Transfers over a plain socket (spec section 3.2): the fallback where fabric cannot connect, in
//! large pieces, and the published system's protocol, in pieces of 4096 bytes, for comparison.
//!
//! One connection a transfer: a `PULL` header (word a: bytes of a piece), then a `DATA` header and
//! data and metadata in pieces of that size, one write each; or `GONE`.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use beeline_wire::checksum::crc32c;

use super::Shared;
use crate::client::Client;
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::transfer::{Header, Kind, Outcome};

const HEADER: usize = 80;
const ROOM: Duration = Duration::from_secs(10);
const LONGEST_PIECE: usize = 4 << 20;
/// How often the listener looks whether it should stop.
const NAP: Duration = Duration::from_millis(500);

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
            Ok((stream, _)) => {
                let shared = Arc::clone(shared);
                let name = "objects-socket-peer".to_owned();
                let spawned = std::thread::Builder::new().name(name).spawn(move || {
                    if let Err(error) = serve(&shared, stream) {
                        tracing::debug!(%error, "a socket transfer ended");
                    }
                });
                drop(spawned);
            }
            Err(_) => drop(poller.wait(Some(NAP))),
        }
    }
}

fn prepared(stream: &TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(shared.options.patience))?;
    stream.set_write_timeout(Some(shared.options.patience))
}

fn header(stream: &mut TcpStream) -> io::Result<Header> {
    let mut bytes = [0; HEADER];
    stream.read_exact(&mut bytes)?;
    Header::decode(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn serve(shared: &Shared, mut stream: TcpStream) -> io::Result<()> {
    prepared(&stream, shared)?;
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
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        prepared(&stream, shared)?;
        let words = [u64::from(piece_bytes), 0, 0, 0, 0, 0];
        stream.write_all(&Header::new(Kind::Pull, 1, id, words).encode())?;
        let sizes = header(&mut stream)?;
        match sizes.kind {
            Kind::Gone => return Ok(Outcome::Gone),
            Kind::Data => {}
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        let [size, metadata_size, ..] = sizes.words;
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
