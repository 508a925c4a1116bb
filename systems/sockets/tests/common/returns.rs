//! What the tests of the way back share.

use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use beeline_sockets::connection::{self, Connection};
use beeline_sockets::recall::{NotRecalled, recall};

use super::races::{give, pair, take};

pub fn of(stream: &TcpStream) -> &'static Connection {
    connection::find(stream.as_raw_fd()).unwrap()
}

pub fn back(streams: &[TcpStream; 2]) -> Result<(), NotRecalled> {
    back_by(streams, 0)
}

/// By a caller whose end is `own`. Where a thread that works on an end waits for a
/// processor for longer than a caller waits for it, once more.
pub fn back_by(streams: &[TcpStream; 2], own: usize) -> Result<(), NotRecalled> {
    let begun = Instant::now();
    loop {
        match back_once(streams, own) {
            Err(NotRecalled::Busy(_) | NotRecalled::Ringing)
                if begun.elapsed() < Duration::from_secs(20) => {}
            told => return told,
        }
    }
}

/// As [`back_by`]; called once.
pub fn back_once(streams: &[TcpStream; 2], own: usize) -> Result<(), NotRecalled> {
    let sockets = [own, 1 - own].map(|end| streams[end].as_fd());
    recall(&of(&streams[own]).segment, sockets, [Duration::from_secs(60); 2])
}

/// The byte at a place of a stream.
pub fn byte(seed: u64, place: u64) -> u8 {
    (place.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 7) as u8
}

/// A pair of which both ends have sent by their rings, and have read it.
pub fn switched() -> [TcpStream; 2] {
    let streams = pair();
    let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
    give(one, b"1", 0).unwrap();
    give(other, b"1", 0).unwrap();
    let mut bytes = [0; 8];
    assert_eq!((take(one, &mut bytes, 0), take(other, &mut bytes, 0)), (Ok(1), Ok(1)));
    streams
}
