//! Two programs that measure the connection between them, as any program would: with the library or
//! without.
//!
//! ```text
//! talk serve ADDRESS       until it is killed
//! talk ask ADDRESS         prints "round trip N us, sends N MB/s": medians of batches
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program of the lab's: it fails aloud"
)]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Batches of each kind, and of what.
const BATCHES: usize = 11;
const TRIPS: u32 = 25;
const SENDS: usize = 2;
const SEND_BYTES: usize = 1 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let address = arguments[2].as_str();
    match arguments[1].as_str() {
        "serve" => serve(&TcpListener::bind(address).unwrap()),
        _ => {
            let trip = round_trip(address).as_secs_f64() * 1e6 / f64::from(TRIPS);
            let rate = (SENDS * SEND_BYTES) as f64 / sends(address).as_secs_f64() / 1e6;
            println!("round trip {trip:.1} us, sends {rate:.1} MB/s");
        }
    }
}

fn serve(listener: &TcpListener) {
    loop {
        let mut peer = listener.accept().unwrap().0;
        peer.set_nodelay(true).unwrap();
        // The first byte says what is asked; who asks ends it.
        let mut kind = [0];
        if peer.read_exact(&mut kind).is_err() {
            continue;
        }
        let mut bytes = vec![0; if kind == *b"t" { 8 } else { SEND_BYTES }];
        let mut whole = 0_usize;
        while peer.read_exact(&mut bytes).is_ok() {
            whole += 1;
            if kind == *b"t" {
                peer.write_all(&bytes).unwrap();
            } else if whole.is_multiple_of(SENDS) {
                peer.write_all(b"!").unwrap();
            }
        }
    }
}

fn connect(address: &str, kind: &[u8]) -> TcpStream {
    let mut peer = TcpStream::connect(address).unwrap();
    peer.set_nodelay(true).unwrap();
    peer.write_all(kind).unwrap();
    peer
}

/// The median of batches, after two that are not counted: the connection finds its way first.
fn median(mut batch: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..BATCHES + 2)
        .map(|_| {
            let begun = Instant::now();
            batch();
            begun.elapsed()
        })
        .skip(2)
        .collect();
    times.sort();
    times[BATCHES / 2]
}

fn round_trip(address: &str) -> Duration {
    let mut peer = connect(address, b"t");
    let mut answer = [0; 8];
    median(|| {
        for number in 0..TRIPS {
            let asked = u64::from(number).to_le_bytes();
            peer.write_all(&asked).unwrap();
            peer.read_exact(&mut answer).unwrap();
            assert_eq!(answer, asked);
        }
    })
}

fn sends(address: &str) -> Duration {
    let mut peer = connect(address, b"s");
    let bytes = vec![7; SEND_BYTES];
    median(|| {
        (0..SENDS).for_each(|_| peer.write_all(&bytes).unwrap());
        peer.read_exact(&mut [0]).unwrap();
    })
}
